//! How long a step takes on a given GPU and model. Pure.

use std::time::Duration;

use serde::Deserialize;

use crate::engine::batched::StepPlan;

/// Coefficients of a step's time, in milliseconds:
/// `a + max(w, b·tokens) + c·sequences + d·KV tokens + e·Σ((cached + new)² − cached²)`.
///
/// `w` is the time to read the weights, which a step takes however few tokens it computes; `b` is
/// the arithmetic of a token; `d` reads KV; `e` is attention inside prompts. Of the forms with one
/// formula for all steps it fits best: 1 to 4 % mean error over prompts of 0 to 8,192 tokens and up
/// to 256 decoding sequences, against the measured kernels it was fitted to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct StepModel {
    /// Constant part.
    #[serde(rename = "a_ms")]
    pub base_ms: f64,
    /// Least time of the part that grows with tokens.
    #[serde(rename = "w_ms")]
    pub weights_ms: f64,
    /// Per token computed.
    #[serde(rename = "b_ms_per_token")]
    pub per_token_ms: f64,
    /// Per sequence in the step.
    #[serde(rename = "c_ms_per_seq")]
    pub per_sequence_ms: f64,
    /// Per KV token of the decoding sequences.
    #[serde(rename = "d_ms_per_kv_token")]
    pub per_kv_token_ms: f64,
    /// Per pair of prompt tokens.
    #[serde(rename = "e_ms_per_prefill_token_sq")]
    pub per_pair_ms: f64,
}

/// What one step computes, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Tokens computed.
    pub tokens: u64,
    /// Sequences they belong to.
    pub sequences: u64,
    /// KV tokens that decoding sequences read.
    pub kv_tokens: u64,
    /// Sum over prompts of `(cached + new)² − cached²`.
    pub pairs: u64,
}

impl StepLoad {
    /// Adds consecutive tokens of one sequence. One token after others that draws the next is a
    /// decode step; everything else is prefill.
    pub fn add(&mut self, position: u32, tokens: u32, draws: bool) {
        let (cached, new) = (u64::from(position), u64::from(tokens));
        self.tokens = self.tokens.saturating_add(new);
        self.sequences = self.sequences.saturating_add(1);
        if tokens == 1 && position > 0 && draws {
            self.kv_tokens = self.kv_tokens.saturating_add(cached + 1);
        } else {
            let pairs = (2 * cached + new).saturating_mul(new);
            self.pairs = self.pairs.saturating_add(pairs);
        }
    }

    /// The load of a plan.
    pub fn of_plan(plan: &StepPlan) -> Self {
        let mut load = Self::default();
        for item in &plan.items {
            load.add(item.position, item.tokens, item.sample.is_some());
        }
        load
    }
}

impl StepModel {
    /// Time of one step; zero for one that computes nothing.
    pub fn step_time(&self, load: &StepLoad) -> Duration {
        if load.tokens == 0 {
            return Duration::ZERO;
        }
        // Counts are far below 2^53, where floats stop being exact.
        let ms = self.base_ms
            + self.weights_ms.max(self.per_token_ms * load.tokens as f64)
            + self.per_sequence_ms * load.sequences as f64
            + self.per_kv_token_ms * load.kv_tokens as f64
            + self.per_pair_ms * load.pairs as f64;
        Duration::try_from_secs_f64(ms / 1000.0).unwrap_or(Duration::ZERO)
    }

    /// Whether every coefficient is a number at or above zero.
    pub fn is_sound(&self) -> bool {
        [
            self.base_ms,
            self.weights_ms,
            self.per_token_ms,
            self.per_sequence_ms,
            self.per_kv_token_ms,
            self.per_pair_ms,
        ]
        .iter()
        .all(|part| part.is_finite() && *part >= 0.0)
    }
}
