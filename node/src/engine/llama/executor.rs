//! Computes steps with llama.cpp. Owned by the engine thread.

use std::sync::Arc;

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;

use crate::engine::batched::{Executor, Sample, Sampled, Slot, Step, StepItem, TextModel};
use crate::engine::llama::config::LlamaLayout;
use crate::engine::llama::sampler::{self, History, Sampler};
use crate::engine::llama::slots::Slots;
use crate::engine::llama::vocabulary::LlamaText;
use crate::engine::{EngineError, TokenLogprob};

/// One llama.cpp context, with what each of its slots holds.
///
/// A step that llama.cpp could not survive is refused before it is touched, with
/// [`EngineError::Broken`]: the batch core has a defect then.
#[derive(Debug)]
pub struct LlamaExecutor {
    context: LlamaContext<'static>,
    batch: LlamaBatch<'static>,
    slots: Slots,
    sampler: Sampler,
    text: Arc<LlamaText>,
}

impl LlamaExecutor {
    pub(super) fn new(
        context: LlamaContext<'static>,
        layout: LlamaLayout,
        text: Arc<LlamaText>,
    ) -> Self {
        // llama.cpp may have made the batch smaller than asked for: to the size of the KV.
        let step_tokens = context.n_batch() as usize;
        Self {
            context,
            batch: LlamaBatch::new(step_tokens, 1),
            slots: Slots::new(layout, text.vocabulary(), step_tokens),
            sampler: Sampler::default(),
            text,
        }
    }

    fn clear(&mut self, slot: Slot) -> Result<(), EngineError> {
        self.context
            .kv_cache_seq_rm(sequence(slot), None, None)
            .map_err(broken)?;
        self.slots.clear(slot);
        Ok(())
    }

    fn compute(&mut self, items: &[StepItem]) -> Result<(), EngineError> {
        self.batch.clear();
        for item in items {
            let last = item.tokens.len() - 1;
            for ((offset, &id), position) in item.tokens.iter().enumerate().zip(item.position..) {
                let draws = offset == last && item.sample.is_some();
                // Checked to be below the vocabulary and the context, so both fit.
                let token = LlamaToken(id as i32);
                self.batch
                    .add(token, position as i32, &[sequence(item.slot)], draws)
                    .map_err(broken)?;
            }
        }
        self.context.decode(&mut self.batch).map_err(broken)?;
        for item in items {
            self.slots.extend(item);
        }
        Ok(())
    }

    fn draw(&mut self, slot: Slot, sample: &Sample, logits_at: i32) -> Sampled {
        let held = self.slots.held(slot);
        let (prompt, output) = held.split_at(held.len().min(sample.prompt_len as usize));
        let params = &*sample.params;
        let logits = self.context.get_logits_ith(logits_at);
        let history = History { prompt, output };
        let id = self.sampler.draw(logits, history, params, sample.index);
        let logprob = params.logprobs.map(|top| {
            let logprobs = sampler::logprobs(logits, id, usize::from(top));
            TokenLogprob {
                token: self.shown(id),
                logprob: logprobs.chosen,
                top: logprobs
                    .top
                    .into_iter()
                    .map(|(id, logprob)| (self.shown(id), logprob))
                    .collect(),
            }
        });
        Sampled { slot, id, logprob }
    }

    fn shown(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.text.piece(id)).into_owned()
    }
}

impl Executor for LlamaExecutor {
    fn step(&mut self, step: &Step) -> Result<Vec<Sampled>, EngineError> {
        self.slots.check(step).map_err(broken)?;
        for &slot in &step.clear {
            self.clear(slot)?;
        }
        if step.items.is_empty() {
            return Ok(Vec::new());
        }
        self.compute(&step.items)?;
        let mut end = 0;
        let mut drawn = Vec::new();
        for item in &step.items {
            end += item.tokens.len() as i32;
            if let Some(sample) = &item.sample {
                drawn.push(self.draw(item.slot, sample, end - 1));
            }
        }
        Ok(drawn)
    }
}

/// llama.cpp's name for a slot. Slots are checked to exist, and there are at most 256.
fn sequence(slot: Slot) -> i32 {
    slot.0 as i32
}

fn broken(error: impl std::fmt::Display) -> EngineError {
    EngineError::Broken(error.to_string())
}
