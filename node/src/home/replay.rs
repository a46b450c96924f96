//! When and where a request is placed again after its host was lost: the core. Pure.
//!
//! Its client has been promised an answer, so it is turned away only when there is no hope left. Hosts that were lost a moment
//! ago are passed over at first. When nobody else takes the request, the home waits and asks again, longer each time, up to a
//! bound, and then asks them as well: they may have been started anew, or only their stream was lost. Requests that wait are
//! told apart by the hosts' queues, which let the oldest in first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use shoal_gossip::{NodeId, Timestamp};

use crate::mesh::messages::MAX_EXCLUDED;

/// The first wait after nobody took the request: a few steps of an engine.
const FIRST_WAIT: Duration = Duration::from_millis(50);

/// The longest wait: as long as a client is told to wait when all nodes are full.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// How long a lost host is passed over at first: as long as a process takes to start anew, or a false alarm to pass.
const PASSED_OVER: Duration = Duration::from_secs(5);

/// Bounds of all replays of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayLimits {
    /// Hosts that may be lost under it: a request that ends every host it meets must not go through the whole mesh.
    pub losses: u32,
    /// How long after each loss a node is looked for.
    pub patience: Duration,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Place it, not at one of these.
    Place(BTreeSet<NodeId>),
    /// Wait this long, then ask again.
    Wait(Duration),
    /// Tell the client.
    GiveUp,
}

/// The losses of one request.
#[derive(Debug)]
pub(crate) struct Replay {
    limits: ReplayLimits,
    losses: u32,
    /// When each was lost. Bounded by half of what an offer can name: the rest is for nodes that refuse.
    lost: BTreeMap<NodeId, Timestamp>,
    /// Since when a node is looked for; `None` while it runs.
    since: Option<Timestamp>,
    tries: u32,
}

impl Replay {
    /// Of a request that has lost nobody.
    pub(crate) fn new(limits: ReplayLimits) -> Self {
        Self {
            limits,
            losses: 0,
            lost: BTreeMap::new(),
            since: None,
            tries: 0,
        }
    }

    /// Hosts lost so far.
    pub(crate) fn losses(&self) -> u32 {
        self.losses
    }

    /// Its host is lost.
    pub(crate) fn host_lost(&mut self, now: Timestamp, host: NodeId) -> Next {
        self.losses = self.losses.saturating_add(1);
        self.lost.insert(host, now);
        if self.losses > self.limits.losses {
            return Next::GiveUp;
        }
        self.since.get_or_insert(now);
        self.tries = 0;
        Next::Place(self.excluded(now))
    }

    /// Nobody took it.
    pub(crate) fn nobody(&mut self, now: Timestamp, rng: &mut StdRng) -> Next {
        let since = *self.since.get_or_insert(now);
        let left = self.limits.patience.saturating_sub(now.since(since));
        if left == Duration::ZERO {
            return Next::GiveUp;
        }
        let whole = (FIRST_WAIT * 2u32.saturating_pow(self.tries.min(16))).min(LONGEST_WAIT);
        self.tries = self.tries.saturating_add(1);
        // Many requests lose their host in one moment; they must not all ask again in one moment.
        let wait = whole.mul_f64(rng.random_range(0.5..1.0));
        Next::Wait(wait.min(left))
    }

    /// The wait is over: anybody will do.
    pub(crate) fn waited(&self) -> Next {
        Next::Place(BTreeSet::new())
    }

    /// Somebody runs it.
    pub(crate) fn placed(&mut self) {
        self.since = None;
        self.tries = 0;
    }

    /// Nodes not to ask: those that were lost a moment ago.
    fn excluded(&mut self, now: Timestamp) -> BTreeSet<NodeId> {
        self.lost.retain(|_, lost| now.since(*lost) < PASSED_OVER);
        while self.lost.len() > MAX_EXCLUDED / 2 {
            let oldest = self.lost.iter().min_by_key(|(_, lost)| **lost);
            let Some(oldest) = oldest.map(|(node, _)| *node) else {
                break;
            };
            self.lost.remove(&oldest);
        }
        self.lost.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    const LIMITS: ReplayLimits = ReplayLimits {
        losses: 3,
        patience: Duration::from_secs(10),
    };

    fn at(millis: u64) -> Timestamp {
        Timestamp::ZERO + Duration::from_millis(millis)
    }

    fn without(nodes: &[u64]) -> Next {
        Next::Place(nodes.iter().map(|node| NodeId(*node)).collect())
    }

    #[test]
    fn lost_hosts_are_passed_over_for_a_while_as_long_as_there_are_others() {
        let mut replay = Replay::new(LIMITS);
        assert_eq!(replay.host_lost(at(0), NodeId(1)), without(&[1]));
        replay.placed();
        assert_eq!(replay.host_lost(at(4_000), NodeId(2)), without(&[1, 2]));
        assert_eq!(replay.waited(), without(&[]));
        assert_eq!(replay.host_lost(at(8_000), NodeId(3)), without(&[2, 3]));
    }

    #[test]
    fn a_request_that_loses_every_host_is_given_up() {
        let mut replay = Replay::new(LIMITS);
        for loss in 0..3 {
            assert!(matches!(
                replay.host_lost(at(loss), NodeId(loss)),
                Next::Place(_)
            ));
            replay.placed();
        }
        assert_eq!(replay.host_lost(at(4), NodeId(9)), Next::GiveUp);
        assert_eq!(replay.losses(), 4);
    }

    #[test]
    fn waits_grow_differ_and_end_with_the_patience() {
        let waits = |seed| {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut replay = Replay::new(LIMITS);
            replay.host_lost(at(0), NodeId(1));
            let (mut now, mut waits) = (at(0), Vec::new());
            while let Next::Wait(wait) = replay.nobody(now, &mut rng) {
                assert!(wait <= LONGEST_WAIT && waits.len() < 100);
                now = now + wait;
                waits.push(wait);
            }
            assert!(now.since(at(0)) >= LIMITS.patience);
            waits
        };
        let (one, two) = (waits(1), waits(2));
        assert!(one[0] < FIRST_WAIT && one[0] >= FIRST_WAIT / 2);
        assert!(one[8] >= LONGEST_WAIT / 2);
        assert_ne!(one[..5], two[..5]);
    }

    #[test]
    fn patience_begins_anew_with_each_loss_of_a_running_request() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut replay = Replay::new(LIMITS);
        replay.host_lost(at(0), NodeId(1));
        replay.placed();
        replay.host_lost(at(60_000), NodeId(2));
        assert!(matches!(replay.nobody(at(69_999), &mut rng), Next::Wait(_)));
        assert_eq!(replay.nobody(at(70_000), &mut rng), Next::GiveUp);
    }
}
