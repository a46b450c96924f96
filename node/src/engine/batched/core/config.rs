//! How large a batch core is, and the relations that make it unable to get stuck.

use shoal_gossip::{BlockSize, Blocks, Tokens};

/// How sequences share the KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One pool: any sequence may take any block, and the pool can run out.
    Pool,
    /// Each slot owns its part. A sequence is bounded by its slot and never preempted for memory.
    Split {
        /// Tokens that one slot holds.
        tokens_per_slot: Tokens,
    },
}

/// Sizes of a [`Batcher`](super::Batcher).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchConfig {
    /// Tokens in one KV block.
    pub block_size: BlockSize,
    /// KV blocks there are.
    pub total: Blocks,
    /// Sequences that may run at once. vLLM's `max_num_seqs`, 256 by default there.
    pub slots: u32,
    /// How they share the blocks.
    pub layout: Layout,
    /// Tokens one step computes at most: one for each decoding sequence first, prompt chunks with
    /// what is left. vLLM's `max_num_batched_tokens`, 2,048 by default there. Bounds the time of a
    /// step, and so the gap between two tokens of everybody who decodes.
    pub step_tokens: u32,
    /// Cut every prompt at multiples of this many tokens, whatever else runs, so that the arithmetic
    /// of a request does not depend on its company. `None` cuts where the step is full.
    pub prefill_grid: Option<u32>,
    /// Requests that may wait, promised places included. Preempted sequences wait on top of that;
    /// they are at most `slots`.
    pub queue_limit: u32,
    /// Parts per thousand of the pool that admission leaves free for the growth of what runs, so
    /// that a new sequence does not push out a running one at once. vLLM uses 1 %. Of no effect in a
    /// split layout, where growth cannot collide.
    pub watermark_permille: u32,
    /// Longest sequence, prompt and output together.
    pub context: Tokens,
}

/// Why sizes do not fit together. Nothing was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchConfigError {
    /// Nothing could ever run.
    #[error("slots, step tokens, KV blocks and context must all be above zero")]
    Zero,
    /// All slots decoding would leave no room for prompts, which then starve.
    #[error(
        "step tokens ({step_tokens}) must be above slots ({slots}), so that prompts advance while all slots decode"
    )]
    StepTooSmall {
        /// As configured.
        step_tokens: u32,
        /// As configured.
        slots: u32,
    },
    /// A grid cell is never split, so it has to fit beside a full set of decoding sequences.
    #[error(
        "step tokens ({step_tokens}) must be at least slots ({slots}) plus the prefill grid ({grid})"
    )]
    GridTooLarge {
        /// As configured.
        step_tokens: u32,
        /// As configured.
        slots: u32,
        /// As configured; zero is refused too.
        grid: u32,
    },
    /// One sequence of full length could not run even alone, so preemption would have no end.
    #[error(
        "a context of {context} tokens does not fit in the {room} tokens of KV that one sequence can have"
    )]
    ContextTooLarge {
        /// As configured.
        context: Tokens,
        /// Tokens that one sequence can hold.
        room: Tokens,
    },
    /// The slots of a split layout are larger than the memory.
    #[error("{slots} slots of {tokens_per_slot} tokens need more than {total} KV blocks")]
    SlotsTooLarge {
        /// As configured.
        slots: u32,
        /// As configured.
        tokens_per_slot: Tokens,
        /// As configured.
        total: Blocks,
    },
    /// Nothing could be admitted beside something that runs.
    #[error("a watermark of {0} per thousand leaves no room for a second request")]
    Watermark(u32),
}

