//! Both planes inside one process, for tests and the simulator: same traits, no sockets, and links
//! that can be cut.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::NodeId;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::mesh::messages::{Ask, Frame, Submit};
use crate::mesh::{
    Answered, ControlError, ControlHandler, ControlPlane, FrameReceiver, StreamError,
    StreamHandler, StreamPlane,
};

/// Frames that may wait on a link; as over the network.
const FRAMES: usize = 4;

/// A network of nodes in this process.
#[derive(Clone, Debug, Default)]
pub struct MemoryNet {
    state: Arc<Mutex<State>>,
    tasks: TaskTracker,
}

/// Weak, since a handler usually holds its own node's planes.
type Handlers = (Weak<dyn ControlHandler>, Weak<dyn StreamHandler>);

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<NodeId, Handlers>,
    cut: BTreeSet<(NodeId, NodeId)>,
    streams: Vec<(NodeId, NodeId, CancellationToken)>,
}

impl MemoryNet {
    /// A node's planes; its handlers are reachable from now on, for as long as they live.
    pub fn join(
        &self,
        node: NodeId,
        control: &Arc<dyn ControlHandler>,
        streams: &Arc<dyn StreamHandler>,
    ) -> Arc<MemoryPlanes> {
        let handlers = (Arc::downgrade(control), Arc::downgrade(streams));
        self.lock().nodes.insert(node, handlers);
        Arc::new(MemoryPlanes {
            this: node,
            net: self.clone(),
        })
    }

    /// Cuts the way from `from` to `to`; streams between the two break at once.
    pub fn cut(&self, from: NodeId, to: NodeId) {
        let mut state = self.lock();
        state.cut.insert((from, to));
        state.streams.retain(|(a, b, link)| {
            let hit = (*a, *b) == (from, to) || (*b, *a) == (from, to);
            if hit {
                link.cancel();
            }
            !hit
        });
    }

    /// Mends it.
    pub fn mend(&self, from: NodeId, to: NodeId) {
        self.lock().cut.remove(&(from, to));
    }

    fn is_cut(&self, from: NodeId, to: NodeId) -> bool {
        self.lock().cut.contains(&(from, to))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One node's planes.
#[derive(Debug)]
pub struct MemoryPlanes {
    this: NodeId,
    net: MemoryNet,
}

#[async_trait]
impl ControlPlane for MemoryPlanes {
    async fn ask(
        &self,
        to: NodeId,
        ask: Ask,
        deadline: Duration,
    ) -> Result<Answered, ControlError> {
        let handler = self
            .net
            .lock()
            .nodes
            .get(&to)
            .map(|(control, _)| control.upgrade());
        let handler = handler.flatten().ok_or(ControlError::UnknownNode(to))?;
        if self.net.is_cut(self.this, to) {
            return Err(ControlError::Unreachable {
                node: to,
                reason: "the link is cut".into(),
            });
        }
        let answered = timeout(deadline, handler.answer(self.this, ask))
            .await
            .map_err(|_| ControlError::Silent(to))?;
        if self.net.is_cut(to, self.this) {
            return Err(ControlError::Silent(to));
        }
        Ok(answered)
    }
}

#[async_trait]
impl StreamPlane for MemoryPlanes {
    async fn open(&self, to: NodeId, submit: Submit) -> Result<FrameReceiver, StreamError> {
        let handler = self
            .net
            .lock()
            .nodes
            .get(&to)
            .map(|(_, streams)| streams.upgrade());
        let handler = handler.flatten().ok_or(StreamError::UnknownNode(to))?;
        if self.net.is_cut(self.this, to) || self.net.is_cut(to, self.this) {
            return Err(StreamError::Unreachable {
                node: to,
                reason: "the link is cut".into(),
            });
        }
        let (from, link) = (self.this, CancellationToken::new());
        let (sender, outbox) = mpsc::channel(FRAMES);
        let (inbox, frames) = mpsc::channel(FRAMES);
        {
            let mut state = self.net.lock();
            state.streams.retain(|(_, _, link)| !link.is_cancelled());
            state.streams.push((from, to, link.clone()));
        }
        self.net
            .tasks
            .spawn(async move { handler.serve(from, submit, sender).await });
        self.net.tasks.spawn(carry(to, outbox, inbox, link.clone()));
        let reader: DropGuard = link.drop_guard();
        Ok(FrameReceiver::remote(frames, Some(reader)))
    }
}

/// Carries frames until the end, the cut, or the receiver's drop.
async fn carry(
    host: NodeId,
    mut outbox: mpsc::Receiver<Frame>,
    inbox: mpsc::Sender<Result<Frame, StreamError>>,
    link: CancellationToken,
) {
    loop {
        let frame = tokio::select! {
            biased;
            () = link.cancelled() => {
                let broken = StreamError::Broken {
                    node: host,
                    reason: "the link is cut".into(),
                };
                // When it was the receiver that went, nobody is left to tell.
                drop(inbox.send(Err(broken)).await);
                return;
            }
            frame = outbox.recv() => frame,
        };
        let Some(frame) = frame else { return };
        if inbox.send(Ok(frame)).await.is_err() {
            return;
        }
    }
}
