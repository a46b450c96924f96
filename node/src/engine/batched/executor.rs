//! What the batched engine asks of the thing that computes: one step at a time, and a vocabulary.

use std::fmt;
use std::sync::Arc;

use shoal_gossip::RequestId;

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
