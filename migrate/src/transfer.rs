//! Moving the bytes of a hand-over: one trait, several carriers.
//!
//! A hand-over is a row of parcels: the opening (the request itself, before any KV), the copy stages, and the last
//! stage with the state that the request goes on with. A carrier takes parcels to a node and says when the other
//! side has taken each whole; it knows nothing of sessions. Carriers differ in capabilities, and both ends agree on
//! one at the proposal.

#[cfg(any(test, feature = "testing"))]
pub mod contract;
mod ends;
#[cfg(any(test, feature = "testing"))]
pub mod faulty;
pub mod memory;
pub mod quic;
pub mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shoal_gossip::NodeId;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::DropGuard;

use crate::{KvRange, MigrationId, StageIndex};

/// What a parcel carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ParcelKind {
    /// The request: prompt, parameters, output so far. No KV.
    Opening,
    /// KV of a range of tokens, copied while the request runs on.
    Stage(KvRange),
    /// What the request goes on with, and the KV that the target has not got; `None` when it has all.
    Last(Option<KvRange>),
}

/// What goes ahead of a parcel's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ParcelHeader {
    /// Which hand-over.
    pub migration: MigrationId,
    /// Which stage of it. The opening has the number of the first stage.
    pub stage: StageIndex,
    /// What it carries.
    pub kind: ParcelKind,
    /// Bytes of `head`.
    pub head_bytes: u32,
    /// Bytes of `body`.
    pub body_bytes: u64,
}

impl ParcelHeader {
    /// Bytes that travel: head and body.
    pub fn bytes(&self) -> u64 {
        u64::from(self.head_bytes).saturating_add(self.body_bytes)
    }
}

/// Bytes of a parcel's head at most. It holds what a submission to a node may hold (24 MiB: the largest client
/// body, and the prompt and output ids of the longest context), and a third more for the text and the state
/// that go with it.
pub const MAX_HEAD_BYTES: u32 = 32 << 20;

/// A parcel. Its bytes are shared, not copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// What goes ahead.
    pub header: ParcelHeader,
    /// Small structured data: the opening's or the last stage's state.
    pub head: Bytes,
    /// KV bytes.
    pub body: Bytes,
}

impl Parcel {
    /// Puts a parcel together; the header's lengths are those of the parts.
    pub fn new(
        migration: MigrationId,
        stage: StageIndex,
        kind: ParcelKind,
        head: Bytes,
        body: Bytes,
    ) -> Self {
        Self {
            header: ParcelHeader {
                migration,
                stage,
                kind,
                head_bytes: u32::try_from(head.len()).unwrap_or(u32::MAX),
                body_bytes: body.len() as u64,
            },
            head,
            body,
        }
    }

    /// Bytes that travel: head and body.
    pub fn bytes(&self) -> u64 {
        self.header.bytes()
    }

    /// Whether a carrier that takes `max` bytes a parcel takes this one.
    fn check(&self, max: u64) -> Result<(), TransferError> {
        let bytes = self.bytes();
        if bytes > max {
            return Err(TransferError::TooLong { bytes, max });
        }
        let head = self.head.len() as u64;
        if head > u64::from(MAX_HEAD_BYTES) {
            let max = MAX_HEAD_BYTES.into();
            return Err(TransferError::TooLong { bytes: head, max });
        }
        Ok(())
    }
}

/// What a carrier can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferCapabilities {
    /// Its name, for the proposal and for metrics.
    pub name: &'static str,
    /// Bytes of one parcel at most.
    pub max_parcel_bytes: u64,
    /// Parts of a parcel that travel at once.
    pub streams: u32,
    /// Whether it moves device memory without a copy through the host.
    pub device_memory: bool,
}

