//! What a stream plane makes of peers that are not ours.

use std::collections::BTreeSet;
use std::net::UdpSocket;

use quinn::{ClientConfig, Connection, ServerConfig};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::mesh::codec::encode_frame;
use crate::mesh::door::NEIGHBOURS;
use crate::mesh::messages::MAX_SUBMIT_BYTES;
use crate::mesh::testing::{first_packets, is_asked_to_prove};

/// A connection to `host` in the name of `identity`, greeted or refused.
async fn connect(identity: &Identity, host: &Peer, alpn: &[u8]) -> Result<Connection, String> {
    connect_from([127, 0, 0, 1], identity, host, alpn).await
}

async fn connect_from(
    from: [u8; 4],
    identity: &Identity,
    host: &Peer,
    alpn: &[u8],
) -> Result<Connection, String> {
    let tls = PeerTls::new(identity.keypair()).unwrap();
    let tls = tls.client(alpn, host.identity.peer_id()).unwrap();
    let endpoint = Endpoint::client((from, 0).into()).unwrap();
    let config = ClientConfig::new(Arc::new(tls));
    let to = host.node.local_addr().unwrap();
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let connecting = endpoint.connect_with(config, to, "shoal").unwrap();
    let connection = connecting.await.map_err(|error| text(&error))?;
    let mut greeting = connection
        .accept_uni()
        .await
        .map_err(|error| text(&error))?;
    let greeting = greeting
        .read_to_end(16)
        .await
        .map_err(|error| text(&error))?;
    assert_eq!(greeting, GREETING);
    Ok(connection)
}

#[tokio::test]
async fn submissions_that_cannot_be_read_end_their_stream_and_nothing_else() {
    let (home, host) = pair();
    let connection = connect(&home.identity, &host, STREAM_ALPN).await.unwrap();
    let whole = encode_frame(&submit(home.id(), 1), MAX_SUBMIT_BYTES).unwrap();
    let mut lying = whole.clone();
    lying[..4].copy_from_slice(&(MAX_SUBMIT_BYTES as u32 + 1).to_be_bytes());
    let mut junk = whole.clone();
    junk[4..].fill(0xFF);
    let truncated = whole[..whole.len() - 1].to_vec();
    for bytes in [lying, junk, truncated, Vec::new()] {
        let (mut send, mut recv) = connection.open_bi().await.unwrap();
        // The host may have stopped the stream already.
        drop(send.write_all(&bytes).await);
        drop(send.finish());
        let answer = timeout(PATIENCE, recv.read_to_end(1 << 20)).await.unwrap();
        assert!(answer.is_err() || answer.is_ok_and(|bytes| bytes.is_empty()));
    }
    assert_eq!(*host.handler.ended.borrow(), 0);
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(&whole).await.unwrap();
    send.finish().unwrap();
    assert!(!recv.read_to_end(1 << 20).await.unwrap().is_empty());
    assert_eq!(*host.handler.ended.borrow(), 1);
}

#[tokio::test]
async fn strangers_and_other_protocols_get_no_greeting() {
    let (home, host) = pair();
    let stranger = connect(&Identity::ephemeral(), &host, STREAM_ALPN).await;
    assert!(stranger.is_err());
    let other = connect(&home.identity, &host, b"shoal/other/1").await;
    assert!(other.is_err());
    // One who left is refused although it was a member a moment ago.
    let member = connect(&home.identity, &host, STREAM_ALPN).await.unwrap();
    host.view.send_replace(view(&[host.facts()]));
    let expelled = timeout(PATIENCE, member.closed()).await.unwrap();
    assert!(
        expelled.to_string().contains("not in the mesh"),
        "{expelled}"
    );
    assert!(connect(&home.identity, &host, STREAM_ALPN).await.is_err());
}

