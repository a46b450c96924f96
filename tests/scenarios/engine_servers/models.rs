//! Several models in one mesh, whatever serves them.

use serde_json::{Value, json};
use shoal_tests::engine_server::Dialect;
use shoal_tests::wait::until;

use super::{Beside, CHAT, chat, whole};

fn names(answer: &Value) -> Vec<String> {
    let list = answer["data"].as_array().expect("a list");
    list.iter()
        .map(|model| model["id"].as_str().expect("a name").to_owned())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_goes_only_where_its_model_is() {
    let mesh = Beside::start(&[(Dialect::Vllm, "one"), (Dialect::LlamaServer, "two")]).await;
    mesh.servers[0].set_models(&["one", "an-adapter"]);
    let listed = until("all names", || async {
        let answer = mesh
            .cluster
            .client()
            .get(mesh.cluster.http(0), "/v1/models")
            .await;
        let names = names(&answer.json());
        if names.len() == 3 {
            Ok(names)
        } else {
            Err(names)
        }
    })
    .await;
    assert_eq!(listed, ["an-adapter", "one", "two"]);
    for (model, node) in [("one", 0), ("an-adapter", 0), ("two", 1)] {
        for _ in 0..5 {
            let answer = mesh.post(CHAT, &whole(&chat(model, 2))).await;
            assert_eq!(answer.status, 200, "{model}: {:?}", answer.body);
            assert_eq!(
                answer.header("x-shoal-host"),
                mesh.cluster.id(node).to_string()
            );
        }
    }
    for body in [chat("three", 2), whole(&chat("three", 2))] {
        let answer = mesh.post(CHAT, &body).await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.json()["error"]["code"], "model_not_found");
    }
    let answer = mesh
        .post("/v1/embeddings", &json!({"model": "three", "input": "x"}))
        .await;
    assert_eq!(answer.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_serves_another_model_now_is_asked_for_that_one() {
    let mesh = Beside::start(&[(Dialect::Vllm, "old")]).await;
    assert_eq!(mesh.post(CHAT, &whole(&chat("old", 2))).await.status, 200);
    mesh.servers[0].set_models(&["new"]);
    until("the new name", || async {
        let answer = mesh.post(CHAT, &whole(&chat("new", 2))).await;
        if answer.status == 200 {
            Ok(())
        } else {
            Err(answer)
        }
    })
    .await;
    assert_eq!(mesh.post(CHAT, &whole(&chat("old", 2))).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn embedded_engines_and_servers_share_a_mesh() {
    let mut mesh = Beside::start(&[(Dialect::Vllm, "theirs")]).await;
    mesh.cluster
        .add(|config| config.engine.model_id = Some("ours".into()))
        .await;
    mesh.cluster.converged(2).await;
    for (model, node) in [("theirs", 0), ("ours", 1)] {
        let (_, reason) = mesh.stream(CHAT, &chat(model, 5)).await.text().await;
        assert_eq!(reason.as_deref(), Some("length"));
        let answer = mesh.post(CHAT, &whole(&chat(model, 5))).await;
        assert_eq!(
            answer.header("x-shoal-host"),
            mesh.cluster.id(node).to_string()
        );
    }
    // What the embedded engine does not honour is refused for its model only.
    for (model, status) in [("theirs", 200), ("ours", 400)] {
        let mut body = whole(&chat(model, 5));
        body["logit_bias"] = json!({"5": 1});
        assert_eq!(mesh.post(CHAT, &body).await.status, status, "{model}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_looks_like_one_vllm_server() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m")]).await;
    let get = |path| mesh.cluster.client().get(mesh.cluster.http(0), path);
    assert_eq!(get("/health").await.status, 200);
    assert!(get("/version").await.json()["version"].is_string());
    assert_eq!(
        get("/v1/models").await.json()["data"][0]["owned_by"],
        "vllm"
    );
    let metrics = get("/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).expect("text");
    for name in [
        "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 0",
        "vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0",
        "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0",
        "vllm:cache_config_info{block_size=",
    ] {
        assert!(text.contains(name), "{name} in {text}");
    }
}
