//! llama-server as recorded: OpenAI's paths in its own shapes, `/completion`, and the tokenizer.

mod settings;
mod shape;

use serde_json::{Value, json};
use shoal_node::engine::EngineError;
use shoal_node::engine::work::RequestKind;

use self::shape::LlamaShape;
use crate::engine_server::call::{Asked, Call, Reply};
use crate::engine_server::json::{Json, ordered};
use crate::engine_server::shared::Shared;
use crate::engine_server::{figures, text, vllm};

const JSON: &str = "application/json; charset=utf-8";

/// Which shape an answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Chat,
    Completions,
    /// llama.cpp's own.
    Completion,
}

impl Path {
    fn kind(self) -> RequestKind {
        match self {
            Self::Chat => RequestKind::Chat,
            Self::Completions | Self::Completion => RequestKind::Completion,
        }
    }
}

pub(super) async fn reply(server: &Shared, call: &Call) -> Reply {
    let mut reply = match (call.method.as_str(), call.path.as_str()) {
        ("GET", "/health" | "/v1/health") => Reply::json(200, &ordered! {"status": "ok"}),
        ("GET", "/v1/models" | "/models") => Reply::json(200, &models(server, call)),
        ("GET", "/props") => Reply::json(200, &settings::props(server)),
        ("GET", "/slots") => {
            let slots = figures::llama_slots(server, call);
            Reply::text(200, JSON, slots.to_string())
        }
        ("GET", "/metrics") => figures::llama_metrics(server, call),
        ("POST", "/v1/chat/completions" | "/chat/completions") => {
            generate(server, call, Path::Chat).await
        }
        ("POST", "/v1/completions") => generate(server, call, Path::Completions).await,
        ("POST", "/completion" | "/completions") => generate(server, call, Path::Completion).await,
        ("POST", "/v1/embeddings") => {
            Reply::json(200, &vllm::embedding(server, call, &call.json()))
        }
        ("POST", "/tokenize") => with_body(call, |body| Ok(tokenize(body))),
        ("POST", "/detokenize") => with_body(call, |body| detokenize(call, body)),
        ("POST", "/apply-template") => with_body(call, |body| apply_template(server, call, body)),
        _ => {
            let error =
                ordered! {"code": 404, "message": "File Not Found", "type": "not_found_error"};
            Reply::json(404, &ordered! {"error": error})
        }
    };
    for (name, value) in &mut reply.headers {
        if *name == "content-type" && value == "application/json" {
            *value = JSON.to_owned();
        }
    }
    reply.headers.push(("server", "llama.cpp".to_owned()));
    reply
}

fn bad(message: &str) -> EngineError {
    EngineError::BadRequest {
        message: message.to_owned(),
        param: None,
    }
}

fn engine_error(cause: &EngineError) -> (u16, Json) {
    let (status, kind) = match cause {
        EngineError::BadRequest { .. } => (400, "invalid_request_error"),
        EngineError::UnknownModel(_) => (404, "not_found_error"),
        EngineError::QueueFull | EngineError::NotReady => (503, "unavailable_error"),
        EngineError::Broken(_) => (500, "server_error"),
    };
    let error = ordered! {"code": status, "message": cause.to_string(), "type": kind};
    (status, ordered! {"error": error})
}

fn refusal(cause: &EngineError) -> Reply {
    let (status, body) = engine_error(cause);
    Reply::json(status, &body)
}

fn body(call: &Call) -> Result<Value, EngineError> {
    serde_json::from_slice(&call.body).map_err(|cause| {
        bad(&format!(
            "[json.exception.parse_error.101] parse error at line {}, column {}: {cause}",
            cause.line(),
            cause.column()
        ))
    })
}

fn with_body(call: &Call, answer: impl FnOnce(&Value) -> Result<Json, EngineError>) -> Reply {
    match body(call).and_then(|body| answer(&body)) {
        Ok(body) => Reply::json(200, &body),
        Err(cause) => refusal(&cause),
    }
}

