//! The shell of one source session: performs its actions, and tells it what came of them.

mod copy;

use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{NodeId, RequestId, Timestamp, Tokens};
use shoal_migrate::session::{
    Cause, Claim, Outcome, SourceAction, SourceInput, SourcePlan, SourceSession,
};
use shoal_migrate::transfer::ParcelKind;
use shoal_migrate::{
    CopyManner, CopyMode, KvRange, MigrateError, MigrationId, MoveReason, MoveRefusal, Proposal,
    StageIndex,
};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::engine::moving::{JobPhase, JobStatus, MovingEngine, PausedJob};
use crate::mesh::messages::{Ask, MoveAnswer, MoveReport};
use crate::moves::{INPUTS, Leaving, Moves};
use copy::{Copy, ask_target, encode, open, parts, pause, send};

/// Begins to move a job; the receiver tells what came of it.
///
/// # Errors
/// Why it cannot begin, for people.
pub(super) fn begin(
    moves: &Arc<Moves>,
    job: JobStatus,
    to: NodeId,
    (reason, manner): (MoveReason, CopyManner),
) -> Result<oneshot::Receiver<MoveAnswer>, &'static str> {
    begin_by(moves, job, to, (reason, manner, Path::Best))
}

/// Which way KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// From engine to engine, if both can.
    Best,
    /// Through the nodes.
    Nodes,
}

fn begin_by(
    moves: &Arc<Moves>,
    job: JobStatus,
    to: NodeId,
    (reason, manner, path): (MoveReason, CopyManner, Path),
) -> Result<oneshot::Receiver<MoveAnswer>, &'static str> {
    let mut proposal = propose(moves, &job, to, (reason, manner))?;
    proposal.direct &= path == Path::Best;
    let (sender, inputs) = mpsc::channel(INPUTS);
    let migration = {
        let mut sessions = moves.lock();
        if sessions.leaving.contains_key(&job.request)
            || sessions.arriving.contains_key(&job.request)
        {
            return Err("it is being moved");
        }
        if sessions.leaving.len() >= moves.settings.slots_out {
            return Err("as many requests as may leave at once are leaving");
        }
        sessions.attempts = sessions.attempts.wrapping_add(1);
        let migration = MigrationId {
            attempt: sessions.attempts,
            ..proposal.migration
        };
        sessions.leaving.insert(
            job.request,
            Leaving {
                migration,
                inputs: sender,
                in_doubt: false,
            },
        );
        migration
    };
    let proposal = Proposal {
        migration,
        ..proposal
    };
    let (teller, answer) = oneshot::channel();
    let seat = Seat {
        moves: Arc::clone(moves),
        request: job.request,
    };
    let session = Run::new(seat, proposal, (job.prompt, manner));
    let (again, request) = (Arc::clone(moves), job.request);
    moves.tasks.spawn(async move {
        let (mut answer, failed) = session.run(inputs).await;
        let other = match failed {
            Some(Failed::Unable) if manner == CopyManner::Staged => Some(CopyManner::Recompute),
            Some(Failed::Direct) => Some(manner),
            Some(Failed::Unable) | None => None,
        };
        if let Some(other) = other
            && let Some(second) = once_more(&again, request, to, (reason, other)).await
        {
            answer = second;
        }
        // Whoever asked may have gone.
        drop(teller.send(answer));
    });
    Ok(answer)
}

/// Why a move failed that can be tried in another way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failed {
    /// The target takes no KV in.
    Unable,
    /// It stayed, and its KV was to go from engine to engine: perhaps these two cannot reach each other.
    Direct,
}

/// Moves a request that stayed, its KV through the nodes if it has any to take along.
async fn once_more(
    moves: &Arc<Moves>,
    request: RequestId,
    to: NodeId,
    (reason, manner): (MoveReason, CopyManner),
) -> Option<MoveAnswer> {
    let job = moves.engine.moving()?.job(request)?;
    let begun = begin_by(moves, job, to, (reason, manner, Path::Nodes));
    begun.ok()?.await.ok()
}

