//! The host: answers offers with its own exact numbers, and runs what was submitted.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use shoal_gossip::{Blocks, Epoch, LoadSummary, ModelApi, NodeId, RequestId};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::dispatch::{Candidate, Freeness, Need, Pool, better_elsewhere, demand_at, should_probe};
use crate::engine::work::{Job, Prepared, RequestKind};
use crate::engine::{Engine, EngineError, EngineEvent, ReservationId, ReserveAsk, ReserveRefusal};
use crate::home::Home;
use crate::knowledge::Knowledge;
use crate::load::LoadSource;
use crate::mesh::messages::{
    Answer, Ask, Attach, Frame, FrameBody, Offer, Open, RefuseReason, Submit,
};
use crate::mesh::{Answered, ControlHandler, ControlPlane, StreamHandler};
use crate::metrics::Metrics;
use crate::moves::Moves;

/// How a host behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSettings {
    /// How long room is kept for an accepted offer.
    pub lease: Duration,
    /// A host whose freeness would fall below this looks for a better node first.
    pub redirect_below: Freeness,
    /// How long it waits for those it probes. The home waits meanwhile.
    pub probe_deadline: Duration,
    /// Loads older than this are unknown.
    pub max_view_age: Duration,
}

/// The host's side of one node.
#[derive(Debug)]
pub struct Host {
    engine: Arc<dyn Engine>,
    loads: Arc<LoadSource>,
    knowledge: Arc<Knowledge>,
    settings: HostSettings,
    metrics: Arc<Metrics>,
    /// Set once the control plane runs; the plane needs its handler, this host, before.
    control: OnceLock<Arc<dyn ControlPlane>>,
    /// Set once they exist; both hold this host.
    roles: OnceLock<Roles>,
}

#[derive(Debug)]
struct Roles {
    home: Weak<Home>,
    moves: Weak<Moves>,
    drain: CancellationToken,
}

impl Host {
    /// A host that runs requests on `engine`.
    pub fn new(
        engine: Arc<dyn Engine>,
        loads: Arc<LoadSource>,
        knowledge: Arc<Knowledge>,
        metrics: Arc<Metrics>,
        settings: HostSettings,
    ) -> Self {
        Self {
            engine,
            loads,
            knowledge,
            settings,
            metrics,
            control: OnceLock::new(),
            roles: OnceLock::new(),
        }
    }

    /// Lets the host pass on what is for this node's home and for its hand-overs. `drain` is cancelled when another node passes
    /// on the wish that this one stops.
    pub fn join(&self, home: &Arc<Home>, moves: &Arc<Moves>, drain: CancellationToken) {
        // A second call changes nothing: a node has one of each.
        self.roles.get_or_init(|| Roles {
            home: Arc::downgrade(home),
            moves: Arc::downgrade(moves),
            drain,
        });
    }

    fn home(&self) -> Option<Arc<Home>> {
        self.roles.get()?.home.upgrade()
    }

    fn moves(&self) -> Option<Arc<Moves>> {
        self.roles.get()?.moves.upgrade()
    }

    /// What concerns requests that move.
    async fn answer_move(&self, from: NodeId, ask: Ask) -> Answer {
        let (Some(home), Some(moves)) = (self.home(), self.moves()) else {
            return Answer::Refuse(RefuseReason::NotReady);
        };
        match ask {
            Ask::Propose(proposal) => Answer::Proposal(moves.propose(from, proposal)),
            Ask::Claim { request, claim } => Answer::Claim(home.claim(from, request, claim).await),
            Ask::Committed { migration } => {
                moves.committed(from, migration);
                Answer::Done
            }
            Ask::CancelMove { migration, reason } => {
                moves.cancelled(from, migration, reason);
                Answer::Done
            }
            Ask::Move {
                request,
                to,
                manner,
            } => {
                let at = home.whereabouts(request);
                Answer::Move(moves.asked(from, at, (request, to, manner)).await)
            }
            Ask::Offer(_) | Ask::Probe | Ask::Abort { .. } | Ask::Release { .. } | Ask::Drain => {
                Answer::Done
            }
        }
    }

    /// Another node passes on that this one is to stop.
    fn stop(&self, from: NodeId) -> Answer {
        let Some(roles) = self.roles.get() else {
            return Answer::Refuse(RefuseReason::NotReady);
        };
        info!(%from, "asked to hand over what is here, and to stop");
        roles.drain.cancel();
        Answer::Done
    }

    /// Lets the host probe others. Before that it answers from its own numbers alone.
    pub fn connect(&self, control: Arc<dyn ControlPlane>) {
        // A second call changes nothing: there is one control plane per node.
        self.control.get_or_init(|| control);
    }

