//! State plane of Shoal: who is alive, and what do they say of themselves.
//!
//! ```text
//!   Gossip::publish ─┐                                        ┌─> view: ClusterView
//!   update_facts ────┤                                        ├─> health, seeds
//!                    v                                        │
//!               ┌─ shell: one task, restarts, goodbye, seeds ─┴─ roster: what is believed ─┐
//!               │                                                                          │
//!               v                                                                          │
//!            chitchat  (membership, heartbeats, reconciliation: V1, 11-character names) ───┘
//!               │
//!            transport (loopback tap around the library's codec)
//!               │
//!              seal    (ChaCha20-Poly1305 under the cluster key, replay window, time check)
//!               │
//!           DatagramIo (UDP, shared with the QUIC endpoint of the stream plane)
//! ```
//!
//! * The cluster key is the border: whoever holds it is believed, nobody else is heard.
//! * Liveness has one owner, the gossip's failure detector; a row exists exactly as long as it says so,
//!   or until the node says goodbye or a later life replaces it.
//! * The view is for choosing candidates. It is about two intervals old; decisions are made on the
//!   numbers that messages between nodes carry.
//! * Everything runs on a [`GossipThread`] of its own, so that a stalled engine is not taken for a death.
//!
//! Deliberately absent: cores ([`seal`](Framing), roster, seed book) read no clock, draw no entropy and do not
//! await; libraries log at debug and trace only, and the gossip library's own warnings
//! (target `chitchat`) are best filtered to errors.
//!
//! Known gaps, all of them in what a *holder of the key* can do, since the gossip library relays records of third
//! parties and its messages cannot be looked into: it can speak for any node, fill the digest with made-up
//! nodes, bloat its own record, send a message that unpacks to some hundred megabytes for a moment, and make
//! the library panic (the task starts again, at most eight times in a row). Clocks of hosts must agree within
//! [`MAX_CLOCK_SKEW`]. Two nodes that start in the same millisecond beyond the limit of the mesh are ordered
//! by name; a burst of newcomers can pass the limit for the second or two until they learn of each other.

// Vocabulary.
mod clock;
mod io;
mod limits;
mod quantity;
mod summary;
mod time;
mod types;
mod view;

// From the wire up.
mod keys;
mod seal;
mod stats;
mod transport;

// What is said, what is believed, whom to ask.
mod roster;
mod seeds;
mod wire;

// The shell.
mod config;
mod health;
mod shell;

// For tests.
#[cfg(any(test, feature = "testing"))]
mod memory;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use clock::{MonotonicClock, unix_time};
pub use config::{ConfigError, GossipConfig};
pub use health::Health;
pub use io::{DatagramIo, MAX_DATAGRAM};
pub use keys::{ClusterKey, KeyError, KeyRing, MAX_KEYS};
pub use limits::{MAX_NODES, MAX_NODES_IPV6};
#[cfg(any(test, feature = "testing"))]
pub use memory::{MemoryIo, MemoryNet};
pub use quantity::{BlockSize, Blocks, ByteCount, Tokens};
pub use seal::{
    Framing, MAX_CLOCK_SKEW, MAX_SEALED_MESSAGE, OpenError, SEAL_OVERHEAD, SealError, Sealer,
    SenderId,
};
pub use seeds::{MAX_SEEDS, Seed, SeedError, SeedList, SeedState};
pub use shell::{Gossip, GossipError, GossipThread, ThreadStuck};
pub use stats::GossipStats;
pub use summary::{LoadBasis, LoadSummary, ModelApi, ModelFacts, NodeFacts, Readiness, Role};
pub use time::{Clock, Timestamp};
pub use types::{Epoch, Incarnation, NodeId, ParseIdError, RequestId};
pub use view::{ClusterView, NodeRow};
pub use wire::FactsError;
