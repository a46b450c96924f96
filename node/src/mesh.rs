//! What travels between nodes, and the two planes that carry it.
//!
//! Cores and flows see only the traits here; `control` (libp2p) and `stream` (quinn) implement
//! them between hosts, `memory` inside one process.

pub mod bulk;
pub mod codec;
pub mod control;
mod door;
mod members;
pub mod memory;
pub mod messages;
pub mod socket;
pub mod stream;
#[cfg(test)]
mod testing;
pub mod tls;

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use shoal_gossip::{LoadSummary, NodeId};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::DropGuard;
use tokio_util::task::TaskTracker;

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
pub struct FrameReceiver {
    source: FrameSource,
    _reader: Option<DropGuard>,
}

enum FrameSource {
    /// Filled by a task that reads the network.
    Remote(mpsc::Receiver<Result<Frame, StreamError>>),
    /// Filled by this node's own host.
    Local(Local),
}

/// This node's own host at work for this node's home, in the home's task: a task of its own would be woken for each token,
/// on another thread more often than not.
struct Local {
    frames: mpsc::Receiver<Frame>,
    /// `None` once it has ended. Never locked: the lock lets it be shared between threads, which the future alone cannot.
    serving: Mutex<Option<BoxFuture<'static, ()>>>,
    tasks: TaskTracker,
}

impl Local {
    async fn next(&mut self) -> Option<Frame> {
        loop {
            let place = self
                .serving
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner);
            let Some(serving) = place else {
                return self.frames.recv().await;
            };
            tokio::select! {
                biased;
                frame = self.frames.recv() => return frame,
                () = serving => *place = None,
            }
        }
    }
}

impl Drop for Local {
    /// The host may have to outlive its home's interest: a hand-over may hang on the job.
    fn drop(&mut self) {
        self.frames.close();
        // Without a runtime nothing runs any more that it could wait for.
        let serving = self.serving.get_mut();
        let serving = serving.unwrap_or_else(PoisonError::into_inner).take();
        if let Some((serving, runtime)) = serving.zip(Handle::try_current().ok()) {
            self.tasks.spawn_on(serving, &runtime);
        }
    }
}

impl fmt::Debug for FrameReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let local = matches!(self.source, FrameSource::Local(_));
        f.debug_struct("FrameReceiver")
            .field("local", &local)
            .finish_non_exhaustive()
    }
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

    /// Frames of this node's own host, whose work is done while they are waited for, and in `tasks` when nobody does any more.
    pub fn local(
        frames: mpsc::Receiver<Frame>,
        serving: BoxFuture<'static, ()>,
        tasks: TaskTracker,
    ) -> Self {
        let serving = Mutex::new(Some(serving));
        Self {
            source: FrameSource::Local(Local {
                frames,
                serving,
                tasks,
            }),
            _reader: None,
        }
    }

    /// The next frame, in order. `None` is an end that the host did not announce. Safe to drop.
    pub async fn next(&mut self) -> Option<Result<Frame, StreamError>> {
        match &mut self.source {
            FrameSource::Remote(frames) => frames.recv().await,
            FrameSource::Local(local) => local.next().await.map(Ok),
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
    /// or gave up: the handler aborts the job and returns.
    async fn serve(&self, from: NodeId, open: Open, frames: mpsc::Sender<Frame>);
}
