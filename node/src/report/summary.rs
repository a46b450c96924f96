//! The figures of one run.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::{Outcome, Record, len, real};

/// Kinds of error that are told apart; the last place is for [`OTHER`].
const MAX_KINDS: usize = 32;

/// Bytes of the name of a kind that are kept.
const MAX_KIND: usize = 64;

/// The kind of all errors that found no place.
const OTHER: &str = "other";

/// The figures of one run. Times are in seconds, and `None` where nothing was measured.
///
/// Latencies and rates are over finished requests: a request that failed fast must not make a run look
/// good. `pNN` interpolates linearly between the two nearest ranks, as numpy's `percentile` does.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests that arrived.
    pub requests: u64,
    /// Those that finished.
    pub finished: u64,
    /// Those that did not.
    pub failed: u64,
    /// Those that did not, by kind. At most 32 kinds; the rest counts as `other`.
    pub errors: BTreeMap<String, u64>,
    /// Mean time to the first token.
    pub ttft_mean: Option<f64>,
    /// Median time to the first token.
    pub ttft_p50: Option<f64>,
    /// 95th percentile of the time to the first token.
    pub ttft_p95: Option<f64>,
    /// 99th percentile of the time to the first token.
    pub ttft_p99: Option<f64>,
    /// Mean over requests of [`Record::tbt`].
    pub tbt_mean: Option<f64>,
    /// Median over requests of [`Record::tbt`].
    pub tbt_p50: Option<f64>,
    /// 95th percentile over requests of [`Record::tbt`].
    pub tbt_p95: Option<f64>,
    /// 99th percentile over requests of [`Record::tbt`].
    pub tbt_p99: Option<f64>,
    /// 99th percentile of the longest gap between two deliveries, over requests of two tokens and more.
    pub gap_p99: Option<f64>,
    /// Mean time to the end.
    pub e2e_mean: Option<f64>,
    /// Median time to the end.
    pub e2e_p50: Option<f64>,
    /// 95th percentile of the time to the end.
    pub e2e_p95: Option<f64>,
    /// 99th percentile of the time to the end.
    pub e2e_p99: Option<f64>,
    /// Preemptions of all requests.
    pub preemptions: Option<u64>,
    /// Mean time that preemptions cost a finished request.
    pub preemption_loss: Option<f64>,
    /// Hand-overs of all requests.
    pub moves: Option<u64>,
    /// Mean over time of the most requests at one node over their mean: see [`super::Herding`].
    pub herd_ratio: Option<f64>,
    /// Finished requests in a second of the run.
    pub requests_per_s: Option<f64>,
    /// Output tokens of finished requests in a second of the run.
    pub output_tokens_per_s: Option<f64>,
}

impl Summary {
    /// The figures of `records`, from a run that lasted `span`.
    pub fn of(records: &[Record], span: Duration) -> Self {
        let done: Vec<&Record> = records.iter().filter(|record| record.finished()).collect();
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        let ttft = Values::of(done.iter().filter_map(|record| seconds(record.first)));
        let tbt = Values::of(done.iter().filter_map(|record| record.tbt()));
        let e2e = Values::of(done.iter().filter_map(|record| seconds(record.end)));
        let streamed = done.iter().filter(|record| record.output.0 > 1);
        let gap = Values::of(streamed.map(|record| record.longest_gap.as_secs_f64()));
        let loss = Values::of(done.iter().map(|one| one.preemption_loss.as_secs_f64()));
        let tokens = done.iter().map(|record| u64::from(record.output.0)).sum();
        let per_s = |count: u64| (!span.is_zero()).then(|| real(count) / span.as_secs_f64());
        let finished = done.len() as u64;
        Self {
            requests: records.len() as u64,
            finished,
            failed: records.len() as u64 - finished,
            errors: errors(records),
            ttft_mean: ttft.mean(),
            ttft_p50: ttft.percentile(50),
            ttft_p95: ttft.percentile(95),
            ttft_p99: ttft.percentile(99),
            tbt_mean: tbt.mean(),
            tbt_p50: tbt.percentile(50),
            tbt_p95: tbt.percentile(95),
            tbt_p99: tbt.percentile(99),
            gap_p99: gap.percentile(99),
            e2e_mean: e2e.mean(),
            e2e_p50: e2e.percentile(50),
            e2e_p95: e2e.percentile(95),
            e2e_p99: e2e.percentile(99),
            preemptions: Some(records.iter().map(|one| u64::from(one.preemptions)).sum()),
            preemption_loss: loss.mean(),
            moves: Some(records.iter().map(|one| u64::from(one.moves)).sum()),
            herd_ratio: None,
            requests_per_s: per_s(finished),
            output_tokens_per_s: per_s(tokens),
        }
    }

    /// The same without what a client cannot see: preemptions, what they cost, and hand-overs. For the
    /// load generator, whose records hold zeros there.
    #[must_use]
    pub fn seen_from_outside(self) -> Self {
        Self {
            preemptions: None,
            preemption_loss: None,
            moves: None,
            herd_ratio: None,
            ..self
        }
    }
}

