//! What is asked of a mesh, and when: the same sequence for the simulator, a live mesh and any rival.
//!
//! A [`WorkloadSpec`] says where lengths and arrival times come from; a [`Workload`] draws them, or reads them from a
//! trace. Lengths and arrival times have a random generator each, so a change of rate or arrival process leaves every
//! request as long as it was: two policies, or two rates, are compared on the same requests.
//!
//! Deliberately absent: a clock, and a list of what was drawn. A trace is read whole before the first request
//! leaves, so that a damaged row does not end a run half-way.

mod arrivals;
mod lengths;
mod random;
mod spec;
mod trace;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;
use std::vec;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shoal_gossip::Tokens;

pub use arrivals::Arrivals;
pub use lengths::Lengths;
pub use spec::{WorkloadArgs, WorkloadSpec};

use arrivals::ArrivalClock;

/// One request of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Since the start of the run.
    pub at: Duration,
    /// Prompt tokens, at least one.
    pub prompt: Tokens,
    /// Output tokens, at least one.
    pub output: Tokens,
}

impl Arrival {
    /// Cut so that prompt and output hold `most` tokens together, which must be two or more.
    ///
    /// The output gives way first, down to one token, as an engine stops at its context; then the prompt.
    fn within(self, most: Tokens) -> Self {
        let prompt = self.prompt.min(most - Tokens(1)).max(Tokens(1));
        let output = self.output.min(most - prompt).max(Tokens(1));
        Self {
            prompt,
            output,
            ..self
        }
    }
}

/// Why there is no workload.
#[derive(Debug, thiserror::Error)]
pub enum WorkloadError {
    /// No shipped lengths have the name.
    #[error("there are no lengths `{name}`{hint}; known are {known}, and fixed:PROMPT:OUTPUT")]
    UnknownLengths {
        /// As asked for.
        name: String,
        /// The nearest known name, as a question in brackets; empty if none is near.
        hint: String,
        /// Names of the shipped ones.
        known: String,
    },
    /// `fixed:…` without two lengths.
    #[error(
        "`{0}` is not fixed:PROMPT:OUTPUT with two whole numbers of tokens from 1, e.g. fixed:512:128"
    )]
    FixedLengths(String),
    /// The shipped lengths cannot be read.
    #[error("the lengths in this program are damaged: {0}")]
    Shipped(String),
    /// Not an arrival process.
    #[error(
        "`{0}` is no arrival process; known are poisson, uniform, gamma:CV with CV from 0.01 to 100, and \
         burst:FACTOR:PERIOD_S:LENGTH_S with FACTOR from 1 to 10000 and 0 < LENGTH_S < PERIOD_S <= 1000000"
    )]
    Arrivals(String),
    /// A figure that cannot be.
    #[error("`{key}` must be {wanted}")]
    Figure {
        /// Flag, or key in the file.
        key: &'static str,
        /// What it should be.
        wanted: &'static str,
    },
    /// A trace, and something that a trace decides itself.
    #[error(
        "leave out `trace` or `{0}`: a trace has its own lengths and arrival times (`trace-speed` changes its rate)"
    )]
    TraceAnd(&'static str),
    /// `trace-speed` without a trace.
    #[error("`trace-speed` needs a `trace`; arrivals that are drawn take `rate`")]
    SpeedAlone,
    /// A file cannot be read.
    #[error("cannot read {path}: {error}")]
    File {
        /// As asked for.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The workload file does not say what it should.
    #[error("{path} is no workload: {message}")]
    Malformed {
        /// As asked for.
        path: PathBuf,
        /// What is wrong, and where.
        message: String,
    },
    /// The trace is damaged.
    #[error("{path}, line {line}: {fault}")]
    Trace {
        /// As asked for.
        path: PathBuf,
        /// Counted from 1, with the header.
        line: u64,
        /// What is wrong there, and what to do.
        fault: String,
    },
}

/// A finite sequence of arrivals in order of time. Equal seeds and specs give equal sequences.
#[derive(Debug)]
pub struct Workload {
    source: Source,
    left: u64,
    max_total: Option<Tokens>,
}

#[derive(Debug)]
enum Source {
    Drawn(Box<Drawn>),
    Trace(vec::IntoIter<Arrival>),
}

/// Each of the two draws from its own generator: see the head of the module.
#[derive(Debug)]
struct Drawn {
    clock: ArrivalClock,
    clock_rng: StdRng,
    lengths: Lengths,
    lengths_rng: StdRng,
}

impl Drawn {
    fn next(&mut self) -> Arrival {
        let (prompt, output) = self.lengths.draw(&mut self.lengths_rng);
        Arrival {
            at: self.clock.next(&mut self.clock_rng),
            prompt,
            output,
        }
    }
}

impl Workload {
    /// The workload of a spec. A trace is read here and ignores the seed; nothing is drawn before it is asked for.
    ///
    /// # Errors
    /// See [`WorkloadError`].
    pub fn new(spec: &WorkloadSpec, seed: u64) -> Result<Self, WorkloadError> {
        spec.check()?;
        let (source, left) = match &spec.trace {
            Some(path) => {
                let most = spec.requests.unwrap_or(u64::MAX);
                let rows = trace::read(path, most, spec.trace_speed.unwrap_or(1.0))?;
                let count = u64::try_from(rows.len()).unwrap_or(u64::MAX);
                (Source::Trace(rows.into_iter()), count)
            }
            None => (Source::Drawn(Box::new(drawn(spec, seed)?)), spec.count()),
        };
        Ok(Self {
            source,
            left,
            max_total: spec.max_tokens_total.map(Tokens),
        })
    }
}

fn drawn(spec: &WorkloadSpec, seed: u64) -> Result<Drawn, WorkloadError> {
    let mut seeds = StdRng::seed_from_u64(seed);
    let lengths_rng = StdRng::seed_from_u64(seeds.random());
    let clock_rng = StdRng::seed_from_u64(seeds.random());
    let lengths = match &spec.lengths {
        Some(lengths) => lengths.clone(),
        None => spec::DEFAULT_LENGTHS.parse()?,
    };
    let rate = spec.rate.unwrap_or(spec::DEFAULT_RATE);
    Ok(Drawn {
        clock: ArrivalClock::new(spec.arrivals.unwrap_or_default(), rate),
        clock_rng,
        lengths,
        lengths_rng,
    })
}

impl Iterator for Workload {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        self.left = self.left.checked_sub(1)?;
        let arrival = match &mut self.source {
            Source::Drawn(drawn) => drawn.next(),
            Source::Trace(rows) => rows.next()?,
        };
        Some(match self.max_total {
            Some(most) => arrival.within(most),
            None => arrival,
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.left);
        (left.unwrap_or(usize::MAX), left.ok())
    }
}
