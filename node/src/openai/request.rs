//! Client bodies, parsed and checked. Unknown fields are left alone: the body itself travels on.
//!
//! A body is never turned into a tree of values: each known field is kept as a slice of the body and
//! read by type, so that parsing takes little more memory than the body itself (a tree takes up to
//! thirty times as much). A field that is `null` counts as absent, as every OpenAI client expects.

mod field;
mod prompt;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::error::Category;
use serde_json::value::RawValue;

use self::field::{bad, boolean, decimal, integer, is_off, kind_of, list, text};
use crate::engine::EngineError;
use crate::engine::work::{Priority, RequestKind, SamplingParams};

/// Longest model name in bytes. It travels in every offer, and an offer has to stay under 1 KiB.
pub const MAX_MODEL_NAME: usize = 256;

/// Stop strings at most: OpenAI allows 4, vLLM any number; each is searched for in every step.
pub const MAX_STOPS: usize = 16;

/// Longest stop string in bytes: as much text as this is held back from the client at worst.
pub const MAX_STOP_BYTES: usize = 256;

/// Alternatives per token at most, as in OpenAI's chat API. Bounds the size of a token frame.
pub const MAX_LOGPROBS: u8 = 20;

/// One message of a conversation. `content` is the text of all text parts, joined by line ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool` or `developer`.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// What the model is to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptInput {
    /// A conversation.
    Chat(Vec<ChatMessage>),
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// A client body as far as the mesh reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The model asked for.
    pub model: String,
    /// What to continue.
    pub prompt: PromptInput,
    /// How to sample. `params.max_tokens` and `params.seed` are meaningless here; see the next fields.
    pub params: SamplingParams,
    /// `max_tokens` or `max_completion_tokens`, if given; at least 1.
    pub max_tokens: Option<u32>,
    /// `seed`, if given.
    pub seed: Option<u64>,
    /// Rank.
    pub priority: Priority,
    /// Server-sent events or one body.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
}

macro_rules! fields {
    (read: $($read:ident)*; refused: $($refused:ident)*) => {
        /// The fields of a body that mean something here, each as written.
        #[derive(Deserialize)]
        struct Fields<'a> {
            $(#[serde(borrow)] $read: Option<&'a RawValue>,)*
            $(#[serde(borrow)] $refused: Option<&'a RawValue>,)*
        }

        impl<'a> Fields<'a> {
            /// Fields that would change the answer and that nothing here honours: to ignore them would
            /// be to lie.
            fn refused(&self) -> impl Iterator<Item = (&'static str, &'a RawValue)> {
                [$((stringify!($refused), self.$refused)),*]
                    .into_iter()
                    .filter_map(|(name, raw)| Some((name, raw?)))
            }
        }
    };
}

fields! {
    read:
        model messages prompt max_tokens max_completion_tokens n best_of temperature top_p top_k min_p
        presence_penalty frequency_penalty repetition_penalty stop seed logprobs top_logprobs stream
        stream_options ignore_eos priority response_format;
    refused:
        tools functions logit_bias suffix echo use_beam_search audio prompt_embeds min_tokens
        stop_token_ids bad_words allowed_token_ids structured_outputs guided_json guided_regex
        guided_choice guided_grammar
}

/// Reads a body.
///
/// # Errors
/// [`EngineError::BadRequest`] with the field to blame.
pub fn parse(kind: RequestKind, body: &[u8]) -> Result<GenerateRequest, EngineError> {
    let fields = read_fields(body)?;
    refuse_unsupported(&fields)?;
    let stream = optional(fields.stream, "stream", boolean)?.unwrap_or(false);
    let (prompt, max_tokens) = match kind {
        RequestKind::Chat => (
            PromptInput::Chat(prompt::messages(fields.messages)?),
            match output_bound(fields.max_completion_tokens, "max_completion_tokens")? {
                Some(bound) => Some(bound),
                None => output_bound(fields.max_tokens, "max_tokens")?,
            },
        ),
        RequestKind::Completion => (
            prompt::prompt(fields.prompt)?,
            output_bound(fields.max_tokens, "max_tokens")?,
        ),
    };
    Ok(GenerateRequest {
        model: model(fields.model)?,
        prompt,
        params: sampling(kind, &fields)?,
        max_tokens,
        seed: optional(fields.seed, "seed", |raw, name| {
            integer(raw, name, i128::from(i64::MIN), i128::from(u64::MAX))
        })?
        // Any 64 bits are a seed: a negative one keeps its bits.
        .map(|seed| seed as u64),
        priority: priority(fields.priority)?,
        stream,
        include_usage: include_usage(fields.stream_options, stream)?,
    })
}

fn read_fields(body: &[u8]) -> Result<Fields<'_>, EngineError> {
    let text = check_object(body)?;
    serde_json::from_str(text).map_err(|error| bad_body(&error))
}

