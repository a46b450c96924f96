//! Hand-over: this node's sessions as source and as target, and what they share.
//!
//! The cores of `shoal-migrate` decide; here their actions are performed: `source` and `target` hold one
//! session each, this module finds the session that a message is for and bounds how many there are.
//!
//! ```text
//! rescheduler, operator ─▶ Moves::hand_over ─▶ source session ─▶ engine, carrier, control plane
//! control plane ─▶ Moves::propose ─▶ target session ◀─ parcels ◀─ carrier
//! home's stream ─▶ Moves::attach ◀─ events of the resumed request ◀─ either session
//! ```

mod drain;
mod handout;
mod judge;
mod source;
mod target;
#[cfg(test)]
mod tests;
mod watch;
mod ways;

pub(crate) use judge::room_for;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use shoal_gossip::{Clock, Epoch, NodeId, RequestId};
use shoal_migrate::session::{SourceInput, TargetInput};
use shoal_migrate::transfer::KvTransfer;
use shoal_migrate::{CopyManner, MigrationId, MoveReason, SessionLimits};
use tokio::sync::{Notify, mpsc};
use tokio_util::task::TaskTracker;

pub use drain::keep_emptying;
pub use handout::HandedOut;
pub use watch::keep_rescheduling;

use crate::dispatch::Freeness;
use crate::engine::Engine;
use crate::engine::moving::{JobPhase, JobStatus, MovingEngine};
use crate::home::Whereabouts;
use crate::knowledge::Knowledge;
use crate::links::Links;
use crate::load::LoadSource;
use crate::mesh::messages::{Answer, Ask, MoveAnswer};
use crate::metrics::Metrics;
use crate::moves::handout::Handout;
use crate::moves::target::TargetEvent;

/// Inputs that may wait for a session: one answer from each side it deals with, twice.
const INPUTS: usize = 8;

/// How long an operator's wish may take: as long as an exchange between nodes may. The move itself goes on.
const MOVE_PATIENCE: Duration = Duration::from_secs(60);

/// How hand-overs behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveSettings {
    /// Bounds of one session.
    pub limits: SessionLimits,
    /// Requests that may leave at once.
    pub slots_out: usize,
    /// Requests that may come in at once.
    pub slots_in: usize,
    /// How long a peer may take to answer a question of a session.
    pub ask_deadline: Duration,
    /// As a target this node takes a rescheduled request only while its own freeness is above this.
    pub accept_above: Freeness,
}

/// What hand-overs are made of.
#[derive(Debug)]
pub struct MoveParts {
    /// This node's engine.
    pub engine: Arc<dyn Engine>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// This node's load.
    pub loads: Arc<LoadSource>,
    /// What is known of the mesh.
    pub knowledge: Arc<Knowledge>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Where sessions run; the caller joins it.
    pub tasks: TaskTracker,
}

/// All hand-overs of one node.
#[derive(Debug)]
pub struct Moves {
    this: NodeId,
    engine: Arc<dyn Engine>,
    clock: Arc<dyn Clock>,
    loads: Arc<LoadSource>,
    knowledge: Arc<Knowledge>,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
    settings: MoveSettings,
    /// Set once the planes run; before that nothing moves.
    ways: OnceLock<Ways>,
    sessions: Mutex<Sessions>,
    handout: Handout,
    /// Tells when a session as source has ended.
    ended: Notify,
}

#[derive(Debug)]
struct Ways {
    links: Arc<Links>,
    carrier: Arc<dyn KvTransfer>,
}

#[derive(Debug, Default)]
struct Sessions {
    leaving: BTreeMap<RequestId, Leaving>,
    arriving: BTreeMap<RequestId, Arriving>,
    attempts: u32,
}

#[derive(Debug)]
struct Leaving {
    migration: MigrationId,
    inputs: mpsc::Sender<SourceInput>,
    /// The last stage may be at the target: only the home can end the request here.
    in_doubt: bool,
}

#[derive(Debug)]
struct Arriving {
    migration: MigrationId,
    source: NodeId,
    inputs: mpsc::Sender<TargetEvent>,
}

impl Sessions {
    /// The session that takes in what `from` hands over with this move.
    fn arriving_by(&self, migration: MigrationId, from: NodeId) -> Option<&Arriving> {
        let session = self.arriving.get(&migration.request);
        session.filter(|it| it.migration == migration && it.source == from)
    }
}

impl Leaving {
    /// Passes an input on. A session whose inbox is full, or that has ended, does without.
    fn tell(&self, input: SourceInput) {
        drop(self.inputs.try_send(input));
    }
}

impl Arriving {
    /// Passes an input on. A session whose inbox is full, or that has ended, does without.
    fn tell(&self, input: TargetInput) {
        drop(self.inputs.try_send(TargetEvent::Input(input)));
    }
}

impl Moves {
    /// Hand-overs of a node.
    pub fn new(parts: MoveParts, settings: MoveSettings) -> Self {
        let MoveParts {
            engine,
            clock,
            loads,
            knowledge,
            metrics,
            tasks,
        } = parts;
        Self {
            this: knowledge.this(),
            engine,
            clock,
            loads,
            knowledge,
            metrics,
            tasks,
            settings,
            ways: OnceLock::new(),
            sessions: Mutex::default(),
            handout: Handout::default(),
            ended: Notify::new(),
        }
    }

    /// Lets requests move: `links` asks other nodes, `carrier` takes KV to them.
    pub fn connect(&self, links: Arc<Links>, carrier: Arc<dyn KvTransfer>) {
        // A second call changes nothing: a node has its planes once.
        self.ways.get_or_init(|| Ways { links, carrier });
    }

