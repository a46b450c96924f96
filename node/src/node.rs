//! One node, put together: engine, planes, home and host, client plane; and taken apart in order.
//!
//! ```text
//! start:     identity → sockets → engine → planes → gossip → client plane
//! shutdown:  closing (clients and offers are turned away, "draining" is gossiped)
//!            → finishing (streams end, up to the deadline; then they are cut)
//!            → goodbye (the node leaves every view) → closed (planes, engine and tasks joined)
//! ```

mod addresses;
mod engine;
mod files;
mod front;
mod reports;
mod run;
pub(crate) mod settings;
mod start;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{ClusterView, Gossip, GossipThread, LoadSummary, NodeId};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

pub use run::run;

use crate::config::NodeConfig;
use crate::engine::Engine;
use crate::identity::{Identity, IdentityError};
use crate::knowledge::Knowledge;
use crate::load::LoadSource;
use crate::mesh::control::ControlNode;
use crate::mesh::stream::StreamNode;
use crate::moves::{Moves, keep_emptying};
use crate::node::front::Front;

/// How long each part may take to close once nothing runs on it. Longer means that it hangs: it is
/// named in the log and left behind.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// Why a node did not start. Nothing of it is left running.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data directory or the key in it.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// An address cannot be listened on.
    #[error(
        "cannot listen on {address} for {purpose}: {reason}; free the port or choose another with {flag}"
    )]
    Listen {
        /// What it was for.
        purpose: &'static str,
        /// Which.
        address: SocketAddr,
        /// What the system says.
        reason: String,
        /// The setting to change.
        flag: &'static str,
    },
    /// The address for others cannot be found.
    #[error("--advertise {host}: {reason}")]
    Advertise {
        /// As configured.
        host: String,
        /// Why.
        reason: String,
    },
    /// A file that the configuration names cannot be used.
    #[error("{0}")]
    File(String),
    /// The engine did not load.
    #[error("the engine did not start: {0}")]
    Model(String),
    /// A plane did not start.
    #[error("the {plane} plane did not start: {reason}")]
    Plane {
        /// Which.
        plane: &'static str,
        /// Why.
        reason: String,
    },
}

/// A running node. Dropping it stops it without order; [`Node::shutdown`] is the way to end it.
#[derive(Debug)]
pub struct Node {
    id: NodeId,
    http: SocketAddr,
    control_addr: SocketAddr,
    stream_addr: SocketAddr,
    deadline: Duration,
    max_view_age: Duration,
    engine: Arc<dyn Engine>,
    loads: Arc<LoadSource>,
    knowledge: Arc<Knowledge>,
    moves: Arc<Moves>,
    front: Arc<Front>,
    gossip: Arc<Gossip>,
    gossip_thread: GossipThread,
    control: Arc<ControlNode>,
    streams: Arc<StreamNode>,
    server: JoinHandle<()>,
    /// Requests: followers at home, local jobs at the host.
    requests: TaskTracker,
    /// Everything that runs as long as the node does.
    background: TaskTracker,
    stop: Stop,
    /// Reasons why it cannot go on.
    failures: mpsc::Receiver<String>,
    _identity: Identity,
}

/// The signals of the shutdown's stages.
#[derive(Clone, Debug, Default)]
struct Stop {
    /// An operator wants the node to stop.
    asked: CancellationToken,
    /// No new clients.
    closing: CancellationToken,
    /// Requests that still run are cut.
    hurry: CancellationToken,
    /// Background tasks end.
    closed: CancellationToken,
}

