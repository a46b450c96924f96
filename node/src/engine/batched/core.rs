//! The batch core: who holds which KV blocks, and what the next step computes.
//!
//! The block manager and continuous-batching scheduler of a vLLM-like engine, in counts only: no
//! token ids, no clock, no thread. The engine thread drives it with real steps, the simulator with
//! modelled ones.
//!
//! Its rules, in the order a plan applies them:
//! 1. Every sequence that decodes gets one token. One that needs a block when none is free preempts
//!    the last in order: a paused one, else the newest of the lowest rank. The preempted one loses
//!    its KV, keeps its tokens, and waits at its old place. The only one that runs is never preempted.
//! 2. What is left of the step goes to prompts that run already, by rank and arrival.
//! 3. Then the queue is admitted from its front, as long as the whole prompt fits, unless something
//!    was preempted in this plan. A promise without a job is a queue entry like any other: at the
//!    front, its room is set aside.
//!
//! A sequence takes the blocks of its whole prompt when it starts, and one more at a time as it
//! grows, so that prompts never collide half-way.
//!
//! A hand-over *holds* a sequence: a [`Hold::Stopped`] one keeps what it has and gets no step, an arriving
//! one gets its blocks and slot at once and its KV by import or by a prefill that draws nothing. Held ones are
//! never preempted, so shortage waits for the hand-over to end.
//!
//! Always `used + reserved + free = total`: *used* is held by running sequences, *reserved* is set
//! aside for promises and for sequences that start with the next plan.

mod config;
mod hold;
mod load;
mod plan;
#[cfg(test)]
mod properties;
mod queue;
mod sequence;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_gossip::{Blocks, Epoch, NodeId, Readiness, RequestId, Timestamp};

pub use self::config::{BatchConfig, BatchConfigError, Layout};
pub use self::hold::{NoRoom, Standing};
pub use self::plan::{Drawn, PlanItem, StepPlan};
pub use self::sequence::{Hold, SeqKey, SeqSpec};

use self::queue::{Queue, Queued, Waiter};
use self::sequence::{Phase, Place, Promise, Reservation, Sequence};
use crate::engine::batched::Slot;
use crate::engine::work::Priority;
use crate::engine::{ReservationId, ReserveAsk, ReserveRefusal};

/// Why a sequence was not taken. It holds nothing; a promise it named is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitRefusal {
    /// The queue is at its bound. The promise, if it named one, had ended.
    #[error("the queue is full")]
    QueueFull,
    /// The counts contradict each other or the context.
    #[error("an empty prompt, nothing left to generate, or longer than the context")]
    NeverFits,
    /// Starting, failed, or draining without a promise made before.
    #[error("takes no work now")]
    NotReady,
    /// A sequence of this request is here. Remove it first if the new epoch is later.
    #[error("the request is here already")]
    Duplicate,
}

/// The batch core. See the module's text for its rules.
#[derive(Debug)]
pub struct Batcher {
    config: BatchConfig,
    readiness: Readiness,
    sequences: BTreeMap<SeqKey, Sequence>,
    by_request: BTreeMap<RequestId, SeqKey>,
    reservations: BTreeMap<ReservationId, Reservation>,
    waiting: Queue,
    /// Sequences that have a slot.
    running: BTreeMap<Place, SeqKey>,
    /// Sequences whose room is set aside: the next plan starts them.
    aside: BTreeMap<Place, SeqKey>,
    slots: Vec<Option<SeqKey>>,
    /// Slots whose KV is of no use any more.
    dirty: BTreeSet<Slot>,
    used: Blocks,
    reserved: Blocks,
    /// Source of keys, tickets and reservation ids.
    counter: u64,
    step_time: Option<Duration>,
    preemptions: u64,
}

impl Batcher {
    /// An empty core that takes work at once.
    ///
    /// # Errors
    /// When the sizes do not fit together.
    pub fn new(config: BatchConfig) -> Result<Self, BatchConfigError> {
        config.check()?;
        let slots = vec![None; usize::try_from(config.slots).unwrap_or(usize::MAX)];
        Ok(Self {
            config,
            readiness: Readiness::Ready,
            sequences: BTreeMap::new(),
            by_request: BTreeMap::new(),
            reservations: BTreeMap::new(),
            waiting: Queue::default(),
            running: BTreeMap::new(),
            aside: BTreeMap::new(),
            slots,
            dirty: BTreeSet::new(),
            used: Blocks::ZERO,
            reserved: Blocks::ZERO,
            counter: 0,
            step_time: None,
            preemptions: 0,
        })
    }

    /// The sizes it was made with.
    pub fn config(&self) -> &BatchConfig {
        &self.config
    }

