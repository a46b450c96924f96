//! One request at the engine: from the connection to the last byte of its answer.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{HeaderMap, Response};
use serde_json::{Value, json};
use shoal_gossip::Tokens;

use super::answer::{Before, End, Ending, GoOn, Ids, Opaque, Reader, Said, Whole};
use super::client::{Client, Unreachable};
use super::kind::ServerKind;
use super::kv::Along;
use super::question::{Asked, Manner, Question};
use super::told::{self, Tail};
use crate::engine::EngineError;
use crate::engine::answer::AnswerHead;
use crate::engine::work::{Job, RequestKind};

/// Time the engine has to render, tokenise or write out a prompt; the longest take a second.
const PATIENCE: Duration = Duration::from_secs(10);

/// What comes of a request, piece by piece.
#[derive(Debug)]
pub(super) enum Told {
    Said(Said),
    End(End),
}

/// How long an engine asked to be left alone, where it said so.
pub(super) type RetryAfter = Option<Duration>;

/// A request at the engine. Dropping it closes its connection, and the engine aborts it.
pub(super) struct Exchange {
    state: State,
    /// Of a request whose form the mesh knows.
    kind: Option<RequestKind>,
    model: String,
    fingerprint: u64,
    pub(super) retry_after: RetryAfter,
    /// Prompt length, once it was found out on the way.
    pub(super) prompt: Option<Tokens>,
}

type Begun = Result<(Response<Incoming>, Manner, Option<Seam>), EngineError>;

/// What a request that goes on elsewhere begins with.
struct Seam {
    own_form: bool,
    stop: Vec<String>,
    told: String,
    spoken: Option<String>,
    alternatives: usize,
    prompt: Tokens,
}

enum State {
    Asking(BoxFuture<'static, Begun>),
    Answering(Box<(Incoming, Reader)>),
    Ended,
}

impl Exchange {
    /// Begins to ask for a job, with what goes along for its KV. Nothing happens before [`Self::next`].
    pub(super) fn new(
        client: Client,
        (asked, along): (Asked, Along),
        job: Job,
        fingerprint: u64,
    ) -> Self {
        let (kind, model) = (job.kind, job.prepared.model.clone());
        let raw = job.generated.is_empty() && !job.body.is_empty();
        let state = if raw {
            let Question { http, body, manner } = asked.raw(&job, &along);
            let sent = client.send(job.request, http, body);
            State::Asking(
                sent.map(|sent| Ok((sent.map_err(unreachable)?, manner, None)))
                    .boxed(),
            )
        } else {
            State::Asking(go_on(client, (asked, along), job).boxed())
        };
        Self {
            state,
            kind,
            model,
            fingerprint,
            retry_after: None,
            prompt: None,
        }
    }

    /// The next piece. May be dropped and called again; nothing is lost.
    ///
    /// # Errors
    /// Why there is none and will be none.
    pub(super) async fn next(&mut self) -> Result<Told, EngineError> {
        loop {
            match &mut self.state {
                State::Asking(asking) => {
                    let begun = Pin::new(asking).await;
                    self.state = State::Ended;
                    self.begin(begun?)?;
                }
                State::Answering(answering) => {
                    let (body, reader) = &mut **answering;
                    if let Some(said) = reader.take() {
                        return Ok(Told::Said(said));
                    }
                    if reader.is_done() {
                        return self.end();
                    }
                    match body.frame().await {
                        Some(Ok(frame)) => {
                            if let Ok(bytes) = frame.into_data() {
                                reader.push(bytes)?;
                            }
                        }
                        Some(Err(error)) => {
                            return Err(unreachable(error.to_string()));
                        }
                        None => return self.end(),
                    }
                }
                State::Ended => return Err(unreachable("there is no more".into())),
            }
        }
    }

