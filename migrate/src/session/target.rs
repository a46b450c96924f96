//! The target's side of a hand-over.

mod words;

use shoal_gossip::{Timestamp, Tokens};

use crate::session::{Cause, Outcome};
use crate::{ClaimAnswer, CopyMode, MigrateError, MigrationId, StageIndex};

pub use words::{TargetAction, TargetInput, TargetPlan};

/// Where a move stands at its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    /// Room is reserved, and what follows this is awaited.
    Waiting(Next),
    /// The engine takes in a stage; afterwards this comes next.
    Importing(Next),
    /// The engine takes in the last stage.
    Completing { output: u32 },
    /// All is here, and the home was asked for the ownership.
    Claiming { output: u32, until: Timestamp },
    /// It is over.
    Ended,
}

/// What must come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Next {
    stage: StageIndex,
    start: Tokens,
}

/// The target's side of one hand-over.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TargetSession {
    plan: TargetPlan,
    state: State,
    deadline: Option<Timestamp>,
}

impl TargetSession {
    /// Begins: room is reserved, and the source was told.
    pub fn new(plan: TargetPlan, now: Timestamp) -> Self {
        let first = Next {
            stage: StageIndex::default(),
            start: Tokens::default(),
        };
        Self {
            deadline: Some(now + plan.limits.lease),
            state: State::Waiting(first),
            plan,
        }
    }

    /// The attempt.
    pub fn migration(&self) -> MigrationId {
        self.plan.migration
    }

