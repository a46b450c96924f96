//! Strangers, impostors, full meshes and a library that fails.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;

use super::super::*;
use super::mesh::*;
use crate::keys::{ClusterKey, KeyRing};
use crate::testing::facts;
use crate::{MemoryIo, SeedState};

#[tokio::test(start_paused = true)]
async fn seeds_that_answer_garbage_do_no_harm() {
    let mesh = Mesh::new();
    let garbage = mesh.net.bind(address(1)).unwrap();
    let node = mesh.node(9, 1_000);
    node.publish();
    for round in 0..50_usize {
        let (datagram, from) = garbage.recv_from().await.unwrap();
        let mut bytes = datagram.to_vec();
        match round % 4 {
            0 => {}
            1 => bytes.truncate(round),
            2 => bytes.iter_mut().for_each(|byte| *byte ^= 0x15),
            _ => bytes = vec![b'G'; 1_400],
        }
        garbage.send_to(&bytes, from).await.unwrap();
    }
    let seed = mesh.node(2, 1_000);
    seed.publish();
    node.sees(2).await;
    let stats = node.gossip.stats();
    assert!(
        stats.dropped_wrong_key + stats.dropped_truncated > 0,
        "{stats:?}"
    );
    assert!(stats.dropped_version > 0, "{stats:?}");
    assert_eq!(stats.restarts, 0);
}

