//! The running state plane: gossip on a thread of its own, a handle for everybody else.
//!
//! A runtime that is busy elsewhere answers heartbeats late, and its node looks dead. So gossip has an
//! own thread with an own runtime, [`GossipThread`]; the driver of the shared socket runs there too.

mod run;
mod thread;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

pub use thread::GossipThread;

use crate::config::{ConfigError, GossipConfig};
use crate::io::DatagramIo;
use crate::seal::{Framing, SealError, Sealer, SenderId};
use crate::seeds::SeedState;
use crate::stats::{Counters, GossipStats};
use crate::summary::{LoadSummary, NodeFacts};
use crate::time::Clock;
use crate::view::{ClusterView, NodeRow};
use crate::wire::{FactsError, pack_facts};

/// Commands that may wait: they are goodbye and stop, each given once.
const COMMANDS: usize = 4;

/// How long saying goodbye may take: two of the longest usual intervals.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(2);

/// How the state plane fares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GossipHealth {
    /// It runs.
    Running,
    /// It ended by itself and is being started again; the view stands still meanwhile.
    Restarting {
        /// Why it ended, for the log.
        reason: String,
    },
    /// More nodes than the limit: those beyond it are not in the view.
    Crowded {
        /// How many are left out.
        left_out: usize,
    },
    /// Another process runs under this node's identity, and started later: this one should end.
    Displaced {
        /// Where it is.
        by: SocketAddr,
    },
}

/// Why the state plane did not start. Nothing is left running.
#[derive(Debug, thiserror::Error)]
pub enum GossipError {
    /// The settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// This node's own facts.
    #[error("this node's facts cannot be gossiped: {0}")]
    Facts(#[from] FactsError),
    /// The keys.
    #[error("gossip cannot be sealed: {0}")]
    Seal(#[from] SealError),
    /// The system.
    #[error("gossip cannot start: {0}")]
    Io(#[from] std::io::Error),
    /// The gossip library.
    #[error("gossip cannot start: {0}")]
    Library(String),
}

/// What the handle tells the task.
#[derive(Debug)]
enum Command {
    Leave(oneshot::Sender<()>),
}

/// Handle of a running state plane.
#[derive(Debug)]
pub struct Gossip {
    view: watch::Receiver<Arc<ClusterView>>,
    health: watch::Receiver<GossipHealth>,
    seeds: watch::Receiver<SeedState>,
    load: watch::Sender<LoadSummary>,
    commands: mpsc::Sender<Command>,
    counters: Arc<Counters>,
    task: AbortHandle,
    thread: Mutex<Option<GossipThread>>,
}

impl Gossip {
    /// Starts gossiping `facts` over `io` on `thread`, which it keeps. `load` is the first load to tell.
    ///
    /// # Errors
    /// See [`GossipError`].
    pub async fn spawn(
        config: GossipConfig,
        start: GossipStart,
        io: Arc<dyn DatagramIo>,
        clock: Arc<dyn Clock>,
        thread: GossipThread,
    ) -> Result<Self, GossipError> {
        let (plane, driver) = run::prepare(config, start, io, clock)?;
        let (ready, is_ready) = oneshot::channel();
        let task = thread.handle().spawn(driver.run(ready)).abort_handle();
        is_ready
            .await
            .map_err(|_| GossipError::Library("its task ended at once".into()))?
            .map_err(GossipError::Library)?;
        Ok(Self {
            view: plane.view,
            health: plane.health,
            seeds: plane.seeds,
            load: plane.load,
            commands: plane.commands,
            counters: plane.counters,
            task,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The view, replaced whole whenever something changed.
    pub fn view(&self) -> watch::Receiver<Arc<ClusterView>> {
        self.view.clone()
    }

    /// How the plane fares.
    pub fn health(&self) -> watch::Receiver<GossipHealth> {
        self.health.clone()
    }

    /// Whether other nodes were found.
    pub fn seeds(&self) -> watch::Receiver<SeedState> {
        self.seeds.clone()
    }

    /// Tells this node's load: the newest one goes out at the next interval, one with another readiness
    /// at once. Must be called at least once an interval, for what stands still grows old in the views
    /// of others.
    pub fn publish(&self, load: LoadSummary) {
        self.load.send_replace(load);
    }

    /// The same, for a task of its own.
    pub fn publisher(&self) -> watch::Sender<LoadSummary> {
        self.load.clone()
    }

    /// Counters since the start.
    pub fn stats(&self) -> GossipStats {
        self.counters.snapshot()
    }

    /// Says goodbye: this node leaves every view within about two intervals. It hears on, and tells
    /// nothing more.
    pub async fn leave(&self) {
        let (done, is_done) = oneshot::channel();
        if self.commands.send(Command::Leave(done)).await.is_ok() {
            // Whoever does not answer in time has ended, and has left that way.
            drop(timeout(GOODBYE_PATIENCE, is_done).await);
        }
    }

    /// Ends without a goodbye and joins the thread.
    pub async fn shutdown(&self) {
        self.task.abort();
        let thread = self.take_thread();
        if let Some(thread) = thread {
            thread.join().await;
        }
    }

    /// Ends without a goodbye and waits for nothing.
    pub fn abort(&self) {
        self.task.abort();
        drop(self.take_thread());
    }

    fn take_thread(&self) -> Option<GossipThread> {
        self.thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

/// What a node begins to tell of itself.
#[derive(Clone, Debug)]
pub struct GossipStart {
    /// Its facts.
    pub facts: NodeFacts,
    /// Its first load.
    pub load: LoadSummary,
}

fn framing(config: &GossipConfig) -> Result<Framing, GossipError> {
    let Some(ring) = &config.keys else {
        return Ok(Framing::Open);
    };
    let mut id = [0; 8];
    SystemRandom::new()
        .fill(&mut id)
        .map_err(|_| GossipError::Library("the system gave no random bytes".into()))?;
    Ok(Framing::Sealed(Box::new(Sealer::new(ring, SenderId(id))?)))
}

fn packed(facts: &NodeFacts) -> Result<String, GossipError> {
    Ok(pack_facts(facts)?)
}

fn own_row(facts: &Arc<NodeFacts>, load: LoadSummary, clock: &dyn Clock) -> NodeRow {
    NodeRow {
        facts: Arc::clone(facts),
        load: Some((load, clock.now())),
    }
}

#[cfg(test)]
mod tests;
