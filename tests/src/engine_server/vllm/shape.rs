//! How vLLM writes answers.

use shoal_node::engine::work::RequestKind;
use shoal_node::engine::{EngineError, TokenLogprob};

use crate::engine_server::call::{Asked, Reply, Shape};
use crate::engine_server::json::{Json, members, object, ordered};
use crate::engine_server::run::{End, Piece};

const FINGERPRINT: &str = "vllm-0.32.0-f9ee624f";

/// The answer to one request.
#[derive(Debug)]
pub(super) struct VllmShape {
    asked: Asked,
    return_ids: bool,
    /// Prompt ids stand in the first event only.
    opened: bool,
    /// Characters of the output so far, for `text_offset`.
    offset: usize,
}

impl VllmShape {
    pub(super) fn new(asked: Asked, return_ids: bool) -> Self {
        Self {
            asked,
            return_ids,
            opened: false,
            offset: 0,
        }
    }

    fn is_chat(&self) -> bool {
        self.asked.kind == RequestKind::Chat
    }

    fn prompt_ids(&self) -> Option<&[u32]> {
        self.return_ids.then_some(&self.asked.prompt[..])
    }

    fn ids<'a>(&self, piece: &'a Piece) -> Option<&'a [u32]> {
        self.return_ids.then_some(&piece.ids[..])
    }

    fn usage(&self, output: u32) -> Json {
        let prompt = self.asked.prompt_tokens();
        let mut usage = members! {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
        };
        if self.is_chat() {
            usage.extend(members! {"completion_tokens_details": ()});
        }
        object(&usage)
    }

    /// One event around `choices`.
    fn event(&self, choices: &[Json], output: u32, more: Vec<(&str, Json)>) -> Json {
        let kind = match self.asked.kind {
            RequestKind::Chat => "chat.completion.chunk",
            RequestKind::Completion => "text_completion",
        };
        let mut event = members! {
            "id": self.asked.id,
            "object": kind,
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": choices,
        };
        if self.asked.continuous {
            event.push(("usage", self.usage(output)));
        }
        event.extend(more);
        object(&event)
    }

    fn logprobs(&mut self, piece: &Piece) -> Option<Json> {
        if piece.logprobs.is_empty() {
            return None;
        }
        if self.is_chat() {
            let content: Vec<Json> = piece.logprobs.iter().map(chat_logprob).collect();
            return Some(ordered! {"content": content});
        }
        let mut offsets = Vec::new();
        for logprob in &piece.logprobs {
            offsets.push(self.offset);
            self.offset += logprob.token.chars().count();
        }
        let each = &piece.logprobs;
        Some(ordered! {
            "text_offset": offsets,
            "token_logprobs": each.iter().map(|one| one.logprob).collect::<Vec<_>>(),
            "tokens": each.iter().map(|one| &one.token).collect::<Vec<_>>(),
            "top_logprobs": each.iter().map(top).collect::<Vec<_>>(),
        })
    }

    fn finish(piece: &Piece) -> (Option<&'static str>, Option<&str>) {
        let word = match &piece.end {
            Some(End::Word(word)) => Some(word.as_str()),
            _ => None,
        };
        (piece.end.as_ref().map(End::reason), word)
    }

    fn whole_usage(&self, output: u32) -> Json {
        let prompt = self.asked.prompt_tokens();
        let created = self.is_chat().then_some(0);
        ordered! {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": ordered! {
                "cached_tokens": 0,
                "created_cache_tokens": created,
                "multimodal_tokens": (),
            },
            "completion_tokens_details": (),
        }
    }

    fn whole_chat(&mut self, all: &Piece) -> Json {
        let (reason, word) = Self::finish(all);
        let logprobs = self.logprobs(all);
        let message = ordered! {
            "role": "assistant",
            "content": all.text,
            "refusal": (),
            "annotations": (),
            "audio": (),
            "function_call": (),
            "reasoning": (),
        };
        let choice = ordered! {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": word,
            "token_ids": self.ids(all),
            "routed_experts": (),
        };
        ordered! {
            "id": self.asked.id,
            "object": "chat.completion",
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": [choice],
            "service_tier": (),
            "system_fingerprint": FINGERPRINT,
            "usage": self.whole_usage(all.output),
            "prompt_logprobs": (),
            "prompt_token_ids": self.prompt_ids(),
            "prompt_text": (),
            "kv_transfer_params": (),
            "ec_transfer_params": (),
            "metrics": (),
        }
    }

    fn whole_completion(&mut self, all: &Piece) -> Json {
        let (reason, word) = Self::finish(all);
        let logprobs = self.logprobs(all);
        let choice = ordered! {
            "index": 0,
            "text": all.text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": word,
            "token_ids": self.ids(all),
            "prompt_logprobs": (),
            "prompt_token_ids": self.prompt_ids(),
            "routed_experts": (),
        };
        ordered! {
            "id": self.asked.id,
            "object": "text_completion",
            "created": self.asked.created,
            "model": self.asked.model,
            "choices": [choice],
            "service_tier": (),
            "system_fingerprint": FINGERPRINT,
            "usage": self.whole_usage(all.output),
            "kv_transfer_params": (),
            "ec_transfer_params": (),
            "metrics": (),
        }
    }
}

