//! The `shoal` binary. Everything is in the library.

use std::process::ExitCode;

use shoal_node::cli;
use shoal_node::config::NodeConfig;

fn main() -> ExitCode {
    cli::main(serve)
}

fn serve(_config: NodeConfig) -> ExitCode {
    tracing::error!("the node is not wired yet");
    ExitCode::FAILURE
}
