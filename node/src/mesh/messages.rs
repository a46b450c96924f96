//! The messages between nodes. Versioned, bounded, and each control message carries the sender's load.

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shoal_gossip::{Epoch, LoadSummary, NodeId, RequestId, Tokens};
use shoal_migrate::session::Claim;
use shoal_migrate::{ClaimAnswer, CopyManner, MigrationId, Proposal, ProposalAnswer};

use crate::engine::answer::Spoken;
use crate::engine::work::{Fit, HttpAsk, Prepared, Priority, RequestKind};
use crate::engine::{EngineError, Finish, TokenBatch};

/// Version of everything in this file. Nodes of another version are not candidates and get no answer.
pub const PROTOCOL: u16 = 5;

/// Longest control message in bytes. An offer with [`MAX_EXCLUDED`] names and the longest model name
/// takes under 1 KiB; four times that leaves room for what comes.
pub const MAX_CONTROL_BYTES: usize = 4 * 1024;

/// Longest submission in bytes: the largest client body (`--max-body-bytes`, at most 16 MiB) plus prompt and
/// generated ids of the longest context (4 bytes at most each for 2 M tokens).
pub const MAX_SUBMIT_BYTES: usize = 24 * 1024 * 1024;

/// Longest frame in bytes. Most take under 100; the first may carry the prompt ids of the longest context
/// (4 bytes at most each for 2 M tokens) and the other parts of a [`Prepared`]. A reader takes memory
/// for what arrives, not for what is announced.
pub const MAX_FRAME_BYTES: usize = 9 * 1024 * 1024;

/// Nodes an offer may name as tried and failed.
pub const MAX_EXCLUDED: usize = 16;

/// Redirects a request may take in its life (design: two, so that a wrong view costs two hops at most).
pub const MAX_HOPS: u8 = 2;

/// What goes over the control plane: a body, the version it is written in, and the sender's load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// [`PROTOCOL`] of the sender.
    pub protocol: u16,
    /// The sender's exact load.
    pub load: LoadSummary,
    /// The message.
    pub body: T,
}

/// A question from one node to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Ask {
    /// Will you run this request?
    Offer(Offer),
    /// How loaded are you, exactly? Answered with [`Answer::Load`].
    Probe,
    /// Stop this request, if you still run this ownership of it.
    Abort {
        /// Which.
        request: RequestId,
        /// Which ownership.
        epoch: Epoch,
    },
    /// I will not use this promise.
    Release {
        /// As given in [`Answer::Accept`].
        reservation: u64,
    },
    /// Source to target: will you take this running request over?
    Propose(Proposal),
    /// To the home: I have this request whole; may I run it?
    Claim {
        /// Which.
        request: RequestId,
        /// What is claimed.
        claim: Claim,
    },
    /// Target to source: the request is mine. Free it.
    Committed {
        /// Which attempt.
        migration: MigrationId,
    },
    /// Either side to the other: the attempt is off.
    CancelMove {
        /// Which attempt.
        migration: MigrationId,
        /// For the log.
        reason: String,
    },
    /// An operator's wish, to any node: have this request moved there. Passed on to its home, and from there to
    /// its host.
    Move {
        /// Which.
        request: RequestId,
        /// Where to.
        to: NodeId,
        /// How, if it runs.
        manner: CopyManner,
    },
    /// An operator's wish: hand over what you have, and stop. Answered with [`Answer::Done`] when it has begun.
    Drain,
}

/// What a host must know of a request to decide.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// Which request.
    pub request: RequestId,
    /// Which ownership of it.
    pub epoch: Epoch,
    /// The model it needs.
    pub model: String,
    /// Which nodes that serve it can take the request.
    pub fit: Fit,
    /// Prompt length: exact where the home has the tokenizer, else estimated.
    pub prompt: Tokens,
    /// Output that exists already and must be prefilled too.
    pub generated: Tokens,
    /// Output at most.
    pub max_output: Tokens,
    /// Rank.
    pub priority: Priority,
    /// Redirects this request has taken.
    pub hops: u8,
    /// How long ago its client asked, by its home's clock.
    pub waited: Duration,
    /// It ran before, and its host was lost.
    pub resumed: bool,
    /// Nodes not to redirect to.
    pub excluded: Vec<NodeId>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Yes. Room is promised until the lease ends.
    Accept {
        /// Name of the promise, for [`Submit`] or [`Ask::Release`].
        reservation: u64,
        /// How long it is kept.
        lease_ms: u32,
    },
    /// Better ask this node, which was probed a moment ago. Nothing is promised here.
    Redirect {
        /// Which.
        to: NodeId,
        /// Its load as probed.
        load: LoadSummary,
    },
    /// No. Nothing is promised.
    Refuse(RefuseReason),
    /// My load is in the envelope.
    Load,
    /// Done, or there was nothing to do.
    Done,
    /// Answers [`Ask::Propose`].
    Proposal(ProposalAnswer),
    /// Answers [`Ask::Claim`].
    Claim(ClaimAnswer),
    /// Answers [`Ask::Move`].
    Move(MoveAnswer),
}