impl Shape for VllmShape {
    fn whole(&mut self, all: &Piece) -> Json {
        match self.asked.kind {
            RequestKind::Chat => self.whole_chat(all),
            RequestKind::Completion => self.whole_completion(all),
        }
    }

    fn opening(&mut self) -> Option<Json> {
        if !self.is_chat() {
            return None;
        }
        let choice = ordered! {
            "index": 0,
            "delta": ordered! {"role": "assistant", "content": ""},
            "logprobs": (),
            "finish_reason": (),
        };
        let more = members! {"prompt_token_ids": self.prompt_ids(), "prompt_text": ()};
        Some(self.event(&[choice], 0, more))
    }

    fn events(&mut self, piece: &Piece) -> Vec<Json> {
        let (reason, word) = Self::finish(piece);
        let logprobs = self.logprobs(piece);
        let mut choice = members! {"index": 0};
        if self.is_chat() {
            choice.extend(members! {
                "delta": ordered! {"content": piece.text},
                "logprobs": logprobs,
                "finish_reason": reason,
            });
            if reason.is_some() {
                choice.extend(members! {"stop_reason": word});
            }
            choice.extend(members! {"token_ids": self.ids(piece)});
        } else {
            let prompt = self.prompt_ids().filter(|_| !self.opened);
            choice.extend(members! {
                "text": piece.text,
                "logprobs": logprobs,
                "finish_reason": reason,
                "stop_reason": word,
                "prompt_token_ids": prompt,
                "token_ids": self.ids(piece),
            });
        }
        self.opened = true;
        vec![self.event(&[object(&choice)], piece.output, Vec::new())]
    }

    fn closing(&mut self, output: u32) -> Vec<Json> {
        if !self.asked.include_usage {
            return Vec::new();
        }
        let prompt = self.asked.prompt_tokens();
        let mut details = members! {"cached_tokens": 0};
        if self.is_chat() {
            details.extend(members! {"created_cache_tokens": 0});
        }
        let usage = ordered! {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": object(&details),
        };
        self.asked.continuous = false;
        let more = members! {"usage": usage, "system_fingerprint": FINGERPRINT};
        vec![self.event(&[], output, more)]
    }

    fn error(&mut self, error: &EngineError) -> Json {
        super::engine_error(error).1
    }

    fn refusal(&self, error: &EngineError) -> Reply {
        super::refusal(error)
    }
}

/// One token's log-probability as OpenAI's chat API has it.
pub(in crate::engine_server) fn chat_logprob(one: &TokenLogprob) -> Json {
    let top: Vec<Json> = one
        .top
        .iter()
        .map(|(token, logprob)| {
            ordered! {"token": token, "logprob": logprob, "bytes": token.as_bytes()}
        })
        .collect();
    ordered! {
        "token": one.token,
        "logprob": one.logprob,
        "bytes": one.token.as_bytes(),
        "top_logprobs": top,
    }
}

/// The likeliest tokens as the completions API has them.
fn top(one: &TokenLogprob) -> Json {
    let own = (one.token.clone(), one.logprob);
    let all = if one.top.is_empty() {
        std::slice::from_ref(&own)
    } else {
        &one.top[..]
    };
    let members: Vec<(&str, Json)> = all
        .iter()
        .map(|(token, logprob)| {
            let value = serde_json::value::to_raw_value(logprob).expect("a number");
            (token.as_str(), value)
        })
        .collect();
    object(&members)
}
