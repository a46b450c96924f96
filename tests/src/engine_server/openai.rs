//! A server with OpenAI's paths and shapes and nothing else: no ids, no figures, no tokenizer.

use serde_json::Value;
use shoal_node::engine::EngineError;
use shoal_node::engine::work::RequestKind;

use crate::engine_server::call::{Asked, Call, Reply, Shape};
use crate::engine_server::json::{Json, members, object, ordered};
use crate::engine_server::run::{End, Piece};
use crate::engine_server::shared::Shared;
use crate::engine_server::vllm;

pub(super) async fn reply(server: &Shared, call: &Call) -> Reply {
    match (call.method.as_str(), call.path.as_str()) {
        ("GET", "/v1/models") => {
            let row = |name: &String| {
                ordered! {"id": name, "object": "model", "created": call.created(), "owned_by": "owner"}
            };
            let rows: Vec<Json> = server.models().iter().map(row).collect();
            Reply::json(200, &ordered! {"object": "list", "data": rows})
        }
        ("POST", "/v1/chat/completions") => generate(server, call, RequestKind::Chat).await,
        ("POST", "/v1/completions") => generate(server, call, RequestKind::Completion).await,
        ("POST", "/v1/embeddings") => {
            Reply::json(200, &vllm::embedding(server, call, &call.json()))
        }
        (method, path) => {
            let message = format!("Invalid URL ({method} {path})");
            let body = ordered! {
                "error": ordered! {
                    "message": message,
                    "type": "invalid_request_error",
                    "param": (),
                    "code": (),
                },
            };
            Reply::json(404, &body)
        }
    }
}

fn engine_error(cause: &EngineError) -> (u16, Json) {
    let (status, kind, param, code) = match cause {
        EngineError::BadRequest { param, .. } => {
            (400, "invalid_request_error", param.as_deref(), None)
        }
        EngineError::UnknownModel(_) => (
            404,
            "invalid_request_error",
            Some("model"),
            Some("model_not_found"),
        ),
        EngineError::QueueFull => (429, "requests", None, Some("rate_limit_exceeded")),
        EngineError::NotReady | EngineError::Broken(_) => (503, "server_error", None, None),
    };
    let error = ordered! {
        "message": cause.to_string(),
        "type": kind,
        "param": param,
        "code": code,
    };
    (status, ordered! {"error": error})
}

fn refusal(cause: &EngineError) -> Reply {
    let (status, body) = engine_error(cause);
    Reply::json(status, &body)
}

async fn generate(server: &Shared, call: &Call, kind: RequestKind) -> Reply {
    match start(server, call, kind) {
        Ok((run, shape, stream)) => Reply::generate(run, shape, stream).await,
        Err(cause) => refusal(&cause),
    }
}

fn start(
    server: &Shared,
    call: &Call,
    kind: RequestKind,
) -> Result<(super::run::Run, Plain, bool), EngineError> {
    let bad = |message: &str, param: Option<&str>| EngineError::BadRequest {
        message: message.to_owned(),
        param: param.map(str::to_owned),
    };
    let body: Value = serde_json::from_slice(&call.body)
        .map_err(|_| bad("We could not parse the JSON body of your request.", None))?;
    let model = body["model"]
        .as_str()
        .ok_or_else(|| bad("you must provide a model parameter", None))?;
    if !server.models().iter().any(|name| name == model) {
        return Err(EngineError::UnknownModel(model.to_owned()));
    }
    let mut asked = Asked::read(kind, &body, model, call)?;
    let prefix = match kind {
        RequestKind::Chat => "chatcmpl",
        RequestKind::Completion => "cmpl",
    };
    asked.id = format!("{prefix}-{}", call.own_name());
    let long = || {
        bad(
            "This model's maximum context length is exceeded.",
            Some("messages"),
        )
    };
    let room = asked.room(server.context()).ok_or_else(long)?;
    let wanted = asked.max_tokens.unwrap_or_else(|| match kind {
        RequestKind::Chat => room,
        RequestKind::Completion => 16.min(room),
    });
    if wanted > room {
        return Err(bad("max_tokens is too large.", Some("max_tokens")));
    }
    let run = asked.start(server, call, wanted)?;
    let stream = asked.stream;
    Ok((run, Plain { asked }, stream))
}