#[tokio::test(start_paused = true)]
async fn nodes_with_another_key_another_label_or_no_key_stay_outside() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(2).await;
    let mut other_key = config(4);
    other_key.keys = Some(KeyRing::new(ClusterKey::from_bytes([8; 32])));
    let mut other_label = config(5);
    other_label.cluster = "other".to_owned();
    let mut no_key = config(6);
    no_key.keys = None;
    let outside = [(4, other_key), (5, other_label), (6, no_key)]
        .map(|(node, config)| mesh.node_with(config, facts(node, 1_000)));
    for node in &outside {
        node.publish();
        node.seeds(
            "tries",
            |state| matches!(state, SeedState::Alone { tried, .. } if *tried > 100),
        )
        .await;
    }
    assert_eq!(nodes[0].gossip.view().borrow().rows().len(), 2);
    let stats = nodes[0].gossip.stats();
    assert!(
        stats.dropped_wrong_key > 0 && stats.dropped_keyless > 0,
        "{stats:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn of_two_processes_with_one_identity_the_earlier_one_is_told_to_stop() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(4).await;
    let elsewhere = config(40);
    let later = mesh.node_with(elsewhere, facts(4, 2_000));
    later.publish();
    nodes[3]
        .health("displacement", |health| {
            *health == Health::Displaced { by: address(40) }
        })
        .await;
    assert_eq!(*later.gossip.health().borrow(), Health::Running);
    for node in &nodes[..3] {
        node.sees_life(name(4), 2_000).await;
    }
    // The displaced one still knows itself, and nobody else.
    assert_eq!(nodes[3].gossip.view().borrow().rows().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_clock_ran_back_outbids_its_past() {
    let mesh = Mesh::new();
    let mut nodes = mesh.settled(4).await;
    drop(nodes.remove(3));
    tokio::task::yield_now().await;
    let again = mesh.node(4, 10);
    again.publish();
    join_all(nodes.iter().map(|node| node.sees_life(name(4), 10))).await;
    again.sees(4).await;
    assert_eq!(again.gossip.stats().restarts, 1);
    assert_eq!(*again.gossip.health().borrow(), Health::Running);
}

#[tokio::test(start_paused = true)]
async fn the_node_too_many_says_goodbye_and_the_others_stay() {
    let mesh = Mesh::new();
    let node = |node: u16| {
        let mut config = config(node);
        config.max_nodes = 4;
        let node = mesh.node_with(config, facts(node, 1_000 + u64::from(node)));
        node.publish();
        node
    };
    let nodes: Vec<_> = (1..=4).map(node).collect();
    for node in &nodes {
        node.sees(4).await;
    }
    let late = node(5);
    late.health("crowd", |health| {
        *health == Health::Crowded { known: 5, limit: 4 }
    })
    .await;
    for node in &nodes {
        node.sees(4).await;
        assert_eq!(*node.gossip.health().borrow(), Health::Running);
    }
}

/// A socket that can be broken.
#[derive(Debug)]
struct Fragile {
    inner: Arc<MemoryIo>,
    broken: AtomicBool,
    forever: bool,
}

#[async_trait]
impl DatagramIo for Fragile {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    async fn send_to(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        self.inner.send_to(datagram, to).await
    }

    async fn recv_from(&self) -> io::Result<(Bytes, SocketAddr)> {
        let arrived = self.inner.recv_from().await?;
        if self.broken.load(Ordering::Relaxed) {
            self.broken.store(self.forever, Ordering::Relaxed);
            return Err(io::Error::other("broken by the test"));
        }
        Ok(arrived)
    }
}

fn fragile(mesh: &Mesh, node: u16, forever: bool) -> (Arc<Fragile>, Node) {
    let io = Arc::new(Fragile {
        inner: mesh.net.bind(address(node)).unwrap(),
        broken: AtomicBool::new(false),
        forever,
    });
    let node = mesh.node_over(config(node), facts(node, 1_000), io.clone());
    node.publish();
    (io, node)
}

#[tokio::test(start_paused = true)]
async fn gossip_that_fails_once_is_back_before_anybody_sees_a_death_of_its_load() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(3).await;
    let (io, node) = fragile(&mesh, 4, false);
    nodes[0].sees(4).await;
    io.broken.store(true, Ordering::Relaxed);
    node.health("restart", |health| {
        matches!(health, Health::Restarting { attempt: 1, reason } if reason.contains("broken by the test"))
    })
    .await;
    node.health("recovery", |health| *health == Health::Running)
        .await;
    let seq = node.publish();
    join_all(nodes.iter().map(|other| other.sees_load(name(4), seq))).await;
    node.sees(4).await;
    assert_eq!(node.gossip.stats().restarts, 1);
}

#[tokio::test(start_paused = true)]
async fn gossip_that_fails_for_good_says_so_and_the_node_still_knows_itself() {
    let mesh = Mesh::new();
    let _nodes = mesh.settled(2).await;
    let (io, node) = fragile(&mesh, 4, true);
    node.sees(3).await;
    io.broken.store(true, Ordering::Relaxed);
    node.health("failure", |health| matches!(health, Health::Failed { .. }))
        .await;
    let seq = node.publish();
    node.sees_load(name(4), seq).await;
    assert_eq!(node.gossip.view().borrow().rows().len(), 1);
    assert_eq!(node.gossip.stats().restarts, 8);
    node.gossip.shutdown().await;
}

/// A delta about `node` in the library's own encoding, with a key of version 10 and a highest version of 5: the
/// library panics on it.
fn forged_delta(node: u16, generation: u64) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u16).to_le_bytes(), text.as_bytes()].concat();
    let SocketAddr::V4(address) = address(node) else {
        panic!("test addresses are of version 4");
    };
    let operations = [
        vec![0],
        text(&name(node).to_string()),
        generation.to_le_bytes().to_vec(),
        vec![4],
        address.ip().octets().to_vec(),
        address.port().to_le_bytes().to_vec(),
        0u64.to_le_bytes().to_vec(),
        0u64.to_le_bytes().to_vec(),
        vec![1],
        text("load"),
        text("forged"),
        u64::MAX.to_le_bytes().to_vec(),
        vec![0, 2],
        (u64::MAX - 1).to_le_bytes().to_vec(),
    ]
    .concat();
    let length = (operations.len() as u16).to_le_bytes();
    [&[0x53, 0xb0, 1, 2, 2], &length[..], &operations, &[0]].concat()
}

#[tokio::test(start_paused = true)]
async fn a_forged_delta_from_a_key_holder_costs_a_restart_and_no_more() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(3).await;
    let traitor = mesh.net.bind(address(66)).unwrap();
    let sealer = Sealer::new(&key(), SenderId([6; 8])).unwrap();
    let mut framing = Framing::Sealed(Box::new(sealer));
    let datagram = framing.seal(crate::unix_time(), &forged_delta(2, 1_000));
    traitor
        .send_to(&datagram.unwrap(), address(1))
        .await
        .unwrap();
    nodes[0]
        .health("restart", |health| {
            matches!(health, Health::Restarting { .. })
        })
        .await;
    nodes[0]
        .health("recovery", |health| *health == Health::Running)
        .await;
    let seq = nodes[0].publish();
    join_all(nodes.iter().map(|node| node.sees_load(name(1), seq))).await;
    for node in &nodes {
        node.sees(3).await;
    }
}
