//! vLLM 0.32 as recorded: paths, shapes, errors.

mod shape;

use serde_json::Value;
use shoal_node::engine::EngineError;
use shoal_node::engine::work::RequestKind;

pub(super) use self::shape::chat_logprob;

use self::shape::VllmShape;
use crate::engine_server::call::{Asked, Call, Reply};
use crate::engine_server::json::{Json, ordered};
use crate::engine_server::shared::Shared;
use crate::engine_server::{figures, text};

/// Output tokens of a completion that names no bound.
const COMPLETION_TOKENS: u32 = 16;

pub(super) async fn reply(server: &Shared, call: &Call) -> Reply {
    let mut reply = match (call.method.as_str(), call.path.as_str()) {
        ("GET", "/health" | "/ping") => Reply::empty(),
        ("GET", "/version") => Reply::json(200, &ordered! {"version": "0.32.0"}),
        ("GET", "/load") => Reply::json(200, &ordered! {"server_load": server.table.all().len()}),
        ("GET", "/v1/models") => Reply::json(200, &models(server, call)),
        ("GET", "/metrics") => figures::vllm(server, call),
        ("POST", "/v1/chat/completions") => generate(server, call, RequestKind::Chat).await,
        ("POST", "/v1/completions") => generate(server, call, RequestKind::Completion).await,
        ("POST", "/v1/embeddings") => embeddings(server, call),
        ("POST", "/tokenize") => tokenize(server, call),
        ("POST", "/detokenize") => detokenize(call),
        (
            _,
            "/v1/chat/completions"
            | "/v1/completions"
            | "/tokenize"
            | "/detokenize"
            | "/v1/models"
            | "/health"
            | "/metrics",
        ) => Reply::json(405, &ordered! {"detail": "Method Not Allowed"}),
        _ => Reply::json(404, &ordered! {"detail": "Not Found"}),
    };
    reply.headers.extend([
        ("server", "uvicorn".to_owned()),
        ("vary", "Origin".to_owned()),
        ("x-request-id", call.name()),
    ]);
    for (name, value) in &mut reply.headers {
        if *name == "content-type" && value == "text/event-stream" {
            value.push_str("; charset=utf-8");
        }
    }
    reply
}

/// An error as vLLM writes it.
pub(super) fn error(code: u16, kind: &str, message: &str, param: Option<&str>) -> Json {
    ordered! {
        "error": ordered! {"message": message, "type": kind, "param": param, "code": code},
    }
}

fn bad(message: &str, param: Option<&str>) -> Reply {
    Reply::json(400, &error(400, "BadRequestError", message, param))
}

/// An error of the engine as vLLM writes it.
fn engine_error(cause: &EngineError) -> (u16, Json) {
    match cause {
        EngineError::BadRequest { message, param } => {
            let error = error(400, "BadRequestError", message, param.as_deref());
            (400, error)
        }
        EngineError::UnknownModel(_) => {
            let message = cause.to_string();
            (404, error(404, "NotFoundError", &message, Some("model")))
        }
        EngineError::QueueFull | EngineError::NotReady => {
            let message = cause.to_string();
            (503, error(503, "ServiceUnavailableError", &message, None))
        }
        EngineError::Broken(message) => (500, error(500, "InternalServerError", message, None)),
    }
}

fn refusal(cause: &EngineError) -> Reply {
    let (status, body) = engine_error(cause);
    Reply::json(status, &body)
}

