//! The way to any node, this one included: local execution takes the same path as remote.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use shoal_gossip::NodeId;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::host::Host;
use crate::mesh::messages::{Ask, Open};
use crate::mesh::{
    Answered, ControlError, ControlHandler, ControlPlane, FrameReceiver, StreamError,
    StreamHandler, StreamPlane,
};

/// Frames that may wait between this node's host and its home. As few as over the network: a slow
/// client must pause the engine, not fill memory.
const LOCAL_FRAMES: usize = 4;

/// Ways to ask and to submit.
#[derive(Debug)]
pub struct Links {
    this: NodeId,
    host: Arc<Host>,
    control: Arc<dyn ControlPlane>,
    streams: Arc<dyn StreamPlane>,
    tasks: TaskTracker,
}

impl Links {
    /// From the node that `host` belongs to. Local jobs run in `tasks`, which the caller joins.
    pub fn new(
        this: NodeId,
        host: Arc<Host>,
        control: Arc<dyn ControlPlane>,
        streams: Arc<dyn StreamPlane>,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            this,
            host,
            control,
            streams,
            tasks,
        }
    }

    /// Asks a node, at most for `deadline`.
    ///
    /// # Errors
    /// As [`ControlPlane::ask`].
    pub async fn ask(
        &self,
        to: NodeId,
        ask: Ask,
        deadline: Duration,
    ) -> Result<Answered, ControlError> {
        if to != self.this {
            return self.control.ask(to, ask, deadline).await;
        }
        timeout(deadline, self.host.answer(self.this, ask))
            .await
            .map_err(|_| ControlError::Silent(to))
    }

    /// Submits a request at a node, or attaches to one that it runs.
    ///
    /// # Errors
    /// As [`StreamPlane::open`].
    pub async fn open(&self, to: NodeId, open: Open) -> Result<FrameReceiver, StreamError> {
        if to != self.this {
            return self.streams.open(to, open).await;
        }
        let (sender, receiver) = mpsc::channel(LOCAL_FRAMES);
        let host = Arc::clone(&self.host);
        let this = self.this;
        let serving = async move { host.serve(this, open, sender).await }.boxed();
        let tasks = self.tasks.clone();
        Ok(FrameReceiver::local(receiver, serving, tasks))
    }
}
