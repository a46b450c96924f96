//! A parcel as bytes of streams.
//!
//! A parcel's first stream carries an [`Opening`], the head, and the first part of the body; every other part has a
//! stream of its own behind a [`PartOpening`]. The receiver answers on the first stream with [`Reply`]s.
//!
//! ```text
//! first stream   Opening │ head: chunk sum chunk sum … │ part 0: chunk sum … │ end
//! part's stream  PartOpening │ part i: chunk sum … │ end
//! ```
//!
//! - A message is a version byte, a length in 2 bytes, postcard, and a sum.
//! - A chunk is [`CHUNK_BYTES`] long, the last of its section whatever is left. Its sum covers where it belongs as well
//!   as what it is, so that chunks which change places are caught.
//! - The sum is a CRC-32: 0.08 s of processor time per GB and side, as much as XXH3 (measured, 13 GiB/s
//!   each), and it catches every damaged run of up to 32 bits for certain. It guards against our own mistakes
//!   and damaged memory; the network's forgeries are TLS's to catch.
//! - Reading takes address space for what the receiver has admitted, and memory for what arrives.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use crc32fast::Hasher;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::transfer::{MAX_HEAD_BYTES, Parcel, ParcelHeader, ParcelKind, Rejection};
use crate::{Buffers, KvRange};

/// Version of everything here.
pub const VERSION: u8 = 1;

/// Bytes under one sum. The sum's 4 bytes are nothing beside it; damage is found after a quarter of a MiB, and one chunk in
/// the making is all that a writer holds beside the parcel.
pub const CHUNK_BYTES: usize = 256 * 1024;

/// Bytes of a sum.
const SUM_BYTES: usize = 4;

/// Parts of one body at most. More than a handful never paid (one connection is one task); this bounds what a
/// peer can make us keep.
pub const MAX_PARTS: u32 = 16;

/// Bytes of a message's version and length.
pub const PREFIX_BYTES: usize = 3;

/// Bytes of a message at most, its prefix and sum not counted. An opening takes under 100, a rejection its reason.
pub const MAX_MESSAGE_BYTES: usize = 1024;

/// Bytes of a rejection's reason that travel; the rest is cut off.
const MAX_REASON_BYTES: usize = 512;

/// What a parcel's first stream begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// The sender's number for this parcel, never used twice on one connection.
    pub serial: u64,
    /// The parcel.
    pub header: ParcelHeader,
    /// Parts that its body comes in, at least one.
    pub parts: u32,
}

/// What a part's stream begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartOpening {
    /// [`Opening::serial`] of its parcel.
    pub serial: u64,
    /// Which part; from one, since part 0 is on the first stream.
    pub part: u32,
}

/// What the receiver says on the first stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The parcel is admitted: send the other parts.
    Admitted,
    /// The parcel was taken in whole.
    Taken,
    /// It was not, and nothing of it is kept.
    Rejected(Rejection),
}

/// Why bytes are not what they should be. Nothing of them was used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Written in another version.
    #[error("version {0} instead of {VERSION}")]
    OtherVersion(u8),
    /// Longer than the bound for its kind.
    #[error("{0} bytes are too many")]
    TooLong(u64),
    /// Not such a message.
    #[error("not a message of this kind: {0}")]
    Junk(String),
    /// A sum does not match.
    #[error("damaged: a checksum does not match")]
    Damaged,
    /// The stream ended too early, or went on for too long.
    #[error("the stream is {0} than announced")]
    Length(&'static str),
}

impl From<WireError> for Rejection {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Damaged | WireError::Length(_) => Self::Damaged,
            WireError::TooLong(_) => Self::TooLarge,
            WireError::OtherVersion(_) | WireError::Junk(_) => Self::Wrong(error.to_string()),
        }
    }
}

impl Rejection {
    /// The same, with a reason short enough to travel.
    #[must_use]
    pub fn shortened(self) -> Self {
        match self {
            Self::Wrong(mut reason) => {
                reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
                Self::Wrong(reason)
            }
            Self::Unknown | Self::TooLarge | Self::Damaged => self,
        }
    }
}

/// A message as bytes.
///
/// # Errors
/// [`WireError::TooLong`], which no message of this module is once its reason is shortened.
pub fn encode<T: Serialize>(message: &T) -> Result<Bytes, WireError> {
    let junk = |error: postcard::Error| WireError::Junk(error.to_string());
    let body = postcard::to_stdvec(message).map_err(junk)?;
    let length = u16::try_from(body.len()).unwrap_or(u16::MAX);
    if body.len() > MAX_MESSAGE_BYTES {
        return Err(WireError::TooLong(body.len() as u64));
    }
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + body.len() + SUM_BYTES);
    bytes.put_u8(VERSION);
    bytes.put_u16(length);
    bytes.put_slice(&body);
    bytes.put_u32(crc32fast::hash(&bytes));
    Ok(bytes.freeze())
}

