//! The embedded engine: llama.cpp inside this process.
//!
//! [`start`] loads a model and runs it. [`load`] checks the file, loads it and gives the parts that
//! the batched engine is made of: an [`LlamaExecutor`] that computes steps on the engine thread, and
//! an [`LlamaText`] that every thread may ask. Nothing that comes from outside reaches llama.cpp unchecked, because some of its
//! errors end the process.
//!
//! What is not here: queues, block accounting and preemption (the batch core).

mod config;
mod executor;
mod gguf;
mod kv;
mod model;
mod native;
mod sampler;
mod slots;
mod template;
mod vocabulary;

pub use config::{
    CELL_GRANULE, LlamaConfig, LlamaConfigError, LlamaLayout, MAX_CONTEXT_TOKENS, MAX_SEQUENCES,
    MAX_STEP_TOKENS, MAX_THREADS,
};
pub use executor::LlamaExecutor;
pub use gguf::GgufError;
pub use model::{LlamaLoadError, LlamaParts, load, start};
pub use vocabulary::LlamaText;
