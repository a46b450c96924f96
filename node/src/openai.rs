//! OpenAI's request and response bodies: what clients send, checked, and what they get back.

mod request;

pub use request::{ChatMessage, GenerateRequest, PromptInput, parse};
