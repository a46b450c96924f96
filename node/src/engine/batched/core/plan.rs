//! Planning one step, and taking note of what it did.

use std::time::Duration;

use shoal_gossip::{Blocks, RequestId, Timestamp};

use super::queue::{Queued, Waiter};
use super::sequence::{Phase, Promise, Sequence};
use super::{Batcher, SeqKey};
use crate::engine::batched::Slot;

/// What the next step computes. Empty `items` means that there is nothing to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Slots whose KV is dropped before the items run.
    pub clear: Vec<Slot>,
    /// Work in ascending order of slot, at most one item per slot.
    pub items: Vec<PlanItem>,
    /// Sequences that got a slot in this plan.
    pub started: Vec<SeqKey>,
    /// Sequences that lost their KV in this plan.
    pub preempted: Vec<SeqKey>,
}

impl StepPlan {
    /// Takes an item in, if there is one, at the cost of the step's budget.
    fn push(&mut self, item: Option<PlanItem>, budget: &mut u32) {
        if let Some(item) = item {
            *budget -= item.tokens;
            self.items.push(item);
        }
    }
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanItem {
    /// Whose they are.
    pub key: SeqKey,
    /// Where its KV lives.
    pub slot: Slot,
    /// Position of the first token.
    pub position: u32,
    /// How many.
    pub tokens: u32,
    /// Output index of the token drawn after the last one, if one is drawn.
    pub sample: Option<u32>,
}

/// An output token that a step added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawn {
    /// Whose it is.
    pub key: SeqKey,
    /// Of which request.
    pub request: RequestId,
    /// Its output index.
    pub index: u32,
    /// Whether the sequence has reached its `max_tokens`: it gets no more steps.
    pub last: bool,
}

impl Batcher {
    /// Plans the next step. Everything in the plan counts as held from now on.
    pub fn plan(&mut self, now: Timestamp) -> StepPlan {
        self.expire(now);
        let mut plan = StepPlan::default();
        let mut budget = self.config.step_tokens;
        let order: Vec<SeqKey> = self.running.values().copied().collect();
        plan.items.reserve(order.len());
        let mut prompts = Vec::new();
        for key in order {
            // Whoever was preempted since has nothing to compute here.
            let free = self.free();
            let Some(sequence) = self.sequences.get_mut(&key) else {
                continue;
            };
            match sequence.wants() {
                0 => {}
                1 => match sequence.grow(self.config.block_size, free) {
                    Some(more) => {
                        self.used += more;
                        plan.push(
                            sequence.item(key, budget, self.config.prefill_grid),
                            &mut budget,
                        );
                    }
                    None if self.make_room(key, &mut plan) => {
                        self.push_item(key, &mut budget, &mut plan);
                    }
                    None => {}
                },
                _ => prompts.push(key),
            }
        }
        for key in prompts {
            if self.sequences.get(&key).map_or(0, Sequence::wants) > 1 {
                self.push_item(key, &mut budget, &mut plan);
            }
        }
        self.start_aside(&mut budget, &mut plan);
        if plan.preempted.is_empty() {
            self.admit(&mut budget, &mut plan);
        }
        plan.items.sort_unstable_by_key(|item| item.slot);
        if !plan.items.is_empty() {
            plan.clear = std::mem::take(&mut self.dirty).into_iter().collect();
        }
        plan
    }

    /// Takes note that a planned step ran, and says which tokens it added. Sequences removed while
    /// it ran are left out.
    pub fn applied(&mut self, plan: &StepPlan, took: Duration) -> Vec<Drawn> {
        self.note_step(took);
        let mut drawn = Vec::new();
        for item in &plan.items {
            let Some(sequence) = self.sequences.get_mut(&item.key) else {
                continue;
            };
            sequence.computed = item.position.saturating_add(item.tokens);
            if let Some(index) = item.sample {
                sequence.generated = index.saturating_add(1);
                drawn.push(Drawn {
                    key: item.key,
                    request: sequence.request,
                    index,
                    last: sequence.is_complete(),
                });
            }
        }
        drawn
    }

    fn push_item(&mut self, key: SeqKey, budget: &mut u32, plan: &mut StepPlan) {
        if let Some(sequence) = self.sequences.get(&key) {
            plan.push(
                sequence.item(key, *budget, self.config.prefill_grid),
                budget,
            );
        }
    }

