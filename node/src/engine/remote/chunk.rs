//! Chunks of a stream in OpenAI's form, read for the ids in them, and put back as they would have been without.
//!
//! Ids are not part of what a client asked for. vLLM tells them when asked (`return_token_ids`); llama-server tells them with
//! log-probabilities. What was added for that is cut out of the bytes again; everything else goes through as it came.

mod logprobs;

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::engine::TokenLogprob;

/// What one event of a stream holds.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Chunk {
    /// `id`, `created`, `model`, `system_fingerprint`.
    pub(super) names: Names,
    /// Text of the first choice.
    pub(super) text: String,
    /// Ids of the first choice's tokens; `None` when it has none.
    pub(super) ids: Option<Vec<u32>>,
    /// Their log-probabilities, if the client asked vLLM for them.
    pub(super) logprobs: Vec<TokenLogprob>,
    /// Bytes of those tokens, where they are told.
    pub(super) id_bytes: usize,
    /// Ids of the prompt, in the first chunk.
    pub(super) prompt: Option<Vec<u32>>,
    /// Why the first choice ended.
    pub(super) finish: Option<String>,
    /// There is something in it besides text that another engine could not go on with: tool calls, reasoning, further choices.
    pub(super) beyond_text: bool,
    /// The engine says that it failed.
    pub(super) error: Option<String>,
}

/// What names a chunk.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Names {
    pub(super) id: Option<String>,
    pub(super) created: Option<u64>,
    pub(super) model: Option<String>,
    pub(super) fingerprint: Option<String>,
}

/// How ids are asked for, and how what was added is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdSource {
    /// vLLM: `return_token_ids` fills members that are null otherwise.
    TokenIds,
    /// llama-server: log-probabilities name their token.
    Logprobs,
    /// vLLM, asked by the client itself, who gets them.
    Told,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow, default)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    created: Option<&'a RawValue>,
    #[serde(borrow, default)]
    model: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    system_fingerprint: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    #[serde(borrow, default)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(default)]
    index: u32,
    #[serde(borrow, default)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    finish_reason: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt_token_ids: Option<&'a RawValue>,
    #[serde(borrow, default)]
    logprobs: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow, default)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_calls: Option<&'a RawValue>,
    #[serde(borrow, default)]
    refusal: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Vec<LogprobId>,
}

#[derive(Deserialize)]
struct LogprobId {
    id: u32,
    #[serde(default)]
    bytes: Vec<u8>,
}

/// Reads an event's data and writes it to `out` without what was added; `None` when it is no chunk that we know.
pub(super) fn read(data: &str, source: IdSource, out: &mut Vec<u8>) -> Option<Chunk> {
    let body: Body<'_> = serde_json::from_str(data).ok()?;
    let mut chunk = Chunk {
        names: Names {
            id: body.id.map(Cow::into_owned),
            created: body.created.and_then(value),
            model: body.model.map(Cow::into_owned),
            fingerprint: body.system_fingerprint.map(Cow::into_owned),
        },
        error: body.error.map(|error| error.get().to_owned()),
        ..Chunk::default()
    };
    let mut added = Vec::new();
    if let Some(raw) = body.prompt_token_ids {
        chunk.prompt = value(raw);
        added.push((raw.get(), Undo::Null));
    }
    for (place, choice) in body.choices.into_iter().enumerate() {
        chunk.beyond_text |= place > 0 || choice.index > 0;
        if let Some(raw) = choice.prompt_token_ids {
            chunk.prompt = chunk.prompt.or_else(|| value(raw));
            added.push((raw.get(), Undo::Null));
        }
        match source {
            IdSource::TokenIds | IdSource::Told => {
                if let Some(raw) = choice.logprobs {
                    chunk.logprobs = logprobs::read(raw.get());
                }
                if let Some(raw) = choice.token_ids {
                    chunk.ids = value(raw);
                    added.push((raw.get(), Undo::Null));
                }
            }
            IdSource::Logprobs => {
                if let Some(raw) = choice.logprobs {
                    let content: Option<Logprobs> = value(raw);
                    let tokens = content.map(|list| list.content);
                    chunk.id_bytes = tokens.iter().flatten().map(|token| token.bytes.len()).sum();
                    chunk.ids =
                        tokens.map(|tokens| tokens.into_iter().map(|token| token.id).collect());
                    let undo = if choice.delta.is_some() {
                        Undo::Member
                    } else {
                        Undo::Null
                    };
                    added.push((raw.get(), undo));
                }
            }
        }
        chunk.finish = choice.finish_reason.map(Cow::into_owned);
        if let Some(delta) = choice.delta {
            let others = [
                delta.reasoning,
                delta.reasoning_content,
                delta.tool_calls,
                delta.refusal,
            ];
            chunk.beyond_text |= others.into_iter().flatten().any(is_something);
            chunk.text.push_str(&delta.content.unwrap_or_default());
        }
        chunk.text.push_str(&choice.text.unwrap_or_default());
    }
    if source == IdSource::Told {
        added.clear();
    }
    undo(data, added, out);
    Some(chunk)
}

