//! How SGLang writes answers.

use serde_json::{Value, json};
use shoal_node::engine::work::RequestKind;
use shoal_node::engine::{EngineError, TokenLogprob};

use crate::engine_server::call::{Asked, Reply, Shape};
use crate::engine_server::json::{Json, members, object, ordered};
use crate::engine_server::run::{End, Piece};
use crate::engine_server::{text, vllm};

/// What ended an output: the token or the text.
fn matched(end: Option<&End>) -> Value {
    match end {
        Some(End::Eos) => json!(text::end()),
        Some(End::Word(word)) => json!(word),
        Some(End::Length | End::Abort) | None => Value::Null,
    }
}

/// The answer to a request of OpenAI's paths.
#[derive(Debug)]
pub(super) struct OpenAiShape {
    asked: Asked,
}

impl OpenAiShape {
    pub(super) fn new(asked: Asked) -> Self {
        Self { asked }
    }

    fn usage(&self, output: u32) -> Json {
        let prompt = self.asked.prompt_tokens();
        ordered! {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": (),
            "reasoning_tokens": 0,
        }
    }

    fn event(&self, choices: &[Json], usage: Option<Json>) -> Json {
        let kind = match self.asked.kind {
            RequestKind::Chat => "chat.completion.chunk",
            RequestKind::Completion => "text_completion",
        };
        ordered! {
            "id": self.asked.id,
            "object": kind,
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": choices,
            "usage": usage,
        }
    }

    fn delta(&self, role: Option<&str>, content: Option<&str>, piece: &Piece) -> Json {
        let delta = ordered! {
            "role": role,
            "content": content,
            "reasoning_content": (),
            "tool_calls": (),
        };
        let choice = ordered! {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs(&piece.logprobs),
            "finish_reason": piece.end.as_ref().map(End::reason),
            "matched_stop": matched(piece.end.as_ref()),
        };
        self.event(&[choice], None)
    }
}

fn logprobs(each: &[TokenLogprob]) -> Option<Json> {
    let content: Vec<Json> = each.iter().map(vllm::chat_logprob).collect();
    (!content.is_empty()).then(|| ordered! {"content": content})
}

impl Shape for OpenAiShape {
    fn whole(&mut self, all: &Piece) -> Json {
        let (kind, mut choice) = match self.asked.kind {
            RequestKind::Chat => {
                let message = ordered! {
                    "role": "assistant",
                    "content": all.text,
                    "reasoning_content": (),
                    "tool_calls": (),
                };
                let choice = members! {"index": 0, "message": message};
                ("chat.completion", choice)
            }
            RequestKind::Completion => {
                let choice = members! {"index": 0, "text": all.text};
                ("text_completion", choice)
            }
        };
        choice.extend(members! {
            "logprobs": logprobs(&all.logprobs),
            "finish_reason": all.end.as_ref().map(End::reason),
            "matched_stop": matched(all.end.as_ref()),
        });
        ordered! {
            "id": self.asked.id,
            "object": kind,
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": [object(&choice)],
            "usage": self.usage(all.output),
            "metadata": ordered! {"weight_version": "default"},
        }
    }

    fn opening(&mut self) -> Option<Json> {
        let nothing = Piece::default();
        (self.asked.kind == RequestKind::Chat)
            .then(|| self.delta(Some("assistant"), Some(""), &nothing))
    }

    fn events(&mut self, piece: &Piece) -> Vec<Json> {
        if self.asked.kind == RequestKind::Completion {
            let choice = ordered! {
                "index": 0,
                "text": piece.text,
                "logprobs": logprobs(&piece.logprobs),
                "finish_reason": piece.end.as_ref().map(End::reason),
                "matched_stop": matched(piece.end.as_ref()),
            };
            return vec![self.event(&[choice], None)];
        }
        let mut tokens = piece.clone();
        tokens.end = None;
        let mut events = Vec::new();
        if !piece.text.is_empty() {
            events.push(self.delta(None, Some(&piece.text), &tokens));
        }
        if piece.end.is_some() {
            let mut last = piece.clone();
            last.logprobs.clear();
            events.push(self.delta(None, None, &last));
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
        let (_, body) = super::engine_error(error);
        ordered! {"error": body}
    }

    fn refusal(&self, error: &EngineError) -> Reply {
        super::refusal(error)
    }
}

/// The answer to a request of `/generate`: text and ids of the whole output in every event.
#[derive(Debug)]
pub(super) struct GenerateShape {
    asked: Asked,
    all: Piece,
}

impl GenerateShape {
    pub(super) fn new(asked: Asked) -> Self {
        Self {
            asked,
            all: Piece::default(),
        }
    }

    fn tell(&self, all: &Piece) -> Json {
        let reason = all.end.as_ref().map(|end| match end {
            End::Eos | End::Word(_) => ordered! {"type": "stop", "matched": matched(Some(end))},
            End::Length => ordered! {"type": "length", "length": all.output},
            End::Abort => ordered! {"type": "abort", "message": "Abort by request"},
        });
        let mut meta = members! {
            "id": self.asked.id,
            "finish_reason": reason,
            "prompt_tokens": self.asked.prompt_tokens(),
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": all.output,
            "cached_tokens": 0,
        };
        if self.asked.params.logprobs.is_some() {
            meta.extend(members! {"output_token_logprobs": token_logprobs(all)});
        }
        ordered! {"text": all.text, "output_ids": all.ids, "meta_info": object(&meta)}
    }
}

/// Each token as (log-probability, id, no text).
fn token_logprobs(all: &Piece) -> Vec<Value> {
    let each = all.logprobs.iter().zip(&all.ids);
    each.map(|(one, id)| json!([one.logprob, id, null]))
        .collect()
}

impl Shape for GenerateShape {
    fn whole(&mut self, all: &Piece) -> Json {
        self.tell(all)
    }

    fn events(&mut self, piece: &Piece) -> Vec<Json> {
        self.all.append(piece.clone());
        vec![self.tell(&self.all)]
    }

    fn error(&mut self, error: &EngineError) -> Json {
        super::generate_error(error).1
    }

    fn refusal(&self, error: &EngineError) -> Reply {
        let (status, body) = super::generate_error(error);
        Reply::json(status, &body)
    }
}
