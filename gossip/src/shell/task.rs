//! The task over all its sessions with the gossip library: start, restart, give up.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::config::GossipConfig;
use crate::health::Health;
use crate::io::DatagramIo;
use crate::roster::Roster;
use crate::seal::Framing;
use crate::seeds::resolve::Resolved;
use crate::seeds::{SeedBook, SeedState};
use crate::shell::session;
use crate::stats::Counters;
use crate::summary::{LoadSummary, NodeFacts};
use crate::time::Clock;
use crate::types::NodeId;
use crate::view::{ClusterView, NodeRow};

/// Restarts in a row before the task gives up. With the pauses below that is about 23 s, after
/// which the others have long seen a death and an operator is needed.
const MAX_RESTARTS: u32 = 8;

/// Pause before the first restart; doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A session that ran this long was a good one: the count of restarts begins anew.
const STEADY: Duration = Duration::from_secs(60);

/// Where the task tells what it knows.
#[derive(Debug)]
pub(super) struct Tell {
    pub(super) view: watch::Sender<Arc<ClusterView>>,
    pub(super) health: watch::Sender<Health>,
    pub(super) seeds: watch::Sender<SeedState>,
    /// For the resolver of seeds, which hurries while alone.
    pub(super) alone: watch::Sender<bool>,
}

/// State that outlives a session.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) config: GossipConfig,
    pub(super) io: Arc<dyn DatagramIo>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) framing: Arc<Mutex<Framing>>,
    pub(super) counters: Arc<Counters>,
    pub(super) roster: Roster,
    pub(super) book: SeedBook,
    /// This node's own row. Never read back from gossip.
    pub(super) own: NodeRow,
    pub(super) loads: watch::Receiver<Option<LoadSummary>>,
    pub(super) facts: watch::Receiver<Arc<NodeFacts>>,
    pub(super) resolved: watch::Receiver<Resolved>,
    /// Neighbours found by other means.
    pub(super) met: mpsc::Receiver<SocketAddr>,
    pub(super) leaving: CancellationToken,
    pub(super) stop: CancellationToken,
    pub(super) tell: Tell,
}

/// How a session with the gossip library ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// As told.
    Stopped,
    /// By itself: the library panicked on what a key holder sent, or the socket broke.
    Failed(String),
    /// A past life of ours carries this later generation.
    Outbid(u64),
    /// For good.
    Final(Health),
}

impl Task {
    /// Runs until told to stop.
    pub(super) async fn run(mut self) {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => return,
            () = sleep(phase(self.own.node(), self.config.interval)) => {}
        }
        // The library needs a new generation for each session: peers would take a second one under
        // the same for a past that they already know. The incarnation stays: it is one life.
        let mut generation = self.own.facts.incarnation.0;
        let mut attempt = 0;
        loop {
            let began = self.clock.now();
            let (reason, next) = match session::run(&mut self, generation).await {
                End::Stopped => return,
                End::Final(health) => return self.stay(health).await,
                End::Failed(reason) => (reason, generation.checked_add(1)),
                End::Outbid(later) => {
                    let reason = "a past life has a later generation".to_owned();
                    (reason, later.checked_add(1))
                }
            };
            if self.clock.now().since(began) >= STEADY {
                attempt = 0;
            }
            attempt += 1;
            let Some(next) = next.filter(|_| attempt <= MAX_RESTARTS) else {
                return self.stay(Health::Failed { reason }).await;
            };
            generation = next;
            debug!(attempt, %reason, generation, "gossip starts again");
            self.counters.restarts.add(1);
            self.tell
                .health
                .send_replace(Health::Restarting { attempt, reason });
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = sleep(pause_before(attempt)) => {}
            }
        }
    }

    /// Tells the last state of health and goes on alone: a node without gossip still serves its
    /// clients, so its own row stays fresh.
    async fn stay(mut self, health: Health) {
        debug!(?health, "gossip has ended");
        self.roster = Roster::new(self.own.node());
        self.tell.health.send_replace(health);
        loop {
            self.tell_view();
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                changed = self.loads.changed() => if changed.is_err() { return },
                changed = self.facts.changed() => if changed.is_err() { return },
            }
            self.take_own_load();
            self.own.facts = Arc::clone(&self.facts.borrow_and_update());
        }
    }

    /// Dates the newest published load and puts it into our own row.
    pub(super) fn take_own_load(&mut self) {
        let load = *self.loads.borrow_and_update();
        self.own.load = load.map(|load| (load, self.clock.now()));
    }

    /// Publishes the view as it is now.
    pub(super) fn tell_view(&self) {
        let mut rows = self.roster.rows();
        rows.push(self.own.clone());
        let view = ClusterView::new(self.own.node(), self.clock.now(), rows);
        self.tell.view.send_replace(Arc::new(view));
    }

    /// Tells what changed about finding the mesh.
    pub(super) fn tell_seeds(&self) {
        let state = self.book.state();
        let is_alone = match state {
            SeedState::Alone { .. } => true,
            SeedState::Joined { .. } => false,
        };
        self.tell.alone.send_if_modified(|alone| {
            let changed = *alone != is_alone;
            *alone = is_alone;
            changed
        });
        self.tell.seeds.send_if_modified(|told| {
            let changed = *told != state;
            *told = state;
            changed
        });
    }
}

/// Where in the interval this node's rounds fall. Nodes that are started together would otherwise
/// gossip in step, and news that needs two rounds would wait for two whole intervals: in virtual time,
/// 99 % of 16 nodes know a change after 480 ms in step and after 330 to 380 ms out of step.
fn phase(node: NodeId, interval: Duration) -> Duration {
    let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
    Duration::from_nanos(node.0.checked_rem(nanos).unwrap_or_default())
}

fn pause_before(attempt: u32) -> Duration {
    FIRST_PAUSE
        .saturating_mul(1 << (attempt - 1).min(16))
        .min(LONGEST_PAUSE)
}