    async fn consider(&self, from: NodeId, offer: Offer) -> Answer {
        if self.loads.is_draining() {
            return Answer::Refuse(RefuseReason::Draining);
        }
        if !self
            .engine
            .facts()
            .models
            .iter()
            .any(|model| model.id == offer.model && offer.fit.takes(model))
        {
            return Answer::Refuse(RefuseReason::WrongModel);
        }
        let demand = demand_at(&offer, self.engine.facts().block_size);
        let own = self.loads.summary();
        if should_probe(&own, demand, offer.hops, self.settings.redirect_below)
            && let Some(better) = self.probe_for(&offer).await
        {
            debug!(target: "shoal::events::redirect", request = %offer.request, %from, to = %better.node,
                own = %Freeness::for_dispatch(&own, demand), theirs = %better.freeness());
            return Answer::Redirect {
                to: better.node,
                load: better.load,
            };
        }
        let lease = self.settings.lease;
        let ask = ReserveAsk {
            demand,
            lease,
            at_once: false,
            waited: offer.waited,
            resumed: offer.resumed,
            home: offer.request.home,
        };
        promised(self.engine.reserve(ask), lease)
    }

    /// Asks two others for their exact load; the better of them, if it is better than this host.
    async fn probe_for(&self, offer: &Offer) -> Option<Candidate> {
        let control = self.control.get()?;
        let mut excluded: BTreeSet<NodeId> = offer.excluded.iter().copied().collect();
        excluded.insert(self.knowledge.this());
        let need = Need {
            model: offer.model.clone(),
            fit: offer.fit,
            prompt: offer.prompt,
            generated: offer.generated,
            excluded,
        };
        let max_age = self.settings.max_view_age;
        let two = self.knowledge.decide(|world| {
            let pool = Pool::new(world.view, world.corrections, &need, world.now, max_age);
            pool.two_to_ask(world.rng)
        });
        let deadline = self.settings.probe_deadline;
        let probes = two.map(|candidate| async move {
            let answered = control.ask(candidate.node, Ask::Probe, deadline).await;
            let load = answered.ok().map(|answered| answered.load);
            (candidate, load)
        });
        let mut probed = Vec::new();
        for (candidate, load) in join_all(probes).await {
            match load {
                Some(load) => {
                    self.knowledge.hear(candidate.node, load);
                    let age = Duration::ZERO;
                    probed.push(Candidate {
                        load,
                        age,
                        ..candidate
                    });
                }
                None => self.knowledge.silent(candidate.node),
            }
        }
        // Own numbers may have changed while the others were asked.
        let block_size = self.engine.facts().block_size;
        let own = Candidate {
            node: self.knowledge.this(),
            load: self.loads.summary(),
            age: Duration::ZERO,
            charged: Blocks::ZERO,
            demand: demand_at(offer, block_size),
            block_size,
        };
        better_elsewhere(&own, &probed)
    }

    /// The body as this engine reads it, or next to nothing if it reads it by itself.
    async fn read(
        &self,
        model: &str,
        kind: Option<RequestKind>,
        body: &Bytes,
    ) -> Result<Prepared, EngineError> {
        let facts = self.engine.facts();
        let served = facts.models.iter().find(|served| served.id == model);
        match (served.map(|served| served.api), kind) {
            (None, _) => Err(EngineError::UnknownModel(model.to_owned())),
            (Some(ModelApi::Tokens), Some(kind)) => self.engine.prepare(kind, body.clone()).await,
            (Some(ModelApi::Tokens), None) => Err(EngineError::BadRequest {
                message: "the engine of this model does not take this path".into(),
                param: None,
            }),
            (Some(ModelApi::Http), _) => Ok(Prepared::unread(model)),
        }
    }

    async fn start(&self, submit: Submit) -> Result<Started, EngineError> {
        let Submit {
            request,
            epoch,
            reservation,
            model,
            kind,
            http,
            body,
            seed,
            prepared,
            generated,
            spoken,
        } = submit;
        let given = prepared.is_some();
        let mut prepared = match prepared {
            Some(prepared) => prepared,
            None => self.read(&model, kind, &body).await?,
        };
        if !prepared.seeded {
            prepared.params.seed = seed;
        }
        let told = (!given && !prepared.prompt.is_empty()).then(|| prepared.clone());
        let prompt_tokens = prepared.prompt_tokens().0;
        let events = self.engine.submit(Job {
            request,
            epoch,
            kind,
            http,
            body,
            prepared,
            generated,
            spoken,
            reservation: reservation.map(ReservationId),
        })?;
        Ok(Started {
            events,
            prepared: told,
            prompt_tokens,
        })
    }
}

impl Host {
    /// A request that this node has claimed, for its home's stream.
    async fn attach(&self, attach: Attach) -> Result<Started, EngineError> {
        let Attach {
            request,
            epoch,
            from,
        } = attach;
        let moves = self.moves().ok_or(EngineError::NotReady)?;
        let resumed = moves.attach(request, epoch, from).await;
        let resumed = resumed.ok_or_else(|| {
            EngineError::Broken("the request that was claimed is not here any more".into())
        })?;
        Ok(Started {
            events: resumed.events,
            prepared: None,
            prompt_tokens: resumed.prompt_tokens,
        })
    }

