//! What happens in the mesh, and what is sent.

use std::time::Duration;

use shoal_gossip::{Epoch, NodeId, RequestId};
use shoal_migrate::session::{Cause, Outcome};
use shoal_migrate::{ClaimAnswer, CopyMode, MigrationId, SessionLimits, StageIndex};

/// A node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Node(pub(crate) u8);

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Request(pub(crate) u8);

/// A request at a node in one ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct JobKey {
    pub(crate) node: Node,
    pub(crate) request: Request,
    pub(crate) epoch: u8,
}

/// An attempt to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Move {
    pub(crate) request: Request,
    pub(crate) epoch: u8,
    pub(crate) source: Node,
    pub(crate) target: Node,
    pub(crate) attempt: u8,
}

impl Move {
    /// As the sessions name it.
    pub(crate) fn migration(self) -> MigrationId {
        MigrationId {
            request: RequestId {
                home: NodeId(0),
                serial: self.request.0.into(),
            },
            epoch: Epoch(self.epoch.into()),
            target: id_of(self.target),
            attempt: self.attempt.into(),
        }
    }

    /// The job at the source.
    pub(crate) fn old(self) -> JobKey {
        JobKey {
            node: self.source,
            request: self.request,
            epoch: self.epoch,
        }
    }
}

/// As the cores name a node.
pub(crate) fn id_of(node: Node) -> NodeId {
    NodeId(u64::from(node.0) + 1)
}

/// What goes over the network. Any may be lost, doubled and late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Message {
    /// Between source and target.
    Move(Move, Body),
    /// To the home.
    Claim {
        by: Node,
        request: Request,
        epoch: u8,
        output: u16,
    },
    /// To the claimant: the index to go on from, or lost.
    Answer {
        to: Node,
        request: Request,
        epoch: u8,
        from: Option<u16>,
    },
}

/// See [`Message::Move`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Body {
    Propose { waiting: bool },
    Accepted,
    Refused,
    Stage { stage: u16, start: u16, end: u16 },
    StageAck { stage: u16, end: u16 },
    StageRefused { stage: u16 },
    Last { stage: u16, start: u16, output: u16 },
    LastAck,
    LastRefused,
    Committed,
    CancelTarget,
    CancelSource,
}

impl Body {
    /// Whether it goes from the source to the target.
    pub(crate) fn is_for_target(self) -> bool {
        match self {
            Self::Propose { .. } | Self::Stage { .. } | Self::Last { .. } | Self::CancelTarget => {
                true
            }
            Self::Accepted
            | Self::Refused
            | Self::StageAck { .. }
            | Self::StageRefused { .. }
            | Self::LastAck
            | Self::LastRefused
            | Self::Committed
            | Self::CancelSource => false,
        }
    }
}

/// One side of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Side {
    Source,
    Target,
}

/// What an engine is doing for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pending {
    Stage {
        stage: StageIndex,
        start: u16,
        end: u16,
    },
    Last {
        start: u16,
        output: u16,
    },
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Event {
    /// A message arrives.
    Deliver(Message),
    /// An engine draws a token; with the last one the request is complete.
    Draw(JobKey),
    /// A complete request whose home reads it leaves its engine.
    Complete(JobKey),
    /// A home takes what is next in its stream: a token, or the end.
    Read(Request),
    /// A home opens its stream at the node that it granted a claim.
    Open(Request),
    /// A home that lost the holder places the request at a node.
    Replay(Request, Node),
    /// A node notices that nobody wants what it has in this ownership.
    Unwanted(JobKey),
    /// A node begins to move a request that runs there.
    Begin(JobKey, Node, CopyMode),
    /// The deadline of a session.
    Tick(Side, Node, Request),
    /// An engine has done what a session asked for.
    Engine(Side, Node, Request),
    /// An engine could not.
    EngineFails(Side, Node, Request),
    /// The state plane tells a session that the other side is dead.
    Down(Side, Node, Request),
    /// A session is told to stop.
    Stop(Side, Node, Request),
    /// A running request loses its KV and waits.
    Preempt(JobKey),
    /// The stream of a home breaks, or its holder is taken for dead.
    Break(Request),
    /// A client goes away.
    Abort(Request),
    /// A node dies.
    Crash(Node),
    /// It comes back, with nothing.
    Restart(Node),
}

/// What the driver has to see to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// A message is on its way.
    Send(Message),
    /// An engine works for this session: [`Event::Engine`] comes of it.
    Work(Side, Node, Request),
    /// A session is over: how, and why.
    Ended(Side, &'static str, &'static str),
}

/// How a session ended and why, in a word each.
pub(crate) fn words_of(outcome: &Outcome) -> (&'static str, &'static str) {
    let why = |cause: &Cause| match cause {
        Cause::Error(error) => error.kind(),
        Cause::Stopped => "stopped",
    };
    match outcome {
        Outcome::Moved => ("moved", ""),
        Outcome::Stayed(cause) => ("stayed", why(cause)),
        Outcome::Over(cause) => ("over", why(cause)),
    }
}

/// An error in the cores, put in around them, which the checks must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A source in doubt runs on instead of asking the home.
    SourceResumesOnDoubt,
    /// A source in doubt runs on until the home has answered.
    SourceRunsWhileInDoubt,
    /// A source frees its blocks when the last stage has arrived.
    SourceFreesOnArrival,
    /// A source that lost keeps its blocks.
    SourceKeepsWhatItLost,
    /// A source that gets no answer waits for ever.
    SourceWaitsForEver,
    /// A target runs the request as soon as it has all of it.
    TargetRunsBeforeTheGrant,
    /// A target asks the home once and waits for ever.
    TargetAsksOnce,
    /// A target whose move was cancelled keeps what it has.
    TargetKeepsWhatWasCancelled,
    /// A target begins one index too late.
    TargetSkipsAToken,
    /// A home grants one ownership to whoever asks.
    HomeGrantsTwice,
    /// A home lets a node claim what was placed there.
    HomeLetsThePlacedBeClaimed,
    /// A home does not look at the output of the claimant.
    HomeIgnoresOutput,
}

/// What does not change while a mesh runs.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) limits: SessionLimits,
    /// Prompt tokens of every request.
    pub(crate) prompt: u16,
    /// Output tokens of every request.
    pub(crate) tokens: u16,
    /// How long a stage takes, as far as the source knows.
    pub(crate) took: Duration,
    /// Moves that a node takes in at a time.
    pub(crate) slots: usize,
    /// Whether engines do at once what they are asked for.
    pub(crate) quick_engines: bool,
    /// Whether homes read every token as it is drawn.
    pub(crate) quick_streams: bool,
    pub(crate) mutants: Vec<Mutant>,
}

impl Rules {
    /// Whether this error is put in.
    pub(crate) fn has(&self, mutant: Mutant) -> bool {
        self.mutants.contains(&mutant)
    }
}

/// As a message carries it.
pub(crate) fn from_of(answer: ClaimAnswer) -> Option<u16> {
    match answer {
        ClaimAnswer::Granted { from } => u16::try_from(from).ok(),
        ClaimAnswer::Lost => None,
    }
}
