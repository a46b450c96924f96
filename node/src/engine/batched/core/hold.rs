//! Sequences that a hand-over holds: at its source, and on their way in.

use shoal_gossip::{Blocks, Epoch, Timestamp, Tokens};
use shoal_migrate::CopyMode;

use super::queue::Queued;
use super::sequence::{Hold, Phase, Promise, Sequence};
use super::{Batcher, SeqKey, SeqSpec, SubmitRefusal};
use crate::engine::batched::Slot;
use crate::engine::moving::JobPhase;

/// A held sequence needs a block and none is free: others are not preempted for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no KV block is free")]
pub struct NoRoom;

/// How a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Tokens that have KV.
    pub computed: Tokens,
    /// Blocks it holds.
    pub blocks: Blocks,
    /// Where its KV lives, when it has started.
    pub slot: Option<Slot>,
    /// What a hand-over makes of it.
    pub hold: Option<Hold>,
    /// Tokens that its next steps compute; one when it decodes.
    pub uncomputed: Tokens,
    /// When its client asked.
    pub came: Timestamp,
}

impl Standing {
    /// What people call it.
    pub fn phase(&self) -> JobPhase {
        match (self.hold, self.slot) {
            (Some(Hold::Stopped), _) => JobPhase::Paused,
            (Some(Hold::Arriving | Hold::Recomputing), _) => JobPhase::Arriving,
            (None, None) => JobPhase::Waiting,
            (None, Some(_)) if self.uncomputed <= Tokens(1) => JobPhase::Decode,
            (None, Some(_)) => JobPhase::Prefill,
        }
    }
}

impl Batcher {
    /// How a sequence stands. `None` when it is not here.
    pub fn standing(&self, key: SeqKey) -> Option<Standing> {
        let sequence = self.sequences.get(&key)?;
        let (slot, blocks) = match sequence.phase {
            Phase::Waiting => (None, Blocks::ZERO),
            Phase::Aside(demand) => (None, demand),
            Phase::Running { slot, held } => (Some(slot), held),
        };
        Some(Standing {
            computed: Tokens(sequence.computed),
            blocks,
            slot,
            hold: sequence.hold,
            uncomputed: Tokens(sequence.uncomputed()),
            came: sequence.place.arrival().0,
        })
    }