/// The answer to one request.
struct Plain {
    asked: Asked,
}

impl Plain {
    fn usage(&self, output: u32) -> Json {
        let prompt = self.asked.prompt_tokens();
        ordered! {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
    }

    fn event(&self, choices: &[Json], usage: Option<Json>) -> Json {
        let kind = match self.asked.kind {
            RequestKind::Chat => "chat.completion.chunk",
            RequestKind::Completion => "text_completion",
        };
        let mut event = members! {
            "id": self.asked.id,
            "object": kind,
            "created": self.asked.created,
            "model": self.asked.model,
            "system_fingerprint": (),
            "choices": choices,
        };
        if self.asked.include_usage {
            event.extend(members! {"usage": usage});
        }
        object(&event)
    }

    fn chat_choice(delta: &Json, logprobs: Option<Json>, reason: Option<&str>) -> Json {
        ordered! {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    }
}

fn logprobs(piece: &Piece) -> Option<Json> {
    let each: Vec<Json> = piece.logprobs.iter().map(vllm::chat_logprob).collect();
    (!each.is_empty()).then(|| ordered! {"content": each})
}

impl Shape for Plain {
    fn whole(&mut self, all: &Piece) -> Json {
        let reason = all.end.as_ref().map(End::reason);
        let (kind, choice) = match self.asked.kind {
            RequestKind::Chat => {
                let message = ordered! {"role": "assistant", "content": all.text, "refusal": ()};
                let choice = ordered! {
                    "index": 0,
                    "message": message,
                    "logprobs": logprobs(all),
                    "finish_reason": reason,
                };
                ("chat.completion", choice)
            }
            RequestKind::Completion => {
                let choice = ordered! {
                    "text": all.text,
                    "index": 0,
                    "logprobs": (),
                    "finish_reason": reason,
                };
                ("text_completion", choice)
            }
        };
        ordered! {
            "id": self.asked.id,
            "object": kind,
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": [choice],
            "usage": self.usage(all.output),
            "system_fingerprint": (),
        }
    }

    fn opening(&mut self) -> Option<Json> {
        if self.asked.kind == RequestKind::Completion {
            return None;
        }
        let delta = ordered! {"role": "assistant", "content": "", "refusal": ()};
        Some(self.event(&[Self::chat_choice(&delta, None, None)], None))
    }

    fn events(&mut self, piece: &Piece) -> Vec<Json> {
        let reason = piece.end.as_ref().map(End::reason);
        if self.asked.kind == RequestKind::Completion {
            let choice = ordered! {
                "text": piece.text,
                "index": 0,
                "logprobs": (),
                "finish_reason": reason,
            };
            return vec![self.event(&[choice], None)];
        }
        let mut events = Vec::new();
        if !piece.text.is_empty() {
            let delta = ordered! {"content": piece.text};
            let choice = Self::chat_choice(&delta, logprobs(piece), None);
            events.push(self.event(&[choice], None));
        }
        if reason.is_some() {
            let choice = Self::chat_choice(&ordered! {}, None, reason);
            events.push(self.event(&[choice], None));
        }
        events
    }

    fn closing(&mut self, output: u32) -> Vec<Json> {
        let usage = self.usage(output);
        self.asked
            .include_usage
            .then(|| self.event(&[], Some(usage)))
            .into_iter()
            .collect()
    }

    fn error(&mut self, error: &EngineError) -> Json {
        engine_error(error).1
    }

    fn refusal(&self, error: &EngineError) -> Reply {
        refusal(error)
    }
}
