//! The text of a completion, taken from what the mesh or an engine tells of it.
//!
//! Pure. Engines beside a node write answers by themselves: then the text is in OpenAI's chunks, cut anywhere.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::engine::answer::Wire;
use crate::engine::{Finish, TokenBatch};
use crate::frontend::HomeError;

/// Longest line of an engine's answer, or longest answer that is no stream, in bytes: twenty alternatives a token for some
/// hundred tokens.
const MAX_PIECE: usize = 4 * 1024 * 1024;

/// An answer as far as it has come.
#[derive(Debug)]
pub(super) struct Transcript {
    /// The prompt and all output.
    text: String,
    /// Bytes of the prompt.
    prompt: usize,
    /// Output tokens that were seen to come.
    seen: u32,
    /// Output tokens, as an engine counted them.
    counted: Option<u32>,
    /// An engine's bytes whose line or body is not whole yet.
    pending: Vec<u8>,
    /// They are one body and no server-sent events.
    is_body: bool,
}

/// An answer or a piece of one, in OpenAI's form.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: Option<u32>,
}

impl Transcript {
    pub(super) fn new(prompt: String) -> Self {
        Self {
            prompt: prompt.len(),
            text: prompt,
            seen: 0,
            counted: None,
            pending: Vec::new(),
            is_body: false,
        }
    }

    /// The prompt and all output so far.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// All output so far.
    pub(super) fn output(&self) -> &str {
        self.text.get(self.prompt..).unwrap_or_default()
    }

    /// Takes new tokens; says how many.
    ///
    /// # Errors
    /// When what an engine wrote is no completion.
    pub(super) fn tokens(&mut self, batch: &TokenBatch) -> Result<u32, HomeError> {
        let told = u32::try_from(batch.ids.len()).unwrap_or(u32::MAX);
        if batch.wire.is_empty() {
            self.text.push_str(&batch.text);
            self.seen += told;
            return Ok(told);
        }
        let pieces = self.wire(&batch.wire)?;
        // Who tells no ids sends a piece of text for each token.
        let tokens = if told > 0 { told } else { pieces };
        self.seen += tokens;
        Ok(tokens)
    }

    /// Takes the end; says how many tokens there were in all.
    ///
    /// # Errors
    /// As [`Self::tokens`].
    pub(super) fn finished(&mut self, finish: &Finish) -> Result<u32, HomeError> {
        self.text.push_str(&finish.text);
        let pieces = self.wire(&finish.wire)?;
        let rest = std::mem::take(&mut self.pending);
        self.seen += pieces;
        self.seen += match self.is_body {
            true => self.chunk(&rest)?,
            false => self.line(&rest)?,
        };
        // An engine's own count is of all tokens, also of those that have no text.
        Ok(self
            .counted
            .unwrap_or_else(|| self.seen.max(finish.output_tokens)))
    }

    /// Takes bytes of an engine; says how many pieces of text were in them.
    fn wire(&mut self, wire: &Wire) -> Result<u32, HomeError> {
        if let Some(head) = &wire.head {
            self.is_body = !head.is_stream();
        }
        self.pending.extend_from_slice(&wire.bytes);
        let mut pieces = 0;
        if !self.is_body {
            let bytes = std::mem::take(&mut self.pending);
            let lines = bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r'));
            for line in lines {
                match line
                    .strip_suffix(b"\n")
                    .or_else(|| line.strip_suffix(b"\r"))
                {
                    Some(line) => pieces += self.line(line)?,
                    None => self.pending = line.to_vec(),
                }
            }
        }
        if self.pending.len() > MAX_PIECE {
            return Err(unreadable());
        }
        Ok(pieces)
    }

