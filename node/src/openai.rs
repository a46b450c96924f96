//! OpenAI's request and response bodies: what clients send, checked, and what they get back.

mod request;
mod response;
mod sketch;

pub use request::{
    ChatMessage, GenerateRequest, MAX_LOGPROBS, MAX_MODEL_NAME, MAX_STOP_BYTES, MAX_STOPS,
    PromptInput, parse,
};
pub use response::{ChunkWriter, Envelope, Usage, WholeAnswer, done, event};
pub use sketch::Sketch;
