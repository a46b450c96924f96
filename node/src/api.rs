//! The client plane: HTTP routes, server-sent events, keys, limits, metrics.
//!
//! ```text
//! server     TCP, TLS, HTTP/1.1 and HTTP/2; bounds on connections and on idle ones
//!   observe    request id, one log line and one count per request, however it ends
//!     auth       API keys, except for health checks
//!       generate   body → Frontend::start → one body or a stream (stream); what this node does not read goes to engines
//!       demo       the same for /generate and /generate_benchmark
//!       admin      health, models of the mesh, view, metrics
//! ```
//!
//! The rule everything here keeps: when a client is gone, what works for it stops. Dropping the
//! handler's future or the response body drops `Running`, which aborts the request at its host. For
//! HTTP/1 hyper reads the connection while a handler works and drops it at the end of the stream, so
//! a client that closes is noticed in every phase. Two things follow: a client that shuts down its
//! sending half only (`nc -N`) counts as gone, and one that has already sent its next request
//! (pipelining) is noticed only when the answer is written.

mod admin;
mod asked;
mod auth;
mod body;
mod demo;
mod error;
mod generate;
mod headers;
mod models;
mod observe;
mod requests;
mod server;
mod stream;
mod tls;
mod vllm_names;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::frontend::Frontend;
use crate::metrics::Metrics;

pub use auth::{ApiKeys, ApiKeysError};
pub use server::{BUFFER, Shutdown, serve};
pub use tls::{Tls, TlsError};

/// How the client plane behaves. Each bound holds for this node alone.
#[derive(Clone, Debug)]
pub struct ApiConfig {
    /// Keys that let a client in; `None` lets everyone in. Health checks need no key; the view and the
    /// metrics do, since they tell addresses and load of the whole mesh.
    pub keys: Option<ApiKeys>,
    /// Certificate and key; `None` speaks plain HTTP.
    pub tls: Option<Tls>,
    /// Keys of operators, who may change the mesh and all that clients may. `None`: whoever asks from this host.
    pub operators: Option<ApiKeys>,
    /// Look like a vLLM server to routers: its names for some gauges, and `vllm` as the models' owner.
    pub vllm_names: bool,
    /// Longest request body in bytes; beyond it 413. `max_requests` times this is the memory that
    /// bodies can take together.
    pub max_body: usize,
    /// Requests for tokens at work at once, from the first byte of the body to the last of the answer;
    /// beyond it 429.
    pub max_requests: usize,
    /// Open client connections; beyond it a new one gets 503 and is closed. Each may hold
    /// [`BUFFER`] bytes in either direction.
    pub max_connections: usize,
    /// Time a client has for the head of its next request, counted from the start of the connection or
    /// the end of its last answer; then the connection is closed. The TLS handshake has as long.
    pub header_timeout: Duration,
    /// Time a client has to send a body; beyond it 408.
    pub body_timeout: Duration,
    /// A stream that has nothing to say for this long sends a comment, so that nobody between here and
    /// the client takes it for dead. Proxies commonly give up after 30 or 60 s.
    pub keep_alive: Duration,
    /// Time a client may take no byte of a waiting answer before it counts as gone and its request is
    /// aborted: until then the request keeps its KV.
    pub stall_timeout: Duration,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            keys: None,
            tls: None,
            operators: None,
            vllm_names: true,
            max_body: 4 * 1024 * 1024,
            max_requests: 1024,
            max_connections: 4096,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            keep_alive: Duration::from_secs(15),
            stall_timeout: Duration::from_secs(60),
        }
    }
}

/// What the client plane serves from.
#[derive(Clone, Debug)]
pub struct Backend {
    /// The node.
    pub frontend: Arc<dyn Frontend>,
    /// Where it counts, and what `/metrics` shows.
    pub metrics: Arc<Metrics>,
}

/// What all handlers share.
struct Api {
    config: ApiConfig,
    frontend: Arc<dyn Frontend>,
    metrics: Arc<Metrics>,
    /// One permit per request for tokens.
    slots: Arc<Semaphore>,
    /// The tasks that feed streams. They end when their client or [`Api::cut`] ends them.
    streams: TaskTracker,
    /// Ends every running request; see [`Shutdown::cut`].
    cut: CancellationToken,
    ids: headers::RequestIds,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Api {
    fn new(config: ApiConfig, backend: Backend, cut: CancellationToken) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(config.max_requests)),
            ids: headers::RequestIds::new(backend.frontend.this()),
            config,
            frontend: backend.frontend,
            metrics: backend.metrics,
            streams: TaskTracker::new(),
            cut,
        }
    }
}

