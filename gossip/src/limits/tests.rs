//! The largest mesh, measured: its digest must fit one datagram.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use chitchat::{
    ChitchatConfig, ChitchatId, FailureDetectorConfig, ProtocolVersion, spawn_chitchat,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::io::DatagramIo;
use crate::keys::{ClusterKey, KeyRing};
use crate::memory::MemoryNet;
use crate::seal::{Framing, MAX_SEALED_MESSAGE, SEAL_OVERHEAD, Sealer, SenderId};
use crate::stats::Counters;
use crate::transport::SealedTransport;
use crate::types::NodeId;

fn framing(id: u8) -> Framing {
    let ring = KeyRing::new(ClusterKey::from_bytes([9; 32]));
    Framing::Sealed(Box::new(Sealer::new(&ring, SenderId([id; 8])).unwrap()))
}

#[derive(Clone, Copy)]
enum Family {
    V4,
    V6,
}

/// A node as random as nodes are: any name, started within ninety days, anywhere in a /16, or in a
/// /64 with an interface id drawn at random.
fn random_node(family: Family, rng: &mut StdRng) -> ChitchatId {
    let address: SocketAddr = match family {
        Family::V4 => ([10, 0, rng.random(), rng.random()], 7_401).into(),
        Family::V6 => {
            let network = 0xfd00_u128 << 112;
            let host = u128::from(rng.random::<u64>());
            (Ipv6Addr::from(network | host), 7_401).into()
        }
    };
    let started = 1_800_000_000_000 + rng.random_range(0..90 * 86_400_000_u64);
    ChitchatId::new(NodeId(rng.random()).to_string(), started, address)
}

/// A first message of the gossip in its uncompressed encoding, naming `nodes` with random heartbeats
/// of up to a month at 40 a second. Heartbeats enter a node only this way.
fn introduction(nodes: &[ChitchatId], rng: &mut StdRng) -> Vec<u8> {
    let mut message = vec![0x53, 0xb0, 0, 0];
    message.extend((nodes.len() as u16).to_le_bytes());
    for node in nodes {
        message.extend((node.node_id.len() as u16).to_le_bytes());
        message.extend(node.node_id.as_bytes());
        message.extend(node.generation_id.to_le_bytes());
        match node.gossip_advertise_addr.ip() {
            IpAddr::V4(ip) => {
                message.push(4);
                message.extend(ip.octets());
            }
            IpAddr::V6(ip) => {
                message.push(6);
                message.extend(ip.octets());
            }
        }
        message.extend(node.gossip_advertise_addr.port().to_le_bytes());
        message.extend(rng.random_range(1..100_000_000_u64).to_le_bytes());
        message.extend([0; 16]);
    }
    message.extend([1, 0, b'c']);
    message
}

/// Bytes of a message that names `count` nodes, before sealing; `None` if it was never sent.
async fn digest_bytes(family: Family, count: usize) -> Option<usize> {
    let mut rng = StdRng::seed_from_u64(count as u64);
    let net = MemoryNet::new(1);
    let bind = |port| net.bind(([127, 0, 0, 1], port).into()).unwrap();
    let (io, peer) = (bind(1), bind(2));
    let transport = SealedTransport {
        io: io.clone(),
        framing: Arc::new(Mutex::new(framing(1))),
        counters: Arc::new(Counters::default()),
    };
    let address = io.local_addr().unwrap();
    let config = ChitchatConfig {
        chitchat_id: ChitchatId::new("self", 1, address),
        cluster_id: "c".to_owned(),
        gossip_interval: Duration::from_secs(100_000),
        listen_addr: address,
        seed_nodes: Vec::new(),
        failure_detector_config: FailureDetectorConfig::default(),
        marked_for_deletion_grace_period: Duration::from_secs(60),
        catchup_callback: None,
        extra_liveness_predicate: None,
        protocol_version: ProtocolVersion::V1,
    };
    let library = spawn_chitchat(config, Vec::new(), &transport)
        .await
        .unwrap();
    let nodes: Vec<_> = (1..count).map(|_| random_node(family, &mut rng)).collect();
    let mut sealer = framing(2);
    for some in nodes.chunks(500) {
        let message = introduction(some, &mut rng);
        let datagram = sealer.seal(crate::unix_time(), &message).unwrap();
        peer.send_to(&datagram, address).await.unwrap();
    }
    while library.with_chitchat(|c| c.node_states().len()).await < count {
        tokio::task::yield_now().await;
    }
    // Versions of up to a month at four loads a second.
    library
        .with_chitchat(|chitchat| {
            for node in &nodes {
                let version = rng.random_range(2..10_000_000);
                chitchat.reset_node_state_if_update(node, std::iter::empty(), version, 0);
            }
        })
        .await;
    let (probe, sink) = (bind(3), address.ip());
    library.gossip(SocketAddr::new(sink, 3)).unwrap();
    let arrived = tokio::time::timeout(Duration::from_secs(5), probe.recv_from()).await;
    arrived
        .ok()
        .map(|arrived| arrived.unwrap().0.len() - SEAL_OVERHEAD)
}

#[tokio::test]
async fn the_digest_of_the_largest_mesh_fits_a_datagram_with_room_for_news() {
    let room = MAX_SEALED_MESSAGE / 6;
    for (family, count) in [(Family::V4, MAX_NODES), (Family::V6, MAX_NODES_IPV6)] {
        let bytes = digest_bytes(family, count).await;
        let fits = bytes.is_some_and(|bytes| bytes + room <= MAX_SEALED_MESSAGE);
        assert!(fits, "{count} nodes: {bytes:?} of {MAX_SEALED_MESSAGE}");
    }
}
