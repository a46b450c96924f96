//! Requests for tokens, and whatever else an engine takes by POST: read, start, answer.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, Version};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use shoal_gossip::{ModelApi, ModelFacts, NodeId, Timestamp, unix_time};
use tokio::sync::OwnedSemaphorePermit;

use crate::api::asked::{self, Asked, is_control};
use crate::api::error::{self, ApiError, ErrorKind};
use crate::api::observe::EndingNote;
use crate::api::server::Closer;
use crate::api::{Api, body, headers, stream};
use crate::engine::work::RequestKind;
use crate::frontend::{ClientAsk, Frontend, HomeError, HomeEvent, Running};
use crate::metrics::Metrics;
use crate::openai::{Envelope, WholeAnswer};

/// A conversation.
pub(super) async fn chat(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(api, Some(RequestKind::Chat), request).await
}

/// A plain prompt.
pub(super) async fn completion(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(api, Some(RequestKind::Completion), request).await
}

/// A path that only an engine beside a node may know.
pub(super) async fn other(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Response, ApiError> {
    let uri = request.uri().clone();
    let http = |model: &ModelFacts| model.api == ModelApi::Http;
    if request.method() != Method::POST
        || is_control(uri.path())
        || !api.frontend.models().iter().any(http)
    {
        return Err(error::unknown_path(&uri));
    }
    generate(api, None, request).await
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

    /// When the request came.
    pub(super) fn started(&self) -> Timestamp {
        self.started
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

/// A request that has its place and whose body is read.
pub(super) struct Entered {
    pub(super) head: Parts,
    pub(super) body: Bytes,
    started: Timestamp,
    place: Place,
}

impl Entered {
    pub(super) async fn read(api: &Api, request: Request) -> Result<Self, ApiError> {
        let started = api.frontend.now();
        if !api.frontend.accepting() {
            return Err(HomeError::ShuttingDown.into());
        }
        let place = Place::take(api)?;
        headers::check_content(request.headers())?;
        let (head, body) = request.into_parts();
        let body = body::read(&head.headers, body, &api.config).await?;
        Ok(Self {
            head,
            body,
            started,
            place,
        })
    }

    /// What measures it, and the connection it came on.
    pub(super) fn watched(self, api: &Api) -> (Meter, Client) {
        let meter = Meter {
            frontend: Arc::clone(&api.frontend),
            metrics: Arc::clone(&api.metrics),
            started: self.started,
            last_tokens: None,
            _place: self.place,
        };
        let extensions = &self.head.extensions;
        let client = Client {
            ending: extensions.get::<EndingNote>().cloned().unwrap_or_default(),
            // One connection of HTTP/2 carries many requests, and is not closed for one of them.
            closer: (self.head.version < Version::HTTP_2)
                .then(|| extensions.get::<Closer>().cloned())
                .flatten(),
        };
        (meter, client)
    }
}

async fn generate(
    api: Arc<Api>,
    kind: Option<RequestKind>,
    request: Request,
) -> Result<Response, ApiError> {
    let entered = Entered::read(&api, request).await?;
    answer(&api, kind, entered).await
}

/// Has a request run, and answers as OpenAI's servers do, or as the engine does.
pub(super) async fn answer(
    api: &Arc<Api>,
    kind: Option<RequestKind>,
    entered: Entered,
) -> Result<Response, ApiError> {
    let Asked {
        sketch,
        fit,
        parsed,
    } = Asked::read(kind, &entered.body, &api.frontend.models())?;
    let uri = &entered.head.uri;
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let ask = ClientAsk {
        kind,
        http: asked::http(path, &entered.head.headers)?,
        body: entered.body.clone(),
        sketch,
        fit,
    };
    let watched = entered.watched(api);
    unless_cut(api, async {
        let (stream, model) = (ask.sketch.stream, ask.sketch.model.clone());
        let running = start(api, ask).await?;
        let style = Style {
            known: kind.is_some(),
            envelope: envelope(api, kind, &running, &model),
            prompt_tokens: running.prompt_tokens,
            usage: parsed.as_ref().is_some_and(|parsed| parsed.include_usage),
            logprobs: parsed.is_some_and(|parsed| parsed.params.logprobs.is_some()),
        };
        match stream {
            true => stream::answer(api, running, style, watched).await,
            false => whole(api, running, style, watched).await,
        }
    })
    .await
}

/// Has the mesh take a request.
pub(super) async fn start(api: &Api, ask: ClientAsk) -> Result<Running, HomeError> {
    let running = api.frontend.start(ask).await?;
    let tokens = u64::from(running.prompt_tokens);
    api.metrics.prompt_tokens.increment(tokens);
    Ok(running)
}

/// An answer, unless the node goes down before it begins.
pub(super) async fn unless_cut(
    api: &Api,
    answer: impl Future<Output = Result<Response, ApiError>>,
) -> Result<Response, ApiError> {
    tokio::select! {
        biased;
        () = api.cut.cancelled() => Err(HomeError::ShuttingDown.into()),
        answer = answer => answer,
    }
}

/// How an answer looks that this node writes.
pub(super) struct Style {
    /// This node knows how: it reads requests of this kind.
    pub(super) known: bool,
    pub(super) envelope: Envelope,
    pub(super) prompt_tokens: u32,
    pub(super) usage: bool,
    pub(super) logprobs: bool,
}

/// What a stream must know of the connection it goes out on.
pub(super) struct Client {
    /// Where to note how the stream ended.
    pub(super) ending: EndingNote,
    /// Closes the connection, if the request has it for itself.
    pub(super) closer: Option<Closer>,
}

fn envelope(api: &Api, kind: Option<RequestKind>, running: &Running, model: &str) -> Envelope {
    let fingerprint = api
        .frontend
        .models()
        .iter()
        .find(|facts| facts.id == model)
        .map(|facts| facts.fingerprint);
    let created = unix_time().as_secs();
    // Answers on other paths are written by engines only.
    let kind = kind.unwrap_or(RequestKind::Completion);
    Envelope::new(kind, running.id, created, model, fingerprint)
}

async fn whole(
    api: &Arc<Api>,
    mut running: Running,
    style: Style,
    (mut meter, client): (Meter, Client),
) -> Result<Response, ApiError> {
    let mut answer = WholeAnswer::new(style.envelope, style.prompt_tokens, style.logprobs);
    while let Some(event) = running.events.recv().await {
        match event {
            HomeEvent::Tokens(mut batch) => {
                meter.tokens(batch.ids.len());
                if let Some(head) = batch.wire.head.take() {
                    let first = batch.wire.bytes;
                    return Ok(stream::relay(api, running, (*head, first), (meter, client)));
                }
                answer.push(batch);
            }
            HomeEvent::Finished(mut finish) => {
                meter.finished();
                let host = host(running.host);
                if let Some(head) = finish.wire.head.take() {
                    return Ok(stream::relayed(&head, Body::from(finish.wire.bytes), host));
                }
                let json = HeaderValue::from_static("application/json");
                let headers = [(CONTENT_TYPE, json), (headers::SHOAL_HOST, host)];
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
