//! Following a running request: host's frames to the ledger, ledger's verdicts to the client, claims to the
//! arbiter, and a new placement when the host is lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Epoch, NodeId, Timestamp, Tokens};
use shoal_migrate::ClaimAnswer;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{debug, info};

use crate::engine::EngineError;
use crate::frontend::{HomeError, HomeEvent};
use crate::home::desk::{ClaimAsk, Seat, Whereabouts};
use crate::home::place::{Opened, Placed};
use crate::home::replay::{Next, Replay};
use crate::home::{Home, Request};
use crate::ledger::Verdict;
use crate::mesh::messages::{Ask, Attach};

/// Why following stopped.
enum End {
    /// It is over, one way or the other; the client was told or is gone.
    Over,
    /// The host is lost or useless; the request can go on elsewhere.
    HostLost(String),
    /// This node has claimed the request, and was granted it.
    Moved(NodeId),
}

/// An event that the client has not taken yet, and when it is given up for that.
struct Pending {
    event: HomeEvent,
    /// Nothing follows it.
    last: bool,
    until: Timestamp,
}

/// One request on its way to its client.
pub(super) struct Follower {
    home: Arc<Home>,
    request: Request,
    placed: Placed,
    events: mpsc::Sender<HomeEvent>,
    seat: Seat,
    /// What was lost under it.
    replay: Replay,
    /// What the last host said, if it said why it would not.
    refusal: Option<EngineError>,
}

impl Follower {
    pub(super) fn new(
        home: Arc<Home>,
        request: Request,
        placed: Placed,
        events: mpsc::Sender<HomeEvent>,
    ) -> Self {
        let whereabouts = Whereabouts {
            host: placed.host,
            epoch: request.ledger.epoch(),
            prompt: Tokens(placed.prompt_tokens),
            output: Tokens::ZERO,
        };
        let seat = home.desk.enter(request.id, whereabouts);
        let replay = Replay::new(home.settings.replay);
        Self {
            home,
            request,
            placed,
            events,
            seat,
            replay,
            refusal: None,
        }
    }

    /// Follows the request to its end. Returning drops the frames, which aborts it at its host.
    pub(super) async fn run(mut self) {
        loop {
            let end = match self.relay().await {
                End::Moved(to) => self.attach(to).await,
                end => end,
            };
            match end {
                End::Over => return,
                End::Moved(_) => {}
                End::HostLost(why) => {
                    if !self.place_again(why).await {
                        return;
                    }
                }
            }
            let (host, epoch) = (self.placed.host, self.request.ledger.epoch());
            self.seat.note(|at| (at.host, at.epoch) = (host, epoch));
        }
    }

    async fn relay(&mut self) -> End {
        let mut pending: Option<Pending> = None;
        let events = self.events.clone();
        loop {
            // A client that does not read holds up its frames, and nothing else.
            let (waits, patience) = match &pending {
                Some(pending) => (true, pending.until.since(self.home.knowledge.now())),
                None => (false, Duration::ZERO),
            };
            tokio::select! {
                biased;
                () = events.closed() => return End::Over,
                () = self.home.hurry.cancelled() => {
                    self.fail(HomeError::ShuttingDown).await;
                    return End::Over;
                }
                Some(ask) = self.seat.claims.recv() => {
                    if let Some(to) = self.judge(ask) {
                        // What the client has not taken was received, and still comes first.
                        return match self.hand_over(pending.take()).await {
                            true => End::Moved(to),
                            false => End::Over,
                        };
                    }
                }
                permit = events.reserve(), if waits => {
                    let (Ok(permit), Some(ready)) = (permit, pending.take()) else {
                        return End::Over;
                    };
                    permit.send(ready.event);
                    if ready.last {
                        return End::Over;
                    }
                }
                () = sleep(patience), if waits => {
                    debug!(request = %self.request.id, "client has not read in time; its request is aborted");
                    return End::Over;
                }
                death = self.placed.guard.dead() => {
                    // What no other engine can go on with has nothing to lose by waiting until its stream ends.
                    if death.is_proven() || !self.request.ledger.is_torn() {
                        return End::HostLost(format!("its host is dead: {}", death.as_str()));
                    }
                    self.placed.guard.rest();
                }
                frame = self.placed.frames.next(), if !waits => {
                    let verdict = match frame {
                        Some(Ok(frame)) => {
                            self.placed.guard.heard(self.home.knowledge.now());
                            self.request.accept(frame)
                        }
                        Some(Err(error)) => return End::HostLost(error.to_string()),
                        None => return End::HostLost("the stream ended without an end".into()),
                    };
                    match self.act_on(verdict) {
                        Ok(next) => pending = next,
                        Err(end) => return end,
                    }
                }
            }
        }
    }

