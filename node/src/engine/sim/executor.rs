//! What computes in the simulated engine: waits as long as the step would take, and draws tokens
//! that depend on every token before them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_migrate::KvRange;

use crate::engine::batched::{
    Executor, KvFault, KvForm, Sample, Sampled, Slot, Step, StepItem, TextModel,
};
use crate::engine::sim::kv::SimKv;
use crate::engine::sim::text::{END, FIRST_WORD};
use crate::engine::sim::{SimText, StepLoad, StepModel};
use crate::engine::{EngineError, TokenLogprob};

/// Stands for the KV of a sequence: as with a real one, the next token is a function of it, so a
/// token that was left out, repeated or computed in the wrong slot changes everything after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Kv {
    /// Digest of all tokens up to and with this one, of each.
    digests: Vec<u64>,
}

impl Kv {
    fn digest(&self) -> u64 {
        self.digests.last().copied().unwrap_or(0)
    }

    fn extend(&mut self, ids: &[u32]) {
        let mut digest = self.digest();
        self.digests.extend(ids.iter().map(|id| {
            digest = mix(digest ^ u64::from(*id).wrapping_add(1));
            digest
        }));
    }
}

/// The executor of the simulated engine.
#[derive(Debug)]
pub struct SimExecutor {
    model: StepModel,
    speed: f64,
    mean_output: u32,
    kv: Option<SimKv>,
    slots: BTreeMap<Slot, Kv>,
}

impl SimExecutor {
    /// Runs `speed` times as fast as the model says, without any wait if zero. Outputs end by
    /// themselves after `mean_output` tokens on average, never if zero.
    pub fn new(model: StepModel, speed: f64, mean_output: u32) -> Self {
        Self {
            model,
            speed,
            mean_output,
            kv: None,
            slots: BTreeMap::new(),
        }
    }

    /// Its KV travels in this form.
    #[must_use]
    pub fn with_kv(mut self, kv: SimKv) -> Self {
        self.kv = Some(kv);
        self
    }

    fn compute(&mut self, item: &StepItem) -> Result<Option<Sampled>, EngineError> {
        let kv = self.slots.entry(item.slot).or_default();
        if kv.digests.len() != item.position as usize {
            let message = format!(
                "tokens at position {} of slot {}, which holds {}",
                item.position,
                item.slot.0,
                kv.digests.len()
            );
            return Err(EngineError::Broken(message));
        }
        kv.extend(&item.tokens);
        let digest = kv.digest();
        Ok(item.sample.as_ref().map(|sample| Sampled {
            slot: item.slot,
            id: draw(digest, sample, self.mean_output),
            logprob: logprobs(digest, sample, self.mean_output),
        }))
    }

    fn wait(&self, step: &Step) {
        let mut load = StepLoad::default();
        for item in &step.items {
            let tokens = u32::try_from(item.tokens.len()).unwrap_or(u32::MAX);
            load.add(item.position, tokens, item.sample.is_some());
        }
        if self.speed > 0.0 {
            let seconds = self.model.step_time(&load).as_secs_f64() / self.speed;
            std::thread::sleep(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO));
        }
    }
}

impl Executor for SimExecutor {
    fn step(&mut self, step: &Step) -> Result<Vec<Sampled>, EngineError> {
        for slot in &step.clear {
            self.slots.remove(slot);
        }
        let mut sampled = Vec::new();
        for item in &step.items {
            sampled.extend(self.compute(item)?);
        }
        self.wait(step);
        Ok(sampled)
    }

    fn kv_form(&self) -> Option<Arc<dyn KvForm>> {
        Some(Arc::new(self.kv?))
    }

    fn export(&mut self, slot: Slot, range: KvRange) -> Result<Vec<u8>, KvFault> {
        let held = self.slots.get(&slot).map_or(&[][..], |kv| &kv.digests);
        let wanted = held.get(range.start().0 as usize..range.end().0 as usize);
        let digests = wanted.ok_or_else(|| {
            let held = held.len();
            KvFault::Broken(format!("KV up to {} of a slot of {held}", range.end()))
        })?;
        Ok(digests
            .iter()
            .flat_map(|digest| digest.to_le_bytes())
            .collect())
    }

    fn import(&mut self, slot: Slot, range: KvRange, kv: &[u8]) -> Result<(), KvFault> {
        let form = self
            .kv
            .ok_or_else(|| KvFault::Unfit("it takes in no KV".to_owned()))?;
        let held = self.slots.entry(slot).or_default();
        if held.digests.len() != range.start().0 as usize {
            let message = format!(
                "KV from {} on for a slot of {}",
                range.start(),
                held.digests.len()
            );
            return Err(KvFault::Broken(message));
        }
        held.digests.extend(form.digests(kv));
        Ok(())
    }

    fn adopt(&mut self, slot: Slot, ids: &[u32]) -> Result<(), KvFault> {
        let mut own = Kv::default();
        own.extend(ids);
        if self.slots.get(&slot) == Some(&own) {
            Ok(())
        } else {
            Err(KvFault::Unfit("the KV is that of other tokens".to_owned()))
        }
    }
}

/// The next token: a function of all tokens before it and, unless greedy, of the seed.
fn draw(digest: u64, sample: &Sample, mean_output: u32) -> u32 {
    let params = &sample.params;
    let mut random = mix(digest);
    if params.temperature > 0.0 {
        random = mix(random ^ mix(params.seed));
    }
    // Lengths are geometric: about as many as wanted on average, many short ones, a few long ones.
    let may_end = mean_output > 0 && sample.index > 0 && !params.ignore_eos;
    if may_end && mix(random).is_multiple_of(u64::from(mean_output)) {
        return END;
    }
    FIRST_WORD + word(random)
}

fn word(random: u64) -> u32 {
    u32::try_from(random % u64::from(SimText::words())).unwrap_or(0)
}

/// Each alternative half as likely as the one before: 1/2, 1/4, 1/8 and so on.
fn logprobs(digest: u64, sample: &Sample, mean_output: u32) -> Option<TokenLogprob> {
    let alternatives = sample.params.logprobs?;
    let chosen = draw(digest, sample, mean_output);
    let text = |id| String::from_utf8_lossy(&SimText.piece(id)).into_owned();
    let others = (1..).map(|n: u32| FIRST_WORD + (word(mix(digest)) + n) % SimText::words());
    let ranked = std::iter::once(chosen).chain(others.filter(|id| *id != chosen));
    let top = (1u8..)
        .zip(ranked)
        .take(usize::from(alternatives))
        .map(|(rank, id)| (text(id), -f32::from(rank) * std::f32::consts::LN_2))
        .collect();
    Some(TokenLogprob {
        token: text(chosen),
        logprob: -std::f32::consts::LN_2,
        top,
    })
}

/// SplitMix64's finaliser: every bit of the result depends on every bit of `value`.
pub(crate) fn mix(value: u64) -> u64 {
    let mut bits = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
