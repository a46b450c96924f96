//! Sealing of datagrams: who does not hold the cluster key can neither read nor forge gossip.
//!
//! ```text
//!  0        1            9              13         21                     n-16    n
//!  | 0x01   | sender id  | unix seconds | sequence | ciphertext            | tag  |
//!  |<------------ header, authenticated ---------->|<- ChaCha20-Poly1305 ->|
//! ```
//!
//! * The first byte names the version and has bit 0x40 clear, which QUIC's packets never have, so that
//!   one socket carries both.
//! * The sender id is drawn at random for each start of a node and the key is derived from it
//!   (HKDF-SHA256 over the cluster key), so a pair of key and nonce never repeats: the nonce is the
//!   sequence number, which starts anew only with a new sender id.
//! * A window of 128 sequence numbers per sender drops replays; the time in the header drops captures
//!   from before this node started, whose senders it has no window for.
//!
//! What this does not do: the source address of a datagram is not authenticated (answers to a
//! redirected one are sealed too), and every holder of the key can speak for every node.
//!
//! Pure: time and sender id are handed in.

mod senders;
mod window;

use std::time::Duration;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};

use crate::io::MAX_DATAGRAM;
use crate::keys::KeyRing;
use crate::seal::senders::{Admission, Sender, Senders};

/// First byte of a sealed datagram.
const SEALED: u8 = 0x01;
/// First byte of an open (unsealed) datagram.
const OPEN: u8 = 0x02;
/// Bytes before the ciphertext: version 1, sender id 8, unix seconds 4, sequence 8.
const HEADER: usize = 21;
const TAG: usize = 16;

/// Bytes that sealing adds.
pub const SEAL_OVERHEAD: usize = HEADER + TAG;

/// Largest message that can be sealed into one datagram.
pub const MAX_SEALED_MESSAGE: usize = MAX_DATAGRAM - SEAL_OVERHEAD;

/// How far a datagram's time may be from ours. Clocks of hosts under NTP differ by milliseconds;
/// half a minute forgives a host that has just booted and still bounds what a capture is good for.
pub const MAX_CLOCK_SKEW: Duration = Duration::from_secs(30);

/// Separates these keys from any other use of the cluster key.
const KEY_SALT: &[u8] = b"shoal gossip datagram key v1";

/// Names one life of a sender. Random, so that two lives never share a (key, nonce) pair: with 2^64
/// ids, a million starts of one mesh collide with a chance of 3 in 10^8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SenderId(pub [u8; 8]);

/// Why a message was not sealed. Nothing was sent and the sealer is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// It does not fit one datagram.
    #[error("message of {length} bytes does not fit a datagram (at most {MAX_SEALED_MESSAGE})")]
    Oversized {
        /// Its length in bytes.
        length: usize,
    },
    /// All sequence numbers of this sender id are used up; at a million a second that takes half a
    /// million years.
    #[error("this sender has used all its sequence numbers")]
    Exhausted,
    /// The sender's key could not be derived; does not happen with the key sizes used here.
    #[error("no sender key could be derived")]
    NoKey,
}

/// Why a datagram was dropped. The sealer is unchanged, so a forged datagram changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Shorter than header and tag.
    #[error("datagram is too short")]
    Truncated,
    /// Longer than any datagram we seal.
    #[error("datagram is too long")]
    Oversized,
    /// The first byte names no version that we know.
    #[error("datagram of unknown version {0}")]
    UnknownVersion(u8),
    /// Not sealed, but this node has a cluster key.
    #[error("datagram is not sealed and this node has a cluster key")]
    NotSealed,
    /// Sealed, but this node has no cluster key.
    #[error("datagram is sealed and this node has no cluster key")]
    KeyMissing,
    /// Sealed with a key that this node does not hold, or damaged on the way.
    #[error("datagram is sealed with another key, or damaged")]
    WrongKey,
    /// Its time is too far from ours: an old capture, or a clock that is wrong.
    #[error("datagram is {} s from our time", .0.as_secs())]
    Stale(Duration),
    /// Seen before, or too old to tell.
    #[error("datagram was seen before")]
    Replayed,
    /// The table of senders is full of senders heard within the last minute.
    #[error("too many senders")]
    TooManySenders,
}

/// Puts messages into datagrams and takes them out.
#[derive(Debug)]
pub enum Framing {
    /// With a cluster key.
    Sealed(Box<Sealer>),
    /// Without: only between processes of one host (the shell sees to that).
    Open,
}

impl Framing {
    /// Wraps `message` at `unix_now` (time since 1970).
    pub fn seal(&mut self, unix_now: Duration, message: &[u8]) -> Result<Vec<u8>, SealError> {
        match self {
            Self::Sealed(sealer) => sealer.seal(unix_now, message),
            Self::Open => {
                if message.len() >= MAX_DATAGRAM {
                    return Err(SealError::Oversized {
                        length: message.len(),
                    });
                }
                let mut datagram = Vec::with_capacity(1 + message.len());
                datagram.push(OPEN);
                datagram.extend_from_slice(message);
                Ok(datagram)
            }
        }
    }

    /// The message in `datagram`, received at `unix_now` (time since 1970).
    pub fn open(&mut self, unix_now: Duration, datagram: &[u8]) -> Result<Vec<u8>, OpenError> {
        if datagram.len() > MAX_DATAGRAM {
            return Err(OpenError::Oversized);
        }
        match (self, datagram.first()) {
            (_, None) => Err(OpenError::Truncated),
            (Self::Sealed(sealer), Some(&SEALED)) => sealer.open(unix_now, datagram),
            (Self::Sealed(_), Some(&OPEN)) => Err(OpenError::NotSealed),
            (Self::Open, Some(&OPEN)) => Ok(datagram[1..].to_vec()),
            (Self::Open, Some(&SEALED)) => Err(OpenError::KeyMissing),
            (Self::Sealed(_) | Self::Open, Some(&version)) => {
                Err(OpenError::UnknownVersion(version))
            }
        }
    }
}

