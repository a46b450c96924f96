//! What a running node keeps telling: its load to the mesh, its state to metrics and log.

use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Gossip, GossipStats, Health, NodeFacts, SeedState};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::engine::Engine;
use crate::engine::moving::MovingEngine;
use crate::knowledge::Knowledge;
use crate::load::LoadSource;
use crate::mesh::control::ControlNode;
use crate::mesh::socket::GossipSocket;
use crate::metrics::Metrics;
use crate::moves::Moves;

/// Changes of the load within this time are published together.
const LOAD_PAUSE: Duration = Duration::from_millis(10);

/// Time between two folds of the metrics' observations into their buckets.
const METRICS_UPKEEP: Duration = Duration::from_secs(5);

/// Time between two lines of the log about seeds that do not answer.
const ALONE_REMINDER: Duration = Duration::from_secs(30);

/// Publishes the load whenever it changes, and at least once an interval: a load that stands still
/// would grow old in the views of others, though nothing is wrong with it. The gauges of the engine and of moves follow, and
/// so do the facts of an engine that learns to serve other models.
pub(super) async fn publish_load(
    engine: Arc<dyn Engine>,
    loads: Arc<LoadSource>,
    (gossip, metrics, moves): (Arc<Gossip>, Arc<Metrics>, Arc<Moves>),
    (every, mut facts): (Duration, NodeFacts),
    stop: CancellationToken,
) {
    let mut changed = engine.load_changed();
    let mut tick = interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
            Ok(()) = changed.changed() => {}
        }
        let now = engine.facts();
        if now.models != facts.models || now.block_size != facts.block_size {
            facts.models.clone_from(&now.models);
            facts.block_size = now.block_size;
            if let Err(error) = gossip.update_facts(facts.clone()) {
                warn!(%error, "the mesh cannot be told what the engine serves");
            }
        }
        gossip.publish(loads.summary());
        metrics.preemptions(engine.preemptions());
        let moving = engine.moving();
        metrics.kv_bytes_per_token(moving.map_or(0, MovingEngine::kv_bytes_per_token));
        if let Some(moving) = moving {
            metrics.moving_counts(moving.counts());
        }
        let (leaving, arriving) = moves.under_way();
        metrics.moves_under_way(leaving, arriving);
        // Gossip tells the newest a few times a second; a burst of requests changes it a thousand times.
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(LOAD_PAUSE) => {}
        }
    }
}

/// Keeps the metrics tidy between scrapes, and the gauges true.
pub(super) async fn keep_metrics(
    metrics: Arc<Metrics>,
    knowledge: Arc<Knowledge>,
    (gossip, socket): (Arc<Gossip>, Arc<GossipSocket>),
    stop: CancellationToken,
) {
    let mut tick = interval(METRICS_UPKEEP);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        metrics.show_view(&knowledge.view(), knowledge.now());
        show_gossip(&metrics, &gossip.stats(), socket.dropped());
        metrics.upkeep();
    }
}

/// `overrun` are the datagrams that arrived faster than they were taken; gossip never saw them.
fn show_gossip(metrics: &Metrics, stats: &GossipStats, overrun: u64) {
    metrics.gossip_datagrams("sent", stats.datagrams_out);
    metrics.gossip_datagrams("received", stats.datagrams_in);
    let dropped = [
        ("truncated", stats.dropped_truncated),
        ("oversized", stats.dropped_oversized),
        ("version", stats.dropped_version),
        ("keyless", stats.dropped_keyless),
        ("wrong_key", stats.dropped_wrong_key),
        ("stale", stats.dropped_stale),
        ("replayed", stats.dropped_replayed),
        ("senders", stats.dropped_senders),
        ("malformed", stats.dropped_malformed),
        ("unsent_oversized", stats.unsent_oversized),
        ("unsent_refused", stats.unsent_refused),
        ("overrun", overrun),
    ];
    for (reason, so_far) in dropped {
        metrics.gossip_dropped(reason, so_far);
    }
}

/// Hands neighbours that mDNS found to the state plane, which admits them only under the cluster key.
/// mDNS tells the control port; streams and gossip are on the next one, as `--mesh-port` sets them.
pub(super) async fn greet_neighbours(
    control: Arc<ControlNode>,
    gossip: Arc<Gossip>,
    stop: CancellationToken,
) {
    loop {
        let found = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            found = control.discovered() => found,
        };
        let Some(mut address) = found else { return };
        if let Some(port) = address.port().checked_add(1) {
            address.set_port(port);
            debug!(%address, "a neighbour, by mDNS");
            gossip.meet(address);
        }
    }
}

/// Tells people whether the node has found others, again and again while it has not.
pub(super) async fn watch_seeds(
    mut seeds: watch::Receiver<SeedState>,
    any: bool,
    stop: CancellationToken,
) {
    let mut was_alone = true;
    let mut tick = interval(ALONE_REMINDER);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick is at once, before anybody can have answered.
    tick.tick().await;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = tick.tick() => {
                if let SeedState::Alone { tried, unresolved, .. } = &*seeds.borrow()
                    && any
                {
                    warn!(tried, ?unresolved, "no seed answers; still trying, and serving alone meanwhile");
                }
            }
            changed = seeds.changed() => {
                if changed.is_err() {
                    return;
                }
                match &*seeds.borrow_and_update() {
                    SeedState::Joined { peers } if was_alone => {
                        was_alone = false;
                        info!(peers, "joined the mesh");
                    }
                    SeedState::Alone { .. } if !was_alone => {
                        was_alone = true;
                        warn!("every other node is gone; serving alone");
                    }
                    SeedState::Joined { .. } | SeedState::Alone { .. } => {}
                }
            }
        }
    }
}

/// Tells people how the state plane fares. What the node cannot go on with goes to `fatal`.
pub(super) async fn watch_health(
    mut health: watch::Receiver<Health>,
    fatal: mpsc::Sender<String>,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            changed = health.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
        let now = health.borrow_and_update().clone();
        let reason = match now {
            Health::Starting | Health::Left => continue,
            Health::Running => {
                info!("the state plane runs");
                continue;
            }
            Health::Restarting { attempt, reason } => {
                warn!(attempt, reason, "the state plane is restarted");
                continue;
            }
            Health::Failed { reason } => {
                // The node still serves its own clients from its own engine.
                error!(
                    reason,
                    "the state plane has failed for good: this node serves alone; restart it"
                );
                return;
            }
            Health::Crowded { known, limit } => format!(
                "the mesh has {known} nodes, and {limit} is the most that gossip can name; make two meshes of it"
            ),
            Health::Displaced { by } => format!(
                "another node at {by} runs with this node's identity; give each node a data directory of its own"
            ),
        };
        // A full channel holds a reason to end already.
        if fatal.try_send(reason).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_gossip::NodeId;

    use super::*;

    #[test]
    fn every_way_to_lose_a_datagram_is_shown() {
        let metrics = Metrics::new(NodeId(1), "9");
        let stats = GossipStats {
            dropped_replayed: 3,
            ..GossipStats::default()
        };
        show_gossip(&metrics, &stats, 7);
        let page = metrics.render();
        for (reason, count) in [("replayed", 3), ("overrun", 7), ("senders", 0)] {
            let shown = page.contains(&format!("reason=\"{reason}\"}} {count}\n"));
            assert!(shown, "{reason}: {page}");
        }
    }
}