impl Answer {
    /// One word for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Accept { .. } => "accept",
            Self::Redirect { .. } => "redirect",
            Self::Refuse(_) => "refuse",
            Self::Load | Self::Done | Self::Proposal(_) | Self::Claim(_) | Self::Move(_) => "other",
        }
    }
}

/// What came of an operator's wish to move a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MoveAnswer {
    /// It runs there now.
    Moved(MoveReport),
    /// It does not, and why.
    Stayed {
        /// For the operator.
        reason: String,
    },
    /// It has ended, or runs on a node that was not told from here.
    Gone {
        /// For the operator.
        reason: String,
    },
    /// No such request here, or it has ended.
    Unknown,
}

/// Figures of one hand-over, as its source saw them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveReport {
    /// From the step boundary at which the request stopped to the target's word that it owns it, in microseconds.
    pub pause_us: u64,
    /// From the proposal to that word, in microseconds.
    pub total_us: u64,
    /// Bytes sent, the request's own description included.
    pub bytes: u64,
    /// Copy stages, the last one included.
    pub stages: u32,
    /// Tokens that existed when it stopped.
    pub tokens: u32,
    /// Tokens whose KV the target's engine read out of the source's; it is not in the bytes.
    pub direct_tokens: u32,
}

/// Why an offer was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum RefuseReason {
    /// The node is draining.
    #[error("draining")]
    Draining,
    /// Its engine is loading or failed.
    #[error("not ready")]
    NotReady,
    /// It does not serve the model.
    #[error("wrong model")]
    WrongModel,
    /// Its queue is at the bound.
    #[error("queue full")]
    QueueFull,
    /// The request could never fit.
    #[error("never fits")]
    NeverFits,
    /// It speaks another [`PROTOCOL`].
    #[error("other protocol")]
    Protocol,
}

/// What a home writes when it opens a token stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Open {
    /// Run this request.
    Submit(Box<Submit>),
    /// Stream me the request that you claimed.
    Attach(Attach),
}

impl Open {
    /// Which request.
    pub fn request(&self) -> RequestId {
        match self {
            Self::Submit(submit) => submit.request,
            Self::Attach(attach) => attach.request,
        }
    }

    /// Which ownership of it.
    pub fn epoch(&self) -> Epoch {
        match self {
            Self::Submit(submit) => submit.epoch,
            Self::Attach(attach) => attach.epoch,
        }
    }
}

impl From<Submit> for Open {
    fn from(submit: Submit) -> Self {
        Self::Submit(Box::new(submit))
    }
}

impl From<Attach> for Open {
    fn from(attach: Attach) -> Self {
        Self::Attach(attach)
    }
}

/// Opens the token stream of a request that its new host has claimed, and was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Which request.
    pub request: RequestId,
    /// The ownership that was granted.
    pub epoch: Epoch,
    /// First output index that the home has not got.
    pub from: u32,
}

/// A submission: the request itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Submit {
    /// Which request.
    pub request: RequestId,
    /// Which ownership of it.
    pub epoch: Epoch,
    /// The promise to use up.
    pub reservation: Option<u64>,
    /// The model it is for: a body need not name one.
    pub model: String,
    /// What the client asked for, if the mesh reads its path.
    pub kind: Option<RequestKind>,
    /// The client's request as it came.
    pub http: HttpAsk,
    /// The client's body, untouched.
    pub body: Bytes,
    /// Seed the home drew for a client that named none, so that a replay goes on with the same one.
    pub seed: u64,
    /// The body as the home's engine read it, where that engine has the same fingerprint; saves the
    /// host the reading and tokenising.
    pub prepared: Option<Prepared>,
    /// Output ids that the home has already.
    pub generated: Vec<u32>,
    /// The text that the client got for them, where an engine beside a node wrote it.
    pub spoken: Vec<Spoken>,
}

/// One message of a token stream, from host to home.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Frame {
    /// Which request.
    pub request: RequestId,
    /// Which ownership of it. Home drops frames of an older one.
    pub epoch: Epoch,
    /// The message.
    pub body: FrameBody,
}

/// See [`Frame`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FrameBody {
    /// The host's engine has taken the request. Always first, unless `Failed` is.
    Started {
        /// The body as this host read it, when the submission came without: a replay sends it along.
        prepared: Option<Prepared>,
        /// Prompt length.
        prompt_tokens: u32,
    },
    /// New tokens.
    Tokens(TokenBatch),
    /// The end.
    Finished(Finish),
    /// The end, without a result.
    Failed(EngineError),
}
