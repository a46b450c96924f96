//! `shoal drain`: has a node hand over what it runs, and stop.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use shoal_gossip::{Clock, MonotonicClock, NodeId, Timestamp};
use tokio::time::sleep;

use crate::cli::fetch::{self, FetchError, NodeArgs, Question};

/// Time between two looks whether the node has left.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Time that one look may take.
const LOOK_PATIENCE: Duration = Duration::from_secs(5);

/// Flags of `shoal drain`.
#[derive(Debug, Args)]
pub(super) struct DrainArgs {
    /// The node that should stop, as `shoal status` lists it [default: the one that is asked].
    #[arg(value_name = "NODE")]
    which: Option<NodeId>,

    /// See [`NodeArgs`].
    #[command(flatten)]
    at: NodeArgs,

    /// Return as soon as the node has begun.
    #[arg(long)]
    no_wait: bool,

    /// Time the node has to leave, in milliseconds. It goes on when this is over, up to its --shutdown-deadline-ms.
    #[arg(long, value_name = "MS", default_value_t = 60_000)]
    timeout_ms: u64,
}

/// Runs `shoal drain`.
pub(super) fn run(args: &DrainArgs) -> ExitCode {
    fetch::run(drain(args))
}

async fn drain(args: &DrainArgs) -> Result<String, FetchError> {
    let deadline = Duration::from_millis(args.timeout_ms);
    let body = match args.which {
        Some(node) => json!({ "node": node.to_string() }),
        None => json!({}),
    };
    let question = Question {
        at: &args.at,
        path: "/mesh/drain",
        body: Some(body.to_string()),
        deadline: deadline.min(LOOK_PATIENCE),
    };
    let answer = fetch::ask(&question).await?;
    let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
    let Some(node) = answer.get("node").and_then(Value::as_str) else {
        return Err(FetchError::NotANode {
            url: args.at.node.clone(),
        });
    };
    if args.no_wait {
        return Ok(format!("{node} hands over what it has, and stops then\n"));
    }
    let clock = MonotonicClock::start();
    loop {
        let took = clock.now().since(Timestamp::ZERO);
        if is_gone(args, node).await? {
            return Ok(format!(
                "{node} has left the mesh after {:.1} s\n",
                took.as_secs_f64()
            ));
        }
        if took >= deadline {
            return Err(FetchError::Refused {
                message: format!(
                    "{node} is still in the mesh after {} ms; it stops by its --shutdown-deadline-ms at the latest",
                    args.timeout_ms
                ),
            });
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Whether the node has left. One that was asked about itself has when it no longer answers.
async fn is_gone(args: &DrainArgs, node: &str) -> Result<bool, FetchError> {
    let look = Question {
        at: &args.at,
        path: "/mesh/nodes",
        body: None,
        deadline: LOOK_PATIENCE,
    };
    let view: Value = match fetch::ask(&look).await {
        Ok(view) => serde_json::from_slice(&view).unwrap_or_default(),
        Err(FetchError::Unreachable { .. } | FetchError::Silent { .. }) if args.which.is_none() => {
            return Ok(true);
        }
        Err(error) => return Err(error),
    };
    let rows = view.get("nodes").and_then(Value::as_array);
    Ok(rows.is_some_and(|rows| {
        rows.iter()
            .all(|row| row.get("node").and_then(Value::as_str) != Some(node))
    }))
}
