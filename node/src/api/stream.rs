//! Server-sent events, and the rule that a gone client cancels the request.
//!
//! A task per stream takes events from the request and hands frames to the response body through a
//! channel of one. The chain is bounded end to end: a client that does not read fills the socket, then
//! hyper's buffer, then that channel; the task stops taking events, and the request pauses at its
//! host. A task, and not just a body that pulls, because only somebody who is not asked by hyper can
//! notice that hyper has stopped asking.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::api::error::ApiError;
use crate::api::generate::{Client, Meter, Style, cut_short, host};
use crate::api::observe::Ending;
use crate::api::{Api, headers};
use crate::engine::answer::{AnswerHead, GoingOn, Wire};
use crate::engine::{Finish, TokenBatch};
use crate::frontend::{HomeError, HomeEvent, Running};
use crate::openai::{self, ChunkWriter};

/// Frames between the task and the body. One is enough: the next is made while it is sent.
const FRAMES: usize = 1;

/// What a stream says to show that it lives.
const COMMENT: &[u8] = b": keep-alive\n\n";

/// Answers with a stream.
///
/// Waits for the first event before it answers at all, at most the time after which a comment is due:
/// a request that fails at once gets a status that clients know how to retry, and one that waits in a
/// queue keeps its connection alive.
pub(super) async fn answer(
    api: &Arc<Api>,
    mut running: Running,
    style: Style,
    (meter, client): (Meter, Client),
) -> Result<Response, ApiError> {
    let first = match timeout(api.config.keep_alive, running.events.recv()).await {
        Ok(Some(HomeEvent::Failed(error))) => return Err(error.into()),
        Ok(None) => return Err(cut_short().into()),
        Ok(Some(HomeEvent::Finished(mut finish))) if finish.wire.head.is_some() => {
            meter.finished();
            let head = finish.wire.head.take().unwrap_or_default();
            let body = Body::from(finish.wire.bytes);
            return Ok(relayed(&head, body, host(running.host)));
        }
        Ok(Some(event)) => Next::Event(event),
        Err(_) => Next::Silence,
    };
    let head = match &first {
        Next::Event(HomeEvent::Tokens(batch)) => batch.wire.head.clone(),
        Next::Event(_) | Next::Silence | Next::Cut => None,
    };
    let host = host(running.host);
    let is_stream = head.as_ref().is_none_or(|head| head.is_stream());
    let form = Relay {
        writer: Writer::new(style),
        is_stream,
    };
    let body = pump(api, running, form, (meter, client, first));
    if let Some(head) = head {
        return Ok(relayed(&head, body, host));
    }
    let fixed = HeaderValue::from_static;
    let headers = [
        (CONTENT_TYPE, fixed("text/event-stream; charset=utf-8")),
        (CACHE_CONTROL, fixed("no-cache")),
        (headers::ACCEL_BUFFERING, fixed("no")),
        (headers::SHOAL_HOST, host),
    ];
    Ok((headers, body).into_response())
}

/// Answers with what an engine writes, of which the beginning is there.
pub(super) fn relay(
    api: &Arc<Api>,
    running: Running,
    (head, first): (AnswerHead, Bytes),
    (meter, client): (Meter, Client),
) -> Response {
    let host = host(running.host);
    let wire = Wire::of(first);
    let batch = TokenBatch {
        wire,
        ..TokenBatch::default()
    };
    let first = Next::Event(HomeEvent::Tokens(batch));
    let form = Relay {
        writer: Writer::default(),
        is_stream: head.is_stream(),
    };
    let body = pump(api, running, form, (meter, client, first));
    relayed(&head, body, host)
}

/// The answer of an engine, headed as it headed it.
pub(super) fn relayed(head: &AnswerHead, body: Body, host: HeaderValue) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(head.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let into = response.headers_mut();
    for (name, value) in &head.headers {
        if let (Ok(name), Ok(value)) = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_str(value),
        ) {
            into.insert(name, value);
        }
    }
    if head.is_stream() {
        into.insert(headers::ACCEL_BUFFERING, HeaderValue::from_static("no"));
    }
    into.insert(headers::SHOAL_HOST, host);
    response
}

