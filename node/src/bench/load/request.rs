//! One request, from its intended arrival to its record.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::StatusCode;
use hyper::body::Incoming;
use serde::Deserialize;
use shoal_gossip::{Clock, Timestamp};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::answer::Answer;
use super::ask::Form;
use super::node::{Connection, Node};
use crate::report::{Outcome, Record};
use crate::workload::Arrival;

/// Longest refusal that is read: endpoints say what is wrong in some hundred bytes.
const MAX_REFUSAL: usize = 64 * 1024;

/// Characters of a reason that are kept: two lines on a screen.
const MAX_REASON: usize = 200;

/// Time in which a body has to end behind its `[DONE]`, for its connection to be kept. Servers send both together,
/// so a second is enough for the slowest machine, and the request keeps its place below the bound no longer.
const END_OF_BODY: Duration = Duration::from_secs(1);

/// Time since the start of the run.
#[derive(Debug)]
pub(super) struct Watch {
    clock: Arc<dyn Clock>,
    started: Timestamp,
}

impl Watch {
    pub(super) fn start(clock: Arc<dyn Clock>) -> Self {
        let started = clock.now();
        Self { clock, started }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.clock.now().since(self.started)
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// As it is counted: `http 429`, `connection`, `timeout`, `stream`, `error event` or `stopped`.
    pub(super) kind: String,
    /// In words.
    pub(super) reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.reason)
    }
}

/// What endpoints say of an error.
#[derive(Deserialize)]
struct Refusal {
    error: RefusalInner,
}

#[derive(Deserialize)]
struct RefusalInner {
    message: String,
}

impl Failure {
    fn new(kind: impl Into<String>, reason: &str) -> Self {
        Self {
            kind: kind.into(),
            reason: reason.chars().take(MAX_REASON).collect(),
        }
    }

    /// No connection, or one that ended before it answered.
    pub(super) fn connection(error: &dyn Error) -> Self {
        Self::new("connection", &with_sources(error))
    }

    /// A stream that broke or is none.
    pub(super) fn stream(reason: impl fmt::Display) -> Self {
        Self::new("stream", &reason.to_string())
    }

    /// A stream that says that it failed.
    pub(super) fn error_event(data: &[u8]) -> Self {
        Self::new("error event", &message(data))
    }

    /// A status that is no success.
    pub(super) fn status(status: StatusCode, body: &[u8]) -> Self {
        Self::new(format!("http {}", status.as_u16()), &message(body))
    }
}

/// The message in an error's body, or all of it.
fn message(body: &[u8]) -> String {
    match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => refusal.error.message,
        Err(_) => String::from_utf8_lossy(body).trim().to_owned(),
    }
}

/// hyper's errors tell what happened in their sources only.
fn with_sources(error: &dyn Error) -> String {
    std::iter::successors(Some(error), |&error| error.source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

/// A request that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// Its number, in order of arrival.
    pub(super) index: u64,
    pub(super) record: Record,
    pub(super) failure: Option<Failure>,
}

/// What the requests of a load share.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) form: Form,
    pub(super) timeout: Duration,
    pub(super) watch: Watch,
    pub(super) stop: CancellationToken,
}

impl Sender {
    /// Asks once and tells what became of it.
    pub(super) async fn request(
        &self,
        index: u64,
        arrival: Arrival,
        entry: u32,
        node: &Node,
    ) -> Ended {
        let mut answer = Answer::default();
        let ended = match self.form.body(index, &arrival) {
            Ok(body) => {
                let exchange = self.exchange(arrival.at, body.into(), node, &mut answer);
                tokio::select! {
                    biased;
                    ended = timeout(self.timeout, exchange) => ended.unwrap_or_else(|_| {
                        let reason = format!("no end after {} s", self.timeout.as_secs_f64());
                        Err(Failure::new("timeout", &reason))
                    }),
                    () = self.stop.cancelled() => Err(Failure::new("stopped", "the run was stopped")),
                }
            }
            Err(error) => Err(Failure::stream(error)),
        };
        let failure = match ended {
            Ok(rest) => {
                rest.finish(node).await;
                None
            }
            Err(failure) => Some(failure),
        };
        let outcome = match &failure {
            None => Outcome::Finished,
            Some(failure) => Outcome::Failed(failure.kind.clone()),
        };
        let record = Record {
            at: arrival.at,
            prompt: arrival.prompt,
            output: answer.output(),
            outcome,
            first: answer.first(),
            end: answer.end(),
            longest_gap: answer.longest_gap(),
            entry,
            host: None,
            moves: 0,
            preemptions: 0,
            preemption_loss: Duration::ZERO,
        };
        Ended {
            index,
            record,
            failure,
        }
    }

    async fn exchange(
        &self,
        arrival: Duration,
        body: Bytes,
        node: &Node,
        answer: &mut Answer,
    ) -> Result<Rest, Failure> {
        let (response, connection) = node.post(self.form.path(), body).await?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let refusal = match Limited::new(body, MAX_REFUSAL).collect().await {
                Ok(refusal) => {
                    node.keep(connection);
                    refusal.to_bytes()
                }
                // The status alone says enough.
                Err(_) => Bytes::new(),
            };
            return Err(Failure::status(status, &refusal));
        }
        while !answer.is_done() {
            let frame = body.frame().await.transpose();
            let now = self.watch.elapsed().saturating_sub(arrival);
            match frame.map_err(|error| Failure::stream(with_sources(&error)))? {
                Some(frame) => {
                    if let Some(bytes) = frame.data_ref() {
                        answer.take(now, bytes)?;
                    }
                }
                None => {
                    answer.close(now)?;
                    break;
                }
            }
        }
        Ok(Rest { connection, body })
    }
}

/// What is left of an answer that is whole.
struct Rest {
    connection: Connection,
    body: Incoming,
}

impl Rest {
    /// Keeps the connection, if its body ends soon.
    async fn finish(mut self, node: &Node) {
        let end = async { while let Some(Ok(_)) = self.body.frame().await {} };
        // A body that broke closes its connection, so keeping that does no harm.
        if timeout(END_OF_BODY, end).await.is_ok() {
            node.keep(self.connection);
        }
    }
}
