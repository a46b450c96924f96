//! What every slot of the KV holds, and whether a step may follow. Pure.
//!
//! llama.cpp answers a wrong batch with a code that says nothing, or ends the process. So a step is
//! checked here, whole, before anything is changed.

use shoal_gossip::Tokens;
use shoal_migrate::KvRange;

use crate::engine::batched::{Slot, Step, StepItem};
use crate::engine::llama::config::LlamaLayout;

/// Why a step cannot be computed. Nothing was changed; the batch core has a defect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StepError {
    #[error("slot {0} does not exist")]
    UnknownSlot(u32),
    #[error("slot {0} comes after slot {1}: items go by ascending slot, one each")]
    Order(u32, u32),
    #[error("slot {0} has no tokens to compute")]
    NoTokens(u32),
    #[error("slot {slot} goes on at position {position} but holds {held} tokens")]
    Position {
        slot: u32,
        position: u32,
        held: usize,
    },
    #[error("token {id} for slot {slot} is not in the vocabulary of {vocabulary}")]
    UnknownToken { slot: u32, id: u32, vocabulary: u32 },
    #[error("slot {slot} would hold {tokens} tokens of at most {limit}")]
    SlotFull {
        slot: u32,
        tokens: usize,
        limit: Tokens,
    },
    #[error("all slots would hold {tokens} tokens of at most {limit}")]
    PoolFull { tokens: usize, limit: Tokens },
    #[error("{tokens} tokens in a step of at most {limit}")]
    StepTooLong { tokens: usize, limit: usize },
}

/// Ids held by each slot: position `p` holds the `p`-th id.
#[derive(Debug)]
pub(super) struct Slots {
    layout: LlamaLayout,
    vocabulary: u32,
    step_tokens: usize,
    held: Vec<Vec<u32>>,
}

impl Slots {
    /// All slots empty. A step computes at most `step_tokens` tokens.
    pub(super) fn new(layout: LlamaLayout, vocabulary: u32, step_tokens: usize) -> Self {
        Self {
            layout,
            vocabulary,
            step_tokens,
            held: vec![Vec::new(); layout.slots as usize],
        }
    }