async fn generate(server: &Shared, call: &Call, path: Path) -> Reply {
    let read = body(call).and_then(|body| {
        let mut asked = Asked::read(path.kind(), &as_openai(&body, path), &server.model(), call)?;
        // It is called what it is called, whatever was asked for.
        asked.model = server.model();
        asked.id = format!("chatcmpl-{}{}", call.own_name(), call.own_name());
        Ok((body, asked))
    });
    let (body, mut asked) = match read {
        Ok(read) => read,
        Err(cause) => return refusal(&cause),
    };
    let context = server.context();
    let Some(room) = asked.room(context) else {
        let prompt = asked.prompt_tokens();
        let error = ordered! {
            "code": 400,
            "message": format!(
                "request ({prompt} tokens) exceeds the available context size ({context} tokens), \
                 try increasing it"
            ),
            "type": "exceed_context_size_error",
            "n_prompt_tokens": prompt,
            "n_ctx": context,
        };
        return Reply::json(400, &ordered! {"error": error});
    };
    // What does not fit is cut in silence.
    let max_tokens = asked.max_tokens.unwrap_or(room).min(room);
    match asked.start(server, call, max_tokens) {
        Ok(run) => {
            let stream = asked.stream;
            Reply::generate(run, LlamaShape::new(asked, path, &body), stream).await
        }
        Err(cause) => refusal(&cause),
    }
}

/// The body with the names that OpenAI's paths have.
fn as_openai(body: &Value, path: Path) -> Value {
    let mut same = body.clone();
    if !same.is_object() {
        return same;
    }
    // Its default is no bound; zero and below mean none here.
    let bound = [
        &body["n_predict"],
        &body["max_tokens"],
        &body["max_completion_tokens"],
    ]
    .into_iter()
    .find_map(Value::as_i64)
    .filter(|bound| *bound > 0);
    same["max_tokens"] = json!(bound);
    same["max_completion_tokens"] = Value::Null;
    same["priority"] = Value::Null;
    if same["seed"].as_i64().is_some_and(|seed| seed < 0) {
        same["seed"] = Value::Null;
    }
    if path == Path::Completion && same["stop"].is_string() {
        // Only a list counts on its own path.
        same["stop"] = Value::Null;
    }
    let top = body["n_probs"].as_u64().filter(|top| *top > 0);
    match path {
        Path::Chat if top.is_some() => {
            same["logprobs"] = json!(true);
            same["top_logprobs"] = json!(top);
        }
        Path::Chat => {}
        Path::Completions | Path::Completion => {
            let top = top.or_else(|| body["logprobs"].as_u64());
            same["logprobs"] = json!(top);
            same["top_logprobs"] = Value::Null;
        }
    }
    same
}

fn tokenize(body: &Value) -> Json {
    let content = body["content"].as_str().unwrap_or_default();
    let control = body["parse_special"].as_bool().unwrap_or(true);
    let ids = text::encode(content, control);
    if body["with_pieces"] == true {
        let pieces: Vec<Json> = ids
            .iter()
            .map(|id| {
                let piece = String::from_utf8(text::piece(*id));
                match piece {
                    Ok(piece) => ordered! {"id": id, "piece": piece},
                    Err(error) => ordered! {"id": id, "piece": error.as_bytes()},
                }
            })
            .collect();
        return ordered! {"tokens": pieces};
    }
    ordered! {"tokens": ids}
}

fn detokenize(call: &Call, body: &Value) -> Result<Json, EngineError> {
    let ids: Vec<u32> = serde_json::from_value(body["tokens"].clone())
        .map_err(|cause| bad(&format!("[json.exception.type_error.302] {cause}")))?;
    Ok(ordered! {"content": text::decode_with(&ids, call.control_tokens())})
}

fn apply_template(server: &Shared, call: &Call, body: &Value) -> Result<Json, EngineError> {
    let asked = Asked::read(RequestKind::Chat, body, &server.model(), call)?;
    Ok(ordered! {"prompt": text::decode(&asked.prompt)})
}

fn models(server: &Shared, call: &Call) -> Json {
    let name = server.model();
    let legacy = ordered! {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
    };
    let vocabulary = text::end() + 2;
    let meta = ordered! {
        "vocab_type": 2,
        "n_vocab": vocabulary,
        "n_ctx": server.context(),
        "n_ctx_train": server.context() * 4,
        "n_embd": 576,
        "n_params": 134_515_008,
        "size": 96_576_768,
        "ftype": "Q4_1",
    };
    let row = ordered! {
        "id": name,
        "aliases": server.models(),
        "tags": Vec::<String>::new(),
        "object": "model",
        "architecture": ordered! {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": call.created(),
        "owned_by": "llamacpp",
        "meta": meta,
    };
    ordered! {"models": [legacy], "object": "list", "data": [row]}
}