/// The body, if it is a JSON object sent as one.
fn object(call: &Call) -> Result<Value, Reply> {
    let invalid = |message: String, param: Option<&str>| {
        let message = format!("1 validation error:\n  {message}");
        Err(Reply::json(
            400,
            &error(400, "Bad Request", &message, param),
        ))
    };
    if call.body.is_empty() {
        let message =
            "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}";
        return invalid(message.to_owned(), Some("body"));
    }
    let kind = call.header("content-type").unwrap_or_default();
    if !kind.starts_with("application/json") {
        let message = "Unsupported Media Type: Only 'application/json' is allowed";
        return invalid(message.to_owned(), None);
    }
    match serde_json::from_slice::<Value>(&call.body) {
        Ok(body) if body.is_object() => Ok(body),
        Ok(body) => {
            let input = match body.as_array() {
                Some(items) => format!("<list of {} items>", items.len()),
                None => body.to_string(),
            };
            let message = format!(
                "{{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid \
                 dictionary or object to extract fields from', 'input': '{input}'}}"
            );
            invalid(message, Some("body"))
        }
        Err(cause) => {
            let at = format!("body.{}", cause.column());
            let message = format!(
                "{{'type': 'json_invalid', 'loc': '{at}', 'msg': 'JSON decode error', 'input': \
                 '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
            );
            invalid(message, Some(&at))
        }
    }
}

/// The body, if it is an object that names no other model.
fn for_this_model(server: &Shared, call: &Call) -> Result<Value, Reply> {
    let body = object(call)?;
    let models = server.models();
    match body["model"].as_str() {
        Some(model) if !models.iter().any(|name| name == model) => {
            let aliases = models.join(", ");
            let message = format!("The model `{model}` does not exist. Valid aliases: {aliases}.");
            let body = error(404, "NotFoundError", &message, Some("model"));
            Err(Reply::json(404, &body))
        }
        _ => Ok(body),
    }
}

async fn generate(server: &Shared, call: &Call, kind: RequestKind) -> Reply {
    let body = match for_this_model(server, call) {
        Ok(body) => body,
        Err(reply) => return reply,
    };
    let mut asked = match read(server, call, kind, &body) {
        Ok(asked) => asked,
        Err(reply) => return reply,
    };
    let max_tokens = match bound(server, &asked) {
        Ok(bound) => bound,
        Err(reply) => return reply,
    };
    let return_ids = body["return_token_ids"].as_bool().unwrap_or(false);
    match asked.start(server, call, max_tokens) {
        Ok(run) => {
            let stream = asked.stream;
            Reply::generate(run, VllmShape::new(asked, return_ids), stream).await
        }
        Err(cause) => refusal(&cause),
    }
}

fn read(server: &Shared, call: &Call, kind: RequestKind, body: &Value) -> Result<Asked, Reply> {
    if kind == RequestKind::Completion && body["prompt"].is_null() {
        let message = "Either prompt or prompt_embeds must be provided and non-empty. \
                       (parameter=prompt)";
        return Err(bad(message, Some("prompt")));
    }
    if let Some(value) = body["max_tokens"].as_i64().filter(|value| *value < 1) {
        let message = format!(
            "max_tokens must be at least 1, got {value}. (parameter=max_tokens, value={value})"
        );
        return Err(bad(&message, Some("max_tokens")));
    }
    let mut asked =
        Asked::read(kind, body, &server.model(), call).map_err(|cause| refusal(&cause))?;
    let prefix = match kind {
        RequestKind::Chat => "chatcmpl",
        RequestKind::Completion => "cmpl",
    };
    asked.id = format!("{prefix}-{}", call.name());
    Ok(asked)
}

/// The bound on the output: refused where the context cannot hold it.
fn bound(server: &Shared, asked: &Asked) -> Result<u32, Reply> {
    let context = server.context();
    let prompt = asked.prompt_tokens();
    let Some(room) = asked.room(context) else {
        let least = context + 1;
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your prompt \
             contains at least {least} input tokens, which exceeds this limit even without any \
             output tokens. Please reduce the length of the input prompt. \
             (parameter=input_tokens, value={least})"
        );
        return Err(bad(&message, Some("input_tokens")));
    };
    let default = match asked.kind {
        RequestKind::Chat => room,
        RequestKind::Completion => COMPLETION_TOKENS.min(room),
    };
    match asked.max_tokens {
        None => Ok(default),
        Some(wanted) if wanted <= room => Ok(wanted),
        Some(wanted) if wanted > context => {
            let message = format!(
                "max_tokens={wanted} cannot be greater than max_model_len={context}. Please \
                 request fewer output tokens. (parameter=max_tokens, value={wanted})"
            );
            Err(bad(&message, Some("max_tokens")))
        }
        Some(wanted) => {
            let message = format!(
                "This model's maximum context length is {context} tokens. However, you requested \
                 {wanted} output tokens and your prompt contains {prompt} input tokens. \
                 (parameter=input_tokens, value={prompt})"
            );
            Err(bad(&message, Some("input_tokens")))
        }
    }
}

