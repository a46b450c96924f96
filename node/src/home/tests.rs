//! Home and host against each other over in-process planes, with links that are cut: what the scenarios
//! over real sockets cannot bring about on purpose.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::SeedableRng;
use serde_json::json;
use shoal_gossip::{
    ClusterView, Incarnation, MonotonicClock, NodeFacts, NodeId, NodeRow, Role, Timestamp,
};
use tokio::sync::watch;
use tokio::time::timeout;

use super::*;
use crate::dispatch::Freeness;
use crate::engine::sim::{self, SimConfig};
use crate::frontend::HomeEvent;
use crate::host::{Host, HostSettings};
use crate::load::LoadSource;
use crate::mesh::memory::MemoryNet;
use crate::mesh::messages::PROTOCOL;
use crate::openai::parse;

const PATIENCE: Duration = Duration::from_secs(30);
const AGE: Duration = Duration::from_secs(600);

/// One node without sockets.
struct Member {
    id: NodeId,
    loads: Arc<LoadSource>,
    home: Arc<Home>,
    /// The planes know their handlers weakly.
    _host: Arc<Host>,
}

/// Nodes that see each other as they were at the start, however loaded they are now.
struct Mesh {
    net: MemoryNet,
    members: Vec<Member>,
}

impl Mesh {
    /// One node for each model named, with two slots and a queue of two.
    fn of(models: &[&str]) -> Self {
        let net = MemoryNet::default();
        let clock: Arc<MonotonicClock> = Arc::new(MonotonicClock::start());
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
                member(&net, Arc::clone(engine), Arc::clone(loads), Arc::new(view))
            })
            .collect();
        Self { net, members }
    }

    fn id(&self, index: usize) -> NodeId {
        self.members[index].id
    }

    async fn ask(&self, index: usize, model: &str, tokens: u32) -> Result<Running, HomeError> {
        let body = json!({
            "model": model, "prompt": "a story", "max_tokens": tokens, "ignore_eos": true,
            "temperature": 0,
        });
        let body = Bytes::from(body.to_string());
        let parsed = parse(RequestKind::Completion, &body).unwrap();
        let asked = self.members[index].home.start(ClientAsk {
            kind: RequestKind::Completion,
            body,
            parsed,
        });
        timeout(PATIENCE, asked).await.expect("an answer in time")
    }

    /// Waits until a node holds and promises nothing.
    async fn empty(&self, index: usize) {
        let loads = &self.members[index].loads;
        let waited = timeout(PATIENCE, async {
            while loads.summary().used.0 + loads.summary().reserved.0 > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(waited.await.is_ok(), "{:?}", loads.summary());
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
    engine: Arc<dyn Engine>,
    loads: Arc<LoadSource>,
    view: Arc<ClusterView>,
) -> Member {
    static SEED: AtomicU64 = AtomicU64::new(1);
    let rng = || StdRng::seed_from_u64(SEED.fetch_add(1, Ordering::Relaxed));
    let id = view.this;
    let metrics = Arc::new(Metrics::new(id, "test"));
    let knowledge = Arc::new(Knowledge::new(
        Arc::new(MonotonicClock::start()),
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
    let links = Links::new(
        id,
        Arc::clone(&host),
        Arc::clone(&planes) as _,
        planes as _,
        tasks.clone(),
    );
    let parts = HomeParts {
        engine,
        links: Arc::new(links),
        knowledge,
        metrics,
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
        max_replays: 3,
        stall_deadline: Duration::from_secs(60),
        retry_after: Duration::from_secs(1),
    };
    Member {
        id,
        loads,
        home: Arc::new(Home::new(parts, settings)),
        _host: host,
    }
}

/// Everything a request gave: text, output indexes, and how it ended.
async fn read(mut running: Running) -> (String, Vec<u32>, Option<HomeError>) {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_host_points_to_a_free_one_that_it_has_probed() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    // Fill the second node from its own clients, which nobody's view shows.
    let mut held = Vec::new();
    while mesh.members[1].loads.summary().queued == 0 {
        held.push(mesh.ask(1, "m", 3_000).await.unwrap());
    }
    // Those that went to the third are let go again.
    held.retain(|running| running.host == mesh.id(1));
    mesh.empty(2).await;
    for _ in 0..6 {
        let running = mesh.ask(0, "m", 1).await.unwrap();
        assert_eq!(running.host, mesh.id(2));
        assert_eq!(read(running).await.1, [0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_cannot_be_reached_is_passed_over() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    mesh.net.cut(mesh.id(0), mesh.id(1));
    for _ in 0..6 {
        let running = mesh.ask(0, "m", 1).await.unwrap();
        assert_eq!(running.host, mesh.id(2));
    }
    mesh.net.cut(mesh.id(0), mesh.id(2));
    let nobody = mesh.ask(0, "m", 1).await.unwrap_err();
    assert!(
        matches!(nobody, HomeError::Unavailable { .. }),
        "{nobody:?}"
    );
    mesh.net.mend(mesh.id(0), mesh.id(1));
    assert_eq!(mesh.ask(0, "m", 1).await.unwrap().host, mesh.id(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_cut_goes_on_elsewhere_and_ends_where_it_was() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    let whole = read(mesh.ask(0, "m", 300).await.unwrap()).await;
    assert_eq!(whole.1, (0..300).collect::<Vec<u32>>());
    let mut running = mesh.ask(0, "m", 300).await.unwrap();
    let first = timeout(PATIENCE, running.events.recv())
        .await
        .unwrap()
        .unwrap();
    let HomeEvent::Tokens(first) = first else {
        panic!("expected tokens, got {first:?}");
    };
    let lost = mesh
        .members
        .iter()
        .position(|member| member.id == running.host)
        .unwrap();
    mesh.net.cut(mesh.id(0), mesh.id(lost));
    let (text, indexes, failed) = read(running).await;
    assert_eq!(failed, None);
    assert_eq!(first.text + &text, whole.0);
    assert_eq!(indexes, (1..300).collect::<Vec<u32>>());
    // The host that was cut off has let go of it as well.
    mesh.empty(lost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_nowhere_left_to_go_ends_with_an_error_and_keeps_what_was_sent() {
    let mesh = Mesh::of(&["other", "m"]);
    let mut running = mesh.ask(0, "m", 3_000).await.unwrap();
    assert!(
        timeout(PATIENCE, running.events.recv())
            .await
            .unwrap()
            .is_some()
    );
    mesh.net.cut(mesh.id(0), mesh.id(1));
    let (_, indexes, failed) = read(running).await;
    assert!(matches!(failed, Some(HomeError::Lost(_))), "{failed:?}");
    assert!(
        indexes
            .iter()
            .zip(1..)
            .all(|(index, expected)| *index == expected)
    );
    mesh.empty(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_while_placed_leaves_neither_charge_nor_promise() {
    let mesh = Mesh::of(&["other", "m"]);
    mesh.net
        .delay(mesh.id(0), mesh.id(1), Duration::from_millis(50));
    for _ in 0..5 {
        let asked = mesh.ask(0, "m", 10);
        // Given up somewhere between offer and start.
        drop(timeout(Duration::from_millis(60), asked).await);
    }
    mesh.net.delay(mesh.id(0), mesh.id(1), Duration::ZERO);
    let home = &mesh.members[0].home;
    let charged = home
        .knowledge
        .decide(|world| world.corrections.charged(mesh.members[1].id));
    assert_eq!(charged.0, 0);
    // Promises end by lease, jobs by the stream that was dropped.
    mesh.empty(1).await;
}