/// Bytes that follow a message's prefix.
///
/// # Errors
/// [`WireError::OtherVersion`] and [`WireError::TooLong`].
pub fn rest_of(prefix: [u8; PREFIX_BYTES]) -> Result<usize, WireError> {
    let [version, high, low] = prefix;
    if version != VERSION {
        return Err(WireError::OtherVersion(version));
    }
    let length = usize::from(u16::from_be_bytes([high, low]));
    if length > MAX_MESSAGE_BYTES {
        return Err(WireError::TooLong(length as u64));
    }
    Ok(length + SUM_BYTES)
}

/// Reads a message; `rest` is what [`rest_of`] said follows the prefix.
///
/// # Errors
/// [`WireError::Damaged`] and [`WireError::Junk`].
pub fn decode<T: DeserializeOwned>(
    prefix: [u8; PREFIX_BYTES],
    rest: &[u8],
) -> Result<T, WireError> {
    let Some((body, sum)) = rest.split_last_chunk::<SUM_BYTES>() else {
        return Err(WireError::Length("shorter"));
    };
    let mut hasher = Hasher::new();
    hasher.update(&prefix);
    hasher.update(body);
    if hasher.finalize().to_be_bytes() != *sum {
        return Err(WireError::Damaged);
    }
    let junk = |error: postcard::Error| WireError::Junk(error.to_string());
    let (message, left) = postcard::take_from_bytes(body).map_err(junk)?;
    if left.is_empty() {
        Ok(message)
    } else {
        Err(WireError::Junk(format!(
            "{} bytes are left over",
            left.len()
        )))
    }
}

