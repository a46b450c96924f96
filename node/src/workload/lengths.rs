//! How long prompts and outputs are.

use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use shoal_gossip::Tokens;

use crate::workload::WorkloadError;
use crate::workload::random::{normal_cdf, normals};

/// The shipped tables, each with its source.
const SHIPPED: &str = include_str!("lengths.json");

/// Likeness (Jaro-Winkler) from which a name is suggested, as for settings.
const NEAR: f64 = 0.7;

/// Bounds of the exponent of the last step: see [`Quantiles`]. The shipped tables ask for 0.2 to 80, but for the prompts
/// of `burstgpt` (below) and `azure-code` (above), whose means are off by 0.2 % at most for it.
const TAIL_POWER: (f64, f64) = (0.1, 1000.0);

/// Where the lengths of requests come from: a shipped table by its name, or `fixed:PROMPT:OUTPUT`.
///
/// Some tables reach far beyond the context of most models (a prompt of 234,984 tokens in `sharegpt`): set
/// [`max_tokens_total`](crate::workload::WorkloadSpec::max_tokens_total) to the context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Lengths {
    name: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Fixed(Tokens, Tokens),
    Table(Arc<Table>),
}

#[derive(Debug, PartialEq)]
struct Table {
    prompt: Quantiles,
    output: Quantiles,
    /// Correlation of the two normals that the copula draws.
    rho: f64,
    source: String,
}