    /// Stops a sequence for a hand-over: it keeps what it holds, and waits for nothing. False when it is not
    /// here, or is held already.
    pub fn stop(&mut self, key: SeqKey) -> bool {
        match self.sequences.get_mut(&key) {
            Some(sequence) if sequence.hold.is_none() => {
                sequence.hold = Some(Hold::Stopped);
                self.requeue(key);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Lets a held sequence run, in this ownership. What it was given beyond its need is free again. Unknown keys
    /// are ignored.
    pub fn go_on(&mut self, key: SeqKey, epoch: Epoch) {
        let Some(sequence) = self.sequences.get_mut(&key) else {
            return;
        };
        sequence.hold = None;
        sequence.epoch = epoch;
        let demand = sequence.demand(self.config.block_size);
        let (held, total) = match &mut sequence.phase {
            Phase::Waiting => return self.requeue(key),
            Phase::Aside(held) => (held, &mut self.reserved),
            Phase::Running { held, .. } => (held, &mut self.used),
        };
        let spare = *held - demand;
        *held -= spare;
        *total -= spare;
    }

    /// Takes in a sequence whose KV comes from elsewhere. It gets the blocks of its promise, and of its need if
    /// that is larger and free, and a slot; in [`CopyMode::Waiting`] these are only set aside.
    ///
    /// # Errors
    /// See [`SubmitRefusal`]; `QueueFull` when there is no room at once. The promise is used up.
    pub fn arrive(
        &mut self,
        now: Timestamp,
        spec: SeqSpec,
        mode: CopyMode,
    ) -> Result<SeqKey, SubmitRefusal> {
        self.expire(now);
        let promise = spec.reservation.and_then(|id| self.take_reservation(id));
        self.check_spec(&spec, promise.is_some())?;
        let key = SeqKey(self.next());
        let arrival = promise.map_or((now, key.0), |promise| promise.place.arrival());
        let mut sequence = Sequence::new(&spec, arrival);
        let mut demand = sequence.demand(self.config.block_size);
        let fits = match promise {
            Some(promise) if promise.promise == Promise::Aside => {
                demand = demand.max(promise.demand);
                demand <= self.free()
            }
            Some(_) | None => self.first_waiting().is_none() && self.fits(demand),
        };
        if !fits {
            return Err(SubmitRefusal::QueueFull);
        }
        self.by_request.insert(spec.request, key);
        match mode {
            CopyMode::Waiting => {
                sequence.hold = Some(Hold::Arriving);
                sequence.phase = Phase::Aside(demand);
                self.reserved += demand;
                self.aside.insert(sequence.place, key);
                self.sequences.insert(key, sequence);
            }
            CopyMode::Kv | CopyMode::Recompute => {
                sequence.hold = Some(if mode == CopyMode::Kv {
                    Hold::Arriving
                } else {
                    Hold::Recomputing
                });
                self.sequences.insert(key, sequence);
                if !self.take_slot(key, demand) {
                    self.remove(key);
                    return Err(SubmitRefusal::QueueFull);
                }
            }
        }
        Ok(key)
    }

    /// The slot of an arriving sequence, and whether it must be cleared before the first import. Whoever asks
    /// clears it.
    pub fn slot_to_fill(&mut self, key: SeqKey) -> Option<(Slot, bool)> {
        let sequence = self.sequences.get(&key)?;
        match (sequence.phase, sequence.hold) {
            (Phase::Running { slot, .. }, Some(Hold::Arriving)) => {
                Some((slot, self.dirty.remove(&slot)))
            }
            (Phase::Waiting | Phase::Aside(_) | Phase::Running { .. }, _) => None,
        }
    }

    /// Notes that an arriving sequence has KV up to here. Unknown keys are ignored.
    ///
    /// # Errors
    /// It holds too few blocks and none is free. Nothing has changed.
    pub fn imported(&mut self, key: SeqKey, end: Tokens) -> Result<(), NoRoom> {
        self.widen(key, self.config.block_size.blocks_for(end))?;
        if let Some(sequence) = self.sequences.get_mut(&key) {
            sequence.computed = end.0;
        }
        Ok(())
    }

    /// Notes that a held sequence has this much output, which was drawn elsewhere. Unknown keys are ignored.
    ///
    /// # Errors
    /// It holds too few blocks and none is free. Nothing has changed.
    pub fn set_output(&mut self, key: SeqKey, generated: Tokens) -> Result<(), NoRoom> {
        let Some(mut sequence) = self.sequences.get(&key).copied() else {
            return Ok(());
        };
        sequence.generated = generated.0;
        let needed = match sequence.phase {
            Phase::Waiting => Blocks::ZERO,
            Phase::Aside(_) => sequence.demand(self.config.block_size),
            Phase::Running { .. } => self.config.block_size.blocks_for(Tokens(sequence.known())),
        };
        self.widen(key, needed)?;
        if let Some(sequence) = self.sequences.get_mut(&key) {
            sequence.generated = generated.0;
        }
        self.requeue(key);
        Ok(())
    }

    /// What the queue knows of a waiting sequence has changed.
    fn requeue(&mut self, key: SeqKey) {
        if let Some(sequence) = self.sequences.get(&key)
            && sequence.phase == Phase::Waiting
        {
            let queued = Queued::sequence(key, sequence, self.config.block_size);
            self.waiting.enter(sequence.place, queued);
        }
    }

    fn widen(&mut self, key: SeqKey, needed: Blocks) -> Result<(), NoRoom> {
        let free = self.free();
        let Some(sequence) = self.sequences.get_mut(&key) else {
            return Ok(());
        };
        let (held, total) = match &mut sequence.phase {
            Phase::Waiting => return Ok(()),
            Phase::Aside(demand) => (demand, &mut self.reserved),
            Phase::Running { held, .. } => (held, &mut self.used),
        };
        let missing = needed - *held;
        if missing > free {
            return Err(NoRoom);
        }
        *held += missing;
        *total += missing;
        Ok(())
    }
}
