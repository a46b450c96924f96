//! The seal and the tap together, between two sockets of an in-memory network.

use std::future::ready;

use super::*;
use crate::keys::{ClusterKey, KeyRing};
use crate::memory::{MemoryIo, MemoryNet};
use crate::seal::{Sealer, SenderId};

struct End {
    io: Arc<MemoryIo>,
    address: SocketAddr,
    counters: Arc<Counters>,
    framing: Arc<Mutex<Framing>>,
    socket: Box<dyn Socket>,
}

async fn end(net: &MemoryNet, id: u8) -> End {
    let io = net.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let ring = KeyRing::new(ClusterKey::from_bytes([9; 32]));
    let sealer = Sealer::new(&ring, SenderId([id; 8])).unwrap();
    let framing = Arc::new(Mutex::new(Framing::Sealed(Box::new(sealer))));
    let counters = Arc::new(Counters::default());
    let transport = SealedTransport {
        io: io.clone(),
        framing: framing.clone(),
        counters: counters.clone(),
    };
    let address = io.local_addr().unwrap();
    End {
        io,
        address,
        counters,
        framing,
        socket: transport.open(address).await.unwrap(),
    }
}

fn hello() -> ChitchatEnvelope {
    ChitchatEnvelope {
        version: ProtocolVersion::V1,
        message: ChitchatMessage::BadCluster,
    }
}

#[tokio::test]
async fn a_message_arrives_with_the_address_of_its_sender() {
    let net = MemoryNet::new(1);
    let (mut alice, mut bob) = (end(&net, 1).await, end(&net, 2).await);
    for _ in 0..200 {
        let sent = alice.socket.send(bob.address, hello()).await.unwrap();
        assert!(sent.num_bytes_sent > 0);
        let received = bob.socket.recv().await.unwrap();
        assert_eq!(received.from_addr, alice.address);
        assert_eq!(received.envelope, hello());
    }
    let (out, arrived) = (alice.counters.snapshot(), bob.counters.snapshot());
    assert_eq!((out.datagrams_out, arrived.datagrams_in), (200, 200));
    assert_eq!(out.bytes_out, arrived.bytes_in);
}

#[tokio::test]
async fn a_dropped_receive_loses_no_message() {
    let net = MemoryNet::new(1);
    let (mut alice, mut bob) = (end(&net, 1).await, end(&net, 2).await);
    for _ in 0..50 {
        alice.socket.send(bob.address, hello()).await.unwrap();
    }
    let mut received = 0;
    while received < 50 {
        // Polled a single time and dropped, wherever it stands.
        tokio::select! {
            biased;
            outcome = bob.socket.recv() => {
                assert_eq!(outcome.unwrap().from_addr, alice.address);
                received += 1;
            }
            () = ready(()) => tokio::task::yield_now().await,
        }
    }
}

#[tokio::test]
async fn garbage_from_strangers_is_counted_and_the_next_message_still_arrives() {
    let net = MemoryNet::new(1);
    let (mut alice, mut bob) = (end(&net, 1).await, end(&net, 2).await);
    let stranger = net.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    for garbage in [&b""[..], b"\x01", &[1; 100], &[0x50; 100], b"\x02open"] {
        stranger.send_to(garbage, bob.address).await.unwrap();
    }
    alice.socket.send(bob.address, hello()).await.unwrap();
    let received = bob.socket.recv().await.unwrap();
    assert_eq!(received.from_addr, alice.address);
    let stats = bob.counters.snapshot();
    assert_eq!(stats.datagrams_in, 6);
    assert_eq!(stats.dropped_truncated, 2);
    assert_eq!(stats.dropped_wrong_key, 1);
    assert_eq!(stats.dropped_version, 1);
    assert_eq!(stats.dropped_keyless, 1);
}

#[tokio::test]
async fn a_sealed_message_that_the_codec_refuses_does_not_stop_the_socket() {
    let net = MemoryNet::new(1);
    let (mut alice, mut bob) = (end(&net, 1).await, end(&net, 2).await);
    let magic = alice_magic(&mut alice).await;
    for junk in [
        &b"junk"[..],
        &magic,
        &[&magic[..], &[1, 0, 9, 9, 9]].concat(),
    ] {
        let datagram = alice
            .framing
            .lock()
            .unwrap()
            .seal(unix_time(), junk)
            .unwrap();
        alice.io.send_to(&datagram, bob.address).await.unwrap();
    }
    alice.socket.send(bob.address, hello()).await.unwrap();
    assert_eq!(bob.socket.recv().await.unwrap().envelope, hello());
    assert_eq!(bob.counters.snapshot().dropped_malformed, 3);
}

/// The first bytes of every message of the library, read off one that Alice sent to herself.
async fn alice_magic(alice: &mut End) -> [u8; 2] {
    alice.socket.send(alice.address, hello()).await.unwrap();
    let (datagram, _) = alice.io.recv_from().await.unwrap();
    let message = alice.framing.lock().unwrap().open(unix_time(), &datagram);
    *message.unwrap().first_chunk().unwrap()
}
