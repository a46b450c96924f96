//! Bodies: reading a request's within its bounds, and telling when an answer's has been sent.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::EXPECT;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::timeout;

use crate::api::ApiConfig;
use crate::api::error::{ApiError, ErrorKind};

/// How long the rest of a body that is too long is read and thrown away. Without that the connection is
/// reset while the client still writes, and most clients then never see the answer.
const LINGER: Duration = Duration::from_secs(1);

/// Memory taken at once for a body, whatever length it announces.
const FIRST_CHUNK: usize = 64 * 1024;

/// Reads a body of at most `config.max_body` bytes within `config.body_timeout`.
pub(super) async fn read(
    headers: &HeaderMap,
    mut body: Body,
    config: &ApiConfig,
) -> Result<Bytes, ApiError> {
    let announced = body.size_hint().lower();
    if announced > config.max_body as u64 {
        // A client that asked first has sent nothing yet.
        if !headers.contains_key(EXPECT) {
            drain(body).await;
        }
        return Err(too_large(config));
    }
    let start = FIRST_CHUNK.min(usize::try_from(announced).unwrap_or(FIRST_CHUNK));
    let mut read = BytesMut::with_capacity(start);
    match timeout(
        config.body_timeout,
        fill(&mut body, &mut read, config.max_body),
    )
    .await
    {
        Ok(Ok(true)) => Ok(read.freeze()),
        Ok(Ok(false)) => {
            drain(body).await;
            Err(too_large(config))
        }
        Ok(Err(error)) => Err(ApiError::bad_request(format!(
            "the body could not be read: {error}"
        ))),
        Err(_) => Err(ApiError::new(
            ErrorKind::SlowBody,
            format!(
                "the body did not arrive within {} s",
                config.body_timeout.as_secs_f32()
            ),
        )),
    }
}

/// Whether the whole body fitted.
async fn fill(body: &mut Body, into: &mut BytesMut, limit: usize) -> Result<bool, axum::Error> {
    while let Some(frame) = body.frame().await {
        // Trailers are no part of a body.
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        if data.len() > limit - into.len() {
            return Ok(false);
        }
        into.extend_from_slice(&data);
    }
    Ok(true)
}

fn too_large(config: &ApiConfig) -> ApiError {
    let message = format!("the body is longer than {} bytes", config.max_body);
    ApiError::new(ErrorKind::TooLarge, message)
}

async fn drain(mut body: Body) {
    let rest = async { while body.frame().await.is_some_and(|frame| frame.is_ok()) {} };
    if timeout(LINGER, rest).await.is_err() {
        tracing::trace!("a client writes on after its body was refused");
    }
}

/// What is to happen when an answer has been handed over whole. Dropped without, it was not.
pub(super) trait AtEnd {
    /// The answer has been handed over whole.
    fn at_end(self);
}

/// A body that keeps something until it has been sent, or given up.
pub(super) struct Held<G: AtEnd> {
    body: Body,
    guard: Option<G>,
}

impl<G: AtEnd> Held<G> {
    pub(super) fn new(body: Body, guard: G) -> Self {
        Self {
            body,
            guard: Some(guard),
        }
    }

    fn release_at_end(&mut self, ended: bool) {
        // Whoever sends a body need not ask on when it says by itself that it is at its end.
        if (ended || self.body.is_end_stream())
            && let Some(guard) = self.guard.take()
        {
            guard.at_end();
        }
    }
}

impl<G: AtEnd + Unpin> HttpBody for Held<G> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(None) => self.release_at_end(true),
            Poll::Ready(Some(Ok(_))) => self.release_at_end(false),
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<G: AtEnd> Drop for Held<G> {
    fn drop(&mut self) {
        self.release_at_end(false);
    }
}
