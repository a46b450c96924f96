//! What travels as gossip values: facts and load, packed and as text, and how little of it we believe.
//!
//! Values of the gossip library are strings, so packed bytes are written in hex; the library
//! compresses its messages, which takes most of the doubling back.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::limits::{MAX_FACT_TEXT, MAX_FACTS_BYTES, MAX_LOAD_BYTES, MAX_MODELS};
use crate::summary::{LoadSummary, NodeFacts};
use crate::types::NodeId;

/// Gossip key of the packed [`NodeFacts`].
pub(crate) const FACTS_KEY: &str = "facts";
/// Gossip key of the packed [`LoadSummary`].
pub(crate) const LOAD_KEY: &str = "load";
/// Gossip key that says goodbye; its value does not matter.
pub(crate) const LEFT_KEY: &str = "left";

/// Format of both values, their first byte. A reader drops what it does not know.
const FORMAT: u8 = 2;

/// Why a node's facts or load are not usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FactsError {
    /// Longer than a value may be.
    #[error("{what} of {length} bytes, at most {limit} are allowed")]
    TooLong {
        /// Which value or field.
        what: &'static str,
        /// Its length in bytes.
        length: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// Not a packed value, or of a format that this version does not know.
    #[error("{0} cannot be read")]
    Unreadable(&'static str),
    /// `facts.node` is not the name that belongs to `facts.peer_id`, or not the node that gossips them.
    #[error("facts of node {facts} do not belong to {owner}")]
    NotTheirs {
        /// The name inside the facts.
        facts: NodeId,
        /// The name they should carry.
        owner: String,
    },
}

/// Lower-case hex digits of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from(DIGITS[usize::from(digit)]))
        .collect()
}

/// The bytes of hex digits of either case; `None` for anything else.
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    let digit = |character: u8| char::from(character).to_digit(16);
    pairs
        .iter()
        .map(|[high, low]| u8::try_from(digit(*high)? * 16 + digit(*low)?).ok())
        .collect()
}

/// Checks and packs this node's own facts.
pub(crate) fn pack_facts(facts: &NodeFacts) -> Result<String, FactsError> {
    check_facts(facts)?;
    pack("facts", facts, MAX_FACTS_BYTES)
}

/// Reads and checks the facts that `owner` gossips.
pub(crate) fn unpack_facts(text: &str, owner: NodeId) -> Result<NodeFacts, FactsError> {
    let facts: NodeFacts = unpack("facts", text, MAX_FACTS_BYTES)?;
    check_facts(&facts)?;
    if facts.node != owner {
        return Err(FactsError::NotTheirs {
            facts: facts.node,
            owner: owner.to_string(),
        });
    }
    Ok(facts)
}

/// Packs this node's own load.
pub(crate) fn pack_load(load: &LoadSummary) -> Result<String, FactsError> {
    pack("load", load, MAX_LOAD_BYTES)
}

/// Reads a load.
pub(crate) fn unpack_load(text: &str) -> Result<LoadSummary, FactsError> {
    unpack("load", text, MAX_LOAD_BYTES)
}

fn pack<T: Serialize>(what: &'static str, value: &T, limit: usize) -> Result<String, FactsError> {
    let packed =
        postcard::to_extend(value, vec![FORMAT]).map_err(|_| FactsError::Unreadable(what))?;
    if packed.len() > limit {
        return Err(FactsError::TooLong {
            what,
            length: packed.len(),
            limit,
        });
    }
    Ok(hex(&packed))
}

fn unpack<T: DeserializeOwned>(
    what: &'static str,
    text: &str,
    limit: usize,
) -> Result<T, FactsError> {
    if text.len() > 2 * limit {
        return Err(FactsError::TooLong {
            what,
            length: text.len() / 2,
            limit,
        });
    }
    let packed = unhex(text).ok_or(FactsError::Unreadable(what))?;
    let [FORMAT, body @ ..] = packed.as_slice() else {
        return Err(FactsError::Unreadable(what));
    };
    // Bytes after the value are left alone: a later version may append fields.
    postcard::take_from_bytes(body)
        .map(|(value, _rest)| value)
        .map_err(|_| FactsError::Unreadable(what))
}