fn propose(
    moves: &Moves,
    job: &JobStatus,
    to: NodeId,
    (reason, manner): (MoveReason, CopyManner),
) -> Result<Proposal, &'static str> {
    let facts = moves.engine.facts();
    let model = facts.models.iter().find(|model| model.id == job.model);
    let model = model.ok_or("its model is no longer served here")?;
    let moving = moves.engine.moving();
    let bytes = moving.filter(|moving| moving.exports(job.request));
    let bytes = bytes.map_or(0, MovingEngine::kv_bytes_per_token);
    let mode = match job.phase {
        JobPhase::Waiting => CopyMode::Waiting,
        _ if matches!(manner, CopyManner::Recompute | CopyManner::Restart) => CopyMode::Recompute,
        _ if bytes > 0 => CopyMode::Kv,
        _ => CopyMode::Recompute,
    };
    Ok(Proposal {
        migration: MigrationId {
            request: job.request,
            epoch: job.epoch,
            target: to,
            attempt: 0,
        },
        mode,
        reason,
        model: job.model.clone(),
        fingerprint: model.fingerprint,
        block_size: facts.block_size,
        known: job.prompt + job.output,
        longest: job.prompt + job.max_output,
        kv_bytes_per_token: if mode == CopyMode::Kv { bytes } else { 0 },
        waited: moves.clock.now().since(job.came),
        direct: mode == CopyMode::Kv && moving.is_some_and(MovingEngine::is_direct),
    })
}

/// A session's entry in the table; it goes when the session ends, however it ends.
struct Seat {
    moves: Arc<Moves>,
    request: RequestId,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.moves.lock().leaving.remove(&self.request);
        self.moves.ended.notify_waiters();
    }
}

/// What an action came to.
enum Done {
    Input(SourceInput),
    /// The target takes it; its engine may read the KV out of this one.
    Accepted {
        direct: bool,
    },
    /// A stage is at the target.
    Copied {
        input: SourceInput,
        bytes: u64,
    },
    Paused(Box<PausedJob>),
    LastSent {
        bytes: u64,
        /// Up to where its KV went along.
        end: Option<Tokens>,
    },
}

struct Run {
    seat: Seat,
    proposal: Proposal,
    prompt: Tokens,
    manner: CopyManner,
    began: Timestamp,
    work: JoinSet<Done>,
    /// The KV goes from engine to engine.
    direct: bool,
    opened: bool,
    /// What `Pause` gave, until it is sent.
    paused: Option<PausedJob>,
    /// When the request stopped, and the output it had then.
    stopped: Option<(Timestamp, u32)>,
    report: MoveReport,
}

impl Run {
    fn new(seat: Seat, proposal: Proposal, (prompt, manner): (Tokens, CopyManner)) -> Self {
        debug!(target: "shoal::events::move", migration = %proposal.migration, mode = proposal.mode.as_str(),
            reason = proposal.reason.as_str(), known = proposal.known.0, "proposed");
        Self {
            began: seat.moves.clock.now(),
            seat,
            proposal,
            prompt,
            manner,
            work: JoinSet::new(),
            direct: false,
            opened: false,
            paused: None,
            stopped: None,
            report: MoveReport::default(),
        }
    }

    fn moves(&self) -> &Arc<Moves> {
        &self.seat.moves
    }

    fn migration(&self) -> MigrationId {
        self.proposal.migration
    }

