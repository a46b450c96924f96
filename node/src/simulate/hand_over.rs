//! Hand-overs: the rescheduler decides, the sessions of `shoal-migrate` negotiate, engines act between two steps, and KV
//! takes the time that its bytes need.

mod acts;

use shoal_gossip::{Timestamp, Tokens};
use shoal_migrate::session::{
    Claim, Outcome, SourceAction, SourceInput, SourcePlan, SourceSession, TargetAction,
    TargetInput, TargetPlan, TargetSession,
};
use shoal_migrate::{
    ClaimAnswer, CopyMode, MigrationId, MoveReason, MoveRefusal, SessionLimits, StageIndex,
};

use crate::dispatch::Freeness;
use crate::engine::ReservationId;
use crate::engine::batched::SeqKey;
use crate::engine::moving::{JobPhase, JobStatus};
use crate::engine::work::Fit;
use crate::moves::room_for;
use crate::reschedule::Here;
use crate::simulate::event::Event;
use crate::simulate::gossip::place_of;
use crate::simulate::mesh::{MODEL, Mesh};
use crate::workload::Arrival;

/// What an engine does for a hand-over between two steps.
#[derive(Debug)]
pub(super) enum Act {
    /// The source gives out a stage.
    Copy {
        id: u64,
        stage: StageIndex,
        from: Tokens,
        at_most: Tokens,
    },
    /// The source stops the request, and gives out what is left from here.
    Pause { id: u64, from: Tokens },
    /// The target takes a stage in.
    Import { id: u64, stage: StageIndex },
    /// The target takes the last of it in.
    Complete { id: u64 },
}

/// What comes to a hand-over.
#[derive(Debug)]
pub(super) enum Word {
    /// The proposal is at the target.
    Proposed,
    Source(SourceInput),
    Target(TargetInput),
    /// A claim is at the home.
    Claim {
        by_target: bool,
        claim: Claim,
    },
    SourceTick,
    TargetTick,
}

/// One hand-over, both sides.
#[derive(Debug)]
pub(super) struct HandOver {
    request: usize,
    from: usize,
    to: usize,
    key: SeqKey,
    mode: CopyMode,
    reason: MoveReason,
    migration: MigrationId,
    source: SourceSession,
    target: Option<TargetSession>,
    reservation: Option<ReservationId>,
    arrived: Option<SeqKey>,
    /// The stage on its way or being taken in: where it ends, and when the source began it.
    stage_end: Tokens,
    stage_began: Timestamp,
    /// What the request had when it stopped.
    output: u32,
    computed: Tokens,
    last_from: Tokens,
    /// The deadlines of source and target for which a tick was entered last.
    ticks: (Option<Timestamp>, Option<Timestamp>),
    /// Sides that are over.
    source_over: bool,
    target_over: bool,
}

