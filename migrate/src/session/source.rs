//! The source's side of a hand-over.

mod words;

use std::time::Duration;

use shoal_gossip::{Timestamp, Tokens};

use crate::session::{Cause, Outcome};
use crate::{ClaimAnswer, CopyMode, MigrateError, MigrationId, StageIndex};

pub use words::{SourceAction, SourceInput, SourcePlan};

/// A rest of KV that takes no longer than this at the pace of the stage before is sent while the request is paused:
/// another stage would cost a step boundary and a round trip to save less. A fifth of the pause we aim at, 5 ms.
const SHORT_REST: Duration = Duration::from_millis(1);

/// Where a move stands at its source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State {
    /// The target has been asked.
    Proposing,
    /// A stage is on its way while the request runs on.
    Copying(Copying),
    /// The engine was asked to stop the request; the last stage will have this number.
    Pausing { stage: StageIndex },
    /// The last stage is on its way. From here on there is doubt: the target may own the request by now.
    Sending,
    /// The last stage is there; the target's word that it owns the request is not.
    Sent,
    /// The home was asked for the ownership, because of `cause`.
    Claiming { cause: Cause, until: Timestamp },
    /// It is over.
    Ended,
}

/// The stage under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Copying {
    stage: StageIndex,
    from: Tokens,
    /// Tokens that were missing at the target when the stage before ended; `None` in the first.
    missing: Option<Tokens>,
    /// Stages begun with no more missing than fits into one.
    short: u16,
}

/// The source's side of one hand-over.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SourceSession {
    plan: SourcePlan,
    state: State,
    deadline: Option<Timestamp>,
}

impl SourceSession {
    /// Begins: proposes.
    pub fn new(plan: SourcePlan, now: Timestamp, actions: &mut Vec<SourceAction>) -> Self {
        actions.push(SourceAction::Propose);
        Self {
            deadline: Some(now + plan.limits.propose_patience),
            state: State::Proposing,
            plan,
        }
    }

    /// The attempt.
    pub fn migration(&self) -> MigrationId {
        self.plan.migration
    }

