//! The command line: one binary, one sub-command for each job.
//!
//! Exit status: 0 done, 1 could not be done (the reason is on standard error), 2 the command line
//! itself is wrong.

mod bench;
mod drain;
mod fetch;
mod keygen;
mod load;
mod logging;
mod migrate;
mod node;
mod output;
mod simulate;
mod status;
mod vllm_args;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::NodeConfig;

/// A mesh of nodes that serve one LLM together: start one node per host, ask any of them.
#[derive(Debug, Parser)]
#[command(name = "shoal", version)]
struct Cli {
    #[command(subcommand)]
    job: Job,
}

#[derive(Debug, Subcommand)]
enum Job {
    /// Run a node of the mesh, until SIGTERM or Ctrl-C.
    Node(Box<node::NodeArgs>),
    /// Have a node hand over what it runs, and stop.
    Drain(drain::DrainArgs),
    /// Make the key that admits nodes to a mesh.
    Keygen(keygen::KeygenArgs),
    /// Measure this program by itself.
    Bench(bench::BenchArgs),
    /// Move one running request to another node.
    Migrate(migrate::MigrateArgs),
    /// Run a whole mesh in virtual time, and compare ways of scheduling.
    Simulate(Box<simulate::SimulateArgs>),
    /// Show the mesh as one of its nodes sees it.
    Status(status::StatusArgs),
    /// Print the arguments with which a vLLM lets a node move its running requests with their KV.
    VllmArgs(vllm_args::VllmArgs),
}

/// Does what the process was called for. `serve` runs a node to its end.
pub fn main(serve: impl FnOnce(NodeConfig) -> ExitCode) -> ExitCode {
    let matches = Cli::command().get_matches();
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match cli.job {
        Job::Node(args) => node::run(&args, &matches, serve),
        Job::Bench(args) => bench::run(&args),
        Job::Drain(args) => drain::run(&args),
        Job::Keygen(args) => keygen::run(&args),
        Job::Migrate(args) => migrate::run(&args),
        Job::Simulate(args) => simulate::run(&args),
        Job::Status(args) => status::run(&args),
        Job::VllmArgs(args) => vllm_args::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_misspelt_flag_is_answered_with_the_right_one() {
        let error = Cli::try_parse_from(["shoal", "node", "--http-prot", "1"]).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("--http-prot") && text.contains("--http-port"),
            "{text}"
        );
        let error = Cli::try_parse_from(["shoal", "stats"]).unwrap_err();
        assert!(error.to_string().contains("status"), "{error}");
    }
}
