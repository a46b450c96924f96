//! What the operator chooses, and what follows from it.

use std::num::NonZeroU32;
use std::path::PathBuf;

use shoal_gossip::{BlockSize, Blocks, Tokens};

use crate::engine::batched::{BatchConfig, Layout};

/// Sequences that llama.cpp can tell apart in one context (its `LLAMA_MAX_SEQ`). A shared pool serves one fewer.
pub const MAX_SEQUENCES: u32 = 256;
/// Tokens of KV that may be asked for. A bound against typing errors: 4 Mi tokens of the smallest
/// model we serve (23 KB a token in f16) are 96 GB.
pub const MAX_CONTEXT_TOKENS: u32 = 1 << 22;
/// Tokens of one step. Beyond this a step gains nothing on any hardware we measured and the
/// compute buffers, allocated for it at load, only grow.
pub const MAX_STEP_TOKENS: u32 = 8192;
/// Threads that ggml can start (its `GGML_MAX_N_THREADS`).
pub const MAX_THREADS: u32 = 512;
/// llama.cpp rounds the KV of a context, and of each slot of a split one, up to this many tokens.
pub const CELL_GRANULE: u32 = 256;
/// Parts per thousand of a shared pool that admission leaves for the growth of what runs; vLLM's 1 %.
const WATERMARK_PERMILLE: u32 = 10;

/// How to load a model and divide its KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlamaConfig {
    /// The GGUF file.
    pub model_path: PathBuf,
    /// Name that clients use. `None`: the file's name without its extension. (The name inside the
    /// file is often that of a training run.)
    pub model_id: Option<String>,
    /// KV tokens in all, rounded up to [`CELL_GRANULE`] (split: per slot).
    pub context_tokens: NonZeroU32,
    /// Sequences that may hold KV at once: at most [`MAX_SEQUENCES`], one fewer when not `reproducible`.
    pub max_sequences: NonZeroU32,
    /// Tokens computed by one step at most; above `max_sequences`, so that prompts advance while
    /// every running sequence decodes.
    pub step_tokens: NonZeroU32,
    /// Threads that compute. More than one only where no other engine shares the machine: ggml's
    /// barrier spins without yielding (measured: two engines with two threads each on two cores
    /// made no progress in 30 s, with one thread each both ran at full speed).
    pub threads: NonZeroU32,
    /// Tokens in one KV block, the unit in which load is told.
    pub block_size: BlockSize,
    /// Requests that may wait.
    pub queue_limit: u32,
    /// Outputs depend on (prompt, generated ids, parameters) alone, whatever else runs: a slot of
    /// its own for each sequence, q8_0 KV. Otherwise one shared f16 pool.
    pub reproducible: bool,
}

/// Why a configuration cannot work. Nothing was loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LlamaConfigError {
    /// A number is beyond what llama.cpp or we can handle.
    #[error("{what} is {value}, at most {limit} is possible")]
    TooLarge {
        /// Which number.
        what: &'static str,
        /// As configured.
        value: u32,
        /// The bound.
        limit: u32,
    },
    /// A step could not advance every running sequence and a prompt.
    #[error(
        "a step of {step_tokens} tokens has no room for prompts beside {max_sequences} sequences"
    )]
    StepTooSmall {
        /// As configured.
        step_tokens: u32,
        /// As configured.
        max_sequences: u32,
    },
    /// Not even one block of KV for each sequence.
    #[error(
        "{context_tokens} tokens of KV are less than a block for each of {max_sequences} sequences"
    )]
    ContextTooSmall {
        /// As configured.
        context_tokens: u32,
        /// As configured.
        max_sequences: u32,
    },
}

