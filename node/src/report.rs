//! What a run of the simulator or of the load generator found: one record a request, the figures over
//! them, and the forms in which they are shown.
//!
//! Everything here is pure: times are given, nothing reads a clock. Writers take any [`io::Write`].
//! A figure that was not measured is `None`, `null`, an empty cell or `-`, and never zero.

pub mod csv;
mod herd;
pub mod html;
mod progress;
mod series;
mod spread;
mod summary;
pub mod table;

use std::io;
use std::time::Duration;

use serde::Serialize;
use shoal_gossip::Tokens;

pub use herd::{HerdMeter, Herding};
pub use progress::Progress;
pub use series::{FleetSample, MAX_SAMPLES, MAX_SHOWN, NodeSeries, Series, stuck_blocks};
pub use spread::Spread;
pub use summary::{FIGURES, Figure, Summary, Unit};

/// One request as its client saw it. Times count from its intended arrival, so waiting for a slow
/// sender counts (no coordinated omission).
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Intended arrival, since the start of the run.
    pub at: Duration,
    /// Prompt tokens asked.
    pub prompt: Tokens,
    /// Output tokens received.
    pub output: Tokens,
    /// How it ended.
    pub outcome: Outcome,
    /// To the first output token (TTFT).
    pub first: Option<Duration>,
    /// To the end.
    pub end: Option<Duration>,
    /// Longest time between two deliveries of output.
    pub longest_gap: Duration,
    /// Index of the node it entered at.
    pub entry: u32,
    /// Index of the node that finished it, where known.
    pub host: Option<u32>,
    /// Hand-overs (simulator only).
    pub moves: u32,
    /// Preemptions (simulator only).
    pub preemptions: u32,
    /// Time that the preemptions cost: waiting and recomputing (simulator only).
    pub preemption_loss: Duration,
}

impl Record {
    /// Whether it finished.
    pub fn finished(&self) -> bool {
        self.outcome == Outcome::Finished
    }

    /// Time between tokens in seconds, `(end − first) / (output − 1)`: the mean decode latency of a
    /// token, as Llumnix reports it. Undefined for fewer than two tokens.
    pub fn tbt(&self) -> Option<f64> {
        let steps = self.output.0.checked_sub(1).filter(|steps| *steps > 0)?;
        let decode = self.end?.saturating_sub(self.first?);
        Some(decode.as_secs_f64() / f64::from(steps))
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With all its output.
    Finished,
    /// Without, and the kind of failure: `http 429`, `connection`, `timeout`, `lost`.
    Failed(String),
}

/// One case of a report: a policy, a mesh size, a router.
#[derive(Clone, Debug, Serialize)]
pub struct Run<'a> {
    /// What it is called.
    pub label: String,
    /// Its requests. Not part of the JSON report: [`csv::write`] writes them.
    #[serde(skip)]
    pub records: &'a [Record],
    /// The figures, one summary a seed; the table shows the spread where there are several.
    pub summaries: &'a [Summary],
    /// State over time, where it was sampled.
    pub series: Option<&'a Series>,
}

#[derive(Serialize)]
struct Report<'a> {
    title: &'a str,
    runs: &'a [Run<'a>],
}

/// Writes all cases as one JSON object: `{"title": …, "runs": [{"label", "summaries", "series"}]}`.
///
/// # Errors
/// Those of the writer.
pub fn write_json(mut out: impl io::Write, title: &str, runs: &[Run<'_>]) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut out, &Report { title, runs })?;
    out.write_all(b"\n")
}

/// A text of somebody else, with everything taken out that could steer a terminal.
fn plain(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// A count as a real number: exact up to 2^53.
#[expect(
    clippy::cast_precision_loss,
    reason = "figures are shown with few digits"
)]
fn real(count: u64) -> f64 {
    count as f64
}

/// The length of a list as a real number.
fn len<T>(list: &[T]) -> f64 {
    real(list.len() as u64)
}

#[cfg(test)]
mod tests;
