//! The `shoal` binary. Everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    shoal_node::cli::main(shoal_node::node::run)
}
