//! Hand-over: moving a running request, KV and all, from a source host to a target host.
//!
//! This crate holds the words and the errors of a hand-over. The session cores of source and target,
//! the `KvTransfer` trait and its transports are built on them next; until then no request moves, and
//! nodes say so in their capabilities (`kv_export = false`).
//!
//! One hand-over, from the source's rescheduler to the freed blocks:
//!
//! ```text
//! source S                         target T                       home H
//!   │ propose(size, growth) ──────▶ │                               │
//!   │ ◀────── accept(reservation)   │  blocks reserved under lease  │
//!   │ stage 0: KV [0, n0) ────────▶ │                               │
//!   │   … decoding goes on …        │                               │
//!   │ stage k: KV [nk-1, nk) ─────▶ │                               │
//!   │ pause at a step boundary      │                               │
//!   │ last stage, sampler, index ─▶ │ import                        │
//!   │                               │ claim(request, epoch + 1) ──▶ │ compares, raises the epoch once
//!   │                               │ ◀─────────────── granted      │
//!   │ ◀──────────────── committed   │ runs on                       │
//!   │ frees its blocks              │                               │
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

mod error;
mod types;

pub use error::{MigrateError, Retry};
pub use types::{Growth, KvRange, MigrationId, StageIndex};
