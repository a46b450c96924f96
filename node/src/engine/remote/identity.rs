//! What an engine beside the node is: its kind, version and models.
//!
//! Pure, as [`super::reading`] is. The list of models must be there; all else adds to it where the
//! engine tells it.

use serde_json::Value;

use super::kind::ServerKind;
use super::reading::{Answer, count, total};

/// What is asked to identify an engine, in order. No engine answers all of them. vLLM answers
/// `/server_info` in its development mode alone, and as text unless asked for JSON.
pub(super) const ASKED: [&str; 5] = [
    "/v1/models",
    "/version",
    "/props",
    "/server_info?config_format=json",
    "/get_server_info",
];

/// Models taken of one engine. A vLLM with many adapters lists each of them, and every name travels
/// to every node of the mesh.
pub(super) const MAX_MODELS: usize = 32;
/// Bytes of a model's name.
pub(super) const MAX_NAME_BYTES: usize = 256;
/// Bytes kept of a version: a development build of vLLM needs some 50.
const MAX_VERSION_BYTES: usize = 64;
/// Bytes kept of what tells weights: a file path at most.
const MAX_ROOT_BYTES: usize = 1024;
/// The first vLLM that returns token ids.
const VLLM_WITH_TOKENS: [u64; 3] = [0, 10, 2];

/// What an engine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) kind: ServerKind,
    /// Empty when unknown.
    pub(super) version: String,
    /// At least one, names differ.
    pub(super) models: Vec<ServedModel>,
    /// Names that were too long, empty or too many.
    pub(super) left_out: usize,
    /// Sequences that the engine runs at once.
    pub(super) slots: Option<u32>,
    /// KV tokens that it can hold, where told without a poll. For llama-server the sum over its
    /// slots, which is too much when they share one pool.
    pub(super) capacity: Option<u64>,
    /// The engine has a route that gives the ids of the tokens it produced: vLLM by
    /// `return_token_ids`, llama-server by `return_tokens`, SGLang by `/generate`.
    pub(super) has_tokens: bool,
    /// Requests of a higher `priority` run first: SGLang, unless it was started the other way round.
    pub(super) high_first: bool,
}

/// A name that the engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServedModel {
    /// The name that requests give.
    pub(super) id: String,
    /// Equal for equal weights, as far as the engine tells: the path or repository it was loaded
    /// from, a base model and an adapter's name, a GGUF's size and type, or else the name.
    pub(super) root: String,
    /// Longest sequence in tokens.
    pub(super) context: Option<u32>,
    /// As the engine tells it, in seconds since 1970; 0 when it does not.
    pub(super) created: u64,
}

/// Why an engine cannot be used. Ask again later: it may still be starting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unidentified {
    /// No answer at all.
    #[error("does not answer /v1/models: is the engine running, and is this its address?")]
    Silent,
    /// It wants a key.
    #[error("answers /v1/models with status {status}: it wants an API key that this node lacks")]
    Refused {
        /// The HTTP status.
        status: u16,
    },
    /// It has no such page.
    #[error("has no /v1/models: give the address of an OpenAI-compatible server, without a path")]
    NoList,
    /// Some other error.
    #[error("answers /v1/models with status {status}: it may still be starting, see its log")]
    Failing {
        /// The HTTP status.
        status: u16,
    },
    /// A page for people.
    #[error("answers /v1/models with HTML: is this an inference server?")]
    Html,
    /// Nothing that we can read.
    #[error(
        "answers /v1/models with something else than a list of models: is this an inference server?"
    )]
    NotAList,
    /// An empty list.
    #[error("names no model: load one, or see the engine's log for why it did not")]
    NoModel,
    /// No name can be used.
    #[error(
        "names {left_out} models but none of 1 to {MAX_NAME_BYTES} bytes: set a shorter name \
         (--served-model-name, --alias)"
    )]
    NoUsableName {
        /// How many names it gives.
        left_out: usize,
    },
}

