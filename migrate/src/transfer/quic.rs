//! The carrier for hosts without anything better: parcels over QUIC, by way of host memory.
//!
//! A parcel has a stream to and fro, and more streams for the parts of a long body (see `wire`). The receiver is asked for
//! each parcel before any of its bytes is read, takes room for it out of a budget over all peers, and answers on
//! the same stream once it has taken the parcel in. Nothing is kept of a parcel that does not get there whole.
//!
//! ```text
//! sender                                       receiver
//!   │ Opening, head, part 0 ───────────────────▶ │ admit? room?
//!   │ ◀──────────────────────────────── Admitted │
//!   │ part 1 … part n, on streams of their own ▶ │ checksums
//!   │ ◀─────────────────────── Taken or Rejected │ deliver
//! ```
//!
//! - Part 0 does not wait for *Admitted*, so a short parcel costs no round trip more than its own.
//! - Nothing is copied on the way out. On the way in bytes are copied once, from packets into one
//!   piece of memory.
//! - Cancelling resets the streams. A parcel that was whole by then gets in all the same.
//! - Who waits for room, or for the receiver, is held up by QUIC's flow control, in its own memory.

mod receive;
mod send;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use quinn::VarInt;
use shoal_gossip::NodeId;

pub use receive::QuicReceiver;
pub use send::QuicTransfer;

use crate::transfer::wire::{PREFIX_BYTES, WireError, decode, rest_of};

/// Stream code: this parcel is given up.
const CODE_GIVEN_UP: VarInt = VarInt::from_u32(1);

/// Bounds of the carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuicLimits {
    /// Bytes of one parcel at most.
    pub max_parcel_bytes: u64,
    /// Streams that one parcel travels on at most.
    pub parts: u32,
    /// A body has another part for each so many bytes.
    pub part_bytes: u64,
    /// Bytes of parcels that may be in memory at once, over all peers, until the receiver has taken them in.
    /// A parcel longer than this is rejected.
    pub receive_bytes: u64,
    /// Parcels of one peer that are read at once; more wait at the peer.
    pub parcels_per_peer: usize,
    /// How long a transfer may make no headway on either side. A receiver that takes longer than this to
    /// take one parcel in has the sender give up on it.
    pub patience: Duration,
}

impl Default for QuicLimits {
    /// A stage of 1,024 tokens has 512 MiB where a token has 512 KiB of KV (7B without grouped heads, 16 bits), and
    /// twice that is a parcel. The budget holds two such. Sessions give up by themselves after 6 s of a stage, or 20 ms a token where
    /// the receiver prefills (8,192 tokens: 164 s); the patience is only for what nobody waits for any more.
    fn default() -> Self {
        Self {
            max_parcel_bytes: 1 << 30,
            parts: 4,
            part_bytes: 8 << 20,
            receive_bytes: 2 << 30,
            parcels_per_peer: 64,
            patience: Duration::from_secs(180),
        }
    }
}

/// A connection that parcels go over.
pub struct BulkLink {
    /// It is admitted on both sides, and the other side serves it with [`QuicReceiver::serve`].
    pub connection: quinn::Connection,
    /// Held while the connection is in use.
    pub user: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for BulkLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BulkLink")
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// No current record names the node.
    #[error("it is not in the mesh")]
    Unknown,
    /// It could not be reached, or refused us.
    #[error("{0}")]
    Unreachable(String),
}

/// Finds the connection to a node.
#[async_trait]
pub trait BulkLinks: Send + Sync + fmt::Debug {
    /// The connection to a node, made if there is none; within seconds. Safe to drop.
    ///
    /// # Errors
    /// See [`LinkError`].
    async fn connect(&self, to: NodeId) -> Result<BulkLink, LinkError>;
}

/// Why a message could not be read.
enum MessageError {
    /// The stream or its connection has ended.
    Gone(String),
    /// What came is wrong.
    Wire(WireError),
}

async fn read_message<T: serde::de::DeserializeOwned>(
    stream: &mut quinn::RecvStream,
) -> Result<T, MessageError> {
    let gone = |error: quinn::ReadExactError| MessageError::Gone(error.to_string());
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).await.map_err(gone)?;
    let mut rest = vec![0; rest_of(prefix).map_err(MessageError::Wire)?];
    stream.read_exact(&mut rest).await.map_err(gone)?;
    decode(prefix, &rest).map_err(MessageError::Wire)
}

/// A stream that is given up when dropped: the other side sees a reset, not an end.
struct Outgoing(quinn::SendStream);

impl Drop for Outgoing {
    fn drop(&mut self) {
        // A stream whose end has arrived cannot be given up any more.
        drop(self.0.reset(CODE_GIVEN_UP));
    }
}

/// Shared by the carrier's tasks.
type Links = Arc<dyn BulkLinks>;

#[cfg(test)]
mod tests;
