use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use quinn::{ClientConfig, Endpoint};
use shoal_gossip::ClusterView;
use shoal_migrate::transfer::contract::{Shelf, parcel};
use shoal_migrate::transfer::{Transfer, TransferError};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use super::*;
use crate::identity::Identity;
use crate::mesh::StreamPlane;
use crate::mesh::codec::encode_frame;
use crate::mesh::messages::MAX_SUBMIT_BYTES;
use crate::mesh::socket::SharedSocket;
use crate::mesh::stream::{Serving, StreamNode};
use crate::mesh::testing::{Counter, PATIENCE, empty_view, facts, submit, until, view};
use crate::mesh::tls::{BULK_ALPN, PeerTls, SERVER_NAME, STREAM_ALPN};

struct Peer {
    identity: Identity,
    node: Arc<StreamNode>,
    handler: Arc<Counter>,
    shelf: Arc<Shelf>,
    view: watch::Sender<Arc<ClusterView>>,
    _socket: SharedSocket,
}

impl Peer {
    fn start() -> Self {
        Self::with(|bulk| bulk)
    }

    fn with(settings: impl FnOnce(Bulk) -> Bulk) -> Self {
        let identity = Identity::ephemeral();
        let view = empty_view();
        let (handler, shelf) = (Arc::new(Counter::default()), Arc::new(Shelf::default()));
        let here = Handle::current();
        let socket = SharedSocket::bind(([127, 0, 0, 1], 0).into(), &here).unwrap();
        let node = StreamNode::start(
            &socket,
            &here,
            identity.keypair(),
            view.subscribe(),
            Serving {
                streams: Arc::clone(&handler) as _,
                bulk: settings(Bulk::new(Arc::clone(&shelf) as _)),
            },
        )
        .unwrap();
        Self {
            identity,
            node,
            handler,
            shelf,
            view,
            _socket: socket,
        }
    }

    fn facts(&self) -> shoal_gossip::NodeFacts {
        let nowhere: SocketAddr = ([127, 0, 0, 1], 1).into();
        facts(&self.identity, nowhere, self.node.local_addr().unwrap())
    }

    fn id(&self) -> NodeId {
        self.identity.node_id()
    }

    fn send(&self, to: &Self, parcel: Parcel) -> Transfer {
        self.node.carrier().submit(to.id(), parcel)
    }
}

fn introduce(peers: &[&Peer]) {
    let all: Vec<_> = peers.iter().map(|peer| peer.facts()).collect();
    for peer in peers {
        peer.view.send_replace(view(&all));
    }
}

fn pair() -> (Peer, Peer) {
    let pair = (Peer::start(), Peer::start());
    introduce(&[&pair.0, &pair.1]);
    pair
}

