//! Which hosts of a home's requests are dead: the core. Pure.
//!
//! A slow node is not a dead one. Gossip calls a node dead that it has not heard for a while, and so it calls a node whose
//! machine stands still; what it runs goes on a moment later. So silence alone counts only after a time of grace. Two
//! things need no grace, for they are proofs: a node that is back in a new life, and a port on which nobody listens any
//! more, which the host's own kernel says (ICMP, *port unreachable*): a process that was killed is known as dead within two
//! looks, and a machine that lost its power after gossip's silence and the grace.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_gossip::{Incarnation, NodeId, Timestamp};

/// Looks in a row at which a port must be closed. One answer may be late news of an earlier process.
const REFUSALS: u32 = 2;

/// Silence towards this node alone that counts as gossip's silence does: as long as gossip's detector takes at defaults.
const UNHEARD: Duration = Duration::from_secs(2);

/// Time between two looks, ten of them as a rule, from which this node itself stood still: what it did not hear meanwhile says
/// nothing of others.
const STANDSTILL: Duration = Duration::from_secs(1);

/// Why a host is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Death {
    /// Gossip has not heard of it, and did not for the time of grace after that; or it is heard of, and not by this node.
    Silent,
    /// Its port is closed.
    PortClosed,
    /// It has started anew.
    NewLife,
}

impl Death {
    /// Whether the requests there are lost for certain, not only in all likelihood.
    pub(super) fn is_proven(self) -> bool {
        match self {
            Self::Silent => false,
            Self::PortClosed | Self::NewLife => true,
        }
    }

    /// One word for metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::PortClosed => "port closed",
            Self::NewLife => "new life",
        }
    }
}

/// What a look found of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// Its life as gossip knows it; `None` when it is in no view.
    pub(super) life: Option<Incarnation>,
    /// The kernel there said that nobody listens.
    pub(super) refused: bool,
    /// How long nothing has come from it to this node, neither a frame nor an answer: gossip goes round by others.
    pub(super) unheard: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Host {
    /// Known from its first look in a view on.
    life: Option<Incarnation>,
    missing_since: Option<Timestamp>,
    refusals: u32,
}

/// The hosts of all requests of one home. Bounded by them.
#[derive(Debug)]
pub(super) struct Vitals {
    grace: Duration,
    hosts: BTreeMap<NodeId, Host>,
    looked: Option<Timestamp>,
    /// When this node last went on after a standstill of its own.
    awake: Timestamp,
}

impl Vitals {
    /// Nobody yet. A host that gossip misses has this much time to come back.
    pub(super) fn new(grace: Duration) -> Self {
        Self {
            grace,
            hosts: BTreeMap::new(),
            looked: None,
            awake: Timestamp::ZERO,
        }
    }

    /// Takes note of a look at all hosts in use; those that are dead, each told once. One that is used again later
    /// begins anew.
    pub(super) fn look(
        &mut self,
        now: Timestamp,
        seen: &BTreeMap<NodeId, Finding>,
    ) -> Vec<(NodeId, Death)> {
        self.hosts.retain(|node, _| seen.contains_key(node));
        let before = self.looked.replace(now);
        if before.is_some_and(|before| now.since(before) >= STANDSTILL) {
            self.awake = now;
        }
        let mut dead = Vec::new();
        for (node, finding) in seen {
            let host = self.hosts.entry(*node).or_insert(Host {
                life: None,
                missing_since: None,
                refusals: 0,
            });
            if let Some(death) = host.look(now, *finding, (self.awake, self.grace)) {
                dead.push((*node, death));
            }
        }
        for (node, _) in &dead {
            self.hosts.remove(node);
        }
        dead
    }
}

