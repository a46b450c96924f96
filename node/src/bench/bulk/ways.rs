//! The ways that the bench compares.

use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use shoal_gossip::{
    BlockSize, ClusterView, Epoch, GossipThread, Incarnation, NodeFacts, NodeId, NodeRow,
    RequestId, Role, Timestamp,
};
use shoal_migrate::transfer::{KvReceiver, Parcel, ParcelHeader, ParcelKind, Rejection};
use shoal_migrate::{MigrationId, StageIndex};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::bench::bulk::PARCEL_BYTES;
use crate::identity::Identity;
use crate::mesh::StreamHandler;
use crate::mesh::bulk::Bulk;
use crate::mesh::messages::{Frame, Open, PROTOCOL};
use crate::mesh::socket::SharedSocket;
use crate::mesh::stream::{Serving, StreamNode};
use crate::mesh::tls::{BULK_ALPN, PeerTls, SERVER_NAME};

/// Name of the way that the others are compared with.
pub(super) const TLS: &str = "TLS over TCP, AES-128-GCM";

/// Bytes written or read at once over TCP.
const STEP: usize = 256 * 1024;

/// Moves parcels.
#[async_trait]
pub(super) trait Way: Send {
    fn name(&self) -> &str;

    /// Moves so many parcels, one after the other.
    async fn carry(&mut self, parcels: u32) -> Result<(), String>;
}

/// All of them, connected.
pub(super) async fn all(streams: Option<u32>) -> Result<Vec<Box<dyn Way>>, String> {
    let parcel = Bytes::from(vec![0x5a; PARCEL_BYTES]);
    Ok(vec![
        Box::new(Copied(parcel.clone())),
        Box::new(tcp(parcel.clone()).await?),
        Box::new(tls(parcel.clone()).await?),
        Box::new(Quic::start(parcel.clone(), 1452, streams)?),
        Box::new(Quic::start(parcel, 8952, streams)?),
    ])
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

struct Copied(Bytes);

#[async_trait]
impl Way for Copied {
    fn name(&self) -> &'static str {
        "copied in memory"
    }

    async fn carry(&mut self, parcels: u32) -> Result<(), String> {
        for _ in 0..parcels {
            std::hint::black_box(self.0.to_vec());
        }
        Ok(())
    }
}

/// Over a stream of bytes whose other end is a task of its own.
struct Stream<S> {
    name: &'static str,
    near: S,
    parcel: Bytes,
    _far: JoinSet<std::io::Result<()>>,
}

#[async_trait]
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Way for Stream<S> {
    fn name(&self) -> &str {
        self.name
    }

    async fn carry(&mut self, parcels: u32) -> Result<(), String> {
        for _ in 0..parcels {
            for step in self.parcel.chunks(STEP) {
                self.near.write_all(step).await.map_err(text)?;
            }
            self.near.flush().await.map_err(text)?;
            self.near.read_u8().await.map_err(text)?;
        }
        Ok(())
    }
}

/// Reads parcels into fresh memory and acknowledges each.
async fn take_in(mut far: impl AsyncRead + AsyncWrite + Unpin) -> std::io::Result<()> {
    loop {
        let mut parcel = Vec::with_capacity(PARCEL_BYTES);
        while parcel.len() < PARCEL_BYTES {
            if far.read_buf(&mut parcel).await? == 0 {
                return Ok(());
            }
        }
        std::hint::black_box(parcel);
        far.write_u8(0).await?;
        far.flush().await?;
    }
}

async fn loopback() -> Result<(TcpStream, TcpStream), String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(text)?;
    let address = listener.local_addr().map_err(text)?;
    let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (near, (far, _)) = (near.map_err(text)?, far.map_err(text)?);
    near.set_nodelay(true).map_err(text)?;
    far.set_nodelay(true).map_err(text)?;
    Ok((near, far))
}

async fn tcp(parcel: Bytes) -> Result<Stream<TcpStream>, String> {
    let (near, far) = loopback().await?;
    let mut tasks = JoinSet::new();
    tasks.spawn(take_in(far));
    Ok(Stream {
        name: "TCP",
        near,
        parcel,
        _far: tasks,
    })
}

async fn tls(parcel: Bytes) -> Result<Stream<tokio_rustls::client::TlsStream<TcpStream>>, String> {
    let (near, far) = loopback().await?;
    let identities = (Identity::ephemeral(), Identity::ephemeral());
    let client = PeerTls::new(identities.0.keypair()).map_err(text)?;
    let client = client.plain_client(BULK_ALPN, identities.1.peer_id());
    let server = PeerTls::new(identities.1.keypair()).map_err(text)?;
    let server = server.plain_server(&[BULK_ALPN], Arc::new(|_| true));
    let acceptor = TlsAcceptor::from(Arc::new(server.map_err(text)?));
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { take_in(acceptor.accept(far).await?).await });
    let name = rustls_pki_types::ServerName::try_from(SERVER_NAME).map_err(text)?;
    let near = TlsConnector::from(Arc::new(client.map_err(text)?))
        .connect(name, near)
        .await
        .map_err(text)?;
    Ok(Stream {
        name: TLS,
        near,
        parcel,
        _far: tasks,
    })
}

