//! Names and quantities of one hand-over.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_gossip::{BlockSize, Epoch, NodeId, RequestId, Tokens};

/// One attempt to move one request: which request, from which ownership, to whom.
///
/// The attempt tells a second try from what is still on its way from the first. It means nothing to a claim: that
/// is fenced by the epoch alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId {
    /// The request.
    pub request: RequestId,
    /// The ownership it is moved out of. A granted claim raises it by one.
    pub epoch: Epoch,
    /// Where to.
    pub target: NodeId,
    /// The source's count of its attempts, in this life of it.
    pub attempt: u32,
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}@{}->{}#{}",
            self.request, self.epoch.0, self.target, self.attempt
        )
    }
}

/// Number of a copy stage: 0 is the first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct StageIndex(pub u16);

impl StageIndex {
    /// The stage after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

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

/// How the KV of a request gets to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CopyMode {
    /// The bytes travel, in stages.
    Kv,
    /// The ids travel and the target prefills them before the source stops. For engines without KV export.
    Recompute,
    /// There is no KV: the request waits. It goes on waiting, or starts, at the target.
    Waiting,
}

impl CopyMode {
    /// One word for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Recompute => "recompute",
            Self::Waiting => "waiting",
        }
    }
}

/// How a running request is to be copied, when somebody says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyManner {
    /// In stages, while it runs on. The best there is.
    #[default]
    Staged,
    /// It stops first and is copied in one piece: what a move costs without stages.
    Blocking,
    /// The ids travel and the target prefills them while it runs on: what a move costs without KV export.
    Recompute,
    /// It stops first and the target prefills it: what a move costs with neither export nor stages.
    Restart,
}

/// Why a request is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MoveReason {
    /// The source is short of KV blocks and the target is not (design §4.3).
    Rescheduled,
    /// The source is draining.
    Drained,
    /// An operator asked for it.
    Asked,
}

impl MoveReason {
    /// One word for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rescheduled => "rescheduled",
            Self::Drained => "drained",
            Self::Asked => "asked",
        }
    }
}

/// What a source says of a request that it wants to move. The target decides on it, with its own exact numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Proposal {
    /// The attempt.
    pub migration: MigrationId,
    /// How the KV would get there.
    pub mode: CopyMode,
    /// Why.
    pub reason: MoveReason,
    /// The model.
    pub model: String,
    /// [`shoal_gossip::ModelFacts::fingerprint`] of the source's engine: weights, version, KV type and layout.
    pub fingerprint: u64,
    /// Tokens in a KV block at the source.
    pub block_size: BlockSize,
    /// Tokens that exist now: prompt and output.
    pub known: Tokens,
    /// Tokens the request may come to have.
    pub longest: Tokens,
    /// Bytes that the KV of one token takes on the way; zero when no KV travels.
    pub kv_bytes_per_token: u32,
    /// How long ago its client asked: it keeps its age where it comes to.
    pub waited: Duration,
    /// The source's engine can give its KV to other engines without a node between.
    pub direct: bool,
}

/// What a target answers to a proposal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ProposalAnswer {
    /// Room for all tokens that exist, and for those that come during the copy, is reserved.
    Accepted {
        /// How long the reservation is kept when nothing arrives.
        lease: Duration,
        /// The target's engine will read the KV out of the source's: stages say where it is. Only if that was proposed.
        direct: bool,
    },
    /// No. Nothing is reserved.
    Refused(MoveRefusal),
}

/// Why a target does not take a request. It holds nothing for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum MoveRefusal {
    /// It has no room, or less than it wants to keep free.
    #[error("it has no room")]
    NoRoom,
    /// It takes in as many requests as it may at once.
    #[error("it takes in other requests now")]
    Busy,
    /// It is draining, loading or has failed.
    #[error("it takes no work now")]
    NotReady,
    /// Model, quantisation, KV layout, block size or version differ.
    #[error("its engine differs: {0}")]
    Incompatible(String),
    /// It has this request already, or moves it itself, or it is the source.
    #[error("it has this request already")]
    Duplicate,
    /// It cannot do what the proposal asks: no KV import, say.
    #[error("it cannot: {0}")]
    Unable(String),
}

/// What a home answers to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ClaimAnswer {
    /// The claimant owns the request from now on, and sends output from this index.
    Granted {
        /// Output tokens that the home has.
        from: u32,
    },
    /// Somebody else owns it, or it has ended, or the claimant has less output than the client. It must free what it holds.
    Lost,
}

/// Bounds of one hand-over session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionLimits {
    /// How long the target may take to answer a proposal.
    pub propose_patience: Duration,
    /// How long one stage may take, from export to the target's acknowledgement.
    pub stage_patience: Duration,
    /// How long the source waits for *committed* after the last stage before it asks the home.
    pub commit_patience: Duration,
    /// Time between two claims while the home does not answer.
    pub claim_interval: Duration,
    /// How long a node keeps a request whose home does not answer.
    pub grace: Duration,
    /// How long the target keeps a reservation when nothing arrives.
    pub lease: Duration,
    /// Copy stages at most once the rest fits into one, the last one not counted. A longer request takes as many
    /// full stages as it needs before.
    pub max_stages: u16,
    /// When no more tokens than this are missing at the target, the source pauses and sends the rest.
    pub last_stage_tokens: Tokens,
    /// Tokens of one stage at most, so that an export holds the engine for less than a step.
    pub max_stage_tokens: Tokens,
}

impl Default for SessionLimits {
    /// Patience: a proposal is one control round trip plus a lock; a stage of 64 MiB takes 0.6 s over 1 Gb/s, and
    /// ten times that is a broken link. The grace is what a home may need to come back from a stall
    /// without being declared dead (phi accrual takes about 2 s at defaults).
    fn default() -> Self {
        Self {
            propose_patience: Duration::from_secs(1),
            stage_patience: Duration::from_secs(6),
            commit_patience: Duration::from_millis(500),
            claim_interval: Duration::from_millis(250),
            grace: Duration::from_secs(10),
            lease: Duration::from_secs(8),
            max_stages: 16,
            last_stage_tokens: Tokens(16),
            max_stage_tokens: Tokens(1024),
        }
    }
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
            attempt: 5,
        };
        let text = id.to_string();
        assert!(text.starts_with(&id.request.to_string()), "{text}");
        assert!(text.ends_with(&format!("{}#5", NodeId(4))), "{text}");
    }
}
