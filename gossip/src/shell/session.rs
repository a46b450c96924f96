//! One session with the gossip library, from its start to its end.

use std::collections::BTreeSet;
use std::future::{Future, pending};
use std::net::SocketAddr;
use std::ops::Bound;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use chitchat::{
    Chitchat, ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, ListenerHandle,
    NodeState, ProtocolVersion, spawn_chitchat,
};
use tokio::sync::{Notify, watch};
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};
use tracing::debug;

use crate::health::Health;
use crate::limits::VIEW_PAUSE;
use crate::roster::{Observed, Rival, Rivalry, Roster, Values, judge, one_too_many};
use crate::shell::task::{End, Task};
use crate::summary::Readiness;
use crate::time::Timestamp;
use crate::transport::SealedTransport;
use crate::wire::{FACTS_KEY, LEFT_KEY, LOAD_KEY, pack_facts, pack_load};

/// Peers told directly in one round of goodbye. At most three rounds; the peers pass it on, each to
/// three others in every interval, so a thousand nodes know after two intervals.
const GOODBYE_FANOUT: usize = 32;

/// Rounds of goodbye, half an interval apart: a lost datagram is made up for within one interval.
const GOODBYE_ROUNDS: u32 = 3;

/// Deleted keys are remembered for this long. We delete none; the library wants a number.
const DELETED_KEPT: Duration = Duration::from_secs(60);

/// Heartbeat intervals that the failure detector averages over: four minutes at 250 ms.
const HEARTBEATS_KEPT: usize = 1_000;

/// Loads put into gossip per interval at most. Several between two rounds travel as one (measured:
/// 50 a second cost the bytes of 20), so this bounds local work only; one per interval would make a
/// change wait for up to an interval before its first round.
const LOADS_PER_INTERVAL: u32 = 5;

/// Version of our own record after which no value is set: half of all versions, which honest
/// updates do not reach.
const LAST_VERSION: u64 = u64::MAX / 2;

/// Something to react to.
enum Input {
    Stop,
    Ended(String),
    Leave,
    Load,
    Facts,
    Resolved,
    Met(SocketAddr),
    LoadDue,
    Changed,
    ViewDue,
    SeedsDue,
    GoodbyeDue,
}

/// A goodbye under way.
struct Goodbye {
    rounds_left: u32,
    due: Timestamp,
    /// What to say when it is done.
    then: Health,
}

struct Session<'a> {
    task: &'a mut Task,
    id: ChitchatId,
    library: ChitchatHandle,
    ended: Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>,
    changed: Arc<Notify>,
    live: watch::Receiver<std::collections::BTreeMap<ChitchatId, NodeState>>,
    _listeners: [ListenerHandle; 3],
    ticks: Interval,
    last_put: Option<(Timestamp, Readiness)>,
    load_due: Option<Timestamp>,
    last_view: Timestamp,
    view_due: Option<Timestamp>,
    goodbye: Option<Goodbye>,
}

/// Runs one session under `generation`.
pub(super) async fn run(task: &mut Task, generation: u64) -> End {
    let mut session = match Session::start(task, generation).await {
        Ok(session) => session,
        Err(error) => return End::Failed(format!("{error:#}")),
    };
    let end = loop {
        let input = session.next().await;
        if let Some(end) = session.handle(input).await {
            break end;
        }
    };
    session.library.abort();
    end
}