/// The text of a body that looks like a JSON object.
pub(super) fn check_object(body: &[u8]) -> Result<&str, EngineError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        bad(None, format!("the body is not UTF-8 text (byte {at})"))
    })?;
    let trimmed = text.trim_ascii_start();
    if trimmed.is_empty() {
        let message = "the body is empty: expected a JSON object".to_owned();
        return Err(bad(None, message));
    }
    // A struct would read an array too, by position.
    if !trimmed.starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok() {
        let message = format!("the body must be a JSON object, got {}", kind_of(text));
        return Err(bad(None, message));
    }
    Ok(text)
}

/// What to tell a client whose body cannot be read.
pub(super) fn bad_body(error: &serde_json::Error) -> EngineError {
    match error.classify() {
        // A field that is there twice: this node and an engine might each believe another one.
        Category::Data => bad(None, format!("the body cannot be read: {error}")),
        Category::Syntax | Category::Eof | Category::Io => {
            bad(None, format!("the body is not valid JSON: {error}"))
        }
    }
}

/// Reads a field unless it is absent or null.
fn optional<'a, T>(
    raw: Option<&'a RawValue>,
    name: &str,
    read: impl FnOnce(&'a RawValue, &str) -> Result<T, EngineError>,
) -> Result<Option<T>, EngineError> {
    raw.map(|raw| read(raw, name)).transpose()
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), EngineError> {
    for (name, raw) in fields.refused() {
        if !is_off(raw) {
            return Err(bad(Some(name), format!("`{name}` is not supported")));
        }
    }
    for (name, raw) in [("n", fields.n), ("best_of", fields.best_of)] {
        let count = optional(raw, name, |raw, name| integer(raw, name, 1, i128::MAX))?;
        if count.is_some_and(|count| count > 1) {
            let message = format!("`{name}` must be 1: one answer per request is supported");
            return Err(bad(Some(name), message));
        }
    }
    let Some(format) = fields.response_format else {
        return Ok(());
    };
    let name = "response_format";
    let kind = field::object(format, name)?.kind(name)?;
    if kind == "text" {
        return Ok(());
    }
    let message = format!("`{name}` of type `{kind}` is not supported: only `text` is");
    Err(bad(Some(name), message))
}

fn model(raw: Option<&RawValue>) -> Result<String, EngineError> {
    let name = "model";
    let model = optional(raw, name, text)?
        .ok_or_else(|| bad(Some(name), "`model` is required".to_owned()))?;
    if model.is_empty() || model.len() > MAX_MODEL_NAME {
        let message = format!(
            "`model` must have 1 to {MAX_MODEL_NAME} bytes, got {}",
            model.len()
        );
        return Err(bad(Some(name), message));
    }
    Ok(model)
}

fn output_bound(raw: Option<&RawValue>, name: &str) -> Result<Option<u32>, EngineError> {
    let bound = optional(raw, name, |raw, name| {
        integer(raw, name, 1, i128::from(u32::MAX))
    })?;
    Ok(bound.map(|bound| bound as u32))
}

