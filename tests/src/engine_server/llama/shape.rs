//! How llama-server writes answers.

use serde_json::Value;
use shoal_node::engine::EngineError;

use super::{Path, settings};
use crate::engine_server::call::{Asked, Reply, Shape};
use crate::engine_server::json::{Json, members, object, ordered};
use crate::engine_server::run::{End, Piece};
use crate::engine_server::text;

const BUILD: &str = "b0-unknown";

/// The answer to one request.
#[derive(Debug)]
pub(super) struct LlamaShape {
    asked: Asked,
    path: Path,
    return_tokens: bool,
    timings_per_token: bool,
    has_new_line: bool,
}

impl LlamaShape {
    pub(super) fn new(asked: Asked, path: Path, body: &Value) -> Self {
        Self {
            asked,
            path,
            return_tokens: body["return_tokens"] == true,
            timings_per_token: body["timings_per_token"] == true,
            has_new_line: false,
        }
    }

    fn ids<'a>(&self, piece: &'a Piece) -> &'a [u32] {
        match self.return_tokens {
            true => &piece.ids,
            false => &[],
        }
    }

    fn timings(&self, output: u32) -> Json {
        settings::timings(self.asked.prompt_tokens(), output)
    }

    fn usage(&self, output: u32) -> Json {
        let prompt = self.asked.prompt_tokens();
        ordered! {
            "completion_tokens": output,
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "prompt_tokens_details": ordered! {"cached_tokens": 0},
        }
    }

    /// One event of a chat around `choices`.
    fn chat_event(&self, choices: &[Json], more: Vec<(&str, Json)>) -> Json {
        let mut event = members! {
            "choices": choices,
            "created": self.asked.created,
            "id": self.asked.id,
            "model": self.asked.model,
            "system_fingerprint": BUILD,
            "object": "chat.completion.chunk",
        };
        event.extend(more);
        object(&event)
    }

    /// A choice of a completion, and what stands around it.
    fn completion(&self, piece: &Piece, reason: Option<&str>, usage: bool) -> Json {
        let choice = ordered! {
            "text": piece.text,
            "index": 0,
            "logprobs": logprobs(piece),
            "finish_reason": reason,
        };
        let mut event = members! {
            "choices": [choice],
            "created": self.asked.created,
            "model": self.asked.model,
            "system_fingerprint": BUILD,
            "object": "text_completion",
        };
        if usage {
            event.extend(members! {"usage": self.usage(piece.output)});
        }
        event.extend(members! {"id": self.asked.id});
        if usage {
            event.extend(members! {"timings": self.timings(piece.output)});
        }
        object(&event)
    }

    /// The last event of `/completion`, or all of its answer.
    fn final_completion(&self, told: &Piece, output: u32, end: Option<&End>) -> Json {
        let (kind, word) = match end {
            Some(End::Eos) => ("eos", ""),
            Some(End::Word(word)) => ("word", word.as_str()),
            Some(End::Length) => ("limit", ""),
            Some(End::Abort) | None => ("none", ""),
        };
        let prompt = self.asked.prompt_tokens();
        let mut last = members! {
            "index": 0,
            "content": told.text,
            "tokens": self.ids(told),
            "id_slot": 0,
            "stop": true,
            "model": self.asked.model,
            "tokens_predicted": output,
            "tokens_evaluated": prompt,
            "generation_settings": settings::of_request(&self.asked.params, self.asked.stream),
            "prompt": text::decode(&self.asked.prompt),
            "has_new_line": self.has_new_line,
            "truncated": false,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": (prompt + output).saturating_sub(1),
            "timings": self.timings(output),
        };
        if !self.asked.stream && !told.logprobs.is_empty() {
            last.extend(members! {"completion_probabilities": probabilities(told)});
        }
        object(&last)
    }

    fn completion_events(&self, piece: &Piece) -> Vec<Json> {
        let mut event = members! {
            "index": 0,
            "content": piece.text,
            "tokens": self.ids(piece),
            "stop": false,
            "id_slot": -1,
            "tokens_predicted": piece.output,
            "tokens_evaluated": self.asked.prompt_tokens(),
        };
        if self.timings_per_token {
            event.extend(members! {"timings": self.timings(piece.output)});
        }
        if !piece.logprobs.is_empty() {
            event.extend(members! {"completion_probabilities": probabilities(piece)});
        }
        let mut events = Vec::new();
        if !piece.ids.is_empty() || !piece.text.is_empty() {
            events.push(object(&event));
        }
        if let Some(end) = &piece.end {
            let nothing = Piece::default();
            events.push(self.final_completion(&nothing, piece.output, Some(end)));
        }
        events
    }

    fn chat_events(&self, piece: &Piece) -> Vec<Json> {
        let mut events = Vec::new();
        // Tokens without text of their own are not told: the end token, held-back text.
        if !piece.text.is_empty() {
            let delta = ordered! {"content": piece.text};
            let mut choice = members! {"finish_reason": (), "index": 0, "delta": delta};
            if let Some(logprobs) = logprobs(piece) {
                choice.push(("logprobs", logprobs));
            }
            let more = match self.timings_per_token {
                true => members! {"timings": self.timings(piece.output)},
                false => Vec::new(),
            };
            events.push(self.chat_event(&[object(&choice)], more));
        }
        if let Some(end) = &piece.end {
            let choice = ordered! {"finish_reason": end.reason(), "index": 0, "delta": ordered! {}};
            let timings = match self.asked.include_usage {
                true => Vec::new(),
                false => members! {"timings": self.timings(piece.output)},
            };
            events.push(self.chat_event(&[choice], timings));
        }
        events
    }
}