fn value<T: for<'a> Deserialize<'a>>(raw: &RawValue) -> Option<T> {
    serde_json::from_str(raw.get()).ok()
}

fn is_something(raw: &RawValue) -> bool {
    !matches!(raw.get(), "null" | "\"\"" | "[]")
}

/// How a member that was added is taken back.
#[derive(Clone, Copy, Debug)]
enum Undo {
    /// It would have been null.
    Null,
    /// It would not be there.
    Member,
}

/// Writes `data` without what was added. The slices are parts of `data`.
fn undo(data: &str, mut added: Vec<(&str, Undo)>, out: &mut Vec<u8>) {
    added.sort_by_key(|(slice, _)| slice.as_ptr() as usize);
    let bytes = data.as_bytes();
    let mut from = 0;
    for (slice, how) in added {
        let start = (slice.as_ptr() as usize).wrapping_sub(data.as_ptr() as usize);
        let end = start.saturating_add(slice.len());
        let Some(before) = bytes.get(from..start) else {
            continue;
        };
        match how {
            Undo::Null => {
                out.extend_from_slice(before);
                out.extend_from_slice(b"null");
                from = end;
            }
            Undo::Member => {
                // Back over the name, and over the comma on one side of the member.
                let name = b"\"logprobs\"";
                let kept = before
                    .windows(name.len())
                    .rposition(|window| window == name)
                    .and_then(|at| before.get(..at))
                    .unwrap_or(before)
                    .trim_ascii_end();
                from = end;
                match (kept.strip_suffix(b","), bytes.get(end)) {
                    (Some(kept), _) => out.extend_from_slice(kept),
                    (None, Some(b',')) => {
                        out.extend_from_slice(kept);
                        from = end + 1;
                    }
                    (None, _) => out.extend_from_slice(kept),
                }
            }
        }
    }
    out.extend_from_slice(bytes.get(from..).unwrap_or_default());
}

/// llama-server's own form of a chunk, on `POST /completion`.
#[derive(Debug, Default, PartialEq, Deserialize)]
pub(super) struct OwnChunk {
    #[serde(default)]
    pub(super) content: String,
    #[serde(default)]
    pub(super) tokens: Vec<u32>,
    #[serde(default)]
    pub(super) stop: bool,
    #[serde(default)]
    pub(super) stop_type: Option<String>,
    #[serde(default)]
    pub(super) tokens_predicted: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(data: &str, source: IdSource) -> (Chunk, String) {
        let mut out = Vec::new();
        let chunk = read(data, source, &mut out).expect("a chunk");
        (chunk, String::from_utf8(out).expect("text"))
    }

    #[test]
    fn ids_of_vllm_are_read_and_what_is_left_is_what_it_writes_unasked() {
        let data = r#"{"id":"chatcmpl-9","object":"chat.completion.chunk","created":1795963205,"model":"m","choices":[{"index":0,"delta":{"content":" capital of"},"logprobs":null,"finish_reason":null,"token_ids":[3575,282]}]}"#;
        let (chunk, left) = through(data, IdSource::TokenIds);
        assert_eq!(chunk.ids, Some(vec![3575, 282]));
        assert_eq!(chunk.text, " capital of");
        assert_eq!(chunk.names.created, Some(1795963205));
        assert!(!chunk.beyond_text);
        assert_eq!(left, data.replace("[3575,282]", "null"));
    }

