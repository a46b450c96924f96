//! When requests arrive.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};

use crate::workload::WorkloadError;
use crate::workload::random::{exponential, gamma};

/// How the times between arrivals vary. All keep the mean rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Arrivals {
    /// `poisson`: independent of each other, coefficient of variation (CV) 1.
    #[default]
    Poisson,
    /// `uniform`: evenly spaced, CV 0.
    Uniform,
    /// `gamma:CV`: times between arrivals are Gamma distributed, shape 1/CV² and scale CV²/rate, as in the artifact of
    /// Llumnix (OSDI 2024), which takes CVs of 2 to 8 for bursty load.
    Gamma {
        /// Coefficient of variation of the times between arrivals.
        cv: f64,
    },
    /// `burst:FACTOR:PERIOD_S:LENGTH_S`: Poisson, with more requests in the last `length_s` of each period.
    Burst {
        /// Rate in a burst over the rate outside.
        factor: f64,
        /// From the start of one burst to the next, in seconds.
        period_s: f64,
        /// Length of a burst, in seconds.
        length_s: f64,
    },
}

impl Arrivals {
    /// Within the bounds that [`WorkloadError::Arrivals`] names. They keep sums of times inside what `f64` counts
    /// well; no measured trace is near them (Azure's code trace of 2023 has a CV of 13).
    pub(super) fn is_sound(&self) -> bool {
        match *self {
            Self::Poisson | Self::Uniform => true,
            Self::Gamma { cv } => (0.01..=100.0).contains(&cv),
            Self::Burst {
                factor,
                period_s,
                length_s,
            } => {
                (1.0..=10_000.0).contains(&factor)
                    && period_s <= 1_000_000.0
                    && length_s > 0.0
                    && length_s < period_s
            }
        }
    }
}

impl FromStr for Arrivals {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || WorkloadError::Arrivals(text.to_owned());
        let (name, figures) = match text.split_once(':') {
            Some((name, figures)) => (name, numbers(figures).ok_or_else(wrong)?),
            None => (text, Vec::new()),
        };
        let arrivals = match (name, figures.as_slice()) {
            ("poisson", []) => Self::Poisson,
            ("uniform", []) => Self::Uniform,
            ("gamma", &[cv]) => Self::Gamma { cv },
            ("burst", &[factor, period_s, length_s]) => Self::Burst {
                factor,
                period_s,
                length_s,
            },
            _ => return Err(wrong()),
        };
        if arrivals.is_sound() {
            Ok(arrivals)
        } else {
            Err(wrong())
        }
    }
}

fn numbers(text: &str) -> Option<Vec<f64>> {
    text.split(':').map(|number| number.parse().ok()).collect()
}

impl TryFrom<String> for Arrivals {
    type Error = WorkloadError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Arrivals> for String {
    fn from(arrivals: Arrivals) -> Self {
        arrivals.to_string()
    }
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poisson => f.write_str("poisson"),
            Self::Uniform => f.write_str("uniform"),
            Self::Gamma { cv } => write!(f, "gamma:{cv}"),
            Self::Burst {
                factor,
                period_s,
                length_s,
            } => write!(f, "burst:{factor}:{period_s}:{length_s}"),
        }
    }
}

/// Tells one arrival time after the other.
///
/// It counts in mean intervals and divides by the rate at the end: at twice the rate, the same seed gives the same
/// pattern at half the times (bursts excepted, whose period is in seconds).
#[derive(Debug)]
pub(super) struct ArrivalClock {
    arrivals: Arrivals,
    rate: f64,
    intervals: f64,
    last: Duration,
}

impl ArrivalClock {
    /// Starts at zero; `rate` is in requests a second and above zero.
    pub(super) fn new(arrivals: Arrivals, rate: f64) -> Self {
        Self {
            arrivals,
            rate,
            intervals: 0.0,
            last: Duration::ZERO,
        }
    }

    /// The next arrival, never before the last one.
    pub(super) fn next(&mut self, rng: &mut StdRng) -> Duration {
        self.intervals += match self.arrivals {
            Arrivals::Poisson | Arrivals::Burst { .. } => exponential(rng),
            Arrivals::Uniform => 1.0,
            Arrivals::Gamma { cv } => cv * cv * gamma(1.0 / (cv * cv), rng),
        };
        let even = self.intervals / self.rate;
        let seconds = match self.arrivals {
            Arrivals::Burst {
                factor,
                period_s,
                length_s,
            } => bunched(even, factor, period_s, length_s),
            Arrivals::Poisson | Arrivals::Uniform | Arrivals::Gamma { .. } => even,
        };
        // The rounding of `bunched` may step back by a nanosecond where a burst begins.
        let at = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        self.last = self.last.max(at);
        self.last
    }
}

/// Where a moment of a process with an even rate lands when each period ends with a burst.
///
/// The rate outside is `period / (period - length + factor * length)` of the mean; the moment is the inverse of the
/// integral of the rate, which is linear within each of the two parts (time change of a Poisson process).
fn bunched(even: f64, factor: f64, period: f64, length: f64) -> f64 {
    let quiet_time = period - length;
    let quiet_rate = period / (quiet_time + factor * length);
    let periods = (even / period).floor();
    let within = even - periods * period;
    let quiet_share = quiet_time * quiet_rate;
    let shifted = if within < quiet_share {
        within / quiet_rate
    } else {
        quiet_time + (within - quiet_share) / (factor * quiet_rate)
    };
    periods * period + shifted
}

#[cfg(test)]
mod tests;