/// How the events of a request become the bytes of a stream.
pub(super) trait Form: Send + Sync {
    /// What shows that the stream lives, if it has a way to.
    fn silence(&self) -> Option<Bytes>;

    /// New tokens.
    fn tokens(&mut self, batch: &TokenBatch) -> Result<Option<Bytes>, HomeError>;

    /// The end.
    fn finished(&mut self, finish: Finish) -> Result<Bytes, HomeError>;

    /// How a stream that has begun says why it ends; without, it is cut, so that nobody takes it for whole.
    fn failed(&self, error: &ApiError) -> Option<Bytes>;
}

/// Starts feeding a body.
pub(super) fn pump(
    api: &Arc<Api>,
    running: Running,
    form: impl Form + 'static,
    (meter, client, first): (Meter, Client, Next),
) -> Body {
    let (frames, parts) = mpsc::channel(FRAMES);
    let pump = Pump {
        running,
        form,
        meter,
        client,
        frames,
        keep_alive: api.config.keep_alive,
        stall_timeout: api.config.stall_timeout,
        cut: api.cut.clone(),
    };
    api.streams.spawn(pump.run(first));
    Body::new(Parts {
        parts,
        ended: false,
    })
}

/// Writes what the home has to write: all of an answer, or what follows when another engine went on with it.
#[derive(Default)]
struct Writer(Option<(Style, Option<ChunkWriter>)>);

impl Writer {
    fn new(style: Style) -> Self {
        Self(style.known.then_some((style, None)))
    }

    /// What an engine began is gone on with in its form.
    fn follow(&mut self, on: &GoingOn) {
        if let Some((style, writer)) = &mut self.0 {
            let prompt = on.prepared.prompt_tokens().0;
            let envelope = style.envelope.like(&on.shape);
            let new = ChunkWriter::new(envelope, prompt, style.usage, style.logprobs);
            *writer = Some(new.begun(on.shape.ids));
        }
    }

    fn get(&mut self) -> Option<&mut ChunkWriter> {
        let (style, writer) = self.0.as_mut()?;
        Some(writer.get_or_insert_with(|| {
            let envelope = style.envelope.clone();
            ChunkWriter::new(envelope, style.prompt_tokens, style.usage, style.logprobs)
        }))
    }
}

/// OpenAI's form, or whatever an engine writes.
struct Relay {
    writer: Writer,
    /// Of server-sent events; else of the bytes of one body.
    is_stream: bool,
}

impl Form for Relay {
    fn silence(&self) -> Option<Bytes> {
        self.is_stream.then(|| Bytes::from_static(COMMENT))
    }

    fn tokens(&mut self, batch: &TokenBatch) -> Result<Option<Bytes>, HomeError> {
        let head = batch.wire.head.as_ref();
        if let Some(on) = head.and_then(|head| head.going_on.as_ref()) {
            self.writer.follow(on);
        }
        let bytes = match self.writer.get() {
            Some(writer) if batch.wire.is_empty() => {
                let mut out = Vec::new();
                writer.tokens(batch, &mut out);
                out.into()
            }
            Some(writer) => {
                writer.skip(&batch.logprobs);
                batch.wire.bytes.clone()
            }
            None => batch.wire.bytes.clone(),
        };
        Ok((!bytes.is_empty()).then_some(bytes))
    }

    fn finished(&mut self, finish: Finish) -> Result<Bytes, HomeError> {
        let late = finish.wire.head.as_ref().filter(|head| !head.is_stream());
        Ok(match (late, self.writer.get()) {
            // The answer turned out to be none when its head was long gone.
            (Some(_), _) => told(&finish.wire.bytes),
            (None, Some(writer)) if finish.wire.is_empty() => {
                let mut out = Vec::new();
                writer.finish(&finish, &mut out);
                out.into()
            }
            (None, _) => finish.wire.bytes,
        })
    }