    fn end(&mut self) -> Result<Told, EngineError> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Answering(answering) => answering.1.end().map(Told::End),
            State::Asking(_) | State::Ended => Err(unreachable("there is no more".into())),
        }
    }

    /// Decides by its head how an answer is read, if it is one.
    fn begin(
        &mut self,
        (response, manner, seam): (Response<Incoming>, Manner, Option<Seam>),
    ) -> Result<(), EngineError> {
        let status = response.status().as_u16();
        self.retry_after = retry_after(response.headers());
        self.refusal(status)?;
        let head = AnswerHead {
            status,
            headers: passed_on(response.headers()),
            going_on: None,
        };
        let good = response.status().is_success();
        let reader = match (manner, head.is_stream() && good) {
            (Manner::GoOn, true) => {
                let seam =
                    seam.ok_or_else(|| unreachable("it has nothing to go on from".into()))?;
                self.prompt = Some(seam.prompt);
                let on = GoOn::new(Before {
                    own_form: seam.own_form,
                    stop: &seam.stop,
                    told: &seam.told,
                    spoken: seam.spoken.as_deref(),
                    alternatives: seam.alternatives,
                });
                Reader::GoOn(Box::new(on))
            }
            (Manner::GoOn, false) => {
                return Err(unreachable(format!("it cannot go on: status {status}")));
            }
            (Manner::Ids(source, prepared), true) => Reader::Ids(Box::new(Ids::new(
                head,
                (source, prepared),
                self.fingerprint,
            ))),
            (Manner::Opaque, true) => {
                let ending = match self.kind {
                    Some(_) => Ending::Done,
                    None => Ending::Event,
                };
                Reader::Opaque(Box::new(Opaque::new(head, ending)))
            }
            (_, false) => {
                let json = head
                    .header("content-type")
                    .is_some_and(|kind| kind.contains("json"));
                if good && self.kind.is_some() && !json {
                    let kind = head.header("content-type").unwrap_or("no content-type");
                    return Err(unreachable(format!("it answers with {kind}")));
                }
                Reader::Whole(Box::new(Whole::new(head, good && self.kind.is_some())))
            }
        };
        self.state = State::Answering(Box::new((response.into_body(), reader)));
        Ok(())
    }

    /// Answers that another node may do better.
    fn refusal(&self, status: u16) -> Result<(), EngineError> {
        match status {
            429 => Err(EngineError::QueueFull),
            503 => Err(EngineError::NotReady),
            404 if self.kind.is_some() => Err(EngineError::UnknownModel(self.model.clone())),
            401 | 403 => Err(unreachable(format!(
                "status {status}: it wants a key (--engine-api-key-file)"
            ))),
            300..=399 => Err(unreachable(format!(
                "status {status}: it points elsewhere; --engine must name the engine itself"
            ))),
            // Not 501 and its like: they are about the request.
            100..200 | 500 | 502 | 504 => Err(unreachable(format!("status {status}"))),
            _ => Ok(()),
        }
    }
}

fn unreachable(why: Unreachable) -> EngineError {
    EngineError::Broken(why)
}

/// Asks an engine to go on from ids.
async fn go_on(client: Client, (asked, along): (Asked, Along), mut job: Job) -> Begun {
    if job.prepared.prompt.is_empty() {
        let ids = prompt_ids(&client, &job).await?;
        job.prepared.prompt = ids.into();
    }
    let told = text_of(&client, asked.kind, &job).await?;
    let spoken = (!job.spoken.is_empty()).then(|| told::all(&job.spoken));
    let asked_for = usize::from(job.prepared.params.logprobs.unwrap_or_default());
    let seam = Seam {
        own_form: asked.kind == ServerKind::LlamaServer,
        stop: job.prepared.params.stop.clone(),
        told,
        spoken,
        alternatives: match job.kind {
            Some(RequestKind::Chat) => asked_for,
            Some(RequestKind::Completion) | None => asked_for.saturating_add(1),
        },
        prompt: job.prepared.prompt_tokens(),
    };
    let Question { http, body, manner } = asked.go_on(&job, None, &along)?;
    let sent = client.send(job.request, http, body).await;
    Ok((sent.map_err(unreachable)?, manner, Some(seam)))
}

/// Has the engine read a prompt again, and keep its KV: what goes on with it later finds it there.
///
/// # Errors
/// When it will not.
pub(super) async fn warm_up(
    client: &Client,
    asked: Asked,
    mut job: Job,
) -> Result<Job, EngineError> {
    if job.prepared.prompt.is_empty() {
        job.prepared.prompt = prompt_ids(client, &job).await?.into();
    }
    let Question { http, body, .. } = asked.go_on(&job, Some(1), &Along::default())?;
    let response = client.clone().send(job.request, http, body).await;
    let response = response.map_err(unreachable)?;
    let status = response.status();
    // The answer is of no interest, only that it came to its end.
    let read = super::client::read_whole(response.into_body(), 1024 * 1024).await;
    match (status.is_success(), read) {
        (true, Ok(_)) => Ok(job),
        (true, Err(error)) => Err(unreachable(error)),
        (false, _) => Err(unreachable(format!("status {status}"))),
    }
}

