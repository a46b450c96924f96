//! The state plane at work: one task around the gossip library, and the handle to it.

mod session;
mod task;
mod thread;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::config::{ConfigError, GossipConfig};
use crate::health::Health;
use crate::io::DatagramIo;
use crate::roster::Roster;
use crate::seal::{Framing, SealError, Sealer, SenderId};
use crate::seeds::resolve::{Resolved, resolve_forever};
use crate::seeds::{SeedBook, SeedState};
use crate::stats::{Counters, GossipStats};
use crate::summary::{LoadSummary, NodeFacts};
use crate::time::Clock;
use crate::types::NodeId;
use crate::view::{ClusterView, NodeRow};
use crate::wire::{FactsError, pack_facts};

pub use thread::{GossipThread, ThreadStuck};

use task::{Task, Tell};

/// Neighbours that may wait to be greeted. They come one by one from a local network, and the task takes
/// them in microseconds.
const NEIGHBOURS: usize = 64;

/// Longest wait for the task to end after it was told to.
const STOP_WAIT: Duration = Duration::from_secs(2);

/// Why gossip did not start, or facts were not taken. Nothing was started or changed.
#[derive(Debug, thiserror::Error)]
pub enum GossipError {
    /// Settings that make no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Facts that no other node would believe.
    #[error(transparent)]
    Facts(#[from] FactsError),
    /// Facts of another node, or of another life, than this gossip was started for.
    #[error("facts of node {given} given to the gossip of node {this}")]
    OtherNode {
        /// Whose facts.
        given: NodeId,
        /// Whose gossip.
        this: NodeId,
    },
    /// The socket does not know its address.
    #[error("the gossip socket has no address: {0}")]
    Socket(#[from] std::io::Error),
    /// The system gave no random bytes for a sender id.
    #[error("the system gave no random bytes")]
    NoEntropy,
    /// No key could be derived from the cluster key.
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// Handle to this node's gossip. Dropping it ends the gossip without a goodbye.
#[derive(Debug)]
pub struct Gossip {
    node: NodeId,
    interval: Duration,
    loads: watch::Sender<Option<LoadSummary>>,
    facts: watch::Sender<Arc<NodeFacts>>,
    neighbours: mpsc::Sender<SocketAddr>,
    leaving: CancellationToken,
    stop: CancellationToken,
    view: watch::Receiver<Arc<ClusterView>>,
    health: watch::Receiver<Health>,
    seeds: watch::Receiver<SeedState>,
    counters: Arc<Counters>,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

impl Gossip {
    /// Starts gossip on `runtime`, best a [`GossipThread`]'s.
    ///
    /// `facts` name the node and its life; `io` is bound already and must live on the same runtime;
    /// `clock` dates the rows of the view. The view holds this node's own row from the start.
    pub fn spawn(
        config: GossipConfig,
        facts: NodeFacts,
        io: Arc<dyn DatagramIo>,
        clock: Arc<dyn Clock>,
        runtime: &Handle,
    ) -> Result<Self, GossipError> {
        config.check(io.local_addr()?)?;
        pack_facts(&facts)?;
        let framing = framing(&config)?;
        let (node, interval, now) = (facts.node, config.interval, clock.now());
        let (loads, loads_seen) = watch::channel(None);
        let own = NodeRow {
            facts: Arc::new(facts),
            load: None,
        };
        let (facts, facts_seen) = watch::channel(Arc::clone(&own.facts));
        let first_view = ClusterView::new(node, now, vec![own.clone()]);
        let (view_told, view) = watch::channel(Arc::new(first_view));
        let (health_told, health) = watch::channel(Health::Starting);
        let book = SeedBook::new(config.advertise, now);
        let (seeds_told, seeds) = watch::channel(book.state());
        let (alone_told, alone) = watch::channel(true);
        let (resolved_told, resolved) = watch::channel(Resolved::default());
        let (neighbours, met) = mpsc::channel(NEIGHBOURS);
        let (leaving, stop) = (CancellationToken::new(), CancellationToken::new());
        let counters = Arc::new(Counters::default());
        let mut tasks = JoinSet::new();
        tasks.spawn_on(
            resolve_forever(config.seeds.clone(), alone, resolved_told),
            runtime,
        );
        let task = Task {
            roster: Roster::new(node),
            book,
            own,
            loads: loads_seen,
            facts: facts_seen,
            resolved,
            met,
            leaving: leaving.clone(),
            stop: stop.clone(),
            tell: Tell {
                view: view_told,
                health: health_told,
                seeds: seeds_told,
                alone: alone_told,
            },
            counters: Arc::clone(&counters),
            framing: Arc::new(Mutex::new(framing)),
            config,
            io,
            clock,
        };
        tasks.spawn_on(task.run(), runtime);
        Ok(Self {
            node,
            interval,
            loads,
            facts,
            neighbours,
            leaving,
            stop,
            view,
            health,
            seeds,
            counters,
            tasks: tokio::sync::Mutex::new(tasks),
        })
    }

    /// The node this gossip speaks for.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Publishes the node's load; the latest wins. It goes out at once when `readiness` changed or a
    /// fifth of an interval has passed since the last one, else when that is over.
    ///
    /// Call it at least once per gossip interval with a raised `seq`, also when nothing changed: the age that
    /// others see counts from the last new load, so that a node whose load loop is stuck looks old
    /// and not idle, though its heartbeat goes on.
    pub fn publish(&self, load: LoadSummary) {
        self.loads.send_replace(Some(load));
    }

    /// Replaces the node's facts, for example when it serves another model. Fails, unchanged, for
    /// facts that others would not believe, or of another node or life.
    pub fn update_facts(&self, facts: NodeFacts) -> Result<(), GossipError> {
        let life = self.facts.borrow().incarnation;
        if facts.node != self.node || facts.incarnation != life {
            return Err(GossipError::OtherNode {
                given: facts.node,
                this: self.node,
            });
        }
        pack_facts(&facts)?;
        self.facts.send_replace(Arc::new(facts));
        Ok(())
    }

    /// Gossip at `address` that was found by other means than seeds, such as mDNS. It is greeted for an
    /// hour, as a lost peer is. Beyond what can be taken in, it is forgotten.
    pub fn meet(&self, address: SocketAddr) {
        if self.neighbours.try_send(address).is_err() {
            tracing::debug!(%address, "too many neighbours at once");
        }
    }

    /// The view, made anew at most every 20 ms when something changed.
    pub fn view(&self) -> watch::Receiver<Arc<ClusterView>> {
        self.view.clone()
    }

    /// How the gossip fares.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.health.clone()
    }

    /// Whether the mesh was found.
    pub fn seeds(&self) -> watch::Receiver<SeedState> {
        self.seeds.clone()
    }

    /// The counters now.
    pub fn stats(&self) -> GossipStats {
        self.counters.snapshot()
    }

    /// Says goodbye: every other node drops this one's row as soon as it hears of it, within two
    /// intervals at 16 nodes. Returns when it was said, at the latest after four intervals and a second. Gossip goes on
    /// until [`shutdown`](Self::shutdown), so that nobody takes the silence for news.
    pub async fn leave(&self) {
        self.leaving.cancel();
        let mut health = self.health.clone();
        let deadline = self.interval.saturating_mul(4) + Duration::from_secs(1);
        match timeout(deadline, health.wait_for(Health::is_final)).await {
            Ok(Ok(_)) => {}
            // Closed or late: the others will see a death instead, which is what a goodbye saves them from.
            Ok(Err(_)) | Err(_) => tracing::debug!("goodbye was not said in time"),
        }
    }

    /// Ends the gossip, within two seconds; again is harmless. Without [`leave`](Self::leave) before,
    /// the others see a death. The watched values keep their last state.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        let mut tasks = self.tasks.lock().await;
        let ended = timeout(STOP_WAIT, async {
            while let Some(ended) = tasks.join_next().await {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a gossip task ended early");
                }
            }
        });
        if ended.await.is_err() {
            tasks.abort_all();
        }
    }
}

/// Where the seal comes from: the keys and a sender id of this start, or none.
fn framing(config: &GossipConfig) -> Result<Framing, GossipError> {
    let Some(keys) = &config.keys else {
        return Ok(Framing::Open);
    };
    let mut id = [0; 8];
    SystemRandom::new()
        .fill(&mut id)
        .map_err(|_| GossipError::NoEntropy)?;
    Ok(Framing::Sealed(Box::new(Sealer::new(keys, SenderId(id))?)))
}

#[cfg(test)]
mod tests;
