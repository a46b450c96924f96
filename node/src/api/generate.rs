//! `POST /v1/chat/completions` and `POST /v1/completions`: read, start, answer.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Version};
use axum::response::{IntoResponse, Response};
use shoal_gossip::{NodeId, Timestamp, unix_time};
use tokio::sync::OwnedSemaphorePermit;

use crate::api::error::{ApiError, ErrorKind};
use crate::api::observe::EndingNote;
use crate::api::server::Closer;
use crate::api::{Api, body, headers, stream};
use crate::engine::work::RequestKind;
use crate::frontend::{ClientAsk, Frontend, HomeError, HomeEvent, Running};
use crate::metrics::Metrics;
use crate::openai::{self, ChunkWriter, Envelope, WholeAnswer};

/// A conversation.
pub(super) async fn chat(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(api, RequestKind::Chat, request).await
}

/// A plain prompt.
pub(super) async fn completion(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(api, RequestKind::Completion, request).await
}

/// Takes one of the places for requests, for as long as it lives.
struct Place {
    metrics: Arc<Metrics>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    fn take(api: &Api) -> Result<Self, ApiError> {
        let Ok(permit) = Arc::clone(&api.slots).try_acquire_owned() else {
            api.metrics.rejected("requests");
            let message = "this node has too many requests; try again later".to_owned();
            return Err(ApiError::new(ErrorKind::Overloaded, message));
        };
        api.metrics.in_flight.increment(1);
        Ok(Self {
            metrics: Arc::clone(&api.metrics),
            _permit: permit,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.metrics.in_flight.decrement(1);
    }
}

/// What is measured on the way of one request. Keeps its place.
pub(super) struct Meter {
    frontend: Arc<dyn Frontend>,
    metrics: Arc<Metrics>,
    started: Timestamp,
    last_tokens: Option<Timestamp>,
    _place: Place,
}

impl Meter {
    fn since_start(&self, now: Timestamp) -> Duration {
        now.since(self.started)
    }

    /// Tokens have come.
    pub(super) fn tokens(&mut self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let now = self.frontend.now();
        match self.last_tokens.replace(now) {
            None => self.metrics.first_token(self.since_start(now)),
            Some(last) => self.metrics.inter_token(now.since(last), count),
        }
        self.metrics.output_tokens.increment(u64::from(count));
    }

    /// The request is done.
    pub(super) fn finished(&self) {
        let now = self.frontend.now();
        self.metrics.request_finished(self.since_start(now));
    }
}

/// What of a request the answer depends on, besides its tokens.
struct Wishes {
    stream: bool,
    include_usage: bool,
    logprobs: bool,
}

async fn generate(
    api: Arc<Api>,
    kind: RequestKind,
    request: Request,
) -> Result<Response, ApiError> {
    let started = api.frontend.now();
    if !api.frontend.accepting() {
        return Err(HomeError::ShuttingDown.into());
    }
    let place = Place::take(&api)?;
    headers::check_content(request.headers())?;
    let (head, body) = request.into_parts();
    let body = body::read(&head.headers, body, &api.config).await?;
    let parsed = openai::parse(kind, &body)?;
    let wishes = Wishes {
        stream: parsed.stream,
        include_usage: parsed.include_usage,
        logprobs: parsed.params.logprobs.is_some(),
    };
    let model = parsed.model.clone();
    let meter = Meter {
        frontend: Arc::clone(&api.frontend),
        metrics: Arc::clone(&api.metrics),
        started,
        last_tokens: None,
        _place: place,
    };
    let client = Client {
        ending: head
            .extensions
            .get::<EndingNote>()
            .cloned()
            .unwrap_or_default(),
        // One connection of HTTP/2 carries many requests, and is not closed for one of them.
        closer: (head.version < Version::HTTP_2)
            .then(|| head.extensions.get::<Closer>().cloned())
            .flatten(),
    };
    let answer = async {
        let ask = ClientAsk { kind, body, parsed };
        let running = api.frontend.start(ask).await?;
        api.metrics
            .prompt_tokens
            .increment(u64::from(running.prompt_tokens));
        let envelope = envelope(&api, kind, &running, &model);
        if wishes.stream {
            let writer = ChunkWriter::new(
                envelope,
                running.prompt_tokens,
                wishes.include_usage,
                wishes.logprobs,
            );
            stream::answer(&api, running, writer, meter, client).await
        } else {
            let answer = WholeAnswer::new(envelope, running.prompt_tokens, wishes.logprobs);
            whole(running, answer, meter).await
        }
    };
    tokio::select! {
        biased;
        () = api.cut.cancelled() => Err(HomeError::ShuttingDown.into()),
        answer = answer => answer,
    }
}

/// What a stream must know of the connection it goes out on.
pub(super) struct Client {
    /// Where to note how the stream ended.
    pub(super) ending: EndingNote,
    /// Closes the connection, if the request has it for itself.
    pub(super) closer: Option<Closer>,
}

fn envelope(api: &Api, kind: RequestKind, running: &Running, model: &str) -> Envelope {
    let fingerprint = api
        .frontend
        .models()
        .iter()
        .find(|facts| facts.id == model)
        .map(|facts| facts.fingerprint);
    let created = unix_time().as_secs();
    Envelope::new(kind, running.id, created, model, fingerprint)
}

async fn whole(
    mut running: Running,
    mut answer: WholeAnswer,
    mut meter: Meter,
) -> Result<Response, ApiError> {
    while let Some(event) = running.events.recv().await {
        match event {
            HomeEvent::Tokens(batch) => {
                meter.tokens(batch.ids.len());
                answer.push(batch);
            }
            HomeEvent::Finished(finish) => {
                meter.finished();
                let json = HeaderValue::from_static("application/json");
                let headers = [
                    (CONTENT_TYPE, json),
                    (headers::SHOAL_HOST, host(running.host)),
                ];
                return Ok((headers, answer.finish(&finish)).into_response());
            }
            HomeEvent::Failed(error) => return Err(error.into()),
        }
    }
    Err(cut_short().into())
}

/// The value of `x-shoal-host`.
pub(super) fn host(node: NodeId) -> HeaderValue {
    // Base58 has header characters only.
    HeaderValue::from_str(&node.to_string()).unwrap_or_else(|_| HeaderValue::from_static("?"))
}

/// For events that end without saying how.
pub(super) fn cut_short() -> HomeError {
    HomeError::Lost("its events ended without an end".to_owned())
}
