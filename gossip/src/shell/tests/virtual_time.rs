//! The promises of the state plane, at the default settings, in virtual time: exact protocol timing,
//! whatever else the machine does. What this cannot prove: that a busy host keeps up.

use std::collections::BTreeSet;

use futures::future::join_all;
use tokio::task::JoinSet;
use tokio::time::interval;

use super::super::*;
use super::mesh::*;
use crate::testing::facts;
use crate::{Readiness, SeedState};

/// Each node publishes four times a second, as the node's load loop does.
fn keep_publishing(nodes: &[Arc<Node>]) -> JoinSet<()> {
    let mut publishers = JoinSet::new();
    for node in nodes {
        let node = Arc::clone(node);
        publishers.spawn(async move {
            let mut ticks = interval(INTERVAL);
            loop {
                ticks.tick().await;
                node.publish();
            }
        });
    }
    publishers
}

async fn all_miss(others: &[Node], gone: NodeId) {
    join_all(others.iter().map(|node| node.misses(gone))).await;
}

#[tokio::test(start_paused = true)]
async fn of_16_nodes_99_in_100_know_an_update_within_500_ms() {
    let mesh = Mesh::new();
    let nodes: Vec<_> = mesh.settled(16).await.into_iter().map(Arc::new).collect();
    let _publishers = keep_publishing(&nodes);
    tokio::time::sleep(INTERVAL * 8).await;
    let mut took = Vec::new();
    for probe in 0..64 {
        // Probes fall at ever other moments of the interval.
        tokio::time::sleep(Duration::from_millis(37 + 61 * probe as u64 % 250)).await;
        let publisher = &nodes[probe % nodes.len()];
        let seq = publisher.publish();
        let of = publisher.facts.node;
        let others = nodes.iter().filter(|node| node.facts.node != of);
        took.extend(join_all(others.map(|node| mesh.time(node.sees_load(of, seq)))).await);
    }
    took.sort_unstable();
    let (p50, p99) = (took[took.len() / 2], took[took.len() * 99 / 100]);
    assert!(
        p99 <= Duration::from_millis(500),
        "p50 {p50:?}, p99 {p99:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_change_of_readiness_does_not_wait_for_the_interval() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(2).await;
    let seq = nodes[0].publish();
    nodes[1].sees_load(name(1), seq).await;
    nodes[0].publish_as(Readiness::Draining);
    nodes[1]
        .view("draining", |view| {
            let load = view.row(name(1)).and_then(|row| row.load);
            load.is_some_and(|(load, _)| load.readiness == Readiness::Draining)
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn of_many_loads_in_one_interval_the_last_one_arrives() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(2).await;
    for _ in 0..99 {
        nodes[0].publish();
    }
    let last = nodes[0].publish();
    nodes[1].sees_load(name(1), last).await;
    let received = nodes[1].gossip.view().borrow().row(name(1)).unwrap().load;
    assert_eq!(received.unwrap().0.seq, last);
}

#[tokio::test(start_paused = true)]
async fn a_killed_node_leaves_every_view_within_3_s() {
    let mesh = Mesh::new();
    let mut nodes = mesh.settled(16).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let victim = nodes.remove(7);
    let gone = victim.facts.node;
    drop(victim);
    let took = mesh.time(all_miss(&nodes, gone)).await;
    assert!(took <= Duration::from_secs(3), "{took:?}");
    for node in &nodes {
        node.sees(15).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_goodbye_leaves_every_view_within_500_ms() {
    let mesh = Mesh::new();
    let mut nodes = mesh.settled(16).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let leaving = nodes.remove(7);
    let gone = leaving.facts.node;
    let began = mesh.now();
    let (took, ()) = tokio::join!(mesh.time(all_miss(&nodes, gone)), leaving.gossip.leave());
    assert!(took <= Duration::from_millis(500), "{took:?}");
    assert!(mesh.now().since(began) <= Duration::from_secs(1));
    assert_eq!(*leaving.gossip.health().borrow(), Health::Left);
    leaving.gossip.shutdown().await;
    // It does not come back while its silence turns into a death.
    tokio::time::sleep(Duration::from_secs(5)).await;
    for node in &nodes {
        node.sees(15).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_restarted_node_replaces_its_past_at_once() {
    let mesh = Mesh::new();
    let mut nodes = mesh.settled(8).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    drop(nodes.remove(7));
    tokio::task::yield_now().await;
    let began = mesh.now();
    let again = mesh.node(8, 2_000);
    again.publish();
    join_all(nodes.iter().map(|node| node.sees_life(name(8), 2_000))).await;
    let took = mesh.now().since(began);
    assert!(took <= Duration::from_millis(1_500), "{took:?}");
    // The death of the past does not take the present with it.
    tokio::time::sleep(Duration::from_secs(10)).await;
    for node in nodes.iter().chain([&again]) {
        node.sees(8).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_starts_with_all_seeds_down_keeps_trying_and_joins_when_one_comes() {
    let mesh = Mesh::new();
    let early = mesh.node(9, 1_000);
    early.publish();
    early
        .seeds(
            "patience",
            |state| matches!(state, SeedState::Alone { tried, .. } if *tried > 100),
        )
        .await;
    assert_eq!(early.gossip.view().borrow().rows().len(), 1);
    let seed = mesh.node(2, 1_000);
    seed.publish();
    early.sees(2).await;
    seed.sees(2).await;
    early
        .seeds("company", |state| *state == SeedState::Joined { peers: 1 })
        .await;
}

#[tokio::test(start_paused = true)]
async fn two_halves_find_each_other_after_a_long_cut_without_any_seed() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(6).await;
    let cut_all = |cut| {
        for left in 1..=3 {
            for right in 4..=6 {
                mesh.net.set_cut(address(left), address(right), cut);
                mesh.net.set_cut(address(right), address(left), cut);
            }
        }
    };
    cut_all(true);
    for node in &nodes {
        node.sees(3).await;
    }
    // Twice the time that the dead are remembered by the library.
    tokio::time::sleep(Duration::from_secs(240)).await;
    cut_all(false);
    for node in &nodes {
        node.sees(6).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_lossy_network_makes_no_deaths() {
    let mesh = Mesh::new();
    let nodes: Vec<_> = mesh.settled(8).await.into_iter().map(Arc::new).collect();
    mesh.net.set_loss(0.2);
    let _publishers = keep_publishing(&nodes);
    let mut view = nodes[0].gossip.view();
    let watched = async {
        loop {
            view.changed().await.unwrap();
            assert_eq!(view.borrow().rows().len(), 8);
        }
    };
    let ended = timeout(Duration::from_secs(60), watched).await;
    assert!(ended.is_err(), "only the time runs out");
}

#[tokio::test(start_paused = true)]
async fn facts_can_change_and_a_silent_load_loop_ages() {
    let mesh = Mesh::new();
    let nodes = mesh.settled(2).await;
    let mut changed = nodes[0].facts.clone();
    changed.models.clear();
    nodes[0].gossip.update_facts(changed).unwrap();
    nodes[1]
        .view("new facts", |view| {
            view.row(name(1))
                .is_some_and(|row| row.facts.models.is_empty())
        })
        .await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let view = nodes[1].gossip.view().borrow().clone();
    let age = view.row(name(1)).unwrap().age(mesh.now()).unwrap();
    assert!(age >= Duration::from_secs(10), "{age:?}");
    let stranger = facts(5, 1_000);
    assert!(nodes[0].gossip.update_facts(stranger).is_err());
}

#[tokio::test(start_paused = true)]
async fn an_early_load_is_in_the_first_record() {
    let mesh = Mesh::new();
    let one = mesh.node(1, 1_000);
    let seq = one.publish();
    let two = mesh.node(2, 1_000);
    two.publish();
    two.sees_load(name(1), seq).await;
    let names: BTreeSet<_> = two
        .gossip
        .view()
        .borrow()
        .rows()
        .iter()
        .map(|r| r.node())
        .collect();
    assert_eq!(names, BTreeSet::from([name(1), name(2)]));
}
