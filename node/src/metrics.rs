//! Every metric of a node, in one place.
//!
//! A node has its own recorder, handed around as a value: several nodes in one process (tests, the
//! simulator) do not mix, and nothing is global. Where a label has few values the handles are made
//! once; a hot path does one atomic addition. Label values are `&'static str` or a status code, so
//! that no client can grow the number of series.
//!
//! Observations of histograms are kept one by one until somebody renders or calls
//! [`Metrics::upkeep`] (24 bytes each: 12 MB in five seconds at 100,000 tokens a second); whoever owns
//! the metrics must do so every few seconds, so that a node nobody scrapes does not grow.

mod table;

use std::fmt;
use std::time::Duration;

use metrics::{
    Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString, Unit,
};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use shoal_gossip::{ClusterView, LoadSummary, NodeId, Readiness, Timestamp};

use crate::engine::moving::MovingCounts;
use crate::mesh::messages::MoveReport;

pub use table::{Bound, MetricDoc, MetricKind};

/// Content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const METADATA: Metadata<'static> = Metadata::new("shoal", Level::INFO, None);

/// The metrics of one node.
pub struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    /// Requests for tokens that this node is the home of.
    pub in_flight: Gauge,
    /// Open client connections.
    pub connections: Gauge,
    /// Prompt tokens of clients' requests.
    pub prompt_tokens: Counter,
    /// Output tokens sent to clients.
    pub output_tokens: Counter,
    first_token: Histogram,
    inter_token: Histogram,
    request: Histogram,
    placement: Histogram,
    /// Redirects followed.
    pub redirects: Counter,
    move_pause: Histogram,
    move_whole: Histogram,
    load: LoadGauges,
    view: ViewGauges,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

struct LoadGauges {
    ready: Gauge,
    running: Gauge,
    queued: Gauge,
    queue_room: Gauge,
    step: Gauge,
    prefill_backlog: Gauge,
    capacity: Gauge,
    used: Gauge,
    reserved: Gauge,
    free: Gauge,
    queued_demand: Gauge,
}

struct ViewGauges {
    /// In the order of [`READINESS`]; the last is for nodes whose load is not known yet.
    nodes: [Gauge; 5],
    age_max: Gauge,
    age_median: Gauge,
}

const READINESS: [&str; 5] = ["starting", "ready", "draining", "failed", "unknown"];

fn readiness_index(readiness: Option<Readiness>) -> usize {
    match readiness {
        Some(Readiness::Starting) => 0,
        Some(Readiness::Ready) => 1,
        Some(Readiness::Draining) => 2,
        Some(Readiness::Failed) => 3,
        None => 4,
    }
}

impl Metrics {
    /// Metrics that carry the label `node`. `version` is the program's.
    pub fn new(node: NodeId, version: &'static str) -> Self {
        let mut builder = PrometheusBuilder::new().add_global_label("node", node.to_string());
        for row in table::TABLE {
            if let MetricKind::Histogram(bounds) = row.kind {
                let bounds: Vec<f64> = bounds.iter().map(|bound| bound.value()).collect();
                builder = with_buckets(builder, row.name, &bounds);
            }
        }
        let recorder = builder.build_recorder();
        for row in table::TABLE {
            describe(&recorder, row);
        }
        let metrics = Self {
            handle: recorder.handle(),
            in_flight: gauge(&recorder, table::IN_FLIGHT, &[]),
            connections: gauge(&recorder, table::CONNECTIONS, &[]),
            prompt_tokens: counter(&recorder, table::PROMPT_TOKENS, &[]),
            output_tokens: counter(&recorder, table::OUTPUT_TOKENS, &[]),
            first_token: histogram(&recorder, table::FIRST_TOKEN_SECONDS),
            inter_token: histogram(&recorder, table::INTER_TOKEN_SECONDS),
            request: histogram(&recorder, table::REQUEST_SECONDS),
            placement: histogram(&recorder, table::PLACEMENT_SECONDS),
            redirects: counter(&recorder, table::REDIRECTS, &[]),
            move_pause: histogram(&recorder, table::MOVE_PAUSE_SECONDS),
            move_whole: histogram(&recorder, table::MOVE_SECONDS),
            load: LoadGauges::new(&recorder),
            view: ViewGauges::new(&recorder),
            recorder,
        };
        gauge(&metrics.recorder, table::BUILD_INFO, &[version]).set(1);
        metrics
    }