impl Node {
    /// Starts a node and returns once it serves.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(config: NodeConfig) -> Result<Self, StartError> {
        start::start(config).await
    }

    /// Its name.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Where clients ask.
    pub fn http_addr(&self) -> SocketAddr {
        self.http
    }

    /// Where the control plane listens.
    pub fn control_addr(&self) -> SocketAddr {
        self.control_addr
    }

    /// Where streams and gossip listen; what others name as a seed.
    pub fn stream_addr(&self) -> SocketAddr {
        self.stream_addr
    }

    /// Its own load now.
    pub fn load(&self) -> LoadSummary {
        self.loads.summary()
    }

    /// What it sees of the mesh.
    pub fn view(&self) -> Arc<ClusterView> {
        self.knowledge.view()
    }

    /// Waits for a reason why the node cannot go on; usually for ever. Safe to drop.
    pub async fn failed(&mut self) -> String {
        match self.failures.recv().await {
            Some(reason) => reason,
            None => std::future::pending().await,
        }
    }

    /// Waits until an operator has asked, through any node, that this one stops; usually for ever. Safe to drop.
    pub fn asked_to_stop(&self) -> impl Future<Output = ()> + use<> {
        self.stop.asked.clone().cancelled_owned()
    }

    /// Ends the node in order, within its shutdown deadline and a little. What its engine has is handed over to other nodes, KV
    /// and all; its clients' streams go on, from wherever they run, until they end. Those still running at the deadline end
    /// with an error event.
    pub async fn shutdown(self) {
        info!(node = %self.id, deadline = ?self.deadline, "closing: no new requests");
        self.front.close();
        self.loads.drain();
        self.gossip.publish(self.loads.summary());

        let emptied = CancellationToken::new();
        let finished = async {
            let finished = timeout(self.deadline, self.finished()).await;
            emptied.cancel();
            finished
        };
        let empty = keep_emptying(Arc::clone(&self.moves), self.max_view_age, emptied.clone());
        let ((), finished) = tokio::join!(empty, finished);
        if finished.is_err() {
            let load = self.loads.summary();
            warn!(
                running = load.running,
                queued = load.queued,
                at_home = self.requests.len(),
                "deadline over: requests that still run are cut"
            );
            self.stop.hurry.cancel();
        }
        self.moves.stop();
        self.stop.closing.cancel();
        self.requests.close();
        in_time("requests", self.requests.wait()).await;

        info!(node = %self.id, "goodbye");
        self.gossip.leave().await;
        self.stop.closed.cancel();
        self.background.close();
        in_time("client plane", async {
            if let Err(error) = self.server.await {
                warn!(%error, "the client plane ended badly");
            }
        })
        .await;
        in_time("stream plane", self.streams.shutdown()).await;
        in_time("control plane", self.control.shutdown()).await;
        in_time("engine", self.engine.shutdown()).await;
        in_time("background tasks", self.background.wait()).await;
        in_time("state plane", self.gossip.shutdown()).await;
        if let Err(error) = self.gossip_thread.shutdown(CLOSE_PATIENCE).await {
            warn!(%error, "the gossip thread did not close in time");
        }
        info!(node = %self.id, "closed");
    }

    /// Waits until neither this node's clients nor other homes have anything running here.
    async fn finished(&self) {
        let mut changed = self.engine.load_changed();
        loop {
            if self.requests.is_empty() && !self.engine.has_work() {
                return;
            }
            // Followers end shortly after the engine's last event; nothing else tells of them.
            let recheck = tokio::time::sleep(Duration::from_millis(20));
            tokio::select! {
                _ = changed.changed() => {}
                () = recheck => {}
            }
        }
    }

    /// Stops the node as a crash would, as far as others can tell. For tests.
    pub fn abandon(self) {
        self.stop.hurry.cancel();
        self.stop.closing.cancel();
        self.stop.closed.cancel();
        self.server.abort();
        self.streams.abort();
        self.control.abort();
    }
}

/// Waits for a part to close; says so when it does not.
async fn in_time(part: &'static str, closing: impl Future<Output = ()>) {
    if timeout(CLOSE_PATIENCE, closing).await.is_err() {
        warn!(part, patience = ?CLOSE_PATIENCE, "did not close in time");
    }
}
