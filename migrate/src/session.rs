//! The cores of a hand-over: source, target, and the home that arbitrates. Pure.
//!
//! Each takes `now` and an input and returns actions; none awaits, reads a clock, draws or spawns. The shell
//! performs the actions and feeds back what came of them. The same cores run in the node, in the simulator
//! and in the model checker.

mod arbiter;
mod source;
mod target;

pub use arbiter::{Arbiter, Claim};
pub use source::{SourceAction, SourceInput, SourcePlan, SourceSession};
pub use target::{TargetAction, TargetInput, TargetPlan, TargetSession};

use crate::MigrateError;

/// How one side of a hand-over ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The target runs the request; the source has freed it.
    Moved,
    /// The request runs on at the source, and the target holds nothing.
    Stayed(Cause),
    /// The request has ended, or belongs to a third node; neither side holds it.
    Over(Cause),
}

/// Why a hand-over did not come to its end.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Cause {
    /// See the error.
    #[error(transparent)]
    Error(MigrateError),
    /// This node was told to stop it, as target also by the source.
    #[error("the move was called off")]
    Stopped,
}

impl Cause {
    /// One word for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Error(error) => error.kind(),
            Self::Stopped => "stopped",
        }
    }
}

impl From<MigrateError> for Cause {
    fn from(error: MigrateError) -> Self {
        Self::Error(error)
    }
}
