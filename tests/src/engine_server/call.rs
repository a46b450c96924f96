//! A request as a dialect gets it, what it understands of it, and what it gives back.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use hyper::{HeaderMap, Method};
use serde_json::{Map, Value};
use shoal_gossip::unix_time;
use shoal_node::engine::EngineError;
use shoal_node::engine::batched::TextModel as _;
use shoal_node::engine::sim::SimText;
use shoal_node::engine::work::{Prepared, RequestKind, SamplingParams};
use shoal_node::openai;

use crate::engine_server::fault::{Fault, Met};
use crate::engine_server::feed::{Over, Sink};
use crate::engine_server::json::Json;
use crate::engine_server::run::{Grouping, Piece, Run};
use crate::engine_server::shared::Shared;
use crate::engine_server::text;

/// Members of a body that mean something to the engine. All others are passed over, as servers do.
const READ: [&str; 17] = [
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "seed",
    "logprobs",
    "top_logprobs",
    "ignore_eos",
    "priority",
    "max_tokens",
    "max_completion_tokens",
];

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// Its number; no other request of this process has it.
    pub(super) serial: u64,
    pub(super) met: Met,
}

impl Call {
    /// The body as JSON; null when it is none.
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// A header as text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The name the client gave it, or one of sixteen digits.
    pub(super) fn name(&self) -> String {
        let given = self.header("x-request-id").map(str::to_owned);
        given.unwrap_or_else(|| self.own_name())
    }

    /// A name of sixteen digits.
    pub(super) fn own_name(&self) -> String {
        format!("{:016x}", self.serial.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// Seconds since 1970 by the clock of the server.
    pub(super) fn created(&self) -> u64 {
        match (self.met.has(&Fault::OddClock), self.serial % 2) {
            (false, _) => unix_time().as_secs(),
            (true, 0) => 0,
            (true, _) => 32_503_680_000,
        }
    }

    /// What divides the ids before which a control token's name is written.
    pub(super) fn control_tokens(&self) -> Option<u32> {
        self.met.find(|fault| match fault {
            Fault::ControlTokens(divisor) => Some(*divisor),
            _ => None,
        })
    }

    fn grouping(&self) -> Grouping {
        let tokens = self.met.find(|fault| match fault {
            Fault::ManyTokensPerEvent(tokens) | Fault::LostIds(tokens) => Some(*tokens),
            _ => None,
        });
        let lost = self.met.find(|fault| match fault {
            Fault::LostIds(_) => Some(()),
            _ => None,
        });
        Grouping {
            tokens: tokens.unwrap_or(1),
            lose_ids: lost.is_some(),
        }
    }
}

/// What a body asks for, as far as all dialects agree.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) kind: RequestKind,
    /// The name under which it is answered.
    pub(super) id: String,
    pub(super) created: u64,
    /// The model that the answer names.
    pub(super) model: String,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// Usage in every event.
    pub(super) continuous: bool,
    pub(super) prompt: Arc<[u32]>,
    pub(super) params: SamplingParams,
    /// The bound on the output, where one was given.
    pub(super) max_tokens: Option<u32>,
    request: openai::GenerateRequest,
}

impl Asked {
    /// Reads a body of OpenAI's shape. `model` is what the answer names if the body names none.
    pub(super) fn read(
        kind: RequestKind,
        body: &Value,
        model: &str,
        call: &Call,
    ) -> Result<Self, EngineError> {
        let mut known: Map<String, Value> = READ
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), body.get(name)?.clone())))
            .collect();
        known.insert("model".to_owned(), model.into());
        let request = openai::parse(kind, Value::from(known).to_string().as_bytes())?;
        let prompt = text::prompt_ids(&request.prompt);
        if let Some(id) = prompt.iter().find(|id| **id >= SimText.vocabulary()) {
            return Err(EngineError::BadRequest {
                message: format!("Token id {id} is out of vocabulary"),
                param: None,
            });
        }
        let flag = |value: &Value| value.as_bool().unwrap_or(false);
        let options = &body["stream_options"];
        Ok(Self {
            kind,
            id: call.own_name(),
            created: call.created(),
            model: body["model"].as_str().unwrap_or(model).to_owned(),
            stream: flag(&body["stream"]),
            include_usage: flag(&options["include_usage"]),
            continuous: flag(&options["continuous_usage_stats"]),
            prompt: prompt.into(),
            params: request.params.clone(),
            max_tokens: request.max_tokens,
            request,
        })
    }

    /// Tokens that the context leaves for the output; `None` when the prompt alone fills it.
    pub(super) fn room(&self, context: u32) -> Option<u32> {
        context
            .checked_sub(self.prompt_tokens())
            .filter(|room| *room > 0)
    }

    pub(super) fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }

    /// Hands it to the engine with this bound on the output.
    pub(super) fn start(
        &mut self,
        server: &Shared,
        call: &Call,
        max_tokens: u32,
    ) -> Result<Run, EngineError> {
        self.params.max_tokens = max_tokens;
        self.params.seed = self.request.seed.unwrap_or(0);
        let prepared = Prepared {
            model: server.engine_model(),
            prompt: self.prompt.clone(),
            params: self.params.clone(),
            seeded: self.request.seed.is_some(),
            priority: self.request.priority,
        };
        let named = (call.serial, self.id.clone());
        let work = (self.kind, prepared);
        let mut run = Run::start(&*server.engine, &server.table, named, work, call.grouping())?;
        run.ticket = server.kv.begin(&call.json(), &self.prompt);
        Ok(run)
    }
}

