//! What the scenario tests are written in: meshes in one process, a client, and waiting.
#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "test support: a failure here is a failed test"
)]

pub mod client;
pub mod cluster;
pub mod engine_contract;
pub mod engine_server;
pub mod fuzz;
pub mod source_rules;
pub mod tiny_gguf;
pub mod wait;