impl LlamaConfig {
    /// Defaults for a small model on a CPU: 8,192 tokens for 8 sequences (1,024 each when split;
    /// 100 MB of q8_0 KV for a 135M model), steps of 64 tokens (measured: 48 prefill tokens keep a
    /// step of that model near 250 ms on one core), one thread, 64 waiting requests.
    pub fn new(model_path: impl Into<PathBuf>) -> Self {
        const fn nonzero(value: u32) -> NonZeroU32 {
            NonZeroU32::MIN.saturating_add(value - 1)
        }
        Self {
            model_path: model_path.into(),
            model_id: None,
            context_tokens: nonzero(8192),
            max_sequences: nonzero(8),
            step_tokens: nonzero(64),
            threads: NonZeroU32::MIN,
            block_size: BlockSize::DEFAULT,
            queue_limit: 64,
            reproducible: false,
        }
    }

    /// Checks every number and relation that does not depend on the model.
    ///
    /// # Errors
    /// The first that does not hold.
    pub fn check(&self) -> Result<(), LlamaConfigError> {
        let context_tokens = self.context_tokens.get();
        let max_sequences = self.max_sequences.get();
        let step_tokens = self.step_tokens.get();
        let bounds = [
            ("the KV size", context_tokens, MAX_CONTEXT_TOKENS),
            (
                "the number of sequences",
                max_sequences,
                MAX_SEQUENCES - u32::from(!self.reproducible),
            ),
            (
                "the number of tokens in a step",
                step_tokens,
                MAX_STEP_TOKENS,
            ),
            ("the number of threads", self.threads.get(), MAX_THREADS),
        ];
        if let Some(&(what, value, limit)) = bounds.iter().find(|(_, value, limit)| value > limit) {
            return Err(LlamaConfigError::TooLarge { what, value, limit });
        }
        if step_tokens <= max_sequences {
            return Err(LlamaConfigError::StepTooSmall {
                step_tokens,
                max_sequences,
            });
        }
        if context_tokens / max_sequences < self.block_size.tokens().get() {
            return Err(LlamaConfigError::ContextTooSmall {
                context_tokens,
                max_sequences,
            });
        }
        Ok(())
    }

    /// Sequences that llama.cpp must tell apart: in a shared pool one more, through which KV goes in and out.
    /// (A split cache has a part for each, so there none may be idle.)
    pub(super) fn llama_sequences(&self) -> u32 {
        self.max_sequences
            .get()
            .saturating_add(u32::from(!self.reproducible))
    }

    /// Prompts are cut at multiples of this many tokens when outputs must not depend on load:
    /// what a step has beside a decoding token for each sequence, so that a cut always fits.
    pub fn prefill_grid(&self) -> Option<u32> {
        let beside = self
            .step_tokens
            .get()
            .saturating_sub(self.max_sequences.get());
        self.reproducible.then_some(beside)
    }
}

/// How the KV of a loaded context is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlamaLayout {
    /// Each slot has its own part and no other slot can use it. Otherwise all share one pool.
    pub split: bool,
    /// Slots: sequences that may hold KV at once.
    pub slots: u32,
    /// Tokens that one slot can hold: its part, or the pool, or what the model was trained for.
    pub tokens_per_slot: Tokens,
    /// Tokens that all slots together can hold.
    pub total_tokens: Tokens,
}

impl LlamaLayout {
    /// Divides a context of `cells` tokens, as llama.cpp made it, for a model trained on
    /// sequences of up to `trained` tokens.
    pub(super) fn new(split: bool, slots: u32, cells: Tokens, trained: Tokens) -> Self {
        let part = if split {
            Tokens(cells.0 / slots.max(1))
        } else {
            cells
        };
        let tokens_per_slot = part.min(trained);
        let reachable = Tokens(tokens_per_slot.0.saturating_mul(slots));
        Self {
            split,
            slots,
            tokens_per_slot,
            total_tokens: cells.min(reachable),
        }
    }

    /// KV blocks in all. Of a pool, a rest smaller than a block is not counted; a split slot owns
    /// its last block even if that is shorter, as nobody else can use it.
    pub fn blocks(&self, block_size: BlockSize) -> Blocks {
        if self.split {
            let slot = block_size.blocks_for(self.tokens_per_slot);
            Blocks(self.slots.saturating_mul(slot.0))
        } else {
            Blocks(self.total_tokens.0 / block_size.tokens().get())
        }
    }