impl BatchConfig {
    /// Checks the relations between the sizes.
    ///
    /// # Errors
    /// The first relation that does not hold.
    pub fn check(&self) -> Result<(), BatchConfigError> {
        let zero = self.slots == 0 || self.step_tokens == 0;
        if zero || self.total == Blocks::ZERO || self.context == Tokens::ZERO {
            return Err(BatchConfigError::Zero);
        }
        if self.step_tokens <= self.slots {
            return Err(BatchConfigError::StepTooSmall {
                step_tokens: self.step_tokens,
                slots: self.slots,
            });
        }
        if let Some(grid) = self.prefill_grid
            && (grid == 0 || self.step_tokens < self.slots.saturating_add(grid))
        {
            return Err(BatchConfigError::GridTooLarge {
                step_tokens: self.step_tokens,
                slots: self.slots,
                grid,
            });
        }
        if self.watermark_permille >= 1000 {
            return Err(BatchConfigError::Watermark(self.watermark_permille));
        }
        self.check_layout()
    }

    fn check_layout(&self) -> Result<(), BatchConfigError> {
        let room = match self.layout {
            Layout::Pool => self.block_size.tokens_in(self.total),
            Layout::Split { tokens_per_slot } => {
                let slot = self.block_size.blocks_for(tokens_per_slot);
                if u64::from(slot.0) * u64::from(self.slots) > u64::from(self.total.0) {
                    return Err(BatchConfigError::SlotsTooLarge {
                        slots: self.slots,
                        tokens_per_slot,
                        total: self.total,
                    });
                }
                tokens_per_slot
            }
        };
        if self.context > room {
            return Err(BatchConfigError::ContextTooLarge {
                context: self.context,
                room,
            });
        }
        Ok(())
    }

    /// Blocks that admission leaves free while something runs.
    pub fn watermark(&self) -> Blocks {
        match self.layout {
            Layout::Pool => {
                let blocks = u64::from(self.total.0) * u64::from(self.watermark_permille) / 1000;
                Blocks(u32::try_from(blocks).unwrap_or(u32::MAX))
            }
            Layout::Split { .. } => Blocks::ZERO,
        }
    }

    /// Blocks of the longest sequence: more than that never fits.
    pub fn longest(&self) -> Blocks {
        self.block_size.blocks_for(self.context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> BatchConfig {
        BatchConfig {
            block_size: BlockSize::DEFAULT,
            total: Blocks(100),
            slots: 4,
            layout: Layout::Pool,
            step_tokens: 64,
            prefill_grid: None,
            queue_limit: 8,
            watermark_permille: 10,
            context: Tokens(512),
        }
    }

    #[test]
    fn sizes_that_could_get_stuck_are_refused() {
        assert_eq!(config().check(), Ok(()));
        let with = |change: fn(&mut BatchConfig)| {
            let mut config = config();
            change(&mut config);
            config.check()
        };
        assert_eq!(with(|c| c.slots = 0), Err(BatchConfigError::Zero));
        assert!(matches!(
            with(|c| c.step_tokens = 4),
            Err(BatchConfigError::StepTooSmall { .. })
        ));
        assert!(matches!(
            with(|c| c.prefill_grid = Some(61)),
            Err(BatchConfigError::GridTooLarge { .. })
        ));
        assert!(matches!(
            with(|c| c.prefill_grid = Some(0)),
            Err(BatchConfigError::GridTooLarge { .. })
        ));
        assert!(matches!(
            with(|c| c.context = Tokens(1601)),
            Err(BatchConfigError::ContextTooLarge { .. })
        ));
        assert!(matches!(
            with(|c| c.layout = Layout::Split {
                tokens_per_slot: Tokens(401)
            }),
            Err(BatchConfigError::SlotsTooLarge { .. })
        ));
        assert!(matches!(
            with(|c| c.layout = Layout::Split {
                tokens_per_slot: Tokens(400)
            }),
            Err(BatchConfigError::ContextTooLarge { .. })
        ));
        assert_eq!(
            with(|c| c.watermark_permille = 1000),
            Err(BatchConfigError::Watermark(1000))
        );
    }

    #[test]
    fn the_watermark_is_a_share_of_the_pool_and_nothing_in_a_split_layout() {
        assert_eq!(config().watermark(), Blocks(1));
        let split = BatchConfig {
            layout: Layout::Split {
                tokens_per_slot: Tokens(400),
            },
            ..config()
        };
        assert_eq!(split.watermark(), Blocks::ZERO);
    }
}
