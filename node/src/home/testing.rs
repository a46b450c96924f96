//! A mesh inside one process for the tests of homes, hosts and hand-overs: in-process planes, simulated engines,
//! and links that are cut or lose what a test says.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::json;
use shoal_gossip::{
    ClusterView, Incarnation, MonotonicClock, NodeFacts, NodeId, NodeRow, Role, Timestamp,
};
use shoal_migrate::SessionLimits;
use shoal_migrate::transfer::KvTransfer;
use shoal_migrate::transfer::memory::MemoryHub;
use tokio::sync::watch;
use tokio::time::timeout;

use super::*;
use crate::dispatch::Freeness;
use crate::engine::sim::{self, SimConfig};
use crate::engine::work::{Fit, HttpAsk};
use crate::frontend::HomeEvent;
use crate::host::{Host, HostSettings};
use crate::load::LoadSource;
use crate::mesh::memory::MemoryNet;
use crate::mesh::messages::PROTOCOL;
use crate::moves::{MoveParts, MoveSettings, Moves};
use crate::openai::{Sketch, parse};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
const AGE: Duration = Duration::from_secs(600);

/// One node without sockets.
pub(crate) struct Member {
    pub(crate) id: NodeId,
    pub(crate) loads: Arc<LoadSource>,
    pub(crate) home: Arc<Home>,
    pub(crate) moves: Arc<Moves>,
    pub(crate) engine: Arc<dyn Engine>,
    links: Arc<Links>,
    metrics: Arc<Metrics>,
    /// The planes know their handlers weakly.
    _host: Arc<Host>,
}

impl Member {
    /// The sum of the metrics whose lines begin so and hold `label`.
    pub(crate) fn counted(&self, beginning: &str, label: &str) -> u64 {
        let text = self.metrics.render();
        text.lines()
            .filter(|line| line.starts_with(beginning) && line.contains(label))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
            .sum()
    }
}

/// Nodes that see each other as they were at the start, however loaded they are now.
pub(crate) struct Mesh {
    pub(crate) net: MemoryNet,
    pub(crate) members: Vec<Member>,
}

impl Mesh {
    /// One node for each model named, with two slots and a queue of two.
    pub(crate) fn of(models: &[&str]) -> Self {
        Self::with_carriers(models, |_, carrier| carrier)
    }

    /// The same, with something around each node's carrier.
    pub(crate) fn with_carriers(
        models: &[&str],
        around: impl Fn(NodeId, Arc<dyn KvTransfer>) -> Arc<dyn KvTransfer>,
    ) -> Self {
        let net = MemoryNet::default();
        let clock: Arc<MonotonicClock> = Arc::new(MonotonicClock::start());
        let hub = MemoryHub::new(Arc::clone(&clock) as _);
        let engines: Vec<Arc<dyn Engine>> = models
            .iter()
            .map(|model| {
                let config = SimConfig {
                    speed: 20.0,
                    model: Some((*model).into()),
                    slots: Some(2),
                    queue_limit: 2,
                    ..SimConfig::new("a10/llama-2-7b")
                };
                sim::start(&config, Arc::clone(&clock) as _).unwrap() as _
            })
            .collect();
        let loads: Vec<_> = engines
            .iter()
            .map(|engine| Arc::new(LoadSource::new(Arc::clone(engine), Incarnation(1))))
            .collect();
        let rows = || {
            (1..)
                .zip(engines.iter().zip(&loads))
                .map(|(id, (engine, loads))| NodeRow {
                    facts: Arc::new(facts(NodeId(id), engine.as_ref())),
                    load: Some((loads.summary(), Timestamp::ZERO)),
                })
        };
        let members = (1..)
            .zip(engines.iter().zip(&loads))
            .map(|(id, (engine, loads))| {
                let view = ClusterView::new(NodeId(id), Timestamp::ZERO, rows().collect());
                let base = (Arc::clone(engine), Arc::clone(loads));
                let member = member(&net, base, Arc::new(view), Arc::clone(&clock) as _);
                let receiver = Arc::clone(&member.moves) as _;
                let carrier = around(member.id, hub.join(member.id, &receiver));
                member.moves.connect(Arc::clone(&member.links), carrier);
                member
            })
            .collect();
        Self { net, members }
    }

    pub(crate) fn id(&self, index: usize) -> NodeId {
        self.members[index].id
    }

    pub(crate) async fn ask(
        &self,
        index: usize,
        model: &str,
        tokens: u32,
    ) -> Result<Running, HomeError> {
        let body = json!({
            "model": model, "prompt": "a story", "max_tokens": tokens, "ignore_eos": true,
            "temperature": 0,
        });
        let body = Bytes::from(body.to_string());
        let parsed = parse(RequestKind::Completion, &body).unwrap();
        let asked = self.members[index].home.start(ClientAsk {
            kind: Some(RequestKind::Completion),
            http: HttpAsk::default(),
            sketch: Sketch::of(&parsed),
            fit: Fit::Any,
            body,
        });
        timeout(PATIENCE, asked).await.expect("an answer in time")
    }

    /// Times that requests went on from their ledger, over all nodes: a hand-over that works needs none.
    pub(crate) fn replays(&self) -> u64 {
        let members = self.members.iter();
        members
            .map(|member| member.counted("shoal_replays_total{", ""))
            .sum()
    }