/// How a dialect writes one answer.
pub(super) trait Shape: Send + 'static {
    /// The whole answer when it is no stream.
    fn whole(&mut self, all: &Piece) -> Json;

    /// What stands before the first tokens.
    fn opening(&mut self) -> Option<Json> {
        None
    }

    /// The events that tell a piece.
    fn events(&mut self, piece: &Piece) -> Vec<Json>;

    /// What stands after the last tokens. `output` is their number in all.
    fn closing(&mut self, _output: u32) -> Vec<Json> {
        Vec::new()
    }

    /// An error in the middle of a stream.
    fn error(&mut self, error: &EngineError) -> Json;

    /// The answer when the engine failed before any of it was sent.
    fn refusal(&self, error: &EngineError) -> Reply;

    /// Whether `[DONE]` ends the stream.
    fn says_done(&self) -> bool {
        true
    }

    /// Whether the head of a stream waits for the first token.
    fn head_waits(&self) -> bool {
        false
    }
}

type Write = Box<dyn FnOnce(Sink) -> BoxFuture<'static, Result<(), Over>> + Send>;

/// The body of a reply.
pub(super) enum Content {
    /// All of it.
    Whole(Bytes),
    /// Written as it comes.
    Stream(Write),
}

/// What a dialect answers.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) content: Content,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(body) => f.debug_tuple("Whole").field(body).finish(),
            Self::Stream(_) => f.write_str("Stream"),
        }
    }
}

impl Reply {
    /// A JSON body.
    pub(super) fn json(status: u16, body: &Json) -> Self {
        Self::text(status, "application/json", body.get().to_owned())
    }

    /// A body of some type.
    pub(super) fn text(status: u16, content_type: &str, body: impl Into<Bytes>) -> Self {
        Self {
            status,
            headers: vec![("content-type", content_type.to_owned())],
            content: Content::Whole(body.into()),
        }
    }

    /// Status 200 and nothing else.
    pub(super) fn empty() -> Self {
        Self {
            status: 200,
            headers: Vec::new(),
            content: Content::Whole(Bytes::new()),
        }
    }

    /// The answer to a request in the engine.
    pub(super) async fn generate(mut run: Run, mut shape: impl Shape, stream: bool) -> Self {
        if !stream {
            return match run.whole().await {
                Ok(all) => Self::json(200, &shape.whole(&all)),
                Err(error) => shape.refusal(&error),
            };
        }
        let mut first = None;
        if shape.head_waits() {
            match run.next().await {
                Some(Err(error)) => return shape.refusal(&error),
                piece => first = piece,
            }
        }
        let write: Write = Box::new(move |sink| Box::pin(stream_out(run, first, shape, sink)));
        Self {
            status: 200,
            headers: vec![("content-type", "text/event-stream".to_owned())],
            content: Content::Stream(write),
        }
    }
}

async fn stream_out(
    mut run: Run,
    mut next: Option<Result<Piece, EngineError>>,
    mut shape: impl Shape,
    mut sink: Sink,
) -> Result<(), Over> {
    let (mut opened, mut output) = (false, 0);
    if next.is_none() {
        next = run.next().await;
    }
    while let Some(piece) = next {
        let events = match piece {
            Ok(piece) => {
                output = piece.output;
                let opening = if opened { None } else { shape.opening() };
                opened = true;
                let mut events = Vec::from_iter(opening);
                events.extend(shape.events(&piece));
                events
            }
            Err(error) => vec![shape.error(&error)],
        };
        for event in events {
            sink.event(event.get()).await?;
        }
        next = run.next().await;
    }
    // The engine has nothing to do with what follows.
    drop(run);
    for event in shape.closing(output) {
        sink.event(event.get()).await?;
    }
    if shape.says_done() {
        sink.event("[DONE]").await?;
    }
    sink.end().await
}
