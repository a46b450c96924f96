//! Identities: who is who. Conversions and display only, nothing here decides.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Short name of a node: the first 8 bytes of SHA-256 over its libp2p `PeerId` bytes.
///
/// Shown as base58 (at most 11 characters). Short, because every live and recently dead node's
/// name travels in every gossip digest, and the digest must fit one datagram.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The name that belongs to an identity. `peer_id` is the binary form of a libp2p `PeerId`.
    pub fn of_peer(peer_id: &[u8]) -> Self {
        let digest = Sha256::digest(peer_id);
        let mut first = [0u8; 8];
        first.copy_from_slice(&digest[..8]);
        Self(u64::from_be_bytes(first))
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&bs58::encode(self.0.to_be_bytes()).into_string())
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a text is not an identity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind}: expected {expected}")]
pub struct ParseIdError {
    text: String,
    kind: &'static str,
    expected: &'static str,
}

impl FromStr for NodeId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseIdError {
            text: text.chars().take(64).collect(),
            kind: "node id",
            expected: "8 bytes in base58, as `shoal status` prints them",
        };
        if text.len() > 11 {
            return Err(wrong());
        }
        let bytes = bs58::decode(text).into_vec().map_err(|_| wrong())?;
        let bytes: [u8; 8] = bytes.try_into().map_err(|_| wrong())?;
        Ok(Self(u64::from_be_bytes(bytes)))
    }
}

/// One life of a node: milliseconds of Unix time at its start. A later life replaces an earlier one.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Name of a request inside the mesh: its home and a number the home drew at random.
///
/// Never the client's `x-request-id`, which is echoed but proves nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId {
    /// The node that holds the client's stream and the ledger.
    pub home: NodeId,
    /// Drawn by the home, unique among its requests (64 random bits, over all its lives).
    pub serial: u64,
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:016x}", self.home, self.serial)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for RequestId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseIdError {
            text: text.chars().take(64).collect(),
            kind: "request id",
            expected: "<node id>-<16 hex digits>",
        };
        let (home, serial) = text.split_once('-').ok_or_else(wrong)?;
        if serial.len() != 16 {
            return Err(wrong());
        }
        Ok(Self {
            home: home.parse()?,
            serial: u64::from_str_radix(serial, 16).map_err(|_| wrong())?,
        })
    }
}

/// Number of a request's current ownership. Raised by its home, by one, at each hand-over or replay.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Epoch(pub u32);

impl Epoch {
    /// The first ownership of a request.
    pub const FIRST: Self = Self(1);

    /// The next ownership.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_id_is_short_and_survives_display_and_parse() {
        for raw in [0, 1, 0xdead_beef, u64::MAX] {
            let text = NodeId(raw).to_string();
            assert!((8..=11).contains(&text.len()), "{text}");
            assert_eq!(text.parse(), Ok(NodeId(raw)));
        }
        assert!("".parse::<NodeId>().is_err());
        assert!("0OIl".parse::<NodeId>().is_err());
        assert!("111111111111111111".parse::<NodeId>().is_err());
    }

    #[test]
    fn a_request_id_survives_display_and_parse() {
        let id = RequestId {
            home: NodeId(77),
            serial: 0xab,
        };
        assert_eq!(id.to_string().parse(), Ok(id));
        assert!("x-1".parse::<RequestId>().is_err());
        assert!(format!("{}-zz", NodeId(1)).parse::<RequestId>().is_err());
    }
}