    /// What a verdict means for the client, or why following stops.
    fn act_on(&mut self, verdict: Verdict) -> Result<Option<Pending>, End> {
        let (event, last) = match verdict {
            Verdict::Deliver(batch) => {
                let received = Tokens(self.request.ledger.count());
                self.seat.note(|at| at.output = received);
                (HomeEvent::Tokens(batch), false)
            }
            Verdict::Finish(finish) => (HomeEvent::Finished(finish), true),
            Verdict::Ignore => return Ok(None),
            Verdict::Gap { expected, got } => {
                let why = format!("expected output index {expected}, got {got}");
                return Err(End::HostLost(why));
            }
            Verdict::Failed(EngineError::BadRequest { message, param }) => {
                let error = HomeError::BadRequest { message, param };
                (HomeEvent::Failed(error), true)
            }
            Verdict::Failed(
                error @ (EngineError::UnknownModel(_)
                | EngineError::QueueFull
                | EngineError::NotReady
                | EngineError::Broken(_)),
            ) => {
                let why = error.to_string();
                self.refusal = Some(error);
                return Err(End::HostLost(why));
            }
        };
        Ok(Some(Pending {
            event,
            last,
            until: self.home.knowledge.now() + self.home.settings.stall_deadline,
        }))
    }

    /// Answers a claim. `Some` when it has changed the owner.
    fn judge(&mut self, ask: ClaimAsk) -> Option<NodeId> {
        let before = self.request.ledger.epoch();
        let answer = self.request.ledger.claim(ask.by, ask.claim);
        let granted = matches!(answer, ClaimAnswer::Granted { .. });
        let changed = granted && self.request.ledger.epoch() != before;
        debug!(target: "shoal::events::claim", request = %self.request.id, by = %ask.by,
            epoch = ask.claim.epoch.0, output = ask.claim.output, ?answer);
        if changed {
            self.seat
                .note(|at| (at.host, at.epoch) = (ask.by, ask.claim.epoch));
        }
        if ask.reply.send(answer).is_err() {
            debug!(request = %self.request.id, "the claimant no longer waits; it asks again");
        }
        changed.then_some(ask.by)
    }

    /// Gives the client what it had not taken when the owner changed; false when it is gone.
    async fn hand_over(&self, pending: Option<Pending>) -> bool {
        match pending {
            None => true,
            Some(pending) => self.tell(pending.event).await,
        }
    }

    /// Opens the stream of the request's new owner.
    async fn attach(&mut self, to: NodeId) -> End {
        let attach = Attach {
            request: self.request.id,
            epoch: self.request.ledger.epoch(),
            from: self.request.ledger.count(),
        };
        let opened = tokio::select! {
            biased;
            () = self.events.closed() => return End::Over,
            opened = self.home.open(to, attach.into()) => opened,
        };
        let why = match opened {
            Ok(Opened { placed, .. }) => {
                self.home.metrics.attached();
                self.replay.placed();
                self.placed = placed;
                return End::Moved(to);
            }
            Err(error) => error.to_string(),
        };
        // Whoever runs it now, it is not the former host.
        self.placed.host = to;
        End::HostLost(format!("after it claimed the request: {why}"))
    }

