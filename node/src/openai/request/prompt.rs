//! What the model is to continue: a conversation, a text or token ids.

use serde_json::value::RawValue;

use super::field::{bad, is_off, kind_of, list, object, text};
use super::{ChatMessage, PromptInput};
use crate::engine::EngineError;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Reads `messages`: at least one.
pub(super) fn messages(raw: Option<&RawValue>) -> Result<Vec<ChatMessage>, EngineError> {
    let name = "messages";
    let raw = raw.ok_or_else(|| bad(Some(name), "`messages` is required".to_owned()))?;
    let mut messages = Vec::new();
    list(raw, name, "an array of messages", |index, item| {
        messages.push(message(item, &format!("{name}[{index}]"))?);
        Ok(())
    })?;
    if messages.is_empty() {
        let message = "`messages` must have at least one message".to_owned();
        return Err(bad(Some(name), message));
    }
    Ok(messages)
}

fn message(raw: &RawValue, name: &str) -> Result<ChatMessage, EngineError> {
    let fields = object(raw, name)?;
    let at = format!("{name}.role");
    let role = match fields.role {
        Some(role) => text(role, &at)?,
        None => return Err(bad(Some(&at), format!("`{at}` is required"))),
    };
    if !ROLES.contains(&role.as_str()) {
        let shown: String = role.chars().take(40).collect();
        let message = format!("`{at}` must be one of {}, got {shown:?}", ROLES.join(", "));
        return Err(bad(Some(&at), message));
    }
    if fields.tool_calls.is_some_and(|calls| !is_off(calls)) {
        let at = format!("{name}.tool_calls");
        return Err(bad(Some(&at), format!("`{at}` is not supported")));
    }
    let at = format!("{name}.content");
    let content = match fields.content {
        Some(content) => content_text(content, &at)?,
        // An assistant that only called a tool, or is to begin its answer, has said nothing.
        None if role == "assistant" => String::new(),
        None => return Err(bad(Some(&at), format!("`{at}` is required"))),
    };
    Ok(ChatMessage { role, content })
}

/// A string, or text parts; parts are joined by line ends, as vLLM and llama.cpp do.
fn content_text(raw: &RawValue, name: &str) -> Result<String, EngineError> {
    if kind_of(raw.get()) == "a string" {
        return text(raw, name);
    }
    let mut joined = String::new();
    list(
        raw,
        name,
        "a string or an array of text parts",
        |index, item| {
            let name = format!("{name}[{index}]");
            let part = object(item, &name)?;
            let kind = part.kind(&name)?;
            if kind != "text" {
                let shown: String = kind.chars().take(40).collect();
                let message = format!(
                    "`{name}` has type `{shown}`, which is not supported: only `text` parts are"
                );
                return Err(bad(Some(&name), message));
            }
            let at = format!("{name}.text");
            let Some(part) = part.text else {
                return Err(bad(Some(&at), format!("`{at}` is required")));
            };
            if index > 0 {
                joined.push('\n');
            }
            joined.push_str(&text(part, &at)?);
            Ok(())
        },
    )?;
    Ok(joined)
}

/// Reads `prompt`: one text or one row of token ids, bare or alone in an array.
pub(super) fn prompt(raw: Option<&RawValue>) -> Result<PromptInput, EngineError> {
    let name = "prompt";
    let raw = raw.ok_or_else(|| bad(Some(name), "`prompt` is required".to_owned()))?;
    let prompt = match (kind_of(raw.get()), first_of(raw)) {
        ("a string", _) => PromptInput::Text(text(raw, name)?),
        ("an array", Some("a string")) => PromptInput::Text(text(only(raw, name)?, "prompt[0]")?),
        ("an array", Some("an array")) => PromptInput::Tokens(ids(only(raw, name)?, "prompt[0]")?),
        _ => PromptInput::Tokens(ids(raw, name)?),
    };
    let empty = match &prompt {
        PromptInput::Text(text) => text.is_empty(),
        PromptInput::Tokens(ids) => ids.is_empty(),
        PromptInput::Chat(messages) => messages.is_empty(),
    };
    if empty {
        return Err(bad(Some(name), "`prompt` must not be empty".to_owned()));
    }
    Ok(prompt)
}

/// Kind of an array's first element.
fn first_of(raw: &RawValue) -> Option<&'static str> {
    Some(kind_of(raw.get().strip_prefix('[')?))
}

fn only<'a>(raw: &'a RawValue, name: &str) -> Result<&'a RawValue, EngineError> {
    let mut first = None;
    list(raw, name, "an array", |index, item| {
        if index > 0 {
            let message = format!("`{name}` must be one prompt: batches are not supported");
            return Err(bad(Some(name), message));
        }
        first = Some(item);
        Ok(())
    })?;
    first.ok_or_else(|| bad(Some(name), format!("`{name}` must not be empty")))
}

fn ids(raw: &RawValue, name: &str) -> Result<Vec<u32>, EngineError> {
    if kind_of(raw.get()) != "an array" {
        let message = format!(
            "`{name}` must be a string or an array of token ids, got {}",
            kind_of(raw.get())
        );
        return Err(bad(Some(name), message));
    }
    serde_json::from_str(raw.get()).map_err(|error| {
        let message = format!(
            "`{name}` must be a string or an array of token ids from 0 to {}: {error}",
            u32::MAX
        );
        bad(Some(name), message)
    })
}