    /// Decides whether new work is taken. What is here goes on in every state.
    pub fn set_readiness(&mut self, readiness: Readiness) {
        self.readiness = readiness;
    }

    /// Whether no sequence is here, waiting or running.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// The sequence of a request, if one is here.
    pub fn find(&self, request: RequestId) -> Option<(SeqKey, Epoch)> {
        let key = *self.by_request.get(&request)?;
        Some((key, self.sequences.get(&key)?.epoch))
    }

    /// Promises room: set aside now when it is free and nobody waits, else a place in the queue.
    ///
    /// # Errors
    /// See [`ReserveRefusal`]; nothing is held then.
    pub fn reserve(
        &mut self,
        now: Timestamp,
        ask: ReserveAsk,
    ) -> Result<ReservationId, ReserveRefusal> {
        self.expire(now);
        if self.readiness != Readiness::Ready {
            return Err(ReserveRefusal::NotReady);
        }
        let demand = ask.demand.max(Blocks(1));
        if demand > self.config.longest() {
            return Err(ReserveRefusal::NeverFits);
        }
        let ticket = self.next();
        let id = ReservationId(ticket);
        let place = Place::new(Priority::default(), now.before(ask.waited), ticket);
        let promise = if self.first_waiting().is_none() && self.fits(demand) {
            self.reserved += demand;
            Promise::Aside
        } else if ask.at_once {
            return Err(ReserveRefusal::NoRoomNow);
        } else if self.queue_room(ask.resumed) > 0 && (ask.resumed || self.is_fair(ask.home)) {
            let queued = Queued::promise(id, demand, ask.home);
            self.waiting.enter(place, queued);
            Promise::Queued
        } else {
            return Err(ReserveRefusal::QueueFull);
        };
        self.reservations.insert(
            id,
            Reservation {
                place,
                demand,
                expires: now + ask.lease,
                promise,
            },
        );
        Ok(id)
    }

    /// Gives a promise back. Unknown ids are ignored: it may have been used or have expired.
    pub fn release(&mut self, id: ReservationId) {
        self.take_reservation(id);
    }

    /// Drops the promises that nobody will use any more: work is not taken now.
    pub fn release_all(&mut self) {
        for id in self.reservations.keys().copied().collect::<Vec<_>>() {
            self.take_reservation(id);
        }
    }

    /// Drops promises whose lease has ended.
    pub fn expire(&mut self, now: Timestamp) {
        let ended: Vec<_> = self
            .reservations
            .iter()
            .filter(|(_, reservation)| reservation.expires <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            self.take_reservation(id);
        }
    }

    /// When to call [`expire`](Self::expire) or [`plan`](Self::plan) if nothing happens before.
    pub fn deadline(&self) -> Option<Timestamp> {
        self.reservations.values().map(|held| held.expires).min()
    }

    /// Takes a sequence. It starts with the next plan if room is set aside for it, else it waits.
    ///
    /// # Errors
    /// See [`SubmitRefusal`].
    pub fn submit(&mut self, now: Timestamp, spec: SeqSpec) -> Result<SeqKey, SubmitRefusal> {
        self.expire(now);
        let promise = spec.reservation.and_then(|id| self.take_reservation(id));
        self.check_spec(&spec, promise.is_some())?;
        let key = SeqKey(self.next());
        let arrival = promise.map_or((now, key.0), |promise| promise.place.arrival());
        let mut sequence = Sequence::new(&spec, arrival);
        let demand = sequence.demand(self.config.block_size);
        let fits = match promise.map(|promise| promise.promise) {
            // Its own room was given back above. More than was promised is taken if it is free.
            Some(Promise::Aside) => demand <= self.free(),
            Some(Promise::Queued) | None => self.first_waiting().is_none() && self.fits(demand),
        };
        if fits {
            sequence.phase = Phase::Aside(demand);
            self.reserved += demand;
            self.aside.insert(sequence.place, key);
        } else if promise.is_some() || self.queue_room(false) > 0 {
            let queued = Queued::sequence(key, &sequence, self.config.block_size);
            self.waiting.enter(sequence.place, queued);
        } else {
            return Err(SubmitRefusal::QueueFull);
        }
        self.by_request.insert(spec.request, key);
        self.sequences.insert(key, sequence);
        Ok(key)
    }

    fn check_spec(&self, spec: &SeqSpec, promised: bool) -> Result<(), SubmitRefusal> {
        match self.readiness {
            Readiness::Ready => {}
            Readiness::Draining if promised => {}
            Readiness::Draining | Readiness::Starting | Readiness::Failed => {
                return Err(SubmitRefusal::NotReady);
            }
        }
        let longest = u64::from(spec.prompt_len) + u64::from(spec.max_tokens);
        if spec.prompt_len == 0
            || spec.generated_len >= spec.max_tokens
            || longest > u64::from(self.config.context.0)
        {
            return Err(SubmitRefusal::NeverFits);
        }
        if self.by_request.contains_key(&spec.request) {
            return Err(SubmitRefusal::Duplicate);
        }
        Ok(())
    }

