//! The home: takes a client's request, finds a host, and follows the tokens to the client.
//!
//! [`Home::start`] places the request (`home/place.rs`); a task then follows it (`home/follow.rs`)
//! until it ends, the client goes, or it has to be placed again.

mod desk;
mod follow;
mod place;
mod replay;
mod vigil;
mod vitals;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rand::RngExt;
use rand::rngs::StdRng;
use shoal_gossip::{ModelApi, ModelFacts, NodeId, RequestId, Timestamp, Tokens};
use shoal_migrate::ClaimAnswer;
use shoal_migrate::session::Claim;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::dispatch::{Need, PlacementLimits, PolicyName};
use crate::engine::work::{Fit, HttpAsk, Prepared, Priority, RequestKind};
use crate::engine::{Engine, EngineError};
pub use crate::home::desk::Whereabouts;
pub use crate::home::replay::ReplayLimits;
pub(crate) use crate::home::replay::{Next, Replay};
pub(crate) use crate::home::vigil::LOOK_EVERY;

use crate::frontend::{ClientAsk, HomeError, Running};
use crate::home::desk::Desk;
use crate::home::follow::Follower;
use crate::home::place::Placed;
use crate::home::vigil::{Vigil, Watchman};
use crate::knowledge::Knowledge;
use crate::ledger::{Ledger, Verdict};
use crate::links::Links;
use crate::mesh::messages::Frame;
use crate::metrics::Metrics;

/// Events that may wait for a client. With the frames and engine events behind them this bounds what
/// a stalled client holds to about a hundred small values; then its request pauses.
const CLIENT_EVENTS: usize = 16;

/// How long a node is looked for that could take a new request, when none seems to be there: some rounds of gossip. A client
/// that is told to come again waits as long.
const START_PATIENCE: Duration = Duration::from_secs(1);

/// How a home behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeSettings {
    /// How candidates are chosen; for metrics and events, the choice itself is the knowledge's.
    pub policy: PolicyName,
    /// Bounds of one placement.
    pub placement: PlacementLimits,
    /// How long a host may take to answer an offer, its own probing included.
    pub offer_deadline: Duration,
    /// How long a host may take from submission to its first frame (reading and tokenising).
    pub start_deadline: Duration,
    /// How requests go on after their host was lost.
    pub replay: ReplayLimits,
    /// How long a host that gossip misses may keep its requests.
    pub grace: Duration,
    /// How long a client may leave events unread before its request is aborted.
    pub stall_deadline: Duration,
    /// What clients are told to wait when all nodes are full.
    pub retry_after: Duration,
}

/// The home's side of one node.
#[derive(Debug)]
pub struct Home {
    engine: Arc<dyn Engine>,
    links: Arc<Links>,
    knowledge: Arc<Knowledge>,
    settings: HomeSettings,
    metrics: Arc<Metrics>,
    rng: Mutex<StdRng>,
    tasks: TaskTracker,
    /// Cancelled when the drain deadline is over: requests still running end with an error.
    hurry: CancellationToken,
    desk: Arc<Desk>,
    vigil: Arc<Vigil>,
}

/// What a home is made of.
#[derive(Debug)]
pub struct HomeParts {
    /// This node's engine, for its tokenizer.
    pub engine: Arc<dyn Engine>,
    /// The way to hosts.
    pub links: Arc<Links>,
    /// What is known of the mesh.
    pub knowledge: Arc<Knowledge>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Draws request names and seeds.
    pub rng: StdRng,
    /// Where followers run; the caller joins it.
    pub tasks: TaskTracker,
    /// Ends followers that are still running.
    pub hurry: CancellationToken,
}

/// A request as its home holds it between placements: all that a replay needs.
#[derive(Debug)]
struct Request {
    id: RequestId,
    kind: Option<RequestKind>,
    http: HttpAsk,
    body: Bytes,
    model: String,
    fit: Fit,
    /// As read by this node's engine, or by the first host.
    prepared: Option<Prepared>,
    prompt: Tokens,
    max_output: Tokens,
    priority: Priority,
    seed: u64,
    /// When the client asked: hosts let the oldest in first.
    came: Timestamp,
    /// It was at a host before: its client has been promised an answer.
    resumed: bool,
    ledger: Ledger,
}

impl Request {
    /// Judges a frame. What an engine beside its host made of the body is kept for whoever goes on with it.
    fn accept(&mut self, frame: Frame) -> Verdict {
        let verdict = self.ledger.accept(frame);
        if self.prepared.is_none()
            && let Some(on) = self.ledger.going_on()
        {
            // llama-server does not tell its ids: the estimate stands until whoever goes on asks for them.
            if !on.prepared.prompt.is_empty() {
                self.prompt = on.prepared.prompt_tokens();
            }
            self.max_output = Tokens(on.prepared.params.max_tokens);
            self.prepared = Some(on.prepared.clone());
        }
        verdict
    }

    fn need(&self, excluded: BTreeSet<NodeId>) -> Need {
        Need {
            model: self.model.clone(),
            fit: self.ledger.fit().unwrap_or(self.fit),
            prompt: self.prompt,
            generated: Tokens(self.ledger.count()),
            excluded,
        }
    }
}

impl Home {
    /// A home.
    pub fn new(parts: HomeParts, settings: HomeSettings) -> Self {
        let HomeParts {
            engine,
            links,
            knowledge,
            metrics,
            rng,
            tasks,
            hurry,
        } = parts;
        Self {
            engine,
            links,
            knowledge,
            settings,
            metrics,
            rng: Mutex::new(rng),
            tasks,
            hurry,
            desk: Arc::default(),
            vigil: Arc::default(),
        }
    }