impl Opening {
    /// Checks what a peer wrote: lengths within `max_parcel_bytes`, parts that the body has, a range that is one.
    ///
    /// # Errors
    /// [`WireError::TooLong`] and [`WireError::Junk`].
    pub fn check(&self, max_parcel_bytes: u64) -> Result<(), WireError> {
        let header = &self.header;
        if header.head_bytes > MAX_HEAD_BYTES || header.bytes() > max_parcel_bytes {
            return Err(WireError::TooLong(header.bytes()));
        }
        if self.parts != parts_of(header.body_bytes, self.parts) {
            return Err(WireError::Junk(format!("{} parts", self.parts)));
        }
        let range = match header.kind {
            ParcelKind::Opening | ParcelKind::Last(None) => None,
            ParcelKind::Stage(range) | ParcelKind::Last(Some(range)) => Some(range),
        };
        match range {
            Some(range) if KvRange::new(range.start(), range.end()).is_none() => {
                Err(WireError::Junk("an empty range".to_owned()))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// Parts for a body when `wanted` are: never more than it has chunks, nor than [`MAX_PARTS`]; at least one.
pub fn parts_of(body_bytes: u64, wanted: u32) -> u32 {
    let chunks = body_bytes.div_ceil(CHUNK_BYTES as u64);
    let most = u32::try_from(chunks).unwrap_or(u32::MAX).min(MAX_PARTS);
    wanted.clamp(1, most.max(1))
}

/// Where a part lies in the body. Parts are whole chunks, but for the last one's end.
pub fn part_range(body_bytes: u64, parts: u32, part: u32) -> Range<u64> {
    let chunks = body_bytes.div_ceil(CHUNK_BYTES as u64);
    // Less than 2^24 chunks of a parcel and 16 parts: no overflow, for all a peer may write.
    let edge = |part: u32| {
        let chunk = chunks.saturating_mul(u64::from(part)) / u64::from(parts.max(1));
        chunk.saturating_mul(CHUNK_BYTES as u64).min(body_bytes)
    };
    edge(part)..edge(part.saturating_add(1))
}

/// Which section of a parcel bytes belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// The head.
    Head,
    /// A part of the body.
    Part(u32),
}

impl Section {
    fn hasher(self, chunk: u32) -> Hasher {
        let section = match self {
            Self::Head => u32::MAX,
            Self::Part(part) => part,
        };
        let mut hasher = Hasher::new();
        hasher.update(&section.to_be_bytes());
        hasher.update(&chunk.to_be_bytes());
        hasher
    }
}

/// A section, cut into chunks and sums. The chunks are slices of it: nothing is copied.
#[derive(Debug)]
pub struct SectionWriter {
    section: Section,
    left: Bytes,
    chunk: u32,
}

impl SectionWriter {
    /// Writes `bytes` as this section.
    pub fn new(section: Section, bytes: Bytes) -> Self {
        Self {
            section,
            left: bytes,
            chunk: 0,
        }
    }
}

impl Iterator for SectionWriter {
    type Item = [Bytes; 2];

    /// The next chunk and its sum.
    fn next(&mut self) -> Option<[Bytes; 2]> {
        if self.left.is_empty() {
            return None;
        }
        let chunk = self.left.split_to(self.left.len().min(CHUNK_BYTES));
        let mut hasher = self.section.hasher(self.chunk);
        hasher.update(&chunk);
        self.chunk = self.chunk.wrapping_add(1);
        let sum = Bytes::copy_from_slice(&hasher.finalize().to_be_bytes());
        Some([chunk, sum])
    }
}

/// A section in the making.
#[derive(Debug)]
pub struct SectionReader {
    section: Section,
    bytes: BytesMut,
    /// How long it will be.
    length: usize,
    /// How much of it is under a sum that matches.
    verified: usize,
    chunk: u32,
    hasher: Hasher,
    /// Bytes of this chunk that are still to come.
    chunk_left: usize,
    sum: [u8; SUM_BYTES],
    sum_filled: usize,
}

impl SectionReader {
    fn new(section: Section, bytes: BytesMut, length: usize) -> Self {
        Self {
            section,
            bytes,
            length,
            verified: 0,
            chunk: 0,
            hasher: section.hasher(0),
            chunk_left: length.min(CHUNK_BYTES),
            sum: [0; SUM_BYTES],
            sum_filled: 0,
        }
    }

    /// Whether nothing more is to come.
    pub fn is_whole(&self) -> bool {
        self.verified == self.length
    }

    /// Takes in what arrived, as far as it belongs to this section, and returns the rest.
    ///
    /// # Errors
    /// [`WireError::Damaged`]; the parcel is lost then.
    pub fn feed<'a>(&mut self, mut arrived: &'a [u8]) -> Result<&'a [u8], WireError> {
        while !arrived.is_empty() && !self.is_whole() {
            if self.chunk_left > 0 {
                let (bytes, rest) = arrived.split_at(arrived.len().min(self.chunk_left));
                self.bytes.extend_from_slice(bytes);
                self.hasher.update(bytes);
                self.chunk_left -= bytes.len();
                arrived = rest;
                if self.chunk_left > 0 {
                    return Ok(arrived);
                }
            }
            let wanted = SUM_BYTES - self.sum_filled;
            let (bytes, rest) = arrived.split_at(arrived.len().min(wanted));
            self.sum[self.sum_filled..][..bytes.len()].copy_from_slice(bytes);
            self.sum_filled += bytes.len();
            arrived = rest;
            if self.sum_filled == SUM_BYTES {
                self.next_chunk()?;
            } else {
                return Ok(arrived);
            }
        }
        Ok(arrived)
    }

    fn next_chunk(&mut self) -> Result<(), WireError> {
        self.chunk = self.chunk.wrapping_add(1);
        let fresh = self.section.hasher(self.chunk);
        let sum = std::mem::replace(&mut self.hasher, fresh).finalize();
        if sum.to_be_bytes() != self.sum {
            return Err(WireError::Damaged);
        }
        self.sum_filled = 0;
        self.verified = self.bytes.len();
        self.chunk_left = (self.length - self.bytes.len()).min(CHUNK_BYTES);
        Ok(())
    }
}

/// Places for the sections of one parcel. All parts lie in one piece of memory, so that putting them together
/// copies nothing.
#[derive(Debug)]
pub struct Sections {
    /// The head's.
    pub head: SectionReader,
    /// The body's, in order.
    pub parts: Vec<SectionReader>,
    /// Where the body's memory goes back to.
    buffers: Buffers,
}

impl Sections {
    /// Takes memory for a parcel, the body's from `buffers`. Check its opening first, and have room for
    /// [`ParcelHeader::bytes`].
    ///
    /// # Errors
    /// [`WireError::TooLong`] on machines whose memory such a parcel exceeds.
    pub fn new(opening: &Opening, buffers: &Buffers) -> Result<Self, WireError> {
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| WireError::TooLong(bytes));
        let header = &opening.header;
        let head = size(header.head_bytes.into())?;
        let mut space = buffers.take(size(header.body_bytes)?);
        let mut parts = Vec::new();
        for part in 0..opening.parts {
            let range = part_range(header.body_bytes, opening.parts, part);
            let length = size(range.end - range.start)?;
            // The last one keeps what is left: the allocator may have given more.
            let rest = match part + 1 == opening.parts {
                true => BytesMut::new(),
                false => space.split_off(length),
            };
            let own = std::mem::replace(&mut space, rest);
            parts.push(SectionReader::new(Section::Part(part), own, length));
        }
        Ok(Self {
            head: SectionReader::new(Section::Head, BytesMut::with_capacity(head), head),
            parts,
            buffers: buffers.clone(),
        })
    }

    /// The parcel, when all of it has arrived.
    ///
    /// # Errors
    /// [`WireError::Length`] when something is missing.
    pub fn finish(self, header: ParcelHeader) -> Result<Parcel, WireError> {
        let Self {
            head,
            parts,
            buffers,
        } = self;
        if !head.is_whole() || !parts.iter().all(SectionReader::is_whole) {
            return Err(WireError::Length("shorter"));
        }
        let mut body = BytesMut::new();
        for part in parts {
            body.unsplit(part.bytes);
        }
        Ok(Parcel {
            header,
            head: head.bytes.freeze(),
            body: buffers.lend(body),
        })
    }
}

#[cfg(test)]
mod tests;
