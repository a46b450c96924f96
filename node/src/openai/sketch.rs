//! What the mesh must know of any request, whoever is to read its body: the model, and about how much KV it takes.

use serde::Deserialize;
use serde_json::value::RawValue;
use shoal_gossip::Tokens;

use super::request::{bad_body, check_object};
use super::{GenerateRequest, MAX_MODEL_NAME, PromptInput};
use crate::engine::EngineError;
use crate::engine::work::Priority;

/// Usual for English under byte-pair vocabularies; other scripts have fewer bytes a token. Whoever tokenises corrects it.
const BYTES_PER_TOKEN: usize = 4;

/// A body as far as every node reads it. What is of another type than expected counts as absent: its engine judges it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sketch {
    /// The model asked for; empty when none is named.
    pub model: String,
    /// The answer is wanted as it is made.
    pub stream: bool,
    /// Prompt length, estimated by its bytes.
    pub prompt: Tokens,
    /// Output at most, if it is bounded.
    pub max_tokens: Option<u32>,
    /// Rank.
    pub priority: Priority,
    /// `seed`, if one is named.
    pub seed: Option<u64>,
}

#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    stream: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    max_output_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    priority: Option<&'a RawValue>,
    #[serde(borrow)]
    seed: Option<&'a RawValue>,
}

fn lenient<'a, T: Deserialize<'a>>(raw: Option<&'a RawValue>) -> Option<T> {
    serde_json::from_str(raw?.get()).ok()
}

impl Sketch {
    /// Of a body that was read.
    pub fn of(request: &GenerateRequest) -> Self {
        let length = match &request.prompt {
            PromptInput::Chat(messages) => {
                let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
                bytes / BYTES_PER_TOKEN
            }
            PromptInput::Text(text) => text.len() / BYTES_PER_TOKEN,
            PromptInput::Tokens(ids) => ids.len(),
        };
        Self {
            model: request.model.clone(),
            stream: request.stream,
            prompt: tokens(length),
            max_tokens: request.max_tokens,
            priority: request.priority,
            seed: request.seed,
        }
    }

    /// Of any JSON object.
    ///
    /// # Errors
    /// [`EngineError::BadRequest`] when it is none, or its model's name is too long.
    pub fn read(body: &[u8]) -> Result<Self, EngineError> {
        let text = check_object(body)?;
        let fields: Fields<'_> = serde_json::from_str(text).map_err(|error| bad_body(&error))?;
        let model: String = lenient(fields.model).unwrap_or_default();
        if model.len() > MAX_MODEL_NAME {
            return Err(EngineError::BadRequest {
                message: format!(
                    "`model` must have at most {MAX_MODEL_NAME} bytes, got {}",
                    model.len()
                ),
                param: Some("model".into()),
            });
        }
        let input = fields.messages.or(fields.prompt).or(fields.input);
        let length = input.map_or(body.len(), |raw| raw.get().len());
        let bound = fields
            .max_completion_tokens
            .or(fields.max_tokens)
            .or(fields.max_output_tokens);
        let first_is_low: i32 = lenient(fields.priority).unwrap_or_default();
        Ok(Self {
            model,
            stream: lenient(fields.stream).unwrap_or_default(),
            prompt: tokens(length / BYTES_PER_TOKEN),
            max_tokens: lenient(bound).filter(|bound| *bound > 0),
            priority: Priority(first_is_low.saturating_neg()),
            seed: lenient::<i64>(fields.seed).map(i64::cast_unsigned),
        })
    }
}

fn tokens(length: usize) -> Tokens {
    Tokens(u32::try_from(length.max(1)).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_is_read_and_the_rest_is_left_to_the_engine() {
        let body =
            br#"{"model":"m","stream":true,"messages":[{"role":"user","content":"12345678"}],
            "tools":[{}],"max_completion_tokens":9,"max_tokens":3,"priority":4,"seed":-1}"#;
        let sketch = Sketch::read(body).unwrap();
        assert_eq!(sketch.model, "m");
        assert!(sketch.stream);
        assert_eq!(sketch.max_tokens, Some(9));
        assert_eq!(sketch.priority, Priority(-4));
        assert_eq!(sketch.seed, Some(u64::MAX));
        assert_eq!(sketch.prompt, Tokens(9));
    }

    #[test]
    fn odd_types_count_as_absent() {
        let body =
            br#"{"model":7,"stream":"yes","max_tokens":-1,"priority":"high","input":"abcdefgh"}"#;
        let sketch = Sketch::read(body).unwrap();
        let expected = Sketch {
            prompt: Tokens(2),
            ..Sketch::default()
        };
        assert_eq!(sketch, expected);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in [
            &b""[..],
            b"[]",
            b"\"x\"",
            b"{",
            b"\xff",
            b"{\"model\":1,\"model\":2}",
        ] {
            assert!(Sketch::read(body).is_err(), "{body:?}");
        }
        let long = format!("{{\"model\":\"{}\"}}", "m".repeat(257));
        assert!(Sketch::read(long.as_bytes()).is_err());
    }
}