    /// The batch core's sizes for this division.
    pub(super) fn batch_config(&self, config: &LlamaConfig) -> BatchConfig {
        let block_size = config.block_size;
        let total = self.blocks(block_size);
        BatchConfig {
            block_size,
            total,
            slots: self.slots,
            layout: if self.split {
                Layout::Split {
                    tokens_per_slot: self.tokens_per_slot,
                }
            } else {
                Layout::Pool
            },
            step_tokens: config.step_tokens.get(),
            prefill_grid: config.prefill_grid(),
            queue_limit: config.queue_limit,
            watermark_permille: WATERMARK_PERMILLE,
            context: self.tokens_per_slot.min(block_size.tokens_in(total)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(context: u32, sequences: u32, step: u32) -> LlamaConfig {
        let nonzero = |value| NonZeroU32::new(value).expect("not zero");
        LlamaConfig {
            context_tokens: nonzero(context),
            max_sequences: nonzero(sequences),
            step_tokens: nonzero(step),
            ..LlamaConfig::new("model.gguf")
        }
    }

    #[test]
    fn the_defaults_hold_together() {
        assert_eq!(LlamaConfig::new("model.gguf").check(), Ok(()));
        let config = LlamaConfig::new("model.gguf");
        assert_eq!(config.context_tokens.get(), 8192);
        assert_eq!(config.max_sequences.get(), 8);
        assert_eq!(config.step_tokens.get(), 64);
    }

    #[test]
    fn numbers_that_llama_cpp_would_abort_on_are_refused() {
        let text = |config: LlamaConfig| config.check().expect_err("refused").to_string();
        assert_eq!(
            text(config(8192, 257, 512)),
            "the number of sequences is 257, at most 255 is possible"
        );
        assert_eq!(
            text(config(8192, 8, 8)),
            "a step of 8 tokens has no room for prompts beside 8 sequences"
        );
        assert_eq!(
            text(config(127, 8, 9)),
            "127 tokens of KV are less than a block for each of 8 sequences"
        );
        assert!(config(8192, 256, 257).check().is_err());
        assert!(config(8192, 255, 257).check().is_ok());
        let split = LlamaConfig {
            reproducible: true,
            ..config(8192, 256, 257)
        };
        assert!(split.check().is_ok());
        assert!(config(128, 8, 9).check().is_ok());
    }

    #[test]
    fn a_split_slot_holds_its_part_and_a_shared_one_the_pool() {
        let split = LlamaLayout::new(true, 8, Tokens(2048), Tokens(4096));
        assert_eq!(split.tokens_per_slot, Tokens(256));
        assert_eq!(split.total_tokens, Tokens(2048));
        assert_eq!(split.blocks(BlockSize::DEFAULT), Blocks(128));
        let shared = LlamaLayout::new(false, 8, Tokens(2048), Tokens(4096));
        assert_eq!(shared.tokens_per_slot, Tokens(2048));
        assert_eq!(shared.blocks(BlockSize::DEFAULT), Blocks(128));
    }

    #[test]
    fn the_batch_core_takes_the_sizes_of_any_division() {
        for (split, block, trained) in [
            (true, 16, 4096),
            (true, 100, 100),
            (false, 100, 4096),
            (false, 16, 50),
        ] {
            let config = LlamaConfig {
                block_size: BlockSize::new(NonZeroU32::new(block).expect("not zero")),
                reproducible: split,
                ..config(2048, 8, 9)
            };
            let layout = LlamaLayout::new(split, 8, Tokens(2048), Tokens(trained));
            let batch = layout.batch_config(&config);
            assert_eq!(batch.check(), Ok(()), "{batch:?}");
            assert_eq!(batch.prefill_grid, split.then_some(1));
        }
    }

    #[test]
    fn no_slot_holds_more_than_the_model_was_trained_for() {
        let layout = LlamaLayout::new(false, 2, Tokens(2048), Tokens(512));
        assert_eq!(layout.tokens_per_slot, Tokens(512));
        assert_eq!(layout.total_tokens, Tokens(1024));
    }
}
