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
use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::api::error::ApiError;
use crate::api::generate::{Client, Meter, cut_short, host};
use crate::api::observe::Ending;
use crate::api::{Api, headers};
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
    writer: ChunkWriter,
    meter: Meter,
    client: Client,
) -> Result<Response, ApiError> {
    let first = match timeout(api.config.keep_alive, running.events.recv()).await {
        Ok(Some(HomeEvent::Failed(error))) => return Err(error.into()),
        Ok(None) => return Err(cut_short().into()),
        Ok(Some(event)) => Next::Event(event),
        Err(_) => Next::Silence,
    };
    let host = host(running.host);
    let (frames, parts) = mpsc::channel(FRAMES);
    let pump = Pump {
        running,
        writer,
        meter,
        client,
        frames,
        keep_alive: api.config.keep_alive,
        stall_timeout: api.config.stall_timeout,
        cut: api.cut.clone(),
    };
    api.streams.spawn(pump.run(first));
    let fixed = HeaderValue::from_static;
    let headers = [
        (CONTENT_TYPE, fixed("text/event-stream; charset=utf-8")),
        (CACHE_CONTROL, fixed("no-cache")),
        (headers::ACCEL_BUFFERING, fixed("no")),
        (headers::SHOAL_HOST, host),
    ];
    let body = Body::new(Parts {
        parts,
        ended: false,
    });
    Ok((headers, body).into_response())
}

/// What a stream has to tell next.
enum Next {
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
struct Pump {
    running: Running,
    writer: ChunkWriter,
    meter: Meter,
    client: Client,
    frames: mpsc::Sender<Part>,
    keep_alive: Duration,
    stall_timeout: Duration,
    cut: CancellationToken,
}

impl Pump {
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
        let mut out = Vec::new();
        match next {
            Next::Silence => (Some(Part::More(Bytes::from_static(COMMENT))), None),
            Next::Event(HomeEvent::Tokens(batch)) => {
                self.meter.tokens(batch.ids.len());
                self.writer.tokens(&batch, &mut out);
                ((!out.is_empty()).then(|| Part::More(out.into())), None)
            }
            Next::Event(HomeEvent::Finished(finish)) => {
                self.meter.finished();
                self.writer.finish(&finish, &mut out);
                (Some(Part::Last(out.into())), Some(Ending::Completed))
            }
            Next::Event(HomeEvent::Failed(error)) => Self::failed(error),
            Next::Cut => Self::failed(HomeError::ShuttingDown),
        }
    }

    /// A stream that has begun says why it ends, and ends like any other.
    fn failed(error: HomeError) -> (Option<Part>, Option<Ending>) {
        let error = ApiError::from(error);
        let mut out = Vec::new();
        openai::event(&mut out, &error.frame());
        openai::done(&mut out);
        let ending = Ending::Failed(error.detail().to_owned());
        (Some(Part::Last(out.into())), Some(ending))
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
