//! Bodies of requests, byte by byte as the client wrote them but for what is put in or taken out.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::engine::remote::kind::ServerKind;

/// The fields that bind an output to a grammar.
const GRAMMAR: [&str; 2] = ["response_format", "structured_outputs"];

/// What a body says of a grammar; plain text is none.
pub(super) fn grammar_of(body: &[u8]) -> Map<String, Value> {
    let Ok(mut fields) = serde_json::from_slice::<Map<String, Value>>(body) else {
        return Map::new();
    };
    fields.retain(|name, value| {
        GRAMMAR.contains(&name.as_str()) && !value.is_null() && value["type"] != "text"
    });
    fields
}

/// A body without its grammar, if it has one; `None` when it is no object.
pub(super) fn without_grammar(body: &[u8]) -> Option<Cow<'_, [u8]>> {
    if grammar_of(body).is_empty() {
        return Some(Cow::Borrowed(body));
    }
    let mut fields: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_slice(body).ok()?;
    fields.retain(|name, _| !GRAMMAR.contains(&&**name));
    serde_json::to_vec(&fields).ok().map(Cow::Owned)
}

/// For a body that has only fields whose meaning for the rest of an answer is known: whether it asks vLLM for ids.
pub(super) fn only_known_fields(body: &[u8], kind: ServerKind) -> Option<bool> {
    const KNOWN: [&str; 20] = [
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "best_of",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop",
        "seed",
        "stream",
        "stream_options",
        "ignore_eos",
        "priority",
    ];
    /// Of these only the prompt, or nothing, depends.
    const HARMLESS: [&str; 8] = [
        "user",
        "metadata",
        "store",
        "service_tier",
        "chat_template_kwargs",
        "add_generation_prompt",
        "safety_identifier",
        "cache_prompt",
    ];
    /// They are off, or [`openai::parse`](crate::openai::parse) had refused them.
    const OFF: [&str; 3] = ["tools", "response_format", "echo"];
    /// vLLM goes on with them, whatever they ask for.
    const LOGPROBS: [&str; 2] = ["logprobs", "top_logprobs"];
    #[derive(Deserialize)]
    struct Options {
        #[serde(default)]
        include_usage: Option<bool>,
        #[serde(flatten)]
        others: BTreeMap<String, IgnoredAny>,
    }
    let fields: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_slice(body).ok()?;
    let plain_usage = fields.get("stream_options").is_none_or(|raw| {
        match serde_json::from_str::<Option<Options>>(raw.get()) {
            Ok(Some(options)) => options.include_usage.is_some() == options.others.is_empty(),
            Ok(None) => true,
            Err(_) => false,
        }
    });
    let asks_for_ids = kind == ServerKind::Vllm
        && fields
            .get("return_token_ids")
            .is_some_and(|raw| raw.get() == "true");
    let known = |name: &str| {
        KNOWN.contains(&name)
            || HARMLESS.contains(&name)
            || (name == "return_token_ids" && asks_for_ids)
            || (OFF.contains(&name) && kind != ServerKind::LlamaServer)
            || (LOGPROBS.contains(&name) && kind == ServerKind::Vllm)
    };
    (plain_usage && fields.keys().all(|name| known(name))).then_some(asks_for_ids)
}

/// A JSON object with more members at its end, each of which has a comma before it.
pub(super) fn with_members(body: &[u8], members: &str) -> Option<Bytes> {
    let inner = body.trim_ascii_end().strip_suffix(b"}")?;
    if members.is_empty() {
        return Some(Bytes::copy_from_slice(body));
    }
    let mut out = BytesMut::with_capacity(inner.len() + members.len() + 1);
    out.put_slice(inner.trim_ascii_end());
    let members = match out.ends_with(b"{") {
        true => members.trim_start_matches(','),
        false => members,
    };
    out.put_slice(members.as_bytes());
    out.put_u8(b'}');
    Some(out.freeze())
}

/// The body with its priority turned round, byte by byte the same elsewhere; `None` when it has none.
pub(super) fn negated_priority(body: &Bytes) -> Option<Bytes> {
    #[derive(Deserialize)]
    struct Ranked<'a> {
        #[serde(borrow)]
        priority: &'a RawValue,
    }
    let text = std::str::from_utf8(body).ok()?;
    let ranked: Ranked<'_> = serde_json::from_str(text).ok()?;
    let raw = ranked.priority.get();
    let number: i64 = serde_json::from_str(raw).ok()?;
    let start = (raw.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    let (before, after) = (text.get(..start)?, text.get(start + raw.len()..)?);
    Some(format!("{before}{}{after}", number.saturating_neg()).into())
}