    /// The jobs that are in this node's engine.
    pub fn jobs(&self) -> Vec<JobStatus> {
        self.engine
            .moving()
            .map(MovingEngine::jobs)
            .unwrap_or_default()
    }

    /// Requests that leave now, and requests that come in.
    pub fn under_way(&self) -> (usize, usize) {
        let sessions = self.lock();
        (sessions.leaving.len(), sessions.arriving.len())
    }

    /// Moves a request that runs or waits here to another node because somebody asked for it, and tells what came of it. Dropping the future
    /// does not stop the move.
    pub async fn hand_over(
        self: &Arc<Self>,
        request: RequestId,
        to: NodeId,
        manner: CopyManner,
    ) -> MoveAnswer {
        let stayed = |reason: &str| MoveAnswer::Stayed {
            reason: reason.to_owned(),
        };
        let Some(moving) = self.engine.moving() else {
            return stayed("this engine cannot let requests go");
        };
        let Some(job) = moving.job(request) else {
            return MoveAnswer::Unknown;
        };
        if to == self.this {
            return stayed("it runs on this node");
        }
        if matches!(job.phase, JobPhase::Paused | JobPhase::Arriving) {
            return stayed("it is being moved");
        }
        if job.phase == JobPhase::Pinned {
            return stayed("only the engine that runs it can finish it as it began");
        }
        if self.ways.get().is_none() || self.knowledge.view().row(to).is_none() {
            return stayed("that node is not in the mesh");
        }
        match source::begin(self, job, to, (MoveReason::Asked, manner)) {
            Ok(answer) => answer
                .await
                .unwrap_or_else(|_| stayed("the node is shutting down")),
            Err(why) => stayed(why),
        }
    }

    /// Sees to an operator's wish that reached this node from `from`. `at` is where the request is, when this node
    /// is its home; else only its home may ask.
    pub async fn asked(
        self: &Arc<Self>,
        from: NodeId,
        at: Option<Whereabouts>,
        (request, to, manner): (RequestId, NodeId, CopyManner),
    ) -> MoveAnswer {
        let unanswered = || MoveAnswer::Stayed {
            reason: "the node that has it did not answer in time".to_owned(),
        };
        let next = match at {
            Some(at) if at.host != self.this => at.host,
            None if request.home != self.this && from == self.this => request.home,
            Some(_) => return self.hand_over(request, to, manner).await,
            None if request.home == from && from != self.this => {
                return self.hand_over(request, to, manner).await;
            }
            None => return MoveAnswer::Unknown,
        };
        let Some(ways) = self.ways.get() else {
            return unanswered();
        };
        let ask = Ask::Move {
            request,
            to,
            manner,
        };
        match ways.links.ask(next, ask, MOVE_PATIENCE).await {
            Ok(answered) => match answered.answer {
                Answer::Move(answer) => answer,
                _ => unanswered(),
            },
            Err(_) => unanswered(),
        }
    }

    /// The target has committed: the request is no longer this node's.
    pub fn committed(&self, from: NodeId, migration: MigrationId) {
        if migration.target == from {
            self.tell_source(migration, SourceInput::Committed);
        }
    }

    /// The other side has given a move up.
    pub fn cancelled(&self, from: NodeId, migration: MigrationId, reason: String) {
        if migration.target == from {
            self.tell_source(migration, SourceInput::Cancelled { reason });
        } else {
            // A session with a full inbox has its lease, and asks the home.
            if let Some(session) = self.lock().arriving_by(migration, from) {
                session.tell(TargetInput::Cancelled);
            }
        }
    }

    fn tell_source(&self, migration: MigrationId, input: SourceInput) {
        let sessions = self.lock();
        let session = sessions.leaving.get(&migration.request);
        if let Some(session) = session.filter(|it| it.migration == migration) {
            // A session with a full inbox has its deadline, and asks the home.
            session.tell(input);
        }
    }

    /// Whether the request may belong to somebody else by now: its stream's end then means nothing.
    pub fn in_doubt(&self, request: RequestId, epoch: Epoch) -> bool {
        let sessions = self.lock();
        sessions
            .leaving
            .get(&request)
            .is_some_and(|it| it.migration.epoch == epoch && it.in_doubt)
    }

    /// Waits until it is known whose the request is. Bounded by the grace period.
    pub async fn no_doubt(&self, request: RequestId, epoch: Epoch) {
        loop {
            let ended = self.ended.notified();
            if !self.in_doubt(request, epoch) {
                return;
            }
            ended.await;
        }
    }

    /// Gives the home of a request the events of the ownership that it granted to this node. Waits for them a
    /// little: the home's stream may be quicker than its answer.
    pub async fn attach(&self, request: RequestId, epoch: Epoch, from: u32) -> Option<HandedOut> {
        let granted = |migration: MigrationId| migration.epoch.next() == epoch;
        {
            let sessions = self.lock();
            // A session that has ended has put its events out already.
            let arriving = sessions.arriving.get(&request);
            if let Some(session) = arriving.filter(|it| granted(it.migration)) {
                session.tell(TargetInput::Attached { from });
            }
            let leaving = sessions.leaving.get(&request);
            if let Some(session) = leaving.filter(|it| granted(it.migration)) {
                session.tell(SourceInput::Attached { from });
            }
        }
        let patience = self.settings.limits.grace;
        self.handout.take((request, epoch), patience).await
    }

    /// Ends all sessions as soon as their requests are safe: this node shuts down.
    pub fn stop(&self) {
        let sessions = self.lock();
        for session in sessions.leaving.values() {
            session.tell(SourceInput::Stop);
        }
        for session in sessions.arriving.values() {
            session.tell(TargetInput::Stop);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
