//! The shell of one target session: performs its actions, and tells it what came of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use shoal_gossip::{Epoch, NodeId, RequestId, Tokens};
use shoal_migrate::session::{
    Claim, Outcome, TargetAction, TargetInput, TargetPlan, TargetSession,
};
use shoal_migrate::transfer::{Parcel, ParcelKind, Rejection};
use shoal_migrate::{CopyMode, KvRange, MigrationId, MoveRefusal, Proposal, StageIndex};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tracing::debug;

use crate::engine::moving::{ExportedKv, LastState, MoveError, Opening};
use crate::engine::work::Job;
use crate::engine::{ReservationId, ReserveRefusal};
use crate::mesh::messages::Ask;
use crate::moves::{Arriving, INPUTS, Moves};

/// What comes to a target session from outside.
#[derive(Debug)]
pub(super) enum TargetEvent {
    /// A parcel, and where the word goes that it was taken in.
    Parcel(Parcel, oneshot::Sender<Result<(), Rejection>>),
    /// For the core.
    Input(TargetInput),
}

/// Reserves room for a proposal and begins its session.
///
/// # Errors
/// Why not; nothing is held then.
pub(super) fn begin(
    moves: &Arc<Moves>,
    source: NodeId,
    proposal: Proposal,
) -> Result<(), MoveRefusal> {
    let migration = proposal.migration;
    let reservation = moves
        .engine
        .reserve(moves.room_for(&proposal))
        .map_err(|refusal| match refusal {
            ReserveRefusal::QueueFull | ReserveRefusal::NoRoomNow | ReserveRefusal::NeverFits => {
                MoveRefusal::NoRoom
            }
            ReserveRefusal::NotReady => MoveRefusal::NotReady,
        })?;
    let (sender, inputs) = mpsc::channel(INPUTS);
    {
        let mut sessions = moves.lock();
        // Looked at before, but others may have come since.
        if sessions.arriving.contains_key(&migration.request)
            || sessions.arriving.len() >= moves.settings.slots_in
        {
            drop(sessions);
            moves.engine.release(reservation);
            return Err(MoveRefusal::Busy);
        }
        let session = Arriving {
            migration,
            source,
            inputs: sender,
        };
        sessions.arriving.insert(migration.request, session);
    }
    let session = Run {
        seat: Seat {
            moves: Arc::clone(moves),
            request: migration.request,
        },
        migration,
        mode: proposal.mode,
        known: proposal.known,
        model: proposal.model,
        source,
        reservation: Some(reservation),
        admitted: false,
        held: BTreeMap::new(),
        work: JoinSet::new(),
    };
    moves.tasks.spawn(session.run(inputs));
    Ok(())
}

/// A session's entry in the table; it goes when the session ends, however it ends.
struct Seat {
    moves: Arc<Moves>,
    request: RequestId,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.moves.lock().arriving.remove(&self.request);
    }
}

/// A parcel that the core judges, and where its sender waits.
struct Held {
    range: Option<KvRange>,
    state: LastState,
    body: Bytes,
    reply: oneshot::Sender<Result<(), Rejection>>,
}

/// A finished act of the engine, and who waits for it.
type Done = (TargetInput, Option<oneshot::Sender<Result<(), Rejection>>>);

struct Run {
    seat: Seat,
    migration: MigrationId,
    mode: CopyMode,
    known: Tokens,
    model: String,
    source: NodeId,
    /// Until the opening uses it up.
    reservation: Option<ReservationId>,
    admitted: bool,
    /// Parcels between their arrival and the core's judgement.
    held: BTreeMap<StageIndex, Held>,
    work: JoinSet<Done>,
}

impl Run {
    fn moves(&self) -> &Arc<Moves> {
        &self.seat.moves
    }

    /// The ownership that the request will have here. Its job is in the engine under this one from the start, so
    /// that nothing meant for the old one touches it.
    fn next_epoch(&self) -> Epoch {
        self.migration.epoch.next()
    }

