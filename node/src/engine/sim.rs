//! The simulated engine: the block manager and scheduler of a real one, step time from a profile.
//!
//! Everything but the arithmetic is the real thing: the same batch core, thread, channels and text
//! as the embedded engine. Tokens are a function of the tokens before them, so that a request gives
//! the same output on every simulated node, whatever moves or dies.

mod executor;
mod kv;
mod profile;
mod step_model;
#[cfg(test)]
mod tests;
mod text;

use std::sync::Arc;

use sha2::{Digest, Sha256};
use shoal_gossip::{BlockSize, Clock, ModelApi, ModelFacts, Tokens};

pub use self::executor::SimExecutor;
pub(crate) use self::executor::mix;
pub use self::kv::SimKv;
pub use self::profile::{Profile, ProfileError};
pub use self::step_model::{StepLoad, StepModel};
pub use self::text::SimText;

use crate::engine::batched::{BatchConfig, BatchedEngine, Layout};
use crate::engine::{Capabilities, EngineError, EngineFacts};

/// vLLM's default bound on sequences that run together.
const DEFAULT_SLOTS: u32 = 256;

/// Output tokens on average: the mean of first answers in ShareGPT conversations is 228.
const DEFAULT_MEAN_OUTPUT: u32 = 228;

/// Share of the blocks that admission leaves free: vLLM's 1 %.
const WATERMARK_PERMILLE: u32 = 10;

/// Requests that may wait if nothing else is said. Twice what runs: more would wait for longer than
/// clients do.
const DEFAULT_QUEUE_LIMIT: u32 = 512;

/// A simulated engine as asked for. `None` takes the profile's figure.
#[derive(Clone, Debug, PartialEq)]
pub struct SimConfig {
    /// Name of a shipped latency profile, `PATH.json`, or `PATH.json#NAME`.
    pub profile: String,
    /// How many times faster than the profile it runs; 0 does not wait at all.
    pub speed: f64,
    /// Name that clients put in `model`.
    pub model: Option<String>,
    /// Unix seconds shown as the model's `created`.
    pub created: u64,
    /// Tokens in one KV block.
    pub block_size: BlockSize,
    /// Tokens of KV in all.
    pub kv: Option<Tokens>,
    /// Longest sequence.
    pub context: Option<Tokens>,
    /// Sequences that run at once.
    pub slots: Option<u32>,
    /// Tokens computed in one step.
    pub step_tokens: Option<u32>,
    /// Requests that may wait.
    pub queue_limit: u32,
    /// Cut prompts at multiples of this.
    pub prefill_grid: Option<u32>,
    /// Output tokens on average before the output ends by itself; 0 never ends it.
    pub mean_output: u32,
    /// What of its KV travels when a request moves.
    pub travels: Travels,
}

/// What of a simulated engine's KV travels.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    serde::Serialize,
    serde::Deserialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Travels {
    /// 16 bytes a token: enough to tell wrong KV.
    #[default]
    Digest,
    /// As many bytes a token as the profile says.
    TrueSize,
    /// Nothing: requests move by recompute.
    Nothing,
}

impl SimConfig {
    /// The profile in real time, with its own figures.
    pub fn new(profile: impl Into<String>) -> Self {
        Self {
            profile: profile.into(),
            speed: 1.0,
            model: None,
            created: 0,
            block_size: BlockSize::DEFAULT,
            kv: None,
            context: None,
            slots: None,
            step_tokens: None,
            queue_limit: DEFAULT_QUEUE_LIMIT,
            prefill_grid: None,
            mean_output: DEFAULT_MEAN_OUTPUT,
            travels: Travels::Digest,
        }
    }

    /// Sizes of the batch core.
    pub fn batch(&self, profile: &Profile) -> BatchConfig {
        let kv = self.kv.unwrap_or(profile.kv);
        let step_tokens = self.step_tokens.unwrap_or(profile.step_tokens);
        // A part of a block holds nothing.
        let blocks = kv.0 / self.block_size.tokens();
        let total = shoal_gossip::Blocks(blocks);
        let room = self.block_size.tokens_in(total);
        BatchConfig {
            block_size: self.block_size,
            total,
            slots: self
                .slots
                .unwrap_or_else(|| DEFAULT_SLOTS.min(step_tokens.saturating_sub(1))),
            layout: Layout::Pool,
            step_tokens,
            prefill_grid: self.prefill_grid,
            queue_limit: self.queue_limit,
            watermark_permille: WATERMARK_PERMILLE,
            context: self.context.unwrap_or_else(|| profile.context.min(room)),
        }
    }

    /// What the engine says of itself.
    pub fn facts(&self, profile: &Profile) -> EngineFacts {
        let batch = self.batch(profile);
        let id = self.model.clone().unwrap_or_else(|| profile.model.clone());
        let model = ModelFacts {
            context: batch.context,
            fingerprint: fingerprint(&id, self.mean_output),
            created: self.created,
            api: ModelApi::Tokens,
            id,
        };
        EngineFacts {
            models: vec![model],
            block_size: batch.block_size,
            total: batch.total,
            capabilities: Capabilities {
                reproducible: true,
                resumes: true,
                kv_export: self.travels != Travels::Nothing,
            },
        }
    }
}

/// Equal where the tokens are equal: speed and sizes do not matter, the algorithm does.
fn fingerprint(model: &str, mean_output: u32) -> u64 {
    let mut digest = Sha256::new();
    digest.update(b"shoal simulated engine, tokens of version 1\0");
    digest.update(mean_output.to_be_bytes());
    digest.update(model.as_bytes());
    let mut first = [0u8; 8];
    first.copy_from_slice(&digest.finalize()[..8]);
    u64::from_be_bytes(first)
}

/// Why a simulated engine did not start. Nothing runs.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// There is no such profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The speed is no number, or negative.
    #[error("the speed of the simulated engine must be a number at or above 0, not {0}")]
    Speed(f64),
    /// The sizes do not fit together, or its thread did not start.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Starts a simulated engine.
///
/// # Errors
/// See [`SimError`].
pub fn start(config: &SimConfig, clock: Arc<dyn Clock>) -> Result<Arc<BatchedEngine>, SimError> {
    if !config.speed.is_finite() || config.speed < 0.0 {
        return Err(SimError::Speed(config.speed));
    }
    let profile = Profile::find(&config.profile)?;
    let executor = SimExecutor::new(profile.step, config.speed, config.mean_output);
    let executor = match config.travels {
        Travels::Digest => executor.with_kv(SimKv::new(0)),
        Travels::TrueSize => executor.with_kv(SimKv::new(profile.kv_bytes_per_token)),
        Travels::Nothing => executor,
    };
    let engine = BatchedEngine::start(
        config.batch(&profile),
        config.facts(&profile),
        move || Ok(executor),
        Arc::new(SimText),
        clock,
    )?;
    Ok(engine)
}