/// Takes everything in and keeps nothing.
#[derive(Debug)]
struct Sink;

#[async_trait]
impl KvReceiver for Sink {
    fn admit(&self, _: NodeId, _: &ParcelHeader) -> Result<(), Rejection> {
        Ok(())
    }

    async fn deliver(&self, _: NodeId, parcel: Parcel) -> Result<(), Rejection> {
        std::hint::black_box(parcel);
        Ok(())
    }
}

#[async_trait]
impl StreamHandler for Sink {
    async fn serve(&self, _: NodeId, _: Open, _: mpsc::Sender<Frame>) {}
}

/// One node, as the other sees it.
struct End {
    identity: Identity,
    node: Arc<StreamNode>,
    views: watch::Sender<Arc<ClusterView>>,
    address: SocketAddr,
    /// The socket's driver lives on it, as in a node.
    _thread: GossipThread,
    _socket: SharedSocket,
}

impl End {
    fn start(mtu: u16, streams: Option<u32>) -> Result<Self, String> {
        let thread = GossipThread::start().map_err(text)?;
        let driver = thread.runtime_handle();
        let socket = SharedSocket::bind(([127, 0, 0, 1], 0).into(), &driver).map_err(text)?;
        let identity = Identity::ephemeral();
        let none = ClusterView::new(identity.node_id(), Timestamp::ZERO, Vec::new());
        let views = watch::Sender::new(Arc::new(none));
        let mut bulk = Bulk::new(Arc::new(Sink));
        bulk.mtu = mtu;
        bulk.limits.parts = streams.unwrap_or(bulk.limits.parts);
        let serving = Serving {
            streams: Arc::new(Sink),
            bulk,
        };
        let keypair = identity.keypair();
        let node = StreamNode::start(&socket, &driver, keypair, views.subscribe(), serving);
        let node = node.map_err(text)?;
        Ok(Self {
            address: node.local_addr().map_err(text)?,
            identity,
            node,
            views,
            _thread: thread,
            _socket: socket,
        })
    }

    fn row(&self) -> NodeRow {
        NodeRow {
            facts: Arc::new(NodeFacts {
                node: self.identity.node_id(),
                incarnation: Incarnation(1),
                peer_id: self.identity.peer_id().to_string(),
                protocol: PROTOCOL,
                control: self.address,
                stream: self.address,
                http: String::new(),
                role: Role::Mixed,
                block_size: BlockSize::DEFAULT,
                models: Vec::new(),
                version: String::new(),
            }),
            load: None,
        }
    }
}

/// Over the bulk plane of two nodes.
struct Quic {
    name: String,
    near: End,
    far: End,
    parcel: Bytes,
    sent: u16,
}

impl Quic {
    fn start(parcel: Bytes, mtu: u16, streams: Option<u32>) -> Result<Self, String> {
        let (near, far) = (End::start(mtu, streams)?, End::start(mtu, streams)?);
        for end in [&near, &far] {
            let rows = vec![near.row(), far.row()];
            let view = ClusterView::new(end.identity.node_id(), Timestamp::ZERO, rows);
            end.views.send_replace(Arc::new(view));
        }
        Ok(Self {
            name: format!("bulk plane, packets of {mtu}"),
            near,
            far,
            parcel,
            sent: 0,
        })
    }
}

#[async_trait]
impl Way for Quic {
    fn name(&self) -> &str {
        &self.name
    }

    async fn carry(&mut self, parcels: u32) -> Result<(), String> {
        let (from, to) = (&self.near.identity, self.far.identity.node_id());
        let carrier = self.near.node.carrier();
        for _ in 0..parcels {
            self.sent = self.sent.wrapping_add(1);
            let migration = MigrationId {
                request: RequestId {
                    home: from.node_id(),
                    serial: 1,
                },
                epoch: Epoch::FIRST,
                target: to,
                attempt: 1,
            };
            let parcel = Parcel::new(
                migration,
                StageIndex(self.sent),
                ParcelKind::Last(None),
                Bytes::new(),
                self.parcel.clone(),
            );
            let transfer = carrier.submit(to, parcel);
            transfer.delivered().await.map_err(text)?;
        }
        Ok(())
    }
}
