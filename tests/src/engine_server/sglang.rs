//! SGLang 0.5.23 as read, not recorded: OpenAI's paths without ids, and `/generate` with them.

mod shape;

use serde_json::{Value, json};
use shoal_node::engine::EngineError;
use shoal_node::engine::work::RequestKind;

use self::shape::{GenerateShape, OpenAiShape};
use crate::engine_server::call::{Asked, Call, Reply};
use crate::engine_server::figures;
use crate::engine_server::json::{Json, ordered};
use crate::engine_server::shared::Shared;
use crate::engine_server::vllm;

/// Output tokens of `/generate` and of completions that name no bound.
const GENERATE_TOKENS: u32 = 128;
const COMPLETION_TOKENS: u32 = 16;

pub(super) async fn reply(server: &Shared, call: &Call) -> Reply {
    let mut reply = match (call.method.as_str(), call.path.as_str()) {
        ("GET", "/health" | "/health_generate" | "/ready") => Reply::empty(),
        ("GET", "/v1/models") => Reply::json(200, &models(server, call)),
        ("GET", "/model_info" | "/get_model_info") => Reply::json(200, &model_info(server)),
        ("GET", "/server_info" | "/get_server_info") => value(&server_info(server)),
        ("GET", "/v1/loads") => value(&figures::sglang_loads(server, call)),
        ("GET", "/metrics") => figures::sglang_metrics(server, call),
        ("POST", "/v1/chat/completions") => openai(server, call, RequestKind::Chat).await,
        ("POST", "/v1/completions") => openai(server, call, RequestKind::Completion).await,
        ("POST", "/v1/embeddings") => {
            Reply::json(200, &vllm::embedding(server, call, &call.json()))
        }
        ("POST", "/generate") => generate(server, call).await,
        ("POST", "/abort_request") => abort(server, call),
        _ => Reply::json(404, &ordered! {"detail": "Not Found"}),
    };
    reply.headers.push(("server", "uvicorn".to_owned()));
    for (name, value) in &mut reply.headers {
        if *name == "content-type" && value == "text/event-stream" {
            value.push_str("; charset=utf-8");
        }
    }
    reply
}

fn value(body: &Value) -> Reply {
    Reply::text(200, "application/json", body.to_string())
}

fn models(server: &Shared, call: &Call) -> Json {
    let row = |name: &String| {
        ordered! {
            "id": name,
            "object": "model",
            "created": call.created(),
            "owned_by": "sglang",
            "root": name,
            "parent": (),
            "max_model_len": server.context(),
        }
    };
    let rows: Vec<Json> = server.models().iter().map(row).collect();
    ordered! {"object": "list", "data": rows}
}

fn model_info(server: &Shared) -> Json {
    ordered! {
        "model_path": format!("models/{}", server.engine_model()),
        "tokenizer_path": format!("models/{}", server.engine_model()),
        "is_generation": true,
        "preferred_sampling_params": (),
        "weight_version": "default",
    }
}

fn server_info(server: &Shared) -> Value {
    let facts = server.engine.facts();
    let total = facts.block_size.tokens_in(facts.total).0;
    json!({
        "model_path": format!("models/{}", server.engine_model()),
        "served_model_name": server.model(),
        "page_size": facts.block_size.tokens(),
        "max_total_num_tokens": total,
        "context_length": server.context(),
        "incremental_streaming_output": false,
        "schedule_low_priority_values_first": false,
        "internal_states": [{"max_total_num_tokens": total, "memory_usage": {"token_capacity": total}}],
        "version": "0.5.23",
    })
}

/// An error of OpenAI's paths: the members stand bare.
fn engine_error(cause: &EngineError) -> (u16, Json) {
    let (status, kind, param) = match cause {
        EngineError::BadRequest { param, .. } => (400, "BadRequestError", param.as_deref()),
        EngineError::UnknownModel(_) => (404, "NotFoundError", Some("model")),
        EngineError::QueueFull | EngineError::NotReady => (503, "ServiceUnavailable", None),
        EngineError::Broken(_) => (500, "InternalServerError", None),
    };
    let body = ordered! {
        "object": "error",
        "message": cause.to_string(),
        "type": kind,
        "param": param,
        "code": status,
    };
    (status, body)
}

fn refusal(cause: &EngineError) -> Reply {
    let (status, body) = engine_error(cause);
    Reply::json(status, &body)
}

