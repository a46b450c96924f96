//! Why a hand-over did not happen, and where that leaves the request.

use shoal_gossip::NodeId;

use crate::MoveRefusal;

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
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum MigrateError {
    /// The target answered no. It holds no reservation for us.
    #[error("{target} refused: {refusal}")]
    Refused {
        /// Who.
        target: NodeId,
        /// Why.
        refusal: MoveRefusal,
    },
    /// The target fell silent before the claim. It drops its reservation when the lease ends.
    #[error("{target} did not answer in time")]
    TargetSilent {
        /// Who.
        target: NodeId,
    },
    /// The state plane says that the target is dead.
    #[error("{target} is dead")]
    TargetDead {
        /// Who.
        target: NodeId,
    },
    /// The source fell silent or died before the last stage. Seen by the target only, which has dropped all.
    #[error("the source fell silent or died")]
    SourceLost,
    /// A stage did not get there, arrived damaged or could not be taken in. The target has dropped what it had.
    #[error("KV sent to {target} did not get in: {reason}")]
    Copy {
        /// Who.
        target: NodeId,
        /// What was wrong.
        reason: String,
    },
    /// The request ended, was aborted or lost its KV before the claim. It runs nowhere, or waits at the source.
    #[error("the request ended or was preempted during the move")]
    RequestGone,
    /// The home gave the ownership to somebody else, or the request has ended there. The asker must free what it holds.
    #[error("the home granted the request to another node, or it has ended")]
    Lost,
    /// The home did not answer for the whole grace period. The request is dropped.
    #[error("the home did not answer")]
    HomeSilent,
}

impl MigrateError {
    /// Whether to try again.
    pub fn retry(&self) -> Retry {
        match self {
            Self::Refused {
                refusal: MoveRefusal::Duplicate,
                ..
            }
            | Self::RequestGone
            | Self::Lost
            | Self::HomeSilent => Retry::Never,
            Self::Refused { .. } | Self::TargetSilent { .. } | Self::TargetDead { .. } => {
                Retry::OtherTarget
            }
            Self::Copy { .. } | Self::SourceLost => Retry::Later,
        }
    }

    /// One word for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused",
            Self::TargetSilent { .. } => "target_silent",
            Self::TargetDead { .. } => "target_dead",
            Self::SourceLost => "source_lost",
            Self::Copy { .. } => "copy",
            Self::RequestGone => "request_gone",
            Self::Lost => "lost",
            Self::HomeSilent => "home_silent",
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
        let damaged = MigrateError::Copy {
            target,
            reason: "checksum".into(),
        };
        assert_eq!(damaged.retry(), Retry::Later);
        assert_eq!(MigrateError::Lost.retry(), Retry::Never);
        assert_eq!(MigrateError::RequestGone.retry(), Retry::Never);
    }
}
