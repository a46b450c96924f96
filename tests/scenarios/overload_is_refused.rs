//! When every queue is at its bound, clients are told so and when to come back, and nothing is lost.

use futures::future::join_all;
use serde_json::json;
use shoal_node::config::EngineKind;
use shoal_tests::cluster::{Cluster, MODEL};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_the_queues_of_all_nodes_is_429_with_retry_after() {
    let cluster = Cluster::start(2, |_, config| {
        config.engine.queue_limit = 2;
        if let EngineKind::Sim(sim) = &mut config.engine.kind {
            sim.speed = 20.0;
            sim.max_sequences = Some(2);
        }
    })
    .await;
    let body = json!({
        "model": MODEL, "prompt": "busy", "max_tokens": 300, "ignore_eos": true, "temperature": 0,
    });
    let answers = join_all((0..24).map(|number| {
        let (cluster, body) = (&cluster, &body);
        async move {
            cluster
                .client()
                .post(cluster.http(number % 2), "/v1/completions", body)
                .await
        }
    }))
    .await;
    let mut refused = 0;
    for answer in &answers {
        match answer.status.as_u16() {
            200 => assert_eq!(answer.json()["usage"]["completion_tokens"], 300),
            429 => {
                refused += 1;
                assert!(
                    answer.header("retry-after").parse::<u64>().is_ok(),
                    "{answer:?}"
                );
                assert!(answer.json()["error"]["message"].is_string());
            }
            other => panic!("unexpected status {other}: {answer:?}"),
        }
    }
    // Two run and two wait at each node: eight at once, and whatever came after some had ended.
    assert!(refused > 0 && refused <= 16, "{refused} refused");
    cluster.empty().await;
    cluster.stop_all().await;
}