    /// Looks after the hosts of this home's requests until `stop`; without it only their streams tell of their end.
    pub async fn keep_vigil(self: Arc<Self>, stop: CancellationToken) {
        let watchman = Watchman {
            vigil: Arc::clone(&self.vigil),
            knowledge: Arc::clone(&self.knowledge),
            links: Arc::clone(&self.links),
            metrics: Arc::clone(&self.metrics),
            grace: self.settings.grace,
        };
        drop(self);
        watchman.run(stop).await;
    }

    /// Judges a node's claim to run one of this home's requests from now on. Unknown requests are over.
    pub async fn claim(&self, by: NodeId, request: RequestId, claim: Claim) -> ClaimAnswer {
        self.desk.claim(by, request, claim).await
    }

    /// Where a request of this home is; `None` when it is over, or not of this home.
    pub fn whereabouts(&self, request: RequestId) -> Option<Whereabouts> {
        self.desk.find(request)
    }

    /// Times that a request lost its KV at this node's engine.
    pub fn preemptions(&self) -> u64 {
        self.engine.preemptions()
    }

    /// All running requests of this home.
    pub fn running(&self) -> Vec<(RequestId, Whereabouts)> {
        self.desk.all()
    }

    /// Places a request and returns once a host has taken it. Dropping the future gives up, dropping
    /// the result aborts.
    ///
    /// # Errors
    /// The client's mistake, or why no host took it. Nothing is left behind but leases, which end.
    pub async fn start(self: &Arc<Self>, ask: ClientAsk) -> Result<Running, HomeError> {
        let asked = self.knowledge.now();
        let mut request = self.read(ask, asked).await?;
        let placed = self.place_new(&mut request).await?;
        self.metrics.placed(self.knowledge.now().since(asked));
        let (sender, events) = mpsc::channel(CLIENT_EVENTS);
        let running = Running {
            id: request.id,
            host: placed.host,
            prompt_tokens: placed.prompt_tokens,
            events,
        };
        let follower = Follower::new(Arc::clone(self), request, placed, sender);
        self.tasks.spawn(follower.run());
        Ok(running)
    }

    /// Places a new request. When nobody seems to be there it asks again, for a moment: a node that has stood still finds its
    /// offers unanswered and its view empty, until it hears the others again.
    async fn place_new(&self, request: &mut Request) -> Result<Placed, HomeError> {
        let mut replay = Replay::new(ReplayLimits {
            losses: 0,
            patience: START_PATIENCE,
        });
        loop {
            let nobody = match self.place(request, BTreeSet::new()).await {
                Err(nobody @ HomeError::Unavailable { .. }) => nobody,
                placed => return placed,
            };
            let next = replay.nobody(self.knowledge.now(), &mut self.rng());
            match next {
                Next::Wait(wait) => sleep(wait).await,
                Next::Place(_) | Next::GiveUp => return Err(nobody),
            }
        }
    }

    /// Reads the request with this node's tokenizer where it serves the model, else estimates.
    async fn read(&self, ask: ClientAsk, came: Timestamp) -> Result<Request, HomeError> {
        let ClientAsk {
            kind,
            http,
            body,
            sketch,
            fit,
        } = ask;
        let prepared = match kind {
            Some(kind) if fit == Fit::Any => self.prepare(kind, &body, &sketch.model).await?,
            Some(_) | None => None,
        };
        let context = self.context_of(&sketch.model);
        let (prompt, max_output) = match &prepared {
            Some(prepared) => (prepared.prompt_tokens(), Tokens(prepared.params.max_tokens)),
            None => (
                sketch.prompt.min(context),
                sketch.max_tokens.map_or(context, Tokens).min(context),
            ),
        };
        let (serial, seed) = {
            let mut rng = self.rng();
            (rng.random(), rng.random())
        };
        let id = RequestId {
            home: self.knowledge.this(),
            serial,
        };
        Ok(Request {
            id,
            kind,
            http,
            body,
            model: sketch.model,
            fit,
            prompt,
            max_output,
            priority: sketch.priority,
            seed: sketch.seed.unwrap_or(seed),
            came,
            resumed: false,
            ledger: Ledger::new(id, max_output.0),
            prepared,
        })
    }

    /// The body as this node's engine reads it; `None` when it does not.
    async fn prepare(
        &self,
        kind: RequestKind,
        body: &Bytes,
        model: &str,
    ) -> Result<Option<Prepared>, HomeError> {
        let facts = self.engine.facts();
        let reads = |served: &ModelFacts| served.id == model && served.api == ModelApi::Tokens;
        if !facts.models.iter().any(reads) {
            return Ok(None);
        }
        match self.engine.prepare(kind, body.clone()).await {
            Ok(prepared) => Ok(Some(prepared)),
            Err(EngineError::BadRequest { message, param }) => {
                Err(HomeError::BadRequest { message, param })
            }
            // The own engine is no judge when it is broken; another host reads the body itself.
            Err(
                EngineError::UnknownModel(_)
                | EngineError::QueueFull
                | EngineError::NotReady
                | EngineError::Broken(_),
            ) => Ok(None),
        }
    }

    fn rng(&self) -> MutexGuard<'_, StdRng> {
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Longest context that a live node offers for the model; bounds estimates and the ledger.
    fn context_of(&self, model: &str) -> Tokens {
        self.knowledge
            .view()
            .rows()
            .iter()
            .filter_map(|row| row.facts.model(model))
            .map(|facts| facts.context)
            .max()
            .unwrap_or_default()
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
