use std::future::poll_fn;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use quinn::Connection;
use tokio::net::UdpSocket as Socket;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::*;
use crate::identity::Identity;
use crate::mesh::door::NEIGHBOURS;
use crate::mesh::testing::{PATIENCE, facts, first_packets, is_asked_to_prove, until, view};

/// A transport that listens and shakes hands, until the test ends.
struct Host {
    identity: Identity,
    endpoint: Endpoint,
    at: SocketAddr,
    _driver: JoinSet<()>,
}

impl Host {
    fn start(view: watch::Receiver<Arc<shoal_gossip::ClusterView>>) -> Self {
        let identity = Identity::ephemeral();
        let members = Members::new(view);
        let mut quic = Quic::new(identity.keypair(), members, Arc::default()).unwrap();
        let here = multiaddr(([127, 0, 0, 1], 0).into());
        quic.listen_on(ListenerId::next(), here).unwrap();
        let listener = quic.listener.as_ref().unwrap();
        let (endpoint, at) = (listener.endpoint.clone(), listener.local);
        let mut driver = JoinSet::new();
        driver.spawn(drive(quic));
        Self {
            identity,
            endpoint,
            at,
            _driver: driver,
        }
    }
}

async fn drive(mut quic: Quic) {
    let (mut shaking, mut connected) = (FuturesUnordered::new(), Vec::new());
    loop {
        tokio::select! {
            event = poll_fn(|cx| Pin::new(&mut quic).poll(cx)) => {
                if let TransportEvent::Incoming { upgrade, .. } = event {
                    shaking.push(upgrade);
                }
            }
            Some(shaken) = shaking.next() => connected.extend(shaken.ok()),
        }
    }
}

/// A connection to `host` in the name of `identity`.
async fn connect(endpoint: &Endpoint, identity: &Identity, host: &Host) -> Connection {
    let tls = PeerTls::new(identity.keypair()).unwrap();
    let tls = tls.client(CONTROL_ALPN, host.identity.peer_id()).unwrap();
    let config = ClientConfig::new(Arc::new(tls));
    let connecting = endpoint.connect_with(config, host.at, SERVER_NAME).unwrap();
    timeout(PATIENCE, connecting).await.unwrap().unwrap()
}

#[tokio::test]
async fn first_packets_of_strangers_leave_nothing_and_a_member_comes_in_beside_them() {
    let member = Identity::ephemeral();
    let own = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    let from = own.local_addr().unwrap();
    let views = watch::Sender::new(view(&[facts(&member, from, from)]));
    let host = Host::start(views.subscribe());
    let packets = first_packets(2 * NEIGHBOURS, CONTROL_ALPN).await;

    // Another address of this machine, which no record names.
    let stranger = Socket::bind("127.0.0.2:0").await.unwrap();
    for packet in &packets {
        assert!(is_asked_to_prove(&stranger, packet, host.at).await);
    }
    assert_eq!(host.endpoint.open_connections(), 0);

    let neighbour = Socket::bind("127.0.0.1:0").await.unwrap();
    let mut begun = 0;
    for packet in &packets {
        begun += usize::from(!is_asked_to_prove(&neighbour, packet, host.at).await);
    }
    assert_eq!(begun, NEIGHBOURS / 2);
    assert_eq!(host.endpoint.open_connections(), NEIGHBOURS / 2);

    let connection = connect(&own, &member, &host).await;
    assert!(connection.close_reason().is_none());
}

#[tokio::test]
async fn an_identity_that_no_record_names_is_refused_in_the_handshake() {
    let views = watch::Sender::new(view(&[]));
    let host = Host::start(views.subscribe());
    let endpoint = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    // It proves its address, is heard, and believes itself connected for a round trip.
    let connection = connect(&endpoint, &Identity::ephemeral(), &host).await;
    let closed = timeout(PATIENCE, connection.closed()).await.unwrap();
    assert!(
        matches!(closed, quinn::ConnectionError::ConnectionClosed(_)),
        "{closed}"
    );
    until("nothing to be kept of it", || {
        host.endpoint.open_connections() == 0
    })
    .await;
}