    /// Ids that a slot holds; none for a slot that does not exist.
    pub(super) fn held(&self, slot: Slot) -> &[u32] {
        self.held.get(slot.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Whether the step can be computed.
    pub(super) fn check(&self, step: &Step) -> Result<(), StepError> {
        let exists = |slot: Slot| self.held.get(slot.0 as usize).is_some();
        if let Some(slot) = step.clear.iter().find(|slot| !exists(**slot)) {
            return Err(StepError::UnknownSlot(slot.0));
        }
        for pair in step.items.windows(2) {
            if pair[1].slot <= pair[0].slot {
                return Err(StepError::Order(pair[1].slot.0, pair[0].slot.0));
            }
        }
        for item in &step.items {
            if !exists(item.slot) {
                return Err(StepError::UnknownSlot(item.slot.0));
            }
            let held = if step.clear.contains(&item.slot) {
                0
            } else {
                self.held(item.slot).len()
            };
            self.check_item(item, held)?;
        }
        let tokens: usize = step.items.iter().map(|item| item.tokens.len()).sum();
        if tokens > self.step_tokens {
            return Err(StepError::StepTooLong {
                tokens,
                limit: self.step_tokens,
            });
        }
        self.check_pool(step, tokens)
    }

    fn check_item(&self, item: &StepItem, held: usize) -> Result<(), StepError> {
        let slot = item.slot.0;
        if item.tokens.is_empty() {
            return Err(StepError::NoTokens(slot));
        }
        if item.position as usize != held {
            return Err(StepError::Position {
                slot,
                position: item.position,
                held,
            });
        }
        let vocabulary = self.vocabulary;
        if let Some(&id) = item.tokens.iter().find(|&&id| id >= vocabulary) {
            return Err(StepError::UnknownToken {
                slot,
                id,
                vocabulary,
            });
        }
        let tokens = held + item.tokens.len();
        let limit = self.layout.tokens_per_slot;
        if tokens > limit.0 as usize {
            return Err(StepError::SlotFull {
                slot,
                tokens,
                limit,
            });
        }
        Ok(())
    }

    /// Slots of a split layout are bounded one by one, so this binds only a shared pool.
    fn check_pool(&self, step: &Step, new: usize) -> Result<(), StepError> {
        let kept: usize = (0..)
            .zip(&self.held)
            .filter(|(slot, _)| !step.clear.contains(&Slot(*slot)))
            .map(|(_, held)| held.len())
            .sum();
        let limit = self.layout.total_tokens;
        if kept + new > limit.0 as usize {
            return Err(StepError::PoolFull {
                tokens: kept + new,
                limit,
            });
        }
        Ok(())
    }

    /// Notes that a slot was emptied.
    pub(super) fn clear(&mut self, slot: Slot) {
        if let Some(held) = self.held.get_mut(slot.0 as usize) {
            held.clear();
        }
    }

    /// Notes that KV of this many tokens was imported at the end of a slot; which tokens, [`adopt`](Self::adopt) tells.
    pub(super) fn import(&mut self, slot: Slot, tokens: usize) {
        if let Some(held) = self.held.get_mut(slot.0 as usize) {
            held.resize(held.len() + tokens, 0);
        }
    }

    /// Notes of which tokens the KV in a slot is. False when it is not of as many.
    pub(super) fn adopt(&mut self, slot: Slot, ids: &[u32]) -> bool {
        match self.held.get_mut(slot.0 as usize) {
            Some(held) if held.len() == ids.len() => {
                held.copy_from_slice(ids);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Whether a slot has room for an import that begins here.
    pub(super) fn check_import(&self, slot: Slot, range: KvRange) -> Result<(), String> {
        let held = self.held(slot).len();
        let kept: usize = self.held.iter().map(Vec::len).sum();
        let (start, end) = (range.start().0 as usize, range.end());
        let total = kept + (range.tokens().0 as usize);
        let exists = (slot.0 as usize) < self.held.len();
        if exists
            && held == start
            && end <= self.layout.tokens_per_slot
            && total <= self.layout.total_tokens.0 as usize
        {
            Ok(())
        } else {
            Err(format!(
                "KV from {start} to {end} for slot {}, which holds {held}",
                slot.0
            ))
        }
    }

    /// Notes that an item was computed.
    pub(super) fn extend(&mut self, item: &StepItem) {
        if let Some(held) = self.held.get_mut(item.slot.0 as usize) {
            held.extend_from_slice(&item.tokens);
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_gossip::{NodeId, RequestId};

    use super::*;

    fn item(slot: u32, position: u32, tokens: &[u32]) -> StepItem {
        StepItem {
            slot: Slot(slot),
            request: RequestId {
                home: NodeId(1),
                serial: u64::from(slot),
            },
            position,
            tokens: tokens.to_vec(),
            sample: None,
        }
    }

    fn step(clear: &[u32], items: Vec<StepItem>) -> Step {
        Step {
            clear: clear.iter().copied().map(Slot).collect(),
            items,
        }
    }

    /// Three slots of at most 6 tokens in a pool of 8, steps of 5; slot 1 holds three tokens.
    fn slots() -> Slots {
        let layout = LlamaLayout {
            split: false,
            slots: 3,
            tokens_per_slot: Tokens(6),
            total_tokens: Tokens(8),
        };
        let mut slots = Slots::new(layout, 100, 5);
        slots.extend(&item(1, 0, &[7, 8, 9]));
        slots
    }

    fn check(step: &Step, expected: Result<(), StepError>) {
        assert_eq!(slots().check(step), expected);
    }

    #[test]
    fn a_step_goes_on_where_the_slot_ends() {
        check(&step(&[], vec![item(1, 3, &[1])]), Ok(()));
        check(
            &step(&[], vec![item(0, 0, &[1, 2]), item(1, 3, &[3])]),
            Ok(()),
        );
        let gap = StepError::Position {
            slot: 1,
            position: 4,
            held: 3,
        };
        check(&step(&[], vec![item(1, 4, &[1])]), Err(gap));
        let overwrite = StepError::Position {
            slot: 1,
            position: 0,
            held: 3,
        };
        check(&step(&[], vec![item(1, 0, &[1])]), Err(overwrite));
    }

    #[test]
    fn a_slot_cleared_in_the_same_step_begins_anew() {
        check(&step(&[1], vec![item(1, 0, &[1])]), Ok(()));
        let mut slots = slots();
        slots.clear(Slot(1));
        assert_eq!(slots.held(Slot(1)), &[] as &[u32]);
    }

    #[test]
    fn what_llama_cpp_would_die_of_is_refused() {
        check(&step(&[3], vec![]), Err(StepError::UnknownSlot(3)));
        check(
            &step(&[], vec![item(3, 0, &[1])]),
            Err(StepError::UnknownSlot(3)),
        );
        check(
            &step(&[], vec![item(0, 0, &[])]),
            Err(StepError::NoTokens(0)),
        );
        let twice = step(&[], vec![item(0, 0, &[1]), item(0, 1, &[1])]);
        check(&twice, Err(StepError::Order(0, 0)));
        let unknown = StepError::UnknownToken {
            slot: 0,
            id: 100,
            vocabulary: 100,
        };
        check(&step(&[], vec![item(0, 0, &[99, 100])]), Err(unknown));
        let long = StepError::StepTooLong {
            tokens: 6,
            limit: 5,
        };
        check(&step(&[], vec![item(0, 0, &[1; 6])]), Err(long));
    }

    #[test]
    fn neither_slot_nor_pool_overflows_at_the_edge() {
        check(&step(&[], vec![item(1, 3, &[1; 3])]), Ok(()));
        let full = StepError::SlotFull {
            slot: 1,
            tokens: 7,
            limit: Tokens(6),
        };
        check(&step(&[], vec![item(1, 3, &[1; 4])]), Err(full));
        check(&step(&[], vec![item(0, 0, &[1; 5])]), Ok(()));
        let pool = StepError::PoolFull {
            tokens: 9,
            limit: Tokens(8),
        };
        let mut slots = slots();
        slots.extend(&item(0, 0, &[1; 5]));
        assert_eq!(slots.check(&step(&[], vec![item(1, 3, &[1])])), Err(pool));
        assert_eq!(slots.check(&step(&[0], vec![item(1, 3, &[1])])), Ok(()));
    }
}
