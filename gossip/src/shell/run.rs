//! The task that keeps the gossip library going, tells it what we say, and makes views of what it hears.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chitchat::{
    Chitchat, ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, NodeState,
    ProtocolVersion, spawn_chitchat,
};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::debug;

use super::{Command, GossipError, GossipHealth, GossipStart, framing, own_row, packed};
use crate::config::GossipConfig;
use crate::io::DatagramIo;
use crate::limits::VIEW_PAUSE;
use crate::seal::Framing;
use crate::seeds::resolve::{Resolved, resolve_forever};
use crate::seeds::{SeedBook, SeedState};
use crate::stats::Counters;
use crate::summary::{LoadSummary, NodeFacts};
use crate::table::{Record, Table};
use crate::time::Clock;
use crate::transport::SealedTransport;
use crate::types::NodeId;
use crate::view::ClusterView;
use crate::wire::{FACTS_KEY, LEFT_KEY, LOAD_KEY, pack_load};

/// How long deleted keys are remembered by the library. We delete none; its default of hours costs memory.
const TOMBSTONES: Duration = Duration::from_secs(60);

/// Shortest and longest pause before the library is started again after it ended by itself.
const RESTART_PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// Nodes that are told a goodbye directly; the rest hears it from them. Covers small meshes whole, and
/// 32 tellers reach thousands in one more round.
const FAREWELLS: usize = 32;

/// Times a goodbye is told, an interval apart in all: one lost datagram must not keep us in a view.
const FAREWELL_ROUNDS: u32 = 2;

/// The handle's ends.
pub(super) struct Plane {
    pub(super) view: watch::Receiver<Arc<ClusterView>>,
    pub(super) health: watch::Receiver<GossipHealth>,
    pub(super) seeds: watch::Receiver<SeedState>,
    pub(super) load: watch::Sender<LoadSummary>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) counters: Arc<Counters>,
}

/// The task.
pub(super) struct Driver {
    config: GossipConfig,
    facts: Arc<NodeFacts>,
    packed_facts: String,
    io: Arc<dyn DatagramIo>,
    framing: Arc<Mutex<Framing>>,
    clock: Arc<dyn Clock>,
    counters: Arc<Counters>,
    table: Table,
    book: SeedBook,
    /// Restarts add to it: the library must not meet its own past under the same number.
    generation: u64,
    left: bool,
    told: LoadSummary,
    load: watch::Receiver<LoadSummary>,
    commands: mpsc::Receiver<Command>,
    view: watch::Sender<Arc<ClusterView>>,
    health: watch::Sender<GossipHealth>,
    seeds: watch::Sender<SeedState>,
    alone: watch::Sender<bool>,
    resolved: watch::Receiver<Resolved>,
    resolver: JoinSet<()>,
}

/// Checks everything and makes both ends.
pub(super) fn prepare(
    config: GossipConfig,
    start: GossipStart,
    io: Arc<dyn DatagramIo>,
    clock: Arc<dyn Clock>,
) -> Result<(Plane, DriverStart), GossipError> {
    config.check(io.local_addr()?)?;
    let GossipStart { facts, load } = start;
    let packed_facts = packed(&facts)?;
    let framing = framing(&config)?;
    let facts = Arc::new(facts);
    let now = clock.now();
    let table = Table::new(facts.node, config.max_nodes);
    let book = SeedBook::new(config.advertise, now);
    let (view, view_out) = watch::channel(Arc::new(
        table.view(now, own_row(&facts, load, clock.as_ref())),
    ));
    let (health, health_out) = watch::channel(GossipHealth::Running);
    let (seeds, seeds_out) = watch::channel(book.state());
    let (load_in, load_out) = watch::channel(load);
    let (commands_in, commands) = mpsc::channel(super::COMMANDS);
    let counters = Arc::new(Counters::default());
    let plane = Plane {
        view: view_out,
        health: health_out,
        seeds: seeds_out,
        load: load_in,
        commands: commands_in,
        counters: Arc::clone(&counters),
    };
    let (found, resolved) = watch::channel(Resolved::default());
    let driver = Driver {
        generation: facts.incarnation.0,
        config,
        facts,
        packed_facts,
        io,
        framing: Arc::new(Mutex::new(framing)),
        clock,
        counters,
        table,
        book,
        left: false,
        told: load,
        load: load_out,
        commands,
        view,
        health,
        seeds,
        alone: watch::Sender::new(true),
        resolved,
        resolver: JoinSet::new(),
    };
    Ok((plane, DriverStart { driver, found }))
}

