//! Real sockets, threads and clocks. Waits for conditions and asserts no times.

use tokio::net::UdpSocket;

use super::super::*;
use super::mesh::*;
use crate::testing::facts;
use crate::{LoadSummary, MonotonicClock, Readiness, SeedList};

async fn bound(thread: &GossipThread) -> Arc<UdpSocket> {
    let socket = thread
        .runtime_handle()
        .spawn(UdpSocket::bind(("127.0.0.1", 0)))
        .await;
    Arc::new(socket.unwrap().unwrap())
}

#[tokio::test]
async fn nodes_on_threads_of_their_own_find_each_other_by_name_and_part() {
    let mut nodes: Vec<(GossipThread, Gossip)> = Vec::new();
    let mut seeds = SeedList::default();
    for node in 1..=3 {
        let thread = GossipThread::start().unwrap();
        let socket = bound(&thread).await;
        let address = socket.local_addr().unwrap();
        let mut config = GossipConfig::new("real", address);
        config.keys = Some(key());
        config.seeds = seeds.clone();
        config.interval = Duration::from_millis(50);
        let clock = Arc::new(MonotonicClock::start());
        let mut facts = facts(node, 1_000);
        facts.stream = address;
        let runtime = thread.runtime_handle();
        let gossip = Gossip::spawn(config, facts, socket, clock, &runtime).unwrap();
        gossip.publish(LoadSummary {
            incarnation: crate::Incarnation(1_000),
            readiness: Readiness::Ready,
            seq: 1,
            ..LoadSummary::default()
        });
        seeds = format!("localhost:{}", address.port()).parse().unwrap();
        nodes.push((thread, gossip));
    }
    for (_, gossip) in &nodes {
        let mut view = gossip.view();
        let all =
            view.wait_for(|view| view.rows().iter().filter(|row| row.load.is_some()).count() == 3);
        timeout(DEADLINE, all).await.unwrap().unwrap();
    }
    let (thread, leaving) = nodes.remove(1);
    leaving.leave().await;
    for (_, gossip) in &nodes {
        let mut view = gossip.view();
        let two = view.wait_for(|view| view.rows().len() == 2);
        timeout(DEADLINE, two).await.unwrap().unwrap();
        let stats = gossip.stats();
        assert!(
            stats.datagrams_in > 0 && stats.datagrams_out > 0,
            "{stats:?}"
        );
        assert_eq!(stats.dropped_wrong_key, 0, "{stats:?}");
    }
    leaving.shutdown().await;
    thread.shutdown(DEADLINE).await.unwrap();
    for (thread, gossip) in nodes {
        gossip.shutdown().await;
        thread.shutdown(DEADLINE).await.unwrap();
    }
}
