//! Finding a host: performs the steps of the placement core.

use std::collections::BTreeSet;
use std::sync::Arc;

use shoal_gossip::NodeId;
use tokio::time::timeout;
use tracing::debug;

use crate::dispatch::{Choice, GiveUp, Need, Outcome, Placement, Reason, Step, World};
use crate::engine::EngineError;
use crate::engine::work::Prepared;
use crate::frontend::HomeError;
use crate::home::vigil::Guard;
use crate::home::vitals::Death;
use crate::home::{Home, Request};
use crate::knowledge::Knowledge;
use crate::mesh::messages::{Ask, FrameBody, Offer, Open, Submit};
use crate::mesh::{FrameReceiver, StreamError};

/// A request that a host has taken.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) host: NodeId,
    pub(super) prompt_tokens: u32,
    pub(super) frames: FrameReceiver,
    /// Tells when the host is dead.
    pub(super) guard: Guard,
}

/// How a host's stream began.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) placed: Placed,
    /// What the host made of the text, when the home did not send it.
    prepared: Option<Prepared>,
}

/// Why a host's stream did not begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("the stream ended at once")]
    Ended,
    #[error("no first frame in time")]
    Late,
    #[error("the host died: {}", .0.as_str())]
    Dead(Death),
    #[error("the stream did not begin with a start")]
    NoStart,
    #[error(transparent)]
    Refused(EngineError),
}

/// A placement whose pending charge is taken back however its future ends.
struct Course {
    placement: Placement,
    knowledge: Arc<Knowledge>,
}

impl Course {
    fn step(&mut self, act: impl FnOnce(&mut Placement, &mut World<'_>) -> Step) -> Step {
        let placement = &mut self.placement;
        self.knowledge.decide(|world| act(placement, world))
    }
}

impl Drop for Course {
    fn drop(&mut self) {
        let placement = &mut self.placement;
        self.knowledge.correct(|corrections| {
            placement.abandon(corrections);
        });
    }
}

/// Why a submission came to nothing.
enum SubmitFailure {
    /// Another node may do it.
    Elsewhere {
        /// The node said that it is full.
        full: bool,
    },
    /// No node will do it.
    Client(HomeError),
}

impl Home {
    /// Offers the request round until a host has started it.
    pub(super) async fn place(
        &self,
        request: &mut Request,
        excluded: BTreeSet<NodeId>,
    ) -> Result<Placed, HomeError> {
        let mut course = Course {
            placement: Placement::new(request.need(excluded), self.settings.placement),
            knowledge: Arc::clone(&self.knowledge),
        };
        let mut step = course.step(Placement::start);
        loop {
            step = match step {
                Step::Offer { choice, hops } => {
                    self.note(request, &choice, hops);
                    let to = choice.taken.node;
                    let offer = self.offer_for(request, hops, course.placement.need());
                    let answered = self
                        .links
                        .ask(to, Ask::Offer(offer), self.settings.offer_deadline)
                        .await;
                    match answered {
                        Ok(answered) => {
                            self.metrics.offer_answered(answered.answer.kind());
                            course.step(|placement, world| {
                                let outcome = Outcome::Answered {
                                    answer: &answered.answer,
                                    load: answered.load,
                                };
                                placement.answered(outcome, world)
                            })
                        }
                        Err(error) => {
                            debug!(request = %request.id, node = %to, %error, "offer failed");
                            self.metrics.offer_answered("none");
                            self.metrics.retry("silent");
                            course
                                .step(|placement, world| placement.answered(Outcome::Silent, world))
                        }
                    }
                }
                Step::Submit { to, reservation } => {
                    match self.submit(request, to, reservation).await {
                        Ok(placed) => return Ok(placed),
                        Err(SubmitFailure::Client(error)) => return Err(error),
                        Err(SubmitFailure::Elsewhere { full }) => {
                            self.metrics.retry("submission");
                            course.step(|placement, world| placement.submit_failed(to, full, world))
                        }
                    }
                }
                Step::GiveUp(why) => return Err(self.gave_up(request, why)),
            };
        }
    }

