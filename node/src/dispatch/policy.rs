//! Which of the candidates: the default and its baselines, each a pure choice.

use std::cmp::Reverse;

use rand::RngExt;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use shoal_gossip::{NodeId, Tokens};

use crate::dispatch::freeness::Freeness;
use crate::dispatch::pool::{Candidate, Pool};

/// A dispatch policy by name.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// The better of two random candidates (power of two choices). Does not herd on a stale view.
    #[default]
    P2c,
    /// One candidate after another, whatever their load.
    RoundRobin,
    /// The fewest requests, running and queued.
    LeastQueue,
    /// The greatest freeness of all. Herds when views are stale; a baseline.
    Freest,
    /// Any candidate.
    Random,
}

impl PolicyName {
    /// As written in flags, metrics and events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::P2c => "p2c",
            Self::RoundRobin => "round-robin",
            Self::LeastQueue => "least-queue",
            Self::Freest => "freest",
            Self::Random => "random",
        }
    }
}

/// Why a policy took the node it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// There was no other candidate.
    Only,
    /// The request fits there and not at the other.
    Fits,
    /// Greater freeness.
    Freer,
    /// Equal in all that counts; the one drawn first.
    Tie,
    /// Its turn.
    Turn,
    /// Fewest requests.
    FewestRequests,
    /// Drawn at random.
    Drawn,
    /// Named by a redirect.
    Redirected,
    /// Others did not answer, and the node where the client is can do it itself.
    Home,
}

impl Reason {
    /// As written in metrics and events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Fits => "fits",
            Self::Freer => "freer",
            Self::Tie => "tie",
            Self::Turn => "turn",
            Self::FewestRequests => "fewest-requests",
            Self::Drawn => "drawn",
            Self::Redirected => "redirected",
            Self::Home => "home",
        }
    }
}

/// What a policy decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Where to.
    pub taken: Candidate,
    /// Why.
    pub reason: Reason,
    /// The candidate it was weighed against, if one was.
    pub other: Option<NodeId>,
}

/// Freeness from which a node has room enough for its requests to grow, so that another block a request is worth less
/// than a shorter wait: twice what nodes move requests away below, by default.
const COMFORT: Freeness = Freeness::of_blocks(10);

/// Lower is better. Fields compare from top to bottom. Two candidates that are equal here are taken
/// in the order in which they were drawn, not by name: by name, an idle mesh would load its first node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Score {
    does_not_fit: bool,
    uncomfortable: bool,
    work: u64,
    freeness: Reverse<Freeness>,
    prefill_backlog: Tokens,
}

impl Score {
    /// By a load that is as old as gossip. Prefill is over by the time it is heard of, so it counts last.
    pub(super) fn stale(candidate: &Candidate) -> Self {
        Self {
            does_not_fit: !candidate.fits(),
            uncomfortable: false,
            work: 0,
            freeness: Reverse(candidate.freeness()),
            prefill_backlog: candidate.load.prefill_backlog,
        }
    }

    /// By a load that the node itself said just now: with room enough, what the request would wait for and share its steps
    /// with counts first.
    pub(super) fn exact(candidate: &Candidate) -> Self {
        let uncomfortable = candidate.freeness() < COMFORT;
        Self {
            uncomfortable,
            work: if uncomfortable { 0 } else { work(candidate) },
            ..Self::stale(candidate)
        }
    }
}

/// Part of a newcomer's own blocks that counts: with all of them the time of the last steps would outweigh what is ahead on
/// equal nodes, with none an idle slow node would be better than a fast one with three requests.
const OWN_SHARE: u64 = 5;

/// Blocks to prefill, one for each request, and what the newcomer brings (its `charged` blocks), times what a step takes
/// there: a slower node has more before it (`docs/decisions/2026-11-30-dispatch.md` has what was tried).
fn work(candidate: &Candidate) -> u64 {
    let load = &candidate.load;
    let blocks = u64::from(load.prefill_backlog.0) / u64::from(candidate.block_size.tokens().get());
    let ahead = blocks + u64::from(load.running) + u64::from(load.queued);
    let own = 1 + u64::from(candidate.charged.0) / OWN_SHARE;
    (ahead + own) * u64::from(load.step_time_us.max(1))
}

/// A policy with the little it remembers.
#[derive(Debug)]
pub struct Policy {
    name: PolicyName,
    last_turn: Option<NodeId>,
}

impl Policy {
    /// The policy of this name.
    pub fn new(name: PolicyName) -> Self {
        Self {
            name,
            last_turn: None,
        }
    }

    /// Its name.
    pub fn name(&self) -> PolicyName {
        self.name
    }

    /// Chooses a candidate; `None` when there is none.
    pub fn choose(&mut self, pool: &Pool<'_>, rng: &mut StdRng) -> Option<Choice> {
        match self.name {
            PolicyName::P2c => two_choices(pool, rng),
            PolicyName::RoundRobin => self.next_turn(pool),
            PolicyName::LeastQueue => least(pool, Reason::FewestRequests, |candidate| {
                candidate.load.running.saturating_add(candidate.load.queued)
            }),
            PolicyName::Freest => least(pool, Reason::Freer, |candidate| {
                Reverse(candidate.freeness())
            }),
            PolicyName::Random => any(pool, rng),
        }
    }

    fn next_turn(&mut self, pool: &Pool<'_>) -> Option<Choice> {
        let mut first = None;
        let mut after = None;
        for candidate in pool.all() {
            first = first.or(Some(candidate));
            if after.is_none() && self.last_turn.is_none_or(|last| candidate.node > last) {
                after = Some(candidate);
            }
        }
        let taken = after.or(first)?;
        self.last_turn = Some(taken.node);
        Some(Choice {
            taken,
            reason: Reason::Turn,
            other: None,
        })
    }
}

/// The better of two random candidates by (fits, freeness, prefill backlog).
fn two_choices(pool: &Pool<'_>, rng: &mut StdRng) -> Option<Choice> {
    let (first, second) = pool.two(rng);
    let first = first?;
    let Some(second) = second else {
        return Some(Choice {
            taken: first,
            reason: Reason::Only,
            other: None,
        });
    };
    Some(better_of(first, second))
}

/// The better of two; `first` when they are equal.
fn better_of(first: Candidate, second: Candidate) -> Choice {
    let (one, two) = (Score::stale(&first), Score::stale(&second));
    let (taken, other) = if two < one {
        (second, first)
    } else {
        (first, second)
    };
    let reason = if one.does_not_fit != two.does_not_fit {
        Reason::Fits
    } else if one == two {
        Reason::Tie
    } else {
        Reason::Freer
    };
    Choice {
        taken,
        reason,
        other: Some(other.node),
    }
}

/// The candidate with the least key; of equals the one with the least name.
fn least<K: Ord>(pool: &Pool<'_>, reason: Reason, key: impl Fn(&Candidate) -> K) -> Option<Choice> {
    let taken = pool
        .all()
        .min_by_key(|candidate| (key(candidate), candidate.node))?;
    Some(Choice {
        taken,
        reason,
        other: None,
    })
}

fn any(pool: &Pool<'_>, rng: &mut StdRng) -> Option<Choice> {
    let all: Vec<Candidate> = pool.all().collect();
    if all.is_empty() {
        return None;
    }
    Some(Choice {
        taken: all[rng.random_range(0..all.len())],
        reason: Reason::Drawn,
        other: None,
    })
}

#[cfg(test)]
mod tests;
