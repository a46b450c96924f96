//! The table of all metrics: name, kind, labels, meaning. `docs/metrics.md` is checked against it.

/// What a metric counts or measures, and how it may be added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows, from the start of the process.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts observations into buckets with these upper bounds.
    Histogram(&'static [Bound]),
}

/// Upper bound of a bucket in millionths of the metric's unit: whole numbers, so that the table can be
/// compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound(pub u64);

impl Bound {
    /// In the metric's unit.
    pub fn value(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricDoc {
    /// Name as Prometheus sees it.
    pub name: &'static str,
    /// Kind.
    pub kind: MetricKind,
    /// Labels, apart from `node`, which every metric has.
    pub labels: &'static [&'static str],
    /// Meaning, in one sentence; goes out as `# HELP`.
    pub help: &'static str,
}

macro_rules! bounds {
    ($($micros:literal)*) => { &[$(Bound($micros)),*] };
}

/// 1 ms to 2 min, about three to a decade: from a cached short prompt to a queue at its bound.
const FIRST_TOKEN: &[Bound] = bounds!(
    1_000 2_500 5_000 10_000 25_000 50_000 100_000 250_000 500_000 1_000_000 2_500_000 5_000_000
    10_000_000 30_000_000 60_000_000 120_000_000
);

/// 0.5 ms to 10 s: one step of a small model on a fast machine, to a pause the user sees.
const BETWEEN_TOKENS: &[Bound] = bounds!(
    500 1_000 2_500 5_000 7_500 10_000 15_000 20_000 30_000 50_000 75_000 100_000 150_000 250_000
    500_000 1_000_000 2_500_000 10_000_000
);

/// 10 ms to 1 h.
const WHOLE: &[Bound] = bounds!(
    10_000 50_000 100_000 250_000 500_000 1_000_000 2_500_000 5_000_000 10_000_000 30_000_000
    60_000_000 120_000_000 300_000_000 600_000_000 1_800_000_000 3_600_000_000
);

/// 0.1 ms to 30 s: a question to a neighbour, to a placement after several silent ones.
const PLACEMENT: &[Bound] = bounds!(
    100 250 500 1_000 2_500 5_000 10_000 25_000 50_000 100_000 250_000 500_000 1_000_000 5_000_000
    30_000_000
);

/// 0.25 ms to 10 s: a delta over loopback, to a large state over a slow link.
const PAUSE: &[Bound] = bounds!(
    250 500 1_000 2_500 5_000 10_000 25_000 50_000 100_000 250_000 500_000 1_000_000 2_500_000
    10_000_000
);

macro_rules! table {
    ($($constant:ident = $name:literal $kind:expr, [$($label:literal)*], $help:literal;)*) => {
        $(pub(super) const $constant: MetricDoc = MetricDoc {
            name: $name,
            kind: $kind,
            labels: &[$($label),*],
            help: $help,
        };)*

        /// Every metric, in the order of the documentation.
        pub(super) const TABLE: &[MetricDoc] = &[$($constant),*];
    };
}

use MetricKind::{Counter, Gauge, Histogram};

table! {
    BUILD_INFO = "shoal_build_info" Gauge, ["version"],
        "Always 1; the label names the running version.";
    READY = "shoal_ready" Gauge, [],
        "1 while this node's engine takes work, else 0.";

    REQUESTS = "shoal_requests_total" Counter, ["path" "status" "outcome"],
        "HTTP requests answered, by route, status and how they ended.";
    IN_FLIGHT = "shoal_requests_in_flight" Gauge, [],
        "Client requests for tokens that this node is the home of.";
    REJECTED = "shoal_requests_rejected_total" Counter, ["reason"],
        "Client requests and connections turned away because a bound of this node was reached.";
    CONNECTIONS = "shoal_connections" Gauge, [],
        "Open client connections.";
    PROMPT_TOKENS = "shoal_prompt_tokens_total" Counter, [],
        "Prompt tokens of the requests this node was the home of.";
    OUTPUT_TOKENS = "shoal_output_tokens_total" Counter, [],
        "Output tokens sent to clients of this node.";
    FIRST_TOKEN_SECONDS = "shoal_time_to_first_token_seconds" Histogram(FIRST_TOKEN), [],
        "From the end of a request's headers to its first token, seen at the home.";
    INTER_TOKEN_SECONDS = "shoal_inter_token_seconds" Histogram(BETWEEN_TOKENS), [],
        "Between two consecutive tokens of a request, seen at the home.";
    REQUEST_SECONDS = "shoal_request_seconds" Histogram(WHOLE), [],
        "From the end of a request's headers to its last token, for requests that finished.";
    PLACEMENT_SECONDS = "shoal_placement_seconds" Histogram(PLACEMENT), [],
        "From a checked request to a host that has taken it, the wait for offers included.";

    DISPATCH = "shoal_dispatch_decisions_total" Counter, ["policy" "reason"],
        "Candidates chosen for requests, by policy and reason.";
    OFFERS = "shoal_offers_total" Counter, ["side" "answer"],
        "Offers by their answer; side says whether this node asked (home) or was asked (host).";
    REDIRECTS = "shoal_redirects_total" Counter, [],
        "Times a request of this node followed a host's redirect.";
    RETRIES = "shoal_retries_total" Counter, ["reason"],
        "Times a request of this node was offered anew before its first token.";
    REPLAYS = "shoal_replays_total" Counter, ["reason"],
        "Times a request of this node went on elsewhere from its ledger.";

    HOSTS_LOST = "shoal_hosts_lost_total" Counter, ["how"],
        "Hosts of this node's requests that were found dead: their port closed, back in a new life, or silent.";

    MOVES = "shoal_moves_total" Counter, ["reason" "outcome" "cause"],
        "Hand-overs this node began as source, by why, how they ended, and what stopped those that did.";
    ARRIVALS = "shoal_move_arrivals_total" Counter, ["outcome" "cause"],
        "Hand-overs this node accepted as target, by how they ended.";
    MOVES_UNDER_WAY = "shoal_moves_under_way" Gauge, ["side"],
        "Hand-overs going on now; side says whether this node is source or target.";
    MOVE_PAUSE_SECONDS = "shoal_move_pause_seconds" Histogram(PAUSE), [],
        "From the step boundary at which a moved request stopped to the target's word that it owns it.";
    MOVE_SECONDS = "shoal_move_seconds" Histogram(WHOLE), [],
        "From the proposal of a hand-over to the target's word that it owns the request.";
    MOVE_BYTES = "shoal_move_bytes_total" Counter, [],
        "Bytes sent in hand-overs that succeeded.";
    MOVE_STAGES = "shoal_move_stages_total" Counter, [],
        "Copy stages of hand-overs that succeeded, the last ones included.";
    ATTACHED = "shoal_moves_followed_total" Counter, [],
        "Times a request of this node's clients changed its host by a hand-over.";

    RUNNING = "shoal_engine_running" Gauge, [],
        "Requests that hold KV in this node's engine.";
    QUEUED = "shoal_engine_queued" Gauge, [],
        "Requests that wait for KV in this node's engine.";
    QUEUE_ROOM = "shoal_engine_queue_room" Gauge, [],
        "Requests that this node's queue still has room for.";
    PREEMPTIONS = "shoal_engine_preemptions_total" Counter, [],
        "Times a request of this node's engine lost its KV to another one and had it computed again.";
    KV_PER_TOKEN = "shoal_engine_kv_bytes_per_token" Gauge, [],
        "Bytes that the KV of a token takes when a request of this node's engine moves, at most; 0 when requests move by recompute.";
    DIRECT_BYTES = "shoal_engine_kv_direct_bytes_total" Counter, [],
        "Bytes of KV that this node's engine read out of other engines; those in shoal_move_bytes_total went through the nodes.";
    INEXACT = "shoal_engine_inexact_total" Counter, ["what"],
        "Requests that went on in this node's engine, with the operator's leave (--engine-inexact allow), though they draw other tokens than in one engine: the generator of a seed began anew, or a penalty forgot what it had counted.";
    STEP_SECONDS = "shoal_engine_step_seconds" Gauge, [],
        "Smoothed time of one engine step; 0 when unknown.";
    PREFILL_BACKLOG = "shoal_engine_prefill_backlog_tokens" Gauge, [],
        "Prompt tokens accepted and not yet prefilled.";
    KV_CAPACITY = "shoal_kv_capacity_blocks" Gauge, [],
        "KV blocks the engine has.";
    KV_BLOCKS = "shoal_kv_blocks" Gauge, ["state"],
        "KV blocks by state; used, reserved and free add up to the capacity.";
    KV_QUEUED = "shoal_kv_queued_demand_blocks" Gauge, [],
        "KV blocks that the queued requests need to start, together.";

    GOSSIP = "shoal_gossip_datagrams_total" Counter, ["direction"],
        "Gossip datagrams sent and accepted.";
    GOSSIP_DROPPED = "shoal_gossip_dropped_total" Counter, ["reason"],
        "Gossip datagrams dropped, by reason; overrun ones came faster than they were taken.";
    VIEW_NODES = "shoal_view_nodes" Gauge, ["readiness"],
        "Nodes in this node's view, by what they say of themselves.";
    VIEW_AGE_MAX = "shoal_view_age_max_seconds" Gauge, [],
        "Age of the oldest load summary in the view.";
    VIEW_AGE_MEDIAN = "shoal_view_age_median_seconds" Gauge, [],
        "Median age of the load summaries in the view.";
}
