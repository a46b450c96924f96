//! The home: takes a client's request, finds a host, and follows the tokens to the client.
//!
//! [`Home::start`] places the request (`home/place.rs`); a task then follows it (`home/follow.rs`)
//! until it ends, the client goes, or it has to be placed again.

mod desk;
mod follow;
mod place;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rand::RngExt;
use rand::rngs::StdRng;
use shoal_gossip::{NodeId, RequestId, Tokens};
use shoal_migrate::ClaimAnswer;
use shoal_migrate::session::Claim;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::dispatch::{Need, PlacementLimits, PolicyName};
use crate::engine::work::{Prepared, Priority, RequestKind};
use crate::engine::{Engine, EngineError};
pub use crate::home::desk::Whereabouts;

use crate::frontend::{ClientAsk, HomeError, Running};
use crate::home::desk::Desk;
use crate::home::follow::Follower;
use crate::knowledge::Knowledge;
use crate::ledger::Ledger;
use crate::links::Links;
use crate::metrics::Metrics;
use crate::openai::{GenerateRequest, PromptInput};

/// Events that may wait for a client. With the frames and engine events behind them this bounds what
/// a stalled client holds to about a hundred small values; then its request pauses.
const CLIENT_EVENTS: usize = 16;

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
    /// How often a request may be placed again after its host was lost.
    pub max_replays: u32,
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
    kind: RequestKind,
    body: Bytes,
    model: String,
    /// As read by this node's engine, or by the first host.
    prepared: Option<Prepared>,
    prompt: Tokens,
    max_output: Tokens,
    priority: Priority,
    seed: u64,
    ledger: Ledger,
}

impl Request {
    fn need(&self, excluded: BTreeSet<NodeId>) -> Need {
        Need {
            model: self.model.clone(),
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
        }
    }

    /// Judges a node's claim to run one of this home's requests from now on. Unknown requests are over.
    pub async fn claim(&self, by: NodeId, request: RequestId, claim: Claim) -> ClaimAnswer {
        self.desk.claim(by, request, claim).await
    }

    /// Where a request of this home is; `None` when it is over, or not of this home.
    pub fn whereabouts(&self, request: RequestId) -> Option<Whereabouts> {
        self.desk.find(request)
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
        let mut request = self.read(ask).await?;
        let asked = self.knowledge.now();
        let placed = self.place(&mut request, BTreeSet::new()).await?;
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

    /// Reads the request with this node's tokenizer where it serves the model, else estimates.
    async fn read(&self, ask: ClientAsk) -> Result<Request, HomeError> {
        let ClientAsk { kind, body, parsed } = ask;
        let serves = self
            .engine
            .facts()
            .models
            .iter()
            .any(|model| model.id == parsed.model);
        let prepared = if serves {
            match self.engine.prepare(kind, body.clone()).await {
                Ok(prepared) => Some(prepared),
                Err(EngineError::BadRequest { message, param }) => {
                    return Err(HomeError::BadRequest { message, param });
                }
                // The own engine is no judge when it is broken; another host reads the body itself.
                Err(
                    EngineError::UnknownModel(_)
                    | EngineError::QueueFull
                    | EngineError::NotReady
                    | EngineError::Broken(_),
                ) => None,
            }
        } else {
            None
        };
        let context = self.context_of(&parsed.model);
        let (prompt, max_output) = match &prepared {
            Some(prepared) => (
                Tokens(u32::try_from(prepared.prompt.len()).unwrap_or(u32::MAX)),
                Tokens(prepared.params.max_tokens),
            ),
            None => (
                estimated_prompt(&parsed).min(context),
                parsed.max_tokens.map_or(context, Tokens).min(context),
            ),
        };
        let (serial, seed) = {
            let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
            (rng.random(), rng.random())
        };
        let id = RequestId {
            home: self.knowledge.this(),
            serial,
        };
        Ok(Request {
            id,
            kind,
            body,
            model: parsed.model,
            prompt,
            max_output,
            priority: parsed.priority,
            seed: parsed.seed.unwrap_or(seed),
            ledger: Ledger::new(id, max_output.0),
            prepared,
        })
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

/// Prompt length of a model whose tokenizer is elsewhere: a token is about four bytes of text.
fn estimated_prompt(parsed: &GenerateRequest) -> Tokens {
    /// Usual for English under byte-pair vocabularies; other scripts have fewer bytes a token, and the
    /// host corrects the estimate when it tokenises.
    const BYTES_PER_TOKEN: usize = 4;
    let length = match &parsed.prompt {
        PromptInput::Chat(messages) => {
            let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
            bytes / BYTES_PER_TOKEN
        }
        PromptInput::Text(text) => text.len() / BYTES_PER_TOKEN,
        PromptInput::Tokens(ids) => ids.len(),
    };
    Tokens(u32::try_from(length.max(1)).unwrap_or(u32::MAX))
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
