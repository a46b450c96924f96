//! Puts a node together. Whatever fails on the way takes what was started with it.

use std::net::SocketAddr;
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::StdRng;
use ring::rand::{SecureRandom, SystemRandom};
use shoal_gossip::{
    Clock, ClusterView, Gossip, GossipConfig, GossipThread, Incarnation, KeyRing, MonotonicClock,
    NodeFacts, Role, SeedList, unix_time,
};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;
use tracing::info;

use crate::api::{self, Backend, Shutdown};
use crate::config::NodeConfig;
use crate::engine::Engine;
use crate::home::{Home, HomeParts};
use crate::host::Host;
use crate::identity::Identity;
use crate::knowledge::Knowledge;
use crate::links::Links;
use crate::load::LoadSource;
use crate::mesh::bulk::Bulk;
use crate::mesh::control::{ControlConfig, ControlNode, ControlStartError};
use crate::mesh::messages::PROTOCOL;
use crate::mesh::socket::{GossipSocket, SharedSocket};
use crate::mesh::stream::{Serving, StreamNode};
use crate::metrics::Metrics;
use crate::moves::{MoveParts, Moves, keep_rescheduling};
use crate::node::addresses::Advertised;
use crate::node::front::Front;
use crate::node::{Node, StartError, Stop, engine, files, reports, settings};

/// What is known before any plane runs.
struct Base {
    config: NodeConfig,
    identity: Identity,
    clock: Arc<dyn Clock>,
    incarnation: Incarnation,
    engine: Arc<dyn Engine>,
    advertised: Advertised,
    listener: TcpListener,
    http: SocketAddr,
}

pub(super) async fn start(config: NodeConfig) -> Result<Node, StartError> {
    let keys = settings::cluster_keys(&config.mesh)?;
    let mut api = settings::api_config(&config)?;
    api.max_connections = files::connections(api.max_connections);
    let seeds = settings::seed_list(&config.mesh)?;
    let base = base(config).await?;
    let (view, views) = watch::channel(nobody(&base));
    let requests = TaskTracker::new();
    let sides = sides(&base, views.clone(), &requests)?;
    let thread = GossipThread::start().map_err(|error| plane("state", &error))?;
    let planes = planes(&base, &thread, &sides, views).await?;
    let facts = facts(&base, &planes);
    let gossip = Arc::new(gossip(
        &base,
        (&planes, facts.clone()),
        (keys, seeds),
        &thread,
    )?);
    gossip.publish(sides.loads.summary());

    let (stop, background) = (Stop::default(), TaskTracker::new());
    let front = front(&base, &sides, &planes, (&requests, &background), &stop)?;
    background.spawn(forward_views(gossip.view(), view, stop.closed.clone()));
    let told = (&gossip, facts, Arc::clone(&planes.socket.gossip));
    let failures = report(&base, &sides, told, (&background, &stop));
    if base.config.mesh.mdns {
        background.spawn(reports::greet_neighbours(
            Arc::clone(&planes.control),
            Arc::clone(&gossip),
            stop.closed.clone(),
        ));
    }
    let server = background.spawn(api::serve(
        base.listener,
        api,
        Backend {
            frontend: Arc::clone(&front) as _,
            metrics: Arc::clone(&sides.metrics),
        },
        Shutdown {
            stop: stop.closing.clone(),
            cut: stop.hurry.clone(),
        },
    ));
    info!(node = %base.identity.node_id(), http = %base.http, control = %planes.control.local_addr(),
        stream = %planes.stream, "serving");
    Ok(Node {
        id: base.identity.node_id(),
        http: base.http,
        control_addr: planes.control.local_addr(),
        stream_addr: planes.stream,
        deadline: base.config.shutdown.deadline,
        max_view_age: base.config.dispatch.max_view_age,
        engine: base.engine,
        loads: sides.loads,
        knowledge: sides.knowledge,
        moves: sides.moves,
        front,
        gossip,
        gossip_thread: thread,
        control: planes.control,
        streams: planes.streams,
        server,
        requests,
        background,
        stop,
        failures,
        _identity: base.identity,
    })
}

/// What home and host share, and the host.
struct Sides {
    loads: Arc<LoadSource>,
    knowledge: Arc<Knowledge>,
    metrics: Arc<Metrics>,
    host: Arc<Host>,
    moves: Arc<Moves>,
}

