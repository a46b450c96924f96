//! Runs a node until a signal ends it.

use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, info, warn};

use crate::config::NodeConfig;
use crate::node::Node;

/// How long the process waits for what is left on its threads: a step of a large model on a slow machine.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

/// Runs a node until SIGTERM or Ctrl-C, then ends it in order. A second signal ends it at once.
pub fn run(config: NodeConfig) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            error!(%error, "no threads to run on");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(serve(config));
    // Tasks are dropped and the engine's last step ends; blocking work that is left (a model being read)
    // must not hold up the exit for longer.
    runtime.shutdown_timeout(EXIT_PATIENCE);
    code
}

async fn serve(config: NodeConfig) -> ExitCode {
    let signals = signal(SignalKind::terminate())
        .and_then(|terminate| Ok((terminate, signal(SignalKind::interrupt())?)));
    let (mut terminate, mut interrupt) = match signals {
        Ok(signals) => signals,
        Err(error) => {
            error!(%error, "cannot listen for signals");
            return ExitCode::FAILURE;
        }
    };
    let started = tokio::select! {
        biased;
        name = either(&mut terminate, &mut interrupt) => {
            info!(signal = name, "stopped before it had started");
            return ExitCode::SUCCESS;
        }
        started = Node::start(config) => started,
    };
    let mut node = match started {
        Ok(node) => node,
        Err(error) => {
            error!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let asked = node.asked_to_stop();
    let fatal = tokio::select! {
        biased;
        name = either(&mut terminate, &mut interrupt) => {
            info!(signal = name, "stopping; a second signal stops at once");
            None
        }
        () = asked => {
            info!("stopping, as an operator asked; a signal stops at once");
            None
        }
        reason = node.failed() => Some(reason),
    };
    let code = match fatal {
        Some(reason) => {
            error!("{reason}");
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    };
    tokio::select! {
        biased;
        name = either(&mut terminate, &mut interrupt) => {
            warn!(signal = name, "stopped at once; requests that still ran are lost");
            ExitCode::FAILURE
        }
        () = node.shutdown() => code,
    }
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}
