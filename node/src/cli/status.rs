//! `shoal status`: the mesh as one of its nodes sees it.

mod table;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use crate::cli::fetch::{self, FetchError, NodeArgs, Question};

/// Flags of `shoal status`.
#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// See [`NodeArgs`].
    #[command(flatten)]
    at: NodeArgs,

    /// Print what the node said, as JSON.
    #[arg(long)]
    json: bool,

    /// Time the node has to answer, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    timeout_ms: u64,
}

/// Runs `shoal status`.
pub(super) fn run(args: &StatusArgs) -> ExitCode {
    fetch::run(report(args))
}

async fn report(args: &StatusArgs) -> Result<String, FetchError> {
    let question = Question {
        at: &args.at,
        path: "/mesh/nodes",
        body: None,
        deadline: Duration::from_millis(args.timeout_ms),
    };
    let body = fetch::ask(&question).await?;
    let not_a_node = || FetchError::NotANode {
        url: args.at.node.clone(),
    };
    let view = serde_json::from_slice(&body).map_err(|_| not_a_node())?;
    let table = table::render(&view).ok_or_else(not_a_node)?;
    match args.json {
        true => Ok(format!("{}\n", String::from_utf8_lossy(&body).trim_end())),
        false => Ok(table),
    }
}

#[cfg(test)]
mod tests;