/// Why a parcel did not arrive. The target has dropped what it had of it, or will when its lease ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// No current record names the node.
    #[error("node {0} is not in the mesh")]
    UnknownNode(NodeId),
    /// It could not be reached, or refused us.
    #[error("node {node} cannot be reached: {reason}")]
    Unreachable {
        /// Which.
        node: NodeId,
        /// For the log.
        reason: String,
    },
    /// The parcel is longer than the carrier takes.
    #[error("a parcel of {bytes} bytes is longer than the {max} allowed")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The bound.
        max: u64,
    },
    /// The other side does not want it.
    #[error("the target rejected it: {0}")]
    Rejected(Rejection),
    /// The connection broke, or went silent, on the way. The parcel may have arrived.
    #[error("the transfer broke: {0}")]
    Broken(String),
    /// This side cancelled it. The parcel may have arrived.
    #[error("cancelled")]
    Cancelled,
}

/// Why the receiving side does not take a parcel. It keeps nothing of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Rejection {
    /// No such hand-over was accepted from this node, or it is over.
    #[error("no such hand-over")]
    Unknown,
    /// More bytes than were announced in the proposal, or more than can be held now.
    #[error("too many bytes")]
    TooLarge,
    /// A checksum does not match what arrived.
    #[error("damaged on the way")]
    Damaged,
    /// It does not follow what came before, or its content is wrong.
    #[error("{0}")]
    Wrong(String),
}

/// How far a parcel is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes handed to the network so far.
    pub sent: u64,
    /// Bytes in all.
    pub total: u64,
}

/// What came of a parcel that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// Its bytes.
    pub bytes: u64,
    /// From submission to the other side's acknowledgement.
    pub took: Duration,
}

/// A parcel under way. Dropping it cancels.
#[derive(Debug)]
pub struct Transfer {
    outcome: oneshot::Receiver<Result<Delivered, TransferError>>,
    progress: watch::Receiver<Progress>,
    cancel: DropGuard,
}

impl Transfer {
    /// For carriers: the ends that its task keeps are the sender of the outcome, the sender of the progress, and
    /// the token whose guard this is.
    pub fn new(
        outcome: oneshot::Receiver<Result<Delivered, TransferError>>,
        progress: watch::Receiver<Progress>,
        cancel: DropGuard,
    ) -> Self {
        Self {
            outcome,
            progress,
            cancel,
        }
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        *self.progress.borrow()
    }

    /// Gives it up. What the other side has of it is dropped, unless it was whole already.
    pub fn cancel(self) {
        drop(self.cancel);
    }

    /// Waits until the other side has taken the parcel whole, or it failed. Safe to drop, which cancels.
    ///
    /// # Errors
    /// See [`TransferError`].
    pub async fn delivered(self) -> Result<Delivered, TransferError> {
        let Self {
            outcome, cancel, ..
        } = self;
        let result = outcome
            .await
            .unwrap_or_else(|_| Err(TransferError::Broken("the carrier has stopped".to_owned())));
        drop(cancel);
        result
    }
}

/// Carries parcels to other nodes.
///
/// Parcels of one hand-over may be submitted before the former is delivered; their order is the receiver's to
/// check. Several hand-overs go on at once and share the bandwidth.
pub trait KvTransfer: Send + Sync + fmt::Debug {
    /// What it can do. Fixed while it runs.
    fn capabilities(&self) -> TransferCapabilities;

    /// Begins to carry a parcel. Never waits.
    fn submit(&self, to: NodeId, parcel: Parcel) -> Transfer;
}

/// Takes in what other nodes send.
#[async_trait]
pub trait KvReceiver: Send + Sync + fmt::Debug {
    /// Whether a parcel is wanted; asked before memory is taken for its bytes. `from` is authenticated.
    ///
    /// # Errors
    /// Goes back to the sender; none of the bytes is read.
    fn admit(&self, from: NodeId, header: &ParcelHeader) -> Result<(), Rejection>;

    /// Takes in a whole parcel whose checksums hold. The sender's `delivered` returns when this does, so a
    /// receiver that is slow to take in paces its sender.
    ///
    /// # Errors
    /// Goes back to the sender.
    async fn deliver(&self, from: NodeId, parcel: Parcel) -> Result<(), Rejection>;
}

/// A receiver that a carrier was given.
pub type Receiver = Arc<dyn KvReceiver>;
