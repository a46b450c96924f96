//! Client bodies, parsed and checked. Unknown fields are left alone: the body itself travels on.

use crate::engine::EngineError;
use crate::engine::work::{Priority, RequestKind, SamplingParams};

/// One message of a conversation. `content` is the text of all text parts joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or `developer`.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// What the model is to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptInput {
    /// A conversation.
    Chat(Vec<ChatMessage>),
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A client body as far as the mesh reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The model asked for.
    pub model: String,
    /// What to continue.
    pub prompt: PromptInput,
    /// How to sample. `params.max_tokens` and `params.seed` are meaningless here; see the next fields.
    pub params: SamplingParams,
    /// `max_tokens` or `max_completion_tokens`, if given.
    pub max_tokens: Option<u32>,
    /// `seed`, if given.
    pub seed: Option<u64>,
    /// Rank.
    pub priority: Priority,
    /// Server-sent events or one body.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
}

/// Reads a body.
///
/// # Errors
/// [`EngineError::BadRequest`] with the field to blame.
pub fn parse(kind: RequestKind, body: &[u8]) -> Result<GenerateRequest, EngineError> {
    let _ = (kind, body);
    Err(EngineError::NotReady)
}
