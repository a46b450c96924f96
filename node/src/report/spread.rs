//! One figure over several seeds.

use serde::Serialize;

use super::summary::Values;
use super::{Figure, Summary, len};

/// The 97.5 % quantile of Student's t for 1 to 29 degrees of freedom, so for 2 to 30 seeds.
/// Source: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2, column 0.975.
const T_975: [f64; 29] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045,
];

/// Mean of a figure over the seeds of one case, and how far it may be off.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Seeds in which the figure was measured.
    pub seeds: usize,
    /// Their mean.
    pub mean: f64,
    /// Half the width of the 95 % confidence interval of the mean, `t × s / √n` with the sample's
    /// standard deviation `s`; `None` for one seed. Above 30 seeds, t stays at its value for 30, which
    /// makes the interval a little too wide.
    pub half: Option<f64>,
}

impl Spread {
    /// The spread of `values`; `None` without any.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mean = Values::of(values.iter().copied()).mean()?;
        let freedom = values.len() - 1;
        let t = freedom
            .checked_sub(1)
            .and_then(|place| T_975.get(place).or(T_975.last()));
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let half = t.map(|t| {
            let variance = squares / (len(values) - 1.0);
            t * (variance / len(values)).sqrt()
        });
        Some(Self {
            seeds: values.len(),
            mean,
            half,
        })
    }

    /// The spread of one figure over the seeds that measured it; `None` if none did.
    pub fn over(summaries: &[Summary], figure: &Figure) -> Option<Self> {
        let values: Vec<f64> = summaries
            .iter()
            .filter_map(|summary| figure.of(summary))
            .collect();
        Self::of(&values)
    }
}