fn sampling(kind: RequestKind, fields: &Fields<'_>) -> Result<SamplingParams, EngineError> {
    let default = SamplingParams::default();
    let number =
        |raw, name, low, high| optional(raw, name, |raw, name| decimal(raw, name, low, high));
    let top_p = number(fields.top_p, "top_p", 0.0, 1.0)?.unwrap_or(default.top_p);
    let repetition = number(
        fields.repetition_penalty,
        "repetition_penalty",
        0.0,
        f32::MAX,
    )?
    .unwrap_or(default.repetition_penalty);
    for (name, value) in [("top_p", top_p), ("repetition_penalty", repetition)] {
        if value <= 0.0 {
            let message = format!("`{name}` must be above 0, got {value}");
            return Err(bad(Some(name), message));
        }
    }
    Ok(SamplingParams {
        temperature: number(fields.temperature, "temperature", 0.0, 2.0)?
            .unwrap_or(default.temperature),
        top_p,
        top_k: optional(fields.top_k, "top_k", |raw, name| {
            integer(raw, name, -1, i128::from(u32::MAX))
        })?
        // Both -1 (vLLM) and 0 (llama.cpp) mean that all tokens are kept.
        .map_or(default.top_k, |top_k| top_k.max(0) as u32),
        min_p: number(fields.min_p, "min_p", 0.0, 1.0)?.unwrap_or(default.min_p),
        presence_penalty: number(fields.presence_penalty, "presence_penalty", -2.0, 2.0)?
            .unwrap_or(default.presence_penalty),
        frequency_penalty: number(fields.frequency_penalty, "frequency_penalty", -2.0, 2.0)?
            .unwrap_or(default.frequency_penalty),
        repetition_penalty: repetition,
        stop: optional(fields.stop, "stop", stops)?.unwrap_or_default(),
        ignore_eos: optional(fields.ignore_eos, "ignore_eos", boolean)?.unwrap_or(false),
        logprobs: match kind {
            RequestKind::Chat => chat_logprobs(fields)?,
            RequestKind::Completion => optional(fields.logprobs, "logprobs", alternatives)?,
        },
        seed: default.seed,
        max_tokens: default.max_tokens,
    })
}

fn alternatives(raw: &RawValue, name: &str) -> Result<u8, EngineError> {
    Ok(integer(raw, name, 0, i128::from(MAX_LOGPROBS))? as u8)
}

/// OpenAI's chat API splits the wish in two: whether, and how many alternatives.
fn chat_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, EngineError> {
    let wanted = optional(fields.logprobs, "logprobs", boolean)?.unwrap_or(false);
    let top = optional(fields.top_logprobs, "top_logprobs", alternatives)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = "`top_logprobs` needs `logprobs` to be true".to_owned();
            Err(bad(Some("top_logprobs"), message))
        }
    }
}

fn stops(raw: &RawValue, name: &str) -> Result<Vec<String>, EngineError> {
    let mut stops = Vec::new();
    if kind_of(raw.get()) == "a string" {
        stops.push(text(raw, name)?);
    } else {
        list(
            raw,
            name,
            "a string or an array of strings",
            |index, item| {
                if index >= MAX_STOPS {
                    let message = format!("`{name}` must have at most {MAX_STOPS} strings");
                    return Err(bad(Some(name), message));
                }
                stops.push(text(item, &format!("{name}[{index}]"))?);
                Ok(())
            },
        )?;
    }
    for stop in &stops {
        if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
            let message = format!(
                "strings of `{name}` must have 1 to {MAX_STOP_BYTES} bytes, got {}",
                stop.len()
            );
            return Err(bad(Some(name), message));
        }
    }
    Ok(stops)
}

/// On the wire a lower number goes first, as in vLLM; inside, a higher one does.
fn priority(raw: Option<&RawValue>) -> Result<Priority, EngineError> {
    let first_is_low = optional(raw, "priority", |raw, name| {
        integer(raw, name, i128::from(i32::MIN), i128::from(i32::MAX))
    })?;
    Ok(Priority(
        (first_is_low.unwrap_or(0) as i32).saturating_neg(),
    ))
}

fn include_usage(raw: Option<&RawValue>, stream: bool) -> Result<bool, EngineError> {
    let name = "stream_options";
    let Some(options) = optional(raw, name, field::object)? else {
        return Ok(false);
    };
    if !stream {
        let message = format!("`{name}` needs `stream` to be true");
        return Err(bad(Some(name), message));
    }
    let wanted = optional(
        options.include_usage,
        "stream_options.include_usage",
        boolean,
    )?;
    Ok(wanted.unwrap_or(false))
}

#[cfg(test)]
mod tests;
