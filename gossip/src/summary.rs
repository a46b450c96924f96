//! What a node says of itself: slow facts and fast load.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::quantity::{BlockSize, Blocks, Tokens};
use crate::types::{Incarnation, NodeId};

/// Whether a node takes new work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Readiness {
    /// The engine is still loading: not a candidate.
    #[default]
    Starting,
    /// Takes work.
    Ready,
    /// Finishes what it has, takes nothing new: freeness is −∞.
    Draining,
    /// The engine failed: not a candidate.
    Failed,
}

/// Where the figures of a load come from. Unknown is never told as idle: what an engine does not tell is estimated from
/// what this node itself sent there, and says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LoadBasis {
    /// Counted by the engine in this process.
    #[default]
    Exact,
    /// Asked of an engine beside the node some hundred milliseconds ago, and corrected by what was sent there since.
    Polled,
    /// The engine does not tell its KV use: only what this node sent there, against a capacity that may be assumed.
    Estimated,
}

/// Load of one node at one moment, as the node itself counted it.
///
/// Travels as one packed gossip key and on every control message. Newer is decided by
/// (`incarnation`, `seq`), never by arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadSummary {
    /// The life of the node that made this.
    pub incarnation: Incarnation,
    /// Raised by one for each summary the node makes, whatever it is sent on.
    pub seq: u64,
    /// Whether the node takes work.
    pub readiness: Readiness,
    /// KV blocks the engine has. `total = used + reserved + free`, always.
    pub total: Blocks,
    /// KV blocks held by running requests.
    pub used: Blocks,
    /// KV blocks promised to accepted offers and to hand-overs that have not arrived.
    pub reserved: Blocks,
    /// KV blocks that the queued requests will need to start, together.
    pub queued_demand: Blocks,
    /// KV blocks that the first queued request needs to start; zero when none waits.
    pub head_of_line: Blocks,
    /// Requests that hold KV.
    pub running: u32,
    /// Requests that wait for KV.
    pub queued: u32,
    /// Requests that the queue still has room for.
    pub queue_room: u32,
    /// Prompt tokens accepted and not yet prefilled, of running and queued requests.
    pub prefill_backlog: Tokens,
    /// Smoothed time of one engine step in microseconds; zero when unknown.
    pub step_time_us: u32,
    /// Where these figures come from.
    pub basis: LoadBasis,
    /// Whether every place for a running request is taken or promised: free blocks are of no use until one ends. False where an
    /// engine does not tell how many it runs at once.
    pub slots_full: bool,
}

impl LoadSummary {
    /// KV blocks that nobody holds and nobody was promised.
    pub fn free(&self) -> Blocks {
        self.total - self.used - self.reserved
    }

    /// KV blocks that one more request could be given now: those that are free, and none while all slots are taken.
    pub fn usable(&self) -> Blocks {
        if self.slots_full {
            Blocks::ZERO
        } else {
            self.free()
        }
    }

    /// Smoothed time of one engine step; zero when unknown.
    pub fn step_time(&self) -> Duration {
        Duration::from_micros(u64::from(self.step_time_us))
    }

    /// Whether this was made after `other` by the same node.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        (self.incarnation, self.seq) > (other.incarnation, other.seq)
    }
}

/// Part of the work a node takes. One role now; prefill/decode separation adds to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Prefill and decode.
    #[default]
    Mixed,
}

/// How a node runs requests for a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelApi {
    /// The node reads the body, and what it cannot honour it refuses.
    #[default]
    Tokens,
    /// An engine beside the node gets the body as it came, and its answer goes back as it came.
    Http,
}

/// One model a node serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// Name that clients put in `model`.
    pub id: String,
    /// Longest sequence, prompt and output together.
    pub context: Tokens,
    /// Names weights, KV layout, build and instruction set. Two nodes give the same tokens, and may
    /// exchange KV, only when it is equal.
    pub fingerprint: u64,
    /// Unix seconds shown as `created` in `/v1/models`.
    pub created: u64,
    /// How requests for it are run.
    pub api: ModelApi,
}

/// What a node says of itself that seldom changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Short name, derived from `peer_id`.
    pub node: NodeId,
    /// The life these facts belong to.
    pub incarnation: Incarnation,
    /// libp2p identity in base58; admits the node to control and stream planes.
    pub peer_id: String,
    /// Version of the messages between nodes; see `docs/protocol.md`.
    pub protocol: u16,
    /// Where the control plane listens (UDP).
    pub control: SocketAddr,
    /// Where the stream plane and gossip listen (UDP).
    pub stream: SocketAddr,
    /// Where clients may ask this node, as `host:port`.
    pub http: String,
    /// Work the node takes.
    pub role: Role,
    /// Tokens in one of its KV blocks.
    pub block_size: BlockSize,
    /// Models it serves.
    pub models: Vec<ModelFacts>,
    /// Version of the program, for people.
    pub version: String,
}

impl NodeFacts {
    /// The model with this name, if the node serves it.
    pub fn model(&self, id: &str) -> Option<&ModelFacts> {
        self.models.iter().find(|model| model.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_life_beats_any_number_of_the_old_one() {
        let old = LoadSummary {
            incarnation: Incarnation(1),
            seq: 900,
            ..LoadSummary::default()
        };
        let new = LoadSummary {
            incarnation: Incarnation(2),
            seq: 1,
            ..LoadSummary::default()
        };
        assert!(new.is_newer_than(&old));
        assert!(!old.is_newer_than(&new));
        assert!(!old.is_newer_than(&old));
    }
}
