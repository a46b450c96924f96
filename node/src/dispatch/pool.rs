//! The nodes a request may go to: the view, corrected by what we know better, filtered by the request.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use shoal_gossip::{
    BlockSize, Blocks, ClusterView, LoadSummary, NodeId, NodeRow, Readiness, Timestamp, Tokens,
};

use crate::dispatch::freeness::Freeness;
use crate::engine::starting_demand;
use crate::mesh::messages::PROTOCOL;

/// What a request needs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The model it names.
    pub model: String,
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

/// Corrections to the view: loads heard directly, and offers not answered yet.
///
/// A charge stands from the moment an offer leaves until its answer arrives. The answer carries a
/// load that contains the reservation, so from then on the correction is that load itself.
#[derive(Debug, Default)]
pub struct Corrections {
    heard: BTreeMap<NodeId, (LoadSummary, Timestamp)>,
    charges: BTreeMap<NodeId, Blocks>,
}

impl Corrections {
    /// Takes note of a load that came with a message. An older one than known is ignored.
    pub fn hear(&mut self, node: NodeId, load: LoadSummary, now: Timestamp) {
        let entry = self.heard.entry(node).or_insert((load, now));
        if load.is_newer_than(&entry.0) {
            *entry = (load, now);
        }
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
    }

    /// Blocks offered to a node and not yet answered.
    pub fn charged(&self, node: NodeId) -> Blocks {
        self.charges.get(&node).copied().unwrap_or_default()
    }

    fn newest(&self, row: &NodeRow) -> Option<(LoadSummary, Timestamp)> {
        match (row.load, self.heard.get(&row.node())) {
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
}

impl Candidate {
    /// Headroom it would have for one more request.
    pub fn freeness(&self) -> Freeness {
        Freeness::for_dispatch(&self.load, self.charged)
    }

    /// Whether the request could start there at once.
    pub fn fits(&self) -> bool {
        self.load.queued == 0 && self.load.free() - self.charged >= self.demand
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
    view: &'a ClusterView,
    corrections: &'a Corrections,
    need: &'a Need,
    now: Timestamp,
    max_age: Duration,
}

impl<'a> Pool<'a> {
    /// Candidates in `view` for `need`. Loads older than `max_age` are unknown, and unknown is not idle.
    pub fn new(
        view: &'a ClusterView,
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
        }
    }

    fn candidate(&self, row: &NodeRow) -> Option<Candidate> {
        let node = row.node();
        if row.facts.protocol != PROTOCOL
            || self.need.excluded.contains(&node)
            || row.facts.model(&self.need.model).is_none()
        {
            return None;
        }
        let (load, received) = self.corrections.newest(row)?;
        let age = self.now.since(received);
        if load.readiness != Readiness::Ready || age > self.max_age {
            return None;
        }
        Some(Candidate {
            node,
            load,
            age,
            charged: self.corrections.charged(node),
            demand: self.need.demand(row.facts.block_size),
        })
    }

    /// Every candidate, by name.
    pub fn all(&self) -> impl Iterator<Item = Candidate> + '_ {
        self.view
            .rows()
            .iter()
            .filter_map(|row| self.candidate(row))
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
        let rows = self.view.rows();
        let mut first: Option<Candidate> = None;
        if rows.len() > 2 {
            for _ in 0..DRAWS {
                let drawn = &rows[rng.random_range(0..rows.len())];
                let Some(candidate) = self.candidate(drawn) else {
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

    /// Why the pool is empty.
    pub fn why_empty(&self) -> NoCandidate {
        let served = self
            .view
            .rows()
            .iter()
            .any(|row| row.facts.model(&self.need.model).is_some());
        if served {
            NoCandidate::NoneUsable
        } else {
            NoCandidate::UnknownModel
        }
    }
}

#[cfg(test)]
mod tests;
