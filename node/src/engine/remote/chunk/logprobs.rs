//! Log-probabilities in vLLM's chunks, in either of OpenAI's two shapes.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::engine::TokenLogprob;

/// What vLLM writes for a token that cannot occur.
const IMPOSSIBLE: f32 = -9999.0;

/// Both shapes: the chat API's `content`, or the completion API's arrays.
#[derive(Deserialize)]
struct Told {
    #[serde(default)]
    content: Option<Vec<ChatToken>>,
    #[serde(default)]
    tokens: Option<Vec<String>>,
    #[serde(default)]
    token_logprobs: Vec<Option<f32>>,
    #[serde(default)]
    top_logprobs: Option<Vec<Option<Alternatives>>>,
}

#[derive(Deserialize)]
struct ChatToken {
    token: String,
    #[serde(default)]
    logprob: Option<f32>,
    #[serde(default)]
    top_logprobs: Vec<Alternative>,
}

#[derive(Deserialize)]
struct Alternative {
    token: String,
    logprob: f32,
}

/// An object's members in their order: vLLM writes the chosen token first, then the likeliest.
struct Alternatives(Vec<(String, f32)>);

impl<'de> Deserialize<'de> for Alternatives {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Alternatives;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("tokens and their log-probabilities")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Alternatives, A::Error> {
                let mut all = Vec::new();
                while let Some(member) = map.next_entry()? {
                    all.push(member);
                }
                Ok(Alternatives(all))
            }
        }

        from.deserialize_map(Members)
    }
}

/// The log-probabilities of a chunk's tokens; nothing when they have neither shape.
pub(super) fn read(json: &str) -> Vec<TokenLogprob> {
    let Ok(told) = serde_json::from_str::<Told>(json) else {
        return Vec::new();
    };
    if let Some(content) = told.content {
        let one = |of: ChatToken| TokenLogprob {
            token: of.token,
            logprob: of.logprob.unwrap_or(IMPOSSIBLE),
            top: of
                .top_logprobs
                .into_iter()
                .map(|other| (other.token, other.logprob))
                .collect(),
        };
        return content.into_iter().map(one).collect();
    }
    let mut tops = told.top_logprobs.unwrap_or_default().into_iter();
    let tokens = told.tokens.unwrap_or_default().into_iter();
    let logprobs = told.token_logprobs.into_iter();
    tokens
        .zip(logprobs)
        .map(|(token, logprob)| TokenLogprob {
            token,
            logprob: logprob.unwrap_or(IMPOSSIBLE),
            top: tops.next().flatten().map_or_else(Vec::new, |top| top.0),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_shape_says_the_same() {
        let chat = r#"{"content":[{"token":" a","logprob":-0.5,"bytes":[32,97],"top_logprobs":[{"token":" a","logprob":-0.5,"bytes":[32,97]},{"token":" b","logprob":-1.5,"bytes":[32,98]}]},{"token":"c","logprob":-9999.0,"bytes":[99],"top_logprobs":[]}]}"#;
        let text = r#"{"text_offset":[0,2],"token_logprobs":[-0.5,null],"tokens":[" a","c"],"top_logprobs":[{" a":-0.5," b":-1.5},null]}"#;
        let told = read(chat);
        assert_eq!(told, read(text));
        let top = vec![(" a".to_owned(), -0.5), (" b".to_owned(), -1.5)];
        assert_eq!(told[0].top, top);
        assert_eq!((told[1].logprob, told[1].top.len()), (IMPOSSIBLE, 0));
    }

    #[test]
    fn the_order_of_alternatives_is_kept() {
        let text = r#"{"token_logprobs":[-2.0],"tokens":["z"],"top_logprobs":[{"z":-2.0,"b":-0.1,"a":-0.3}]}"#;
        let names: Vec<String> = read(text)
            .remove(0)
            .top
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["z", "b", "a"]);
    }

    #[test]
    fn what_has_neither_shape_says_nothing() {
        for junk in ["null", "7", "{}", r#"{"content":[{}]}"#, r#"{"tokens":7}"#] {
            assert_eq!(read(junk), [], "{junk}");
        }
    }
}
