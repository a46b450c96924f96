//! The transport under the swarm: libp2p's QUIC (same ALPN, same certificates), with a door in front.
//!
//! Our own and not `libp2p-quic`, which begins each handshake as soon as its first packet is there, before a behaviour is
//! asked: a stranger's packet cost it a signature, and 60 KB until three probe timeouts were over, without a bound (measured:
//! 217 MB for 20,000 packets). Nothing of that can be set from outside. Here the [`Doorkeeper`] is asked first, and who comes
//! in is checked during the handshake, as on the stream plane.
//!
//! One endpoint listens and dials, so that a node's packets come from the address that its record names.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use if_watch::IfEvent;
use if_watch::tokio::IfWatcher;
use libp2p::core::transport::{DialOpts, ListenerId, TransportError, TransportEvent};
use libp2p::identity::Keypair;
use libp2p::{Multiaddr, PeerId, Transport};
use quinn::{
    ClientConfig, Connecting, Endpoint, EndpointConfig, IdleTimeout, Incoming, ServerConfig,
    TokioRuntime, TransportConfig, VarInt,
};
use tokio::time::timeout;
use tracing::debug;

use crate::mesh::control::ControlCounters;
use crate::mesh::control::muxer::Muxer;
use crate::mesh::control::swarm::{multiaddr, peer_address};
use crate::mesh::door::{Doorkeeper, HANDSHAKE_PATIENCE, Place, Turned, bound_incoming, plain};
use crate::mesh::members::Members;
use crate::mesh::messages::MAX_CONTROL_BYTES;
use crate::mesh::tls::{Admit, PeerTls, SERVER_NAME, TlsError, peer_of};

/// ALPN of libp2p over QUIC.
const CONTROL_ALPN: &[u8] = b"libp2p";

/// A peer that does not answer QUIC's keep-alives is given up after this, so that asking it again
/// dials anew. Death itself is the state plane's to tell.
const MAX_IDLE: VarInt = VarInt::from_u32(4_000);

/// Four keep-alives may be lost before [`MAX_IDLE`] ends.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// Streams that a peer may have open: exchanges, and those of libp2p's own protocols.
const STREAMS: u32 = 256;

/// Bytes that a peer may be ahead on one stream: the longest message many times over.
const STREAM_WINDOW: u32 = 16 * MAX_CONTROL_BYTES as u32;

/// The same on a connection: a quarter of its streams at their bound.
const WINDOW: u32 = STREAMS / 4 * STREAM_WINDOW;

/// What the key of stateless resets is derived for; as libp2p does, so that a node's next life can end its old connections.
const RESET_DOMAIN: &[u8] = b"libp2p quic stateless reset key";

/// Callers that are met before other work of the swarm gets its turn.
const CALLERS_PER_TURN: usize = 32;

/// Why a connection did not come about, or ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum QuicError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Connect(#[from] quinn::ConnectError),
    #[error(transparent)]
    Connection(#[from] quinn::ConnectionError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("the handshake took too long")]
    Late,
    #[error("the peer proved no identity")]
    NoIdentity,
    #[error("this node does not listen")]
    NotListening,
}

type Event = TransportEvent<BoxFuture<'static, Handshake>, QuicError>;
type Handshake = Result<(PeerId, Muxer), QuicError>;

/// The transport; it listens at one address at most.
pub(super) struct Quic {
    tls: PeerTls,
    server: ServerConfig,
    transport: Arc<TransportConfig>,
    endpoint: EndpointConfig,
    door: Doorkeeper,
    counters: Arc<ControlCounters>,
    listener: Option<Listener>,
}

struct Listener {
    id: ListenerId,
    endpoint: Endpoint,
    local: SocketAddr,
    accept: BoxFuture<'static, Option<Incoming>>,
    /// Tells the addresses of this host, where all of them are listened on.
    interfaces: Option<IfWatcher>,
    events: VecDeque<Event>,
}

