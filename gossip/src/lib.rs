//! State plane of Shoal: who is alive, and what do they say of themselves.

mod clock;
mod io;
mod quantity;
mod summary;
mod time;
mod types;
mod view;

pub use clock::{MonotonicClock, unix_time};
pub use io::{DatagramIo, MAX_DATAGRAM};
pub use quantity::{BlockSize, Blocks, ByteCount, Tokens};
pub use summary::{LoadSummary, ModelFacts, NodeFacts, Readiness, Role};
pub use time::{Clock, Timestamp};
pub use types::{Epoch, Incarnation, NodeId, ParseIdError, RequestId};
pub use view::{ClusterView, NodeRow};
