//! `shoal migrate`: moves one running request to another node.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Deserialize;
use serde_json::json;
use shoal_gossip::{NodeId, RequestId};

use crate::cli::fetch::{self, FetchError, NodeArgs, Question};

/// Flags of `shoal migrate`.
#[derive(Debug, Args)]
pub(super) struct MigrateArgs {
    /// The request, as `GET /mesh/requests` lists it.
    #[arg(value_name = "REQUEST")]
    request: RequestId,

    /// The node that should run it, as `shoal status` lists it.
    #[arg(long, value_name = "NODE")]
    to: NodeId,

    /// See [`NodeArgs`].
    #[command(flatten)]
    at: NodeArgs,

    /// Print what the node said, as JSON.
    #[arg(long)]
    json: bool,

    /// Time the move may take, in milliseconds. It goes on when this is over.
    #[arg(long, value_name = "MS", default_value_t = 40_000)]
    timeout_ms: u64,
}

/// Runs `shoal migrate`.
pub(super) fn run(args: &MigrateArgs) -> ExitCode {
    fetch::run(ask(args))
}

/// What a node tells of a move.
#[derive(Deserialize)]
struct Moved {
    pause_ms: f64,
    total_ms: f64,
    bytes: u64,
    stages: u32,
    tokens: u32,
    direct_tokens: u32,
}

async fn ask(args: &MigrateArgs) -> Result<String, FetchError> {
    let path = format!("/mesh/requests/{}/migrate", args.request);
    let question = Question {
        at: &args.at,
        path: &path,
        body: Some(json!({ "to": args.to.to_string() }).to_string()),
        deadline: Duration::from_millis(args.timeout_ms),
    };
    let body = fetch::ask(&question).await?;
    if args.json {
        return Ok(format!("{}\n", String::from_utf8_lossy(&body).trim_end()));
    }
    let moved: Moved = serde_json::from_slice(&body).map_err(|_| FetchError::NotANode {
        url: args.at.node.clone(),
    })?;
    let direct = match moved.direct_tokens {
        0 => String::new(),
        tokens => format!(" (KV of {tokens} from engine to engine)"),
    };
    Ok(format!(
        "{} runs on {} now: {} tokens{direct}, {} bytes in {} stages, {:.1} ms in all, paused for {:.1} ms\n",
        args.request,
        args.to,
        moved.tokens,
        moved.bytes,
        moved.stages,
        moved.total_ms,
        moved.pause_ms
    ))
}
