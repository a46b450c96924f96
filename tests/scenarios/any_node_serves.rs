//! Every node takes any request, wherever it runs, and gives the answer any other would.

use std::collections::BTreeSet;

use futures::future::join_all;
use serde_json::json;
use shoal_node::config::EngineKind;
use shoal_tests::cluster::{Cluster, MODEL};
use shoal_tests::wait::until;

fn chat(text: &str) -> serde_json::Value {
    json!({
        "model": MODEL, "temperature": 0, "max_tokens": 24, "ignore_eos": true,
        "messages": [{"role": "user", "content": text}],
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_entry_gives_the_same_answer_streamed_or_whole() {
    let cluster = Cluster::start(3, |_, _| {}).await;
    let client = cluster.client();
    let mut texts = BTreeSet::new();
    for entry in 0..3 {
        let body = chat("what is a shoal?");
        let whole = client
            .post(cluster.http(entry), "/v1/chat/completions", &body)
            .await;
        assert_eq!(whole.status, 200, "{whole:?}");
        let answer = whole.json();
        assert_eq!(answer["usage"]["completion_tokens"], 24);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        texts.insert(
            answer["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
                .to_owned(),
        );

        let mut body = body;
        body["stream"] = json!(true);
        let mut events = client
            .stream(cluster.http(entry), "/v1/chat/completions", &body)
            .await;
        assert!(!events.header("x-shoal-host").is_empty());
        let (text, reason) = events.text().await;
        assert_eq!(reason.as_deref(), Some("length"));
        texts.insert(text);
    }
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert!(!texts.first().unwrap().is_empty());
    cluster.empty().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_is_spread_over_all_hosts_whoever_is_asked() {
    let cluster = Cluster::start(3, |_, config| {
        if let EngineKind::Sim(sim) = &mut config.engine.kind {
            sim.speed = 20.0;
        }
    })
    .await;
    let answers = join_all((0..48).map(|number| {
        let cluster = &cluster;
        async move {
            let body = chat(&format!("question {number}"));
            // All are asked of one node.
            cluster
                .client()
                .post(cluster.http(0), "/v1/chat/completions", &body)
                .await
        }
    }))
    .await;
    let mut hosts = BTreeSet::new();
    for answer in &answers {
        assert_eq!(answer.status, 200, "{answer:?}");
        hosts.insert(answer.header("x-shoal-host").to_owned());
    }
    let all: BTreeSet<String> = (0..3).map(|index| cluster.id(index).to_string()).collect();
    assert_eq!(hosts, all);
    cluster.empty().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_goes_only_where_its_model_is() {
    let cluster = Cluster::start(3, |index, config| {
        if index == 2 {
            config.engine.model_id = Some("rare".into());
        }
    })
    .await;
    let client = cluster.client();
    for entry in 0..3 {
        let models = client.get(cluster.http(entry), "/v1/models").await.json();
        let ids: Vec<&str> = models["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| model["id"].as_str().unwrap())
            .collect();
        assert_eq!(ids, ["rare", MODEL]);
        let mut body = chat("to the only node that has it");
        body["model"] = json!("rare");
        let answer = client
            .post(cluster.http(entry), "/v1/chat/completions", &body)
            .await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.header("x-shoal-host"), cluster.id(2).to_string());
        body["model"] = json!("nobody's");
        let answer = client
            .post(cluster.http(entry), "/v1/chat/completions", &body)
            .await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.json()["error"]["code"], "model_not_found");
    }
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_gives_the_same_sample_at_every_entry_and_none_gives_another() {
    let cluster = Cluster::start(2, |_, _| {}).await;
    let ask = |entry: usize, seed: Option<u64>| {
        let cluster = &cluster;
        async move {
            let body = json!({
                "model": MODEL, "prompt": "once", "max_tokens": 16, "temperature": 1,
                "ignore_eos": true, "seed": seed,
            });
            let answer = cluster
                .client()
                .post(cluster.http(entry), "/v1/completions", &body)
                .await;
            assert_eq!(answer.status, 200, "{answer:?}");
            answer.json()["choices"][0]["text"]
                .as_str()
                .unwrap()
                .to_owned()
        }
    };
    assert_eq!(ask(0, Some(7)).await, ask(1, Some(7)).await);
    assert_ne!(ask(0, Some(7)).await, ask(0, Some(8)).await);
    assert_ne!(ask(0, None).await, ask(0, None).await);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_seeds_are_down_serves_alone_and_joins_when_one_comes_up() {
    let mut cluster = Cluster::start(1, |_, _| {}).await;
    let seed = cluster.node(0).stream_addr();
    cluster.kill(0);
    let alone = cluster
        .add(|config| config.mesh.seeds = vec![seed.to_string()])
        .await;
    until("its own row", || async {
        match cluster.view(cluster.http(alone)).await {
            Ok(rows) if rows.len() == 1 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let body = chat("alone");
    let answer = cluster
        .client()
        .post(cluster.http(alone), "/v1/chat/completions", &body)
        .await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let came_up = cluster.add(|config| config.mesh.stream = seed).await;
    cluster.converged(2).await;
    assert_ne!(cluster.id(alone), cluster.id(came_up));
    cluster.stop_all().await;
}
