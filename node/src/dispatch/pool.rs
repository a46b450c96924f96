//! The nodes a request may go to: the view, corrected by what we know better, filtered by the request.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use shoal_gossip::{
    BlockSize, Blocks, ClusterView, LoadSummary, NodeFacts, NodeId, Readiness, Timestamp, Tokens,
};

use crate::dispatch::freeness::Freeness;
use crate::dispatch::policy::Score;
use crate::engine::starting_demand;
use crate::engine::work::Fit;
use crate::mesh::messages::PROTOCOL;

/// Candidates a host draws before it asks the best two of them. With 4 requests wait 1 to 2 % longer, with 16 less than
/// 1 % shorter (`docs/decisions/2026-11-30-dispatch.md`).
const DRAWN_TO_ASK: usize = 8;

/// What a request needs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The model it names.
    pub model: String,
    /// Which nodes that serve the model can take it.
    pub fit: Fit,
    /// Prompt length, exact or estimated.
    pub prompt: Tokens,
    /// Output that must be prefilled with it.
    pub generated: Tokens,
    /// Nodes not to take: tried and failed, or lost.
    pub excluded: BTreeSet<NodeId>,
}

impl Need {
    /// KV blocks it needs to start on a node with blocks of this size.
    pub fn demand(&self, block_size: BlockSize) -> Blocks {
        starting_demand(block_size, self.prompt, self.generated)
    }
}

/// The nodes that a decision may look at, by name and by place in the order of names. What a node was told by gossip
/// ([`ClusterView`]) is one; the simulator has another, which works out what has come through when it is looked at.
pub trait Sight: fmt::Debug {
    /// Nodes in it.
    fn count(&self) -> usize;

    /// The node at this place; `None` from [`Self::count`] on.
    fn at(&self, place: usize) -> Option<Seen<'_>>;

    /// The node of this name, if it is in it.
    fn of(&self, node: NodeId) -> Option<Seen<'_>>;
}

/// One node as it is seen.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// What does not change in a node's life.
    pub facts: &'a NodeFacts,
    /// Its newest load and when that came, if one has.
    pub load: Option<(LoadSummary, Timestamp)>,
}

impl Sight for ClusterView {
    fn count(&self) -> usize {
        self.rows().len()
    }

    fn at(&self, place: usize) -> Option<Seen<'_>> {
        self.rows().get(place).map(|row| Seen {
            facts: &row.facts,
            load: row.load,
        })
    }

    fn of(&self, node: NodeId) -> Option<Seen<'_>> {
        self.row(node).map(|row| Seen {
            facts: &row.facts,
            load: row.load,
        })
    }
}

/// Corrections to the view: loads heard directly, and offers not answered yet.
///
/// A charge stands from the moment an offer leaves until its answer arrives. The answer carries a
/// load that contains the reservation, so from then on the correction is that load itself.
///
/// A node that did not answer is the last choice until something newer is heard of it: one that is dead or cut off stays in the
/// view for some gossip rounds, and costs one deadline in that time and not one for each request.
#[derive(Debug, Default)]
pub struct Corrections {
    heard: BTreeMap<NodeId, (LoadSummary, Timestamp)>,
    charges: BTreeMap<NodeId, Blocks>,
    silent: BTreeMap<NodeId, Timestamp>,
}

impl Corrections {
    /// Takes note of a load that came with a message. An older one than known is ignored.
    pub fn hear(&mut self, node: NodeId, load: LoadSummary, now: Timestamp) {
        let entry = self.heard.entry(node).or_insert((load, now));
        if load.is_newer_than(&entry.0) {
            *entry = (load, now);
        }
    }

    /// A node did not answer in time.
    pub fn silent(&mut self, node: NodeId, now: Timestamp) {
        self.silent.insert(node, now);
    }

    fn is_silent(&self, node: NodeId, heard: Timestamp) -> bool {
        self.silent.get(&node).is_some_and(|since| *since >= heard)
    }