    #[test]
    fn the_prompt_comes_with_the_first_chunk_of_either_path() {
        let chat = r#"{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":[1,2],"prompt_text":null}"#;
        let (chunk, left) = through(chat, IdSource::TokenIds);
        assert_eq!((chunk.prompt, chunk.ids), (Some(vec![1, 2]), None));
        assert_eq!(left, chat.replace("[1,2]", "null"));
        let text = r#"{"id":"c","choices":[{"index":0,"text":" Paris","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[504],"token_ids":[7042]}]}"#;
        let (chunk, left) = through(text, IdSource::TokenIds);
        assert_eq!(
            (chunk.prompt, chunk.ids),
            (Some(vec![504]), Some(vec![7042]))
        );
        assert_eq!(
            left,
            text.replace("[504]", "null").replace("[7042]", "null")
        );
    }

    #[test]
    fn ids_of_llama_server_come_with_logprobs_that_nobody_asked_for() {
        let with = r#"{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"L"},"logprobs":{"content":[{"id":60,"token":"L","bytes":[76],"logprob":-0.5,"top_logprobs":[]}]}}],"created":7,"id":"x","model":"m","system_fingerprint":"b0","object":"chat.completion.chunk"}"#;
        let (chunk, left) = through(with, IdSource::Logprobs);
        assert_eq!(chunk.ids, Some(vec![60]));
        assert_eq!(chunk.names.fingerprint.as_deref(), Some("b0"));
        let without = r#"{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"L"}}],"created":7,"id":"x","model":"m","system_fingerprint":"b0","object":"chat.completion.chunk"}"#;
        assert_eq!(left, without);
        let first = with
            .replace(
                r#""finish_reason":null,"index":0,"delta":{"content":"L"},"logprobs":"#,
                r#""logprobs":"#,
            )
            .replace(
                "}]}}],\"created\"",
                "}]},\"index\":0,\"delta\":{\"content\":\"L\"}}],\"created\"",
            );
        let (_, left) = through(&first, IdSource::Logprobs);
        assert_eq!(left, without.replace(r#""finish_reason":null,"#, ""));
        let text = r#"{"choices":[{"text":" P","index":0,"logprobs":{"content":[{"id":7,"token":" P"}]},"finish_reason":null}],"created":7,"model":"m","id":"x"}"#;
        let (chunk, left) = through(text, IdSource::Logprobs);
        assert_eq!(chunk.ids, Some(vec![7]));
        assert_eq!(
            left,
            r#"{"choices":[{"text":" P","index":0,"logprobs":null,"finish_reason":null}],"created":7,"model":"m","id":"x"}"#
        );
    }

    #[test]
    fn a_client_that_asks_for_ids_gets_them() {
        let data = r#"{"id":"c","choices":[{"index":0,"text":" Paris","prompt_token_ids":[504],"token_ids":[7042]}]}"#;
        let (chunk, left) = through(data, IdSource::Told);
        assert_eq!(chunk.ids, Some(vec![7042]));
        assert_eq!(left, data);
    }

    #[test]
    fn what_is_more_than_text_is_noticed() {
        for delta in [
            r#"{"content":null,"tool_calls":[{"index":0}]}"#,
            r#"{"reasoning_content":"hm"}"#,
            r#"{"reasoning":"hm"}"#,
        ] {
            let data = format!(r#"{{"choices":[{{"index":0,"delta":{delta}}}]}}"#);
            assert!(through(&data, IdSource::TokenIds).0.beyond_text, "{delta}");
        }
        let second = r#"{"choices":[{"index":1,"delta":{"content":"x"}}]}"#;
        assert!(through(second, IdSource::TokenIds).0.beyond_text);
        let plain =
            r#"{"choices":[{"index":0,"delta":{"content":"x","tool_calls":[],"reasoning":null}}]}"#;
        assert!(!through(plain, IdSource::TokenIds).0.beyond_text);
    }

    #[test]
    fn errors_and_junk_are_told_apart() {
        let (chunk, _) = through(
            r#"{"error":{"message":"EngineCore died"}}"#,
            IdSource::TokenIds,
        );
        assert!(chunk.error.is_some());
        let mut out = Vec::new();
        assert_eq!(read("[DONE]", IdSource::TokenIds, &mut out), None);
        assert_eq!(read("<html>", IdSource::TokenIds, &mut out), None);
        let (odd, _) = through(
            r#"{"id":"c","created":-1,"choices":[]}"#,
            IdSource::TokenIds,
        );
        assert_eq!(odd.names.created, None);
    }
}