    fn failed(&self, error: &ApiError) -> Option<Bytes> {
        self.is_stream.then(|| {
            let mut out = Vec::new();
            openai::event(&mut out, &error.frame());
            openai::done(&mut out);
            out.into()
        })
    }
}

/// What a stream has to tell next.
pub(super) enum Next {
    Event(HomeEvent),
    Silence,
    Cut,
}

/// A piece of a stream.
enum Part {
    More(Bytes),
    Last(Bytes),
}

/// Feeds one stream until it ends, its client is gone or stalls, or the node goes down.
struct Pump<F> {
    running: Running,
    form: F,
    meter: Meter,
    client: Client,
    frames: mpsc::Sender<Part>,
    keep_alive: Duration,
    stall_timeout: Duration,
    cut: CancellationToken,
}

impl<F: Form> Pump<F> {
    async fn run(mut self, first: Next) {
        let mut next = first;
        loop {
            let (part, ending) = self.write(next);
            if let Some(part) = part
                && !self.send(part).await
            {
                return;
            }
            if let Some(ending) = ending {
                self.note(ending);
                return;
            }
            next = tokio::select! {
                biased;
                // The body is gone, so the client is: dropping the request aborts it.
                () = self.frames.closed() => return,
                () = self.cut.cancelled() => Next::Cut,
                event = timeout(self.keep_alive, self.running.events.recv()) => match event {
                    Ok(Some(event)) => Next::Event(event),
                    Ok(None) => Next::Event(HomeEvent::Failed(cut_short())),
                    Err(_) => Next::Silence,
                },
            };
        }
    }

    /// What goes out, if anything, and how the stream ends, if it does.
    fn write(&mut self, next: Next) -> (Option<Part>, Option<Ending>) {
        let written = match next {
            Next::Silence => Ok((self.form.silence().map(Part::More), None)),
            Next::Event(HomeEvent::Tokens(batch)) => {
                self.meter.tokens(batch.ids.len());
                let written = self.form.tokens(&batch);
                written.map(|bytes| (bytes.map(Part::More), None))
            }
            Next::Event(HomeEvent::Finished(finish)) => self.form.finished(finish).map(|bytes| {
                self.meter.finished();
                (Some(Part::Last(bytes)), Some(Ending::Completed))
            }),
            Next::Event(HomeEvent::Failed(error)) => Err(error),
            Next::Cut => Err(HomeError::ShuttingDown),
        };
        written.unwrap_or_else(|error| {
            let error = ApiError::from(error);
            let ending = Ending::Failed(error.detail().to_owned());
            (self.form.failed(&error).map(Part::Last), Some(ending))
        })
    }

    /// Whether the client took it, or at least what came before.
    async fn send(&self, part: Part) -> bool {
        match timeout(self.stall_timeout, self.frames.send(part)).await {
            Ok(sent) => sent.is_ok(),
            Err(_) => {
                self.note(Ending::Stalled);
                if let Some(closer) = &self.client.closer {
                    closer.close();
                }
                false
            }
        }
    }

    fn note(&self, ending: Ending) {
        if let Err(second) = self.client.ending.set(ending) {
            tracing::error!(?second, "a stream ended twice");
        }
    }
}

/// An engine's refusal, for a client that was promised a stream.
fn told(body: &[u8]) -> Bytes {
    let mut out = b"data: ".to_vec();
    out.extend(body.iter().filter(|byte| !matches!(byte, b'\r' | b'\n')));
    out.extend_from_slice(b"\n\n");
    openai::done(&mut out);
    out.into()
}

/// The response body: what the task sends. Dropping it ends the task.
struct Parts {
    parts: mpsc::Receiver<Part>,
    ended: bool,
}

impl HttpBody for Parts {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let part = ready!(self.parts.poll_recv(context));
        self.ended = !matches!(part, Some(Part::More(_)));
        Poll::Ready(Some(match part {
            Some(Part::More(bytes) | Part::Last(bytes)) => Ok(Frame::data(bytes)),
            // Not the proper end of a chunked body: a client must not take a torn stream for a whole one.
            None => Err(io::Error::other("the stream was cut")),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