    /// All metrics there are; `docs/metrics.md` is checked against it.
    pub fn table() -> &'static [MetricDoc] {
        table::TABLE
    }

    /// Prometheus' text format.
    pub fn render(&self) -> String {
        self.handle.render()
    }

    /// Folds observations into their buckets; call every few seconds.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// Counts an HTTP request: `path` is the route, never the path as sent.
    pub fn request_answered(&self, path: &'static str, status: u16, outcome: &'static str) {
        let key = Key::from_parts(
            table::REQUESTS.name,
            vec![
                Label::from_static_parts("path", path),
                Label::new("status", status.to_string()),
                Label::from_static_parts("outcome", outcome),
            ],
        );
        self.recorder.register_counter(&key, &METADATA).increment(1);
    }

    /// Counts a request or connection turned away at a bound.
    pub fn rejected(&self, reason: &'static str) {
        counter(&self.recorder, table::REJECTED, &[reason]).increment(1);
    }

    /// Takes the time to the first token.
    pub fn first_token(&self, took: Duration) {
        self.first_token.record(took);
    }

    /// Takes the time since the previous tokens, shared out over the `tokens` that came together.
    pub fn inter_token(&self, gap: Duration, tokens: u32) {
        if tokens > 0 {
            self.inter_token
                .record_many(gap / tokens, tokens.try_into().unwrap_or(usize::MAX));
        }
    }

    /// Takes the whole time of a finished request.
    pub fn request_finished(&self, took: Duration) {
        self.request.record(took);
    }

    /// Takes the time until a host had taken a request.
    pub fn placed(&self, took: Duration) {
        self.placement.record(took);
    }

    /// Counts a choice of a candidate.
    pub fn dispatch_decision(&self, policy: &'static str, reason: &'static str) {
        counter(&self.recorder, table::DISPATCH, &[policy, reason]).increment(1);
    }

    /// Counts the answer to an offer this node made.
    pub fn offer_answered(&self, answer: &'static str) {
        counter(&self.recorder, table::OFFERS, &["home", answer]).increment(1);
    }

    /// Counts this node's answer to an offer.
    pub fn offer_received(&self, answer: &'static str) {
        counter(&self.recorder, table::OFFERS, &["host", answer]).increment(1);
    }

    /// Counts a new try before the first token.
    pub fn retry(&self, reason: &'static str) {
        counter(&self.recorder, table::RETRIES, &[reason]).increment(1);
    }

    /// Counts a request that went on elsewhere from its ledger.
    pub fn replay(&self, reason: &'static str) {
        counter(&self.recorder, table::REPLAYS, &[reason]).increment(1);
    }

    /// Counts a host of this node's requests that is dead.
    pub fn host_lost(&self, how: &'static str) {
        counter(&self.recorder, table::HOSTS_LOST, &[how]).increment(1);
    }

    /// Counts the end of a hand-over that this node began.
    pub fn moved(&self, reason: &'static str, outcome: &'static str, cause: &'static str) {
        counter(&self.recorder, table::MOVES, &[reason, outcome, cause]).increment(1);
    }

    /// Takes the figures of a hand-over that succeeded.
    pub fn move_figures(&self, report: &MoveReport) {
        self.move_pause
            .record(Duration::from_micros(report.pause_us));
        self.move_whole
            .record(Duration::from_micros(report.total_us));
        counter(&self.recorder, table::MOVE_BYTES, &[]).increment(report.bytes);
        counter(&self.recorder, table::MOVE_STAGES, &[]).increment(u64::from(report.stages));
    }

    /// Counts the end of a hand-over that this node had accepted.
    pub fn arrived(&self, outcome: &'static str, cause: &'static str) {
        counter(&self.recorder, table::ARRIVALS, &[outcome, cause]).increment(1);
    }

    /// Takes over the engine's own count of preemptions.
    pub fn preemptions(&self, so_far: u64) {
        counter(&self.recorder, table::PREEMPTIONS, &[]).absolute(so_far);
    }

    /// Shows what a token's KV takes on the way to another engine.
    pub fn kv_bytes_per_token(&self, bytes: u32) {
        gauge(&self.recorder, table::KV_PER_TOKEN, &[]).set(bytes);
    }

    /// Takes over what the engine itself counts of moves.
    pub fn moving_counts(&self, counts: MovingCounts) {
        counter(&self.recorder, table::DIRECT_BYTES, &[]).absolute(counts.direct_bytes);
        for (what, count) in [
            ("seed", counts.seeds_anew),
            ("penalty", counts.penalties_anew),
        ] {
            counter(&self.recorder, table::INEXACT, &[what]).absolute(count);
        }
    }

    /// Shows how many requests leave and come in now.
    pub fn moves_under_way(&self, leaving: usize, arriving: usize) {
        for (side, count) in [("source", leaving), ("target", arriving)] {
            gauge(&self.recorder, table::MOVES_UNDER_WAY, &[side])
                .set(u32::try_from(count).unwrap_or(u32::MAX));
        }
    }

    /// Counts a request of this node's clients that a hand-over took to another host.
    pub fn attached(&self) {
        counter(&self.recorder, table::ATTACHED, &[]).increment(1);
    }

    /// Takes over the gossip transport's own count of datagrams; `direction` is `sent` or `received`.
    pub fn gossip_datagrams(&self, direction: &'static str, so_far: u64) {
        counter(&self.recorder, table::GOSSIP, &[direction]).absolute(so_far);
    }

    /// Takes over the gossip transport's own count of dropped datagrams.
    pub fn gossip_dropped(&self, reason: &'static str, so_far: u64) {
        counter(&self.recorder, table::GOSSIP_DROPPED, &[reason]).absolute(so_far);
    }

    /// Shows the view: this node's load, how many nodes there are, and how old what we know of them is.
    pub fn show_view(&self, view: &ClusterView, now: Timestamp) {
        if let Some((load, _)) = view.row(view.this).and_then(|row| row.load) {
            self.load.show(&load);
        }
        self.view.show(view, now);
    }
}

