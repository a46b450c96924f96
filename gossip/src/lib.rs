//! State plane of Shoal: who is alive, and what do they say of themselves.
//!
//! ```text
//!  socket ──▶ seal ──▶ gossip library ──▶ table ──▶ view ──▶ policies
//!    ▲      (keys)   (chitchat, loopback           (immutable, an age per row,
//!    └──────────────  tap as its codec)             on a watch channel)
//! ```
//!
//! chitchat owns membership and failure detection; everything around it is here: the seal of every
//! datagram, seeds that are resolved again and again, bounded and checked records, and the view. It runs
//! on a thread of its own ([`GossipThread`]). Nothing here decides where work goes.
//!
//! The crate is also the home of the words everybody uses: identities, quantities, time.

mod clock;
mod config;
mod io;
mod keys;
mod limits;
#[cfg(any(test, feature = "testing"))]
mod memory;
mod quantity;
mod seal;
mod seeds;
mod shell;
mod stats;
mod summary;
mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod time;
mod transport;
mod types;
mod view;
mod wire;

pub use clock::{MonotonicClock, unix_time};
pub use config::{ConfigError, GossipConfig};
pub use io::{DatagramIo, MAX_DATAGRAM};
pub use keys::{ClusterKey, KeyError, KeyRing};
pub use limits::MAX_NODES;
#[cfg(any(test, feature = "testing"))]
pub use memory::{MemoryIo, MemoryNet};
pub use quantity::{BlockSize, Blocks, ByteCount, Tokens};
pub use seal::{OpenError, SealError};
pub use seeds::{MAX_SEEDS, Seed, SeedError, SeedList, SeedState};
pub use shell::{Gossip, GossipError, GossipHealth, GossipStart, GossipThread};
pub use stats::GossipStats;
pub use summary::{LoadSummary, ModelFacts, NodeFacts, Readiness, Role};
pub use time::{Clock, Timestamp};
pub use types::{Epoch, Incarnation, NodeId, ParseIdError, RequestId};
pub use view::{ClusterView, NodeRow};
pub use wire::FactsError;
