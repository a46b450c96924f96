//! The control plane: questions and answers between nodes, over libp2p.
//!
//! libp2p is here for one reason: *who are you, how do I reach you, let's negotiate*. Its QUIC with
//! the node's Ed25519 identity, over a transport of our own (`control/quic.rs`), request-response with our codec, identify, ping for round-trip times,
//! connection limits, and a guest list that is exactly the identities that current gossip records name.
//! It owns no liveness and discovers nobody, except that mDNS, by flag, proposes seeds to the gossip.
//!
//! A node whose record has not reached the other side yet is refused there, and never queued: its
//! asker sees [`ControlError::Unreachable`] and asks somebody else, or again.
//!
//! [`ControlNode`] is the handle; `control/swarm.rs` the task behind it.

mod behaviour;
mod counters;
mod muxer;
mod quic;
mod swarm;

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use libp2p::PeerId;
use libp2p::identity::Keypair;
use shoal_gossip::{ClusterView, NodeId};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

pub(crate) use counters::ControlCounters;
pub use counters::ControlStats;

use crate::mesh::codec::control::Received;
use crate::mesh::members::Members;
use crate::mesh::messages::{Answer, Ask, Envelope, PROTOCOL};
use crate::mesh::{Answered, ControlError, ControlHandler, ControlPlane};

/// Questions that may wait for the swarm. A question is handed on in microseconds, so a full queue
/// means a standstill, and waiting in it counts against the question's deadline.
const COMMANDS: usize = 256;

/// Addresses found by mDNS that may wait to be taken; more of them are found again in five minutes.
const DISCOVERIES: usize = 64;

/// How to run a control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlConfig {
    /// Where to listen (UDP); port 0 takes any free one.
    pub listen: SocketAddr,
    /// Look for neighbours on the local network.
    pub mdns: bool,
}

/// Why a control plane did not start. Nothing is left running.
#[derive(Debug, thiserror::Error)]
pub enum ControlStartError {
    /// The address cannot be listened on.
    #[error("{0}")]
    Listen(String),
    /// libp2p could not be set up.
    #[error("libp2p cannot be set up: {0}")]
    Setup(String),
}

/// The variable that libp2p's TLS obeys and offers no setting against.
const KEY_LOG: &str = "SSLKEYLOGFILE";

/// Refuses to start where session secrets would be written out.
fn refuse_key_log(variable: Option<&OsStr>) -> Result<(), ControlStartError> {
    match variable {
        Some(_) => Err(ControlStartError::Setup(format!(
            "{KEY_LOG} is set, which would write the mesh's session secrets to a file; unset it"
        ))),
        None => Ok(()),
    }
}

/// A running control plane.
#[derive(Debug)]
pub struct ControlNode {
    local: SocketAddr,
    members: Members,
    handler: Arc<dyn ControlHandler>,
    commands: mpsc::Sender<Command>,
    discovered: Mutex<mpsc::Receiver<SocketAddr>>,
    counters: Arc<ControlCounters>,
    stop: CancellationToken,
    tasks: Mutex<JoinSet<()>>,
}

/// A question on its way out.
#[derive(Debug)]
struct Command {
    node: NodeId,
    to: PeerId,
    at: SocketAddr,
    ask: Envelope<Ask>,
    reply: Reply,
}

/// Where the driver puts the answer.
type Reply = oneshot::Sender<Result<Received<Answer>, Failure>>;

/// Why there is none; a [`ControlError`] that does not know its node yet.
#[derive(Debug)]
enum Failure {
    Unreachable(String),
    Silent,
    Malformed(String),
}

impl Failure {
    fn of(self, node: NodeId) -> ControlError {
        match self {
            Self::Unreachable(reason) => ControlError::Unreachable { node, reason },
            Self::Silent => ControlError::Silent(node),
            Self::Malformed(reason) => ControlError::Malformed { node, reason },
        }
    }
}

impl ControlNode {
    /// Starts listening. Answers come from `handler`; who may ask, and where others are, from `view`.
    ///
    /// # Errors
    /// See [`ControlStartError`].
    pub async fn start(
        config: ControlConfig,
        keypair: &Keypair,
        view: watch::Receiver<Arc<ClusterView>>,
        handler: Arc<dyn ControlHandler>,
    ) -> Result<Arc<Self>, ControlStartError> {
        refuse_key_log(std::env::var_os(KEY_LOG).as_deref())?;
        let counters = Arc::new(ControlCounters::default());
        let members = Members::new(view);
        let stop = CancellationToken::new();
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let (found, discovered) = mpsc::channel(DISCOVERIES);
        let mut swarm = behaviour::swarm(&config, keypair, members.clone(), Arc::clone(&counters))?;
        let local = swarm::listen(&mut swarm, config.listen).await?;
        let driver = swarm::Driver::new(swarm::Parts {
            swarm,
            members: members.clone(),
            handler: Arc::clone(&handler),
            commands: inbox,
            discovered: found,
            counters: Arc::clone(&counters),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(driver.run(stop.clone()));
        Ok(Arc::new(Self {
            local,
            members,
            handler,
            commands,
            discovered: Mutex::new(discovered),
            counters,
            stop,
            tasks: Mutex::new(tasks),
        }))
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Its counters now.
    pub fn stats(&self) -> ControlStats {
        self.counters.snapshot()
    }

    /// Smoothed round-trip time to a node, if it was measured.
    pub fn rtt(&self, node: NodeId) -> Option<Duration> {
        self.counters.rtt(node)
    }

    /// The control address of the next neighbour that mDNS found. Never answers without mDNS. Safe to drop.
    pub async fn discovered(&self) -> Option<SocketAddr> {
        self.discovered.lock().await.recv().await
    }

    /// Stops listening and closes all connections.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        let mut tasks = self.tasks.lock().await;
        while tasks.join_next().await.is_some() {}
    }

    /// Stops without order.
    pub fn abort(&self) {
        self.stop.cancel();
        if let Ok(mut tasks) = self.tasks.try_lock() {
            tasks.abort_all();
        }
    }

    async fn exchange(&self, to: NodeId, ask: Ask) -> Result<Answered, ControlError> {
        let member = self.members.find(to).ok_or(ControlError::UnknownNode(to))?;
        let (reply, answer) = oneshot::channel();
        let command = Command {
            node: to,
            to: member.peer,
            at: member.facts.control,
            ask: Envelope {
                protocol: PROTOCOL,
                load: self.handler.load(),
                body: ask,
            },
            reply,
        };
        let stopped =
            || Failure::Unreachable("this node's control plane has stopped".into()).of(to);
        self.commands.send(command).await.map_err(|_| stopped())?;
        match answer.await.map_err(|_| stopped())? {
            Ok(Received::Ours(envelope)) => {
                self.handler.heard(to, envelope.load);
                Ok(Answered {
                    answer: envelope.body,
                    load: envelope.load,
                })
            }
            Ok(Received::OtherProtocol(version)) => Err(Failure::Malformed(format!(
                "its protocol is {version}, ours {PROTOCOL}"
            ))
            .of(to)),
            Err(failure) => Err(failure.of(to)),
        }
    }
}

#[async_trait]
impl ControlPlane for ControlNode {
    async fn ask(
        &self,
        to: NodeId,
        ask: Ask,
        deadline: Duration,
    ) -> Result<Answered, ControlError> {
        self.counters.asked.add();
        let answered = timeout(deadline, self.exchange(to, ask))
            .await
            .unwrap_or(Err(ControlError::Silent(to)));
        if answered.is_err() {
            self.counters.unanswered.add();
        }
        answered
    }
}

#[cfg(test)]
mod tests;
