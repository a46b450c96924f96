//! KV of an engine beside a node, as it travels: which layout it has, the ids it belongs to, and the engine's own bytes, or
//! where the other engine finds them.

use bytes::{Buf, Bytes};
use shoal_migrate::KvRange;

use super::connector::Elsewhere;

/// Bytes ahead of the ids: layout, form and count.
const HEAD: usize = 13;

/// What follows the ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The engine's bytes.
    Bytes = 0,
    /// JSON that says where they are.
    Elsewhere = 1,
}

/// The KV itself.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kv {
    /// As the engine gave them.
    Bytes(Bytes),
    /// Still in the engine it comes from.
    Elsewhere(Elsewhere),
}

/// A part of a request's KV.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Blob {
    /// The ids of the range; empty where the state that goes along has them.
    pub(super) ids: Vec<u32>,
    pub(super) kv: Kv,
}

/// The head of a blob, to which the KV is appended.
pub(super) fn head(layout: u64, form: Form, ids: &[u32], room: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + ids.len() * 4 + room);
    bytes.extend(layout.to_le_bytes());
    bytes.push(form as u8);
    bytes.extend(u32::try_from(ids.len()).unwrap_or(u32::MAX).to_le_bytes());
    ids.iter().for_each(|id| bytes.extend(id.to_le_bytes()));
    bytes
}

impl Blob {
    /// Reads what a peer sent for a range.
    ///
    /// # Errors
    /// When it is cut, of another layout, or its ids are not those of the range.
    pub(super) fn read(layout: u64, range: KvRange, mut bytes: Bytes) -> Result<Self, String> {
        let short = || "it is cut".to_owned();
        let theirs = bytes.try_get_u64_le().map_err(|_| short())?;
        if theirs != layout {
            return Err("its KV is laid out otherwise than here".to_owned());
        }
        let form = bytes.try_get_u8().map_err(|_| short())?;
        let count = bytes.try_get_u32_le().map_err(|_| short())?;
        if count != 0 && count != range.tokens().0 {
            return Err(format!("{count} ids for {} tokens", range.tokens()));
        }
        let length = count as usize * 4;
        if bytes.len() < length {
            return Err(short());
        }
        let mut ids = bytes.split_to(length);
        let ids = std::iter::from_fn(|| ids.try_get_u32_le().ok()).collect();
        let kv = match form {
            0 => Kv::Bytes(bytes),
            1 => {
                let from = serde_json::from_slice(&bytes);
                Kv::Elsewhere(from.map_err(|error| format!("it does not say where: {error}"))?)
            }
            _ => return Err(format!("its form {form} is not known here")),
        };
        Ok(Self { ids, kv })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use shoal_gossip::Tokens;

    use super::*;

    fn range(start: u32, end: u32) -> KvRange {
        KvRange::new(Tokens(start), Tokens(end)).unwrap()
    }

    #[test]
    fn a_blob_comes_back_as_it_was() {
        let mut bytes = head(7, Form::Bytes, &[1, 2, u32::MAX], 2);
        bytes.extend(b"kv");
        let blob = Blob::read(7, range(16, 19), bytes.into()).unwrap();
        assert_eq!(blob.ids, [1, 2, u32::MAX]);
        assert_eq!(blob.kv, Kv::Bytes(Bytes::from_static(b"kv")));
        let without = Blob::read(7, range(0, 5), head(7, Form::Bytes, &[], 0).into()).unwrap();
        assert_eq!(without.ids.len(), 0);
        assert_eq!(without.kv, Kv::Bytes(Bytes::new()));
    }

    #[test]
    fn a_blob_may_say_where_its_kv_is() {
        let from = Elsewhere {
            address: json!({ "kind": "nixl", "agent": "QUI=" }),
            ids: vec![3, 9],
        };
        let mut bytes = head(7, Form::Elsewhere, &[1, 2, 3], 0);
        serde_json::to_writer(&mut bytes, &from).unwrap();
        let blob = Blob::read(7, range(16, 19), bytes.clone().into()).unwrap();
        assert_eq!(blob.kv, Kv::Elsewhere(from));
        bytes.pop();
        assert!(Blob::read(7, range(16, 19), bytes.into()).is_err(), "cut");
        let mut unknown = head(7, Form::Bytes, &[1, 2, 3], 0);
        unknown[8] = 2;
        assert!(Blob::read(7, range(16, 19), unknown.into()).is_err());
    }

    #[test]
    fn what_is_cut_or_belongs_elsewhere_is_refused() {
        let whole = head(7, Form::Bytes, &[1, 2, 3], 0);
        for cut in 0..whole.len() {
            let bytes = Bytes::copy_from_slice(&whole[..cut]);
            assert!(Blob::read(7, range(0, 3), bytes).is_err(), "cut at {cut}");
        }
        assert!(Blob::read(8, range(0, 3), whole.clone().into()).is_err());
        assert!(Blob::read(7, range(0, 4), whole.into()).is_err());
    }
}
