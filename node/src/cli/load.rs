//! `shoal bench load`: loads any OpenAI-compatible endpoints, and tells what their clients saw.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use shoal_gossip::MonotonicClock;
use tokio_util::sync::CancellationToken;

use crate::bench::load::{self, LoadArgs, LoadError, LoadResult};
use crate::cli::output::{Teller, write_file};
use crate::report::{self, Run, Summary};
use crate::workload::{Workload, WorkloadArgs, WorkloadError};

/// Flags of `shoal bench load`.
#[derive(Debug, Args)]
pub(super) struct LoadCommand {
    #[command(flatten)]
    workload: WorkloadArgs,

    #[command(flatten)]
    load: LoadArgs,

    /// Seed of lengths, arrivals and prompts. Another one makes prompts that no cache has seen.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Write every request to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Write a report with charts to this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("cannot start: {0}")]
    Start(io::Error),
    #[error(transparent)]
    Write(#[from] crate::cli::output::WriteError),
}

#[derive(Serialize)]
struct JsonReport<'a> {
    model: &'a str,
    summary: &'a Summary,
    late_starts: usize,
    worst_start_delay_s: f64,
    reasons: &'a std::collections::BTreeMap<String, String>,
    stopped: bool,
}

/// Sends the workload, and returns the text to print.
pub(super) fn run(command: &LoadCommand, json: bool) -> Result<String, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Failure::Start)?;
    let arrivals = Workload::new(&command.workload.spec()?, command.seed)?;
    let clock = Arc::new(MonotonicClock::start());
    let stop = CancellationToken::new();
    let mut teller = Teller::new(arrivals.size_hint().0);
    let told = move |ended: usize| teller.tell(ended);
    let options = command.load.options(command.seed);
    let result = runtime.block_on(async {
        let loading = load::run(options, arrivals, clock, told, stop.clone());
        tokio::pin!(loading);
        tokio::select! {
            biased;
            result = &mut loading => result,
            // What has come by then is told.
            Ok(()) = tokio::signal::ctrl_c() => {
                stop.cancel();
                loading.await
            }
        }
    })?;
    tell(command, &result, json)
}

fn tell(command: &LoadCommand, result: &LoadResult, json: bool) -> Result<String, Failure> {
    let ends = result
        .records
        .iter()
        .map(|record| record.at + record.end.unwrap_or_default());
    let span = ends.max().unwrap_or_default();
    let summary = Summary::of(&result.records, span).seen_from_outside();
    let run = Run {
        label: result.model.clone(),
        records: &result.records,
        summaries: std::slice::from_ref(&summary),
        series: None,
    };
    if let Some(path) = &command.csv {
        write_file(path, |out| report::csv::write(out, &result.records))?;
    }
    if let Some(path) = &command.html {
        write_file(path, |out| {
            report::html::write(out, "shoal bench load", std::slice::from_ref(&run))
        })?;
    }
    if json {
        let report = JsonReport {
            model: &result.model,
            summary: &summary,
            late_starts: result.late_starts,
            worst_start_delay_s: result.worst_start_delay.as_secs_f64(),
            reasons: &result.reasons,
            stopped: result.stopped,
        };
        let text = serde_json::to_string_pretty(&report);
        return Ok(text.unwrap_or_else(|error| error.to_string()) + "\n");
    }
    let mut text = report::table::render(std::slice::from_ref(&run));
    text.push_str(&format!(
        "started late by {:.1} ms at most, and {} for want of a place in flight\n",
        result.worst_start_delay.as_secs_f64() * 1e3,
        result.late_starts
    ));
    for (kind, reason) in &result.reasons {
        text.push_str(&format!("{kind}: {reason}\n"));
    }
    Ok(text)
}