impl Host {
    /// What a look says of it. Silence counts from `awake` on, when this node itself last went on.
    fn look(
        &mut self,
        now: Timestamp,
        finding: Finding,
        (awake, grace): (Timestamp, Duration),
    ) -> Option<Death> {
        self.refusals = if finding.refused {
            self.refusals + 1
        } else {
            0
        };
        let known = self.life;
        match finding.life {
            Some(life) => {
                self.missing_since = None;
                self.life = known.max(Some(life));
                if known.is_some_and(|known| life > known) {
                    return Some(Death::NewLife);
                }
            }
            None => {
                let since = awake.max(*self.missing_since.get_or_insert(now));
                if now.since(since) >= grace {
                    return Some(Death::Silent);
                }
            }
        }
        if finding.unheard.min(now.since(awake)) >= UNHEARD + grace {
            return Some(Death::Silent);
        }
        (self.refusals >= REFUSALS).then_some(Death::PortClosed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(1);
    const NODE: NodeId = NodeId(7);

    fn at(millis: u64) -> Timestamp {
        Timestamp::ZERO + Duration::from_millis(millis)
    }

    fn sees(vitals: &mut Vitals, millis: u64, life: Option<u64>, refused: bool) -> Option<Death> {
        let finding = Finding {
            life: life.map(Incarnation),
            refused,
            unheard: Duration::ZERO,
        };
        let dead = vitals.look(at(millis), &BTreeMap::from([(NODE, finding)]));
        assert!(dead.iter().all(|(node, _)| *node == NODE) && dead.len() < 2);
        dead.first().map(|(_, death)| *death)
    }

    #[test]
    fn a_node_that_is_back_within_the_grace_is_slow_and_not_dead() {
        let mut vitals = Vitals::new(GRACE);
        for millis in (0..60_000).step_by(200) {
            // Missing for 800 of every 1000 milliseconds.
            let life = (millis % 1_000 == 0).then_some(1);
            assert_eq!(sees(&mut vitals, millis, life, false), None);
        }
    }

    #[test]
    fn silence_beyond_the_grace_is_death_and_is_told_once() {
        let mut vitals = Vitals::new(GRACE);
        assert_eq!(sees(&mut vitals, 0, Some(1), false), None);
        assert_eq!(sees(&mut vitals, 100, None, false), None);
        assert_eq!(sees(&mut vitals, 1_000, None, false), None);
        assert_eq!(sees(&mut vitals, 1_100, None, false), Some(Death::Silent));
        assert_eq!(sees(&mut vitals, 1_200, None, false), None);
    }

    #[test]
    fn a_closed_port_is_death_at_the_second_look_whatever_gossip_says() {
        let mut vitals = Vitals::new(GRACE);
        assert_eq!(sees(&mut vitals, 0, Some(1), true), None);
        assert_eq!(sees(&mut vitals, 200, Some(1), false), None);
        assert_eq!(sees(&mut vitals, 400, Some(1), true), None);
        assert_eq!(
            sees(&mut vitals, 600, Some(1), true),
            Some(Death::PortClosed)
        );
    }

    #[test]
    fn a_new_life_is_the_death_of_the_old_one_and_of_no_other() {
        let mut vitals = Vitals::new(GRACE);
        assert_eq!(sees(&mut vitals, 0, Some(1), false), None);
        assert_eq!(sees(&mut vitals, 200, Some(2), false), Some(Death::NewLife));
        assert_eq!(sees(&mut vitals, 400, Some(2), false), None);
        // News of an old life that comes late is no new life.
        assert_eq!(sees(&mut vitals, 600, Some(1), false), None);
        assert_eq!(sees(&mut vitals, 800, Some(2), false), None);
    }

    #[test]
    fn a_host_that_all_but_this_node_hear_is_dead_to_it() {
        let mut vitals = Vitals::new(GRACE);
        let mut unheard = |millis| {
            let finding = Finding {
                life: Some(Incarnation(1)),
                refused: false,
                unheard: Duration::from_millis(millis),
            };
            vitals.look(at(millis), &BTreeMap::from([(NODE, finding)]))
        };
        assert_eq!(unheard(2_900), []);
        assert_eq!(unheard(3_000), [(NODE, Death::Silent)]);
    }

    #[test]
    fn a_node_that_stood_still_itself_takes_nobody_for_dead_for_that() {
        let mut vitals = Vitals::new(GRACE);
        assert_eq!(sees(&mut vitals, 0, Some(1), false), None);
        assert_eq!(sees(&mut vitals, 100, None, false), None);
        // Ten seconds later it goes on, and has heard of nobody.
        let silent = Finding {
            life: None,
            refused: false,
            unheard: Duration::from_secs(10),
        };
        let seen = BTreeMap::from([(NODE, silent)]);
        for millis in (10_100..11_100).step_by(100) {
            assert_eq!(vitals.look(at(millis), &seen), []);
        }
        assert_eq!(vitals.look(at(11_100), &seen), [(NODE, Death::Silent)]);
    }

    #[test]
    fn hosts_that_run_nothing_any_more_are_forgotten() {
        let mut vitals = Vitals::new(GRACE);
        assert_eq!(sees(&mut vitals, 0, None, false), None);
        assert_eq!(vitals.look(at(500), &BTreeMap::new()), []);
        assert!(vitals.hosts.is_empty());
        assert_eq!(sees(&mut vitals, 1_500, None, false), None);
    }
}