#[derive(Deserialize)]
struct RawFile {
    pairs: BTreeMap<String, RawPair>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPair {
    source: String,
    spearman: f64,
    prompt: RawQuantiles,
    output: RawQuantiles,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawQuantiles {
    mean: f64,
    quantiles: Vec<u32>,
}

impl Lengths {
    /// Names of the shipped tables, for help texts.
    ///
    /// # Errors
    /// Never, unless the program was built from damaged data.
    pub fn shipped() -> Result<Vec<String>, WorkloadError> {
        Ok(pairs()?.into_keys().collect())
    }

    /// The name it was asked for by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the numbers come from, with licence and changes. None if fixed.
    pub fn source(&self) -> Option<&str> {
        match &self.kind {
            Kind::Fixed(..) => None,
            Kind::Table(table) => Some(&table.source),
        }
    }

    /// Prompt and output of one request.
    ///
    /// A Gaussian copula: two normals with the correlation that gives Spearman's rank correlation of the table, each
    /// taken to its share of the distribution, and that to a length.
    pub(super) fn draw(&self, rng: &mut StdRng) -> (Tokens, Tokens) {
        match &self.kind {
            Kind::Fixed(prompt, output) => (*prompt, *output),
            Kind::Table(table) => {
                let (first, second) = normals(rng);
                let correlated = table.rho * first + (1.0 - table.rho * table.rho).sqrt() * second;
                let prompt = table.prompt.at(normal_cdf(first));
                (prompt, table.output.at(normal_cdf(correlated)))
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let kind = if text.starts_with("fixed:") {
            fixed(text).ok_or_else(|| WorkloadError::FixedLengths(text.to_owned()))?
        } else {
            let mut pairs = pairs()?;
            let Some(pair) = pairs.remove(text) else {
                return Err(unknown(text, &pairs));
            };
            let table = Table::try_from(pair)
                .map_err(|fault| WorkloadError::Shipped(format!("{text}: {fault}")))?;
            Kind::Table(Arc::new(table))
        };
        Ok(Self {
            name: text.to_owned(),
            kind,
        })
    }
}

fn fixed(text: &str) -> Option<Kind> {
    let (prompt, output) = text.strip_prefix("fixed:")?.split_once(':')?;
    let (prompt, output) = (prompt.parse().ok()?, output.parse().ok()?);
    (prompt > 0 && output > 0).then_some(Kind::Fixed(Tokens(prompt), Tokens(output)))
}

fn pairs() -> Result<BTreeMap<String, RawPair>, WorkloadError> {
    serde_json::from_str::<RawFile>(SHIPPED)
        .map(|file| file.pairs)
        .map_err(|error| WorkloadError::Shipped(error.to_string()))
}

fn unknown(text: &str, pairs: &BTreeMap<String, RawPair>) -> WorkloadError {
    let wrong = text.replace('_', "-").to_lowercase();
    let hint = pairs
        .keys()
        .map(|name| (strsim::jaro_winkler(&wrong, &name.to_lowercase()), name))
        .filter(|(likeness, _)| *likeness > NEAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| format!(" (did you mean `{name}`?)"));
    WorkloadError::UnknownLengths {
        name: text.to_owned(),
        hint: hint.unwrap_or_default(),
        known: pairs.keys().cloned().collect::<Vec<_>>().join(", "),
    }
}

impl TryFrom<RawPair> for Table {
    type Error = &'static str;

    fn try_from(pair: RawPair) -> Result<Self, Self::Error> {
        if !(-1.0..=1.0).contains(&pair.spearman) {
            return Err("the correlation is not between -1 and 1");
        }
        Ok(Self {
            prompt: pair.prompt.try_into()?,
            output: pair.output.try_into()?,
            // Exact for normals: Kruskal, "Ordinal measures of association", JASA 53, 1958.
            rho: 2.0 * (PI * pair.spearman / 6.0).sin(),
            source: pair.source,
        })
    }
}

/// A distribution, as evenly spaced quantiles and its mean. Linear between two of them, but for the last step.
///
/// From the 99 % quantile to the maximum a line would put the mean of a heavy tail far too high (`sharegpt`: 1,513
/// instead of 385 tokens, for one prompt in 17,394 is of 234,984). So that step is `q99 + (max - q99) · t^k`, with
/// the `k` that brings the whole distribution to the known mean. The 99 % quantile and the maximum stay as they are.
#[derive(Debug, PartialEq)]
struct Quantiles {
    points: Vec<f64>,
    tail_power: f64,
}

impl Quantiles {
    /// The length below which a `share` of all are; `share` is from 0 to 1.
    fn at(&self, share: f64) -> Tokens {
        let steps = self.points.len().saturating_sub(1);
        let position = share.clamp(0.0, 1.0) * steps as f64;
        // Whole and below the length of a list: nothing is lost.
        let step = (position as usize).min(steps.saturating_sub(1));
        let (from, to) = match self.points.get(step..=step + 1) {
            Some([from, to]) => (*from, *to),
            _ => return Tokens(1),
        };
        let mut part = position - step as f64;
        if step + 1 == steps {
            part = part.powf(self.tail_power);
        }
        // Between two `u32`, so only the fraction goes.
        Tokens((from + (to - from) * part).round().max(1.0) as u32)
    }
}

impl TryFrom<RawQuantiles> for Quantiles {
    type Error = &'static str;

    fn try_from(raw: RawQuantiles) -> Result<Self, Self::Error> {
        let points: Vec<f64> = raw.quantiles.iter().copied().map(f64::from).collect();
        let [body @ .., last] = points.as_slice() else {
            return Err("there are no quantiles");
        };
        let Some(before) = body.last() else {
            return Err("there is only one quantile");
        };
        if !(points.is_sorted() && raw.mean >= 1.0 && raw.mean <= *last) {
            return Err("the quantiles fall, or the mean is outside of them");
        }
        let steps = body.len() as f64;
        let below: f64 = body.windows(2).map(|pair| pair.iter().sum::<f64>()).sum();
        let above = raw.mean * steps - below / 2.0 - before;
        // The mean of t^k is 1 / (k + 1). Rounded quantiles can leave nothing, or less, above the one before the last.
        let (least, most) = TAIL_POWER;
        let tail_power = if above > 0.0 {
            ((last - before) / above - 1.0).clamp(least, most)
        } else {
            most
        };
        Ok(Self { points, tail_power })
    }
}

impl TryFrom<String> for Lengths {
    type Error = WorkloadError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Lengths> for String {
    fn from(lengths: Lengths) -> Self {
        lengths.name
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests;