/// The routes.
mod route {
    pub(super) const CHAT: &str = "/v1/chat/completions";
    pub(super) const COMPLETIONS: &str = "/v1/completions";
    pub(super) const GENERATE: &str = "/generate";
    pub(super) const BENCHMARK: &str = "/generate_benchmark";
    pub(super) const MODELS: &str = "/v1/models";
    pub(super) const MODEL: &str = "/v1/models/{*id}";
    pub(super) const HEALTH: &str = "/health";
    pub(super) const LIVENESS: [&str; 4] = ["/liveness", "/live", "/livez", "/healthz"];
    pub(super) const READINESS: [&str; 3] = ["/readiness", "/ready", "/readyz"];
    pub(super) const PING: &str = "/ping";
    pub(super) const VERSION: &str = "/version";
    pub(super) const METRICS: &str = "/metrics";
    pub(super) const NODES: &str = "/mesh/nodes";
    pub(super) const REQUESTS: &str = "/mesh/requests";
    pub(super) const DRAIN: &str = "/mesh/drain";
    pub(super) const MIGRATE: &str = "/mesh/requests/{id}/migrate";

    /// The route that a path belongs to, as a label of metrics; `other` when there is none.
    pub(super) fn label(path: &str) -> &'static str {
        [
            CHAT,
            COMPLETIONS,
            GENERATE,
            BENCHMARK,
            MODELS,
            HEALTH,
            PING,
            VERSION,
            METRICS,
            NODES,
            REQUESTS,
            DRAIN,
        ]
        .into_iter()
        .chain(LIVENESS)
        .chain(READINESS)
        .find(|route| *route == path)
        .unwrap_or_else(|| {
            let inner = path
                .strip_prefix(REQUESTS)
                .and_then(|rest| rest.strip_prefix('/')?.strip_suffix("/migrate"));
            if inner.is_some_and(|id| !id.contains('/')) {
                return MIGRATE;
            }
            let name = path
                .strip_prefix(MODELS)
                .and_then(|rest| rest.strip_prefix('/'));
            match name {
                Some(name) if !name.is_empty() => MODEL,
                Some(_) | None => "other",
            }
        })
    }

    /// Routes that change the mesh.
    pub(super) fn is_for_operators(path: &str) -> bool {
        path.starts_with("/mesh/") && matches!(label(path), DRAIN | MIGRATE)
    }

    /// Routes that need no key: they tell nothing but whether the node is well.
    pub(super) fn is_open(path: &str) -> bool {
        path == HEALTH || path == PING || LIVENESS.contains(&path) || READINESS.contains(&path)
    }
}

fn router(api: Arc<Api>) -> Router {
    let mut router = Router::new()
        .route(route::CHAT, post(generate::chat))
        .route(route::COMPLETIONS, post(generate::completion))
        .route(route::GENERATE, post(demo::generate))
        .route(route::BENCHMARK, post(demo::benchmark))
        .route(route::MODELS, get(models::list))
        .route(route::MODEL, get(models::one))
        .route(route::HEALTH, get(admin::health))
        .route(route::PING, get(admin::ping).post(admin::ping))
        .route(route::VERSION, get(admin::version))
        .route(route::METRICS, get(admin::metrics))
        .route(route::NODES, get(admin::nodes))
        .route(route::REQUESTS, get(requests::list))
        .route(route::MIGRATE, post(requests::migrate))
        .route(route::DRAIN, post(requests::drain));
    for path in route::LIVENESS {
        router = router.route(path, get(admin::liveness));
    }
    for path in route::READINESS {
        router = router.route(path, get(admin::readiness));
    }
    router
        .fallback(generate::other)
        .method_not_allowed_fallback(error::wrong_method)
        .layer(from_fn_with_state(Arc::clone(&api), auth::require_key))
        .layer(from_fn_with_state(Arc::clone(&api), observe::observe))
        .with_state(api)
}

#[cfg(test)]
mod tests;
