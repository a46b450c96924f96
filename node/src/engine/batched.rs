//! Engines that run many sequences in one batch: the shell around the batch core.
mod executor;
pub use executor::{Executor, Sample, Sampled, Slot, Step, StepItem, TextModel};