    /// Places the request again after its host was lost; false when that is over, and the client was told.
    async fn place_again(&mut self, why: String) -> bool {
        let old = (self.placed.host, self.request.ledger.epoch());
        let home = Arc::clone(&self.home);
        let mut next = self.replay.host_lost(home.knowledge.now(), old.0);
        info!(request = %self.request.id, host = %old.0, tokens = self.request.ledger.count(), why,
            losses = self.replay.losses(), "host lost; placing the request again");
        if self.request.ledger.is_torn() {
            let alone = "its engine alone could have finished the answer";
            self.fail(HomeError::Lost(format!("{why}; {alone}"))).await;
            return false;
        }
        self.request.resumed = true;
        let mut lost = why.clone();
        loop {
            let (wait, excluded) = match &next {
                Next::Place(excluded) => (None, excluded.clone()),
                Next::Wait(wait) => (Some(*wait), BTreeSet::new()),
                Next::GiveUp => {
                    home.metrics.replay("lost");
                    self.stop_old(old);
                    self.fail(self.last_word(HomeError::Lost(lost))).await;
                    return false;
                }
            };
            let claimed = tokio::select! {
                biased;
                () = self.events.closed() => return false,
                () = home.hurry.cancelled() => {
                    self.fail(HomeError::ShuttingDown).await;
                    return false;
                }
                () = sleep(wait.unwrap_or_default()), if wait.is_some() => {
                    next = self.replay.waited();
                    continue;
                }
                placed = home.place(&mut self.request, excluded), if wait.is_none() => match placed {
                    Ok(placed) => {
                        home.metrics.replay("placed");
                        self.stop_old(old);
                        self.replay.placed();
                        self.placed = placed;
                        return true;
                    }
                    Err(error) => {
                        lost = format!("{why}; then {error}");
                        next = self.after_refusal(&error);
                        continue;
                    }
                },
                Some(ask) = self.seat.claims.recv() => self.judge(ask),
            };
            // The host was lost in the middle of a hand-over, and its target has the request whole.
            if let Some(to) = claimed {
                home.metrics.replay("claimed");
                return match self.attach(to).await {
                    End::Moved(_) => true,
                    End::Over => false,
                    End::HostLost(why) => Box::pin(self.place_again(why)).await,
                };
            }
        }
    }

    /// What comes after nobody took a request that had a host before.
    fn after_refusal(&mut self, error: &HomeError) -> Next {
        let hopeless = match error {
            HomeError::BadRequest { .. } | HomeError::ShuttingDown => true,
            // An engine said no before the first token: its client was promised nothing yet, and asks again by itself.
            HomeError::Overloaded { .. }
            | HomeError::Unavailable { .. }
            | HomeError::UnknownModel(_)
            | HomeError::Lost(_) => self.request.ledger.count() == 0 && self.refusal.is_some(),
        };
        if hopeless {
            return Next::GiveUp;
        }
        let now = self.home.knowledge.now();
        self.replay.nobody(now, &mut self.home.rng())
    }

    /// What to tell a client that got nothing: the engines' own reason, if they gave one.
    fn last_word(&self, lost: HomeError) -> HomeError {
        let retry_after = self.home.settings.retry_after;
        match &self.refusal {
            _ if self.request.ledger.count() > 0 => lost,
            Some(EngineError::QueueFull) => HomeError::Overloaded { retry_after },
            Some(EngineError::NotReady) => HomeError::Unavailable { retry_after },
            Some(EngineError::UnknownModel(model)) => HomeError::UnknownModel(model.clone()),
            Some(EngineError::Broken(_) | EngineError::BadRequest { .. }) | None => lost,
        }
    }

    async fn fail(&self, error: HomeError) {
        self.tell(HomeEvent::Failed(error)).await;
    }

    /// Gives the client an event; false when it is gone or has not read for too long.
    async fn tell(&self, event: HomeEvent) -> bool {
        let patience = self.home.settings.stall_deadline;
        timeout(patience, self.events.send(event))
            .await
            .is_ok_and(|sent| sent.is_ok())
    }

    /// Tells a lost host to stop, in case it is only the way to it that was lost. Nothing waits for the
    /// answer: frames of the old ownership are void already.
    fn stop_old(&self, (host, epoch): (NodeId, Epoch)) {
        let links = Arc::clone(&self.home.links);
        let deadline = self.home.settings.offer_deadline;
        let ask = Ask::Abort {
            request: self.request.id,
            epoch,
        };
        self.home.tasks.spawn(async move {
            if let Err(error) = links.ask(host, ask, deadline).await {
                debug!(%host, %error, "could not tell a lost host to stop");
            }
        });
    }
}
