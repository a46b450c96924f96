//! What the client plane asks of the node: the seam between HTTP and the mesh.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use shoal_gossip::{ClusterView, Epoch, ModelFacts, NodeId, RequestId, Timestamp, Tokens};
use shoal_migrate::CopyManner;
use tokio::sync::mpsc;

use crate::engine::moving::JobStatus;
use crate::engine::work::{Fit, HttpAsk, RequestKind};
use crate::engine::{Finish, TokenBatch};
use crate::mesh::messages::MoveAnswer;
use crate::openai::Sketch;

/// A client's request, with its body untouched.
#[derive(Clone, Debug)]
pub struct ClientAsk {
    /// What it asks for, if the mesh reads its path.
    pub kind: Option<RequestKind>,
    /// As it came.
    pub http: HttpAsk,
    /// As sent.
    pub body: Bytes,
    /// What every node must know of it.
    pub sketch: Sketch,
    /// Which nodes can take it.
    pub fit: Fit,
}

/// A request that a host has taken. Dropping it aborts it, in every phase.
#[derive(Debug)]
pub struct Running {
    /// Its name in the mesh.
    pub id: RequestId,
    /// Who runs it.
    pub host: NodeId,
    /// Prompt length.
    pub prompt_tokens: u32,
    /// What happens to it. Bounded: a client that does not read pauses the request at its host.
    pub events: mpsc::Receiver<HomeEvent>,
}

/// What happens to a running request. Each output index once, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum HomeEvent {
    /// New tokens.
    Tokens(TokenBatch),
    /// The end.
    Finished(Finish),
    /// The end, without a result; tokens sent before stand.
    Failed(HomeError),
}

/// Why a request was not run, or not to the end. The client's text is the `Display`; the log's has more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HomeError {
    /// The client's mistake.
    #[error("{message}")]
    BadRequest {
        /// For the client.
        message: String,
        /// The field to blame.
        param: Option<String>,
    },
    /// No live node serves the model.
    #[error("the model `{0}` does not exist")]
    UnknownModel(String),
    /// Every node that could run it is full.
    #[error("all nodes are full; try again later")]
    Overloaded {
        /// For `Retry-After`.
        retry_after: Duration,
    },
    /// Nodes serve the model, and none can be reached or takes work.
    #[error("no node can take the request now; try again later")]
    Unavailable {
        /// For `Retry-After`.
        retry_after: Duration,
    },
    /// This node is shutting down.
    #[error("this node is shutting down; ask another")]
    ShuttingDown,
    /// The host was lost and the request could not go on elsewhere.
    #[error("the request was lost: {0}")]
    Lost(String),
}

/// A request that this node is the home or the host of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRow {
    /// Its name; its home is part of it.
    pub id: RequestId,
    /// Who runs it, as far as this node knows.
    pub host: NodeId,
    /// Which ownership that is.
    pub epoch: Epoch,
    /// Prompt length.
    pub prompt: Tokens,
    /// Output so far: received, at its home; drawn, at its host.
    pub output: Tokens,
    /// How its engine sees it, when this node is its host.
    pub job: Option<JobStatus>,
}

/// What came of the wish that a node stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainAnswer {
    /// It hands over what it has, and stops then.
    Begun,
    /// No node of this name is in the mesh.
    Unknown,
    /// It did not answer.
    Silent,
}

/// The node as the client plane sees it.
#[async_trait]
pub trait Frontend: Send + Sync + fmt::Debug {
    /// This node.
    fn this(&self) -> NodeId;

    /// The time of the view's ages.
    fn now(&self) -> Timestamp;

    /// The view of the mesh.
    fn view(&self) -> Arc<ClusterView>;

    /// Union of the models that live nodes serve, by name.
    fn models(&self) -> Arc<[ModelFacts]>;

    /// Whether this node takes client requests: not shutting down.
    fn accepting(&self) -> bool;

    /// Times that a request lost its KV at this node's engine.
    fn preemptions(&self) -> u64;

    /// Nodes that could run something now: live, ready, with a known load.
    fn usable_nodes(&self) -> usize;

    /// The requests that this node is the home or the host of, by name.
    fn requests(&self) -> Vec<RequestRow>;

    /// Has a request moved to another node, whoever runs it, and waits for what comes of it.
    async fn migrate(&self, request: RequestId, to: NodeId, manner: CopyManner) -> MoveAnswer;

    /// Has a node hand over what it has and stop; returns once it has begun.
    async fn drain(&self, node: NodeId) -> DrainAnswer;

    /// Places a request and returns once a host has taken it. Dropping the future gives up.
    async fn start(&self, ask: ClientAsk) -> Result<Running, HomeError>;
}
