//! Health, version, metrics and the view.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use serde::Serialize;
use shoal_gossip::{
    Blocks, ClusterView, LoadBasis, LoadSummary, ModelFacts, NodeRow, Readiness, Timestamp,
};

use crate::api::{Api, vllm_names};
use crate::dispatch::Freeness;
use crate::metrics::CONTENT_TYPE as METRICS_TYPE;

/// What load balancers and people ask. "Worker" is the word of the other routers for a node that can run
/// something.
#[derive(Serialize)]
pub(super) struct Health {
    status: &'static str,
    healthy_workers: usize,
    total_workers: usize,
}

fn health_of(api: &Api, good: bool, words: [&'static str; 2]) -> (StatusCode, Json<Health>) {
    let health = Health {
        status: words[usize::from(!good)],
        healthy_workers: api.frontend.usable_nodes(),
        total_workers: api.frontend.view().rows().len(),
    };
    let status = if good {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(health))
}

/// Whether somebody here or elsewhere could run a request.
pub(super) async fn health(State(api): State<Arc<Api>>) -> impl IntoResponse {
    let good = api.frontend.usable_nodes() > 0;
    health_of(&api, good, ["healthy", "no usable node"])
}

/// Whether the process lives; a no is no answer.
pub(super) async fn liveness(State(api): State<Arc<Api>>) -> impl IntoResponse {
    health_of(&api, true, ["alive", ""])
}

/// Whether to send clients here. Off first when a node shuts down.
pub(super) async fn readiness(State(api): State<Arc<Api>>) -> impl IntoResponse {
    if !api.frontend.accepting() {
        return health_of(&api, false, ["", "shutting down"]);
    }
    let good = api.frontend.usable_nodes() > 0;
    health_of(&api, good, ["ready", "no usable node"])
}

/// SageMaker's health check, as vLLM answers it.
pub(super) async fn ping() -> StatusCode {
    StatusCode::OK
}

/// The program's version, in vLLM's shape.
pub(super) async fn version() -> impl IntoResponse {
    Json(serde_json::json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Prometheus' text.
pub(super) async fn metrics(State(api): State<Arc<Api>>) -> impl IntoResponse {
    let view = api.frontend.view();
    api.metrics.show_view(&view, api.frontend.now());
    let mut text = api.metrics.render();
    if api.config.vllm_names
        && let Some(own) = view.row(api.frontend.this())
    {
        text.push_str(&vllm_names::lines(own, api.frontend.preemptions()));
    }
    ([(CONTENT_TYPE, METRICS_TYPE)], text)
}

/// The view: every live node with its facts, its newest load and how old that is.
pub(super) async fn nodes(State(api): State<Arc<Api>>) -> impl IntoResponse {
    let view = api.frontend.view();
    Json(ViewBody::new(&view, api.frontend.now())).into_response()
}

#[derive(Serialize)]
struct ViewBody<'a> {
    this: String,
    view_age_ms: f64,
    nodes: Vec<NodeBody<'a>>,
}

#[derive(Serialize)]
struct NodeBody<'a> {
    node: String,
    this: bool,
    /// Null as long as no load has been heard.
    age_ms: Option<f64>,
    facts: FactsBody<'a>,
    load: Option<LoadBody>,
}

#[derive(Serialize)]
struct FactsBody<'a> {
    incarnation: u64,
    peer_id: &'a str,
    protocol: u16,
    control: String,
    stream: String,
    http: &'a str,
    role: shoal_gossip::Role,
    block_size_tokens: u32,
    models: Vec<ModelBody<'a>>,
    version: &'a str,
}

#[derive(Serialize)]
struct ModelBody<'a> {
    id: &'a str,
    context_tokens: u32,
    fingerprint: String,
}

#[derive(Serialize)]
struct LoadBody {
    readiness: Readiness,
    incarnation: u64,
    seq: u64,
    total_blocks: u32,
    used_blocks: u32,
    reserved_blocks: u32,
    free_blocks: u32,
    queued_demand_blocks: u32,
    head_of_line_blocks: u32,
    running: u32,
    queued: u32,
    queue_room: u32,
    /// Whether as many requests run as the engine runs at once.
    slots_full: bool,
    prefill_backlog_tokens: u32,
    step_time_us: u32,
    /// Whether the engine in the process counted this, an engine beside it told it, or it is estimated.
    basis: &'static str,
    /// KV blocks left per request, for a new request; null when the node takes none.
    freeness_blocks: Option<f64>,
}

fn milliseconds(age: std::time::Duration) -> f64 {
    age.as_micros() as f64 / 1e3
}

impl<'a> ViewBody<'a> {
    fn new(view: &'a ClusterView, now: Timestamp) -> Self {
        Self {
            this: view.this.to_string(),
            view_age_ms: milliseconds(now.since(view.taken_at)),
            nodes: view
                .rows()
                .iter()
                .map(|row| NodeBody::new(row, view, now))
                .collect(),
        }
    }
}

impl<'a> NodeBody<'a> {
    fn new(row: &'a NodeRow, view: &ClusterView, now: Timestamp) -> Self {
        let facts = &row.facts;
        Self {
            node: row.node().to_string(),
            this: row.node() == view.this,
            age_ms: row.age(now).map(milliseconds),
            facts: FactsBody {
                incarnation: facts.incarnation.0,
                peer_id: &facts.peer_id,
                protocol: facts.protocol,
                control: facts.control.to_string(),
                stream: facts.stream.to_string(),
                http: &facts.http,
                role: facts.role,
                block_size_tokens: facts.block_size.tokens().get(),
                models: facts.models.iter().map(ModelBody::new).collect(),
                version: &facts.version,
            },
            load: row.load.map(|(load, _)| LoadBody::new(load)),
        }
    }
}

impl<'a> ModelBody<'a> {
    fn new(model: &'a ModelFacts) -> Self {
        Self {
            id: &model.id,
            context_tokens: model.context.0,
            fingerprint: format!("{:016x}", model.fingerprint),
        }
    }
}

/// One word for where a load comes from.
pub(super) fn basis(basis: LoadBasis) -> &'static str {
    match basis {
        LoadBasis::Exact => "exact",
        LoadBasis::Polled => "polled",
        LoadBasis::Estimated => "estimated",
    }
}

impl LoadBody {
    fn new(load: LoadSummary) -> Self {
        Self {
            readiness: load.readiness,
            incarnation: load.incarnation.0,
            seq: load.seq,
            total_blocks: load.total.0,
            used_blocks: load.used.0,
            reserved_blocks: load.reserved.0,
            free_blocks: load.free().0,
            queued_demand_blocks: load.queued_demand.0,
            head_of_line_blocks: load.head_of_line.0,
            running: load.running,
            queued: load.queued,
            queue_room: load.queue_room,
            slots_full: load.slots_full,
            prefill_backlog_tokens: load.prefill_backlog.0,
            step_time_us: load.step_time_us,
            basis: basis(load.basis),
            freeness_blocks: Some(Freeness::for_dispatch(&load, Blocks::ZERO).blocks())
                .filter(|blocks| blocks.is_finite()),
        }
    }
}
