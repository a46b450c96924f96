//! Reading an answer of the engine as it comes: what of it can be passed on now, and whether its end is one.
//!
//! Pure: bytes in, pieces out. An answer that stops in the middle is never taken for a whole one.

mod go_on;

use bytes::{Bytes, BytesMut};
use serde::de::IgnoredAny;

pub(super) use self::go_on::{Before, GoOn};
use super::chunk::{self, Chunk, IdSource};
use super::sse::{Event, Splitter};
use crate::engine::answer::{AnswerHead, ChunkShape, GoingOn, Wire};
use crate::engine::work::Prepared;
use crate::engine::{EngineError, FinishReason, TokenLogprob};

/// Longest event of a stream in bytes: twenty alternatives a token for some hundred tokens that come at once.
const MAX_EVENT: usize = 4 * 1024 * 1024;

/// Answers that are no streams are kept whole up to this many bytes before the client gets any of them, so that an engine
/// that dies while it writes one costs nobody an answer.
const MAX_WHOLE: usize = 1024 * 1024;

/// A piece of an answer: the next output tokens, their text, and the bytes that stand for them.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Said {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    /// One for each id, or none.
    pub(super) logprobs: Vec<TokenLogprob>,
    pub(super) wire: Wire,
}

impl Said {
    /// Adds tokens with their log-probabilities, if there is one for each of them all.
    fn add(&mut self, ids: Vec<u32>, logprobs: Vec<TokenLogprob>) {
        let whole = self.logprobs.len() == self.ids.len() && logprobs.len() == ids.len();
        self.ids.extend(ids);
        match whole {
            true => self.logprobs.extend(logprobs),
            false => self.logprobs.clear(),
        }
    }
}

/// The end of an answer.
#[derive(Debug, PartialEq)]
pub(super) struct End {
    pub(super) reason: FinishReason,
    pub(super) text: String,
    pub(super) wire: Wire,
}

/// One answer in the reading.
#[derive(Debug)]
pub(super) enum Reader {
    Whole(Box<Whole>),
    Opaque(Box<Opaque>),
    Ids(Box<Ids>),
    GoOn(Box<GoOn>),
}

impl Reader {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// `Broken` when they cannot be the engine's answer. Nothing more will come.
    pub(super) fn push(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        match self {
            Self::Whole(whole) => {
                if let Some(opaque) = whole.push(bytes) {
                    *self = Self::Opaque(Box::new(opaque));
                }
                Ok(())
            }
            Self::Opaque(opaque) => opaque.push(bytes),
            Self::Ids(ids) => ids.push(bytes),
            Self::GoOn(on) => on.push(bytes),
        }
    }

    /// What can be passed on now, if anything.
    pub(super) fn take(&mut self) -> Option<Said> {
        match self {
            Self::Whole(_) => None,
            Self::Opaque(opaque) => opaque.take(),
            Self::Ids(ids) => ids.take(),
            Self::GoOn(on) => on.take(),
        }
    }

    /// Whether the answer is complete, though the connection stays open.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Whole(_) | Self::Opaque(_) => false,
            Self::Ids(ids) => ids.done,
            Self::GoOn(on) => on.finish.is_some(),
        }
    }

    /// The end, when the engine has no more to say.
    ///
    /// # Errors
    /// `Broken` when that is no end of an answer.
    pub(super) fn end(self) -> Result<End, EngineError> {
        match self {
            Self::Whole(whole) => whole.end(),
            Self::Opaque(opaque) => opaque.end(),
            Self::Ids(ids) => ids.end(),
            Self::GoOn(on) => on.end(),
        }
    }
}

fn end(head: Option<AnswerHead>, bytes: Bytes) -> End {
    End {
        reason: FinishReason::Stop,
        text: String::new(),
        wire: Wire {
            head: head.map(Box::new),
            bytes,
        },
    }
}

fn broken(message: impl Into<String>) -> EngineError {
    EngineError::Broken(message.into())
}

/// Why a stream's end is none.
const TORN: &str = "the engine ended its answer in the middle";

/// An answer that is no stream.
#[derive(Debug)]
pub(super) struct Whole {
    head: AnswerHead,
    bytes: BytesMut,
    /// It must be JSON to its end: a body may end in the middle though its connection ends in order.
    json: bool,
}

impl Whole {
    pub(super) fn new(head: AnswerHead, json: bool) -> Self {
        Self {
            head,
            bytes: BytesMut::new(),
            json,
        }
    }

    fn end(self) -> Result<End, EngineError> {
        if self.json && serde_json::from_slice::<IgnoredAny>(&self.bytes).is_err() {
            return Err(broken(TORN));
        }
        Ok(end(Some(self.head), self.bytes.freeze()))
    }

