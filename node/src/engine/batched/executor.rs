//! What the batched engine asks of the thing that computes: one step at a time, and a vocabulary.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use shoal_gossip::RequestId;
use shoal_migrate::KvRange;

use crate::engine::moving::ExportedKv;
use crate::engine::work::SamplingParams;
use crate::engine::{EngineError, TokenLogprob};
use crate::openai::ChatMessage;

/// A place for one sequence in the engine's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// One step: forget some sequences, then compute some tokens of others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Slots whose KV is dropped before the items run.
    pub clear: Vec<Slot>,
    /// Work, in ascending order of slot; at most one item per slot.
    pub items: Vec<StepItem>,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct StepItem {
    /// Where its KV lives.
    pub slot: Slot,
    /// Whose it is; for the log.
    pub request: RequestId,
    /// Position of the first token. Zero means that the slot is empty.
    pub position: u32,
    /// The tokens to compute.
    pub tokens: Vec<u32>,
    /// Whether a token is drawn after the last one, and how.
    pub sample: Option<Sample>,
}

/// How to draw the token that follows an item.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Parameters of the request.
    pub params: Arc<SamplingParams>,
    /// Output index of the token to draw.
    pub index: u32,
    /// Where the output starts: tokens at earlier positions are prompt (penalties treat them apart).
    pub prompt_len: u32,
}

/// A token drawn by a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// For which slot.
    pub slot: Slot,
    /// The token.
    pub id: u32,
    /// When the parameters asked for it.
    pub logprob: Option<TokenLogprob>,
}

/// Computes steps. Owned by the engine thread; may block for as long as the step takes.
pub trait Executor: Send + 'static {
    /// Runs one step and draws the tokens it asks for, in the order of its items.
    ///
    /// # Errors
    /// The engine is broken for good: every job fails and the node says so in its summary.
    fn step(&mut self, step: &Step) -> Result<Vec<Sampled>, EngineError>;

    /// The form in which its KV travels; `None` when it does not, and the methods below are not called then.
    fn kv_form(&self) -> Option<Arc<dyn KvForm>> {
        None
    }

    /// Takes out the KV of a slot, at least that of the range, quickly: [`KvForm::cut`] does the rest elsewhere.
    ///
    /// # Errors
    /// See [`KvFault`]; the slot is unchanged.
    fn export(&mut self, slot: Slot, range: KvRange) -> Result<Vec<u8>, KvFault> {
        Err(no_kv(slot, range.tokens().0))
    }

    /// Puts in KV that follows what the slot holds, as [`KvForm`] checked (and joined) it.
    ///
    /// # Errors
    /// See [`KvFault`]; the slot must be cleared before it is used again.
    fn import(&mut self, slot: Slot, range: KvRange, kv: &[u8]) -> Result<(), KvFault> {
        Err(no_kv(
            slot,
            range
                .tokens()
                .0
                .min(u32::try_from(kv.len()).unwrap_or(u32::MAX)),
        ))
    }

    /// Learns of which tokens the imported KV of a slot is, when all of it is there.
    ///
    /// # Errors
    /// See [`KvFault`]; the slot must be cleared before it is used again.
    fn adopt(&mut self, slot: Slot, ids: &[u32]) -> Result<(), KvFault> {
        Err(no_kv(slot, u32::try_from(ids.len()).unwrap_or(u32::MAX)))
    }
}

fn no_kv(slot: Slot, tokens: u32) -> KvFault {
    KvFault::Unfit(format!(
        "the engine moves no KV, asked for {tokens} tokens of slot {}",
        slot.0
    ))
}

/// Why KV did not go in or out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvFault {
    /// These bytes will not do; the engine is well.
    #[error("{0}")]
    Unfit(String),
    /// The engine is broken for good.
    #[error("{0}")]
    Broken(String),
}

/// How an executor takes KV in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvImport {
    /// Stage by stage, in order.
    Stages,
    /// All stages at once, joined by [`KvForm::join`].
    Whole,
}

/// The form in which an executor's KV travels: all that can be done with it away from the engine thread.
/// Shared by all threads. What comes in is from a peer, and is checked here before the executor sees it.
pub trait KvForm: Send + Sync + fmt::Debug + 'static {
    /// Bytes that the KV of one token takes on the way.
    fn bytes_per_token(&self) -> u32;

    /// How its executor takes KV in.
    fn takes(&self) -> KvImport;

    /// Makes what travels for a range, of what [`Executor::export`] gave for it.
    ///
    /// # Errors
    /// What was exported is not what it should be.
    fn cut(&self, exported: Vec<u8>, range: KvRange) -> Result<Bytes, String>;

    /// Checks all of what arrived that can be told without the ids.
    ///
    /// # Errors
    /// What is wrong with it.
    fn check(&self, kv: &ExportedKv) -> Result<(), String>;

    /// Makes one import of checked stages that follow each other from zero.
    ///
    /// # Errors
    /// They do not fit together.
    fn join(&self, slot: Slot, stages: &[ExportedKv]) -> Result<Bytes, String>;
}

/// The vocabulary: text to ids and back. Shared by all threads.
pub trait TextModel: Send + Sync + fmt::Debug + 'static {
    /// Ids of a conversation, by the model's chat template, ready for the assistant's answer.
    ///
    /// # Errors
    /// `BadRequest` when the template refuses the messages.
    fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, EngineError>;

    /// Ids of plain text, with the special token that starts a sequence if the model wants one.
    /// Control tokens written in the text are text, not control.
    ///
    /// # Errors
    /// `BadRequest` when the text cannot be encoded.
    fn encode_text(&self, text: &str) -> Result<Vec<u32>, EngineError>;

    /// Bytes of one token; empty for control tokens. May be part of a UTF-8 character.
    fn piece(&self, id: u32) -> Vec<u8>;

    /// Whether the token ends the output.
    fn is_end(&self, id: u32) -> bool;

    /// Number of ids; every id is below it.
    fn vocabulary(&self) -> u32;
}