    fn offer_for(&self, request: &Request, hops: u8, need: &Need) -> Offer {
        Offer {
            request: request.id,
            epoch: request.ledger.epoch().next(),
            model: request.model.clone(),
            fit: need.fit,
            prompt: need.prompt,
            generated: need.generated,
            max_output: request.max_output,
            priority: request.priority,
            hops,
            waited: self.knowledge.now().since(request.came),
            resumed: request.resumed,
            excluded: need.excluded.iter().copied().collect(),
        }
    }

    async fn submit(
        &self,
        request: &mut Request,
        to: NodeId,
        reservation: u64,
    ) -> Result<Placed, SubmitFailure> {
        let submit = Submit {
            request: request.id,
            epoch: request.ledger.pass_on(to),
            reservation: Some(reservation),
            model: request.model.clone(),
            kind: request.kind,
            http: request.http.clone(),
            body: request.body.clone(),
            seed: request.seed,
            prepared: request.prepared.clone(),
            generated: request.ledger.received().to_vec(),
            spoken: request.ledger.spoken(),
        };
        match self.open(to, submit.into()).await {
            Ok(Opened { placed, prepared }) => {
                if request.prepared.is_none() {
                    request.prepared = prepared;
                }
                Ok(placed)
            }
            Err(OpenError::Refused(error)) => Err(after_failure(error)),
            Err(error) => {
                debug!(request = %request.id, node = %to, %error, "submission failed");
                Err(SubmitFailure::Elsewhere { full: false })
            }
        }
    }

    /// Opens the stream of a request at its host, and waits for its start.
    pub(super) async fn open(&self, to: NodeId, opening: Open) -> Result<Opened, OpenError> {
        let start = async {
            let mut frames = self.links.open(to, opening).await?;
            let first = frames.next().await.transpose()?;
            Ok((frames, first.ok_or(OpenError::Ended)?.body))
        };
        let mut guard = self.vigil.over(to, self.knowledge.now());
        let (frames, first) = tokio::select! {
            biased;
            started = timeout(self.settings.start_deadline, start) => {
                started.unwrap_or(Err(OpenError::Late))?
            }
            death = guard.dead() => return Err(OpenError::Dead(death)),
        };
        match first {
            FrameBody::Started {
                prepared,
                prompt_tokens,
            } => Ok(Opened {
                placed: Placed {
                    host: to,
                    prompt_tokens,
                    frames,
                    guard,
                },
                prepared,
            }),
            FrameBody::Failed(error) => Err(OpenError::Refused(error)),
            FrameBody::Tokens(_) | FrameBody::Finished(_) => Err(OpenError::NoStart),
        }
    }

    fn gave_up(&self, request: &Request, why: GiveUp) -> HomeError {
        let retry_after = self.settings.retry_after;
        debug!(request = %request.id, ?why, "no host");
        match why {
            GiveUp::UnknownModel => HomeError::UnknownModel(request.model.clone()),
            GiveUp::Overloaded => HomeError::Overloaded { retry_after },
            GiveUp::Unavailable => HomeError::Unavailable { retry_after },
            GiveUp::NeverFits => HomeError::BadRequest {
                message: format!(
                    "the prompt of about {} tokens needs more KV memory than any node has; shorten it",
                    request.prompt
                ),
                param: None,
            },
        }
    }

    fn note(&self, request: &Request, choice: &Choice, hops: u8) {
        let taken = &choice.taken;
        let policy = self.settings.policy.as_str();
        self.metrics
            .dispatch_decision(policy, choice.reason.as_str());
        if choice.reason == Reason::Redirected {
            self.metrics.redirects.increment(1);
        }
        debug!(target: "shoal::events::dispatch", request = %request.id, node = %taken.node,
            policy, reason = choice.reason.as_str(), freeness = %taken.freeness(),
            age_ms = taken.age.as_millis() as u64, demand = taken.demand.0, charged = taken.charged.0,
            other = ?choice.other, hops);
    }
}

fn after_failure(error: EngineError) -> SubmitFailure {
    match error {
        EngineError::BadRequest { message, param } => {
            SubmitFailure::Client(HomeError::BadRequest { message, param })
        }
        EngineError::QueueFull => SubmitFailure::Elsewhere { full: true },
        EngineError::UnknownModel(_) | EngineError::NotReady | EngineError::Broken(_) => {
            SubmitFailure::Elsewhere { full: false }
        }
    }
}