    /// Takes bytes; gives itself up when there are too many to keep.
    fn push(&mut self, bytes: Bytes) -> Option<Opaque> {
        self.bytes.extend_from_slice(&bytes);
        (self.bytes.len() > MAX_WHOLE).then(|| Opaque {
            head: Some(std::mem::take(&mut self.head)),
            pending: std::mem::take(&mut self.bytes),
            events: None,
            last: BytesMut::new(),
        })
    }
}

/// What the bytes of a whole answer end with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The end of an event.
    Event,
    /// OpenAI's mark.
    Done,
}

/// Bytes that go through as they come.
#[derive(Debug)]
pub(super) struct Opaque {
    head: Option<AnswerHead>,
    pending: BytesMut,
    /// Of a stream: whole events go through, so that what may have to be said after them is one too.
    events: Option<(Splitter, Ending)>,
    /// The mark that ends it, and what may come after: it goes with the end, which has something to show by that.
    last: BytesMut,
}

impl Opaque {
    /// A stream of events.
    pub(super) fn new(head: AnswerHead, ends_with: Ending) -> Self {
        Self {
            head: Some(head),
            pending: BytesMut::new(),
            events: Some((Splitter::new(MAX_EVENT), ends_with)),
            last: BytesMut::new(),
        }
    }

    fn push(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        let Some((splitter, _)) = &mut self.events else {
            self.pending.extend_from_slice(&bytes);
            return Ok(());
        };
        splitter.push(bytes);
        while let Some(event) = splitter.next().map_err(|error| broken(error.to_string()))? {
            let done = event.data.as_bytes() == Some(b"[DONE]");
            match done || !self.last.is_empty() {
                true => self.last.extend_from_slice(&event.raw),
                false => self.pending.extend_from_slice(&event.raw),
            }
        }
        Ok(())
    }

    fn take(&mut self) -> Option<Said> {
        if self.pending.is_empty() {
            return None;
        }
        Some(Said {
            wire: Wire {
                head: self.head.take().map(Box::new),
                bytes: self.pending.split().freeze(),
            },
            ..Said::default()
        })
    }

    fn end(mut self) -> Result<End, EngineError> {
        let marked = !self.last.is_empty();
        let whole = match &self.events {
            None => true,
            Some((splitter, Ending::Event)) => splitter.rest().is_empty(),
            Some((splitter, Ending::Done)) => marked && splitter.rest().is_empty(),
        };
        if whole {
            self.pending.unsplit(self.last);
            Ok(end(self.head, self.pending.freeze()))
        } else {
            Err(broken(TORN))
        }
    }
}

/// A stream whose bytes go through, with the ids they stand for.
#[derive(Debug)]
pub(super) struct Ids {
    source: IdSource,
    fingerprint: u64,
    /// Until it is sent.
    head: Option<AnswerHead>,
    /// Until the first tokens show whether another engine can go on.
    prepared: Option<Box<Prepared>>,
    prompt: Option<Vec<u32>>,
    splitter: Splitter,
    said: Said,
    /// Bytes that wait for the next tokens.
    held: Vec<u8>,
    /// The ids are not known any more: the bytes go through without.
    lost: bool,
    finish: Option<FinishReason>,
    done: bool,
    text_bytes: usize,
    id_bytes: usize,
}

impl Ids {
    pub(super) fn new(
        head: AnswerHead,
        (source, prepared): (IdSource, Box<Prepared>),
        fingerprint: u64,
    ) -> Self {
        Self {
            source,
            fingerprint,
            head: Some(head),
            prepared: Some(prepared),
            prompt: None,
            splitter: Splitter::new(MAX_EVENT),
            said: Said::default(),
            held: Vec::new(),
            lost: false,
            finish: None,
            done: false,
            text_bytes: 0,
            id_bytes: 0,
        }
    }

    fn push(&mut self, bytes: Bytes) -> Result<(), EngineError> {
        self.splitter.push(bytes);
        while let Some(event) = self
            .splitter
            .next()
            .map_err(|error| broken(error.to_string()))?
        {
            self.event(&event)?;
        }
        Ok(())
    }

