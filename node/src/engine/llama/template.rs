//! A model's chat template, rendered so that what users wrote stays apart from what the template
//! wrote.
//!
//! Templates are Jinja as Hugging Face `transformers` runs it. The messages' texts are replaced by
//! marks before rendering and put back afterwards, so that the caller can tell control tokens of
//! the template from lookalikes in a message. Two consequences. A template cannot look into a
//! message, only place it, twice or not at all if it wants; cutting white space off a message
//! works, other edits are refused or without effect. And there is no clock: `strftime_now` is
//! undefined, because rendering is a pure function of the messages; templates fall back to a fixed
//! date.

use minijinja::{Environment, Error, ErrorKind, context};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::engine::EngineError;
use crate::openai::ChatMessage;

/// Frames the number of a message. Private-use characters of plane 15: no template has them, and a
/// message's own text is not rendered.
const OPEN: char = '\u{f5a01}';
/// See [`OPEN`].
const CLOSE: char = '\u{f5a02}';
/// White space around a mark. If the template trims the message, it goes. A kind that no template
/// writes itself.
const PAD: char = '\u{2001}';

const NAME: &str = "chat";

/// A compiled template.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    start: String,
    end: String,
}

/// A piece of a rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The text.
    pub(super) text: String,
    /// Written by the template, so control tokens in it are meant. Otherwise by a user.
    pub(super) is_template: bool,
}

impl ChatTemplate {
    /// Compiles a template. `start` and `end` are the texts of the tokens that begin and end a
    /// sequence.
    ///
    /// # Errors
    /// Why the template is not valid.
    pub(super) fn new(source: &str, start: String, end: String) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<(), Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|error| format!("the model's chat template is not valid: {error}"))?;
        Ok(Self {
            environment,
            start,
            end,
        })
    }

    /// Renders a conversation up to where the assistant's answer begins.
    ///
    /// # Errors
    /// [`EngineError::BadRequest`] when a role is not one of OpenAI's or the template refuses.
    pub(super) fn render(&self, messages: &[ChatMessage]) -> Result<Vec<Part>, EngineError> {
        let marked = messages
            .iter()
            .enumerate()
            .map(|(number, message)| {
                let content = if message.content.is_empty() {
                    String::new()
                } else {
                    format!("{PAD}{OPEN}{number}{CLOSE}{PAD}")
                };
                Ok(context! { role => role(&message.role)?, content })
            })
            .collect::<Result<Vec<_>, EngineError>>()?;
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| {
                template.render(context! {
                    messages => marked,
                    bos_token => self.start,
                    eos_token => self.end,
                    add_generation_prompt => true,
                    tools => (),
                    documents => (),
                })
            })
            .map_err(|error| refused(&refusal(&error)))?;
        put_back(&rendered, messages)
    }
}

/// Only known roles: the template writes them where control tokens are read. `developer` is
/// OpenAI's newer name for `system`, and the only one that models know.
fn role(role: &str) -> Result<&'static str, EngineError> {
    match role {
        "system" | "developer" => Ok("system"),
        "user" => Ok("user"),
        "assistant" => Ok("assistant"),
        "tool" => Ok("tool"),
        _ => Err(refused(
            "a role must be system, developer, user, assistant or tool",
        )),
    }
}

fn refused(message: &str) -> EngineError {
    EngineError::BadRequest {
        message: message.to_owned(),
        param: Some("messages".to_owned()),
    }
}

fn refusal(error: &Error) -> String {
    let detail = error
        .detail()
        .map_or_else(|| error.to_string(), str::to_owned);
    format!("the model's chat template refuses these messages: {detail}")
}

/// Replaces marks by the messages they stand for, trimmed where the template trimmed the mark.
fn put_back(rendered: &str, messages: &[ChatMessage]) -> Result<Vec<Part>, EngineError> {
    let cut = || refused("the model's chat template cuts messages apart, which is not supported");
    let mut parts = Vec::new();
    let mut rest = rendered;
    while let Some((before, after)) = rest.split_once(OPEN) {
        let (number, after) = after.split_once(CLOSE).ok_or_else(cut)?;
        let number: usize = number.parse().map_err(|_| cut())?;
        let mut content = messages.get(number).ok_or_else(cut)?.content.as_str();
        let before = before.strip_suffix(PAD).unwrap_or_else(|| {
            content = content.trim_start();
            before
        });
        rest = after.strip_prefix(PAD).unwrap_or_else(|| {
            content = content.trim_end();
            after
        });
        push(&mut parts, before, true);
        push(&mut parts, content, false);
    }
    push(&mut parts, rest, true);
    Ok(parts)
}

fn push(parts: &mut Vec<Part>, text: &str, is_template: bool) {
    if !text.is_empty() {
        parts.push(Part {
            text: text.to_owned(),
            is_template,
        });
    }
}

#[cfg(test)]
mod tests;