    /// What came of it, and what another try could do otherwise.
    async fn run(
        mut self,
        mut inputs: mpsc::Receiver<SourceInput>,
    ) -> (MoveAnswer, Option<Failed>) {
        let clock = Arc::clone(&self.moves().clock);
        let mut views = self.moves().knowledge.views();
        let mode = self.proposal.mode;
        let mut limits = self.moves().limits(mode, self.proposal.known);
        if matches!(self.manner, CopyManner::Blocking | CopyManner::Restart) {
            limits.max_stages = 0;
        }
        let plan = SourcePlan {
            migration: self.migration(),
            mode,
            limits,
        };
        let mut actions = Vec::new();
        let mut session = SourceSession::new(plan, clock.now(), &mut actions);
        let mut outcome = None;
        loop {
            for action in actions.drain(..) {
                if let SourceAction::End(end) = action {
                    outcome = Some(end);
                } else {
                    self.perform(action);
                }
            }
            let Some(deadline) = session.deadline() else {
                break;
            };
            let input = tokio::select! {
                biased;
                Some(input) = inputs.recv() => input,
                Some(done) = self.work.join_next() => match self.take(done) {
                    Some(input) => input,
                    None => continue,
                },
                Ok(()) = views.changed() => {
                    if views.borrow_and_update().row(self.migration().target).is_some() {
                        continue;
                    }
                    SourceInput::TargetDown
                }
                () = sleep(deadline.since(clock.now())) => SourceInput::Tick,
            };
            if input == SourceInput::Committed {
                self.note_committed(clock.now());
            }
            session.handle(clock.now(), input, &mut actions);
        }
        if outcome == Some(Outcome::Moved) {
            self.count_the_rest().await;
        }
        let failed = match &outcome {
            Some(Outcome::Stayed(Cause::Error(MigrateError::Refused {
                refusal: MoveRefusal::Unable(_),
                ..
            }))) => Some(Failed::Unable),
            Some(Outcome::Stayed(Cause::Error(_))) if self.direct => Some(Failed::Direct),
            Some(_) | None => None,
        };
        // Words to the other side are on their way in tasks of the node; what is left here is of no use.
        (self.tell(outcome), failed)
    }

    /// The target's word that it owns the request may overtake the carrier's that the last parcel is there.
    async fn count_the_rest(&mut self) {
        let patience = self.moves().settings.ask_deadline;
        while let Ok(Some(done)) = timeout(patience, self.work.join_next()).await {
            drop(self.take(done));
        }
    }

    fn note_committed(&mut self, now: Timestamp) {
        if let Some((stopped, _)) = self.stopped {
            self.report.pause_us = micros(now.since(stopped));
            self.report.total_us = micros(now.since(self.began));
        }
    }

    /// Takes note of what an action came to.
    fn take(&mut self, done: Result<Done, tokio::task::JoinError>) -> Option<SourceInput> {
        match done {
            Ok(Done::Input(input)) => Some(input),
            Ok(Done::Accepted { direct }) => {
                self.direct = direct;
                if let Some(moving) = self.moves().engine.moving() {
                    let MigrationId { request, epoch, .. } = self.migration();
                    moving.go_direct(request, epoch, direct);
                }
                Some(SourceInput::Accepted)
            }
            Ok(Done::Copied { input, bytes }) => {
                if let (true, SourceInput::StageSent { end, .. }) = (self.direct, &input) {
                    self.report.direct_tokens = end.0;
                }
                self.report.bytes += bytes;
                self.report.stages += 1;
                Some(input)
            }
            Ok(Done::Paused(job)) => {
                let output = u32::try_from(job.state.output.len()).unwrap_or(u32::MAX);
                self.stopped = Some((job.at, output));
                self.report.tokens = self.prompt.0.saturating_add(output);
                self.paused = Some(*job);
                Some(SourceInput::Paused)
            }
            Ok(Done::LastSent { bytes, end }) => {
                if let (true, Some(end)) = (self.direct, end) {
                    self.report.direct_tokens = end.0;
                }
                self.report.bytes += bytes;
                self.report.stages += 1;
                Some(SourceInput::LastSent)
            }
            Err(_) => None,
        }
    }

