//! Around every request: its id, one log line, one count, whatever becomes of it.

use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use shoal_gossip::Timestamp;
use tracing::Instrument;

use crate::api::body::{AtEnd, Held};
use crate::api::error::Detail;
use crate::api::{Api, headers, route};

/// How an answer ended when its status does not tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The stream was written to its end.
    Completed,
    /// It broke after its first byte; the log's text.
    Failed(String),
    /// The client took no byte for too long.
    Stalled,
}

/// Where a stream notes how it ended. In every request's extensions.
pub(super) type EndingNote = Arc<OnceLock<Ending>>;

/// Status that is logged for a client that left before it had one.
const CLIENT_GONE: u16 = 499;

/// Gives the request an id and counts it.
pub(super) async fn observe(
    State(api): State<Arc<Api>>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = headers::request_id(request.headers()).unwrap_or_else(|| api.ids.next());
    let mut tally = Tally {
        path: route::label(request.uri().path()),
        method: request.method().clone(),
        id: id.clone(),
        started: api.frontend.now(),
        status: None,
        sent: false,
        ending: EndingNote::default(),
        detail: None,
        api,
    };
    request.extensions_mut().insert(Arc::clone(&tally.ending));
    let span = tracing::debug_span!("request", id = id.to_str().unwrap_or_default());
    // When the client leaves, this future is dropped here, and the tally counts it.
    let mut response = next.run(request).instrument(span).await;
    tally.status = Some(response.status().as_u16());
    tally.detail = response.extensions_mut().remove::<Detail>();
    response.headers_mut().insert(headers::REQUEST_ID, id);
    response.map(|body| Body::new(Held::new(body, tally)))
}

/// Counts and logs one request when dropped.
struct Tally {
    api: Arc<Api>,
    path: &'static str,
    method: Method,
    id: HeaderValue,
    started: Timestamp,
    status: Option<u16>,
    sent: bool,
    ending: EndingNote,
    detail: Option<Detail>,
}

impl AtEnd for Tally {
    fn at_end(mut self) {
        self.sent = true;
    }
}

impl Tally {
    fn outcome(&self) -> (&'static str, &str) {
        let detail = match &self.detail {
            Some(Detail(text)) => text,
            None => "",
        };
        match (self.ending.get(), self.status) {
            (Some(Ending::Completed), _) => ("completed", detail),
            (Some(Ending::Failed(why)), _) => ("failed", why),
            (Some(Ending::Stalled), _) => ("client_stalled", detail),
            (None, Some(status)) if self.sent && status < 400 => ("completed", detail),
            (None, Some(_)) if self.sent => ("error", detail),
            (None, _) => ("client_gone", detail),
        }
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        let status = self.status.unwrap_or(CLIENT_GONE);
        let (outcome, detail) = self.outcome();
        self.api
            .metrics
            .request_answered(self.path, status, outcome);
        let took = self.api.frontend.now().since(self.started);
        let id = self.id.to_str().unwrap_or_default();
        let (method, path) = (&self.method, self.path);
        if outcome == "completed" {
            tracing::debug!(target: "shoal::http", id, %method, path, status, outcome, ?took);
        } else {
            tracing::info!(target: "shoal::http", id, %method, path, status, outcome, ?took, detail);
        }
    }
}