impl Quic {
    /// Lets the identities in that `members` name.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub(super) fn new(
        keypair: &Keypair,
        members: Members,
        counters: Arc<ControlCounters>,
    ) -> Result<Self, TlsError> {
        let tls = PeerTls::new(keypair)?;
        let guests = members.clone();
        let admit: Admit = Arc::new(move |peer| guests.admit(peer).is_some());
        let transport = Arc::new(transport());
        let mut server = ServerConfig::with_crypto(Arc::new(tls.server(&[CONTROL_ALPN], admit)?));
        server
            .transport_config(Arc::clone(&transport))
            // Nodes have fixed addresses; one that moves comes back in a new life.
            .migration(false);
        bound_incoming(&mut server);
        Ok(Self {
            tls,
            server,
            transport,
            endpoint: endpoint_config(keypair),
            door: Doorkeeper::new(members, |facts| facts.control),
            counters,
            listener: None,
        })
    }

    fn listen(&self, id: ListenerId, address: SocketAddr) -> io::Result<Listener> {
        let endpoint = Endpoint::new(
            self.endpoint.clone(),
            Some(self.server.clone()),
            UdpSocket::bind(address)?,
            Arc::new(TokioRuntime),
        )?;
        let local = endpoint.local_addr()?;
        let everywhere = local.ip().is_unspecified();
        let mut events = VecDeque::new();
        if !everywhere {
            events.push_back(TransportEvent::NewAddress {
                listener_id: id,
                listen_addr: multiaddr(local),
            });
        }
        Ok(Listener {
            id,
            accept: accept(endpoint.clone()),
            endpoint,
            local,
            interfaces: everywhere.then(IfWatcher::new).transpose()?,
            events,
        })
    }

    /// What dialling this peer needs.
    fn client(&self, peer: PeerId) -> Result<(Endpoint, ClientConfig), QuicError> {
        let listener = self.listener.as_ref().ok_or(QuicError::NotListening)?;
        let mut config = ClientConfig::new(Arc::new(self.tls.client(CONTROL_ALPN, peer)?));
        config.transport_config(Arc::clone(&self.transport));
        Ok((listener.endpoint.clone(), config))
    }
}

impl Listener {
    /// The next address that this host has or no longer has.
    fn poll_interfaces(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        let Some(interfaces) = &mut self.interfaces else {
            return Poll::Pending;
        };
        let listener_id = self.id;
        loop {
            let Poll::Ready(changed) = interfaces.poll_if_event(cx) else {
                return Poll::Pending;
            };
            let (up, ip) = match changed {
                Ok(IfEvent::Up(net)) => (true, net.addr()),
                Ok(IfEvent::Down(net)) => (false, net.addr()),
                Err(error) => {
                    let error = error.into();
                    return Poll::Ready(TransportEvent::ListenerError { listener_id, error });
                }
            };
            if ip.is_ipv4() != self.local.is_ipv4() {
                continue;
            }
            let listen_addr = multiaddr(SocketAddr::new(ip, self.local.port()));
            return Poll::Ready(match up {
                true => TransportEvent::NewAddress {
                    listener_id,
                    listen_addr,
                },
                false => TransportEvent::AddressExpired {
                    listener_id,
                    listen_addr,
                },
            });
        }
    }

    /// The next caller, none once the endpoint is closed.
    fn poll_caller(&mut self, cx: &mut Context<'_>) -> Poll<Option<Incoming>> {
        let caller = std::task::ready!(self.accept.poll_unpin(cx));
        self.accept = accept(self.endpoint.clone());
        Poll::Ready(caller)
    }
}

impl Transport for Quic {
    type Output = (PeerId, Muxer);
    type Error = QuicError;
    type ListenerUpgrade = BoxFuture<'static, Handshake>;
    type Dial = BoxFuture<'static, Handshake>;

