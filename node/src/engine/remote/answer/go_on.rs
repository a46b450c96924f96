//! Reading an answer that goes on from ids: text is told where the client is, and no further than a stop string.

use bytes::Bytes;

use super::{End, MAX_EVENT, Said, TORN, broken, finish_reason, shortened};
use crate::engine::answer::Wire;
use crate::engine::remote::chunk::{self, IdSource, OwnChunk};
use crate::engine::remote::sse::Splitter;
use crate::engine::text::TextState;
use crate::engine::{EngineError, FinishReason, TokenLogprob};

/// How far an answer is that goes on from ids, and what of its text the client has.
#[derive(Debug)]
pub(in super::super) struct GoOn {
    own_form: bool,
    splitter: Splitter,
    text: TextState,
    /// Bytes of text that the client has already and that will be told once more.
    skip: usize,
    /// Alternatives of a token at most: a chat answer has those that were asked for, a completion the chosen one as well.
    alternatives: usize,
    said: Said,
    pub(super) finish: Option<End>,
}

/// What an answer that goes on was asked for, and what is known of it already.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Before<'a> {
    /// llama-server's own form, not OpenAI's.
    pub(in super::super) own_form: bool,
    pub(in super::super) stop: &'a [String],
    /// The text of all ids so far.
    pub(in super::super) told: &'a str,
    /// How much of it the client has; `None` when it has what would be told.
    pub(in super::super) spoken: Option<&'a str>,
    /// Alternatives of a token at most.
    pub(in super::super) alternatives: usize,
}

impl GoOn {
    /// Goes on after what is known.
    pub(in super::super) fn new(before: Before<'_>) -> Self {
        let Before {
            own_form,
            stop,
            told,
            spoken,
            alternatives,
        } = before;
        let mut text = TextState::new(stop);
        // The rest of a character that is not whole comes with its last token.
        let told = told.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let pushed = text.push(told.as_bytes());
        let has = spoken.map_or(pushed.text.len(), str::len);
        let owed = pushed.text.get(has..).unwrap_or_default().to_owned();
        let mut on = Self {
            own_form,
            splitter: Splitter::new(MAX_EVENT),
            text,
            skip: has.saturating_sub(pushed.text.len()),
            alternatives,
            said: Said {
                text: owed,
                ..Said::default()
            },
            finish: None,
        };
        if pushed.stopped {
            on.finish(FinishReason::Stop);
        }
        on
    }

    pub(super) fn push(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        self.splitter.push(bytes);
        while self.finish.is_none()
            && let Some(event) = self
                .splitter
                .next()
                .map_err(|error| broken(error.to_string()))?
        {
            let Some(data) = event.data.as_bytes().filter(|data| *data != b"[DONE]") else {
                continue;
            };
            let data = std::str::from_utf8(data).unwrap_or_default();
            let (ids, logprobs, text, finish) = if self.own_form {
                let chunk: OwnChunk = serde_json::from_str(data)
                    .map_err(|_| broken(format!("it says: {}", shortened(data))))?;
                let why = chunk.stop_type.unwrap_or_default();
                let finish = chunk.stop.then_some(why);
                (chunk.tokens, Vec::new(), chunk.content, finish)
            } else {
                let chunk = chunk::read(data, IdSource::TokenIds, &mut Vec::new())
                    .filter(|chunk| chunk.error.is_none())
                    .ok_or_else(|| broken(format!("it says: {}", shortened(data))))?;
                let ids = chunk.ids.unwrap_or_default();
                (ids, chunk.logprobs, chunk.text, chunk.finish)
            };
            self.drawn(ids, logprobs, &text);
            if let Some(why) = finish {
                self.finish(finish_reason(&why));
            }
        }
        Ok(())
    }

    fn drawn(&mut self, ids: Vec<u32>, mut logprobs: Vec<TokenLogprob>, text: &str) {
        if self.finish.is_some() {
            return;
        }
        for token in &mut logprobs {
            token.top.truncate(self.alternatives);
        }
        self.said.add(ids, logprobs);
        let pushed = self.text.push(text.as_bytes());
        let new = self.beyond_what_is_known(&pushed.text).to_owned();
        self.said.text.push_str(&new);
        if pushed.stopped {
            self.finish(FinishReason::Stop);
        }
    }

    fn beyond_what_is_known<'a>(&mut self, text: &'a str) -> &'a str {
        let known = self.skip.min(text.len());
        self.skip -= known;
        text.get(known..).unwrap_or_default()
    }

    fn finish(&mut self, reason: FinishReason) {
        if self.finish.is_none() {
            let rest = self.text.finish();
            let text = self.beyond_what_is_known(&rest).to_owned();
            self.finish = Some(End {
                reason,
                text,
                wire: Wire::default(),
            });
        }
    }

    pub(super) fn take(&mut self) -> Option<Said> {
        // Text that comes without ids waits for those that do: each batch has some.
        (!self.said.ids.is_empty()).then(|| std::mem::take(&mut self.said))
    }

    pub(super) fn end(self) -> Result<End, EngineError> {
        let owed = self.said.text;
        match self.finish {
            Some(end) => Ok(End {
                text: owed + &end.text,
                ..end
            }),
            None => Err(broken(TORN)),
        }
    }
}
