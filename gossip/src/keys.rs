//! Cluster keys: 32 secret bytes that admit a node to the state plane.
//!
//! Whoever holds the key can say anything about any node; whoever does not can say nothing.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ring::rand::{SecureRandom, SystemRandom};

/// Bytes of a key: the key size of ChaCha20-Poly1305 and of HKDF-SHA256's output.
pub(crate) const KEY_BYTES: usize = 32;

/// Keys a ring holds at most. Rotation needs two (old and new); four leave room for a rotation
/// that was begun before the last one ended. A stranger's datagram costs one try per key.
pub const MAX_KEYS: usize = 4;

/// Longest key file read: [`MAX_KEYS`] lines of 64 hex digits with room for blanks and comments.
const MAX_KEY_FILE: u64 = 4_096;

/// The shared secret of a mesh. Its text form is 64 hex digits; debug output never shows it.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey([u8; KEY_BYTES]);

/// Why there is no key. Nothing was kept of what was read.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The text is not 64 hex digits. The text itself is not repeated: it may be most of a secret.
    #[error(
        "a cluster key is 64 hex digits, this has {length} characters{hint}; make one with `shoal keygen`"
    )]
    NotAKey {
        /// Characters found.
        length: usize,
        /// What else is wrong with it.
        hint: &'static str,
    },
    /// No key where at least one is needed.
    #[error("no cluster key found in {place}; make one with `shoal keygen`")]
    Empty {
        /// Where it was looked for.
        place: String,
    },
    /// More keys than a ring holds.
    #[error("{found} cluster keys, at most {MAX_KEYS} are used: drop the oldest ones")]
    TooMany {
        /// Keys found.
        found: usize,
    },
    /// The file cannot be read.
    #[error(
        "cluster key file {path}: {source}; check that it exists and that this user may read it"
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is longer than any key file.
    #[error(
        "cluster key file {path} is longer than {MAX_KEY_FILE} bytes, so it is not one: \
         it holds one key of 64 hex digits a line"
    )]
    TooLong {
        /// The file.
        path: PathBuf,
    },
    /// The system gave no random bytes.
    #[error("the system gave no random bytes for a new key")]
    NoEntropy,
}

impl ClusterKey {
    /// Draws a new key from the system's generator.
    pub fn generate() -> Result<Self, KeyError> {
        let mut bytes = [0; KEY_BYTES];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| KeyError::NoEntropy)?;
        Ok(Self(bytes))
    }

    /// A key from its bytes.
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// The text form, for `shoal keygen`. Not `Display`, so that no log line shows it by accident.
    pub fn to_text(&self) -> String {
        crate::wire::hex(&self.0)
    }

    pub(crate) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(secret)")
    }
}

impl FromStr for ClusterKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let wrong = |hint| KeyError::NotAKey {
            length: text.chars().count(),
            hint,
        };
        if text.len() != 2 * KEY_BYTES {
            return Err(wrong(""));
        }
        let bytes =
            crate::wire::unhex(text).ok_or_else(|| wrong(", not all of them hex digits"))?;
        let bytes: [u8; KEY_BYTES] = bytes.try_into().map_err(|_| wrong(""))?;
        if bytes == [0; KEY_BYTES] {
            return Err(wrong(", all of them zero"));
        }
        Ok(Self(bytes))
    }
}

/// The key a node seals with and the further keys it accepts.
///
/// Rotation without a gap: add the new key as an accepted one on every node, then make it the first
/// one on every node, then drop the old one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRing {
    keys: Vec<ClusterKey>,
}

impl KeyRing {
    /// A ring that seals with `sending` and accepts nothing else.
    pub fn new(sending: ClusterKey) -> Self {
        Self {
            keys: vec![sending],
        }
    }

    /// Accepts datagrams sealed with `key` as well. Fails, unchanged, when the ring is full.
    pub fn accept(&mut self, key: ClusterKey) -> Result<(), KeyError> {
        if self.keys.contains(&key) {
            return Ok(());
        }
        if self.keys.len() >= MAX_KEYS {
            return Err(KeyError::TooMany {
                found: self.keys.len() + 1,
            });
        }
        self.keys.push(key);
        Ok(())
    }