impl LoadGauges {
    fn new(recorder: &PrometheusRecorder) -> Self {
        Self {
            ready: gauge(recorder, table::READY, &[]),
            running: gauge(recorder, table::RUNNING, &[]),
            queued: gauge(recorder, table::QUEUED, &[]),
            queue_room: gauge(recorder, table::QUEUE_ROOM, &[]),
            step: gauge(recorder, table::STEP_SECONDS, &[]),
            prefill_backlog: gauge(recorder, table::PREFILL_BACKLOG, &[]),
            capacity: gauge(recorder, table::KV_CAPACITY, &[]),
            used: gauge(recorder, table::KV_BLOCKS, &["used"]),
            reserved: gauge(recorder, table::KV_BLOCKS, &["reserved"]),
            free: gauge(recorder, table::KV_BLOCKS, &["free"]),
            queued_demand: gauge(recorder, table::KV_QUEUED, &[]),
        }
    }

    fn show(&self, load: &LoadSummary) {
        let ready = load.readiness == Readiness::Ready;
        self.ready.set(if ready { 1 } else { 0 });
        self.running.set(load.running);
        self.queued.set(load.queued);
        self.queue_room.set(load.queue_room);
        self.step.set(load.step_time());
        self.prefill_backlog.set(load.prefill_backlog.0);
        self.capacity.set(load.total.0);
        self.used.set(load.used.0);
        self.reserved.set(load.reserved.0);
        self.free.set(load.free().0);
        self.queued_demand.set(load.queued_demand.0);
    }
}

impl ViewGauges {
    fn new(recorder: &PrometheusRecorder) -> Self {
        Self {
            nodes: READINESS.map(|name| gauge(recorder, table::VIEW_NODES, &[name])),
            age_max: gauge(recorder, table::VIEW_AGE_MAX, &[]),
            age_median: gauge(recorder, table::VIEW_AGE_MEDIAN, &[]),
        }
    }

    fn show(&self, view: &ClusterView, now: Timestamp) {
        let mut counts = [0u32; READINESS.len()];
        for row in view.rows() {
            counts[readiness_index(row.load.map(|(load, _)| load.readiness))] += 1;
        }
        for (gauge, count) in self.nodes.iter().zip(counts) {
            gauge.set(count);
        }
        let mut ages: Vec<Duration> = view.rows().iter().filter_map(|row| row.age(now)).collect();
        ages.sort_unstable();
        self.age_max.set(ages.last().copied().unwrap_or_default());
        self.age_median
            .set(ages.get(ages.len() / 2).copied().unwrap_or_default());
    }
}

#[expect(
    clippy::expect_used,
    reason = "the only error is an empty list of buckets, and the lists are constants"
)]
fn with_buckets(builder: PrometheusBuilder, name: &str, bounds: &[f64]) -> PrometheusBuilder {
    builder
        .set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
        .expect("no list of buckets is empty")
}

fn describe(recorder: &PrometheusRecorder, row: &MetricDoc) {
    let name = row.name.into();
    let unit = row.name.ends_with("_seconds").then_some(Unit::Seconds);
    let help = SharedString::const_str(row.help);
    match row.kind {
        MetricKind::Counter => recorder.describe_counter(name, unit, help),
        MetricKind::Gauge => recorder.describe_gauge(name, unit, help),
        MetricKind::Histogram(_) => recorder.describe_histogram(name, unit, help),
    }
}

fn key(row: MetricDoc, values: &[&'static str]) -> Key {
    debug_assert_eq!(row.labels.len(), values.len(), "{}", row.name);
    let labels: Vec<Label> = row
        .labels
        .iter()
        .zip(values)
        .map(|(name, value)| Label::from_static_parts(name, value))
        .collect();
    Key::from_parts(row.name, labels)
}

fn counter(recorder: &PrometheusRecorder, row: MetricDoc, values: &[&'static str]) -> Counter {
    recorder.register_counter(&key(row, values), &METADATA)
}

fn gauge(recorder: &PrometheusRecorder, row: MetricDoc, values: &[&'static str]) -> Gauge {
    recorder.register_gauge(&key(row, values), &METADATA)
}

fn histogram(recorder: &PrometheusRecorder, row: MetricDoc) -> Histogram {
    recorder.register_histogram(&key(row, &[]), &METADATA)
}

#[cfg(test)]
mod tests;