async fn outcome(transfer: Transfer) -> Result<(), TransferError> {
    let delivered = timeout(PATIENCE, transfer.delivered()).await;
    delivered.expect("an outcome").map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parcels_go_both_ways_whatever_the_longest_packet_is() {
    for mtu in [1200, 1452, 8952, u16::MAX] {
        let (one, two) = (
            Peer::with(|bulk| Bulk { mtu, ..bulk }),
            Peer::with(|bulk| Bulk { mtu, ..bulk }),
        );
        introduce(&[&one, &two]);
        let there = parcel(1, 1_000, 20 << 20);
        let back = parcel(2, 1_000, 20 << 20);
        let both = tokio::join!(
            outcome(one.send(&two, there.clone())),
            outcome(two.send(&one, back.clone()))
        );
        assert_eq!(both, (Ok(()), Ok(())));
        assert!(two.shelf.taken() == [(one.id(), there)], "mtu {mtu}");
        assert!(one.shelf.taken() == [(two.id(), back)], "mtu {mtu}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused_and_so_is_a_node_under_anothers_name() {
    let (stranger, host) = (Peer::start(), Peer::start());
    let unknown = outcome(stranger.send(&host, parcel(1, 1, 1))).await;
    assert_eq!(unknown, Err(TransferError::UnknownNode(host.id())));
    // It knows the host; the host does not know it, however sound its certificate is.
    stranger.view.send_replace(view(&[host.facts()]));
    let refused = outcome(stranger.send(&host, parcel(1, 1, 1))).await;
    assert!(
        matches!(refused, Err(TransferError::Unreachable { .. })),
        "{refused:?}"
    );
    let other = Peer::start();
    introduce(&[&stranger, &host, &other]);
    let mut lie = other.facts();
    lie.stream = host.facts().stream;
    stranger.view.send_replace(view(&[stranger.facts(), lie]));
    let refused = outcome(stranger.send(&other, parcel(1, 1, 1))).await;
    assert!(
        matches!(refused, Err(TransferError::Unreachable { .. })),
        "{refused:?}"
    );
    assert!(host.shelf.taken().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_belongs_to_one_plane_means_nothing_to_the_other() {
    let (home, host) = pair();
    let endpoint = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    let connect = async |alpn: &[u8]| {
        let tls = PeerTls::new(home.identity.keypair()).unwrap();
        let tls = tls.client(alpn, host.identity.peer_id()).unwrap();
        let config = ClientConfig::new(Arc::new(tls));
        let to = host.node.local_addr().unwrap();
        let connection = endpoint.connect_with(config, to, SERVER_NAME).unwrap();
        connection.await.map_err(|error| error.to_string())
    };
    let say = async |alpn: &[u8], bytes: Bytes| {
        let connection = connect(alpn).await.unwrap();
        let (mut send, mut recv) = connection.open_bi().await.unwrap();
        drop(send.write_chunk(bytes).await);
        drop(send.finish());
        // Whatever the answer is: there is one, or an end.
        let answer = timeout(PATIENCE, recv.read_to_end(1 << 20)).await;
        assert!(answer.is_ok());
    };
    let submission = encode_frame(&submit(home.id(), 1), MAX_SUBMIT_BYTES).unwrap();
    say(BULK_ALPN, submission.into()).await;
    let sent = parcel(1, 0, 0);
    let opening = shoal_migrate::transfer::wire::Opening {
        serial: 1,
        header: sent.header,
        parts: 1,
    };
    let opening = shoal_migrate::transfer::wire::encode(&opening).unwrap();
    say(STREAM_ALPN, opening.clone()).await;
    assert_eq!(*host.handler.ended.borrow(), 0);
    assert!(host.shelf.taken().is_empty());
    say(BULK_ALPN, opening).await;
    assert_eq!(host.shelf.taken(), [(home.id(), sent)]);
    let other = connect(b"shoal/bulk/0").await;
    assert!(other.is_err());
}

/// Holds what it gets until it may go on.
#[derive(Debug)]
struct Slow {
    offered: Mutex<u32>,
    gate: Arc<Semaphore>,
}

impl Slow {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            offered: Mutex::new(0),
            gate: Arc::new(Semaphore::new(0)),
        })
    }
}

#[async_trait]
impl KvReceiver for Slow {
    fn admit(&self, _: NodeId, _: &ParcelHeader) -> Result<(), Rejection> {
        Ok(())
    }

    async fn deliver(&self, _: NodeId, _: Parcel) -> Result<(), Rejection> {
        *self.offered.lock().unwrap() += 1;
        drop(self.gate.acquire().await);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_the_view_for_good_breaks_its_transfers() {
    // It leaves the sender's view, and then the receiver's.
    for at_the_sender in [true, false] {
        let slow = Slow::new();
        let home = Peer::start();
        let host = Peer::with(|bulk| Bulk {
            receiver: Arc::clone(&slow) as _,
            ..bulk
        });
        introduce(&[&home, &host]);
        let transfer = home.send(&host, parcel(1, 0, 1_000_000));
        until("the parcel offered", || *slow.offered.lock().unwrap() == 1).await;
        match at_the_sender {
            true => home.view.send_replace(view(&[home.facts()])),
            false => host.view.send_replace(view(&[host.facts()])),
        };
        // Sooner than QUIC would notice any silence.
        let broken = timeout(Duration::from_secs(6), transfer.delivered()).await;
        assert!(matches!(broken, Ok(Err(TransferError::Broken(_)))));
        slow.gate.add_permits(1);
        until("only standing tasks", || {
            home.node.tasks() == 1 && host.node.tasks() == 1
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_streams_flow_on_beside_a_transfer() {
    let (home, host) = pair();
    let mut frames = home
        .node
        .open(host.id(), submit(home.id(), 30_000))
        .await
        .unwrap();
    let tokens = async {
        let mut count = 0;
        // Longer gaps would be taken for a dead host.
        let gap = Duration::from_secs(2);
        while let Some(frame) = timeout(gap, frames.next()).await.expect("no gap") {
            frame.unwrap();
            count += 1;
        }
        count
    };
    let parcels = std::sync::atomic::AtomicU32::new(0);
    let bulk = async {
        loop {
            // Both ways, so that either end is as busy as it can be.
            let (there, back) = tokio::join!(
                outcome(home.send(&host, parcel(1, 0, 16 << 20))),
                outcome(host.send(&home, parcel(2, 0, 16 << 20)))
            );
            there.and(back).unwrap();
            parcels.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    };
    let count = tokio::select! {
        count = tokens => count,
        () = bulk => 0,
    };
    assert_eq!(count, 30_001);
    assert!(
        parcels.into_inner() > 0,
        "the stream was over too soon to tell"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_takes_nothing_in_says_so() {
    let home = Peer::start();
    let host = Peer::with(|_| Bulk::nothing());
    introduce(&[&home, &host]);
    let refused = outcome(home.send(&host, parcel(1, 0, 1_000))).await;
    assert_eq!(refused, Err(TransferError::Rejected(Rejection::Unknown)));
}
