//! Names and quantities of one hand-over.

use std::fmt;

use serde::{Deserialize, Serialize};
use shoal_gossip::{Blocks, Epoch, NodeId, RequestId, Tokens};

/// One attempt to move one request: which request, from which ownership, to whom.
///
/// A second attempt for the same ownership goes to another target or replaces the first, so these
/// three name it and nothing has to be drawn or counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId {
    /// The request.
    pub request: RequestId,
    /// The ownership it is moved out of. A granted claim raises it by one.
    pub epoch: Epoch,
    /// Where to.
    pub target: NodeId,
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}->{}", self.request, self.epoch.0, self.target)
    }
}

/// Number of a copy stage: 0 is the first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct StageIndex(pub u16);

/// KV of the tokens at positions `[start, end)` of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvRange {
    start: Tokens,
    end: Tokens,
}

impl KvRange {
    /// The range, or `None` when it would be empty or backwards.
    pub fn new(start: Tokens, end: Tokens) -> Option<Self> {
        (start < end).then_some(Self { start, end })
    }

    /// First position.
    pub fn start(self) -> Tokens {
        self.start
    }

    /// Position after the last.
    pub fn end(self) -> Tokens {
        self.end
    }

    /// Tokens in it; at least one.
    pub fn tokens(self) -> Tokens {
        self.end - self.start
    }

    /// Whether `next` begins where this ends, as the stages of one copy must.
    pub fn is_followed_by(self, next: Self) -> bool {
        self.end == next.start
    }
}

/// What a target must have room for: the KV that exists, and what it may grow by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Growth {
    /// Blocks to copy, in the target's block size.
    pub now: Blocks,
    /// Blocks the request may still come to need.
    pub later: Blocks,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_never_empty_and_stages_follow_each_other() {
        assert_eq!(KvRange::new(Tokens(4), Tokens(4)), None);
        assert_eq!(KvRange::new(Tokens(5), Tokens(4)), None);
        let first = KvRange::new(Tokens(0), Tokens(128)).expect("not empty");
        let second = KvRange::new(Tokens(128), Tokens(130)).expect("not empty");
        assert_eq!(second.tokens(), Tokens(2));
        assert!(first.is_followed_by(second));
        assert!(!second.is_followed_by(first));
    }

    #[test]
    fn an_attempt_is_named_by_request_ownership_and_target() {
        let id = MigrationId {
            request: RequestId {
                home: NodeId(1),
                serial: 2,
            },
            epoch: Epoch(3),
            target: NodeId(4),
        };
        let text = id.to_string();
        assert!(text.starts_with(&id.request.to_string()), "{text}");
        assert!(text.ends_with(&NodeId(4).to_string()), "{text}");
    }
}