/// A llama-server's ids of a prompt: rendered and tokenised by itself, as it did when it began.
pub(super) async fn prompt_ids(client: &Client, job: &Job) -> Result<Vec<u32>, EngineError> {
    let body: Value = serde_json::from_slice(&job.body)
        .map_err(|_| unreachable("the request's body cannot be read again".into()))?;
    let text = match job.kind {
        Some(RequestKind::Chat) => {
            let rendered = ask(client, "/apply-template", &body).await?;
            rendered["prompt"].clone()
        }
        Some(RequestKind::Completion) | None => body["prompt"].clone(),
    };
    if let Some(ids) = ids_of(&text) {
        return Ok(ids);
    }
    let question = json!({ "content": text, "add_special": true, "parse_special": true });
    let answer = ask(client, "/tokenize", &question).await?;
    ids_of(&answer["tokens"]).ok_or_else(|| unreachable("/tokenize gives no ids".into()))
}

fn ids_of(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array()?.iter();
    ids.map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
        .collect()
}

/// The text of all output so far, as far as the client has it or is owed it.
async fn text_of(client: &Client, kind: ServerKind, job: &Job) -> Result<String, EngineError> {
    let (ids, model) = (job.generated.as_slice(), job.prepared.model.as_str());
    let spoken = told::all(&job.spoken);
    let held_back = told::held_back(&job.prepared.params.stop);
    if ids.is_empty() || held_back == 0 {
        return Ok(spoken);
    }
    let whole = detokenize(client, kind, model, ids).await?;
    if job.spoken.is_empty() {
        return Ok(whole);
    }
    if told::agree(&whole, &spoken) {
        return Ok(told::with_owed(spoken, &whole, held_back));
    }
    for back in told::TAILS {
        let tail = Tail::of(&job.spoken, ids.len(), back);
        let last = ids.get(tail.from..).unwrap_or_default();
        let text = detokenize(client, kind, model, last).await?;
        if let Some(text) = tail.completed(&text) {
            return Ok(told::with_owed(spoken, &text, held_back));
        }
    }
    Ok(spoken)
}

async fn detokenize(
    client: &Client,
    kind: ServerKind,
    model: &str,
    ids: &[u32],
) -> Result<String, EngineError> {
    let answer = ask(
        client,
        "/detokenize",
        &json!({ "model": model, "tokens": ids }),
    )
    .await?;
    let field = match kind {
        ServerKind::LlamaServer => "content",
        ServerKind::Vllm | ServerKind::Sglang | ServerKind::OpenAi => "prompt",
    };
    let text = answer[field].as_str().map(str::to_owned);
    text.ok_or_else(|| unreachable("/detokenize gives no text".into()))
}

async fn ask(client: &Client, path: &str, question: &Value) -> Result<Value, EngineError> {
    let body = Bytes::from(question.to_string());
    let (status, body) = client
        .post(path, body, PATIENCE)
        .await
        .map_err(unreachable)?;
    serde_json::from_slice(&body)
        .ok()
        .filter(|_| (200..300).contains(&status))
        .ok_or_else(|| unreachable(format!("{path} answers with status {status}")))
}

/// Headers of an engine's answer that concern the client: not those of the connection, nor of the server's own.
fn passed_on(headers: &HeaderMap) -> Vec<(String, String)> {
    const LEFT: [&str; 14] = [
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-connection",
        "server",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "vary",
        "www-authenticate",
        "x-request-id",
    ];
    let mut kept = Vec::new();
    for (name, value) in headers {
        let name = name.as_str();
        if LEFT.contains(&name) || name.starts_with("access-control-") {
            continue;
        }
        if let Ok(value) = value.to_str() {
            kept.push((name.to_owned(), value.to_owned()));
        }
    }
    kept
}

/// Whole seconds, as engines send it; dates are not believed.
fn retry_after(headers: &HeaderMap) -> RetryAfter {
    let seconds = headers
        .get("retry-after")?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Some(Duration::from_secs(seconds))
}
