//! The shells around the sessions: they perform what a session asks for and tell it what came of it.

use shoal_gossip::Tokens;
use shoal_migrate::session::{
    Outcome, SourceAction, SourceInput, SourcePlan, SourceSession, TargetAction, TargetInput,
    TargetPlan, TargetSession,
};
use shoal_migrate::{ClaimAnswer, CopyMode, MoveRefusal, StageIndex};

use super::words::words_of;
use super::{
    Body, Effect, JobKey, Message, Move, Mutant, Node, Pending, Request, Side, Source, Step, Target,
};

fn tokens(count: u16) -> Tokens {
    Tokens(count.into())
}

fn count(tokens: Tokens) -> u16 {
    u16::try_from(tokens.0).unwrap_or(u16::MAX)
}

fn output_of(output: u32) -> u16 {
    u16::try_from(output).unwrap_or(u16::MAX)
}

fn epoch_of(epoch: shoal_gossip::Epoch) -> u8 {
    u8::try_from(epoch.0).unwrap_or(u8::MAX)
}

fn reason() -> String {
    "a fault".to_owned()
}

impl Step<'_> {
    fn send(&mut self, id: Move, body: Body) {
        self.effects.push(Effect::Send(Message::Move(id, body)));
    }

    /// The ownership out of which a source session at this node moves the request.
    pub(crate) fn source_epoch(&self, at: Node, request: Request) -> Option<u8> {
        let at = self.world.source_at(at, request)?;
        Some(self.world.sources[at].id.epoch)
    }

    /// The ownership out of which a target session at this node moves the request.
    pub(crate) fn target_epoch(&self, at: Node, request: Request) -> Option<u8> {
        let at = self.world.target_at(at, request)?;
        Some(self.world.targets[at].id.epoch)
    }

    pub(crate) fn begin(&mut self, key: JobKey, to: Node, mode: CopyMode) {
        let free = self.world.source_at(key.node, key.request).is_none();
        let runs = |job: &super::Job| job.running && job.output < self.rules.tokens;
        if !free || to == key.node || !self.world.job(key).is_some_and(runs) {
            return;
        }
        let moves = &mut self.world.moves[usize::from(key.request.0)];
        *moves = moves.saturating_add(1);
        let id = Move {
            request: key.request,
            epoch: key.epoch,
            source: key.node,
            target: to,
            attempt: *moves,
        };
        let plan = SourcePlan {
            migration: id.migration(),
            mode,
            limits: self.rules.limits,
        };
        let mut actions = Vec::new();
        let session = SourceSession::new(plan, self.now, &mut actions);
        self.world.sources.push(Source {
            at: key.node,
            id,
            session,
            pausing: false,
            last_from: 0,
        });
        self.world
            .sources
            .sort_by_key(|source| (source.at, source.id));
        // The only thing a session begins with is its proposal.
        self.world.must(
            actions == [SourceAction::Propose],
            "a move begins with something else than a proposal",
        );
        let waiting = mode == CopyMode::Waiting;
        self.send(id, Body::Propose { waiting });
    }

    pub(crate) fn tick(&mut self, side: Side, at: Node, request: Request) {
        match side {
            Side::Source => self.tell_source(at, request, SourceInput::Tick),
            Side::Target => {
                self.tell_target(at, request, TargetInput::Tick);
            }
        }
    }

    pub(crate) fn engine(&mut self, side: Side, at: Node, request: Request) {
        match side {
            Side::Source => self.paused(at, request),
            Side::Target => {
                let Some(index) = self.world.target_at(at, request) else {
                    return;
                };
                let id = self.world.targets[index].id;
                match self.world.targets[index].pending.take() {
                    Some(Pending::Stage { stage, end, .. }) => {
                        let stage_number = stage.0;
                        self.send(
                            id,
                            Body::StageAck {
                                stage: stage_number,
                                end,
                            },
                        );
                        self.tell_target(at, request, TargetInput::StageImported { stage });
                    }
                    Some(Pending::Last { .. }) => {
                        self.send(id, Body::LastAck);
                        self.tell_target(at, request, TargetInput::LastImported);
                    }
                    None => {}
                }
            }
        }
    }

    pub(crate) fn engine_fails(&mut self, side: Side, at: Node, request: Request) {
        match side {
            Side::Source => {}
            Side::Target => {
                let Some(index) = self.world.target_at(at, request) else {
                    return;
                };
                if self.world.targets[index].pending.take().is_some() {
                    let reason = reason();
                    self.tell_target(at, request, TargetInput::ImportFailed { reason });
                }
            }
        }
    }

    fn paused(&mut self, at: Node, request: Request) {
        let Some(index) = self.world.source_at(at, request) else {
            return;
        };
        let source = &mut self.world.sources[index];
        if !source.pausing {
            return;
        }
        source.pausing = false;
        let key = source.id.old();
        if let Some(job) = self.world.job_mut(key) {
            job.running = false;
            self.tell_source(at, request, SourceInput::Paused);
        } else {
            self.tell_source(at, request, SourceInput::Gone);
        }
    }

    /// Tells the source of this job, if there is one, that its engine no longer has it.
    pub(crate) fn gone_at_source(&mut self, key: JobKey) {
        if self.source_epoch(key.node, key.request) == Some(key.epoch) {
            self.tell_source(key.node, key.request, SourceInput::Gone);
        }
    }

    pub(crate) fn deliver(&mut self, message: Message) {
        match message {
            Message::Move(id, body) if body.is_for_target() => self.at_target(id, body),
            Message::Move(id, body) => self.at_source(id, body),
            Message::Claim {
                by,
                request,
                epoch,
                output,
            } => {
                let home = self.world.home(request).at;
                if self.is_up(home) {
                    self.claimed(by, request, (epoch, output));
                }
            }
            Message::Answer {
                to,
                request,
                epoch,
                from,
            } => {
                if !self.is_up(to) {
                    return;
                }
                let answer = from.map_or(ClaimAnswer::Lost, |from| ClaimAnswer::Granted {
                    from: from.into(),
                });
                if self.source_epoch(to, request) == Some(epoch - 1) {
                    self.tell_source(to, request, SourceInput::Claimed(answer));
                } else if self.target_epoch(to, request) == Some(epoch - 1) {
                    self.tell_target(to, request, TargetInput::Claimed(answer));
                }
            }
        }
    }

    fn is_up(&self, node: Node) -> bool {
        self.world.up[usize::from(node.0)]
    }

    fn at_source(&mut self, id: Move, body: Body) {
        let Some(index) = self.world.source_at(id.source, id.request) else {
            return;
        };
        if self.world.sources[index].id != id {
            return;
        }
        let existing = self
            .world
            .job(id.old())
            .map_or(0, |job| job.output + self.rules.prompt);
        let input = match body {
            Body::Accepted => SourceInput::Accepted,
            Body::Refused => SourceInput::Refused(MoveRefusal::Busy),
            Body::StageAck { stage, end } => SourceInput::StageSent {
                stage: StageIndex(stage),
                end: tokens(end),
                existing: tokens(existing),
                took: self.rules.took,
            },
            Body::StageRefused { stage } => SourceInput::StageFailed {
                stage: StageIndex(stage),
                reason: reason(),
            },
            Body::LastAck => SourceInput::LastSent,
            Body::LastRefused => SourceInput::LastFailed { reason: reason() },
            Body::Committed => SourceInput::Committed,
            Body::CancelSource => SourceInput::Cancelled { reason: reason() },
            Body::Propose { .. } | Body::Stage { .. } | Body::Last { .. } | Body::CancelTarget => {
                return;
            }
        };
        let arrived = input == SourceInput::LastSent;
        if arrived && self.rules.has(Mutant::SourceFreesOnArrival) {
            self.world.drop_job(id.old(), false);
        }
        self.tell_source(id.source, id.request, input);
    }

    fn at_target(&mut self, id: Move, body: Body) {
        if !self.is_up(id.target) {
            return;
        }
        if let Body::Propose { waiting } = body {
            self.proposed(id, waiting);
            return;
        }
        let index = self.world.target_at(id.target, id.request);
        let Some(index) = index.filter(|&index| self.world.targets[index].id == id) else {
            match body {
                Body::Stage { stage, .. } => self.send(id, Body::StageRefused { stage }),
                Body::Last { .. } => self.send(id, Body::LastRefused),
                _ => {}
            }
            return;
        };
        let input = match body {
            Body::Stage { stage, start, end } => {
                self.world.targets[index].arriving = Some(Pending::Stage {
                    stage: StageIndex(stage),
                    start,
                    end,
                });
                TargetInput::StageArrived {
                    stage: StageIndex(stage),
                    start: tokens(start),
                    end: tokens(end),
                }
            }
            Body::Last {
                stage,
                start,
                output,
            } => {
                self.world.targets[index].arriving = Some(Pending::Last { start, output });
                TargetInput::LastArrived {
                    stage: StageIndex(stage),
                    start: Some(tokens(start)),
                    output: output.into(),
                }
            }
            _ => TargetInput::Cancelled,
        };
        self.tell_target(id.target, id.request, input);
        if let Some(index) = self.world.target_at(id.target, id.request) {
            self.world.targets[index].arriving = None;
        }
    }

    fn proposed(&mut self, id: Move, waiting: bool) {
        match self.world.proposed.binary_search(&id) {
            Ok(_) => return,
            Err(at) => self.world.proposed.insert(at, id),
        }
        let world = &*self.world;
        let incoming = world
            .targets
            .iter()
            .filter(|target| target.id.target == id.target);
        let has = |job: &super::Job| job.key.node == id.target && job.key.request == id.request;
        let refuse = incoming.count() >= self.rules.slots
            || world.target_at(id.target, id.request).is_some()
            || world.jobs.iter().any(has);
        if refuse {
            self.send(id, Body::Refused);
            return;
        }
        let plan = TargetPlan {
            migration: id.migration(),
            mode: if waiting {
                CopyMode::Waiting
            } else {
                CopyMode::Kv
            },
            limits: self.rules.limits,
        };
        let session = TargetSession::new(plan, self.now);
        self.world.hold(id.target);
        self.world.targets.push(Target {
            id,
            session,
            pending: None,
            arriving: None,
            output: 0,
            holds: true,
            has_kv: 0,
            claims: false,
        });
        self.world.targets.sort_by_key(|target| target.id);
        self.send(id, Body::Accepted);
    }

    pub(crate) fn tell_source(&mut self, at: Node, request: Request, input: SourceInput) {
        let Some(index) = self.world.source_at(at, request) else {
            return;
        };
        let source = &mut self.world.sources[index];
        let id = source.id;
        let mut actions = Vec::new();
        source.session.handle(self.now, input, &mut actions);
        for action in actions {
            self.do_source(id, action);
        }
    }

    fn do_source(&mut self, id: Move, action: SourceAction) {
        let (at, request) = (id.source, id.request);
        match action {
            SourceAction::Propose => self.world.must(false, "a source proposes twice"),
            SourceAction::Copy {
                stage,
                from,
                at_most,
            } => {
                let existing = self
                    .world
                    .job(id.old())
                    .map_or(0, |job| job.output + self.rules.prompt);
                let end = existing.min(count(from).saturating_add(count(at_most)));
                self.send(
                    id,
                    Body::Stage {
                        stage: stage.0,
                        start: count(from),
                        end,
                    },
                );
            }
            SourceAction::Pause { from } => self.pause(id, count(from)),
            SourceAction::SendLast { stage } => self.send_last(id, stage),
            SourceAction::Unpause => {
                if let Some(index) = self.world.source_at(at, request) {
                    self.world.sources[index].pausing = false;
                }
                if let Some(job) = self.world.job_mut(id.old()) {
                    job.running = true;
                }
            }
            SourceAction::Claim { epoch } => self.claim_for_source(id, epoch_of(epoch)),
            SourceAction::Resume { epoch, from } => {
                let next = JobKey {
                    epoch: epoch_of(epoch),
                    ..id.old()
                };
                let output = self.world.job(id.old()).map(|job| job.output);
                self.world
                    .must(output.is_some(), "a source goes on with what it has not");
                if let Some(output) = output {
                    self.world.must(
                        u32::from(output) >= from,
                        "a source goes on beyond what it has",
                    );
                    self.world.jobs.retain(|job| job.key != id.old());
                    self.world.add_job(next, (output, output_of(from)), true);
                }
            }
            SourceAction::Free => {
                if !self.rules.has(Mutant::SourceKeepsWhatItLost) {
                    self.world.drop_job(id.old(), false);
                }
            }
            SourceAction::CancelTarget => self.send(id, Body::CancelTarget),
            SourceAction::End(outcome) => self.end_source(id, &outcome),
        }
    }

    fn pause(&mut self, id: Move, from: u16) {
        let (at, request) = (id.source, id.request);
        let Some(index) = self.world.source_at(at, request) else {
            return;
        };
        self.world.sources[index].pausing = true;
        self.world.sources[index].last_from = from;
        if self.rules.quick_engines {
            self.paused(at, request);
        } else {
            self.effects.push(Effect::Work(Side::Source, at, request));
        }
    }

    fn send_last(&mut self, id: Move, stage: StageIndex) {
        let index = self.world.source_at(id.source, id.request);
        let start = index.map_or(0, |index| self.world.sources[index].last_from);
        let output = self.world.job(id.old()).map(|job| job.output);
        self.world
            .must(output.is_some(), "a source hands over what it has not");
        self.send(
            id,
            Body::Last {
                stage: stage.0,
                start,
                output: output.unwrap_or(0),
            },
        );
    }

    fn claim_for_source(&mut self, id: Move, epoch: u8) {
        let resumes = self.rules.has(Mutant::SourceResumesOnDoubt);
        if (resumes || self.rules.has(Mutant::SourceRunsWhileInDoubt))
            && let Some(job) = self.world.job_mut(id.old())
        {
            job.running = true;
        }
        if resumes {
            self.world.sources.retain(|source| source.id != id);
            return;
        }
        let output = self.world.job(id.old()).map_or(0, |job| job.output);
        self.effects.push(Effect::Send(Message::Claim {
            by: id.source,
            request: id.request,
            epoch,
            output,
        }));
    }

    fn end_source(&mut self, id: Move, outcome: &Outcome) {
        let (how, why) = words_of(outcome);
        self.effects.push(Effect::Ended(Side::Source, how, why));
        self.world.sources.retain(|source| source.id != id);
        let is_there = self.world.job(id.old()).is_some();
        self.world.must(
            *outcome != Outcome::Moved
                || !is_there
                || self.rules.has(Mutant::SourceKeepsWhatItLost),
            "a source has a request after it moved",
        );
    }

    pub(crate) fn tell_target(&mut self, at: Node, request: Request, input: TargetInput) {
        let Some(index) = self.world.target_at(at, request) else {
            return;
        };
        let target = &mut self.world.targets[index];
        let id = target.id;
        let mut actions = Vec::new();
        target.session.handle(self.now, input, &mut actions);
        for action in actions {
            self.do_target(id, action);
        }
    }

    fn do_target(&mut self, id: Move, action: TargetAction) {
        let (at, request) = (id.target, id.request);
        let Some(index) = self.world.target_at(at, request) else {
            return;
        };
        match action {
            TargetAction::Import { .. } | TargetAction::ImportLast { .. } => {
                let prompt = self.rules.prompt;
                let target = &mut self.world.targets[index];
                target.pending = target.arriving.take();
                let (start, end) = match target.pending {
                    Some(Pending::Stage { start, end, .. }) => (start, end),
                    Some(Pending::Last { start, output }) => (start, prompt + output),
                    None => (u16::MAX, 0),
                };
                let follows = start == target.has_kv;
                target.has_kv = end;
                self.world.must(
                    follows,
                    "a target takes in KV that does not follow what it has",
                );
                if self.rules.quick_engines {
                    self.engine(Side::Target, at, request);
                } else {
                    self.effects.push(Effect::Work(Side::Target, at, request));
                }
            }
            TargetAction::Reject { stage, .. } => {
                let arriving = self.world.targets[index].arriving;
                let is_last = matches!(arriving, Some(Pending::Last { .. }));
                let body = if is_last {
                    Body::LastRefused
                } else {
                    Body::StageRefused { stage: stage.0 }
                };
                self.send(id, body);
            }
            TargetAction::Claim { epoch, output } => {
                let epoch = epoch_of(epoch);
                let output = output_of(output);
                self.world.targets[index].output = output;
                self.world.targets[index].claims = true;
                self.effects.push(Effect::Send(Message::Claim {
                    by: at,
                    request,
                    epoch,
                    output,
                }));
                if self.rules.has(Mutant::TargetRunsBeforeTheGrant) {
                    self.resume_target(id, epoch, output.into());
                }
            }
            TargetAction::Resume { epoch, from } => {
                self.resume_target(id, epoch_of(epoch), from);
            }
            TargetAction::TellCommitted => self.send(id, Body::Committed),
            TargetAction::TellCancelled { .. } => self.send(id, Body::CancelSource),
            TargetAction::Free => {
                let target = &mut self.world.targets[index];
                if target.holds && !self.rules.has(Mutant::TargetKeepsWhatWasCancelled) {
                    target.holds = false;
                    self.world.release(at);
                }
            }
            TargetAction::End(outcome) => {
                let (how, why) = words_of(&outcome);
                self.effects.push(Effect::Ended(Side::Target, how, why));
                let holds = self.world.targets[index].holds;
                self.world.targets.remove(index);
                self.world
                    .must(!holds, "a target ends and keeps what it holds");
            }
        }
    }

    fn resume_target(&mut self, id: Move, epoch: u8, from: u32) {
        let Some(index) = self.world.target_at(id.target, id.request) else {
            return;
        };
        let target = &mut self.world.targets[index];
        if !target.holds {
            return;
        }
        // Its room is that of the job now.
        target.holds = false;
        let output = target.output;
        self.world.must(
            u32::from(output) >= from,
            "a target goes on beyond what it has",
        );
        let key = JobKey {
            node: id.target,
            request: id.request,
            epoch,
        };
        let skipped = u16::from(self.rules.has(Mutant::TargetSkipsAToken));
        let first = output_of(from) + skipped;
        self.world.add_job(key, (output, first), true);
    }
}
