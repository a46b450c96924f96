//! What the scenario tests share.

pub mod tiny_gguf;