/// A driver that has not begun.
pub(super) struct DriverStart {
    driver: Driver,
    found: watch::Sender<Resolved>,
}

/// Why one run of the library ended.
enum Ended {
    /// The handle is gone.
    Abandoned,
    /// The library's task ended by itself.
    Library(String),
}

impl DriverStart {
    /// Runs until aborted or abandoned. `ready` hears of the first start.
    pub(super) async fn run(self, ready: oneshot::Sender<Result<(), String>>) {
        let Self { mut driver, found } = self;
        let seeds = driver.config.seeds.clone();
        let alone = driver.alone.subscribe();
        driver.resolver.spawn(resolve_forever(seeds, alone, found));
        let mut ready = Some(ready);
        let mut pause = RESTART_PAUSE.0;
        loop {
            let reason = match driver.start_library().await {
                Ok(library) => {
                    driver.health.send_replace(GossipHealth::Running);
                    if let Some(ready) = ready.take()
                        && ready.send(Ok(())).is_err()
                    {
                        return;
                    }
                    match driver.serve(library).await {
                        Ended::Abandoned => return,
                        Ended::Library(reason) => reason,
                    }
                }
                Err(reason) => reason,
            };
            if let Some(ready) = ready.take() {
                // The starter hears why; if it has gone, nobody needs to know.
                drop(ready.send(Err(reason)));
                return;
            }
            debug!(
                reason,
                ?pause,
                "the gossip library ended; it is started again"
            );
            driver.counters.restarts.add(1);
            driver
                .health
                .send_replace(GossipHealth::Restarting { reason });
            sleep(pause).await;
            pause = (pause * 2).min(RESTART_PAUSE.1);
            driver.generation += 1;
        }
    }
}

impl Driver {
    async fn start_library(&self) -> Result<ChitchatHandle, String> {
        let config = ChitchatConfig {
            chitchat_id: ChitchatId::new(
                self.facts.node.to_string(),
                self.generation,
                self.config.advertise,
            ),
            cluster_id: self.config.cluster.clone(),
            gossip_interval: self.config.interval,
            listen_addr: self.config.advertise,
            // Seeds are ours: the library's own re-resolves names once a minute only.
            seed_nodes: Vec::new(),
            failure_detector_config: FailureDetectorConfig {
                phi_threshold: self.config.phi,
                initial_interval: self.config.interval,
                dead_node_grace_period: self.config.dead_node_grace,
                ..FailureDetectorConfig::default()
            },
            marked_for_deletion_grace_period: TOMBSTONES,
            catchup_callback: None,
            extra_liveness_predicate: None,
            protocol_version: ProtocolVersion::V1,
        };
        let mut keys = vec![(FACTS_KEY.to_owned(), self.packed_facts.clone())];
        if let Ok(load) = pack_load(&self.told) {
            keys.push((LOAD_KEY.to_owned(), load));
        }
        let transport = SealedTransport {
            io: Arc::clone(&self.io),
            framing: Arc::clone(&self.framing),
            counters: Arc::clone(&self.counters),
        };
        spawn_chitchat(config, keys, &transport)
            .await
            .map_err(|error| format!("{error:#}"))
    }

    async fn serve(&mut self, library: ChitchatHandle) -> Ended {
        let changed = Arc::new(Notify::new());
        // The callbacks run under the library's lock: they only leave a note.
        let listeners = library
            .with_chitchat(|chitchat| {
                [FACTS_KEY, LOAD_KEY, LEFT_KEY].map(|key| {
                    let changed = Arc::clone(&changed);
                    chitchat.subscribe_event(key, move |_| changed.notify_one())
                })
            })
            .await;
        let ended = self.turn(&library, &changed).await;
        drop(listeners);
        library.abort();
        ended
    }