    async fn run(mut self, mut inputs: mpsc::Receiver<TargetEvent>) {
        let clock = Arc::clone(&self.moves().clock);
        let mut views = self.moves().knowledge.views();
        let plan = TargetPlan {
            migration: self.migration,
            mode: self.mode,
            limits: self.moves().limits(self.mode, self.known),
        };
        let mut actions = Vec::new();
        let mut session = TargetSession::new(plan, clock.now());
        let mut outcome = None;
        while let Some(deadline) = session.deadline() {
            let input = tokio::select! {
                biased;
                Some(event) = inputs.recv() => match event {
                    TargetEvent::Input(input) => Some(input),
                    TargetEvent::Parcel(parcel, reply) => self.unpack(parcel, reply),
                },
                Some(done) = self.work.join_next() => done.ok().map(|done| self.take(done)),
                Ok(()) = views.changed() => {
                    let present = views.borrow_and_update().row(self.source).is_some();
                    (!present).then_some(TargetInput::SourceDown)
                }
                () = sleep(deadline.since(clock.now())) => Some(TargetInput::Tick),
            };
            let Some(input) = input else { continue };
            session.handle(clock.now(), input, &mut actions);
            for action in actions.drain(..) {
                if let TargetAction::End(end) = action {
                    outcome = Some(end);
                } else {
                    self.perform(action);
                }
            }
        }
        self.tell(outcome);
    }

    /// Reads a parcel; what the core should judge comes back.
    fn unpack(
        &mut self,
        parcel: Parcel,
        reply: oneshot::Sender<Result<(), Rejection>>,
    ) -> Option<TargetInput> {
        let stage = parcel.header.stage;
        let read = match parcel.header.kind {
            ParcelKind::Opening => return self.open(&parcel.head, reply),
            ParcelKind::Stage(_) if self.mode == CopyMode::Kv => Ok(LastState::default()),
            ParcelKind::Stage(_) | ParcelKind::Last(_) => decode::<LastState>(&parcel.head),
        };
        let state = match read {
            Ok(state) if self.admitted => state,
            Ok(_) => return self.refuse(reply, "a stage before the opening".to_owned()),
            Err(reason) => return self.refuse(reply, reason),
        };
        let output = u32::try_from(state.output.len()).unwrap_or(u32::MAX);
        let (range, input) = match parcel.header.kind {
            ParcelKind::Opening => return None,
            ParcelKind::Stage(range) => {
                let (start, end) = (range.start(), range.end());
                (Some(range), TargetInput::StageArrived { stage, start, end })
            }
            ParcelKind::Last(range) => {
                let start = range.map(KvRange::start);
                (
                    range,
                    TargetInput::LastArrived {
                        stage,
                        start,
                        output,
                    },
                )
            }
        };
        let held = Held {
            range,
            state,
            body: parcel.body,
            reply,
        };
        if self.held.contains_key(&stage) {
            // The same stage again, while the first is at work: the carrier delivered it twice.
            drop(held.reply.send(Err(Rejection::Wrong("sent twice".into()))));
            return None;
        }
        self.held.insert(stage, held);
        Some(input)
    }

    /// The source cannot be trusted with this move: it ends.
    fn refuse(
        &self,
        reply: oneshot::Sender<Result<(), Rejection>>,
        reason: String,
    ) -> Option<TargetInput> {
        // The sender may have given up.
        drop(reply.send(Err(Rejection::Wrong(reason.clone()))));
        Some(TargetInput::ImportFailed { reason })
    }

    /// Takes the request's description and gives it to the engine.
    fn open(
        &mut self,
        head: &[u8],
        reply: oneshot::Sender<Result<(), Rejection>>,
    ) -> Option<TargetInput> {
        let opening: Opening = match decode(head) {
            Ok(opening) => opening,
            Err(reason) => return self.refuse(reply, reason),
        };
        if self.admitted {
            // Delivered twice, and done.
            drop(reply.send(Ok(())));
            return None;
        }
        if opening.prepared.model != self.model {
            return self.refuse(reply, "another model than was proposed".to_owned());
        }
        let job = Job {
            request: self.migration.request,
            epoch: self.next_epoch(),
            kind: opening.kind,
            http: opening.http,
            body: opening.body,
            prepared: opening.prepared,
            generated: opening.output,
            spoken: Vec::new(),
            reservation: self.reservation.take(),
        };
        let admitted = match self.moves().engine.moving() {
            Some(moving) => moving
                .admit(job, self.mode)
                .map_err(|error| error.to_string()),
            None => Err("the engine takes in no requests".to_owned()),
        };
        match admitted {
            Ok(()) => {
                self.admitted = true;
                drop(reply.send(Ok(())));
                None
            }
            Err(reason) => self.refuse(reply, reason),
        }
    }

