//! The immutable table of the mesh that every policy reads.

use std::sync::Arc;
use std::time::Duration;

use crate::summary::{LoadSummary, NodeFacts};
use crate::time::Timestamp;
use crate::types::NodeId;

/// One live node as this node knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRow {
    /// Its facts. `facts.node` is the key of the row.
    pub facts: Arc<NodeFacts>,
    /// Its newest load and when that reached us; `None` until the first arrives. Unknown is not idle.
    pub load: Option<(LoadSummary, Timestamp)>,
}

impl NodeRow {
    /// The node's name.
    pub fn node(&self) -> NodeId {
        self.facts.node
    }

    /// Time since the newest load reached us. The time it took to get here comes on top
    /// (at most about two gossip intervals; `docs/protocol.md`).
    pub fn age(&self, now: Timestamp) -> Option<Duration> {
        self.load.map(|(_, received)| now.since(received))
    }
}

/// Every live node, this one included, sorted by name. Published whole; never changed in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterView {
    /// The node that looks.
    pub this: NodeId,
    /// When the table was made.
    pub taken_at: Timestamp,
    rows: Vec<NodeRow>,
}

impl ClusterView {
    /// A table of `rows`; of two rows with one name the later in `rows` wins.
    pub fn new(this: NodeId, taken_at: Timestamp, rows: Vec<NodeRow>) -> Self {
        let mut rows = rows;
        rows.reverse();
        rows.sort_by_key(NodeRow::node);
        rows.dedup_by_key(|row| row.node());
        Self {
            this,
            taken_at,
            rows,
        }
    }

    /// The rows by name.
    pub fn rows(&self) -> &[NodeRow] {
        &self.rows
    }

    /// The row of one node.
    pub fn row(&self, node: NodeId) -> Option<&NodeRow> {
        self.rows
            .binary_search_by_key(&node, NodeRow::node)
            .ok()
            .map(|at| &self.rows[at])
    }
}