    fn perform(&mut self, action: SourceAction) {
        let moves = Arc::clone(self.moves());
        let migration = self.migration();
        match action {
            SourceAction::Propose => {
                let proposal = self.proposal.clone();
                self.work
                    .spawn(async move { ask_target(&moves, proposal).await });
            }
            SourceAction::Copy {
                stage,
                from,
                at_most,
            } => {
                let copy = Copy {
                    migration,
                    stage,
                    from,
                    at_most,
                    mode: self.proposal.mode,
                    opening: !std::mem::replace(&mut self.opened, true),
                };
                self.work.spawn(async move { copy.run(&moves).await });
            }
            SourceAction::Pause { from } => {
                let kv_from = (self.proposal.mode == CopyMode::Kv).then_some(from);
                self.work
                    .spawn(async move { pause(&moves, migration, kv_from).await });
            }
            SourceAction::SendLast { stage } => self.send_last(moves, stage),
            SourceAction::Unpause => {
                if let Some(moving) = moves.engine.moving() {
                    moving.unpause(migration.request, migration.epoch);
                }
            }
            SourceAction::Claim { epoch } => {
                let claim = Claim {
                    epoch,
                    output: self.stopped.map_or(0, |(_, output)| output),
                };
                let asked = async move { moves.claim(migration.request, claim).await };
                self.work.spawn(async move {
                    Done::Input(
                        asked
                            .await
                            .map_or(SourceInput::ClaimUnanswered, SourceInput::Claimed),
                    )
                });
            }
            SourceAction::Resume { epoch, from } => {
                moves.resume((migration.request, migration.epoch), epoch, from);
            }
            SourceAction::Free => moves.engine.abort(migration.request, migration.epoch),
            SourceAction::CancelTarget => {
                let reason = "the source gave up".to_owned();
                let ask = Ask::CancelMove { migration, reason };
                moves.tell(migration.target, ask);
            }
            // Taken out by the caller.
            SourceAction::End(_) => {}
        }
    }

    fn send_last(&mut self, moves: Arc<Moves>, stage: StageIndex) {
        let migration = self.migration();
        // From now on only the home can say whose it is.
        if let Some(session) = moves.lock().leaving.get_mut(&migration.request) {
            session.in_doubt = true;
        }
        let opening = !std::mem::replace(&mut self.opened, true);
        let Some(paused) = self.paused.take() else {
            return;
        };
        self.work.spawn(async move {
            let sent = async {
                let mut bytes = 0;
                if opening {
                    bytes += open(&moves, migration, stage).await?;
                }
                let PausedJob { state, kv, .. } = paused;
                let (range, body) = parts(kv);
                let kind = ParcelKind::Last(range);
                bytes += send(&moves, migration, stage, (kind, encode(&state)?, body)).await?;
                Ok::<_, String>((bytes, range.map(KvRange::end)))
            };
            match sent.await {
                Ok((bytes, end)) => Done::LastSent { bytes, end },
                Err(reason) => Done::Input(SourceInput::LastFailed { reason }),
            }
        });
    }

    /// What came of the move, for whoever asked, for metrics and for the log.
    fn tell(self, outcome: Option<Outcome>) -> MoveAnswer {
        let reason = self.proposal.reason;
        let report = self.report;
        let (answer, kind, cause) = match outcome {
            Some(Outcome::Moved) => (MoveAnswer::Moved(report), "moved", "none"),
            Some(Outcome::Stayed(cause)) => {
                let reason = cause.to_string();
                (MoveAnswer::Stayed { reason }, "stayed", cause.kind())
            }
            Some(Outcome::Over(cause)) => {
                let reason = cause.to_string();
                (MoveAnswer::Gone { reason }, "over", cause.kind())
            }
            None => (MoveAnswer::Unknown, "over", "none"),
        };
        self.moves().metrics.moved(reason.as_str(), kind, cause);
        if kind == "moved" {
            self.moves().metrics.move_figures(&report);
        }
        debug!(target: "shoal::events::move", migration = %self.migration(), reason = reason.as_str(),
            mode = self.proposal.mode.as_str(), direct = self.direct, outcome = kind, cause, pause_us = report.pause_us,
            total_us = report.total_us, bytes = report.bytes, stages = report.stages, tokens = report.tokens);
        answer
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