    /// Reads a key file: one key a line, the first one seals; blank lines and `#` comments are skipped.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let unreadable = |source| KeyError::Unreadable {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(unreadable)?;
        let mut bytes = Vec::new();
        file.take(MAX_KEY_FILE + 1)
            .read_to_end(&mut bytes)
            .map_err(unreadable)?;
        if bytes.len() as u64 > MAX_KEY_FILE {
            return Err(KeyError::TooLong {
                path: path.to_owned(),
            });
        }
        let text =
            String::from_utf8(bytes).map_err(|_| unreadable(io::Error::other("it is not text")))?;
        Self::of_texts(text.lines(), &format!("file {}", path.display()))
    }

    /// The keys, the sealing one first.
    pub fn into_keys(self) -> Vec<ClusterKey> {
        self.keys
    }

    /// Sealing key first.
    pub(crate) fn keys(&self) -> &[ClusterKey] {
        &self.keys
    }

    fn of_texts<'a>(texts: impl Iterator<Item = &'a str>, place: &str) -> Result<Self, KeyError> {
        let mut ring: Option<Self> = None;
        for text in texts {
            let text = text.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let key = text.parse()?;
            match &mut ring {
                None => ring = Some(Self::new(key)),
                Some(ring) => ring.accept(key)?,
            }
        }
        ring.ok_or_else(|| KeyError::Empty {
            place: place.to_owned(),
        })
    }
}

/// Parses keys separated by commas; the first one seals.
impl FromStr for KeyRing {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::of_texts(text.split(','), "the given text")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn key(byte: u8) -> ClusterKey {
        ClusterKey::from_bytes([byte; KEY_BYTES])
    }

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        file
    }

    #[test]
    fn a_key_survives_its_text_and_two_keys_differ() {
        let one = ClusterKey::generate().unwrap();
        assert_eq!(one.to_text().parse::<ClusterKey>().unwrap(), one);
        assert_eq!(one.to_text().len(), 64);
        assert_ne!(one, ClusterKey::generate().unwrap());
    }

    #[test]
    fn debug_output_and_errors_do_not_show_the_secret() {
        let secret = key(0xab);
        assert!(!format!("{secret:?} {:?}", KeyRing::new(secret.clone())).contains("ab"));
        let almost = &secret.to_text()[1..];
        let error = almost.parse::<ClusterKey>().unwrap_err().to_string();
        assert!(!error.contains("abab"), "{error}");
        assert!(error.contains("63 characters"), "{error}");
        assert!(error.contains("shoal keygen"), "{error}");
    }

    #[test]
    fn a_text_that_is_no_key_is_refused() {
        for text in ["", "zz", &"g".repeat(64), &"0".repeat(64), &"é".repeat(32)] {
            assert!(text.parse::<ClusterKey>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_key_file_gives_the_sealing_key_first() {
        let content = format!("# new\n{}\n\n  {}\n", key(1).to_text(), key(2).to_text());
        let ring = KeyRing::read(file(content.as_bytes()).path()).unwrap();
        assert_eq!(ring.keys(), [key(1), key(2)]);
    }

    #[test]
    fn a_bad_key_file_says_what_to_do() {
        let said = |content: &[u8]| KeyRing::read(file(content).path()).unwrap_err().to_string();
        assert!(said(b"").contains("shoal keygen"));
        assert!(said(b"hello").contains("64 hex digits"));
        assert!(said(&[b'a'; 5_000]).contains("longer than 4096 bytes"));
        assert!(said(&[0xff; 10]).contains("not text"));
        let many: String = (1..=5).map(|n| key(n).to_text() + "\n").collect();
        assert!(said(many.as_bytes()).contains("at most 4"));
        let missing = KeyRing::read(Path::new("/no/such/key"))
            .unwrap_err()
            .to_string();
        assert!(missing.contains("/no/such/key"), "{missing}");
        assert!(missing.contains("may read it"), "{missing}");
    }
}
