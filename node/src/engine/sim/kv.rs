//! How the KV of the simulated engine travels: as many bytes as a real one's, each of which can be checked.

use bytes::Bytes;
use shoal_migrate::KvRange;

use super::executor::mix;
use crate::engine::batched::{KvForm, KvImport, Slot};
use crate::engine::moving::ExportedKv;

/// A digest and one word that checks it: the least that a token takes.
const LEAST: u32 = 16;

/// A token's KV at most: some four times that of the largest models served without compression (4 MiB).
const MOST: u32 = 1 << 24;

/// Bytes of a word.
const WORD: usize = 8;

/// Between words of the filling; odd, so that no two words of a token are alike.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The form of simulated KV: for each token the digest of all tokens up to it, then filling that is a function of
/// digest and position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimKv {
    bytes_per_token: u32,
}

impl SimKv {
    /// This many bytes a token, but no fewer than 16 and no more than 16 MiB.
    pub fn new(bytes_per_token: u64) -> Self {
        let bytes_per_token = u32::try_from(bytes_per_token).unwrap_or(MOST);
        Self {
            bytes_per_token: bytes_per_token.clamp(LEAST, MOST),
        }
    }

    fn width(self) -> usize {
        self.bytes_per_token as usize
    }

    /// The digests in KV that was checked.
    pub(super) fn digests(self, kv: &[u8]) -> impl Iterator<Item = u64> {
        kv.chunks_exact(self.width()).map(first_word)
    }
}

fn first_word(bytes: &[u8]) -> u64 {
    bytes
        .first_chunk::<WORD>()
        .map_or(0, |word| u64::from_le_bytes(*word))
}

/// The words after the digest.
fn filling(digest: u64, position: u32) -> impl Iterator<Item = [u8; WORD]> {
    let first = mix(digest ^ mix(u64::from(position)));
    (0u64..).map(move |n| first.wrapping_add(n.wrapping_mul(STRIDE)).to_le_bytes())
}

impl KvForm for SimKv {
    fn bytes_per_token(&self) -> u32 {
        self.bytes_per_token
    }

    fn takes(&self) -> KvImport {
        KvImport::Stages
    }

    fn cut(&self, exported: Vec<u8>, range: KvRange) -> Result<Bytes, String> {
        let mut kv = vec![0; exported.len() / WORD * self.width()];
        let tokens = kv.chunks_exact_mut(self.width());
        for ((token, digest), position) in tokens
            .zip(exported.chunks_exact(WORD))
            .zip(range.start().0..)
        {
            let (head, rest) = token.split_at_mut(WORD);
            head.copy_from_slice(digest);
            for (place, word) in rest
                .chunks_mut(WORD)
                .zip(filling(first_word(digest), position))
            {
                place.copy_from_slice(&word[..place.len()]);
            }
        }
        Ok(kv.into())
    }

    fn check(&self, kv: &ExportedKv) -> Result<(), String> {
        let expected = u64::from(kv.range.tokens().0) * u64::from(self.bytes_per_token);
        if kv.bytes.len() as u64 != expected {
            let (is, tokens) = (kv.bytes.len(), kv.range.tokens());
            return Err(format!("{is} bytes for {tokens}, which take {expected}"));
        }
        for (token, position) in kv
            .bytes
            .chunks_exact(self.width())
            .zip(kv.range.start().0..)
        {
            let words = token.get(WORD..).unwrap_or(&[]).chunks(WORD);
            let mut pairs = words.zip(filling(first_word(token), position));
            if !pairs.all(|(word, expected)| *word == expected[..word.len()]) {
                return Err(format!("the KV of position {position} is damaged"));
            }
        }
        Ok(())
    }

    fn join(&self, _: Slot, stages: &[ExportedKv]) -> Result<Bytes, String> {
        Ok(stages
            .iter()
            .flat_map(|stage| stage.bytes.iter().copied())
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_gossip::Tokens;

    use super::*;

    fn exported(form: SimKv, start: u32, digests: &[u64]) -> ExportedKv {
        let end = start + digests.len() as u32;
        let range = KvRange::new(Tokens(start), Tokens(end)).expect("not empty");
        let raw = digests
            .iter()
            .flat_map(|digest| digest.to_le_bytes())
            .collect();
        let bytes = form.cut(raw, range).expect("cut");
        ExportedKv { range, bytes }
    }

    proptest! {
        #[test]
        fn what_travels_is_checked_byte_for_byte(
            bytes in 0u64..200,
            start in 0u32..1000,
            digests in prop::collection::vec(any::<u64>(), 1..8),
            damage in any::<prop::sample::Index>(),
            bit in 0u32..8,
        ) {
            let form = SimKv::new(bytes);
            let kv = exported(form, start, &digests);
            prop_assert_eq!(form.check(&kv), Ok(()));
            prop_assert_eq!(form.digests(&kv.bytes).collect::<Vec<_>>(), digests);

            let mut damaged = kv.bytes.to_vec();
            let at = damage.index(damaged.len());
            damaged[at] ^= 1 << bit;
            let damaged = ExportedKv { bytes: damaged.into(), ..kv.clone() };
            prop_assert!(form.check(&damaged).is_err());
            let short = ExportedKv { bytes: kv.bytes.slice(..at), ..kv.clone() };
            prop_assert!(form.check(&short).is_err());
            let moved = KvRange::new(kv.range.start() + Tokens(1), kv.range.end() + Tokens(1));
            let moved = ExportedKv { range: moved.expect("not empty"), ..kv };
            prop_assert!(form.check(&moved).is_err());
        }
    }

    #[test]
    fn a_tokens_kv_has_bounds() {
        assert_eq!(SimKv::new(0).bytes_per_token(), 16);
        assert_eq!(SimKv::new(131_072).bytes_per_token(), 131_072);
        assert_eq!(SimKv::new(u64::MAX).bytes_per_token(), 1 << 24);
    }
}
