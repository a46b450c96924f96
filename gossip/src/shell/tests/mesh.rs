//! A mesh inside one process: what the other test modules start, wait for and break.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::keys::{ClusterKey, KeyRing};
use crate::shell::Gossip;
use crate::testing::{TokioClock, facts};
use crate::{
    Clock, ClusterView, DatagramIo, GossipConfig, Incarnation, LoadSummary, MemoryNet, NodeFacts,
    NodeId, Readiness, Timestamp,
};

/// Longest wait for anything, in the test's time. Far above every promise that is checked.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

/// The gossip interval of all test meshes: the default.
pub(super) const INTERVAL: Duration = Duration::from_millis(250);

/// A network, a clock, and how nodes on them are set up.
pub(super) struct Mesh {
    pub(super) net: MemoryNet,
    pub(super) clock: Arc<TokioClock>,
}

/// One node and the number of its last load.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) gossip: Gossip,
    pub(super) facts: NodeFacts,
    seq: AtomicU64,
}

pub(super) fn key() -> KeyRing {
    KeyRing::new(ClusterKey::from_bytes([9; 32]))
}

pub(super) fn name(node: u16) -> NodeId {
    facts(node, 0).node
}

pub(super) fn address(node: u16) -> SocketAddr {
    facts(node, 0).stream
}

/// Settings of test node `node`: the first three nodes are the seeds.
pub(super) fn config(node: u16) -> GossipConfig {
    let seeds = (1..=3).map(|seed| address(seed).to_string().parse().unwrap());
    GossipConfig {
        seeds: crate::SeedList::new(seeds).unwrap(),
        keys: Some(key()),
        ..GossipConfig::new("test", address(node))
    }
}

impl Mesh {
    pub(super) fn new() -> Self {
        Self {
            net: MemoryNet::new(7),
            clock: Arc::new(TokioClock::start()),
        }
    }

    /// Node `node` in its life `incarnation`, at its usual address.
    pub(super) fn node(&self, node: u16, incarnation: u64) -> Node {
        self.node_with(config(node), facts(node, incarnation))
    }

    /// A node with settings of its own, at the address that it advertises.
    pub(super) fn node_with(&self, config: GossipConfig, facts: NodeFacts) -> Node {
        let io = self.net.bind(config.advertise).unwrap();
        self.node_over(config, facts, io)
    }

    pub(super) fn node_over(
        &self,
        config: GossipConfig,
        facts: NodeFacts,
        io: Arc<dyn DatagramIo>,
    ) -> Node {
        let clock = Arc::clone(&self.clock);
        let gossip = Gossip::spawn(config, facts.clone(), io, clock, &Handle::current());
        Node {
            gossip: gossip.unwrap(),
            facts,
            seq: AtomicU64::new(0),
        }
    }

    /// Nodes 1 to `count`, each seeing all.
    pub(super) async fn settled(&self, count: u16) -> Vec<Node> {
        let nodes: Vec<_> = (1..=count).map(|node| self.node(node, 1_000)).collect();
        for node in &nodes {
            node.publish();
        }
        for node in &nodes {
            node.sees(usize::from(count)).await;
        }
        nodes
    }

    /// How long `done` takes.
    pub(super) async fn time<T>(&self, done: impl Future<Output = T>) -> Duration {
        let began = self.clock.now();
        done.await;
        self.clock.now().since(began)
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }
}

impl Node {
    /// Publishes a next load and returns its number.
    pub(super) fn publish(&self) -> u64 {
        self.publish_as(Readiness::Ready)
    }

    pub(super) fn publish_as(&self, readiness: Readiness) -> u64 {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed) + 1;
        self.gossip.publish(LoadSummary {
            incarnation: self.facts.incarnation,
            seq,
            readiness,
            ..LoadSummary::default()
        });
        seq
    }

    /// Waits until the view has this many rows, all with a load.
    pub(super) async fn sees(&self, rows: usize) {
        self.view("rows", |view| {
            view.rows().len() == rows && view.rows().iter().all(|row| row.load.is_some())
        })
        .await;
    }

    pub(super) async fn misses(&self, node: NodeId) {
        self.view("a row to go", |view| view.row(node).is_none())
            .await;
    }

    pub(super) async fn sees_load(&self, node: NodeId, seq: u64) {
        self.view("a load", |view| {
            let load = view.row(node).and_then(|row| row.load);
            load.is_some_and(|(load, _)| load.seq >= seq)
        })
        .await;
    }

    pub(super) async fn sees_life(&self, node: NodeId, incarnation: u64) {
        self.view("a life", |view| {
            view.row(node)
                .is_some_and(|row| row.facts.incarnation == Incarnation(incarnation))
        })
        .await;
    }

    pub(super) async fn view(&self, what: &str, wanted: impl Fn(&ClusterView) -> bool) {
        until(&self.gossip.view(), what, |view| wanted(view)).await;
    }

    pub(super) async fn health(&self, what: &str, wanted: impl Fn(&crate::Health) -> bool) {
        until(&self.gossip.health(), what, wanted).await;
    }

    pub(super) async fn seeds(&self, what: &str, wanted: impl Fn(&crate::SeedState) -> bool) {
        until(&self.gossip.seeds(), what, wanted).await;
    }
}

/// Waits until a watched value is as wanted; shows it when it never is.
async fn until<T: std::fmt::Debug>(
    watched: &watch::Receiver<T>,
    what: &str,
    wanted: impl Fn(&T) -> bool,
) {
    let mut watched = watched.clone();
    match timeout(DEADLINE, watched.wait_for(|value| wanted(value))).await {
        Ok(Ok(_)) => return,
        Ok(Err(_)) => {}
        Err(_) => {}
    }
    panic!("never saw {what}, but {:?}", *watched.borrow());
}