    async fn turn(&mut self, library: &ChitchatHandle, changed: &Notify) -> Ended {
        let mut terminated = Box::pin(library.termination_watcher());
        let mut tick = interval(self.config.interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                outcome = &mut terminated => {
                    let reason = outcome.err().map_or_else(|| "without a word".into(), |error| format!("{error:#}"));
                    return Ended::Library(reason);
                }
                command = self.commands.recv() => match command {
                    None => return Ended::Abandoned,
                    Some(Command::Leave(done)) => {
                        self.say_goodbye(library).await;
                        // The handle may have stopped waiting.
                        drop(done.send(()));
                    }
                },
                _ = tick.tick() => {
                    self.tell(library).await;
                    self.look(library).await;
                    self.contact(library);
                }
                Ok(()) = self.load.changed() => {
                    if self.load.borrow_and_update().readiness != self.told.readiness {
                        self.tell(library).await;
                    }
                }
                () = changed.notified() => {
                    sleep(VIEW_PAUSE).await;
                    self.look(library).await;
                }
            }
        }
    }

    /// Puts the newest load into our record.
    async fn tell(&mut self, library: &ChitchatHandle) {
        let load = *self.load.borrow();
        if self.left || load == self.told {
            return;
        }
        self.told = load;
        if let Ok(text) = pack_load(&load) {
            library
                .with_chitchat(|chitchat| chitchat.self_node_state().set(LOAD_KEY, &text))
                .await;
        }
    }

    /// Reads all records and publishes a view.
    async fn look(&mut self, library: &ChitchatHandle) {
        let now = self.clock.now();
        let (table, this, generation) = (&mut self.table, self.facts.node, self.generation);
        let (read, later) = library
            .with_chitchat(|chitchat| {
                let read = table.read(now, records(chitchat));
                (read, later_self(chitchat, this, generation))
            })
            .await;
        self.counters.rows_rejected.add(read.facts_rejected);
        self.counters.loads_rejected.add(read.loads_rejected);
        let health = match (later, read.beyond_limit) {
            (Some(by), _) => GossipHealth::Displaced { by },
            (None, 0) => GossipHealth::Running,
            (None, left_out) => GossipHealth::Crowded { left_out },
        };
        self.health.send_if_modified(|known| {
            let changed = *known != health;
            *known = health;
            changed
        });
        let peers: BTreeSet<SocketAddr> = self.table.others().map(|facts| facts.stream).collect();
        self.alone.send_if_modified(|alone| {
            let changed = *alone != peers.is_empty();
            *alone = peers.is_empty();
            changed
        });
        self.book.live(now, peers);
        let own = own_row(&self.facts, self.told, self.clock.as_ref());
        self.view.send_replace(Arc::new(self.table.view(now, own)));
    }

    /// Greets seeds and lost peers, as the book says.
    fn contact(&mut self, library: &ChitchatHandle) {
        {
            let resolved = self.resolved.borrow_and_update();
            self.book
                .resolved(&resolved.addresses, &resolved.unresolved);
        }
        for address in self.book.contacts() {
            if let Err(error) = library.gossip(address) {
                debug!(%address, %error, "seed not contacted");
            }
        }
        let state = self.book.state();
        self.seeds.send_if_modified(|known| {
            let changed = *known != state;
            *known = state;
            changed
        });
    }

    async fn say_goodbye(&mut self, library: &ChitchatHandle) {
        self.left = true;
        library
            .with_chitchat(|chitchat| chitchat.self_node_state().set(LEFT_KEY, "1"))
            .await;
        let peers: Vec<SocketAddr> = self
            .table
            .others()
            .map(|facts| facts.stream)
            .take(FAREWELLS)
            .collect();
        for _ in 0..FAREWELL_ROUNDS {
            for peer in &peers {
                if let Err(error) = library.gossip(*peer) {
                    debug!(%peer, %error, "goodbye not said");
                }
            }
            // An exchange is three datagrams; they are on their way long before this ends.
            sleep(self.config.interval / FAREWELL_ROUNDS).await;
        }
    }
}

/// The records of the nodes that the failure detector holds for alive.
fn records(chitchat: &Chitchat) -> impl Iterator<Item = Record<'_>> {
    let own = chitchat.self_chitchat_id();
    chitchat
        .live_nodes()
        .filter(move |id| *id != own)
        .filter_map(|id| Some((id, chitchat.node_state(id)?)))
        .map(|(id, state)| Record {
            name: &id.node_id,
            generation: id.generation_id,
            facts: versioned(state, FACTS_KEY),
            load: versioned(state, LOAD_KEY),
            left: state.get(LEFT_KEY).is_some(),
        })
}

fn versioned<'a>(state: &'a NodeState, key: &str) -> Option<(u64, &'a str)> {
    let value = state
        .get_versioned(key)
        .filter(|value| !value.is_deleted())?;
    Some((value.version, &value.value))
}

/// Where a later life of this node is, if there is one.
fn later_self(chitchat: &Chitchat, this: NodeId, generation: u64) -> Option<SocketAddr> {
    let name = this.to_string();
    chitchat
        .live_nodes()
        .find(|id| *id.node_id == *name && id.generation_id > generation)
        .map(|id| id.gossip_advertise_addr)
}