    /// Counts blocks offered to a node.
    pub fn charge(&mut self, node: NodeId, blocks: Blocks) {
        *self.charges.entry(node).or_default() += blocks;
    }

    /// Takes back a charge: the offer was answered, or given up.
    pub fn settle(&mut self, node: NodeId, blocks: Blocks) {
        if let Some(charged) = self.charges.get_mut(&node) {
            *charged -= blocks;
            if *charged == Blocks::ZERO {
                self.charges.remove(&node);
            }
        }
    }

    /// Forgets nodes that left the view, which bounds the table by the view.
    pub fn forget_absent(&mut self, view: &ClusterView) {
        self.heard.retain(|node, _| view.row(*node).is_some());
        self.silent.retain(|node, _| view.row(*node).is_some());
    }

    /// Forgets what was heard before a moment, which bounds the tables where no view does.
    pub fn forget_before(&mut self, moment: Timestamp) {
        self.heard.retain(|_, (_, heard)| *heard >= moment);
        self.silent.retain(|_, since| *since >= moment);
    }

    /// Blocks offered to a node and not yet answered.
    pub fn charged(&self, node: NodeId) -> Blocks {
        self.charges.get(&node).copied().unwrap_or_default()
    }

    fn newest(&self, seen: Seen<'_>) -> Option<(LoadSummary, Timestamp)> {
        match (seen.load, self.heard.get(&seen.facts.node)) {
            (Some(gossiped), Some(heard)) if heard.0.is_newer_than(&gossiped.0) => Some(*heard),
            // Of the same load, the later arrival is the better witness of its age.
            (Some(gossiped), Some(heard)) if heard.0 == gossiped.0 => {
                Some((gossiped.0, gossiped.1.max(heard.1)))
            }
            (Some(gossiped), _) => Some(gossiped),
            // Heard before the first gossiped load: usable, the record is in the view.
            (None, heard) => heard.copied(),
        }
    }
}

/// A node that could take the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub node: NodeId,
    /// Its newest load.
    pub load: LoadSummary,
    /// How old that is.
    pub age: Duration,
    /// What we offered it since.
    pub charged: Blocks,
    /// Blocks the request needs there.
    pub demand: Blocks,
    /// Tokens in one of its blocks.
    pub block_size: BlockSize,
}

impl Candidate {
    /// Headroom it would have for one more request.
    pub fn freeness(&self) -> Freeness {
        Freeness::for_dispatch(&self.load, self.charged)
    }

    /// Whether the request could start there at once.
    pub fn fits(&self) -> bool {
        self.load.queued == 0 && self.load.usable() - self.charged >= self.demand
    }
}

/// Why there is no candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NoCandidate {
    /// No live node serves the model.
    UnknownModel,
    /// Nodes serve it; none is ready with a load that is known and fresh, or all are excluded.
    NoneUsable,
}

/// The candidates for one request. Borrowed, nothing is copied until a policy asks.
#[derive(Debug)]
pub struct Pool<'a> {
    view: &'a dyn Sight,
    corrections: &'a Corrections,
    need: &'a Need,
    now: Timestamp,
    max_age: Duration,
    with_silent: bool,
}

impl<'a> Pool<'a> {
    /// Candidates in `view` for `need`. Loads older than `max_age` are unknown, and unknown is not idle.
    pub fn new(
        view: &'a dyn Sight,
        corrections: &'a Corrections,
        need: &'a Need,
        now: Timestamp,
        max_age: Duration,
    ) -> Self {
        Self {
            view,
            corrections,
            need,
            now,
            max_age,
            with_silent: false,
        }
    }

    /// The same with the nodes that did not answer: for when there are no others.
    #[must_use]
    pub fn with_silent(self) -> Self {
        Self {
            with_silent: true,
            ..self
        }
    }