/// Log-probabilities as OpenAI's paths have them, with ids.
fn logprobs(piece: &Piece) -> Option<Json> {
    let each = probabilities(piece);
    (!each.is_empty()).then(|| ordered! {"content": each})
}

fn probabilities(piece: &Piece) -> Vec<Json> {
    let each = piece.ids.iter().zip(&piece.logprobs);
    each.map(|(id, one)| {
        let top: Vec<Json> = one
            .top
            .iter()
            .map(|(token, logprob)| {
                ordered! {
                    "id": text::id_of(token),
                    "token": token,
                    "bytes": token.as_bytes(),
                    "logprob": logprob,
                }
            })
            .collect();
        ordered! {
            "id": id,
            "token": one.token,
            "bytes": one.token.as_bytes(),
            "logprob": one.logprob,
            "top_logprobs": top,
        }
    })
    .collect()
}

impl Shape for LlamaShape {
    fn whole(&mut self, all: &Piece) -> Json {
        let reason = all.end.as_ref().map(End::reason);
        match self.path {
            Path::Completion => {
                self.has_new_line = all.text.contains('\n');
                self.final_completion(all, all.output, all.end.as_ref())
            }
            Path::Completions => self.completion(all, reason, true),
            Path::Chat => {
                let message = ordered! {"role": "assistant", "content": all.text};
                let mut choice = members! {"finish_reason": reason, "index": 0, "message": message};
                if let Some(logprobs) = logprobs(all) {
                    choice.push(("logprobs", logprobs));
                }
                ordered! {
                    "choices": [object(&choice)],
                    "created": self.asked.created,
                    "model": self.asked.model,
                    "system_fingerprint": BUILD,
                    "object": "chat.completion",
                    "usage": self.usage(all.output),
                    "id": self.asked.id,
                    "timings": self.timings(all.output),
                }
            }
        }
    }

    fn opening(&mut self) -> Option<Json> {
        if self.path != Path::Chat {
            return None;
        }
        let delta = ordered! {"role": "assistant", "content": ()};
        let choice = ordered! {"finish_reason": (), "index": 0, "delta": delta};
        Some(self.chat_event(&[choice], Vec::new()))
    }

    fn events(&mut self, piece: &Piece) -> Vec<Json> {
        self.has_new_line |= piece.text.contains('\n');
        match self.path {
            Path::Chat => self.chat_events(piece),
            Path::Completion => self.completion_events(piece),
            Path::Completions => {
                let mut events = Vec::new();
                if !piece.ids.is_empty() || !piece.text.is_empty() {
                    events.push(self.completion(piece, None, false));
                }
                if let Some(end) = &piece.end {
                    let last = Piece {
                        output: piece.output,
                        ..Piece::default()
                    };
                    events.push(self.completion(&last, Some(end.reason()), true));
                }
                events
            }
        }
    }

    fn closing(&mut self, output: u32) -> Vec<Json> {
        if self.path != Path::Chat || !self.asked.include_usage {
            return Vec::new();
        }
        let more = members! {"usage": self.usage(output), "timings": self.timings(output)};
        vec![self.chat_event(&[], more)]
    }

    fn error(&mut self, error: &EngineError) -> Json {
        super::engine_error(error).1
    }

    fn refusal(&self, error: &EngineError) -> Reply {
        super::refusal(error)
    }

    fn says_done(&self) -> bool {
        self.path != Path::Completion
    }

    fn head_waits(&self) -> bool {
        true
    }
}
