//! Engines that run many sequences in one batch: the shell around the batch core.
//!
//! [`Batcher`] decides, [`BatchedEngine`] acts: one thread owns the [`Executor`] and does nothing but
//! plan, compute and hand out. What computes is a parameter, so the embedded llama.cpp and the
//! simulated engine differ in their executor and vocabulary only.

mod acts;
mod core;
mod engine;
mod executor;
mod job;
mod jobs;
mod moving;
mod prepare;
#[cfg(test)]
mod tests;
mod thread;

pub use self::core::{
    BatchConfig, BatchConfigError, Batcher, Drawn, Hold, Layout, NoRoom, PlanItem, SeqKey, SeqSpec,
    Standing, StepPlan, SubmitRefusal,
};
pub use self::engine::BatchedEngine;
pub use self::executor::{
    Executor, KvFault, KvForm, KvImport, Sample, Sampled, Slot, Step, StepItem, TextModel,
};
