//! Splitting of server-sent events, byte-exact.
//!
//! The node passes events on as they came and looks into them, so an event keeps its bytes beside
//! what they mean. Each byte is scanned once; an event that lies in one chunk is a slice of it.

use std::ops::Range;

use bytes::{Buf, Bytes, BytesMut};

const BOM: &[u8] = b"\xef\xbb\xbf";

/// Cuts a stream into events.
///
/// The pieces that come out, and [`Splitter::rest`] at the end, are together the bytes that went
/// in. Lines end with `\n`, `\r\n` or `\r`, in any mix. An event ends with the first byte that can
/// end it: after `\r` it does not wait to see whether a `\n` follows, and one that comes with a
/// later chunk is an event of its own, without data.
#[derive(Debug)]
pub(super) struct Splitter {
    limit: usize,
    /// Begin of the event, from chunks before.
    carry: BytesMut,
    /// The latest chunk, from where the event begins or goes on.
    chunk: Bytes,
    /// Bytes of the event that were scanned. As all places below, counted from its begin.
    seen: usize,
    /// Where the line begins.
    line: usize,
    /// The last byte scanned was `\r`; a `\n` now belongs to it.
    after_cr: bool,
    /// No line was seen yet, so a byte order mark may come.
    first: bool,
    /// An event was too long.
    failed: bool,
    fields: Fields,
}

/// Where the fields of an event are.
#[derive(Debug, Default)]
struct Fields {
    name: Option<Range<usize>>,
    data: Option<Range<usize>>,
    /// Lines of data after the first.
    more: Vec<Range<usize>>,
}

/// One event, or what stood where one could.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Event {
    /// As it came, the blank line included.
    pub(super) raw: Bytes,
    /// The value of its last `event` field.
    pub(super) name: Option<Bytes>,
    /// What it carries.
    pub(super) data: Data,
}

/// The data of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Data {
    /// No `data` field: a comment, a blank line, other fields.
    None,
    /// One line, a slice of the raw bytes.
    Line(Bytes),
    /// Several lines, joined by `\n`.
    Lines(Bytes),
}

impl Data {
    /// The bytes, if there are any fields of data.
    pub(super) fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::None => None,
            Self::Line(bytes) | Self::Lines(bytes) => Some(bytes),
        }
    }
}

/// An event is longer than the limit. What was received of it is kept; the splitter goes no
/// further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of more than {limit} bytes")]
pub(super) struct TooLong {
    /// Bytes that an event may have.
    pub(super) limit: usize,
}

