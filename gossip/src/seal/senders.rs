//! The bounded table of senders that have proved to hold a key.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use ring::aead::LessSafeKey;

use crate::limits::MAX_NODES;
use crate::seal::window::ReplayWindow;
use crate::seal::{MAX_CLOCK_SKEW, SenderId};

/// Senders remembered. Every node of the largest mesh may restart once within [`FORGET_AFTER`], so
/// twice [`MAX_NODES`]; one entry is about 700 bytes (the expanded key), so 3 MB when full.
const MAX_SENDERS: usize = 2 * MAX_NODES;

/// Silence after which a sender may be forgotten without opening a hole for replays: a datagram
/// heard now may carry a time of up to `MAX_CLOCK_SKEW` from now, and is too old `MAX_CLOCK_SKEW` after
/// that; one more second for the cut to whole seconds in the header.
const FORGET_AFTER: Duration = MAX_CLOCK_SKEW
    .saturating_mul(2)
    .saturating_add(Duration::from_secs(1));

/// One life of a peer.
pub(crate) struct Sender {
    pub(crate) key: LessSafeKey,
    window: ReplayWindow,
    /// Unix time of the last datagram accepted.
    heard: Duration,
}

impl Sender {
    pub(crate) fn new(key: LessSafeKey, first: u64, heard: Duration) -> Self {
        Self {
            key,
            window: ReplayWindow::starting_at(first),
            heard,
        }
    }

    /// Accepts a sequence number once. Call only after the tag was checked.
    pub(crate) fn accept(&mut self, sequence: u64, unix_now: Duration) -> bool {
        let fresh = self.window.accept(sequence);
        if fresh {
            self.heard = unix_now;
        }
        fresh
    }
}

/// Whether a newcomer got a place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Admitted,
    /// All places are held by senders that cannot be forgotten yet.
    Full,
}

/// Senders by id.
pub(crate) struct Senders {
    table: BTreeMap<SenderId, Sender>,
    places: usize,
}

impl Default for Senders {
    fn default() -> Self {
        Self {
            table: BTreeMap::new(),
            places: MAX_SENDERS,
        }
    }
}

impl fmt::Debug for Senders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Senders")
            .field("known", &self.table.len())
            .finish_non_exhaustive()
    }
}

impl Senders {
    pub(crate) fn get_mut(&mut self, id: SenderId) -> Option<&mut Sender> {
        self.table.get_mut(&id)
    }

    /// Takes in a sender whose datagram was authentic, in the place of the longest silent one when
    /// all places are taken.
    pub(crate) fn admit(&mut self, id: SenderId, sender: Sender, unix_now: Duration) -> Admission {
        if self.table.len() >= self.places {
            let oldest = self
                .table
                .iter()
                .min_by_key(|(id, sender)| (sender.heard, **id))
                .map(|(id, sender)| (*id, sender.heard));
            match oldest {
                Some((oldest, heard)) if unix_now.saturating_sub(heard) > FORGET_AFTER => {
                    self.table.remove(&oldest);
                }
                Some(_) | None => return Admission::Full,
            }
        }
        self.table.insert(id, sender);
        Admission::Admitted
    }
}

#[cfg(test)]
mod tests {
    use ring::aead::{CHACHA20_POLY1305, UnboundKey};

    use super::*;

    fn sender(heard: Duration) -> Sender {
        let key = UnboundKey::new(&CHACHA20_POLY1305, &[7; 32]).unwrap();
        Sender::new(LessSafeKey::new(key), 1, heard)
    }

    fn id(n: u64) -> SenderId {
        SenderId(n.to_be_bytes())
    }

    #[test]
    fn a_full_table_forgets_only_senders_whose_captures_are_stale() {
        let start = Duration::from_secs(1_000);
        let mut senders = Senders {
            places: 2,
            ..Senders::default()
        };
        assert_eq!(
            senders.admit(id(1), sender(start), start),
            Admission::Admitted
        );
        let later = start + Duration::from_secs(10);
        assert_eq!(
            senders.admit(id(2), sender(later), later),
            Admission::Admitted
        );
        let edge = start + FORGET_AFTER;
        assert_eq!(senders.admit(id(3), sender(edge), edge), Admission::Full);
        let past = edge + Duration::from_millis(1);
        assert_eq!(
            senders.admit(id(3), sender(past), past),
            Admission::Admitted
        );
        assert!(senders.get_mut(id(1)).is_none());
        assert!(senders.get_mut(id(2)).is_some());
        assert!(senders.get_mut(id(3)).is_some());
    }
}
