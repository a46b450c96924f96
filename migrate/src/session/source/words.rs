//! What a source session is told, and what it asks for.

use std::time::Duration;

use shoal_gossip::{Epoch, Tokens};

use crate::session::Outcome;
use crate::{ClaimAnswer, CopyMode, MigrationId, MoveRefusal, SessionLimits, StageIndex};

/// What a source session begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourcePlan {
    /// The attempt.
    pub migration: MigrationId,
    /// How the KV gets there.
    pub mode: CopyMode,
    /// Bounds.
    pub limits: SessionLimits,
}

/// What happens to a source session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceInput {
    /// The target has reserved room.
    Accepted,
    /// The target said no.
    Refused(MoveRefusal),
    /// The proposal got no answer; the target may hold a reservation until its lease ends.
    Unanswered,
    /// A stage is at the target, checked and acknowledged.
    StageSent {
        /// Which.
        stage: StageIndex,
        /// Position after its last token.
        end: Tokens,
        /// Tokens that had KV at the source when it was exported or later.
        existing: Tokens,
        /// From export to acknowledgement.
        took: Duration,
    },
    /// A stage did not get there, or the target refused it.
    StageFailed {
        /// Which.
        stage: StageIndex,
        /// For the log.
        reason: String,
    },
    /// The engine has stopped the request at a step boundary and given out all that the last stage needs. It is
    /// about to be sent.
    Paused,
    /// The last stage is at the target and was acknowledged. (Not needed to go on: the target claims by itself.)
    LastSent,
    /// The last stage may or may not be at the target.
    LastFailed {
        /// For the log.
        reason: String,
    },
    /// The engine no longer has what is moved: the request ended, was aborted, or lost its KV by preemption.
    Gone,
    /// The target owns the request.
    Committed,
    /// The target gave up, and claims nothing: it has dropped what it had.
    Cancelled {
        /// For the log.
        reason: String,
    },
    /// The home's answer to this node's own claim.
    Claimed(ClaimAnswer),
    /// The home did not answer this node's claim.
    ClaimUnanswered,
    /// The home has opened its stream for the claimed ownership: as good as `Granted`, should that be lost.
    Attached {
        /// First output index it wants.
        from: u32,
    },
    /// The state plane says that the target is dead.
    TargetDown,
    /// This node no longer wants the move (an operator, or a shutdown).
    Stop,
    /// The deadline has come.
    Tick,
}

/// What a source's shell must do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Send the proposal. Answered by `Accepted`, `Refused` or `Unanswered`.
    Propose,
    /// Export KV from `from` on, at most this much of it, and send it. Answered by `StageSent`, `StageFailed` or
    /// `Gone`. In recompute mode: send the ids that exist, which the target prefills before it acknowledges.
    Copy {
        /// Which stage.
        stage: StageIndex,
        /// First position.
        from: Tokens,
        /// Tokens at most.
        at_most: Tokens,
    },
    /// Stop the request at the next step boundary and export the rest. Answered by `Paused` or `Gone`.
    Pause {
        /// First position that the target does not have.
        from: Tokens,
    },
    /// Send what `Pause` gave. Answered by `LastSent` or `LastFailed`, either of which may come late.
    SendLast {
        /// Which stage.
        stage: StageIndex,
    },
    /// Let the request run on under its present ownership, also where the `Pause` before it is still to happen. Only
    /// ever before `SendLast`.
    Unpause,
    /// Claim the next ownership at the home for this node. Answered by `Claimed` or `ClaimUnanswered`.
    Claim {
        /// The ownership to claim.
        epoch: Epoch,
    },
    /// Run on in the ownership that was claimed; output goes out from this index.
    Resume {
        /// The new ownership.
        epoch: Epoch,
        /// First output index to send.
        from: u32,
    },
    /// Drop the request and everything it holds, without a word to its home.
    Free,
    /// Tell the target that the move is off. Not answered; lost ones are covered by the lease.
    CancelTarget,
    /// The session is over. Always the last action.
    End(Outcome),
}
