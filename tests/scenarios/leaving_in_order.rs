//! A node that is told to stop finishes what it has, takes nothing new, and says goodbye.

use serde_json::json;
use shoal_node::config::EngineKind;
use shoal_tests::cluster::{Cluster, MODEL};
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_finish_and_the_view_forgets_the_node() {
    let mut cluster = Cluster::start(2, |_, config| {
        if let EngineKind::Sim(sim) = &mut config.engine.kind {
            sim.speed = 20.0;
        }
    })
    .await;
    let body = json!({
        "model": MODEL, "prompt": "to the end", "max_tokens": 600, "ignore_eos": true,
        "temperature": 0, "stream": true,
    });
    let mut streams = Vec::new();
    for _ in 0..6 {
        let mut events = cluster
            .client()
            .stream(cluster.http(0), "/v1/completions", &body)
            .await;
        assert!(events.next().await.is_some());
        streams.push(events);
    }
    let mut readers = JoinSet::new();
    for mut events in streams {
        readers.spawn(async move { events.text().await });
    }
    // Some of the streams run at node 1, all of them have node 0 as home.
    cluster.stop(1).await;
    for (text, reason) in readers.join_all().await {
        assert!(!text.is_empty());
        assert_eq!(reason.as_deref(), Some("length"));
    }
    cluster.converged(1).await;
    cluster.stop_all().await;
}