impl Splitter {
    /// A splitter at the begin of a stream. `limit` bounds the bytes of an event.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            carry: BytesMut::new(),
            chunk: Bytes::new(),
            seen: 0,
            line: 0,
            after_cr: false,
            first: true,
            failed: false,
            fields: Fields::default(),
        }
    }

    /// Takes bytes of the stream. Ask [`Splitter::next`] until it has no more before the next push:
    /// chunks that pile up are copied together.
    pub(super) fn push(&mut self, bytes: Bytes) {
        if self.chunk.is_empty() {
            self.chunk = bytes;
            return;
        }
        let mut joined = BytesMut::with_capacity(self.chunk.len() + bytes.len());
        joined.extend_from_slice(&self.chunk);
        joined.extend_from_slice(&bytes);
        self.chunk = joined.freeze();
    }

    /// The next event that is complete.
    ///
    /// # Errors
    /// When it is longer than the limit; so is every later answer.
    pub(super) fn next(&mut self) -> Result<Option<Event>, TooLong> {
        if self.failed {
            return Err(self.too_long());
        }
        while let Some(scanned) = self.seen.checked_sub(self.carry.len()) {
            let unseen = self.chunk.get(scanned..).unwrap_or_default();
            if self.after_cr && !unseen.is_empty() {
                self.after_cr = false;
                if unseen.starts_with(b"\n") {
                    self.seen += 1;
                    self.line = self.seen;
                    if self.seen == 1 {
                        return self.cut();
                    }
                    continue;
                }
            }
            let Some(end) = unseen.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                return self.wait();
            };
            let ending = &unseen[end..];
            let width = if ending.starts_with(b"\r\n") { 2 } else { 1 };
            self.after_cr = ending == b"\r";
            let line = self.line..self.seen + end;
            self.seen = line.end + width;
            self.line = self.seen;
            if self.end_line(line) {
                return self.cut();
            }
        }
        Ok(None)
    }

    /// What is left of an event that is not complete, once [`Splitter::next`] has no more.
    pub(super) fn rest(&self) -> &[u8] {
        if self.carry.is_empty() {
            &self.chunk
        } else {
            &self.carry
        }
    }

    /// Notes what a line holds. Whether it was blank and so ends the event.
    fn end_line(&mut self, mut line: Range<usize>) -> bool {
        if std::mem::take(&mut self.first) && self.begins(&line, BOM) {
            line.start += BOM.len();
        }
        if line.is_empty() {
            return true;
        }
        if let Some(value) = self.value(&line, b"data") {
            match self.fields.data {
                None => self.fields.data = Some(value),
                Some(_) => self.fields.more.push(value),
            }
        } else if let Some(value) = self.value(&line, b"event") {
            self.fields.name = Some(value);
        }
        false
    }

    /// Where the value of the field `name` is, if the line is of that field.
    fn value(&self, line: &Range<usize>, name: &[u8]) -> Option<Range<usize>> {
        if !self.begins(line, name) {
            return None;
        }
        let colon = line.start + name.len();
        if colon == line.end {
            return Some(colon..colon);
        }
        if self.at(colon) != Some(b':') {
            return None;
        }
        let blank = colon + 1 < line.end && self.at(colon + 1) == Some(b' ');
        Some(colon + 1 + usize::from(blank)..line.end)
    }

    fn begins(&self, line: &Range<usize>, text: &[u8]) -> bool {
        line.len() >= text.len()
            && (line.start..)
                .zip(text)
                .all(|(at, &byte)| self.at(at) == Some(byte))
    }

    /// A byte of the event.
    fn at(&self, place: usize) -> Option<u8> {
        match place.checked_sub(self.carry.len()) {
            Some(place) => self.chunk.get(place).copied(),
            None => self.carry.get(place).copied(),
        }
    }

    /// Keeps the begin of an event for the next chunk.
    fn wait(&mut self) -> Result<Option<Event>, TooLong> {
        let held = self.carry.len() + self.chunk.len();
        self.seen = held;
        if held > self.limit {
            return Err(self.too_long());
        }
        self.carry
            .extend_from_slice(&std::mem::take(&mut self.chunk));
        Ok(None)
    }

    fn too_long(&mut self) -> TooLong {
        self.failed = true;
        TooLong { limit: self.limit }
    }

    /// Cuts the event off that was scanned.
    fn cut(&mut self) -> Result<Option<Event>, TooLong> {
        if self.seen > self.limit {
            return Err(self.too_long());
        }
        let here = self.seen - self.carry.len();
        let raw = if self.carry.is_empty() {
            self.chunk.split_to(here)
        } else {
            self.carry.extend_from_slice(&self.chunk[..here]);
            self.chunk.advance(here);
            self.carry.split().freeze()
        };
        self.seen = 0;
        self.line = 0;
        Ok(Some(std::mem::take(&mut self.fields).event(raw)))
    }
}

impl Fields {
    fn event(self, raw: Bytes) -> Event {
        let name = self.name.map(|range| raw.slice(range));
        let data = match self.data {
            None => Data::None,
            Some(line) if self.more.is_empty() => Data::Line(raw.slice(line)),
            Some(first) => {
                let mut joined = BytesMut::with_capacity(raw.len());
                joined.extend_from_slice(&raw[first]);
                for line in self.more {
                    joined.extend_from_slice(b"\n");
                    joined.extend_from_slice(&raw[line]);
                }
                Data::Lines(joined.freeze())
            }
        };
        Event { raw, name, data }
    }
}

#[cfg(test)]
mod tests;
