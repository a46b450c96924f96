//! Messages to bytes and back: postcard, with a bound on everything.
//!
//! A reader believes no length it was told: it takes memory for bytes that have arrived, and refuses
//! a message as soon as its length is over the bound. Decoding may not stop short: bytes that no field
//! claims make the whole message junk. What a decoded value takes in memory is bounded by its encoded
//! length: postcard reserves no more elements than bytes are left, and the widest expansion among our
//! messages is that of a log-probability alternative, 5 bytes on the wire and 32 in memory.
//!
//! [`control`] puts these functions under libp2p's request-response; [`FrameReader`] and
//! [`encode_frame`] put them on a stream, each message behind its length in 4 bytes, big-endian.

pub mod control;

use bytes::{Buf, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::mesh::messages::{Envelope, PROTOCOL};

/// Bytes of a frame's length.
pub const LENGTH_BYTES: usize = 4;

/// Memory a reader takes ahead of the bytes that arrive. One page-sized step keeps a lying length
/// cheap.
const READ_STEP: usize = 16 * 1024;

/// Memory a reader takes before it knows a length: a whole frame of one step's tokens.
const FIRST_READ: usize = 1024;

/// Why bytes are not a message, or a message not bytes. Nothing of it was used.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// Longer than the bound for its kind.
    #[error("a message of {length} bytes is longer than the {max} allowed")]
    TooLong {
        /// Its length, or the length it announced.
        length: usize,
        /// The bound.
        max: usize,
    },
    /// Written in another version of the protocol.
    #[error("protocol version {0} instead of {PROTOCOL}")]
    OtherProtocol(u16),
    /// Not a message of this kind.
    #[error("not a message of this kind: {0}")]
    Junk(String),
    /// The stream ended inside a message.
    #[error("the stream ended inside a message")]
    Truncated,
    /// The stream broke.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl CodecError {
    fn junk(reason: impl ToString) -> Self {
        Self::Junk(reason.to_string())
    }
}

/// Encodes one message.
///
/// # Errors
/// [`CodecError::TooLong`].
pub fn encode<T: Serialize>(message: &T, max: usize) -> Result<Vec<u8>, CodecError> {
    let bytes = postcard::to_stdvec(message).map_err(CodecError::junk)?;
    within(bytes.len(), max)?;
    Ok(bytes)
}

/// Decodes one message; all of `bytes` must belong to it.
///
/// # Errors
/// [`CodecError::Junk`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(CodecError::junk)?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(CodecError::junk(format_args!(
            "{} bytes are left over",
            rest.len()
        )))
    }
}

/// Decodes an envelope. The version is read first: the rest of another version means nothing to us.
///
/// # Errors
/// [`CodecError::OtherProtocol`] and [`CodecError::Junk`].
pub fn decode_envelope<T: DeserializeOwned>(bytes: &[u8]) -> Result<Envelope<T>, CodecError> {
    let (protocol, _) = postcard::take_from_bytes::<u16>(bytes).map_err(CodecError::junk)?;
    if protocol != PROTOCOL {
        return Err(CodecError::OtherProtocol(protocol));
    }
    decode(bytes)
}

/// Encodes one message behind its length.
///
/// # Errors
/// [`CodecError::TooLong`].
pub fn encode_frame<T: Serialize>(message: &T, max: usize) -> Result<Vec<u8>, CodecError> {
    let mut bytes =
        postcard::to_extend(message, vec![0; LENGTH_BYTES]).map_err(CodecError::junk)?;
    let length = bytes.len() - LENGTH_BYTES;
    within(length, max)?;
    let announced = u32::try_from(length).map_err(|_| CodecError::TooLong { length, max })?;
    bytes[..LENGTH_BYTES].copy_from_slice(&announced.to_be_bytes());
    Ok(bytes)
}

fn within(length: usize, max: usize) -> Result<(), CodecError> {
    if length > max {
        return Err(CodecError::TooLong { length, max });
    }
    Ok(())
}

/// Reads framed messages off a stream.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    buffer: BytesMut,
    max: usize,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// A reader of messages of at most `max` bytes each.
    pub fn new(stream: R, max: usize) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
            max,
        }
    }

    /// Length of the next message, read without the message; `None` when the stream ended before it.
    /// Safe to drop.
    ///
    /// # Errors
    /// See [`CodecError`].
    pub async fn length(&mut self) -> Result<Option<usize>, CodecError> {
        loop {
            if let Some(length) = self.announced()? {
                return Ok(Some(length));
            }
            if !self.fill(FIRST_READ).await? {
                return Ok(None);
            }
        }
    }

    /// The next message; `None` when the stream ended between two. Safe to drop: what was read stays.
    ///
    /// # Errors
    /// See [`CodecError`]. After an error the stream is out of step and must be given up.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, CodecError> {
        let Some(length) = self.length().await? else {
            return Ok(None);
        };
        while self.buffer.len() < LENGTH_BYTES + length {
            let missing = LENGTH_BYTES + length - self.buffer.len();
            if !self.fill(missing).await? {
                return Err(CodecError::Truncated);
            }
        }
        self.buffer.advance(LENGTH_BYTES);
        decode(&self.buffer.split_to(length)).map(Some)
    }

    /// Reads some bytes; `false` at a clean end of the stream.
    async fn fill(&mut self, wanted: usize) -> Result<bool, CodecError> {
        // `reserve` doubles at most, so memory stays within twice what arrived plus one step.
        self.buffer.reserve(wanted.min(READ_STEP));
        if self.stream.read_buf(&mut self.buffer).await? > 0 {
            Ok(true)
        } else if self.buffer.is_empty() {
            Ok(false)
        } else {
            Err(CodecError::Truncated)
        }
    }

    /// Length of the message at hand, once it is known.
    ///
    /// # Errors
    /// [`CodecError::TooLong`].
    fn announced(&self) -> Result<Option<usize>, CodecError> {
        let Some(prefix) = self.buffer.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_be_bytes(*prefix)).unwrap_or(usize::MAX);
        within(length, self.max)?;
        Ok(Some(length))
    }
}

#[cfg(test)]
mod tests;