    /// Takes a sequence out: it finished, or nobody wants it any more. Everything it holds is free
    /// at once. Unknown keys are ignored.
    pub fn remove(&mut self, key: SeqKey) {
        let Some(sequence) = self.sequences.remove(&key) else {
            return;
        };
        self.by_request.remove(&sequence.request);
        match sequence.phase {
            Phase::Waiting => self.waiting.leave(sequence.place),
            Phase::Aside(demand) => {
                self.aside.remove(&sequence.place);
                self.reserved -= demand;
            }
            Phase::Running { slot, held } => self.vacate(sequence.place, slot, held),
        }
    }

    /// Drops everything, as a process that ends does.
    pub fn clear(&mut self) {
        let keys: Vec<SeqKey> = self.sequences.keys().copied().collect();
        for key in keys {
            self.remove(key);
        }
        self.release_all();
        self.readiness = Readiness::Ready;
    }

    /// Stops or resumes the steps of a sequence whose output is not read. It keeps what it holds,
    /// and is the first to be preempted. Unknown keys are ignored.
    pub fn set_paused(&mut self, key: SeqKey, paused: bool) {
        if let Some(sequence) = self.sequences.get_mut(&key) {
            sequence.paused = paused;
        }
    }

    /// Sequences preempted so far, each time counted.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Blocks that nobody holds and nobody was promised.
    pub fn free(&self) -> Blocks {
        self.config.total - self.used - self.reserved
    }

    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Whether room for one more sequence can be taken now.
    fn fits(&self, demand: Blocks) -> bool {
        // The watermark protects the growth of others; alone there are none.
        let spare = if self.slots_taken() == 0 {
            Blocks::ZERO
        } else {
            self.config.watermark()
        };
        self.has_slot() && demand + spare <= self.free()
    }

    /// Whether one more sequence may run, or be promised that it may.
    fn has_slot(&self) -> bool {
        self.slots_taken() < self.slots.len()
    }

    fn slots_taken(&self) -> usize {
        self.running.len() + self.aside_count()
    }

    /// Slots that are promised: to reservations and to sequences that start with the next plan.
    fn aside_count(&self) -> usize {
        let promised = self
            .reservations
            .values()
            .filter(|reservation| reservation.promise == Promise::Aside)
            .count();
        promised + self.aside.len()
    }

    /// The first in the queue that could start. A paused or stopped one could not, and holds up nobody.
    fn first_waiting(&self) -> Option<(Place, Waiter, Blocks)> {
        self.waiting.iter().find_map(|(place, queued)| {
            if let Waiter::Sequence(key) = queued.waiter {
                let sequence = self.sequences.get(&key)?;
                if sequence.paused || sequence.hold.is_some() {
                    return None;
                }
            }
            Some((*place, queued.waiter, queued.demand))
        })
    }

    /// Places left in the queue; for one that ran at another node before there are twice as many. Those that were
    /// preempted here do not count: they were let in before.
    fn queue_room(&self, resumed: bool) -> u32 {
        let queued = self.waiting.len() - self.waiting.preempted();
        let queued = u32::try_from(queued).unwrap_or(u32::MAX);
        let limit = self.config.queue_limit;
        let limit = if resumed {
            limit.saturating_mul(2)
        } else {
            limit
        };
        limit.saturating_sub(queued)
    }

    /// Whether a home may have one more place in the queue. Once half of it is taken nobody gets more than an equal share, so
    /// that a home whose clients flood it does not shut out the others'.
    fn is_fair(&self, home: NodeId) -> bool {
        let limit = self.config.queue_limit;
        let (places, homes) = self.waiting.places_of(home);
        self.queue_room(false) > limit / 2 || places < (limit / homes).max(1)
    }

    fn take_reservation(&mut self, id: ReservationId) -> Option<Reservation> {
        let reservation = self.reservations.remove(&id)?;
        match reservation.promise {
            Promise::Aside => self.reserved -= reservation.demand,
            Promise::Queued => self.waiting.leave(reservation.place),
        }
        Some(reservation)
    }

    fn vacate(&mut self, place: Place, slot: Slot, held: Blocks) {
        self.running.remove(&place);
        self.used -= held;
        self.dirty.insert(slot);
        if let Some(place) = self.slots.get_mut(slot.0 as usize) {
            *place = None;
        }
    }
}
