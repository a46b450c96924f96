//! How the state plane fares, for the node to log and to act on.

use std::net::SocketAddr;

/// State of a node's gossip. The last four are final: the node still serves, but alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// The gossip task is about to run.
    #[default]
    Starting,
    /// It runs.
    Running,
    /// It ended by itself and is started again after a pause. The view stays as it was and ages.
    Restarting {
        /// Restarts in a row, this one included.
        attempt: u32,
        /// For the log.
        reason: String,
    },
    /// This node has said goodbye; the others have dropped its row.
    Left,
    /// Another process with the same identity started later, at this address. Two nodes must not
    /// share an identity file; this one should stop.
    Displaced {
        /// Where the other one is.
        by: SocketAddr,
    },
    /// The mesh is full and this node is among the latest; it has said goodbye. Room comes back
    /// half of `dead_node_grace` after others are gone.
    Crowded {
        /// Nodes known, live and recently dead.
        known: usize,
        /// Nodes allowed.
        limit: usize,
    },
    /// The gossip task ended too often in a row.
    Failed {
        /// For the log.
        reason: String,
    },
}

impl Health {
    /// Whether gossip has ended for good.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Starting | Self::Running | Self::Restarting { .. } => false,
            Self::Left | Self::Displaced { .. } | Self::Crowded { .. } | Self::Failed { .. } => {
                true
            }
        }
    }
}