    /// Waits until a node holds and promises nothing.
    pub(crate) async fn empty(&self, index: usize) {
        let loads = &self.members[index].loads;
        let waited = timeout(PATIENCE, async {
            while loads.summary().used.0 + loads.summary().reserved.0 > 0 {
                sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(waited.await.is_ok(), "{:?}", loads.summary());
    }
}

/// As in production, with less patience: tests lose messages on purpose.
fn limits() -> SessionLimits {
    SessionLimits {
        propose_patience: Duration::from_secs(5),
        stage_patience: Duration::from_secs(2),
        commit_patience: Duration::from_secs(1),
        claim_interval: Duration::from_millis(50),
        grace: Duration::from_secs(3),
        lease: Duration::from_secs(3),
        max_stage_tokens: Tokens(64),
        ..SessionLimits::default()
    }
}

fn facts(node: NodeId, engine: &dyn Engine) -> NodeFacts {
    let nowhere = ([127, 0, 0, 1], 1).into();
    NodeFacts {
        node,
        incarnation: Incarnation(1),
        peer_id: String::new(),
        protocol: PROTOCOL,
        control: nowhere,
        stream: nowhere,
        http: String::new(),
        role: Role::Mixed,
        block_size: engine.facts().block_size,
        models: engine.facts().models.clone(),
        version: String::new(),
    }
}

fn member(
    net: &MemoryNet,
    (engine, loads): (Arc<dyn Engine>, Arc<LoadSource>),
    view: Arc<ClusterView>,
    clock: Arc<dyn shoal_gossip::Clock>,
) -> Member {
    static SEED: AtomicU64 = AtomicU64::new(1);
    let rng = || StdRng::seed_from_u64(SEED.fetch_add(1, Ordering::Relaxed));
    let id = view.this;
    let metrics = Arc::new(Metrics::new(id, "test"));
    let knowledge = Arc::new(Knowledge::new(
        Arc::clone(&clock),
        Arc::clone(&loads),
        watch::channel(view).1,
        PolicyName::P2c,
        rng(),
    ));
    let host = Arc::new(Host::new(
        Arc::clone(&engine),
        Arc::clone(&loads),
        Arc::clone(&knowledge),
        Arc::clone(&metrics),
        HostSettings {
            lease: Duration::from_secs(5),
            redirect_below: Freeness::of_blocks(10),
            probe_deadline: Duration::from_secs(5),
            max_view_age: AGE,
        },
    ));
    let planes = net.join(id, &(Arc::clone(&host) as _), &(Arc::clone(&host) as _));
    host.connect(Arc::clone(&planes) as _);
    let tasks = TaskTracker::new();
    let links = Arc::new(Links::new(
        id,
        Arc::clone(&host),
        Arc::clone(&planes) as _,
        planes as _,
        tasks.clone(),
    ));
    let moves = Arc::new(Moves::new(
        MoveParts {
            engine: Arc::clone(&engine),
            clock,
            loads: Arc::clone(&loads),
            knowledge: Arc::clone(&knowledge),
            metrics: Arc::clone(&metrics),
            tasks: tasks.clone(),
        },
        MoveSettings {
            limits: limits(),
            slots_out: 4,
            slots_in: 2,
            ask_deadline: Duration::from_secs(5),
            accept_above: Freeness::of_blocks(30),
        },
    ));
    let parts = HomeParts {
        engine: Arc::clone(&engine),
        links: Arc::clone(&links),
        knowledge,
        metrics: Arc::clone(&metrics),
        rng: rng(),
        tasks,
        hurry: CancellationToken::new(),
    };
    let settings = HomeSettings {
        policy: PolicyName::P2c,
        placement: PlacementLimits {
            max_view_age: AGE,
            max_offers: 5,
        },
        offer_deadline: Duration::from_secs(10),
        start_deadline: Duration::from_secs(10),
        replay: ReplayLimits {
            losses: 3,
            patience: Duration::from_secs(3),
        },
        grace: Duration::from_secs(1),
        stall_deadline: Duration::from_secs(60),
        retry_after: Duration::from_secs(1),
    };
    let home = Arc::new(Home::new(parts, settings));
    host.join(&home, &moves, CancellationToken::new());
    Member {
        id,
        loads,
        home,
        moves,
        engine,
        links,
        metrics,
        _host: host,
    }
}

/// Everything a request gave: text, output indexes, and how it ended.
pub(crate) async fn read(mut running: Running) -> (String, Vec<u32>, Option<HomeError>) {
    let (mut text, mut indexes) = (String::new(), Vec::new());
    while let Some(event) = timeout(PATIENCE, running.events.recv())
        .await
        .expect("an event")
    {
        match event {
            HomeEvent::Tokens(batch) => {
                text.push_str(&batch.text);
                indexes.extend((batch.index..).take(batch.ids.len()));
            }
            HomeEvent::Finished(finish) => {
                text.push_str(&finish.text);
                return (text, indexes, None);
            }
            HomeEvent::Failed(error) => return (text, indexes, Some(error)),
        }
    }
    panic!("the events ended without an end");
}
