//! What a target session is told, and what it asks for.

use shoal_gossip::{Epoch, Tokens};

use crate::session::Outcome;
use crate::{ClaimAnswer, CopyMode, MigrationId, SessionLimits, StageIndex};

/// What a target session begins with: a proposal it has accepted and reserved room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TargetPlan {
    /// The attempt.
    pub migration: MigrationId,
    /// How the KV gets here.
    pub mode: CopyMode,
    /// Bounds.
    pub limits: SessionLimits,
}

/// What happens to a target session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TargetInput {
    /// A whole, checked stage has arrived and waits to be imported.
    StageArrived {
        /// Which.
        stage: StageIndex,
        /// First position (recompute mode: tokens the target had).
        start: Tokens,
        /// Position after its last token.
        end: Tokens,
    },
    /// The engine has taken in a stage.
    StageImported {
        /// Which.
        stage: StageIndex,
    },
    /// The last stage has arrived and waits to be imported.
    LastArrived {
        /// Which.
        stage: StageIndex,
        /// First position of the KV that comes with it, if any does.
        start: Option<Tokens>,
        /// Output tokens that exist.
        output: u32,
    },
    /// The engine has everything: the request could run.
    LastImported,
    /// The engine could not take in what arrived; it has dropped all it had of this request.
    ImportFailed {
        /// For the log.
        reason: String,
    },
    /// The source gave up before the last stage.
    Cancelled,
    /// The home's answer to the claim.
    Claimed(ClaimAnswer),
    /// The home did not answer the claim.
    ClaimUnanswered,
    /// The home has opened its stream for the claimed ownership: as good as `Granted`, should that be lost.
    Attached {
        /// First output index it wants.
        from: u32,
    },
    /// The home aborted the request, or closed the stream.
    Gone,
    /// The state plane says that the source is dead.
    SourceDown,
    /// This node no longer wants the request (a shutdown).
    Stop,
    /// The deadline has come.
    Tick,
}

/// What a target's shell must do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TargetAction {
    /// Acknowledge the stage that has just arrived and have the engine take it in. Answered by `StageImported` or
    /// `ImportFailed`. The acknowledgement goes out when the engine is done.
    Import {
        /// Which.
        stage: StageIndex,
    },
    /// Have the engine take in the last stage. Answered by `LastImported` or `ImportFailed`.
    ImportLast {
        /// Which.
        stage: StageIndex,
    },
    /// Refuse the stage that has just arrived.
    Reject {
        /// Which.
        stage: StageIndex,
        /// For the source's log.
        reason: String,
    },
    /// Claim the next ownership at the home. Answered by `Claimed` or `ClaimUnanswered`.
    Claim {
        /// The ownership to claim.
        epoch: Epoch,
        /// Output tokens this node has.
        output: u32,
    },
    /// Run the request in the ownership that was claimed; output goes out from this index.
    Resume {
        /// The new ownership.
        epoch: Epoch,
        /// First output index to send.
        from: u32,
    },
    /// Tell the source that the request is owned here. Not answered: a source that misses it asks the home.
    TellCommitted,
    /// Tell the source that the move is off.
    TellCancelled {
        /// For its log.
        reason: String,
    },
    /// Drop everything that this node has of the request, its reservation included.
    Free,
    /// The session is over. Always the last action.
    End(Outcome),
}