fn errors(records: &[Record]) -> BTreeMap<String, u64> {
    let mut errors = BTreeMap::new();
    for record in records {
        let Outcome::Failed(kind) = &record.outcome else {
            continue;
        };
        let kind = &kind[..kind.floor_char_boundary(MAX_KIND)];
        let known = errors.contains_key(kind) || errors.len() < MAX_KINDS - 1;
        let kind = if known { kind } else { OTHER };
        *errors.entry(kind.to_owned()).or_insert(0) += 1;
    }
    errors
}

/// Sorted values of one figure.
pub(super) struct Values(Vec<f64>);

impl Values {
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_unstable_by(f64::total_cmp);
        Self(values)
    }

    pub(super) fn sorted(&self) -> &[f64] {
        &self.0
    }

    pub(super) fn mean(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.iter().sum::<f64>() / len(&self.0))
    }

    /// The value at rank `percent / 100 × (n − 1)`, counted from 0, interpolated linearly.
    pub(super) fn percentile(&self, percent: u32) -> Option<f64> {
        let rank = self.0.len().checked_sub(1)? as u64 * u64::from(percent.min(100));
        let at = |rank: u64| self.0.get(usize::try_from(rank).ok()?).copied();
        let low = at(rank / 100)?;
        let high = at(rank / 100 + 1).unwrap_or(low);
        Some(low + (high - low) * real(rank % 100) / 100.0)
    }
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// Seconds.
    Seconds,
    /// Things in a second.
    PerSecond,
}

impl Unit {
    /// As written behind the name of a figure; nothing for a count.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Count => "",
            Self::Seconds => " (s)",
            Self::PerSecond => " (1/s)",
        }
    }
}

/// One figure of a summary: its name and how to read it.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Its key in JSON.
    pub key: &'static str,
    /// As people call it, without the unit.
    pub name: &'static str,
    /// Its unit.
    pub unit: Unit,
    read: fn(&Summary) -> Option<f64>,
}

impl Figure {
    const fn new(
        key: &'static str,
        name: &'static str,
        unit: Unit,
        read: fn(&Summary) -> Option<f64>,
    ) -> Self {
        Self {
            key,
            name,
            unit,
            read,
        }
    }

    /// Its value, where it was measured.
    pub fn of(&self, summary: &Summary) -> Option<f64> {
        (self.read)(summary)
    }
}

/// All figures of a summary, in the order in which they are shown.
pub const FIGURES: [Figure; 22] = [
    Figure::new("requests", "requests", Unit::Count, |s| {
        Some(real(s.requests))
    }),
    Figure::new("finished", "finished", Unit::Count, |s| {
        Some(real(s.finished))
    }),
    Figure::new("failed", "failed", Unit::Count, |s| Some(real(s.failed))),
    Figure::new("ttft_mean", "TTFT mean", Unit::Seconds, |s| s.ttft_mean),
    Figure::new("ttft_p50", "TTFT P50", Unit::Seconds, |s| s.ttft_p50),
    Figure::new("ttft_p95", "TTFT P95", Unit::Seconds, |s| s.ttft_p95),
    Figure::new("ttft_p99", "TTFT P99", Unit::Seconds, |s| s.ttft_p99),
    Figure::new("tbt_mean", "TBT mean", Unit::Seconds, |s| s.tbt_mean),
    Figure::new("tbt_p50", "TBT P50", Unit::Seconds, |s| s.tbt_p50),
    Figure::new("tbt_p95", "TBT P95", Unit::Seconds, |s| s.tbt_p95),
    Figure::new("tbt_p99", "TBT P99", Unit::Seconds, |s| s.tbt_p99),
    Figure::new("gap_p99", "longest gap P99", Unit::Seconds, |s| s.gap_p99),
    Figure::new("e2e_mean", "E2E mean", Unit::Seconds, |s| s.e2e_mean),
    Figure::new("e2e_p50", "E2E P50", Unit::Seconds, |s| s.e2e_p50),
    Figure::new("e2e_p95", "E2E P95", Unit::Seconds, |s| s.e2e_p95),
    Figure::new("e2e_p99", "E2E P99", Unit::Seconds, |s| s.e2e_p99),
    Figure::new("preemptions", "preemptions", Unit::Count, |s| {
        s.preemptions.map(real)
    }),
    Figure::new("preemption_loss", "preemption loss", Unit::Seconds, |s| {
        s.preemption_loss
    }),
    Figure::new("moves", "moves", Unit::Count, |s| s.moves.map(real)),
    Figure::new("herd_ratio", "herd ratio", Unit::Count, |s| s.herd_ratio),
    Figure::new("requests_per_s", "requests", Unit::PerSecond, |s| {
        s.requests_per_s
    }),
    Figure::new(
        "output_tokens_per_s",
        "output tokens",
        Unit::PerSecond,
        |s| s.output_tokens_per_s,
    ),
];
