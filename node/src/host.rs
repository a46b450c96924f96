//! The host: answers offers with its own exact numbers, and runs what was submitted.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use shoal_gossip::{Epoch, LoadSummary, NodeId, RequestId};
use tokio::sync::mpsc;
use tracing::debug;

use crate::dispatch::{Candidate, Freeness, Need, Pool, better_elsewhere, demand_at, should_probe};
use crate::engine::work::{Job, Prepared};
use crate::engine::{Engine, EngineError, EngineEvent, ReservationId, ReserveAsk, ReserveRefusal};
use crate::knowledge::Knowledge;
use crate::load::LoadSource;
use crate::mesh::messages::{Answer, Ask, Frame, FrameBody, Offer, RefuseReason, Submit};
use crate::mesh::{Answered, ControlHandler, ControlPlane, StreamHandler};
use crate::metrics::Metrics;

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
        }
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
            .any(|model| model.id == offer.model)
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
        match self.engine.reserve(ReserveAsk { demand, lease }) {
            Ok(reservation) => Answer::Accept {
                reservation: reservation.0,
                lease_ms: u32::try_from(lease.as_millis()).unwrap_or(u32::MAX),
            },
            Err(ReserveRefusal::QueueFull) => Answer::Refuse(RefuseReason::QueueFull),
            Err(ReserveRefusal::NeverFits) => Answer::Refuse(RefuseReason::NeverFits),
            Err(ReserveRefusal::NotReady) => Answer::Refuse(RefuseReason::NotReady),
        }
    }

    /// Asks two random others for their exact load; the better of them, if it is better than this host.
    async fn probe_for(&self, offer: &Offer) -> Option<Candidate> {
        let control = self.control.get()?;
        let mut excluded: BTreeSet<NodeId> = offer.excluded.iter().copied().collect();
        excluded.insert(self.knowledge.this());
        let need = Need {
            model: offer.model.clone(),
            prompt: offer.prompt,
            generated: offer.generated,
            excluded,
        };
        let max_age = self.settings.max_view_age;
        let (first, second) = self.knowledge.decide(|world| {
            Pool::new(world.view, world.corrections, &need, world.now, max_age).two(world.rng)
        });
        let deadline = self.settings.probe_deadline;
        let probes = [first, second]
            .into_iter()
            .flatten()
            .map(|candidate| async move {
                let answered = control
                    .ask(candidate.node, Ask::Probe, deadline)
                    .await
                    .ok()?;
                Some(Candidate {
                    load: answered.load,
                    age: Duration::ZERO,
                    ..candidate
                })
            });
        let probed: Vec<Candidate> = join_all(probes).await.into_iter().flatten().collect();
        for candidate in &probed {
            self.knowledge.hear(candidate.node, candidate.load);
        }
        // Own numbers may have changed while the others were asked.
        let own_demand = demand_at(offer, self.engine.facts().block_size);
        better_elsewhere(&self.loads.summary(), own_demand, &probed)
    }

    async fn start(&self, submit: Submit) -> Result<Started, EngineError> {
        let Submit {
            request,
            epoch,
            reservation,
            kind,
            body,
            seed,
            prepared,
            generated,
        } = submit;
        let given = prepared.is_some();
        let mut prepared = match prepared {
            Some(prepared) => prepared,
            None => self.engine.prepare(kind, body.clone()).await?,
        };
        if !prepared.seeded {
            prepared.params.seed = seed;
        }
        let told = (!given).then(|| prepared.clone());
        let prompt_tokens = u32::try_from(prepared.prompt.len()).unwrap_or(u32::MAX);
        let events = self.engine.submit(Job {
            request,
            epoch,
            kind,
            body,
            prepared,
            generated,
            reservation: reservation.map(ReservationId),
        })?;
        Ok(Started {
            events,
            prepared: told,
            prompt_tokens,
        })
    }
}

/// A job that the engine has taken.
struct Started {
    events: mpsc::Receiver<EngineEvent>,
    prepared: Option<Prepared>,
    prompt_tokens: u32,
}

/// Aborts the job at the engine unless it ended by itself, whatever way the task ends.
struct AbortOnDrop<'a> {
    engine: &'a dyn Engine,
    request: RequestId,
    epoch: Epoch,
    armed: bool,
}

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.engine.abort(self.request, self.epoch);
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
    async fn serve(&self, from: NodeId, submit: Submit, frames: mpsc::Sender<Frame>) {
        let (request, epoch) = (submit.request, submit.epoch);
        let frame = |body| Frame {
            request,
            epoch,
            body,
        };
        if request.home != from {
            let why = EngineError::BadRequest {
                message: "a request is submitted by its home".into(),
                param: None,
            };
            // The stream may be gone; then nobody is left to tell.
            drop(frames.send(frame(FrameBody::Failed(why))).await);
            return;
        }
        let mut job = match self.start(submit).await {
            Ok(job) => job,
            Err(error) => {
                debug!(%request, %from, %error, "submission refused");
                // As above.
                drop(frames.send(frame(FrameBody::Failed(error))).await);
                return;
            }
        };
        let mut guard = AbortOnDrop {
            engine: self.engine.as_ref(),
            request,
            epoch,
            armed: true,
        };
        let started = FrameBody::Started {
            prepared: job.prepared.take(),
            prompt_tokens: job.prompt_tokens,
        };
        if frames.send(frame(started)).await.is_err() {
            return;
        }
        loop {
            let event = tokio::select! {
                biased;
                () = frames.closed() => return,
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
            if frames.send(frame(body)).await.is_err() || last {
                return;
            }
        }
    }
}
