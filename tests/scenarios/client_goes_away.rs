//! A client that goes away takes its request with it, in every phase, at whatever host it runs.

use serde_json::json;
use shoal_node::config::{EngineKind, NodeConfig};
use shoal_tests::cluster::{Cluster, MODEL};
use shoal_tests::wait::until;
use tokio::task::JoinSet;

/// Node 0 serves nothing of interest, so every request for the model runs at node 1.
fn only_the_second_hosts(index: usize, config: &mut NodeConfig) {
    if index == 0 {
        config.engine.model_id = Some("other".into());
    }
    if let EngineKind::Sim(sim) = &mut config.engine.kind {
        // About a token a millisecond: long requests are still running when the client goes.
        sim.speed = 30.0;
        sim.max_sequences = Some(4);
    }
}

fn long(stream: bool) -> serde_json::Value {
    json!({
        "model": MODEL, "prompt": "on and on", "max_tokens": 3_000, "ignore_eos": true,
        "temperature": 0, "stream": stream,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaving_while_decoding_or_queued_frees_the_host() {
    let cluster = Cluster::start(2, only_the_second_hosts).await;
    for entry in 0..2 {
        let mut streams = Vec::new();
        for _ in 0..4 {
            let mut events = cluster
                .client()
                .stream(cluster.http(entry), "/v1/completions", &long(true))
                .await;
            assert_eq!(events.status(), 200);
            assert!(events.next().await.is_some());
            streams.push(events);
        }
        // All slots are taken: these wait in the host's queue.
        let mut waiting = JoinSet::new();
        for _ in 0..3 {
            let (client, node) = (cluster.client().clone(), cluster.http(entry));
            waiting
                .spawn(async move { client.try_post(node, "/v1/completions", &long(false)).await });
        }
        until("four running and three queued", || async {
            let load = cluster.node(1).load();
            if (load.running, load.queued) == (4, 3) {
                Ok(())
            } else {
                Err(load)
            }
        })
        .await;
        waiting.abort_all();
        until("an empty queue", || async {
            let load = cluster.node(1).load();
            if (load.running, load.queued) == (4, 0) {
                Ok(())
            } else {
                Err(load)
            }
        })
        .await;
        drop(streams);
        cluster.empty().await;
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_pauses_its_own_request_and_nobody_elses() {
    let cluster = Cluster::start(2, only_the_second_hosts).await;
    let mut slow = cluster
        .client()
        .stream(cluster.http(0), "/v1/completions", &long(true))
        .await;
    assert!(slow.next().await.is_some());
    // Another request runs to its end meanwhile.
    let mut quick = long(false);
    quick["max_tokens"] = json!(200);
    let answer = cluster
        .client()
        .post(cluster.http(0), "/v1/completions", &quick)
        .await;
    assert_eq!(answer.json()["usage"]["completion_tokens"], 200);
    assert!(cluster.node(1).load().running >= 1);
    // It reads again and gets everything, in order.
    let (mut tokens, mut done) = (1, false);
    while let Some(data) = slow.next().await {
        if data == "[DONE]" {
            done = true;
            break;
        }
        let chunk: serde_json::Value = serde_json::from_str(&data).unwrap();
        assert!(chunk.get("error").is_none(), "{chunk}");
        tokens += 1;
    }
    assert!(done && tokens > 2_000, "{tokens}");
    cluster.empty().await;
    cluster.stop_all().await;
}