    /// When to give it [`TargetInput::Tick`] if nothing happens before; `None` when it is over.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.deadline
    }

    /// Takes an input. Late, duplicate and unexpected ones change nothing; of those, an arrival is rejected, since
    /// its carrier waits for an answer.
    pub fn handle(&mut self, now: Timestamp, input: TargetInput, actions: &mut Vec<TargetAction>) {
        let early = self.deadline.is_none_or(|deadline| now < deadline);
        if matches!(input, TargetInput::Tick) && early {
            return;
        }
        match self.state {
            State::Waiting(next) => self.waiting(now, next, input, actions),
            State::Importing(next) => self.importing(now, next, input, actions),
            State::Completing { output } => self.completing(now, output, input, actions),
            State::Claiming { output, until } => {
                self.claiming(now, (output, until), input, actions);
            }
            State::Ended => {}
        }
    }

    fn waiting(
        &mut self,
        now: Timestamp,
        next: Next,
        input: TargetInput,
        actions: &mut Vec<TargetAction>,
    ) {
        match input {
            TargetInput::StageArrived { stage, start, end } => {
                let has_stages = self.plan.mode != CopyMode::Waiting;
                if stage < next.stage {
                    reject(stage, "it has arrived before", actions);
                } else if has_stages && stage == next.stage && start == next.start && start < end {
                    actions.push(TargetAction::Import { stage });
                    self.state = State::Importing(Next {
                        stage: stage.next(),
                        start: end,
                    });
                    self.deadline = Some(now + self.plan.limits.stage_patience);
                } else {
                    self.refuse(stage, "it does not follow what came before", actions);
                }
            }
            TargetInput::LastArrived {
                stage,
                start,
                output,
            } => {
                let follows = start.is_none_or(|start| start == next.start);
                if stage < next.stage {
                    reject(stage, "it has arrived before", actions);
                } else if stage == next.stage && follows {
                    actions.push(TargetAction::ImportLast { stage });
                    self.state = State::Completing { output };
                    self.deadline = Some(now + self.plan.limits.stage_patience);
                } else {
                    self.refuse(stage, "it does not follow what came before", actions);
                }
            }
            TargetInput::ImportFailed { reason } => self.import_failed(reason, actions),
            TargetInput::Cancelled => self.cancelled(actions),
            TargetInput::Gone => self.gone(actions),
            TargetInput::SourceDown => self.source_down(actions),
            TargetInput::Stop => self.stay(Cause::Stopped, actions),
            TargetInput::Tick => self.stay(MigrateError::SourceLost.into(), actions),
            TargetInput::StageImported { .. }
            | TargetInput::LastImported
            | TargetInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | TargetInput::ClaimUnanswered
            | TargetInput::Attached { .. } => {}
        }
    }

    fn importing(
        &mut self,
        now: Timestamp,
        next: Next,
        input: TargetInput,
        actions: &mut Vec<TargetAction>,
    ) {
        match input {
            TargetInput::StageImported { stage } => {
                if stage.next() == next.stage {
                    self.state = State::Waiting(next);
                    self.deadline = Some(now + self.plan.limits.lease);
                }
            }
            TargetInput::StageArrived { stage, .. } | TargetInput::LastArrived { stage, .. } => {
                if stage < next.stage {
                    reject(stage, "it has arrived before", actions);
                } else {
                    self.refuse(stage, "the one before is not taken in yet", actions);
                }
            }
            TargetInput::ImportFailed { reason } => self.import_failed(reason, actions),
            TargetInput::Cancelled => self.cancelled(actions),
            TargetInput::Gone => self.gone(actions),
            TargetInput::SourceDown => self.source_down(actions),
            TargetInput::Stop => self.stay(Cause::Stopped, actions),
            TargetInput::Tick => self.engine_slow(actions),
            TargetInput::LastImported
            | TargetInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | TargetInput::ClaimUnanswered
            | TargetInput::Attached { .. } => {}
        }
    }

    fn completing(
        &mut self,
        now: Timestamp,
        output: u32,
        input: TargetInput,
        actions: &mut Vec<TargetAction>,
    ) {
        match input {
            TargetInput::LastImported => {
                let until = now + self.plan.limits.grace;
                self.state = State::Claiming { output, until };
                self.claim(now, (output, until), actions);
            }
            TargetInput::StageArrived { stage, .. } | TargetInput::LastArrived { stage, .. } => {
                reject(stage, "the last stage is here", actions);
            }
            TargetInput::ImportFailed { reason } => self.import_failed(reason, actions),
            TargetInput::Cancelled => self.cancelled(actions),
            TargetInput::Gone => self.gone(actions),
            TargetInput::Stop => self.stay(Cause::Stopped, actions),
            TargetInput::Tick => self.engine_slow(actions),
            // The source may be dead: what it had is here.
            TargetInput::SourceDown
            | TargetInput::StageImported { .. }
            | TargetInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | TargetInput::ClaimUnanswered
            | TargetInput::Attached { .. } => {}
        }
    }

    /// The home may have granted the claim: only its answer counts now.
    fn claiming(
        &mut self,
        now: Timestamp,
        (output, until): (u32, Timestamp),
        input: TargetInput,
        actions: &mut Vec<TargetAction>,
    ) {
        match input {
            TargetInput::Claimed(ClaimAnswer::Granted { from })
            | TargetInput::Attached { from } => {
                let epoch = self.plan.migration.epoch.next();
                actions.extend([
                    TargetAction::Resume { epoch, from },
                    TargetAction::TellCommitted,
                ]);
                self.end(Outcome::Moved, actions);
            }
            TargetInput::Claimed(ClaimAnswer::Lost) => {
                tell_cancelled(
                    "the home granted the request elsewhere, or it is over",
                    actions,
                );
                self.drop_all(Outcome::Over(MigrateError::Lost.into()), actions);
            }
            TargetInput::Gone => self.gone(actions),
            TargetInput::Tick if now >= until => {
                self.drop_all(Outcome::Over(MigrateError::HomeSilent.into()), actions);
            }
            TargetInput::Tick => self.claim(now, (output, until), actions),
            // The claim may be granted all the same: the home then finds nobody here, and replays.
            TargetInput::ImportFailed { reason } => {
                tell_cancelled(&reason, actions);
                self.drop_all(Outcome::Over(self.copy_failed(reason)), actions);
            }
            TargetInput::StageArrived { stage, .. } | TargetInput::LastArrived { stage, .. } => {
                reject(stage, "the last stage is here", actions);
            }
            // Unanswered: the next claim goes out when the deadline comes.
            TargetInput::ClaimUnanswered
            | TargetInput::Cancelled
            | TargetInput::SourceDown
            | TargetInput::Stop
            | TargetInput::StageImported { .. }
            | TargetInput::LastImported => {}
        }
    }

    fn claim(
        &mut self,
        now: Timestamp,
        (output, until): (u32, Timestamp),
        actions: &mut Vec<TargetAction>,
    ) {
        let epoch = self.plan.migration.epoch.next();
        actions.push(TargetAction::Claim { epoch, output });
        self.deadline = Some(until.min(now + self.plan.limits.claim_interval));
    }

    /// Refuses an arrival, and with it the move: what comes after could not be put in its place.
    fn refuse(&mut self, stage: StageIndex, reason: &str, actions: &mut Vec<TargetAction>) {
        reject(stage, reason, actions);
        self.stay(self.copy_failed(reason.to_owned()), actions);
    }

    fn import_failed(&mut self, reason: String, actions: &mut Vec<TargetAction>) {
        self.stay(self.copy_failed(reason), actions);
    }

    fn engine_slow(&mut self, actions: &mut Vec<TargetAction>) {
        let reason = "the engine did not take it in in time".to_owned();
        self.stay(self.copy_failed(reason), actions);
    }

    /// The source knows already.
    fn cancelled(&mut self, actions: &mut Vec<TargetAction>) {
        self.drop_all(Outcome::Stayed(Cause::Stopped), actions);
    }

    fn source_down(&mut self, actions: &mut Vec<TargetAction>) {
        self.drop_all(Outcome::Over(MigrateError::SourceLost.into()), actions);
    }

    fn gone(&mut self, actions: &mut Vec<TargetAction>) {
        tell_cancelled("the home ended the request", actions);
        self.drop_all(Outcome::Over(MigrateError::RequestGone.into()), actions);
    }

    fn stay(&mut self, cause: Cause, actions: &mut Vec<TargetAction>) {
        let reason = match &cause {
            Cause::Error(error) => error.to_string(),
            Cause::Stopped => "it was told to stop".to_owned(),
        };
        actions.push(TargetAction::TellCancelled { reason });
        self.drop_all(Outcome::Stayed(cause), actions);
    }

    fn drop_all(&mut self, outcome: Outcome, actions: &mut Vec<TargetAction>) {
        actions.push(TargetAction::Free);
        self.end(outcome, actions);
    }

    fn end(&mut self, outcome: Outcome, actions: &mut Vec<TargetAction>) {
        actions.push(TargetAction::End(outcome));
        self.state = State::Ended;
        self.deadline = None;
    }

    fn copy_failed(&self, reason: String) -> Cause {
        let target = self.plan.migration.target;
        MigrateError::Copy { target, reason }.into()
    }
}

fn reject(stage: StageIndex, reason: &str, actions: &mut Vec<TargetAction>) {
    let reason = reason.to_owned();
    actions.push(TargetAction::Reject { stage, reason });
}

fn tell_cancelled(reason: &str, actions: &mut Vec<TargetAction>) {
    let reason = reason.to_owned();
    actions.push(TargetAction::TellCancelled { reason });
}

#[cfg(test)]
mod tests;
