//! The stream plane: requests out, token frames back, over QUIC.
//!
//! One connection per pair of nodes and direction, pinned to the `PeerId`s that current records name.
//! One stream per request: the home writes the submission, the host writes frames until the request
//! ends. Giving up is stopping the stream, which the other side sees at once.
//!
//! ```text
//! engine ─▶ host ─▶ 4 frames ─▶ stream window 64 KiB ─▶ 4 frames ─▶ home ─▶ client
//! ```
//!
//! Each arrow waits for the next, so a client that does not read stops its own request at the host and
//! nothing else.
//!
//! - A client that TLS refuses believes itself connected for a round trip (TLS 1.3). So the host greets
//!   an admitted peer with its protocol version, and a dialler trusts nothing before it.
//! - A node that leaves the view and does not come back loses its connections, both ways, after a time in which a slow one
//!   is back. Who is dead, and whose requests are placed again, is said elsewhere: `home/vigil.rs`.
//! - KV bytes share the endpoint and nothing else: see [`crate::mesh::bulk`].
//! - The endpoint is driven on the gossip thread, whose socket it shares; connections run where they
//!   are used.

mod accept;
pub(in crate::mesh) mod dial;
mod read;
mod submit;
pub(in crate::mesh) mod transport;

pub(crate) use self::transport::IDLE_MS;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use libp2p::identity::Keypair;
use quinn::{Endpoint, TokioRuntime, VarInt};
use shoal_gossip::{ClusterView, MonotonicClock, NodeId};
use shoal_migrate::transfer::KvTransfer;
use shoal_migrate::transfer::quic::{QuicReceiver, QuicTransfer};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use crate::mesh::bulk::{self, Bulk};
use crate::mesh::members::Members;
use crate::mesh::messages::{Open, PROTOCOL};
use crate::mesh::socket::{SharedSocket, endpoint_config};
use crate::mesh::tls::{Admit, BULK_ALPN, PeerTls, STREAM_ALPN, TlsError};
use crate::mesh::{FrameReceiver, StreamError, StreamHandler, StreamPlane};

/// Frames that may wait on either side of a stream. Enough that a task switch does not stall a step's
/// worth of tokens, few enough that a stalled client costs little.
const FRAMES: usize = 4;

/// Sent by the host once it has admitted a peer: its version of the messages.
const GREETING: [u8; 2] = PROTOCOL.to_be_bytes();

/// How long a submission may take on its way: the largest at 1 MB/s.
const SUBMIT_PATIENCE: Duration = Duration::from_secs(30);

/// How long a shutdown waits for tasks and for peers to take note.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// Close code: the node is shutting down.
const CODE_CLOSING: VarInt = VarInt::from_u32(0);

/// Close code: no current record names the peer.
const CODE_NOT_A_MEMBER: VarInt = VarInt::from_u32(1);

/// Close code: nobody has used the connection for a while.
const CODE_UNUSED: VarInt = VarInt::from_u32(2);

/// Why a stream plane did not start. Nothing is left running.
#[derive(Debug, thiserror::Error)]
pub enum StreamStartError {
    /// The certificate or its use.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The endpoint.
    #[error("the QUIC endpoint cannot be made: {0}")]
    Endpoint(String),
}

/// Where that goes which other nodes send.
#[derive(Debug)]
pub struct Serving {
    /// Requests.
    pub streams: Arc<dyn StreamHandler>,
    /// KV.
    pub bulk: Bulk,
}

/// A running stream plane.
#[derive(Debug)]
pub struct StreamNode {
    endpoint: Endpoint,
    pool: Arc<dial::Pool>,
    carrier: Arc<QuicTransfer>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl StreamNode {
    /// Starts serving on `socket`. `gossip_thread` drives the endpoint; requests and KV of others go where
    /// `serving` says; who may come, and where others are, is read off `view`.
    ///
    /// # Errors
    /// See [`StreamStartError`].
    pub fn start(
        socket: &SharedSocket,
        gossip_thread: &Handle,
        keypair: &Keypair,
        view: watch::Receiver<Arc<ClusterView>>,
        serving: Serving,
    ) -> Result<Arc<Self>, StreamStartError> {
        let wrong = |error: &dyn std::fmt::Display| StreamStartError::Endpoint(error.to_string());
        let members = Members::new(view);
        let tls = PeerTls::new(keypair)?;
        let guests = members.clone();
        let admit: Admit = Arc::new(move |peer| guests.admit(peer).is_some());
        let server = transport::server_config(tls.server(&[STREAM_ALPN, BULK_ALPN], admit)?);
        let config = endpoint_config(socket.quic.as_ref()).map_err(|error| wrong(&error))?;
        let endpoint = {
            let _driver = gossip_thread.enter();
            Endpoint::new_with_abstract_socket(
                config,
                Some(server),
                Arc::clone(&socket.quic),
                Arc::new(TokioRuntime),
            )
            .map_err(|error| wrong(&error))?
        };
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let Serving {
            streams: handler,
            bulk,
        } = serving;
        let acceptor = accept::Acceptor {
            endpoint: endpoint.clone(),
            members: members.clone(),
            handler,
            bulk: QuicReceiver::new(bulk.receiver, bulk.limits, tasks.clone()),
            stop: stop.clone(),
            tasks: tasks.clone(),
        };
        tasks.spawn(acceptor.run());
        let dialler = dial::Dialler {
            endpoint: endpoint.clone(),
            tls,
            members,
            tasks: tasks.clone(),
            stop: stop.clone(),
        };
        let streams = dial::Use {
            alpn: STREAM_ALPN,
            transport: Arc::new(transport::client_transport()),
        };
        let parcels = dial::Use {
            alpn: BULK_ALPN,
            transport: Arc::new(bulk::client_transport(bulk.mtu)),
        };
        let links = bulk::Links::new(dial::Pool::new(dialler.clone(), parcels));
        let clock = Arc::new(MonotonicClock::start());
        let carrier = QuicTransfer::new(Arc::new(links), bulk.limits, clock, tasks.clone());
        Ok(Arc::new(Self {
            pool: dial::Pool::new(dialler, streams),
            carrier: Arc::new(carrier),
            endpoint,
            stop,
            tasks,
        }))
    }

    /// Carries KV to other nodes.
    pub fn carrier(&self) -> Arc<dyn KvTransfer> {
        Arc::clone(&self.carrier) as _
    }

    /// Where it is bound.
    ///
    /// # Errors
    /// What the system says.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Tasks that run now: one for the plane, a few per connection, one or two per open stream.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Closes all connections and waits for their tasks, five seconds at most: a handler that goes on
    /// after its frames are closed is left behind. The shared socket is no longer read after this.
    pub async fn shutdown(&self) {
        self.abort();
        self.tasks.close();
        let closed = timeout(CLOSE_PATIENCE, async {
            self.tasks.wait().await;
            self.endpoint.wait_idle().await;
        });
        if closed.await.is_err() {
            debug!(tasks = self.tasks.len(), "the stream plane closes late");
        }
    }

    /// Closes all connections and waits for nothing.
    pub fn abort(&self) {
        self.stop.cancel();
        self.endpoint.close(CODE_CLOSING, b"closing");
    }
}

#[async_trait]
impl StreamPlane for StreamNode {
    async fn open(&self, to: NodeId, open: Open) -> Result<FrameReceiver, StreamError> {
        submit::open(&self.pool, to, open).await
    }
}

#[cfg(test)]
mod tests;