    fn listen_on(
        &mut self,
        id: ListenerId,
        address: Multiaddr,
    ) -> Result<(), TransportError<QuicError>> {
        let Some((at, _)) = peer_address(&address).filter(|_| self.listener.is_none()) else {
            return Err(TransportError::MultiaddrNotSupported(address));
        };
        let listener = self.listen(id, at);
        self.listener = Some(listener.map_err(|error| TransportError::Other(error.into()))?);
        Ok(())
    }

    fn remove_listener(&mut self, id: ListenerId) -> bool {
        let listener = self.listener.take_if(|listener| listener.id == id);
        if let Some(listener) = &listener {
            listener.endpoint.close(VarInt::from_u32(0), b"closing");
        }
        listener.is_some()
    }

    fn dial(
        &mut self,
        address: Multiaddr,
        _: DialOpts,
    ) -> Result<Self::Dial, TransportError<QuicError>> {
        let Some((at, Some(peer))) = peer_address(&address) else {
            return Err(TransportError::MultiaddrNotSupported(address));
        };
        let (endpoint, config) = self.client(peer).map_err(TransportError::Other)?;
        let dialling = async move { shake(endpoint.connect_with(config, at, SERVER_NAME)?).await };
        Ok(dialling.boxed())
    }

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Event> {
        let this = self.get_mut();
        // The swarm listens before it polls, and polls no more once it is told to stop.
        let Some(listener) = &mut this.listener else {
            return Poll::Pending;
        };
        if let Some(event) = listener.events.pop_front() {
            return Poll::Ready(event);
        }
        if let Poll::Ready(event) = listener.poll_interfaces(cx) {
            return Poll::Ready(event);
        }
        for _ in 0..CALLERS_PER_TURN {
            let Some(incoming) = std::task::ready!(listener.poll_caller(cx)) else {
                let listener_id = listener.id;
                this.listener = None;
                let reason = Ok(());
                return Poll::Ready(TransportEvent::ListenerClosed {
                    listener_id,
                    reason,
                });
            };
            match this.door.meet(incoming) {
                Ok((incoming, place)) => {
                    return Poll::Ready(TransportEvent::Incoming {
                        listener_id: listener.id,
                        local_addr: multiaddr(listener.local),
                        send_back_addr: multiaddr(plain(incoming.remote_address())),
                        upgrade: welcome(incoming, place).boxed(),
                    });
                }
                Err(Turned::Asked) => {}
                Err(Turned::Refused) => this.counters.refused.add(),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

fn accept(endpoint: Endpoint) -> BoxFuture<'static, Option<Incoming>> {
    async move { endpoint.accept().await }.boxed()
}

/// The handshake of a caller that was let in.
async fn welcome(incoming: Incoming, place: Place) -> Handshake {
    let shaken = shake(incoming.accept()?).await;
    if shaken.is_ok() {
        place.welcome();
    }
    shaken
}

async fn shake(connecting: Connecting) -> Handshake {
    let connection = timeout(HANDSHAKE_PATIENCE, connecting)
        .await
        .map_err(|_| QuicError::Late)??;
    let peer = peer_of(&connection).ok_or(QuicError::NoIdentity)?;
    Ok((peer, Muxer::new(connection)))
}

fn transport() -> TransportConfig {
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(IdleTimeout::from(MAX_IDLE)))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_concurrent_bidi_streams(STREAMS.into())
        .max_concurrent_uni_streams(0u32.into())
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window(WINDOW.into())
        .datagram_receive_buffer_size(None)
        .allow_spin(false);
    transport
}

fn endpoint_config(keypair: &Keypair) -> EndpointConfig {
    let mut config = match keypair.derive_secret(RESET_DOMAIN) {
        Some(secret) => {
            let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &secret);
            EndpointConfig::new(Arc::new(key))
        }
        None => {
            debug!("this key derives no secret; connections of earlier lives time out");
            EndpointConfig::default()
        }
    };
    config.supported_versions(vec![1]);
    config
}

#[cfg(test)]
mod tests;
