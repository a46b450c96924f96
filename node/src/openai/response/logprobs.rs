//! Log-probabilities in OpenAI's two shapes.

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

use crate::engine::TokenLogprob;

/// JSON has no infinity; OpenAI and vLLM write this for a token that cannot occur.
const IMPOSSIBLE: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    // Also for what is not a number: `max` takes the other side then.
    logprob.max(IMPOSSIBLE)
}

/// The chat API's shape: one object per token.
#[derive(Serialize)]
pub(super) struct ChatLogprobs<'a> {
    content: Vec<ChatToken<'a>>,
    refusal: Option<()>,
}

impl<'a> ChatLogprobs<'a> {
    pub(super) fn new(tokens: &'a [TokenLogprob]) -> Self {
        Self {
            content: tokens.iter().map(|token| ChatToken(token, false)).collect(),
            refusal: None,
        }
    }

    /// With the bytes of the replacement for what is no whole character, if `lossily`.
    pub(super) fn lossily(mut self, lossily: bool) -> Self {
        for token in &mut self.content {
            token.1 = lossily;
        }
        self
    }
}

/// A token, and whether bytes that were lost are told all the same.
struct ChatToken<'a>(&'a TokenLogprob, bool);

impl Serialize for ChatToken<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let TokenLogprob {
            token,
            logprob,
            top,
        } = self.0;
        let mut map = to.serialize_map(Some(4))?;
        map.serialize_entry("token", token)?;
        map.serialize_entry("logprob", &finite(*logprob))?;
        map.serialize_entry("bytes", &bytes(token, self.1))?;
        map.serialize_entry("top_logprobs", &ChatTop(top, self.1))?;
        map.end()
    }
}

struct ChatTop<'a>(&'a [(String, f32)], bool);

impl Serialize for ChatTop<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Alternative<'a> {
            token: &'a str,
            logprob: f32,
            bytes: Option<&'a [u8]>,
        }

        let mut list = to.serialize_seq(Some(self.0.len()))?;
        for (token, logprob) in self.0 {
            list.serialize_element(&Alternative {
                token,
                logprob: finite(*logprob),
                bytes: bytes(token, self.1),
            })?;
        }
        list.end()
    }
}

/// A token's bytes, unless they were lost when it was made text: a part of a character.
fn bytes(token: &str, lossily: bool) -> Option<&[u8]> {
    (lossily || !token.contains(char::REPLACEMENT_CHARACTER)).then_some(token.as_bytes())
}

/// The completion API's shape: parallel arrays.
#[derive(Serialize)]
pub(super) struct CompletionLogprobs<'a> {
    text_offset: Vec<usize>,
    token_logprobs: Vec<f32>,
    tokens: Vec<&'a str>,
    top_logprobs: Vec<CompletionTop<'a>>,
}

impl<'a> CompletionLogprobs<'a> {
    /// `offset` counts the characters of all tokens before these, and is moved past them.
    pub(super) fn new(tokens: &'a [TokenLogprob], offset: &mut usize) -> Self {
        Self {
            text_offset: tokens
                .iter()
                .map(|token| {
                    let start = *offset;
                    *offset += token.token.chars().count();
                    start
                })
                .collect(),
            token_logprobs: tokens.iter().map(|token| finite(token.logprob)).collect(),
            tokens: tokens.iter().map(|token| token.token.as_str()).collect(),
            top_logprobs: tokens.iter().map(CompletionTop).collect(),
        }
    }
}

/// The alternatives as an object, best first, and the chosen token even if it is none of them.
struct CompletionTop<'a>(&'a TokenLogprob);

impl Serialize for CompletionTop<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let TokenLogprob {
            token,
            logprob,
            top,
        } = self.0;
        let mut map = to.serialize_map(None)?;
        for (index, (alternative, logprob)) in top.iter().enumerate() {
            // Two tokens may look alike as text; a key may be there once, so the better one stays.
            if top[..index]
                .iter()
                .all(|(earlier, _)| earlier != alternative)
            {
                map.serialize_entry(alternative, &finite(*logprob))?;
            }
        }
        if top.iter().all(|(alternative, _)| alternative != token) {
            map.serialize_entry(token, &finite(*logprob))?;
        }
        map.end()
    }
}
