use std::time::Duration;

use quinn::{Endpoint, TokioRuntime};
use tokio::time::timeout;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// A socket with an endpoint that drives it.
fn driven() -> (SharedSocket, Endpoint) {
    let here = Handle::current();
    let socket = SharedSocket::bind(([127, 0, 0, 1], 0).into(), &here).unwrap();
    let config = endpoint_config(socket.quic.as_ref()).unwrap();
    let quic = Arc::clone(&socket.quic);
    let endpoint =
        Endpoint::new_with_abstract_socket(config, None, quic, Arc::new(TokioRuntime)).unwrap();
    (socket, endpoint)
}

#[tokio::test]
async fn the_longest_datagram_arrives_whole() {
    let (near, _near) = driven();
    let (far, _far) = driven();
    let to = far.local_addr().unwrap();
    for length in [1, 1_472, 1_473, 9_000, MAX_DATAGRAM] {
        let sent: Vec<u8> = (0..length).map(|at| (at % 64) as u8).collect();
        near.gossip.send_to(&sent, to).await.unwrap();
        let received = timeout(PATIENCE, far.gossip.recv_from()).await;
        let (got, from) = received.expect("a datagram").unwrap();
        assert!(got == sent, "{length} bytes became {}", got.len());
        assert_eq!(from, near.local_addr().unwrap());
    }
}

#[tokio::test]
async fn gossip_that_nobody_takes_is_dropped_and_counted() {
    let (near, _near) = driven();
    let (far, _far) = driven();
    let to = far.local_addr().unwrap();
    let waited = timeout(PATIENCE, async {
        while far.gossip.dropped() == 0 {
            near.gossip.send_to(&[1; 64], to).await.unwrap();
            tokio::task::yield_now().await;
        }
    });
    waited.await.expect("a full queue");
    for _ in 0..GOSSIP_WAITING {
        far.gossip.recv_from().await.unwrap();
    }
}

#[tokio::test]
async fn a_port_in_use_is_an_error() {
    let (taken, _driver) = driven();
    let here = Handle::current();
    let again = SharedSocket::bind(taken.local_addr().unwrap(), &here);
    assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AddrInUse);
}

#[tokio::test]
async fn messages_that_arrived_as_one_are_told_apart() {
    let here = Handle::current();
    let inner = {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let _runtime = here.enter();
        TokioRuntime.wrap_udp_socket(socket).unwrap()
    };
    let (outbox, mut inbox) = mpsc::channel(8);
    let socket = QuicSocket {
        inner,
        outbox,
        dropped: Arc::default(),
    };
    // Gossip, QUIC, gossip, and a last QUIC packet that is shorter, as offload leaves it.
    let mut buffer = [1, 10, 10, 0x41, 20, 20, 2, 30, 30, 0xC0, 40];
    let meta = RecvMeta {
        len: buffer.len(),
        stride: 3,
        ..RecvMeta::default()
    };
    let kept = socket.take_gossip(&mut buffer, &meta);
    assert_eq!(buffer[..kept], [0x41, 20, 20, 0xC0, 40]);
    assert_eq!(inbox.recv().await.unwrap().0[..], [1, 10, 10]);
    assert_eq!(inbox.recv().await.unwrap().0[..], [2, 30, 30]);
    assert!(inbox.try_recv().is_err());
}

#[tokio::test]
async fn garbage_of_either_kind_leaves_the_socket_working() {
    let (near, _near) = driven();
    let (far, _far) = driven();
    let to = far.local_addr().unwrap();
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(&[], to).unwrap();
    for length in 1..300usize {
        let garbage: Vec<u8> = (0..length)
            .map(|at| (at * length * 31) as u8 | 0x40)
            .collect();
        stranger.send_to(&garbage, to).unwrap();
    }
    near.gossip.send_to(&[7], to).await.unwrap();
    let received = timeout(PATIENCE, far.gossip.recv_from()).await;
    assert_eq!(received.expect("a datagram").unwrap().0[..], [7]);
}

#[tokio::test]
async fn a_batch_longer_than_a_datagram_may_be_arrives_all_the_same() {
    let socket = SharedSocket::bind(([127, 0, 0, 1], 0).into(), &Handle::current()).unwrap();
    let far = UdpSocket::bind("127.0.0.1:0").unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    let contents = vec![QUIC_BIT | 5; 10 * usize::from(BULK_MTU)];
    let sending = async {
        let batch = Transmit {
            destination: far.local_addr().unwrap(),
            ecn: None,
            contents: &contents,
            segment_size: Some(BULK_MTU.into()),
            src_ip: None,
        };
        while let Err(error) = socket.quic.try_send(&batch) {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, sending).await.expect("room to send");
    let mut buffer = vec![0; MAX_DATAGRAM];
    for _ in 0..10 {
        let length = far.recv(&mut buffer).unwrap();
        assert_eq!(length, usize::from(BULK_MTU));
    }
}