    fn candidate(&self, seen: Seen<'_>) -> Option<Candidate> {
        let facts = seen.facts;
        let node = facts.node;
        if facts.protocol != PROTOCOL || self.need.excluded.contains(&node) || !self.serves(facts) {
            return None;
        }
        let (load, received) = self.corrections.newest(seen)?;
        let age = self.now.since(received);
        let silent = !self.with_silent && self.corrections.is_silent(node, received);
        if load.readiness != Readiness::Ready || age > self.max_age || silent {
            return None;
        }
        Some(Candidate {
            node,
            load,
            age,
            charged: self.corrections.charged(node),
            demand: self.need.demand(facts.block_size),
            block_size: facts.block_size,
        })
    }

    fn serves(&self, facts: &NodeFacts) -> bool {
        facts
            .model(&self.need.model)
            .is_some_and(|model| self.need.fit.takes(model))
    }

    /// Every candidate, by name.
    pub fn all(&self) -> impl Iterator<Item = Candidate> + '_ {
        self.seen().filter_map(|seen| self.candidate(seen))
    }

    /// The candidate of this name.
    pub fn one(&self, node: NodeId) -> Option<Candidate> {
        self.candidate(self.view.of(node)?)
    }

    fn seen(&self) -> impl Iterator<Item = Seen<'_>> + '_ {
        (0..self.view.count()).filter_map(|place| self.view.at(place))
    }

    /// At most two distinct candidates among those that `qualify`, uniformly at random, in random order. Looks at
    /// all of them: for decisions that are made a few times a second.
    pub fn two_that(
        &self,
        qualify: impl Fn(&Candidate) -> bool,
        rng: &mut StdRng,
    ) -> (Option<Candidate>, Option<Candidate>) {
        let mut all: Vec<Candidate> = self.all().filter(|candidate| qualify(candidate)).collect();
        let mut draw =
            || (!all.is_empty()).then(|| all.swap_remove(rng.random_range(0..all.len())));
        (draw(), draw())
    }

    /// At most two distinct candidates, uniformly at random, in random order.
    ///
    /// Draws rows and rejects those that are no candidates, which costs the same whatever the size
    /// of the mesh; only when most rows are rejected does it look at all of them.
    pub fn two(&self, rng: &mut StdRng) -> (Option<Candidate>, Option<Candidate>) {
        /// Draws before looking at every row: if half the rows qualify, two are found within
        /// twelve draws in 99.7 % of cases.
        const DRAWS: u32 = 12;
        let count = self.view.count();
        let mut first: Option<Candidate> = None;
        if count > 2 {
            for _ in 0..DRAWS {
                let drawn = self.view.at(rng.random_range(0..count));
                let Some(candidate) = drawn.and_then(|seen| self.candidate(seen)) else {
                    continue;
                };
                match first {
                    None => first = Some(candidate),
                    Some(found) if found.node == candidate.node => {}
                    Some(_) => return (first, Some(candidate)),
                }
            }
        }
        self.two_that(|_| true, rng)
    }

    /// The best two of some candidates drawn at random: for a host, that asks them what they really have before it
    /// points to one. On stale loads the best of many would draw a crowd; those that are asked say no.
    pub fn two_to_ask(&self, rng: &mut StdRng) -> impl Iterator<Item = Candidate> + use<> {
        let mut drawn: Vec<Candidate> = Vec::with_capacity(DRAWN_TO_ASK);
        for _ in 0..DRAWN_TO_ASK / 2 {
            let (first, second) = self.two(rng);
            for candidate in first.into_iter().chain(second) {
                if drawn.iter().all(|other| other.node != candidate.node) {
                    drawn.push(candidate);
                }
            }
        }
        drawn.sort_by_key(Score::stale);
        drawn.into_iter().take(2)
    }

    /// Why the pool is empty.
    pub fn why_empty(&self) -> NoCandidate {
        let served = self.seen().any(|seen| self.serves(seen.facts));
        if served {
            NoCandidate::NoneUsable
        } else {
            NoCandidate::UnknownModel
        }
    }
}

#[cfg(test)]
mod tests;