/// Seals and opens with the keys of one ring.
#[derive(Debug)]
pub struct Sealer {
    id: SenderId,
    key: LessSafeKey,
    /// Last sequence number used.
    sequence: u64,
    /// What sender keys are derived from, the sealing one first.
    roots: Vec<Prk>,
    senders: Senders,
}

impl Sealer {
    /// A sealer for one life of a node. `id` must be drawn anew for each life.
    pub fn new(ring: &KeyRing, id: SenderId) -> Result<Self, SealError> {
        let salt = Salt::new(HKDF_SHA256, KEY_SALT);
        let roots: Vec<Prk> = ring
            .keys()
            .iter()
            .map(|key| salt.extract(key.bytes()))
            .collect();
        let key = roots
            .first()
            .and_then(|root| sender_key(root, id))
            .ok_or(SealError::NoKey)?;
        Ok(Self {
            id,
            key,
            sequence: 0,
            roots,
            senders: Senders::default(),
        })
    }

    fn seal(&mut self, unix_now: Duration, message: &[u8]) -> Result<Vec<u8>, SealError> {
        if message.len() > MAX_SEALED_MESSAGE {
            return Err(SealError::Oversized {
                length: message.len(),
            });
        }
        let sequence = self.sequence.checked_add(1).ok_or(SealError::Exhausted)?;
        let mut datagram = Vec::with_capacity(message.len() + SEAL_OVERHEAD);
        datagram.push(SEALED);
        datagram.extend_from_slice(&self.id.0);
        datagram.extend_from_slice(&wrapped_seconds(unix_now).to_be_bytes());
        datagram.extend_from_slice(&sequence.to_be_bytes());
        datagram.extend_from_slice(message);
        let (header, body) = datagram.split_at_mut(HEADER);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce(sequence), Aad::from(&*header), body)
            .map_err(|_| SealError::Oversized {
                length: message.len(),
            })?;
        datagram.extend_from_slice(tag.as_ref());
        self.sequence = sequence;
        Ok(datagram)
    }

    fn open(&mut self, unix_now: Duration, datagram: &[u8]) -> Result<Vec<u8>, OpenError> {
        let header = Header::parse(datagram).ok_or(OpenError::Truncated)?;
        if let Some(sender) = self.senders.get_mut(header.sender) {
            let message = decrypt(&sender.key, &header, datagram).ok_or(OpenError::WrongKey)?;
            check_time(unix_now, header.seconds)?;
            if !sender.accept(header.sequence, unix_now) {
                return Err(OpenError::Replayed);
            }
            return Ok(message);
        }
        // A stranger: nothing is kept of it before one of the keys has opened its datagram.
        let (key, message) = self
            .roots
            .iter()
            .find_map(|root| {
                let key = sender_key(root, header.sender)?;
                decrypt(&key, &header, datagram).map(|message| (key, message))
            })
            .ok_or(OpenError::WrongKey)?;
        check_time(unix_now, header.seconds)?;
        let sender = Sender::new(key, header.sequence, unix_now);
        match self.senders.admit(header.sender, sender, unix_now) {
            Admission::Admitted => Ok(message),
            Admission::Full => Err(OpenError::TooManySenders),
        }
    }
}

/// The clear part of a sealed datagram. Believed only after the tag was checked.
struct Header {
    sender: SenderId,
    seconds: u32,
    sequence: u64,
}

impl Header {
    /// `None` when the datagram is too short to hold a header and a tag.
    fn parse(datagram: &[u8]) -> Option<Self> {
        if datagram.len() < SEAL_OVERHEAD {
            return None;
        }
        Some(Self {
            sender: SenderId(datagram.get(1..9)?.try_into().ok()?),
            seconds: u32::from_be_bytes(datagram.get(9..13)?.try_into().ok()?),
            sequence: u64::from_be_bytes(datagram.get(13..HEADER)?.try_into().ok()?),
        })
    }
}

fn decrypt(key: &LessSafeKey, header: &Header, datagram: &[u8]) -> Option<Vec<u8>> {
    let (clear, sealed) = datagram.split_at_checked(HEADER)?;
    let mut body = sealed.to_vec();
    let length = key
        .open_in_place(nonce(header.sequence), Aad::from(clear), &mut body)
        .ok()?
        .len();
    body.truncate(length);
    Some(body)
}

/// `None` only if HKDF refused an output of 32 bytes, which it does not.
fn sender_key(root: &Prk, id: SenderId) -> Option<LessSafeKey> {
    let info: [&[u8]; 1] = [&id.0];
    let okm = root.expand(&info, &CHACHA20_POLY1305).ok()?;
    Some(LessSafeKey::new(UnboundKey::from(okm)))
}

fn nonce(sequence: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[NONCE_LEN - 8..].copy_from_slice(&sequence.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Unix seconds modulo 2^32, which wraps in 2106; only differences of these are looked at.
fn wrapped_seconds(unix: Duration) -> u32 {
    (unix.as_secs() & u64::from(u32::MAX)) as u32
}

fn check_time(unix_now: Duration, seconds: u32) -> Result<(), OpenError> {
    let ours = wrapped_seconds(unix_now);
    let apart = ours.wrapping_sub(seconds).min(seconds.wrapping_sub(ours));
    let apart = Duration::from_secs(u64::from(apart));
    if apart > MAX_CLOCK_SKEW {
        return Err(OpenError::Stale(apart));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
