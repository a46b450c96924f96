//! KV of an engine beside a node, as it travels: which layout it has, the ids it belongs to, and the engine's own bytes.

use bytes::{Buf, Bytes};
use shoal_migrate::KvRange;

/// Bytes ahead of the ids: layout and count.
const HEAD: usize = 12;

/// A part of a request's KV.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Blob {
    /// The ids of the range; empty where the state that goes along has them.
    pub(super) ids: Vec<u32>,
    /// As the engine gave them.
    pub(super) kv: Bytes,
}

/// The head of a blob, to which the engine's bytes are appended.
pub(super) fn head(layout: u64, ids: &[u32], room: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + ids.len() * 4 + room);
    bytes.extend(layout.to_le_bytes());
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
        Ok(Self { ids, kv: bytes })
    }
}

#[cfg(test)]
mod tests {
    use shoal_gossip::Tokens;

    use super::*;

    fn range(start: u32, end: u32) -> KvRange {
        KvRange::new(Tokens(start), Tokens(end)).unwrap()
    }

    #[test]
    fn a_blob_comes_back_as_it_was() {
        let mut bytes = head(7, &[1, 2, u32::MAX], 2);
        bytes.extend(b"kv");
        let blob = Blob::read(7, range(16, 19), bytes.into()).unwrap();
        assert_eq!(blob.ids, [1, 2, u32::MAX]);
        assert_eq!(blob.kv, b"kv"[..]);
        let without = Blob::read(7, range(0, 5), head(7, &[], 0).into()).unwrap();
        assert_eq!((without.ids.len(), without.kv.len()), (0, 0));
    }

    #[test]
    fn what_is_cut_or_belongs_elsewhere_is_refused() {
        let whole = head(7, &[1, 2, 3], 0);
        for cut in 0..whole.len() {
            let bytes = Bytes::copy_from_slice(&whole[..cut]);
            assert!(Blob::read(7, range(0, 3), bytes).is_err(), "cut at {cut}");
        }
        assert!(Blob::read(8, range(0, 3), whole.clone().into()).is_err());
        assert!(Blob::read(7, range(0, 4), whole.into()).is_err());
    }
}
