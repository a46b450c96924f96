//! Why a hand-over did not happen, and where that leaves the request.

use shoal_gossip::{Blocks, NodeId};

/// Whether the same move is worth another try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Another target may take it now.
    OtherTarget,
    /// The same pair may succeed after a pause.
    Later,
    /// Never: the request or the pair is unfit for it.
    Never,
}

/// Why one hand-over did not happen. Unless a variant says otherwise the request still runs at the
/// source, which holds all its KV, and the target holds nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MigrateError {
    /// The target answered no. It holds no reservation for us.
    #[error("{target} refused {wanted} blocks, it has {free} free")]
    Refused {
        /// Who.
        target: NodeId,
        /// Blocks asked for.
        wanted: Blocks,
        /// Blocks it had.
        free: Blocks,
    },
    /// Model, KV layout, block size or version differ. Nothing was reserved.
    #[error("{target} cannot hold this KV: {reason}")]
    Incompatible {
        /// Who.
        target: NodeId,
        /// What differs.
        reason: String,
    },
    /// The target fell silent before the claim. It drops its reservation when the lease ends.
    #[error("{target} did not answer in time")]
    TargetSilent {
        /// Who.
        target: NodeId,
    },
    /// Bytes arrived damaged or out of order. The target has dropped what it had.
    #[error("KV sent to {target} arrived damaged: {reason}")]
    Damaged {
        /// Who.
        target: NodeId,
        /// What was wrong with them.
        reason: String,
    },
    /// The request ended, was aborted or lost its KV before the claim. It runs nowhere, or waits at the source.
    #[error("the request ended or was preempted during the move")]
    RequestGone,
    /// The home gave the ownership to somebody else. The source must free what it holds.
    #[error("the home granted the request to another node")]
    Lost,
}

impl MigrateError {
    /// Whether to try again.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Refused { .. } | Self::TargetSilent { .. } | Self::Incompatible { .. } => {
                Retry::OtherTarget
            }
            Self::Damaged { .. } => Retry::Later,
            Self::RequestGone | Self::Lost => Retry::Never,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_leave_the_request_movable_are_worth_another_try() {
        let target = NodeId(1);
        assert_eq!(
            MigrateError::TargetSilent { target }.retry(),
            Retry::OtherTarget
        );
        let damaged = MigrateError::Damaged {
            target,
            reason: "checksum".into(),
        };
        assert_eq!(damaged.retry(), Retry::Later);
        assert_eq!(MigrateError::Lost.retry(), Retry::Never);
        assert_eq!(MigrateError::RequestGone.retry(), Retry::Never);
    }
}