    /// Takes a line of a stream. Each event of a completion has one with data.
    fn line(&mut self, line: &[u8]) -> Result<u32, HomeError> {
        match line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) {
            Some(data) if !data.is_empty() && data != b"[DONE]" => self.chunk(data),
            Some(_) | None => Ok(0),
        }
    }

    fn chunk(&mut self, json: &[u8]) -> Result<u32, HomeError> {
        let chunk: Chunk<'_> = serde_json::from_slice(json).map_err(|_| unreadable())?;
        if chunk.error.is_some() {
            let said = String::from_utf8_lossy(json);
            let said: String = said.chars().take(200).collect();
            return Err(HomeError::Lost(format!("its engine says: {said}")));
        }
        let usage = chunk.usage.and_then(|usage| usage.completion_tokens);
        self.counted = usage.or(self.counted);
        let mut pieces = 0;
        for text in chunk
            .choices
            .iter()
            .filter_map(|choice| choice.text.as_deref())
        {
            self.text.push_str(text);
            pieces += u32::from(!text.is_empty());
        }
        Ok(pieces)
    }
}

fn unreadable() -> HomeError {
    HomeError::Lost("what its engine wrote is no completion".to_owned())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::engine::FinishReason;
    use crate::engine::answer::AnswerHead;

    fn head(kind: &str) -> Option<Box<AnswerHead>> {
        Some(Box::new(AnswerHead {
            status: 200,
            headers: vec![("content-type".into(), kind.into())],
            going_on: None,
        }))
    }

    fn wired(ids: &[u32], head: Option<Box<AnswerHead>>, bytes: &[u8]) -> TokenBatch {
        TokenBatch {
            ids: ids.to_vec(),
            text: "not this".into(),
            wire: Wire {
                head,
                bytes: Bytes::copy_from_slice(bytes),
            },
            ..TokenBatch::default()
        }
    }

    fn finish(text: &str, output_tokens: u32, bytes: &[u8]) -> Finish {
        Finish {
            reason: FinishReason::Stop,
            output_tokens,
            text: text.into(),
            wire: Wire::of(Bytes::copy_from_slice(bytes)),
            prompt_tokens: None,
        }
    }

    const STREAM: &[u8] = "data: {\"choices\":[{\"text\":\"Hé\"}],\"usage\":null}\r\n\r\n: alive\n\n\
        data: {\"choices\":[{\"text\":\"l\\n\"}]}\n\ndata: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"completion_tokens\":4}}\n\ndata: [DONE]\n\n"
        .as_bytes();

    #[test]
    fn a_stream_cut_anywhere_is_the_same_text() {
        for at in 0..=STREAM.len() {
            let mut transcript = Transcript::new("p: ".into());
            let (one, two) = STREAM.split_at(at);
            let first = wired(&[], head("text/event-stream"), one);
            let seen = transcript.tokens(&first).unwrap();
            assert!(seen <= 2);
            assert_eq!(transcript.finished(&finish("", 0, two)).unwrap(), 4);
            assert_eq!(transcript.text(), "p: Hél\n");
            assert_eq!(transcript.output(), "Hél\n");
        }
    }

    #[test]
    fn an_answer_that_goes_on_elsewhere_is_taken_from_both() {
        let mut transcript = Transcript::new(String::new());
        let chunk = b"data: {\"choices\":[{\"text\":\"ab\"}]}\n\n";
        let first = wired(&[1, 2], head("text/event-stream"), chunk);
        assert_eq!(transcript.tokens(&first).unwrap(), 2);
        let second = TokenBatch {
            index: 2,
            ids: vec![3],
            text: "c".into(),
            ..TokenBatch::default()
        };
        assert_eq!(transcript.tokens(&second).unwrap(), 1);
        assert_eq!(transcript.finished(&finish("d", 4, b"")).unwrap(), 4);
        assert_eq!(transcript.output(), "abcd");
    }

    #[test]
    fn an_engine_that_does_not_stream_is_read_too() {
        let mut transcript = Transcript::new(String::new());
        let body = br#"{"choices":[{"text":"all"}],"usage":{"completion_tokens":3}}"#;
        let mut end = finish("", 0, body);
        end.wire.head = head("application/json");
        assert_eq!(transcript.finished(&end).unwrap(), 3);
        assert_eq!(transcript.output(), "all");
    }

    #[test]
    fn junk_and_an_engines_error_are_no_text() {
        for bytes in ["data: {\n\n", "data: {\"error\":{\"message\":\"no\"}}\n\n"] {
            let mut transcript = Transcript::new(String::new());
            let batch = wired(&[], head("text/event-stream"), bytes.as_bytes());
            assert!(transcript.tokens(&batch).is_err(), "{bytes}");
        }
    }
}