#[tokio::test]
async fn first_packets_of_strangers_leave_nothing_and_nodes_come_in_beside_them() {
    let (home, host) = pair();
    let to = host.node.local_addr().unwrap();
    let packets = first_packets(2 * NEIGHBOURS, STREAM_ALPN).await;

    // Another address of this machine, which no record names.
    let stranger = tokio::net::UdpSocket::bind("127.0.0.2:0").await.unwrap();
    for packet in &packets {
        assert!(is_asked_to_prove(&stranger, packet, to).await);
    }
    assert_eq!(host.node.endpoint.open_connections(), 0);

    let neighbour = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut begun = 0;
    for packet in &packets {
        begun += usize::from(!is_asked_to_prove(&neighbour, packet, to).await);
    }
    assert_eq!(begun, NEIGHBOURS / 2);
    assert_eq!(host.node.endpoint.open_connections(), NEIGHBOURS / 2);

    // The node dials from the port that its record names.
    let mut frames = home.open(&host, 1).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
}

#[tokio::test]
async fn whoever_proves_an_address_takes_the_places_of_its_kind_only() {
    let (home, host) = pair();
    // From an address that no record names, then from the host of a node.
    crowd_out([127, 0, 0, 2], &host).await;
    connect(&home.identity, &host, STREAM_ALPN).await.unwrap();
    crowd_out([127, 0, 0, 1], &host).await;
    // The node dials from the port that its record names.
    let mut frames = home.open(&host, 1).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
}

/// Takes the places of an address: each stranger is turned away for who it is, until no place is left.
async fn crowd_out(from: [u8; 4], host: &Peer) {
    let mut error = String::new();
    for _ in 0..1_000 {
        let stranger = Identity::ephemeral();
        let refused = connect_from(from, &stranger, host, STREAM_ALPN).await;
        error = refused.unwrap_err();
        if error.contains("refused to accept") {
            return;
        }
    }
    panic!("nobody was refused at the door: {error}");
}

#[tokio::test]
async fn a_host_that_greets_in_another_version_is_unreachable() {
    let home = Peer::start(Counter::default());
    let other = Identity::ephemeral();
    let tls = PeerTls::new(other.keypair()).unwrap();
    let tls = tls.server(&[STREAM_ALPN], Arc::new(|_| true)).unwrap();
    let config = ServerConfig::with_crypto(Arc::new(tls));
    let endpoint = Endpoint::server(config, ([127, 0, 0, 1], 0).into()).unwrap();
    let at = endpoint.local_addr().unwrap();
    home.view
        .send_replace(view(&[home.facts(), facts(&other, at, at)]));
    let stop = CancellationToken::new();
    let greet = async {
        let connection = endpoint.accept().await.unwrap().await.unwrap();
        let mut greeting = connection.open_uni().await.unwrap();
        let version = PROTOCOL + 1;
        greeting.write_all(&version.to_be_bytes()).await.unwrap();
        stop.cancelled().await;
    };
    let opening = async {
        let refused = home.node.open(other.node_id(), submit(home.id(), 1)).await;
        stop.cancel();
        refused
    };
    let (refused, ()) = tokio::join!(opening, greet);
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains(&format!("protocol is {}", PROTOCOL + 1)),
        "{text}"
    );
}

#[tokio::test]
async fn all_who_wait_for_a_silent_host_share_one_dial() {
    let home = Peer::start(Counter::default());
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    silent.set_nonblocking(true).unwrap();
    let at = silent.local_addr().unwrap();
    let host = Identity::ephemeral();
    home.view
        .send_replace(view(&[home.facts(), facts(&host, at, at)]));
    let opens = (0..50).map(|_| home.node.open(host.node_id(), submit(home.id(), 1)));
    for refused in futures::future::join_all(opens).await {
        assert!(
            matches!(refused, Err(StreamError::Unreachable { .. })),
            "{refused:?}"
        );
    }
    // Every first packet of one connection names the same id: its length at byte 5, then itself.
    let mut connections = BTreeSet::new();
    let mut packet = [0; 2_048];
    while let Ok(length) = silent.recv(&mut packet) {
        assert!(length >= 1_200, "{length}");
        let id = usize::from(packet[5]);
        connections.insert(packet[6..6 + id].to_vec());
    }
    assert_eq!(connections.len(), 1);
}
