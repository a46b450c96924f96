//! A host that dies is gone from every view soon; new requests go elsewhere at once, and its running
//! ones are placed again from the ledger.

use futures::future::join_all;
use serde_json::json;
use shoal_node::config::EngineKind;
use shoal_tests::cluster::{Cluster, MODEL};

fn body(number: usize) -> serde_json::Value {
    json!({
        "model": MODEL, "prompt": format!("story {number}"), "max_tokens": 400, "ignore_eos": true,
        "temperature": 0, "stream": true,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_a_killed_host_go_on_elsewhere_without_a_repeated_or_missing_token() {
    let mut cluster = Cluster::start(3, |_, config| {
        if let EngineKind::Sim(sim) = &mut config.engine.kind {
            sim.speed = 20.0;
        }
    })
    .await;
    let expected = join_all((0..12).map(|number| {
        let cluster = &cluster;
        async move {
            let mut events = cluster
                .client()
                .stream(cluster.http(0), "/v1/completions", &body(number))
                .await;
            events.text().await.0
        }
    }))
    .await;
    cluster.seen_empty().await;
    let mut streams = Vec::new();
    for number in 0..12 {
        let entry = number % 2;
        let mut events = cluster
            .client()
            .stream(cluster.http(entry), "/v1/completions", &body(number))
            .await;
        let first = events.next().await.expect("a first event");
        streams.push((number, first, events));
    }
    let lost = cluster.id(2).to_string();
    let hosts: Vec<&str> = streams
        .iter()
        .map(|(_, _, events)| events.header("x-shoal-host"))
        .collect();
    assert!(
        hosts.contains(&lost.as_str()),
        "none runs at {lost}: {hosts:?}"
    );
    cluster.kill(2);
    // New requests succeed at once, before anybody has noticed.
    let mut quick = body(99);
    quick["max_tokens"] = json!(4);
    quick["stream"] = json!(false);
    for entry in 0..2 {
        let answer = cluster
            .client()
            .post(cluster.http(entry), "/v1/completions", &quick)
            .await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    for (number, first, mut events) in streams {
        let first: serde_json::Value = serde_json::from_str(&first).unwrap();
        let mut text = first["choices"][0]["text"].as_str().unwrap().to_owned();
        let (rest, reason) = events.text().await;
        text.push_str(&rest);
        assert_eq!(text, expected[number], "stream {number}");
        assert_eq!(reason.as_deref(), Some("length"));
    }
    cluster.converged(2).await;
    cluster.empty().await;
    cluster.stop_all().await;
}