    /// Preempts others until a decoding sequence has the block its next token needs. False when it cannot have it in this
    /// step, or was preempted itself.
    fn make_room(&mut self, key: SeqKey, plan: &mut StepPlan) -> bool {
        loop {
            let Some(victim) = self.victim() else {
                // Alone, and the rest is promised or held: promises, leases and hand-overs end.
                return false;
            };
            self.preempt(victim);
            plan.preempted.push(victim);
            let free = self.free();
            match self.sequences.get_mut(&key) {
                Some(sequence) if matches!(sequence.phase, Phase::Running { .. }) => {
                    if let Some(more) = sequence.grow(self.config.block_size, free) {
                        self.used += more;
                        return true;
                    }
                }
                Some(_) | None => return false,
            }
        }
    }

    /// The one to preempt: a paused one, else the last in order. The only one is spared, and so are those that
    /// a hand-over holds.
    fn victim(&self) -> Option<SeqKey> {
        let candidates = self.running.values().filter_map(|key| {
            let sequence = self.sequences.get(key)?;
            let candidate = (sequence.paused, sequence.place, *key);
            sequence.hold.is_none().then_some(candidate)
        });
        let several = candidates.clone().nth(1).is_some();
        let (_, _, last) = candidates.max()?;
        several.then_some(last)
    }

    fn preempt(&mut self, key: SeqKey) {
        let Some(sequence) = self.sequences.get_mut(&key) else {
            return;
        };
        let Phase::Running { slot, held } = sequence.phase else {
            return;
        };
        sequence.phase = Phase::Waiting;
        sequence.computed = 0;
        sequence.preempted = true;
        self.preemptions += 1;
        let place = sequence.place;
        let queued = Queued::sequence(key, sequence, self.config.block_size);
        self.waiting.enter(place, queued);
        self.vacate(place, slot, held);
    }

    /// Starts the sequences whose room is set aside, but for those that a hand-over holds.
    fn start_aside(&mut self, budget: &mut u32, plan: &mut StepPlan) {
        let aside: Vec<_> = self
            .aside
            .iter()
            .map(|(place, key)| (*place, *key))
            .collect();
        for (place, key) in aside {
            if let Some(sequence) = self.sequences.get(&key)
                && sequence.hold.is_none()
                && let Phase::Aside(demand) = sequence.phase
            {
                self.aside.remove(&place);
                self.reserved -= demand;
                self.start(key, demand, plan);
                self.push_item(key, budget, plan);
            }
        }
    }

    /// Admits from the front of the queue. Nobody overtakes: a large one would never get its turn.
    fn admit(&mut self, budget: &mut u32, plan: &mut StepPlan) {
        while let Some((place, waiter, demand)) = self.first_waiting() {
            if !self.fits(demand) {
                return;
            }
            match waiter {
                Waiter::Promise(id) => {
                    if let Some(reservation) = self.reservations.get_mut(&id) {
                        reservation.promise = Promise::Aside;
                        self.reserved += demand;
                    }
                    self.waiting.leave(place);
                }
                Waiter::Sequence(key) => {
                    if *budget == 0 {
                        return;
                    }
                    self.waiting.leave(place);
                    self.start(key, demand, plan);
                    self.push_item(key, budget, plan);
                }
            }
        }
    }

    fn start(&mut self, key: SeqKey, demand: Blocks, plan: &mut StepPlan) {
        if self.take_slot(key, demand) {
            plan.started.push(key);
        }
    }

    /// Gives a sequence the lowest free slot: engines are quickest when used slots are neighbours. False when
    /// there is none.
    pub(super) fn take_slot(&mut self, key: SeqKey, demand: Blocks) -> bool {
        let free_slot = self.slots.iter().position(Option::is_none);
        let (Some(index), Some(sequence)) = (free_slot, self.sequences.get_mut(&key)) else {
            return false;
        };
        let slot = Slot(u32::try_from(index).unwrap_or(u32::MAX));
        sequence.phase = Phase::Running { slot, held: demand };
        self.slots[index] = Some(key);
        self.running.insert(sequence.place, key);
        self.used += demand;
        true
    }
}