    /// Sends what a job draws, until it ends or its home is gone.
    async fn pump(
        &self,
        mut job: Started,
        frames: &mpsc::Sender<Frame>,
        frame: impl Fn(FrameBody) -> Frame + Send,
    ) {
        let started = frame(FrameBody::Started {
            prepared: job.prepared.take(),
            prompt_tokens: job.prompt_tokens,
        });
        let mut guard = AbortOnDrop {
            host: self,
            request: started.request,
            epoch: started.epoch,
            armed: true,
        };
        if frames.send(started).await.is_err() {
            return self.outlive_doubt(&guard).await;
        }
        loop {
            let event = tokio::select! {
                biased;
                () = frames.closed() => return self.outlive_doubt(&guard).await,
                event = job.events.recv() => event,
            };
            let (body, last) = match event {
                Some(EngineEvent::Tokens(batch)) => (FrameBody::Tokens(batch), false),
                Some(EngineEvent::Finished(finish)) => (FrameBody::Finished(finish), true),
                Some(EngineEvent::Failed(error)) => (FrameBody::Failed(error), true),
                None => (
                    FrameBody::Failed(EngineError::Broken("the job ended without a word".into())),
                    true,
                ),
            };
            guard.armed = !last;
            if frames.send(frame(body)).await.is_err() {
                return self.outlive_doubt(&guard).await;
            }
            if last {
                return;
            }
        }
    }

    /// The home no longer reads. While a hand-over asks it whose the request is, the job must stay: whoever drops its
    /// events ends it.
    async fn outlive_doubt(&self, guard: &AbortOnDrop<'_>) {
        if let Some(moves) = self.moves() {
            moves.no_doubt(guard.request, guard.epoch).await;
        }
    }
}

/// A job that the engine has taken.
struct Started {
    events: mpsc::Receiver<EngineEvent>,
    prepared: Option<Prepared>,
    prompt_tokens: u32,
}

/// Aborts the job at the engine unless it ended by itself, whatever way the task ends. One that is being handed
/// over may belong to another node by now, and its home has closed this stream for that: the hand-over ends it.
struct AbortOnDrop<'a> {
    host: &'a Host,
    request: RequestId,
    epoch: Epoch,
    armed: bool,
}

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        let in_doubt = || {
            self.host
                .moves()
                .is_some_and(|moves| moves.in_doubt(self.request, self.epoch))
        };
        if self.armed && !in_doubt() {
            self.host.engine.abort(self.request, self.epoch);
        }
    }
}

#[async_trait]
impl ControlHandler for Host {
    async fn answer(&self, from: NodeId, ask: Ask) -> Answered {
        let answer = match ask {
            Ask::Offer(offer) => {
                let answer = self.consider(from, offer).await;
                self.metrics.offer_received(answer.kind());
                answer
            }
            Ask::Probe => Answer::Load,
            Ask::Abort { request, epoch } => {
                // Only its home may end a request.
                if request.home == from {
                    self.engine.abort(request, epoch);
                }
                Answer::Done
            }
            Ask::Release { reservation } => {
                self.engine.release(ReservationId(reservation));
                Answer::Done
            }
            Ask::Drain => self.stop(from),
            ask @ (Ask::Propose(_)
            | Ask::Claim { .. }
            | Ask::Committed { .. }
            | Ask::CancelMove { .. }
            | Ask::Move { .. }) => self.answer_move(from, ask).await,
        };
        // Made after the decision, so that it contains the reservation.
        Answered {
            answer,
            load: self.loads.summary(),
        }
    }

    fn load(&self) -> LoadSummary {
        self.loads.summary()
    }

    fn heard(&self, from: NodeId, load: LoadSummary) {
        self.knowledge.hear(from, load);
    }
}

#[async_trait]
impl StreamHandler for Host {
    async fn serve(&self, from: NodeId, open: Open, frames: mpsc::Sender<Frame>) {
        let (request, epoch) = (open.request(), open.epoch());
        let frame = |body| Frame {
            request,
            epoch,
            body,
        };
        let started = if request.home == from {
            match open {
                Open::Submit(submit) => self.start(*submit).await,
                Open::Attach(attach) => self.attach(attach).await,
            }
        } else {
            Err(EngineError::BadRequest {
                message: "a request is submitted by its home".into(),
                param: None,
            })
        };
        let job = match started {
            Ok(job) => job,
            Err(error) => {
                debug!(%request, %from, %error, "submission refused");
                // The stream may be gone; then nobody is left to tell.
                drop(frames.send(frame(FrameBody::Failed(error))).await);
                return;
            }
        };
        self.pump(job, &frames, frame).await;
    }
}

/// The answer to an offer that was considered: whether room is promised until a lease ends.
pub(crate) fn promised(room: Result<ReservationId, ReserveRefusal>, lease: Duration) -> Answer {
    match room {
        Ok(reservation) => Answer::Accept {
            reservation: reservation.0,
            lease_ms: u32::try_from(lease.as_millis()).unwrap_or(u32::MAX),
        },
        Err(ReserveRefusal::QueueFull | ReserveRefusal::NoRoomNow) => {
            Answer::Refuse(RefuseReason::QueueFull)
        }
        Err(ReserveRefusal::NeverFits) => Answer::Refuse(RefuseReason::NeverFits),
        Err(ReserveRefusal::NotReady) => Answer::Refuse(RefuseReason::NotReady),
    }
}