    fn take(&mut self, (input, reply): Done) -> TargetInput {
        if let Some(reply) = reply {
            let word = match &input {
                TargetInput::ImportFailed { reason } => Err(Rejection::Wrong(reason.clone())),
                _ => Ok(()),
            };
            drop(reply.send(word));
        }
        input
    }

    fn perform(&mut self, action: TargetAction) {
        let moves = Arc::clone(self.moves());
        let migration = self.migration;
        match action {
            TargetAction::Import { stage } => self.import(moves, stage),
            TargetAction::ImportLast { stage } => self.import_last(moves, stage),
            TargetAction::Reject { stage, reason } => {
                if let Some(held) = self.held.remove(&stage) {
                    drop(held.reply.send(Err(Rejection::Wrong(reason))));
                }
            }
            TargetAction::Claim { epoch, output } => {
                let claim = Claim { epoch, output };
                self.work.spawn(async move {
                    let answer = moves.claim(migration.request, claim).await;
                    let input = answer.map_or(TargetInput::ClaimUnanswered, TargetInput::Claimed);
                    (input, None)
                });
            }
            TargetAction::Resume { epoch, from } => {
                moves.resume((migration.request, self.next_epoch()), epoch, from);
            }
            TargetAction::TellCommitted => {
                moves.tell(self.source, Ask::Committed { migration });
            }
            TargetAction::TellCancelled { reason } => {
                moves.tell(self.source, Ask::CancelMove { migration, reason });
            }
            TargetAction::Free => {
                if let Some(reservation) = self.reservation.take() {
                    moves.engine.release(reservation);
                }
                if self.admitted {
                    moves.engine.abort(migration.request, self.next_epoch());
                }
            }
            // Taken out by the caller.
            TargetAction::End(_) => {}
        }
    }

    fn import(&mut self, moves: Arc<Moves>, stage: StageIndex) {
        let Some(held) = self.held.remove(&stage) else {
            return;
        };
        let (request, epoch) = (self.migration.request, self.next_epoch());
        let mode = self.mode;
        self.work.spawn(async move {
            let moving = moves.engine.moving();
            let taken = match (moving, mode, held.range) {
                (Some(moving), CopyMode::Kv, Some(range)) => {
                    let bytes = held.body;
                    moving
                        .import(request, epoch, ExportedKv { range, bytes })
                        .await
                }
                (Some(moving), _, _) => moving.catch_up(request, epoch, held.state.output).await,
                (None, _, _) => Err(MoveError::Gone),
            };
            (
                outcome_of(taken, TargetInput::StageImported { stage }),
                Some(held.reply),
            )
        });
    }

    fn import_last(&mut self, moves: Arc<Moves>, stage: StageIndex) {
        let Some(held) = self.held.remove(&stage) else {
            return;
        };
        let (request, epoch) = (self.migration.request, self.next_epoch());
        self.work.spawn(async move {
            let bytes = held.body;
            let kv = held.range.map(|range| ExportedKv { range, bytes });
            let taken = match moves.engine.moving() {
                Some(moving) => moving.complete(request, epoch, held.state, kv).await,
                None => Err(MoveError::Gone),
            };
            (
                outcome_of(taken, TargetInput::LastImported),
                Some(held.reply),
            )
        });
    }

    fn tell(self, outcome: Option<Outcome>) {
        let (kind, cause) = match &outcome {
            Some(Outcome::Moved) => ("arrived", "none"),
            Some(Outcome::Stayed(cause)) => ("stayed", cause.kind()),
            Some(Outcome::Over(cause)) => ("over", cause.kind()),
            None => ("over", "none"),
        };
        self.moves().metrics.arrived(kind, cause);
        debug!(target: "shoal::events::move", migration = %self.migration, source = %self.source,
            outcome = kind, cause, "target");
    }
}

fn outcome_of(taken: Result<(), MoveError>, good: TargetInput) -> TargetInput {
    match taken {
        Ok(()) => good,
        Err(error) => TargetInput::ImportFailed {
            reason: error.to_string(),
        },
    }
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err("bytes are left over".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
