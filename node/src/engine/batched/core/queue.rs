//! The queue: who waits, in order, and what all of them need together.

use std::collections::BTreeMap;

use shoal_gossip::{BlockSize, Blocks, NodeId, Tokens};

use super::SeqKey;
use super::sequence::{Place, Sequence};
use crate::engine::ReservationId;

/// Who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    Sequence(SeqKey),
    Promise(ReservationId),
}

/// One place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Queued {
    pub(super) waiter: Waiter,
    /// Blocks it needs to start.
    pub(super) demand: Blocks,
    /// Whose client waits.
    pub(super) home: NodeId,
    /// Tokens it has to prefill then.
    backlog: Tokens,
    preempted: bool,
}

impl Queued {
    pub(super) fn promise(id: ReservationId, demand: Blocks, home: NodeId) -> Self {
        Self {
            waiter: Waiter::Promise(id),
            demand,
            home,
            backlog: Tokens::ZERO,
            preempted: false,
        }
    }

    pub(super) fn sequence(key: SeqKey, sequence: &Sequence, block_size: BlockSize) -> Self {
        Self {
            waiter: Waiter::Sequence(key),
            demand: sequence.demand(block_size),
            home: sequence.request.home,
            backlog: sequence.backlog(),
            preempted: sequence.preempted,
        }
    }
}

/// Waiters by place. The sums are kept, since a long queue is asked for them all the time.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    entries: BTreeMap<Place, Queued>,
    demand: u64,
    backlog: u64,
    preempted: usize,
    /// Places of each home that has some.
    homes: BTreeMap<NodeId, u32>,
}

impl Queue {
    /// Enters a waiter, or what is new about the one at this place.
    pub(super) fn enter(&mut self, place: Place, queued: Queued) {
        self.leave(place);
        self.demand += u64::from(queued.demand.0);
        self.backlog += u64::from(queued.backlog.0);
        self.preempted += usize::from(queued.preempted);
        *self.homes.entry(queued.home).or_default() += 1;
        self.entries.insert(place, queued);
    }

    /// Takes the waiter at this place out, if there is one.
    pub(super) fn leave(&mut self, place: Place) {
        if let Some(queued) = self.entries.remove(&place) {
            self.demand -= u64::from(queued.demand.0);
            self.backlog -= u64::from(queued.backlog.0);
            self.preempted -= usize::from(queued.preempted);
            if let Some(places) = self.homes.get_mut(&queued.home) {
                *places -= 1;
                if *places == 0 {
                    self.homes.remove(&queued.home);
                }
            }
        }
    }

    /// Places that a home has, and how many homes have some, this one counted.
    pub(super) fn places_of(&self, home: NodeId) -> (u32, u32) {
        let homes = u32::try_from(self.homes.len()).unwrap_or(u32::MAX);
        match self.homes.get(&home) {
            Some(places) => (*places, homes),
            None => (0, homes.saturating_add(1)),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Place, &Queued)> {
        self.entries.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Waiters that were let in before, and were preempted.
    pub(super) fn preempted(&self) -> usize {
        self.preempted
    }

    /// Blocks that all of them need to start.
    pub(super) fn demand(&self) -> Blocks {
        Blocks(u32::try_from(self.demand).unwrap_or(u32::MAX))
    }

    /// Tokens that all of them have to prefill.
    pub(super) fn backlog(&self) -> Tokens {
        Tokens(u32::try_from(self.backlog).unwrap_or(u32::MAX))
    }

    #[cfg(test)]
    pub(super) fn get(&self, place: Place) -> Option<&Queued> {
        self.entries.get(&place)
    }
}
