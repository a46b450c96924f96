//! `POST /generate` and `POST /generate_benchmark`, as the demo servers of vLLM and Llumnix have them.
//!
//! Each becomes a completion of the mesh, so that every engine serves them: `ask` turns the body round, `transcript` takes the
//! text out of what comes back.
//!
//! ```text
//! /generate            {"prompt","stream",…}  → {"text":[prompt + output]}; streamed, such an object a line with all text so far
//! /generate_benchmark  {"prompt",…}           → {"request_id","generated_text","num_output_tokens_cf","per_token_latency"}
//! ```

mod ask;
mod transcript;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Serialize;
use shoal_gossip::{ModelApi, RequestId, Timestamp, unix_time};
use tokio::time::timeout;

use self::ask::Wish;
use self::transcript::Transcript;
use crate::api::asked::{self, Asked};
use crate::api::error::ApiError;
use crate::api::generate::{self, Client, Entered, Meter, cut_short, host};
use crate::api::stream::{self, Form, Next};
use crate::api::{Api, headers, route};
use crate::engine::answer::AnswerHead;
use crate::engine::work::RequestKind;
use crate::engine::{Finish, TokenBatch};
use crate::frontend::{ClientAsk, HomeError, HomeEvent, Running};

/// Prompt and output as one text. A body in SGLang's form goes to engines as it is.
pub(super) async fn generate(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Response, ApiError> {
    let entered = Entered::read(&api, request).await?;
    if ask::is_native(&entered.body) {
        let models = api.frontend.models();
        if !models.iter().any(|model| model.api == ModelApi::Http) {
            let message = "no engine of this mesh takes this form of body: send `prompt`, and how to sample beside it";
            return Err(ApiError::bad_request(message.to_owned()));
        }
        return generate::answer(&api, None, entered).await;
    }
    let body = entered.body.clone();
    let wish = Wish::read(&body)?;
    let begun = Begun::new(
        &api,
        &wish,
        wish.body(&api.frontend.models(), false)?,
        entered,
    )?;
    generate::unless_cut(&api, async {
        if wish.stream {
            begun.stream(&api).await
        } else {
            begun.whole(&api, Figures::text).await
        }
    })
    .await
}

/// The output, and when each of its tokens came.
pub(super) async fn benchmark(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Response, ApiError> {
    let entered = Entered::read(&api, request).await?;
    let body = entered.body.clone();
    let wish = Wish::read(&body)?;
    let begun = Begun::new(
        &api,
        &wish,
        wish.body(&api.frontend.models(), true)?,
        entered,
    )?;
    generate::unless_cut(&api, begun.whole(&api, Figures::figures)).await
}

/// A request that the mesh is to take.
struct Begun {
    ask: ClientAsk,
    prompt: String,
    meter: Meter,
    client: Client,
}

impl Begun {
    fn new(api: &Api, wish: &Wish<'_>, body: Bytes, entered: Entered) -> Result<Self, ApiError> {
        let kind = Some(RequestKind::Completion);
        let Asked { sketch, fit, .. } = Asked::read(kind, &body, &api.frontend.models())?;
        let ask = ClientAsk {
            kind,
            http: asked::http(route::COMPLETIONS, &entered.head.headers)?,
            body,
            sketch,
            fit,
        };
        let prompt = wish.prompt.clone();
        let (meter, client) = entered.watched(api);
        Ok(Self {
            ask,
            prompt,
            meter,
            client,
        })
    }

    /// Answers when all is there.
    async fn whole(
        self,
        api: &Arc<Api>,
        write: impl FnOnce(&Figures) -> Vec<u8>,
    ) -> Result<Response, ApiError> {
        let (mut meter, client) = (self.meter, self.client);
        let mut running = generate::start(api, self.ask).await?;
        let mut figures = Figures::new(running.id, self.prompt, meter.started());
        while let Some(event) = running.events.recv().await {
            match event {
                HomeEvent::Tokens(mut batch) => {
                    meter.tokens(batch.ids.len());
                    if let Some(head) = refusal(batch.wire.head.as_deref()) {
                        let first = std::mem::take(&mut batch.wire.bytes);
                        let relayed = (head.clone(), first);
                        return Ok(stream::relay(api, running, relayed, (meter, client)));
                    }
                    let tokens = figures.transcript.tokens(&batch)?;
                    figures.came(tokens, api.frontend.now());
                }
                HomeEvent::Finished(finish) => {
                    meter.finished();
                    let host = host(running.host);
                    if let Some(head) = refusal(finish.wire.head.as_deref()) {
                        return Ok(stream::relayed(head, Body::from(finish.wire.bytes), host));
                    }
                    let total = figures.transcript.finished(&finish)?;
                    figures.ended(total, api.frontend.now());
                    let json = HeaderValue::from_static("application/json");
                    let headers = [(CONTENT_TYPE, json), (headers::SHOAL_HOST, host)];
                    return Ok((headers, write(&figures)).into_response());
                }
                HomeEvent::Failed(error) => return Err(error.into()),
            }
        }
        Err(cut_short().into())
    }

    /// Answers line by line. As in any stream, a request that fails at once gets a status of its own.
    async fn stream(self, api: &Arc<Api>) -> Result<Response, ApiError> {
        let watched = (self.meter, self.client);
        let mut running = generate::start(api, self.ask).await?;
        let first = match timeout(api.config.keep_alive, running.events.recv()).await {
            Ok(Some(HomeEvent::Failed(error))) => return Err(error.into()),
            Ok(None) => return Err(cut_short().into()),
            Ok(Some(event)) => Next::Event(event),
            Err(_) => Next::Silence,
        };
        match &first {
            Next::Event(HomeEvent::Finished(finish)) => {
                if let Some(head) = refusal(finish.wire.head.as_deref()) {
                    watched.0.finished();
                    let body = Body::from(finish.wire.bytes.clone());
                    return Ok(stream::relayed(head, body, host(running.host)));
                }
            }
            Next::Event(HomeEvent::Tokens(batch)) => {
                if let Some(head) = refusal(batch.wire.head.as_deref()) {
                    let relayed = (head.clone(), batch.wire.bytes.clone());
                    return Ok(stream::relay(api, running, relayed, watched));
                }
            }
            Next::Event(HomeEvent::Failed(_)) | Next::Silence | Next::Cut => {}
        }
        Ok(lines(
            api,
            running,
            self.prompt,
            (watched.0, watched.1, first),
        ))
    }
}

/// The head of an answer that is none.
fn refusal(head: Option<&AnswerHead>) -> Option<&AnswerHead> {
    head.filter(|head| !(200..300).contains(&head.status))
}

fn lines(
    api: &Arc<Api>,
    running: Running,
    prompt: String,
    watched: (Meter, Client, Next),
) -> Response {
    let host = host(running.host);
    let form = Lines {
        transcript: Transcript::new(prompt),
        told: None,
    };
    let body = stream::pump(api, running, form, watched);
    let fixed = HeaderValue::from_static;
    let headers: [(HeaderName, HeaderValue); 4] = [
        (CONTENT_TYPE, fixed("application/x-ndjson")),
        (CACHE_CONTROL, fixed("no-cache")),
        (headers::ACCEL_BUFFERING, fixed("no")),
        (headers::SHOAL_HOST, host),
    ];
    (headers, body).into_response()
}

#[derive(Serialize)]
struct Text<'a> {
    text: [&'a str; 1],
}

/// A stream of lines, each with the prompt and all output so far.
struct Lines {
    transcript: Transcript,
    /// Bytes of the text in the last line.
    told: Option<usize>,
}

impl Lines {
    fn line(&self) -> Bytes {
        let text = [self.transcript.text()];
        line(&Text { text })
    }

    /// The next line, when there is something new to say.
    fn news(&mut self) -> Option<Bytes> {
        let now = Some(self.transcript.text().len());
        (std::mem::replace(&mut self.told, now) != now).then(|| self.line())
    }
}

impl Form for Lines {
    /// What was said, once more: these streams know no comments.
    fn silence(&self) -> Option<Bytes> {
        Some(self.line())
    }

    fn tokens(&mut self, batch: &TokenBatch) -> Result<Option<Bytes>, HomeError> {
        self.transcript.tokens(batch)?;
        Ok(self.news())
    }

    fn finished(&mut self, finish: Finish) -> Result<Bytes, HomeError> {
        self.transcript.finished(&finish)?;
        Ok(self.news().unwrap_or_default())
    }

    fn failed(&self, error: &ApiError) -> Option<Bytes> {
        Some(line(&error.frame()))
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    // Plain data into memory: neither the data nor the writer can fail.
    serde_json::to_vec(value).unwrap_or_default()
}

fn line(value: &impl Serialize) -> Bytes {
    let mut out = json(value);
    out.push(b'\n');
    out.into()
}

/// An answer in the making, with the time of each token.
struct Figures {
    request: RequestId,
    transcript: Transcript,
    /// When the last token came; at first, when the request did.
    last: Timestamp,
    latencies: Vec<Latency>,
}

/// When a token came, in seconds since 1970, and the milliseconds since the one before it or since the request.
#[derive(Clone, Copy, Serialize)]
struct Latency(f64, f64);

#[derive(Serialize)]
struct Benchmark<'a> {
    request_id: String,
    generated_text: &'a str,
    num_output_tokens_cf: u32,
    per_token_latency: &'a [Latency],
}

impl Figures {
    fn new(request: RequestId, prompt: String, started: Timestamp) -> Self {
        Self {
            request,
            transcript: Transcript::new(prompt),
            last: started,
            latencies: Vec::new(),
        }
    }

    /// Tokens have come: the first of them took the time, those that came with it took none.
    fn came(&mut self, count: u32, now: Timestamp) {
        let at = unix_time().as_secs_f64();
        for _ in 0..count {
            let since = now.since(self.last);
            self.last = now;
            self.latencies.push(Latency(at, millis(since)));
        }
    }

    /// There were so many in all. Those that nobody saw come, such as one that ends the text, came with the end.
    fn ended(&mut self, total: u32, now: Timestamp) {
        let total = total as usize;
        self.latencies.truncate(total);
        let missing = total - self.latencies.len();
        self.came(u32::try_from(missing).unwrap_or(u32::MAX), now);
    }

    fn text(&self) -> Vec<u8> {
        let text = [self.transcript.text()];
        json(&Text { text })
    }

    fn figures(&self) -> Vec<u8> {
        json(&Benchmark {
            request_id: self.request.to_string(),
            generated_text: self.transcript.output(),
            num_output_tokens_cf: u32::try_from(self.latencies.len()).unwrap_or(u32::MAX),
            per_token_latency: &self.latencies,
        })
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
