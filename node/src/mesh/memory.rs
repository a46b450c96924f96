//! Both planes inside one process, for tests and the simulator: same traits, no sockets, and links
//! that can be cut and slowed.
//!
//! They keep the contract of the real planes: loads are heard both ways, a stream that ends without a
//! last frame is broken, dropping the receiver closes the host's sender. What they leave out: bytes (messages
//! are handed over as they are), admission, and the seconds until a real cut is noticed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::NodeId;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::mesh::messages::{Ask, Frame, FrameBody, Open};
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
    delays: BTreeMap<(NodeId, NodeId), Duration>,
    streams: Vec<(NodeId, NodeId, CancellationToken)>,
    losses: Option<Losses>,
}

/// Which part of an exchange gets lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The peer never hears it.
    Question,
    /// The peer acts on it, and the asker hears nothing.
    Answer,
}

/// Says what of a question (from, to, ask) gets lost.
type Judge = dyn Fn(NodeId, NodeId, &Ask) -> Option<Loss> + Send + Sync;

#[derive(Clone)]
struct Losses(Arc<Judge>);

impl std::fmt::Debug for Losses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Losses")
    }
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

    /// Loses questions or answers as `judge` says, from now on. The asker does not wait for its deadline.
    pub fn lose(
        &self,
        judge: impl Fn(NodeId, NodeId, &Ask) -> Option<Loss> + Send + Sync + 'static,
    ) {
        self.lock().losses = Some(Losses(Arc::new(judge)));
    }

    /// Mends it.
    pub fn mend(&self, from: NodeId, to: NodeId) {
        self.lock().cut.remove(&(from, to));
    }

    /// Makes questions, answers and submissions from `from` to `to` take `delay` on their way. Frames are
    /// not slowed.
    pub fn delay(&self, from: NodeId, to: NodeId, delay: Duration) {
        self.lock().delays.insert((from, to), delay);
    }

    async fn travel(&self, from: NodeId, to: NodeId) {
        let delay = self.lock().delays.get(&(from, to)).copied();
        if let Some(delay) = delay {
            sleep(delay).await;
        }
    }

    fn control(&self, node: NodeId) -> Option<Arc<dyn ControlHandler>> {
        self.lock().nodes.get(&node)?.0.upgrade()
    }

    fn streams(&self, node: NodeId) -> Option<Arc<dyn StreamHandler>> {
        self.lock().nodes.get(&node)?.1.upgrade()
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
        let (this, net) = (self.this, &self.net);
        let handler = net.control(to).ok_or(ControlError::UnknownNode(to))?;
        if net.is_cut(this, to) {
            return Err(ControlError::Unreachable {
                node: to,
                reason: "the link is cut".into(),
            });
        }
        let judge = net.lock().losses.clone();
        let loss = judge.and_then(|judge| (judge.0)(this, to, &ask));
        if loss == Some(Loss::Question) {
            return Err(ControlError::Silent(to));
        }
        let own = net.control(this);
        let exchange = async {
            let load = own.as_ref().map(|own| own.load());
            net.travel(this, to).await;
            if let Some(load) = load {
                handler.heard(this, load);
            }
            let answered = handler.answer(this, ask).await;
            net.travel(to, this).await;
            answered
        };
        let answered = timeout(deadline, exchange).await;
        let answered = answered.map_err(|_| ControlError::Silent(to))?;
        if net.is_cut(to, this) || loss == Some(Loss::Answer) {
            return Err(ControlError::Silent(to));
        }
        if let Some(own) = own {
            own.heard(to, answered.load);
        }
        Ok(answered)
    }
}

#[async_trait]
impl StreamPlane for MemoryPlanes {
    async fn open(&self, to: NodeId, open: Open) -> Result<FrameReceiver, StreamError> {
        let handler = self.net.streams(to).ok_or(StreamError::UnknownNode(to))?;
        self.net.travel(self.this, to).await;
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
            .spawn(async move { handler.serve(from, open, sender).await });
        self.net.tasks.spawn(carry(to, outbox, inbox, link.clone()));
        let reader: DropGuard = link.drop_guard();
        Ok(FrameReceiver::remote(frames, Some(reader)))
    }
}

/// Carries frames until the last, the cut, or the receiver's drop.
async fn carry(
    host: NodeId,
    mut outbox: mpsc::Receiver<Frame>,
    inbox: mpsc::Sender<Result<Frame, StreamError>>,
    link: CancellationToken,
) {
    let broken = |reason: &str| StreamError::Broken {
        node: host,
        reason: reason.to_owned(),
    };
    loop {
        let frame = tokio::select! {
            biased;
            () = link.cancelled() => Err(broken("the link is cut")),
            frame = outbox.recv() => frame.ok_or_else(|| broken("it ended before the request did")),
        };
        let last = match &frame {
            Err(_) => true,
            Ok(frame) => match frame.body {
                FrameBody::Finished(_) | FrameBody::Failed(_) => true,
                FrameBody::Started { .. } | FrameBody::Tokens(_) => false,
            },
        };
        // When it was the receiver that went, nobody is left to tell.
        if inbox.send(frame).await.is_err() || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