    /// When to give it [`SourceInput::Tick`] if nothing happens before; `None` when it is over.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.deadline
    }

    /// Takes an input. Late, duplicate and unexpected ones change nothing.
    pub fn handle(&mut self, now: Timestamp, input: SourceInput, actions: &mut Vec<SourceAction>) {
        let early = self.deadline.is_none_or(|deadline| now < deadline);
        if matches!(input, SourceInput::Tick) && early {
            return;
        }
        match self.state.clone() {
            State::Proposing => self.proposing(now, input, actions),
            State::Copying(copying) => self.copying(now, copying, input, actions),
            State::Pausing { stage } => self.pausing(now, stage, input, actions),
            State::Sending => self.sending(now, input, actions),
            State::Sent => self.sent(now, input, actions),
            State::Claiming { cause, until } => {
                self.claiming(now, (cause, until), input, actions);
            }
            State::Ended => {}
        }
    }

    fn proposing(&mut self, now: Timestamp, input: SourceInput, actions: &mut Vec<SourceAction>) {
        match input {
            SourceInput::Accepted => match self.plan.mode {
                // Nothing is to be copied while it runs: a blocking copy, to compare with.
                CopyMode::Kv | CopyMode::Recompute if self.plan.limits.max_stages == 0 => {
                    self.pause(now, StageIndex::default(), Tokens::default(), actions);
                }
                CopyMode::Kv | CopyMode::Recompute => {
                    let first = Copying {
                        stage: StageIndex::default(),
                        from: Tokens::default(),
                        missing: None,
                        short: 0,
                    };
                    self.copy(now, first, actions);
                }
                CopyMode::Waiting => {
                    self.pause(now, StageIndex::default(), Tokens::default(), actions);
                }
            },
            SourceInput::Refused(refusal) => {
                let target = self.plan.migration.target;
                self.stay(MigrateError::Refused { target, refusal }.into(), actions);
            }
            SourceInput::Unanswered | SourceInput::Tick => {
                actions.push(SourceAction::CancelTarget);
                self.stay(self.silent(), actions);
            }
            SourceInput::Gone => self.gone(actions),
            SourceInput::Cancelled { reason } => self.stay(self.copy_failed(reason), actions),
            SourceInput::TargetDown => self.stay(self.dead(), actions),
            SourceInput::Stop => {
                actions.push(SourceAction::CancelTarget);
                self.stay(Cause::Stopped, actions);
            }
            SourceInput::StageSent { .. }
            | SourceInput::StageFailed { .. }
            | SourceInput::Paused
            | SourceInput::LastSent
            | SourceInput::LastFailed { .. }
            | SourceInput::Committed
            | SourceInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | SourceInput::ClaimUnanswered
            | SourceInput::Attached { .. } => {}
        }
    }

    fn copying(
        &mut self,
        now: Timestamp,
        copying: Copying,
        input: SourceInput,
        actions: &mut Vec<SourceAction>,
    ) {
        match input {
            SourceInput::StageSent {
                stage,
                end,
                existing,
                took,
            } => {
                if stage == copying.stage {
                    let arrived = Arrived {
                        end,
                        existing,
                        took,
                    };
                    self.go_on(now, copying, arrived, actions);
                }
            }
            SourceInput::StageFailed { stage, reason } => {
                if stage == copying.stage {
                    actions.push(SourceAction::CancelTarget);
                    self.stay(self.copy_failed(reason), actions);
                }
            }
            SourceInput::Tick => {
                actions.push(SourceAction::CancelTarget);
                self.stay(self.silent(), actions);
            }
            SourceInput::Gone => self.gone(actions),
            SourceInput::Cancelled { reason } => self.stay(self.copy_failed(reason), actions),
            SourceInput::TargetDown => self.stay(self.dead(), actions),
            SourceInput::Stop => {
                actions.push(SourceAction::CancelTarget);
                self.stay(Cause::Stopped, actions);
            }
            SourceInput::Accepted
            | SourceInput::Refused(_)
            | SourceInput::Unanswered
            | SourceInput::Paused
            | SourceInput::LastSent
            | SourceInput::LastFailed { .. }
            | SourceInput::Committed
            | SourceInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | SourceInput::ClaimUnanswered
            | SourceInput::Attached { .. } => {}
        }
    }

    fn pausing(
        &mut self,
        now: Timestamp,
        stage: StageIndex,
        input: SourceInput,
        actions: &mut Vec<SourceAction>,
    ) {
        match input {
            SourceInput::Paused => {
                actions.push(SourceAction::SendLast { stage });
                self.state = State::Sending;
                self.deadline = Some(now + self.plan.limits.stage_patience);
            }
            SourceInput::Tick => {
                actions.extend([SourceAction::Unpause, SourceAction::CancelTarget]);
                let late = "the engine did not stop the request in time".to_owned();
                self.stay(self.copy_failed(late), actions);
            }
            SourceInput::Gone => self.gone(actions),
            SourceInput::Cancelled { reason } => {
                actions.push(SourceAction::Unpause);
                self.stay(self.copy_failed(reason), actions);
            }
            SourceInput::TargetDown => {
                actions.push(SourceAction::Unpause);
                self.stay(self.dead(), actions);
            }
            SourceInput::Stop => {
                actions.extend([SourceAction::Unpause, SourceAction::CancelTarget]);
                self.stay(Cause::Stopped, actions);
            }
            SourceInput::Accepted
            | SourceInput::Refused(_)
            | SourceInput::Unanswered
            | SourceInput::StageSent { .. }
            | SourceInput::StageFailed { .. }
            | SourceInput::LastSent
            | SourceInput::LastFailed { .. }
            | SourceInput::Committed
            | SourceInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | SourceInput::ClaimUnanswered
            | SourceInput::Attached { .. } => {}
        }
    }

    /// The target may have all it needs to own the request: every way out but its own word leads to the home.
    fn sending(&mut self, now: Timestamp, input: SourceInput, actions: &mut Vec<SourceAction>) {
        match input {
            SourceInput::LastSent => {
                self.state = State::Sent;
                self.deadline = Some(now + self.plan.limits.commit_patience);
            }
            SourceInput::LastFailed { reason } | SourceInput::Cancelled { reason } => {
                self.doubt(now, self.copy_failed(reason), actions);
            }
            SourceInput::Gone => self.gone(actions),
            SourceInput::Committed => self.moved(actions),
            SourceInput::TargetDown => self.doubt(now, self.dead(), actions),
            SourceInput::Tick => self.doubt(now, self.silent(), actions),
            // Too late to stop it: only the home can say now whose the request is, and it is asked if need be.
            SourceInput::Stop
            | SourceInput::Accepted
            | SourceInput::Refused(_)
            | SourceInput::Unanswered
            | SourceInput::StageSent { .. }
            | SourceInput::StageFailed { .. }
            | SourceInput::Paused
            | SourceInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | SourceInput::ClaimUnanswered
            | SourceInput::Attached { .. } => {}
        }
    }

    fn sent(&mut self, now: Timestamp, input: SourceInput, actions: &mut Vec<SourceAction>) {
        match input {
            SourceInput::Cancelled { reason } => {
                self.doubt(now, self.copy_failed(reason), actions);
            }
            SourceInput::Gone => self.gone(actions),
            SourceInput::Committed => self.moved(actions),
            SourceInput::TargetDown => self.doubt(now, self.dead(), actions),
            SourceInput::Tick => self.doubt(now, self.silent(), actions),
            // A failure reported after the success is that of a copy: the last stage is there.
            SourceInput::LastSent
            | SourceInput::LastFailed { .. }
            | SourceInput::Stop
            | SourceInput::Accepted
            | SourceInput::Refused(_)
            | SourceInput::Unanswered
            | SourceInput::StageSent { .. }
            | SourceInput::StageFailed { .. }
            | SourceInput::Paused
            | SourceInput::Claimed(ClaimAnswer::Granted { .. } | ClaimAnswer::Lost)
            | SourceInput::ClaimUnanswered
            | SourceInput::Attached { .. } => {}
        }
    }

    fn claiming(
        &mut self,
        now: Timestamp,
        (cause, until): (Cause, Timestamp),
        input: SourceInput,
        actions: &mut Vec<SourceAction>,
    ) {
        match input {
            SourceInput::Claimed(ClaimAnswer::Granted { from })
            | SourceInput::Attached { from } => {
                let epoch = self.plan.migration.epoch.next();
                actions.extend([
                    SourceAction::Resume { epoch, from },
                    SourceAction::CancelTarget,
                ]);
                self.stay(cause, actions);
            }
            SourceInput::Claimed(ClaimAnswer::Lost) => {
                actions.push(SourceAction::Free);
                self.end(Outcome::Over(MigrateError::Lost.into()), actions);
            }
            SourceInput::Gone => self.gone(actions),
            SourceInput::Committed => self.moved(actions),
            SourceInput::Tick if now >= until => {
                actions.push(SourceAction::Free);
                self.end(Outcome::Over(MigrateError::HomeSilent.into()), actions);
            }
            SourceInput::Tick => self.claim(now, until, actions),
            // Unanswered: the next claim goes out when the deadline comes.
            SourceInput::ClaimUnanswered
            | SourceInput::LastSent
            | SourceInput::LastFailed { .. }
            | SourceInput::Cancelled { .. }
            | SourceInput::TargetDown
            | SourceInput::Stop
            | SourceInput::Accepted
            | SourceInput::Refused(_)
            | SourceInput::Unanswered
            | SourceInput::StageSent { .. }
            | SourceInput::StageFailed { .. }
            | SourceInput::Paused => {}
        }
    }

    /// A stage has arrived: the next one, or the pause.
    fn go_on(
        &mut self,
        now: Timestamp,
        copying: Copying,
        arrived: Arrived,
        actions: &mut Vec<SourceAction>,
    ) {
        let limits = self.plan.limits;
        let missing = arrived.existing - arrived.end;
        let sent = arrived.end - copying.from;
        let next = Copying {
            // One in which there was nothing to send was not sent: its number is the next one's.
            stage: match sent {
                Tokens::ZERO => copying.stage,
                _ => copying.stage.next(),
            },
            from: arrived.end,
            missing: Some(missing),
            short: copying.short.saturating_add(1),
        };
        if missing <= limits.max_stage_tokens {
            // No less missing than was sent: the request runs as fast as the copy, and one more stage gains nothing.
            let gains = missing < sent && next.short < limits.max_stages;
            let small =
                missing <= limits.last_stage_tokens || arrived.takes(missing, sent) <= SHORT_REST;
            if small || !gains {
                self.pause(now, next.stage, arrived.end, actions);
            } else {
                self.copy(now, next, actions);
            }
        } else if copying.missing.is_none_or(|before| missing < before) {
            // A long request takes as many full stages as it needs; only those after them are counted.
            self.copy(now, Copying { short: 0, ..next }, actions);
        } else {
            actions.push(SourceAction::CancelTarget);
            let slower = "the copy is slower than the request grows".to_owned();
            self.stay(self.copy_failed(slower), actions);
        }
    }

    fn copy(&mut self, now: Timestamp, copying: Copying, actions: &mut Vec<SourceAction>) {
        actions.push(SourceAction::Copy {
            stage: copying.stage,
            from: copying.from,
            at_most: self.plan.limits.max_stage_tokens,
        });
        self.state = State::Copying(copying);
        self.deadline = Some(now + self.plan.limits.stage_patience);
    }

    fn pause(
        &mut self,
        now: Timestamp,
        stage: StageIndex,
        from: Tokens,
        actions: &mut Vec<SourceAction>,
    ) {
        actions.push(SourceAction::Pause { from });
        self.state = State::Pausing { stage };
        self.deadline = Some(now + self.plan.limits.stage_patience);
    }

    fn doubt(&mut self, now: Timestamp, cause: Cause, actions: &mut Vec<SourceAction>) {
        let until = now + self.plan.limits.grace;
        self.state = State::Claiming { cause, until };
        self.claim(now, until, actions);
    }

    fn claim(&mut self, now: Timestamp, until: Timestamp, actions: &mut Vec<SourceAction>) {
        actions.push(SourceAction::Claim {
            epoch: self.plan.migration.epoch.next(),
        });
        self.deadline = Some(until.min(now + self.plan.limits.claim_interval));
    }

    fn stay(&mut self, cause: Cause, actions: &mut Vec<SourceAction>) {
        self.end(Outcome::Stayed(cause), actions);
    }

    fn gone(&mut self, actions: &mut Vec<SourceAction>) {
        actions.push(SourceAction::CancelTarget);
        self.end(Outcome::Over(MigrateError::RequestGone.into()), actions);
    }

    fn moved(&mut self, actions: &mut Vec<SourceAction>) {
        actions.push(SourceAction::Free);
        self.end(Outcome::Moved, actions);
    }

    fn end(&mut self, outcome: Outcome, actions: &mut Vec<SourceAction>) {
        actions.push(SourceAction::End(outcome));
        self.state = State::Ended;
        self.deadline = None;
    }

    fn silent(&self) -> Cause {
        let target = self.plan.migration.target;
        MigrateError::TargetSilent { target }.into()
    }

    fn dead(&self) -> Cause {
        let target = self.plan.migration.target;
        MigrateError::TargetDead { target }.into()
    }

    fn copy_failed(&self, reason: String) -> Cause {
        let target = self.plan.migration.target;
        MigrateError::Copy { target, reason }.into()
    }
}

/// A stage that is at the target.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    end: Tokens,
    existing: Tokens,
    took: Duration,
}

impl Arrived {
    /// How long `tokens` more would take, at the pace of the `sent` ones of this stage.
    fn takes(self, tokens: Tokens, sent: Tokens) -> Duration {
        self.took.saturating_mul(tokens.0) / sent.0.max(1)
    }
}

#[cfg(test)]
mod tests;