/// Identifies an engine. `answers[i]` answers `ASKED[i]`; `None` when there was no answer. A kind
/// that the operator `wanted` is not questioned.
///
/// # Errors
/// When the engine lists no model that can be served.
pub(super) fn identify(
    wanted: Option<ServerKind>,
    answers: &[Option<Answer<'_>>],
) -> Result<Identity, Unidentified> {
    let told = |index: usize| -> Value {
        let answer = answers.get(index).copied().flatten();
        let answer = answer.filter(Answer::is_success);
        let value = answer.and_then(|answer| serde_json::from_slice(answer.body).ok());
        value.unwrap_or(Value::Null)
    };
    let list = list(answers.first().copied().flatten())?;
    let entries = entries(&list).ok_or(Unidentified::NotAList)?;
    let info = Some(told(3))
        .filter(Value::is_object)
        .unwrap_or_else(|| told(4));
    let facts = Facts {
        version: told(1),
        props: told(2),
        info,
    };
    let kind = wanted.unwrap_or_else(|| facts.kind(entries));
    let (models, left_out) = facts.models(kind, entries)?;
    let version = facts.version(kind);
    Ok(Identity {
        kind,
        models,
        left_out,
        slots: facts.slots(kind),
        capacity: facts.capacity(kind).filter(|&tokens| tokens > 0),
        high_first: kind == ServerKind::Sglang && !facts.low_first(),
        has_tokens: match kind {
            ServerKind::Vllm => {
                numbers(&version).is_some_and(|version| version >= VLLM_WITH_TOKENS)
            }
            ServerKind::Sglang | ServerKind::LlamaServer => true,
            ServerKind::OpenAi => false,
        },
        version,
    })
}

/// The answer to `/v1/models` as JSON.
fn list(answer: Option<Answer<'_>>) -> Result<Value, Unidentified> {
    let answer = answer.ok_or(Unidentified::Silent)?;
    match answer.status {
        401 | 403 => {
            return Err(Unidentified::Refused {
                status: answer.status,
            });
        }
        404 | 405 => return Err(Unidentified::NoList),
        _ if answer.is_success() => {}
        status => return Err(Unidentified::Failing { status }),
    }
    serde_json::from_slice(answer.body).map_err(|_| {
        if answer.body.trim_ascii_start().starts_with(b"<") {
            Unidentified::Html
        } else {
            Unidentified::NotAList
        }
    })
}

/// The models of a list; some servers give the bare array.
fn entries(list: &Value) -> Option<&[Value]> {
    list.get("data")
        .unwrap_or(list)
        .as_array()
        .map(Vec::as_slice)
}

/// All answers but the list. What was not told is null.
struct Facts {
    version: Value,
    props: Value,
    /// `/server_info` of vLLM or SGLang.
    info: Value,
}

impl Facts {
    /// The kind by evidence: who the models are owned by, else what only one server would say.
    fn kind(&self, entries: &[Value]) -> ServerKind {
        let named = entries
            .iter()
            .find_map(|entry| match text(entry, "owned_by")? {
                "vllm" => Some(ServerKind::Vllm),
                "sglang" => Some(ServerKind::Sglang),
                "llamacpp" => Some(ServerKind::LlamaServer),
                _ => None,
            });
        if let Some(kind) = named {
            return kind;
        }
        // Other servers answer `/version` in the same shape, but with no `max_model_len`.
        let like_vllm = text(&self.version, "version").and_then(numbers).is_some()
            && entries
                .iter()
                .any(|entry| entry.get("max_model_len").is_some());
        if like_vllm || self.info.get("vllm_config").is_some() {
            ServerKind::Vllm
        } else if self.props.get("build_info").is_some() || self.props.get("total_slots").is_some()
        {
            ServerKind::LlamaServer
        } else if self.info.get("internal_states").is_some() {
            ServerKind::Sglang
        } else {
            ServerKind::OpenAi
        }
    }

    fn version(&self, kind: ServerKind) -> String {
        let version = match kind {
            ServerKind::LlamaServer => text(&self.props, "build_info"),
            ServerKind::Sglang => text(&self.info, "version"),
            ServerKind::Vllm | ServerKind::OpenAi => text(&self.version, "version"),
        };
        cut(version.unwrap_or_default(), MAX_VERSION_BYTES)
    }

    /// SGLang was started with `--schedule-low-priority-values-first`.
    fn low_first(&self) -> bool {
        let setting = self.info.get("schedule_low_priority_values_first");
        setting.and_then(Value::as_bool) == Some(true)
    }

    fn slots(&self, kind: ServerKind) -> Option<u32> {
        let slots = match kind {
            ServerKind::LlamaServer => number(&self.props, "/total_slots"),
            ServerKind::Vllm => {
                let replicas = number(
                    &self.info,
                    "/vllm_config/parallel_config/data_parallel_size",
                );
                number(&self.info, "/vllm_config/scheduler_config/max_num_seqs")
                    .and_then(|each| each.checked_mul(replicas.unwrap_or(1)))
            }
            ServerKind::Sglang => self
                .per_rank("/effective_max_running_requests_per_dp")
                .or_else(|| number(&self.info, "/max_running_requests")),
            ServerKind::OpenAi => None,
        };
        slots
            .and_then(|slots| u32::try_from(slots).ok())
            .filter(|&slots| slots > 0)
    }

    fn capacity(&self, kind: ServerKind) -> Option<u64> {
        match kind {
            ServerKind::LlamaServer => self
                .llama_context()?
                .checked_mul(number(&self.props, "/total_slots")?),
            ServerKind::Sglang => self.per_rank("/memory_usage/token_capacity"),
            ServerKind::Vllm => {
                // The configuration of one engine; of several the poll tells.
                let replicas = number(
                    &self.info,
                    "/vllm_config/parallel_config/data_parallel_size",
                );
                number(&self.info, "/vllm_config/cache_config/kv_cache_size_tokens")
                    .filter(|_| replicas.is_none_or(|replicas| replicas == 1))
            }
            ServerKind::OpenAi => None,
        }
    }

    /// Sum over the data-parallel ranks of an SGLang.
    fn per_rank(&self, pointer: &str) -> Option<u64> {
        let states = self.info.get("internal_states")?.as_array()?;
        total(states.iter().map(|state| number(state, pointer)))
    }

    /// Tokens of one slot.
    fn llama_context(&self) -> Option<u64> {
        number(&self.props, "/default_generation_settings/n_ctx")
    }

    /// The models and how many names were left out.
    fn models(
        &self,
        kind: ServerKind,
        entries: &[Value],
    ) -> Result<(Vec<ServedModel>, usize), Unidentified> {
        let mut models: Vec<ServedModel> = Vec::new();
        let mut left_out = 0;
        for entry in entries {
            let aliases = entry.get("aliases").and_then(Value::as_array);
            let aliases = aliases.into_iter().flatten().map(Value::as_str);
            for name in std::iter::once(text(entry, "id")).chain(aliases) {
                let name = name.unwrap_or_default();
                if models.iter().any(|model| model.id == name) {
                    continue;
                }
                if !(1..=MAX_NAME_BYTES).contains(&name.len()) || models.len() == MAX_MODELS {
                    left_out += 1;
                    continue;
                }
                models.push(ServedModel {
                    id: name.to_owned(),
                    root: cut(&self.root(kind, entry, entries), MAX_ROOT_BYTES),
                    context: self.context(kind, entry),
                    created: entry.get("created").and_then(count).unwrap_or(0),
                });
            }
        }
        match (models.is_empty(), left_out) {
            (false, _) => Ok((models, left_out)),
            (true, 0) => Err(Unidentified::NoModel),
            (true, _) => Err(Unidentified::NoUsableName { left_out }),
        }
    }

    /// What tells equal weights. An alias shares that of its entry.
    fn root(&self, kind: ServerKind, entry: &Value, entries: &[Value]) -> String {
        let id = text(entry, "id").unwrap_or_default();
        let told = match kind {
            ServerKind::LlamaServer => gguf(entry),
            ServerKind::Vllm | ServerKind::Sglang => self.loaded_from(entry, entries),
            ServerKind::OpenAi => None,
        };
        told.unwrap_or_else(|| id.to_owned())
    }

    /// The path or repository; for an adapter those of its base, and its name. An adapter's own
    /// path differs between machines that hold the same one.
    fn loaded_from(&self, entry: &Value, entries: &[Value]) -> Option<String> {
        // SGLang gives the served name as root and tells the path elsewhere.
        let path = |entry: &Value| {
            let told = text(&self.info, "model_path").or_else(|| text(entry, "root"));
            told.map(str::to_owned)
        };
        let Some(parent) = text(entry, "parent") else {
            return path(entry);
        };
        let base = entries
            .iter()
            .find(|other| text(other, "id") == Some(parent));
        let base = base.and_then(path).unwrap_or_else(|| parent.to_owned());
        Some(format!("{base} + {}", text(entry, "id")?))
    }

    fn context(&self, kind: ServerKind, entry: &Value) -> Option<u32> {
        let tokens = match kind {
            // A slot's, not the model's.
            ServerKind::LlamaServer => self
                .llama_context()
                .or_else(|| number(entry, "/meta/n_ctx")),
            ServerKind::Vllm | ServerKind::Sglang | ServerKind::OpenAi => {
                number(entry, "/max_model_len").or_else(|| number(entry, "/context_length"))
            }
        };
        tokens
            .and_then(|tokens| u32::try_from(tokens).ok())
            .filter(|&tokens| tokens > 0)
    }
}

/// Parameters, bytes and type of a GGUF: two files that agree in all are taken for the same.
fn gguf(entry: &Value) -> Option<String> {
    let parameters = number(entry, "/meta/n_params")?;
    let bytes = number(entry, "/meta/size")?;
    let ftype = entry
        .pointer("/meta/ftype")
        .and_then(Value::as_str)
        .unwrap_or("?");
    Some(format!(
        "gguf {parameters} parameters {bytes} bytes {ftype}"
    ))
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key)?.as_str().filter(|text| !text.is_empty())
}

fn number(value: &Value, pointer: &str) -> Option<u64> {
    count(value.pointer(pointer)?)
}

/// The numbers that a version begins with, as far as there are; two are needed to be a version.
fn numbers(version: &str) -> Option<[u64; 3]> {
    let mut numbers = [0; 3];
    let mut parts = version.split('.');
    for (index, number) in numbers.iter_mut().enumerate() {
        let part = parts.next().unwrap_or_default();
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        match part[..digits].parse() {
            Ok(value) => *number = value,
            Err(_) if index < 2 => return None,
            Err(_) => break,
        }
        if digits < part.len() {
            // A suffix ends the numbers: 0.11rc1.
            return (index > 0).then_some(numbers);
        }
    }
    Some(numbers)
}

/// At most `bytes` of a text, whole characters.
fn cut(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

#[cfg(test)]
mod tests;
