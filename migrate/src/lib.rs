//! Hand-over: moving a running request, KV and all, from a source host to a target host.
//!
//! This crate holds the words and errors of a hand-over, the session cores of source, target and home
//! ([`session`]), and the carriers of its bytes ([`transfer`]). Nodes drive the cores and give them engines.
//!
//! One hand-over, from the source's rescheduler to the freed blocks:
//!
//! ```text
//! source S                         target T                       home H
//!   │ propose(size, form of KV) ──▶ │                               │
//!   │ ◀────── accept(lease)         │  blocks reserved              │
//!   │ stage 0: KV [0, n0) ────────▶ │                               │
//!   │   … decoding goes on …        │                               │
//!   │ stage k: KV [nk-1, nk) ─────▶ │                               │
//!   │ pause at a step boundary      │                               │
//!   │ last stage, ids, index ─────▶ │ import                        │
//!   │                               │ claim(request, epoch + 1) ──▶ │ compares, raises the epoch once
//!   │                               │ ◀────────── granted, from i   │
//!   │ ◀──────────────── committed   │ runs on, from output i        │
//!   │ frees its blocks              │ ◀──────── opens its stream    │
//! ```
//!
//! | state of the move | the request runs at | blocks held at S | blocks held at T |
//! |---|---|---|---|
//! | proposed | S | all | none |
//! | copying | S | all | reserved |
//! | paused | nowhere | all | reserved |
//! | claimed | T | all, until *committed* | all |
//! | done | T | none | all |
//! | cancelled | S | all | none |
//!
//! The home is the only arbiter of who owns a request. Doubt is resolved by asking it, never by guessing.

mod buffers;
mod error;
pub mod session;
pub mod transfer;
mod types;

pub use buffers::Buffers;
pub use error::{MigrateError, Retry};
pub use types::{
    ClaimAnswer, CopyManner, CopyMode, KvRange, MigrationId, MoveReason, MoveRefusal, Proposal,
    ProposalAnswer, SessionLimits, StageIndex,
};