    fn event(&mut self, event: &Event) -> Result<(), EngineError> {
        let Some(data) = event.data.as_bytes() else {
            self.held.extend_from_slice(&event.raw);
            return Ok(());
        };
        if data == b"[DONE]" {
            self.done = true;
            self.held.extend_from_slice(&event.raw);
            return Ok(());
        }
        let text = std::str::from_utf8(data).unwrap_or_default();
        let start = place_of(&event.raw, data);
        let mut out = Vec::with_capacity(event.raw.len());
        out.extend_from_slice(event.raw.get(..start).unwrap_or_default());
        let Some(chunk) = chunk::read(text, self.source, &mut out) else {
            // Something new: it goes through, and nobody can say any more what was said.
            self.lost = true;
            self.held.extend_from_slice(&event.raw);
            return Ok(());
        };
        out.extend_from_slice(event.raw.get(start + data.len()..).unwrap_or_default());
        if let Some(error) = &chunk.error
            && !self.lost
        {
            return Err(broken(format!("it says: {}", shortened(error))));
        }
        self.chunk(chunk, &out);
        Ok(())
    }

    fn chunk(&mut self, chunk: Chunk, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
        self.prompt = self.prompt.take().or(chunk.prompt);
        if let Some(reason) = &chunk.finish {
            // With its last tokens, if there are any: they are there when the end is, or drawn again.
            self.finish = Some(finish_reason(reason));
        }
        if self.finish.is_some() {
            return;
        }
        let ids = chunk.ids.unwrap_or_default();
        self.text_bytes += chunk.text.len();
        self.id_bytes += chunk.id_bytes;
        // llama-server keeps the ids of all but the last token of a character to itself.
        let unknown = self.source == IdSource::Logprobs && self.text_bytes > self.id_bytes;
        self.lost |= chunk.beyond_text || unknown || (ids.is_empty() && !chunk.text.is_empty());
        if ids.is_empty() && !self.lost {
            return;
        }
        if self
            .head
            .as_ref()
            .is_some_and(|head| head.going_on.is_none())
        {
            self.begin(chunk.names);
        }
        self.said.wire.bytes = joined(&self.said.wire.bytes, &self.held);
        self.held.clear();
        self.said.text.push_str(&chunk.text);
        if !self.lost {
            self.said.add(ids, chunk.logprobs);
        }
    }

    /// Says in the head what another engine needs, if it can go on at all.
    fn begin(&mut self, names: chunk::Names) {
        let Some((head, prepared)) = self.head.as_mut().zip(self.prepared.take()) else {
            return;
        };
        // vLLM says the prompt; of llama-server whoever goes on asks its own.
        let prompt = match (self.source, self.prompt.take()) {
            (_, Some(prompt)) => prompt,
            (IdSource::Logprobs, None) => Vec::new(),
            (IdSource::TokenIds | IdSource::Told, None) => return,
        };
        if self.lost {
            return;
        }
        let (Some(id), Some(created), Some(model)) = (names.id, names.created, names.model) else {
            return;
        };
        head.going_on = Some(GoingOn {
            prepared: Prepared {
                prompt: prompt.into(),
                ..*prepared
            },
            fingerprint: self.fingerprint,
            shape: ChunkShape {
                id,
                created,
                model,
                fingerprint: names.fingerprint,
                ids: self.source == IdSource::Told,
            },
        });
    }

    fn take(&mut self) -> Option<Said> {
        if self.lost && !self.held.is_empty() && self.finish.is_none() {
            self.said.wire.bytes = joined(&self.said.wire.bytes, &self.held);
            self.held.clear();
        }
        if self.said.wire.bytes.is_empty() {
            return None;
        }
        let mut said = std::mem::take(&mut self.said);
        said.wire.head = self.head.take().map(Box::new);
        if self.lost {
            // A piece without ids: nobody will try to go on from here.
            said.ids.clear();
            said.logprobs.clear();
            said.text.clear();
        }
        Some(said)
    }

    fn end(self) -> Result<End, EngineError> {
        if !self.done || !self.splitter.rest().is_empty() || (self.finish.is_none() && !self.lost) {
            return Err(broken(TORN));
        }
        Ok(End {
            reason: self.finish.unwrap_or(FinishReason::Stop),
            ..end(self.head, self.held.into())
        })
    }
}

fn joined(before: &Bytes, after: &[u8]) -> Bytes {
    if before.is_empty() {
        return Bytes::copy_from_slice(after);
    }
    let mut both = BytesMut::with_capacity(before.len() + after.len());
    both.extend_from_slice(before);
    both.extend_from_slice(after);
    both.freeze()
}

/// Where a slice of `raw` begins in it; several joined lines are no slice, and begin at its end.
fn place_of(raw: &[u8], data: &[u8]) -> usize {
    let at = (data.as_ptr() as usize).wrapping_sub(raw.as_ptr() as usize);
    if at <= raw.len() { at } else { raw.len() }
}

fn finish_reason(reason: &str) -> FinishReason {
    match reason {
        "length" | "limit" => FinishReason::Length,
        _ => FinishReason::Stop,
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests;