fn sides(
    base: &Base,
    views: watch::Receiver<Arc<ClusterView>>,
    requests: &TaskTracker,
) -> Result<Sides, StartError> {
    let loads = Arc::new(LoadSource::new(Arc::clone(&base.engine), base.incarnation));
    let metrics = Arc::new(Metrics::new(
        base.identity.node_id(),
        env!("CARGO_PKG_VERSION"),
    ));
    let knowledge = Arc::new(Knowledge::new(
        Arc::clone(&base.clock),
        Arc::clone(&loads),
        views,
        base.config.dispatch.policy,
        rng()?,
    ));
    let host = Arc::new(Host::new(
        Arc::clone(&base.engine),
        Arc::clone(&loads),
        Arc::clone(&knowledge),
        Arc::clone(&metrics),
        settings::host_settings(&base.config),
    ));
    let parts = MoveParts {
        engine: Arc::clone(&base.engine),
        clock: Arc::clone(&base.clock),
        loads: Arc::clone(&loads),
        knowledge: Arc::clone(&knowledge),
        metrics: Arc::clone(&metrics),
        tasks: requests.clone(),
    };
    let moves = Arc::new(Moves::new(parts, settings::move_settings(&base.config)));
    Ok(Sides {
        loads,
        knowledge,
        metrics,
        host,
        moves,
    })
}

fn front(
    base: &Base,
    sides: &Sides,
    planes: &Planes,
    (requests, background): (&TaskTracker, &TaskTracker),
    stop: &Stop,
) -> Result<Arc<Front>, StartError> {
    let links = Arc::new(Links::new(
        base.identity.node_id(),
        Arc::clone(&sides.host),
        Arc::clone(&planes.control) as _,
        Arc::clone(&planes.streams) as _,
        requests.clone(),
    ));
    sides
        .moves
        .connect(Arc::clone(&links), planes.streams.carrier());
    let home = Arc::new(Home::new(
        HomeParts {
            engine: Arc::clone(&base.engine),
            links: Arc::clone(&links),
            knowledge: Arc::clone(&sides.knowledge),
            metrics: Arc::clone(&sides.metrics),
            rng: rng()?,
            tasks: requests.clone(),
            hurry: stop.hurry.clone(),
        },
        settings::home_settings(&base.config),
    ));
    sides.host.join(&home, &sides.moves, stop.asked.clone());
    background.spawn(Arc::clone(&home).keep_vigil(stop.closed.clone()));
    Ok(Arc::new(Front::new(
        home,
        Arc::clone(&sides.moves),
        Arc::clone(&sides.knowledge),
        (links, stop.asked.clone()),
        base.config.dispatch.max_view_age,
    )))
}

/// Starts everything that keeps telling. What the node cannot go on with comes out of the receiver.
fn report(
    base: &Base,
    sides: &Sides,
    (gossip, facts, socket): (&Arc<Gossip>, NodeFacts, Arc<GossipSocket>),
    (background, stop): (&TaskTracker, &Stop),
) -> mpsc::Receiver<String> {
    let (fatal, failures) = mpsc::channel(1);
    background.spawn(reports::publish_load(
        Arc::clone(&base.engine),
        Arc::clone(&sides.loads),
        (
            Arc::clone(gossip),
            Arc::clone(&sides.metrics),
            Arc::clone(&sides.moves),
        ),
        (base.config.gossip.interval, facts),
        stop.closed.clone(),
    ));
    if let Some(every) = base.config.moves.interval {
        background.spawn(keep_rescheduling(
            Arc::clone(&sides.moves),
            settings::reschedule_limits(&base.config),
            every,
            base.config.dispatch.max_view_age,
            // A node that drains sheds what it has by other means.
            stop.closing.clone(),
        ));
    }
    background.spawn(reports::keep_metrics(
        Arc::clone(&sides.metrics),
        Arc::clone(&sides.knowledge),
        (Arc::clone(gossip), socket),
        stop.closed.clone(),
    ));
    background.spawn(reports::watch_seeds(
        gossip.seeds(),
        !base.config.mesh.seeds.is_empty(),
        // After its own goodbye a node sees nobody, and that is no news.
        stop.closing.clone(),
    ));
    background.spawn(reports::watch_health(
        gossip.health(),
        fatal,
        stop.closed.clone(),
    ));
    failures
}

/// Identity, addresses and engine. The client port is bound before the model is loaded: a port in use
/// should not cost the time it takes to load.
async fn base(config: NodeConfig) -> Result<Base, StartError> {
    let identity = Identity::open(&config.data_dir)?;
    let listen = config.http.listen;
    let bound = TcpListener::bind(listen).await;
    let listener = bound.map_err(|error| listening("clients", listen, &error, "--http-port"))?;
    let http = listener
        .local_addr()
        .map_err(|error| listening("clients", listen, &error, "--http-port"))?;
    let advertised =
        Advertised::find(config.mesh.advertise.as_deref(), config.mesh.stream.ip()).await?;
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::start());
    let (settings, engine_clock) = (config.engine.clone(), Arc::clone(&clock));
    info!(node = %identity.node_id(), "loading the engine");
    let engine = tokio::task::spawn_blocking(move || engine::load(&settings, engine_clock))
        .await
        .map_err(|error| StartError::Model(error.to_string()))??;
    Ok(Base {
        config,
        identity,
        clock,
        incarnation: Incarnation(u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX)),
        engine,
        advertised,
        listener,
        http,
    })
}