fn check_facts(facts: &NodeFacts) -> Result<(), FactsError> {
    let texts = [
        ("peer_id", &facts.peer_id),
        ("http", &facts.http),
        ("version", &facts.version),
    ];
    let names = facts.models.iter().map(|model| ("model id", &model.id));
    for (what, text) in texts.into_iter().chain(names) {
        within(what, text.len(), MAX_FACT_TEXT)?;
    }
    within("models", facts.models.len(), MAX_MODELS)?;
    let peer = bs58::decode(&facts.peer_id)
        .into_vec()
        .map_err(|_| FactsError::Unreadable("peer_id"))?;
    let owner = NodeId::of_peer(&peer);
    if owner != facts.node {
        return Err(FactsError::NotTheirs {
            facts: facts.node,
            owner: owner.to_string(),
        });
    }
    Ok(())
}

fn within(what: &'static str, length: usize, limit: usize) -> Result<(), FactsError> {
    if length > limit {
        return Err(FactsError::TooLong {
            what,
            length,
            limit,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quantity::Blocks;
    use crate::testing::facts;
    use crate::types::Incarnation;

    #[test]
    fn facts_and_load_survive_the_trip() {
        let facts = facts(7, 3);
        let text = pack_facts(&facts).unwrap();
        assert_eq!(unpack_facts(&text, facts.node), Ok(facts));
        let load = LoadSummary {
            incarnation: Incarnation(u64::MAX),
            seq: u64::MAX,
            total: Blocks(u32::MAX),
            step_time_us: u32::MAX,
            ..LoadSummary::default()
        };
        assert_eq!(unpack_load(&pack_load(&load).unwrap()), Ok(load));
    }

    #[test]
    fn facts_under_another_name_are_refused() {
        let mut lying = facts(7, 3);
        let text = pack_facts(&lying).unwrap();
        assert!(matches!(
            unpack_facts(&text, facts(8, 3).node),
            Err(FactsError::NotTheirs { .. })
        ));
        lying.node = facts(8, 3).node;
        assert!(matches!(
            pack_facts(&lying),
            Err(FactsError::NotTheirs { .. })
        ));
        lying.peer_id = "0OIl".to_owned();
        assert_eq!(pack_facts(&lying), Err(FactsError::Unreadable("peer_id")));
    }

    #[test]
    fn overlong_facts_are_refused_on_both_sides() {
        let mut long = facts(7, 3);
        long.version = "v".repeat(MAX_FACT_TEXT + 1);
        assert!(matches!(
            pack_facts(&long),
            Err(FactsError::TooLong {
                what: "version",
                ..
            })
        ));
        let text = "0".repeat(2 * MAX_FACTS_BYTES + 1);
        assert!(matches!(
            unpack_facts(&text, long.node),
            Err(FactsError::TooLong { .. })
        ));
    }

    #[test]
    fn bytes_that_a_later_version_appends_are_ignored_and_another_format_is_refused() {
        let load = LoadSummary {
            seq: 9,
            ..LoadSummary::default()
        };
        let text = pack_load(&load).unwrap();
        assert_eq!(unpack_load(&format!("{text}ff00")), Ok(load));
        assert!(unpack_load(&text.replacen("02", "01", 1)).is_err());
        assert!(unpack_load("").is_err());
    }

    proptest! {
        #[test]
        fn junk_is_an_error_and_never_a_panic(text in "[0-9a-f]{0,600}", other in ".{0,100}") {
            // The outcome may be either; it must only come back.
            let read = [unpack_load(&text).is_ok(), unpack_load(&other).is_ok()];
            let facts = [&text, &other].map(|text| unpack_facts(text, NodeId(1)).is_ok());
            prop_assert_eq!(facts, [false, false]);
            prop_assert!(read.len() == 2);
        }

        #[test]
        fn hex_is_its_own_inverse(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert_eq!(unhex(&hex(&bytes)), Some(bytes.clone()));
            prop_assert_eq!(unhex(&hex(&bytes).to_uppercase()), Some(bytes));
        }
    }
}
