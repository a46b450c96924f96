//! The list of scenarios; one behaviour of a whole mesh a file.
#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

mod any_node_serves;
mod bad_input_is_answered;
mod client_goes_away;
mod engine_servers;
mod fuzz;
mod host_is_lost;
mod leaving_in_order;
mod llama_engine;
mod llama_executor;
mod llama_moving;
mod overload_is_refused;
mod requests_move;
mod sim_engine;
mod source_rules;