struct Planes {
    control: Arc<ControlNode>,
    streams: Arc<StreamNode>,
    socket: SharedSocket,
    stream: SocketAddr,
}

async fn planes(
    base: &Base,
    thread: &GossipThread,
    sides: &Sides,
    views: watch::Receiver<Arc<ClusterView>>,
) -> Result<Planes, StartError> {
    let host = &sides.host;
    let mesh = &base.config.mesh;
    let bound = SharedSocket::bind(mesh.stream, &thread.runtime_handle());
    let socket = bound
        .map_err(|error| listening("streams and gossip", mesh.stream, &error, "--mesh-port"))?;
    let stream = socket
        .local_addr()
        .map_err(|error| listening("streams and gossip", mesh.stream, &error, "--mesh-port"))?;
    let control = ControlConfig {
        listen: mesh.control,
        mdns: mesh.mdns,
    };
    let control = ControlNode::start(
        control,
        base.identity.keypair(),
        views.clone(),
        Arc::clone(host) as _,
    )
    .await
    .map_err(|error| match error {
        ControlStartError::Listen(reason) => {
            listening("control", mesh.control, &reason, "--mesh-port")
        }
        ControlStartError::Setup(reason) => plane("control", &reason),
    })?;
    host.connect(Arc::clone(&control) as _);
    let streams = StreamNode::start(
        &socket,
        &thread.runtime_handle(),
        base.identity.keypair(),
        views,
        Serving {
            streams: Arc::clone(host) as _,
            bulk: Bulk::new(Arc::clone(&sides.moves) as _),
        },
    )
    .map_err(|error| plane("stream", &error))?;
    Ok(Planes {
        control,
        streams,
        socket,
        stream,
    })
}

fn facts(base: &Base, planes: &Planes) -> NodeFacts {
    let engine = base.engine.facts();
    NodeFacts {
        node: base.identity.node_id(),
        incarnation: base.incarnation,
        peer_id: base.identity.peer_id().to_string(),
        protocol: PROTOCOL,
        control: base.advertised.address(planes.control.local_addr()),
        stream: base.advertised.address(planes.stream),
        http: base.advertised.client_address(base.http),
        role: Role::Mixed,
        block_size: engine.block_size,
        models: engine.models.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
    }
}

fn gossip(
    base: &Base,
    (planes, facts): (&Planes, NodeFacts),
    (keys, seeds): (Option<KeyRing>, SeedList),
    thread: &GossipThread,
) -> Result<Gossip, StartError> {
    let config = GossipConfig {
        interval: base.config.gossip.interval,
        phi: base.config.gossip.phi,
        seeds,
        keys,
        ..GossipConfig::new(base.config.mesh.cluster.clone(), facts.stream)
    };
    Gossip::spawn(
        config,
        facts,
        Arc::clone(&planes.socket.gossip) as _,
        Arc::clone(&base.clock),
        &thread.runtime_handle(),
    )
    .map_err(|error| plane("state", &error))
}

/// Passes the state plane's views on to everybody who was given a place to look before it ran.
async fn forward_views(
    mut from: watch::Receiver<Arc<ClusterView>>,
    to: watch::Sender<Arc<ClusterView>>,
    stop: tokio_util::sync::CancellationToken,
) {
    loop {
        let view = Arc::clone(&from.borrow_and_update());
        to.send_replace(view);
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            changed = from.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

fn nobody(base: &Base) -> Arc<ClusterView> {
    let now = base.clock.now();
    Arc::new(ClusterView::new(base.identity.node_id(), now, Vec::new()))
}

/// A generator seeded by the system: the one place where chance enters a node.
fn rng() -> Result<StdRng, StartError> {
    let mut seed = [0; 32];
    SystemRandom::new()
        .fill(&mut seed)
        .map_err(|_| StartError::File("the system gives no random bytes".into()))?;
    Ok(StdRng::from_seed(seed))
}

fn listening(
    purpose: &'static str,
    address: SocketAddr,
    reason: &dyn std::fmt::Display,
    flag: &'static str,
) -> StartError {
    StartError::Listen {
        purpose,
        address,
        reason: reason.to_string(),
        flag,
    }
}

fn plane(plane: &'static str, reason: &dyn std::fmt::Display) -> StartError {
    StartError::Plane {
        plane,
        reason: reason.to_string(),
    }
}
