//! Computes steps with llama.cpp. Owned by the engine thread.

use std::sync::Arc;

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;

use shoal_migrate::KvRange;

use crate::engine::batched::{
    Executor, KvFault, KvForm, KvImport, Sample, Sampled, Slot, Step, StepItem, TextModel,
};
use crate::engine::llama::config::LlamaLayout;
use crate::engine::llama::kv::{KvShape, LlamaKv};
use crate::engine::llama::native;
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
    /// How KV travels, when this model's can.
    kv: Option<Arc<LlamaKv>>,
    /// The sequence through which parts go in and out of a shared pool.
    scratch: i32,
}

impl LlamaExecutor {
    pub(super) fn new(
        context: LlamaContext<'static>,
        layout: LlamaLayout,
        text: Arc<LlamaText>,
    ) -> Self {
        // llama.cpp may have made the batch smaller than asked for: to the size of the KV.
        let step_tokens = context.n_batch() as usize;
        let mut executor = Self {
            context,
            batch: LlamaBatch::new(step_tokens, 1),
            slots: Slots::new(layout, text.vocabulary(), step_tokens),
            sampler: Sampler::default(),
            text,
            kv: None,
            scratch: layout.slots as i32,
        };
        match executor.learn_kv() {
            Ok(shape) => executor.kv = Some(Arc::new(LlamaKv::new(shape))),
            Err(why) => {
                tracing::warn!(target: "shoal::llama", why, "requests of this model move without their KV");
            }
        }
        executor
    }

    /// Computes one token to see what its KV looks like.
    fn learn_kv(&mut self) -> Result<KvShape, String> {
        self.batch.clear();
        let added = self.batch.add(LlamaToken(0), 0, &[0], true);
        added.map_err(|error| error.to_string())?;
        let decoded = self.context.decode(&mut self.batch);
        decoded.map_err(|error| error.to_string())?;
        let mut state = Vec::new();
        let exported = native::export_sequence(&self.context, 0, &mut state);
        self.context.clear_kv_cache();
        exported?;
        KvShape::learn(&state)
    }

    /// Exports a part of a slot in a shared pool: a scratch sequence shares its cells for a moment.
    fn export_part(
        &mut self,
        slot: Slot,
        range: KvRange,
        buffer: &mut Vec<u8>,
    ) -> Result<(), String> {
        let (start, end) = (Some(range.start().0), Some(range.end().0));
        self.context
            .kv_cache_seq_cp(sequence(slot), self.scratch, start, end)
            .map_err(|error| error.to_string())?;
        let exported = native::export_sequence(&self.context, self.scratch, buffer);
        self.clear_scratch()?;
        exported
    }

    /// Imports a part into a slot of a shared pool: a scratch sequence takes it in and hands its cells over.
    fn import_part(&mut self, slot: Slot, kv: &[u8]) -> Result<(), KvFault> {
        native::import_sequence(&mut self.context, self.scratch, kv).map_err(KvFault::Unfit)?;
        let given = self
            .context
            .kv_cache_seq_cp(self.scratch, sequence(slot), None, None)
            .map_err(|error| KvFault::Broken(error.to_string()));
        self.clear_scratch().map_err(KvFault::Broken)?;
        given
    }

    fn clear_scratch(&mut self) -> Result<(), String> {
        self.context
            .kv_cache_seq_rm(self.scratch, None, None)
            .map_err(|error| error.to_string())
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

    fn kv_form(&self) -> Option<Arc<dyn KvForm>> {
        let kv = self.kv.clone()?;
        Some(kv)
    }

    fn export(&mut self, slot: Slot, range: KvRange) -> Result<Vec<u8>, KvFault> {
        let held = self.slots.held(slot).len();
        let kv = match &self.kv {
            Some(kv) if range.end().0 as usize <= held => Arc::clone(kv),
            Some(_) | None => {
                let message = format!("KV up to {} of a slot of {held}", range.end());
                return Err(KvFault::Broken(message));
            }
        };
        let mut buffer = kv.buffer();
        let exported = match kv.takes() {
            KvImport::Stages => self.export_part(slot, range, &mut buffer),
            KvImport::Whole => native::export_sequence(&self.context, sequence(slot), &mut buffer),
        };
        exported.map_err(KvFault::Broken)?;
        Ok(buffer)
    }

    fn import(&mut self, slot: Slot, range: KvRange, kv: &[u8]) -> Result<(), KvFault> {
        let Some(form) = self.kv.clone() else {
            return Err(KvFault::Unfit("this model takes in no KV".to_owned()));
        };
        self.slots
            .check_import(slot, range)
            .map_err(KvFault::Broken)?;
        match form.takes() {
            KvImport::Stages => self.import_part(slot, kv)?,
            KvImport::Whole => native::import_sequence(&mut self.context, sequence(slot), kv)
                .map_err(KvFault::Unfit)?,
        }
        self.slots.import(slot, range.tokens().0 as usize);
        Ok(())
    }

    fn adopt(&mut self, slot: Slot, ids: &[u32]) -> Result<(), KvFault> {
        if self.slots.adopt(slot, ids) {
            Ok(())
        } else {
            Err(KvFault::Unfit("KV of another number of tokens".to_owned()))
        }
    }
}

/// llama.cpp's name for a slot. Slots are checked to exist, and there are at most 256.
fn sequence(slot: Slot) -> i32 {
    slot.0 as i32
}

fn broken(error: impl std::fmt::Display) -> EngineError {
    EngineError::Broken(error.to_string())
}