impl<'a> Session<'a> {
    async fn start(task: &'a mut Task, generation: u64) -> anyhow::Result<Self> {
        let id = ChitchatId::new(
            task.own.node().to_string(),
            generation,
            task.config.advertise,
        );
        task.take_own_load();
        let mut values = vec![(FACTS_KEY.to_owned(), pack_facts(&task.own.facts)?)];
        if let Some((load, _)) = &task.own.load {
            values.push((LOAD_KEY.to_owned(), pack_load(load)?));
        }
        let transport = SealedTransport {
            io: Arc::clone(&task.io),
            framing: Arc::clone(&task.framing),
            counters: Arc::clone(&task.counters),
        };
        let library = spawn_chitchat(library_config(task, &id), values, &transport).await?;
        let changed = Arc::new(Notify::new());
        let (listeners, live) = library
            .with_chitchat(|chitchat| {
                let listeners = [FACTS_KEY, LOAD_KEY, LEFT_KEY].map(|key| {
                    let changed = Arc::clone(&changed);
                    chitchat.subscribe_event(key, move |_| changed.notify_one())
                });
                (listeners, chitchat.live_nodes_watcher())
            })
            .await;
        let mut ticks = interval(task.config.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let now = task.clock.now();
        let last_put = task.own.load.map(|(load, _)| (now, load.readiness));
        task.tell.health.send_replace(Health::Running);
        Ok(Self {
            task,
            id,
            ended: Box::pin(library.termination_watcher()),
            library,
            changed,
            live,
            _listeners: listeners,
            ticks,
            last_put,
            load_due: None,
            last_view: now,
            view_due: Some(now),
            goodbye: None,
        })
    }

    /// The next thing to react to. Safe to drop.
    async fn next(&mut self) -> Input {
        let now = self.task.clock.now();
        let goodbye_due = self
            .goodbye
            .as_ref()
            .filter(|goodbye| goodbye.rounds_left > 0)
            .map(|goodbye| goodbye.due);
        let view_pending = self.view_due.is_some();
        tokio::select! {
            biased;
            () = self.task.stop.cancelled() => Input::Stop,
            ended = &mut self.ended => Input::Ended(match ended {
                Ok(()) => "the gossip task ended".to_owned(),
                Err(error) => format!("{error:#}"),
            }),
            () = self.task.leaving.cancelled(), if self.goodbye.is_none() => Input::Leave,
            changed = self.task.loads.changed() => match changed {
                Ok(()) => Input::Load,
                Err(_) => Input::Stop,
            },
            changed = self.task.facts.changed() => match changed {
                Ok(()) => Input::Facts,
                Err(_) => Input::Stop,
            },
            Ok(()) = self.task.resolved.changed() => Input::Resolved,
            Some(address) = self.task.met.recv() => Input::Met(address),
            () = until(now, self.load_due) => Input::LoadDue,
            () = until(now, goodbye_due) => Input::GoodbyeDue,
            () = self.changed.notified(), if !view_pending => Input::Changed,
            Ok(()) = self.live.changed(), if !view_pending => Input::Changed,
            () = until(now, self.view_due) => Input::ViewDue,
            _ = self.ticks.tick() => Input::SeedsDue,
        }
    }

    async fn handle(&mut self, input: Input) -> Option<End> {
        match input {
            Input::Stop => return Some(End::Stopped),
            Input::Ended(reason) => return Some(End::Failed(reason)),
            Input::Leave => return self.begin_goodbye(Health::Left).await,
            Input::GoodbyeDue => return self.go_on_with_goodbye(),
            Input::Load => return self.take_load().await,
            Input::LoadDue => return self.put_load().await,
            Input::Facts => return self.put_facts().await,
            Input::Resolved => {
                let resolved = self.task.resolved.borrow_and_update();
                self.task
                    .book
                    .resolved(&resolved.addresses, &resolved.unresolved);
                drop(resolved);
                self.contact_seeds();
            }
            Input::Met(address) => self.task.book.met(self.task.clock.now(), address),
            Input::SeedsDue => self.contact_seeds(),
            Input::Changed => self.want_view(),
            Input::ViewDue => return self.look_around().await,
        }
        None
    }

    /// Puts a newly published load into our row, and into gossip now or when the pause is over.
    async fn take_load(&mut self) -> Option<End> {
        self.task.take_own_load();
        self.want_view();
        let (load, now) = self.task.own.load?;
        let due = match self.last_put {
            Some((last, readiness)) if readiness == load.readiness => {
                last + self.task.config.interval / LOADS_PER_INTERVAL
            }
            Some(_) | None => now,
        };
        if due <= now {
            return self.put_load().await;
        }
        self.load_due = Some(due);
        None
    }

    async fn put_load(&mut self) -> Option<End> {
        self.load_due = None;
        let (load, _) = self.task.own.load?;
        match pack_load(&load) {
            Ok(text) => {
                self.last_put = Some((self.task.clock.now(), load.readiness));
                self.set(LOAD_KEY, &text).await
            }
            Err(error) => {
                debug!(%error, "own load not published");
                None
            }
        }
    }

    async fn put_facts(&mut self) -> Option<End> {
        self.task.own.facts = Arc::clone(&self.task.facts.borrow_and_update());
        self.want_view();
        match pack_facts(&self.task.own.facts) {
            Ok(text) => self.set(FACTS_KEY, &text).await,
            Err(error) => {
                debug!(%error, "own facts not published");
                None
            }
        }
    }

    /// Sets one of our values. Ends the session when a forged record has driven our version to where
    /// the library would panic on the next one.
    async fn set(&mut self, key: &str, value: &str) -> Option<End> {
        let set = self
            .library
            .with_chitchat(|chitchat| {
                let state = chitchat.self_node_state();
                let room = state.max_version() < LAST_VERSION;
                if room {
                    state.set(key, value);
                }
                room
            })
            .await;
        (!set).then(|| End::Failed("our record was forged".to_owned()))
    }

    fn want_view(&mut self) {
        self.view_due.get_or_insert(self.last_view + VIEW_PAUSE);
    }

    /// Makes the view anew, and finds out whether this node must give way.
    async fn look_around(&mut self) -> Option<End> {
        self.view_due = None;
        let (id, roster) = (&self.id, &self.task.roster);
        let census = self
            .library
            .with_chitchat(|chitchat| Census::take(chitchat, id, roster))
            .await;
        let task = &mut *self.task;
        let now = task.clock.now();
        self.last_view = now;
        let rejected = task.roster.update(now, census.observed);
        task.counters.rows_rejected.add(rejected.rows);
        task.counters.loads_rejected.add(rejected.loads);
        let mut addresses = task.roster.addresses();
        addresses.remove(&task.config.advertise);
        task.book.live(now, addresses);
        task.tell_seeds();
        task.tell_view();
        match judge(task.config.advertise, &census.rivals) {
            Rivalry::None => {}
            Rivalry::Outbid(later) => return Some(End::Outbid(later)),
            Rivalry::Displaced(by) => return Some(End::Final(Health::Displaced { by })),
        }
        let limit = task.config.max_nodes;
        if self.goodbye.is_none() && one_too_many(census.started_before, limit) {
            let known = census.known;
            return self.begin_goodbye(Health::Crowded { known, limit }).await;
        }
        None
    }

    fn contact_seeds(&mut self) {
        for address in self.task.book.contacts() {
            self.contact(address);
        }
        self.task.tell_seeds();
    }

    fn contact(&self, address: SocketAddr) {
        if self.library.gossip(address).is_err() {
            debug!(%address, "the gossip task is gone");
        }
    }

    async fn begin_goodbye(&mut self, then: Health) -> Option<End> {
        self.goodbye = Some(Goodbye {
            rounds_left: GOODBYE_ROUNDS + 1,
            due: self.task.clock.now(),
            then,
        });
        self.set(LEFT_KEY, "1").await
    }

    /// Tells some peers directly; after the last round, says that it is done.
    fn go_on_with_goodbye(&mut self) -> Option<End> {
        let now = self.task.clock.now();
        let goodbye = self.goodbye.as_mut()?;
        goodbye.rounds_left = goodbye.rounds_left.saturating_sub(1);
        goodbye.due = now + self.task.config.interval / 2;
        let rounds_left = goodbye.rounds_left;
        if rounds_left > 0 {
            let round = (GOODBYE_ROUNDS - rounds_left) as usize;
            for address in told_in_round(&self.task.roster.addresses(), round) {
                self.contact(address);
            }
            return None;
        }
        let then = goodbye.then.clone();
        match then {
            // Others may still ask; the answers carry the goodbye.
            Health::Left => {
                self.task.tell.health.send_replace(then);
                None
            }
            Health::Starting
            | Health::Running
            | Health::Restarting { .. }
            | Health::Displaced { .. }
            | Health::Crowded { .. }
            | Health::Failed { .. } => Some(End::Final(then)),
        }
    }
}

/// The peers of one round: all of a small mesh in every round, else further ones each time.
fn told_in_round(peers: &BTreeSet<SocketAddr>, round: usize) -> Vec<SocketAddr> {
    let first = if peers.len() <= GOODBYE_FANOUT {
        0
    } else {
        round * GOODBYE_FANOUT
    };
    peers
        .iter()
        .cycle()
        .skip(first)
        .take(GOODBYE_FANOUT.min(peers.len()))
        .copied()
        .collect()
}

/// Ends at `due`; never for `None`.
async fn until(now: Timestamp, due: Option<Timestamp>) {
    match due {
        Some(due) => sleep(due.since(now)).await,
        None => pending().await,
    }
}

fn library_config(task: &Task, id: &ChitchatId) -> ChitchatConfig {
    let config = &task.config;
    ChitchatConfig {
        chitchat_id: id.clone(),
        cluster_id: config.cluster.clone(),
        gossip_interval: config.interval,
        listen_addr: config.advertise,
        // Seeds are ours: the library looks a name up once a minute, however alone it is.
        seed_nodes: Vec::new(),
        failure_detector_config: FailureDetectorConfig {
            phi_threshold: config.phi,
            sampling_window_size: HEARTBEATS_KEPT,
            max_interval: config.interval.saturating_mul(40),
            initial_interval: config.interval,
            dead_node_grace_period: config.dead_node_grace,
        },
        marked_for_deletion_grace_period: DELETED_KEPT,
        catchup_callback: None,
        extra_liveness_predicate: None,
        // Its digests are compressed: four times as many nodes fit one datagram.
        protocol_version: ProtocolVersion::V1,
    }
}

/// What the library knows at one moment, copied out under its lock.
struct Census {
    observed: Vec<Observed>,
    rivals: Vec<Rival>,
    /// Entries of the digest: live and recently dead nodes.
    known: usize,
    /// Those of them that started before us.
    started_before: usize,
}

impl Census {
    fn take(chitchat: &Chitchat, own: &ChitchatId, roster: &Roster) -> Self {
        let live: BTreeSet<&ChitchatId> = chitchat.live_nodes().filter(|id| *id != own).collect();
        let observed = live
            .iter()
            .map(|id| Observed {
                id: (*id).clone(),
                values: chitchat
                    .node_state(id)
                    .and_then(|state| Values::copy(state, roster.seen(id))),
            })
            .collect();
        let later = (Bound::Excluded(own.clone()), Bound::Unbounded);
        let rivals = chitchat
            .node_states()
            .range(later)
            .map(|(id, _)| id)
            .take_while(|id| id.node_id == own.node_id)
            .filter(|id| id.generation_id > own.generation_id)
            .map(|id| Rival {
                generation: id.generation_id,
                address: id.gossip_advertise_addr,
                live: live.contains(id),
            })
            .collect();
        let forgotten: BTreeSet<&ChitchatId> = chitchat.scheduled_for_deletion_nodes().collect();
        let digest = || {
            let states = chitchat.node_states().keys();
            states.filter(|id| !forgotten.contains(id))
        };
        let age = |id: &ChitchatId| (id.generation_id, Arc::clone(&id.node_id));
        let ours = age(own);
        Self {
            observed,
            rivals,
            known: digest().count(),
            started_before: digest().filter(|id| age(id) < ours).count(),
        }
    }
}
