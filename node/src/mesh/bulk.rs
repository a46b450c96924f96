//! The bulk plane: KV bytes between nodes, on the endpoint of the stream plane.
//!
//! It shares the port, the identity checks and the pool of connections with token streams, but has connections of its own
//! under its own ALPN: on one connection, bulk takes the 99th percentile of anything quick from 6 to 631 ms
//! (measured). Who sends dials. A node that leaves the view loses its connections at once.
//!
//! Windows, each on the side that receives:
//!
//! | what | bytes | why |
//! |---|---|---|
//! | a stream of KV | `STREAM_WINDOW` | 10 Gb/s × 3 ms, a busy local network |
//! | a connection with KV | `RECEIVE_WINDOW` | the same for a short queue of parcels; 1 Gb/s × 64 ms |
//! | a stream of replies | `REPLY_WINDOW` | a hundred of the longest |

use async_trait::async_trait;
use quinn::{Connection, TransportConfig, VarInt};
use shoal_gossip::NodeId;
use shoal_migrate::transfer::Receiver;
use shoal_migrate::transfer::quic::{BulkLink, BulkLinks, LinkError, QuicLimits};
#[cfg(test)]
use shoal_migrate::transfer::{KvReceiver, Parcel, ParcelHeader, Rejection};
use std::sync::Arc;

use crate::mesh::socket::BULK_MTU;
use crate::mesh::stream::dial::Pool;
use crate::mesh::stream::transport::{KEEP_ALIVE, transport};

/// Bytes that a sender may be ahead on one stream: 1.25 GB/s × 3 ms.
pub(super) const STREAM_WINDOW: u32 = 4 << 20;

/// Bytes that a sender may be ahead on one connection. More only built a queue (measured: with 32 MiB, round
/// trips of 28 ms and more, and less throughput). It is what one peer holds in our memory beside the budget.
const RECEIVE_WINDOW: u32 = 8 << 20;

/// Bytes of replies that the receiver may be ahead on one stream.
const REPLY_WINDOW: u32 = 64 * 1024;

/// Streams of parts at once: all those of as many parcels as the receiver reads at once.
fn part_streams() -> VarInt {
    let limits = QuicLimits::default();
    let parcels = u32::try_from(limits.parcels_per_peer).unwrap_or(u32::MAX);
    parcels.saturating_mul(limits.parts).into()
}

/// What a node does with KV that others send, and how.
#[derive(Debug)]
pub struct Bulk {
    /// Takes it in.
    pub receiver: Receiver,
    /// Bounds, both ways.
    pub limits: QuicLimits,
    /// Longest packet that is tried on the way out, in bytes; 8,952 at most. Discovery finds what fits the path.
    pub mtu: u16,
}

impl Bulk {
    /// Everything at its default.
    pub fn new(receiver: Receiver) -> Self {
        Self {
            receiver,
            limits: QuicLimits::default(),
            mtu: BULK_MTU,
        }
    }

    /// Takes nothing in.
    #[cfg(test)]
    pub(crate) fn nothing() -> Self {
        Self::new(Arc::new(TakesNothing))
    }
}

/// Rejects every parcel.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
struct TakesNothing;

#[cfg(test)]
#[async_trait]
impl KvReceiver for TakesNothing {
    fn admit(&self, _: NodeId, _: &ParcelHeader) -> Result<(), Rejection> {
        Err(Rejection::Unknown)
    }

    async fn deliver(&self, _: NodeId, _: Parcel) -> Result<(), Rejection> {
        Err(Rejection::Unknown)
    }
}

/// The sender's side: it opens streams, and takes nothing but replies and the greeting.
pub(super) fn client_transport(mtu: u16) -> TransportConfig {
    let mut transport = transport(mtu.min(BULK_MTU));
    transport
        .keep_alive_interval(Some(KEEP_ALIVE))
        .stream_receive_window(REPLY_WINDOW.into())
        .receive_window(RECEIVE_WINDOW.into())
        .max_concurrent_bidi_streams(0u32.into())
        .max_concurrent_uni_streams(1u32.into());
    transport
}

/// Opens a connection that was accepted for bulk to more than requests need.
pub(super) fn widen(connection: &Connection) {
    connection.set_receive_window(RECEIVE_WINDOW.into());
    connection.set_max_concurrent_uni_streams(part_streams());
}

/// The pool, as the carrier sees it.
#[derive(Debug)]
pub(super) struct Links(Arc<Pool>);

impl Links {
    pub(super) fn new(pool: Arc<Pool>) -> Self {
        Self(pool)
    }
}

#[async_trait]
impl BulkLinks for Links {
    async fn connect(&self, to: NodeId) -> Result<BulkLink, LinkError> {
        let host = self.0.find(to).ok_or(LinkError::Unknown)?;
        let link = self.0.link(host).await.map_err(LinkError::Unreachable)?;
        Ok(BulkLink {
            connection: link.connection,
            user: Box::new(link.user),
        })
    }
}

#[cfg(test)]
mod tests;
