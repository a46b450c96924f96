//! What travels between nodes, and the two planes that carry it.
//!
//! Cores and flows see only the traits here; `control` (libp2p) and `stream` (quinn) implement
//! them between hosts, `memory` inside one process.

pub mod bulk;
pub mod codec;
pub mod control;
mod members;
pub mod memory;
pub mod messages;
pub mod socket;
pub mod stream;
#[cfg(test)]
mod testing;
pub mod tls;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::{LoadSummary, NodeId};
use tokio::sync::mpsc;
use tokio_util::sync::DropGuard;

use crate::mesh::messages::{Answer, Ask, Frame, Open};

/// An answer, and the load of the node that gave it.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered {
    /// The answer.
    pub answer: Answer,
    /// The answering node's exact load, made with the answer.
    pub load: LoadSummary,
}

/// Why a question got no answer. Whether the peer acted on it is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// No current record names this node.
    #[error("node {0} is not in the mesh")]
    UnknownNode(NodeId),
    /// It could not be reached, or refused us.
    #[error("node {node} cannot be reached: {reason}")]
    Unreachable {
        /// Which.
        node: NodeId,
        /// For the log.
        reason: String,
    },
    /// It did not answer in time.
    #[error("node {0} did not answer in time")]
    Silent(NodeId),
    /// It answered something that cannot be read.
    #[error("node {node} speaks another protocol: {reason}")]
    Malformed {
        /// Which.
        node: NodeId,
        /// For the log.
        reason: String,
    },
}

/// Asks other nodes.
#[async_trait]
pub trait ControlPlane: Send + Sync + fmt::Debug {
    /// Asks `to` and waits for the answer, at most `deadline`. Safe to drop: the peer may act all the same.
    async fn ask(&self, to: NodeId, ask: Ask, deadline: Duration)
    -> Result<Answered, ControlError>;
}

/// Answers other nodes.
#[async_trait]
pub trait ControlHandler: Send + Sync + fmt::Debug {
    /// Answers one question. `from` is authenticated.
    async fn answer(&self, from: NodeId, ask: Ask) -> Answered;

    /// This node's exact load now; goes out on every question.
    fn load(&self) -> LoadSummary;

    /// Takes note of the load a peer put on its question or answer.
    fn heard(&self, from: NodeId, load: LoadSummary);
}

/// Why a token stream ended early, or never began.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// No current record names this node.
    #[error("node {0} is not in the mesh")]
    UnknownNode(NodeId),
    /// It could not be reached, or refused us.
    #[error("node {node} cannot be reached: {reason}")]
    Unreachable {
        /// Which.
        node: NodeId,
        /// For the log.
        reason: String,
    },
    /// The connection or stream broke under way.
    #[error("the stream from node {node} broke: {reason}")]
    Broken {
        /// Which.
        node: NodeId,
        /// For the log.
        reason: String,
    },
}

/// Home's end of a token stream. Dropping it aborts the request at the host.
#[derive(Debug)]
pub struct FrameReceiver {
    source: FrameSource,
    _reader: Option<DropGuard>,
}

#[derive(Debug)]
enum FrameSource {
    /// Filled by a task that reads the network.
    Remote(mpsc::Receiver<Result<Frame, StreamError>>),
    /// Filled by this node's own host.
    Local(mpsc::Receiver<Frame>),
}

impl FrameReceiver {
    /// Frames that a task reads from the network; `reader` ends that task when this is dropped.
    pub fn remote(
        frames: mpsc::Receiver<Result<Frame, StreamError>>,
        reader: Option<DropGuard>,
    ) -> Self {
        Self {
            source: FrameSource::Remote(frames),
            _reader: reader,
        }
    }

    /// Frames of this node's own host.
    pub fn local(frames: mpsc::Receiver<Frame>) -> Self {
        Self {
            source: FrameSource::Local(frames),
            _reader: None,
        }
    }

    /// The next frame, in order. `None` is an end that the host did not announce. Safe to drop.
    pub async fn next(&mut self) -> Option<Result<Frame, StreamError>> {
        match &mut self.source {
            FrameSource::Remote(frames) => frames.recv().await,
            FrameSource::Local(frames) => frames.recv().await.map(Ok),
        }
    }
}

/// Opens token streams to other nodes.
#[async_trait]
pub trait StreamPlane: Send + Sync + fmt::Debug {
    /// Submits a request at `to`, or attaches to one that it runs, and returns its frames.
    async fn open(&self, to: NodeId, open: Open) -> Result<FrameReceiver, StreamError>;
}

/// Runs requests for other nodes.
#[async_trait]
pub trait StreamHandler: Send + Sync + fmt::Debug {
    /// Runs one request, or streams one that runs, sending frames until it ends. `frames` closed means that the home is gone
    /// or gave up: the handler aborts the job and returns. Runs in its own task.
    async fn serve(&self, from: NodeId, open: Open, frames: mpsc::Sender<Frame>);
}