fn tokenize(server: &Shared, call: &Call) -> Reply {
    let body = match for_this_model(server, call) {
        Ok(body) => body,
        Err(reply) => return reply,
    };
    let kind = match body["messages"].is_array() {
        true => RequestKind::Chat,
        false => RequestKind::Completion,
    };
    let ids = match Asked::read(kind, &body, &server.model(), call) {
        Ok(asked) => asked.prompt,
        Err(cause) => return refusal(&cause),
    };
    let strings = body["return_token_strs"]
        .as_bool()
        .unwrap_or(false)
        .then(|| {
            let of = |id: &u32| String::from_utf8_lossy(&text::piece(*id)).into_owned();
            ids.iter().map(of).collect::<Vec<_>>()
        });
    let body = ordered! {
        "count": ids.len(),
        "max_model_len": server.context(),
        "tokens": &ids[..],
        "token_strs": strings,
    };
    Reply::json(200, &body)
}

fn detokenize(call: &Call) -> Reply {
    let body = match object(call) {
        Ok(body) => body,
        Err(reply) => return reply,
    };
    match serde_json::from_value::<Vec<u32>>(body["tokens"].clone()) {
        Ok(ids) => {
            let text = text::decode_with(&ids, call.control_tokens());
            Reply::json(200, &ordered! {"prompt": text})
        }
        Err(cause) => bad(&cause.to_string(), Some("tokens")),
    }
}

fn models(server: &Shared, call: &Call) -> Json {
    let created = call.created();
    let row = |name: &String| {
        let permission = ordered! {
            "id": format!("modelperm-{}", call.own_name()),
            "object": "model_permission",
            "created": created,
            "allow_create_engine": false,
            "allow_sampling": true,
            "allow_logprobs": true,
            "allow_search_indices": false,
            "allow_view": true,
            "allow_fine_tuning": false,
            "organization": "*",
            "group": (),
            "is_blocking": false,
        };
        ordered! {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": format!("models/{}", server.engine_model()),
            "parent": (),
            "max_model_len": server.context(),
            "permission": [permission],
        }
    };
    let rows: Vec<Json> = server.models().iter().map(row).collect();
    ordered! {"object": "list", "data": rows}
}

fn embeddings(server: &Shared, call: &Call) -> Reply {
    match for_this_model(server, call) {
        Ok(body) => Reply::json(200, &embedding(server, call, &body)),
        Err(reply) => reply,
    }
}

/// The same vector for every input.
pub(super) fn embedding(server: &Shared, call: &Call, body: &Value) -> Json {
    let inputs = body["input"].as_array().map_or(1, Vec::len);
    let rows: Vec<Json> = (0..inputs)
        .map(|index| {
            ordered! {"index": index, "object": "embedding", "embedding": [0.25, -0.5, 0.125]}
        })
        .collect();
    ordered! {
        "id": format!("embd-{}", call.name()),
        "object": "list",
        "created": call.created(),
        "model": body["model"].as_str().map_or_else(|| server.model(), str::to_owned),
        "data": rows,
        "usage": ordered! {
            "prompt_tokens": inputs,
            "total_tokens": inputs,
            "completion_tokens": 0,
            "prompt_tokens_details": (),
        },
    }
}
