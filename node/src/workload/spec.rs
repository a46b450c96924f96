//! A workload as somebody wrote it: by flags, in a file, or both.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::workload::{Arrivals, Lengths, WorkloadError};

/// Lengths of a spec that names none.
pub(super) const DEFAULT_LENGTHS: &str = "sharegpt-vllm";

/// Requests a second of a spec that names no rate.
pub(super) const DEFAULT_RATE: f64 = 1.0;

/// Requests of a spec that names no number of them.
const DEFAULT_REQUESTS: u64 = 1000;

/// Most requests: at 1,000 a second this takes eleven days.
const MAX_REQUESTS: u64 = 1_000_000_000;

/// Rates and speeds that are taken. They keep the time of the last request inside what a `Duration` holds.
const RATES: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

/// Largest workload file; one with every key is below 1 KiB.
const MAX_FILE: u64 = 64 << 10;

/// A workload as it is written down. What is left out stands at its default.
///
/// The same keys are read from flags, JSON and TOML, and written back, so one file drives a simulation, a live mesh
/// and any rival, and a result can say what it was measured with.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct WorkloadSpec {
    /// Lengths of prompts and outputs: a shipped table (an unknown name lists them), or fixed:PROMPT:OUTPUT.
    /// Default: sharegpt-vllm.
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Lengths>,

    /// How arrivals vary: poisson, uniform, gamma:CV or burst:FACTOR:PERIOD_S:LENGTH_S. Default: poisson.
    #[arg(long, value_name = "PROCESS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrivals: Option<Arrivals>,

    /// Mean rate in requests a second. Default: 1.
    #[arg(long, value_name = "PER_S")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,

    /// How many requests. Default: 1000, or all of a trace; a trace that has fewer ends the run earlier.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,

    /// Replay this CSV (or .csv.gz) with columns arrival_s, prompt_tokens and output_tokens, in place of lengths and
    /// arrivals.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,

    /// Replay the trace at this many times its rate. Default: 1.
    #[arg(long, value_name = "FACTOR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_speed: Option<f64>,

    /// Most tokens of prompt and output together, e.g. the model's context. A longer request loses output first, down
    /// to one token, then prompt. Default: no bound.
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens_total: Option<u32>,
}

impl WorkloadSpec {
    /// Reads a file that ends in `.json` or `.toml`. A relative `trace` in it is looked for beside the file.
    ///
    /// # Errors
    /// If it cannot be read, or does not say what it should.
    pub fn from_file(path: &Path) -> Result<Self, WorkloadError> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let parsed = match extension {
            Some("json") => {
                serde_json::from_str::<Self>(&text(path)?).map_err(|error| error.to_string())
            }
            Some("toml") => toml::from_str::<Self>(&text(path)?).map_err(|error| error.to_string()),
            _ => Err("its name must end in .json or .toml, which says how to read it".to_owned()),
        };
        let mut spec = parsed.map_err(|message| WorkloadError::Malformed {
            path: path.to_owned(),
            message,
        })?;
        if let (Some(folder), Some(trace)) = (path.parent(), &spec.trace) {
            spec.trace = Some(folder.join(trace));
        }
        Ok(spec)
    }

    /// This spec where it says something, `below` elsewhere.
    fn over(self, below: Self) -> Self {
        Self {
            lengths: self.lengths.or(below.lengths),
            arrivals: self.arrivals.or(below.arrivals),
            rate: self.rate.or(below.rate),
            requests: self.requests.or(below.requests),
            trace: self.trace.or(below.trace),
            trace_speed: self.trace_speed.or(below.trace_speed),
            max_tokens_total: self.max_tokens_total.or(below.max_tokens_total),
        }
    }

    /// Requests that are asked for. A trace without `requests` is replayed whole, and its length is not known here:
    /// [`Workload`](crate::workload::Workload) tells it by its `size_hint`.
    pub fn count(&self) -> u64 {
        self.requests.unwrap_or(DEFAULT_REQUESTS)
    }

    /// Refuses figures that cannot be, and keys that exclude each other.
    pub(super) fn check(&self) -> Result<(), WorkloadError> {
        let rate = |key, value: Option<f64>| match value {
            Some(value) if !RATES.contains(&value) => Err(WorkloadError::Figure {
                key,
                wanted: "from 0.000001 to 1000000",
            }),
            _ => Ok(()),
        };
        rate("rate", self.rate)?;
        rate("trace-speed", self.trace_speed)?;
        if !(1..=MAX_REQUESTS).contains(&self.count()) {
            return Err(WorkloadError::Figure {
                key: "requests",
                wanted: "from 1 to 1000000000",
            });
        }
        if self.max_tokens_total.is_some_and(|most| most < 2) {
            return Err(WorkloadError::Figure {
                key: "max-tokens-total",
                wanted: "2 or more: a prompt and an output have one token each at least",
            });
        }
        match self.arrivals {
            Some(arrivals) if !arrivals.is_sound() => {
                Err(WorkloadError::Arrivals(arrivals.to_string()))
            }
            _ => self.check_source(),
        }
    }

    fn check_source(&self) -> Result<(), WorkloadError> {
        if self.trace.is_none() {
            return match self.trace_speed {
                Some(_) => Err(WorkloadError::SpeedAlone),
                None => Ok(()),
            };
        }
        let drawn = [
            ("lengths", self.lengths.is_some()),
            ("arrivals", self.arrivals.is_some()),
            ("rate", self.rate.is_some()),
        ];
        match drawn.iter().find(|(_, given)| *given) {
            Some((key, _)) => Err(WorkloadError::TraceAnd(key)),
            None => Ok(()),
        }
    }
}

fn text(path: &Path) -> Result<String, WorkloadError> {
    let failed = |error| WorkloadError::File {
        path: path.to_owned(),
        error,
    };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_FILE + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_FILE {
        return Err(WorkloadError::Malformed {
            path: path.to_owned(),
            message: format!("it is above {MAX_FILE} bytes (a trace goes to `trace`)"),
        });
    }
    Ok(text)
}

/// Flags that say which workload to run.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct WorkloadArgs {
    /// Read the workload from this file (.json or .toml, with the names of the flags below as keys). Flags win.
    #[arg(long, value_name = "FILE")]
    pub workload: Option<PathBuf>,

    /// See [`WorkloadSpec`].
    #[command(flatten)]
    pub flags: WorkloadSpec,
}

impl WorkloadArgs {
    /// The workload: flags over file over defaults. A trace is not opened yet.
    ///
    /// # Errors
    /// If the file or a figure is unsound, or keys exclude each other.
    pub fn spec(&self) -> Result<WorkloadSpec, WorkloadError> {
        let below = match &self.workload {
            Some(path) => WorkloadSpec::from_file(path)?,
            None => WorkloadSpec::default(),
        };
        let spec = self.flags.clone().over(below);
        spec.check()?;
        Ok(spec)
    }
}

#[cfg(test)]
mod tests;
