//! The list of scenarios; one behaviour of a whole mesh a file.
#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod llama_executor;
