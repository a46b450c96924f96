//! Following a running request: host's frames to the ledger, ledger's verdicts to the client, and a
//! new placement when the host is lost.

use std::collections::BTreeSet;
use std::sync::Arc;

use shoal_gossip::{Epoch, NodeId};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::{debug, info};

use crate::engine::EngineError;
use crate::frontend::{HomeError, HomeEvent};
use crate::home::place::Placed;
use crate::home::{Home, Request};
use crate::ledger::Verdict;
use crate::mesh::messages::{Ask, MAX_EXCLUDED};

/// Why following stopped.
enum End {
    /// It is over, one way or the other; the client was told or is gone.
    Over,
    /// The host is lost or useless; the request can go on elsewhere.
    HostLost(String),
}

impl Home {
    /// Follows a request to its end. Returning drops the frames, which aborts it at its host.
    pub(super) async fn follow(
        self: Arc<Self>,
        mut request: Request,
        mut placed: Placed,
        events: mpsc::Sender<HomeEvent>,
    ) {
        let mut lost = BTreeSet::new();
        let mut replays = 0;
        loop {
            let why = match self.relay(&mut request, &mut placed, &events).await {
                End::Over => return,
                End::HostLost(why) => why,
            };
            replays += 1;
            let old = (placed.host, request.ledger.epoch());
            lost.insert(placed.host);
            info!(request = %request.id, host = %placed.host, tokens = request.ledger.received().len(),
                why, replays, "host lost; placing the request again");
            if replays > self.settings.max_replays || lost.len() > MAX_EXCLUDED {
                self.tell(&events, HomeEvent::Failed(HomeError::Lost(why)))
                    .await;
                return;
            }
            let again = tokio::select! {
                biased;
                () = events.closed() => return,
                again = self.place(&mut request, lost.clone()) => again,
            };
            self.metrics
                .replay(if again.is_ok() { "placed" } else { "lost" });
            self.stop_old(&request, old);
            match again {
                Ok(next) => placed = next,
                Err(error) => {
                    let error = HomeError::Lost(format!("{why}; then {error}"));
                    self.tell(&events, HomeEvent::Failed(error)).await;
                    return;
                }
            }
        }
    }

    async fn relay(
        &self,
        request: &mut Request,
        placed: &mut Placed,
        events: &mpsc::Sender<HomeEvent>,
    ) -> End {
        loop {
            let frame = tokio::select! {
                biased;
                () = events.closed() => return End::Over,
                () = self.hurry.cancelled() => {
                    self.tell(events, HomeEvent::Failed(HomeError::ShuttingDown)).await;
                    return End::Over;
                }
                frame = placed.frames.next() => frame,
            };
            let frame = match frame {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return End::HostLost(error.to_string()),
                None => return End::HostLost("the stream ended without an end".into()),
            };
            match request.ledger.accept(frame) {
                Verdict::Deliver(batch) => {
                    if !self.tell(events, HomeEvent::Tokens(batch)).await {
                        return End::Over;
                    }
                }
                Verdict::Finish(finish) => {
                    self.tell(events, HomeEvent::Finished(finish)).await;
                    return End::Over;
                }
                Verdict::Ignore => {}
                Verdict::Gap { expected, got } => {
                    return End::HostLost(format!("expected output index {expected}, got {got}"));
                }
                Verdict::Failed(EngineError::BadRequest { message, param }) => {
                    let error = HomeError::BadRequest { message, param };
                    self.tell(events, HomeEvent::Failed(error)).await;
                    return End::Over;
                }
                Verdict::Failed(
                    error @ (EngineError::UnknownModel(_)
                    | EngineError::QueueFull
                    | EngineError::NotReady
                    | EngineError::Broken(_)),
                ) => return End::HostLost(error.to_string()),
            }
        }
    }

    /// Gives the client an event; false when it is gone or has not read for too long.
    async fn tell(&self, events: &mpsc::Sender<HomeEvent>, event: HomeEvent) -> bool {
        match timeout(self.settings.stall_deadline, events.send(event)).await {
            Ok(sent) => sent.is_ok(),
            Err(_) => {
                debug!("client has not read in time; its request is aborted");
                false
            }
        }
    }

    /// Tells a lost host to stop, in case it is only the way to it that was lost. Nothing waits for the
    /// answer: frames of the old ownership are void already.
    fn stop_old(&self, request: &Request, (host, epoch): (NodeId, Epoch)) {
        let links = Arc::clone(&self.links);
        let deadline = self.settings.offer_deadline;
        let ask = Ask::Abort {
            request: request.id,
            epoch,
        };
        self.tasks.spawn(async move {
            if let Err(error) = links.ask(host, ask, deadline).await {
                debug!(%host, %error, "could not tell a lost host to stop");
            }
        });
    }
}
