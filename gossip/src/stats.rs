//! Counters of the state plane. They only ever rise.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::seal::{OpenError, SealError};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters at one moment, since the node started.
        ///
        /// Each received datagram counts in `datagrams_in` and in at most one `dropped_…`.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct GossipStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The live counters, shared by the parts of the shell.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> GossipStats {
                GossipStats {
                    $($name: self.$name.get(),)*
                }
            }
        }
    };
}

counters! {
    /// Datagrams received, whatever became of them.
    datagrams_in,
    /// Bytes of those.
    bytes_in,
    /// Datagrams handed to the network.
    datagrams_out,
    /// Bytes of those.
    bytes_out,
    /// Dropped: too short for a header and a tag.
    dropped_truncated,
    /// Dropped: longer than any datagram.
    dropped_oversized,
    /// Dropped: first byte names no version of ours.
    dropped_version,
    /// Dropped: not sealed although this node has a key, or sealed although it has none.
    dropped_keyless,
    /// Dropped: sealed with another key, or damaged.
    dropped_wrong_key,
    /// Dropped: too far from our time; a replayed capture or a wrong clock.
    dropped_stale,
    /// Dropped: seen before.
    dropped_replayed,
    /// Dropped: no place for another sender.
    dropped_senders,
    /// Dropped: authentic, but not a message of the gossip protocol.
    dropped_malformed,
    /// Messages not sent because they fit no datagram: the mesh or its facts have outgrown the limit.
    unsent_oversized,
    /// Messages not sent because the network refused them.
    unsent_refused,
    /// Records of other nodes left out of the view because their facts are junk; once per version.
    rows_rejected,
    /// Loads of other nodes not taken because they are junk; once per version.
    loads_rejected,
    /// Times the gossip task ended by itself and was started again.
    restarts,
}

/// One counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn dropped(&self, error: OpenError) {
        let counter = match error {
            OpenError::Truncated => &self.dropped_truncated,
            OpenError::Oversized => &self.dropped_oversized,
            OpenError::UnknownVersion(_) => &self.dropped_version,
            OpenError::NotSealed | OpenError::KeyMissing => &self.dropped_keyless,
            OpenError::WrongKey => &self.dropped_wrong_key,
            OpenError::Stale(_) => &self.dropped_stale,
            OpenError::Replayed => &self.dropped_replayed,
            OpenError::TooManySenders => &self.dropped_senders,
        };
        counter.add(1);
    }

    pub(crate) fn unsent(&self, error: SealError) {
        let counter = match error {
            SealError::Oversized { .. } => &self.unsent_oversized,
            SealError::Exhausted | SealError::NoKey => &self.unsent_refused,
        };
        counter.add(1);
    }
}