fn bad(message: &str) -> EngineError {
    EngineError::BadRequest {
        message: message.to_owned(),
        param: None,
    }
}

/// The body as an object; with its priority, higher first here, as vLLM has it.
fn body(call: &Call) -> Result<Value, EngineError> {
    let mut body: Value =
        serde_json::from_slice(&call.body).map_err(|cause| bad(&cause.to_string()))?;
    if !body.is_object() {
        return Err(bad("the body is not an object"));
    }
    if let Some(priority) = body["priority"].as_i64() {
        body["priority"] = json!(priority.saturating_neg());
    }
    Ok(body)
}

fn name(body: &Value, call: &Call) -> String {
    let given = body["rid"].as_str().map(str::to_owned);
    given.unwrap_or_else(|| call.own_name())
}

/// The bound on the output, refused where the context cannot hold it.
fn bound(server: &Shared, asked: &Asked, default: u32) -> Result<u32, EngineError> {
    let (context, prompt) = (server.context(), asked.prompt_tokens());
    let Some(room) = asked.room(context) else {
        return Err(bad(&format!(
            "The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        )));
    };
    let wanted = asked.max_tokens.unwrap_or_else(|| default.min(room));
    if wanted > room {
        return Err(bad(&format!(
            "Requested token count exceeds the model's maximum context length of {context} tokens. \
             You requested a total of {} tokens: {prompt} tokens from the input messages and \
             {wanted} tokens for the completion.",
            u64::from(prompt) + u64::from(wanted),
        )));
    }
    Ok(wanted)
}

async fn openai(server: &Shared, call: &Call, kind: RequestKind) -> Reply {
    let begun = body(call).and_then(|body| {
        let mut asked = Asked::read(kind, &body, &server.model(), call)?;
        asked.id = name(&body, call);
        let default = match kind {
            RequestKind::Chat => u32::MAX,
            RequestKind::Completion => COMPLETION_TOKENS,
        };
        let max_tokens = bound(server, &asked, default)?;
        let run = asked.start(server, call, max_tokens)?;
        Ok((run, asked))
    });
    match begun {
        Ok((run, asked)) => {
            let stream = asked.stream;
            Reply::generate(run, OpenAiShape::new(asked), stream).await
        }
        Err(cause) => refusal(&cause),
    }
}

/// An error of `/generate`.
fn generate_error(cause: &EngineError) -> (u16, Json) {
    let (status, _) = engine_error(cause);
    let error = ordered! {"message": cause.to_string()};
    (status, ordered! {"error": error})
}

async fn generate(server: &Shared, call: &Call) -> Reply {
    let begun = body(call).and_then(|body| {
        let mut asked = Asked::read(
            RequestKind::Completion,
            &as_openai(&body),
            &server.model(),
            call,
        )?;
        asked.id = name(&body, call);
        let max_tokens = bound(server, &asked, GENERATE_TOKENS)?;
        let run = asked.start(server, call, max_tokens)?;
        Ok((run, asked))
    });
    match begun {
        Ok((run, asked)) => {
            let stream = asked.stream;
            Reply::generate(run, GenerateShape::new(asked), stream).await
        }
        Err(cause) => {
            let (status, body) = generate_error(&cause);
            Reply::json(status, &body)
        }
    }
}

/// A body of `/generate` with the names that OpenAI's completions have.
fn as_openai(body: &Value) -> Value {
    let mut same = body["sampling_params"].clone();
    if !same.is_object() {
        same = json!({});
    }
    let prompt = match body["input_ids"].is_array() {
        true => &body["input_ids"],
        false => &body["text"],
    };
    same["prompt"] = prompt.clone();
    same["stream"] = body["stream"].clone();
    same["priority"] = body["priority"].clone();
    for (from, to) in [("max_new_tokens", "max_tokens"), ("sampling_seed", "seed")] {
        same[to] = same[from].take();
    }
    if body["return_logprob"] == true {
        same["logprobs"] = match body["top_logprobs_num"].as_u64() {
            Some(count) => json!(count),
            None => json!(0),
        };
    }
    same
}

fn abort(server: &Shared, call: &Call) -> Reply {
    let body = call.json();
    let all = body["abort_all"] == true;
    let name = body["rid"].as_str().unwrap_or_default();
    server.table.abort(&*server.engine, |row| {
        all || (!name.is_empty() && row.name.starts_with(name))
    });
    Reply::empty()
}