impl<A: Iterator<Item = Arrival>> Mesh<'_, A> {
    /// One look of a node's rescheduler.
    pub(super) fn look(&mut self, at: usize) {
        let load = self.nodes[at].load();
        let leaving = self.nodes[at].leaving;
        if !self.nodes[at].rescheduler.is_short(&load, leaving) {
            return;
        }
        let max_age = self.settings.host.max_view_age;
        let limits = *self.nodes[at].rescheduler.limits();
        let two = self.decide(at, |world| limits.draw((MODEL, Fit::Any), max_age, world));
        let jobs = self.nodes[at].jobs(&self.requests);
        let here = Here {
            load: &load,
            jobs: &jobs,
            block_size: self.words.facts(at).block_size,
            bytes_per_token: self.nodes[at].bytes(Tokens(1)),
        };
        let Some(decision) = self.nodes[at].rescheduler.decide(self.now, here, two) else {
            return;
        };
        let job = jobs.iter().find(|job| job.request == decision.request);
        if let (Some(job), Some(to)) = (job, place_of(decision.to)) {
            self.begin_hand_over(job, (at, to), MoveReason::Rescheduled);
        }
    }

    /// Begins to move a request that is at `from`.
    pub(super) fn begin_hand_over(
        &mut self,
        job: &JobStatus,
        (from, to): (usize, usize),
        reason: MoveReason,
    ) {
        let Some((key, _)) = self.nodes[from].batcher.find(job.request) else {
            return;
        };
        let Some(&request) = self.nodes[from].here.get(&key) else {
            return;
        };
        self.attempts += 1;
        self.counts.begun += 1;
        let id = self.attempts;
        let migration = MigrationId {
            request: job.request,
            epoch: job.epoch,
            target: self.nodes[to].id,
            attempt: u32::try_from(id % (1 << 32)).unwrap_or(0),
        };
        let mode = match job.phase {
            JobPhase::Waiting => CopyMode::Waiting,
            _ => CopyMode::Kv,
        };
        let limits = self.settings.moves.limits;
        let plan = SourcePlan {
            migration,
            mode,
            limits,
        };
        let mut actions = Vec::new();
        let source = SourceSession::new(plan, self.now, &mut actions);
        self.nodes[from].leaving += 1;
        self.hand_overs.insert(
            id,
            HandOver {
                request,
                from,
                to,
                key,
                mode,
                reason,
                migration,
                source,
                target: None,
                reservation: None,
                arrived: None,
                stage_end: Tokens::ZERO,
                stage_began: self.now,
                output: 0,
                computed: Tokens::ZERO,
                last_from: Tokens::ZERO,
                ticks: (None, None),
                source_over: false,
                target_over: false,
            },
        );
        self.perform_source(id, actions);
    }

    /// A word of a hand-over arrives. One of a hand-over that is over is void.
    pub(super) fn hand_over_word(&mut self, id: u64, word: Word) {
        match word {
            Word::Proposed => self.proposed(id),
            Word::Source(input) => self.source(id, input),
            Word::SourceTick => self.source(id, SourceInput::Tick),
            Word::Target(input) => self.target(id, input),
            Word::TargetTick => self.target(id, TargetInput::Tick),
            Word::Claim { by_target, claim } => self.claimed(id, by_target, claim),
        }
    }

    fn source(&mut self, id: u64, input: SourceInput) {
        let now = self.now;
        let Some(it) = self.hand_overs.get_mut(&id).filter(|it| !it.source_over) else {
            return;
        };
        let mut actions = Vec::new();
        it.source.handle(now, input, &mut actions);
        self.perform_source(id, actions);
    }

    fn target(&mut self, id: u64, input: TargetInput) {
        let now = self.now;
        let it = self.hand_overs.get_mut(&id).filter(|it| !it.target_over);
        let Some(session) = it.and_then(|it| it.target.as_mut()) else {
            return;
        };
        let mut actions = Vec::new();
        session.handle(now, input, &mut actions);
        self.perform_target(id, actions);
    }

    /// The proposal is judged as a node does.
    fn proposed(&mut self, id: u64) {
        let Some(it) = self.hand_overs.get(&id) else {
            return;
        };
        let (to, from, request) = (it.to, it.from, it.request);
        let load = self.nodes[to].load();
        let wanted = it.reason != MoveReason::Rescheduled
            || Freeness::for_migration(&load) > self.settings.moves.accept_above;
        let same = self.nodes[to].bytes_per_token == self.nodes[from].bytes_per_token;
        let known = self.requests[request].prompt + Tokens(self.requests[request].drawn);
        let config = self.nodes[to].batcher.config();
        let what = (it.mode, self.requests[request].id.home, known);
        let limits = &self.settings.moves.limits;
        let waited = self.now.since(self.requests[request].arrived);
        let ask = room_for(what, (config.context, waited), config.block_size, limits);
        let busy = self.nodes[to].arriving >= self.settings.moves.slots_in;
        let answer = if !same {
            Err(MoveRefusal::Incompatible("another KV".to_owned()))
        } else if !wanted {
            Err(MoveRefusal::NoRoom)
        } else if busy {
            Err(MoveRefusal::Busy)
        } else {
            let now = self.now;
            self.nodes[to].touch();
            self.nodes[to]
                .batcher
                .reserve(now, ask)
                .map_err(|_| MoveRefusal::NoRoom)
        };
        let input = match answer {
            Ok(reservation) => {
                self.accept(id, reservation, *limits);
                SourceInput::Accepted
            }
            Err(refusal) => SourceInput::Refused(refusal),
        };
        let load = self.nodes[to].load();
        let (now, target) = (self.now, self.nodes[to].id);
        self.nodes[from].corrections.hear(target, load, now);
        self.send(
            (to, from),
            Event::HandOver {
                id,
                word: Word::Source(input),
            },
        );
    }

    fn accept(&mut self, id: u64, reservation: ReservationId, limits: SessionLimits) {
        let now = self.now;
        let Some(it) = self.hand_overs.get_mut(&id) else {
            return;
        };
        let plan = TargetPlan {
            migration: it.migration,
            mode: it.mode,
            limits,
        };
        it.reservation = Some(reservation);
        it.target = Some(TargetSession::new(plan, now));
        let to = it.to;
        self.nodes[to].arriving += 1;
        self.tick_target(id);
    }

    /// The home judges a claim.
    fn claimed(&mut self, id: u64, by_target: bool, claim: Claim) {
        let Some(it) = self.hand_overs.get(&id) else {
            return;
        };
        let by = if by_target { it.to } else { it.from };
        let name = self.nodes[by].id;
        let request = &mut self.requests[it.request];
        let home = request.home();
        let received = request.drawn.min(claim.output);
        let answer = request.arbiter.claim(name, claim, received);
        let word = match by_target {
            true => Word::Target(TargetInput::Claimed(answer)),
            false => Word::Source(SourceInput::Claimed(answer)),
        };
        if matches!(answer, ClaimAnswer::Granted { .. }) {
            // If the home was placing it again, it takes the claim instead.
            request.host = Some(by);
            request.placement = None;
        }
        self.send((home, by), Event::HandOver { id, word });
    }

    fn perform_source(&mut self, id: u64, actions: Vec<SourceAction>) {
        for action in actions {
            let Some(it) = self.hand_overs.get(&id) else {
                return;
            };
            let (from, to, key) = (it.from, it.to, it.key);
            match action {
                SourceAction::Propose => {
                    self.send(
                        (from, to),
                        Event::HandOver {
                            id,
                            word: Word::Proposed,
                        },
                    );
                }
                SourceAction::Copy {
                    stage,
                    from: start,
                    at_most,
                } => {
                    self.ask(
                        from,
                        Act::Copy {
                            id,
                            stage,
                            from: start,
                            at_most,
                        },
                    );
                }
                SourceAction::Pause { from: start } => {
                    self.ask(from, Act::Pause { id, from: start })
                }
                SourceAction::SendLast { stage } => self.send_last(id, stage),
                SourceAction::Unpause => {
                    let epoch = it.migration.epoch;
                    self.nodes[from].batcher.go_on(key, epoch);
                    self.nodes[from].touch();
                    self.kick(from);
                }
                SourceAction::Claim { epoch } => {
                    let claim = Claim {
                        epoch,
                        output: it.output,
                    };
                    self.claim(id, false, claim);
                }
                SourceAction::Resume { epoch, .. } => {
                    self.nodes[from].batcher.go_on(key, epoch);
                    self.nodes[from].touch();
                    self.kick(from);
                }
                SourceAction::Free => {
                    self.nodes[from].remove(key);
                    self.kick(from);
                }
                SourceAction::CancelTarget => {
                    let word = Word::Target(TargetInput::Cancelled);
                    self.send((from, to), Event::HandOver { id, word });
                }
                SourceAction::End(_) => {
                    self.nodes[from].leaving -= 1;
                    self.end_side(id, from);
                }
            }
        }
        self.tick_source(id);
    }

    fn perform_target(&mut self, id: u64, actions: Vec<TargetAction>) {
        for action in actions {
            let Some(it) = self.hand_overs.get(&id) else {
                return;
            };
            let (from, to) = (it.from, it.to);
            match action {
                TargetAction::Import { stage } => self.ask(to, Act::Import { id, stage }),
                TargetAction::ImportLast { .. } => self.ask(to, Act::Complete { id }),
                TargetAction::Reject { stage, reason } => {
                    let word = Word::Source(SourceInput::StageFailed { stage, reason });
                    self.send((to, from), Event::HandOver { id, word });
                }
                TargetAction::Claim { epoch, output } => {
                    self.claim(id, true, Claim { epoch, output });
                }
                TargetAction::Resume { epoch, .. } => self.resume(id, epoch),
                TargetAction::TellCommitted => {
                    let word = Word::Source(SourceInput::Committed);
                    self.send((to, from), Event::HandOver { id, word });
                }
                TargetAction::TellCancelled { reason } => {
                    let word = Word::Source(SourceInput::Cancelled { reason });
                    self.send((to, from), Event::HandOver { id, word });
                }
                TargetAction::Free => self.free_target(id),
                TargetAction::End(outcome) => {
                    if outcome == Outcome::Moved {
                        self.counts.moved += 1;
                    }
                    self.nodes[to].arriving -= 1;
                    self.end_side(id, to);
                }
            }
        }
        self.tick_target(id);
    }

    fn claim(&mut self, id: u64, by_target: bool, claim: Claim) {
        let Some(it) = self.hand_overs.get(&id) else {
            return;
        };
        let by = if by_target { it.to } else { it.from };
        let home = self.requests[it.request].home();
        let word = Word::Claim { by_target, claim };
        self.send((by, home), Event::HandOver { id, word });
    }

    fn resume(&mut self, id: u64, epoch: shoal_gossip::Epoch) {
        let Some(it) = self.hand_overs.get(&id) else {
            return;
        };
        let (to, request) = (it.to, it.request);
        let Some(key) = it.arrived else {
            return;
        };
        self.nodes[to].batcher.go_on(key, epoch);
        self.nodes[to].here.insert(key, request);
        self.nodes[to].touch();
        self.requests[request].moves += 1;
        self.kick(to);
    }

    fn free_target(&mut self, id: u64) {
        let Some(it) = self.hand_overs.get_mut(&id) else {
            return;
        };
        let (to, arrived, reservation) = (it.to, it.arrived.take(), it.reservation.take());
        if let Some(key) = arrived {
            self.nodes[to].remove(key);
        }
        if let Some(reservation) = reservation {
            self.nodes[to].batcher.release(reservation);
            self.nodes[to].touch();
        }
        self.kick(to);
    }

    /// Ends the part that a node has in a hand-over.
    fn end_side(&mut self, id: u64, node: usize) {
        if let Some(it) = self.hand_overs.get_mut(&id) {
            it.source_over |= it.from == node;
            it.target_over |= it.to == node;
            if it.source_over && (it.target.is_none() || it.target_over) {
                self.hand_overs.remove(&id);
            }
        }
    }

    /// A node is gone, and with it its part in all hand-overs.
    pub(super) fn end_sides_of(&mut self, node: usize) {
        let of_node = |(_, it): &(&u64, &HandOver)| it.from == node || it.to == node;
        let ids: Vec<u64> = self
            .hand_overs
            .iter()
            .filter(of_node)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.end_side(id, node);
        }
    }

    fn tick_source(&mut self, id: u64) {
        let Some(it) = self.hand_overs.get_mut(&id) else {
            return;
        };
        let deadline = it.source.deadline();
        if let Some(due) = deadline.filter(|_| it.ticks.0 != deadline) {
            it.ticks.0 = deadline;
            self.tick(id, due, Word::SourceTick);
        }
    }

    fn tick_target(&mut self, id: u64) {
        let Some(it) = self.hand_overs.get_mut(&id) else {
            return;
        };
        let deadline = it.target.as_ref().and_then(TargetSession::deadline);
        if let Some(due) = deadline.filter(|_| it.ticks.1 != deadline) {
            it.ticks.1 = deadline;
            self.tick(id, due, Word::TargetTick);
        }
    }

    fn tick(&mut self, id: u64, due: Timestamp, word: Word) {
        let event = Event::HandOver { id, word };
        self.agenda.enter(due.max(self.now), event);
    }
}
