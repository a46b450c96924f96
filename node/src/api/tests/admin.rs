//! Health, models, view, metrics, and who may see them.

use std::sync::atomic::Ordering;

use serde_json::json;

use super::support::{HOST, Server, THIS, chat, get};
use crate::api::{ApiConfig, ApiKeys};

#[tokio::test]
async fn health_checks_tell_what_a_load_balancer_must_know() {
    let server = Server::start(ApiConfig::default()).await;
    let all = [
        "/health",
        "/liveness",
        "/live",
        "/livez",
        "/healthz",
        "/readiness",
        "/ready",
        "/readyz",
    ];
    for path in all {
        assert_eq!(server.ask(&get(path)).await.status, 200, "{path}");
    }
    assert_eq!(
        server.ask(&get("/readiness")).await.json(),
        json!({"status": "ready", "healthy_workers": 1, "total_workers": 2})
    );
    server.fake.usable.store(0, Ordering::SeqCst);
    for path in ["/health", "/readiness", "/ready", "/readyz"] {
        let answer = server.ask(&get(path)).await;
        assert_eq!(answer.status, 503, "{path}");
        assert_eq!(answer.json()["status"], "no usable node");
    }
    server.fake.usable.store(1, Ordering::SeqCst);
    server.fake.accepting.store(false, Ordering::SeqCst);
    let answer = server.ask(&get("/readyz")).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["status"], "shutting down");
    for path in ["/health", "/liveness", "/live", "/livez", "/healthz"] {
        assert_eq!(server.ask(&get(path)).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn version_and_ping_answer_as_vllm_does() {
    let server = Server::start(ApiConfig::default()).await;
    assert_eq!(
        server.ask(&get("/version")).await.json(),
        json!({"version": env!("CARGO_PKG_VERSION")})
    );
    let answer = server.ask(&get("/ping")).await;
    assert_eq!((answer.status, answer.text()), (200, ""));
    assert_eq!(
        server.ask(&super::support::post("/ping", "")).await.status,
        200
    );
}

#[tokio::test]
async fn a_head_is_a_get_without_its_body() {
    let server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(get("/v1/models").replace("GET", "HEAD")).await;
    let answer = client.head().await;
    assert_eq!(answer.status, 200);
    let length: usize = answer.header("content-length").unwrap().parse().unwrap();
    assert!(length > 0);
    // The next answer follows at once: there was no body.
    client.send(get("/ping")).await;
    assert_eq!(client.answer().await.status, 200);
    server
        .counted(&format!(
            "shoal_requests_total{{node=\"{THIS}\",path=\"/v1/models\",status=\"200\",outcome=\"completed\"}} 1"
        ))
        .await;
}

#[tokio::test]
async fn models_of_the_mesh_are_listed_and_found_by_name() {
    let server = Server::start(ApiConfig::default()).await;
    let model = |id: &str| {
        json!({"id": id, "object": "model", "created": 1_700_000_000, "owned_by": "vllm",
            "max_model_len": 2048})
    };
    assert_eq!(
        server.ask(&get("/v1/models")).await.json(),
        json!({"object": "list", "data": [model("m"), model("org/m 2")]})
    );
    assert_eq!(server.ask(&get("/v1/models/m")).await.json(), model("m"));
    for path in ["/v1/models/org/m%202", "/v1/models/org%2Fm%202"] {
        assert_eq!(
            server.ask(&get(path)).await.json(),
            model("org/m 2"),
            "{path}"
        );
    }
    let answer = server.ask(&get("/v1/models/nope")).await;
    assert_eq!(answer.status, 404);
    assert_eq!(
        answer.json()["error"],
        json!({"message": "the model `nope` does not exist", "type": "invalid_request_error",
            "param": "model", "code": "model_not_found"})
    );
    assert_eq!(server.ask(&get("/v1/models/%ff")).await.status, 400);
}

#[tokio::test]
async fn the_view_is_shown_with_ages_and_raw_numbers() {
    let server = Server::start(ApiConfig::default()).await;
    let body = server.ask(&get("/mesh/nodes")).await.json();
    assert_eq!(body["this"], THIS.to_string());
    let nodes = body["nodes"].as_array().unwrap();
    assert_eq!(nodes.len(), 2);
    let of = |id: shoal_gossip::NodeId| {
        nodes
            .iter()
            .find(|node| node["node"] == id.to_string())
            .unwrap()
    };
    let own = of(THIS);
    assert_eq!(own["this"], true);
    assert!(own["age_ms"].as_f64().unwrap() >= 0.0);
    assert_eq!(own["facts"]["stream"], "10.0.0.1:7401");
    assert_eq!(own["facts"]["models"][0]["id"], "m");
    assert_eq!(own["load"]["readiness"], "Ready");
    assert_eq!(own["load"]["free_blocks"], 75);
    // Unknown is not idle.
    let other = of(HOST);
    assert_eq!(other["this"], false);
    assert_eq!(
        (&other["age_ms"], &other["load"]),
        (&json!(null), &json!(null))
    );
}

#[tokio::test]
async fn metrics_come_as_prometheus_reads_them() {
    let server = Server::start(ApiConfig::default()).await;
    let answer = server.ask(&get("/metrics")).await;
    assert_eq!(
        answer.header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    let node = format!("node=\"{THIS}\"");
    for line in [
        format!("shoal_build_info{{{node},version=\"0.1.0\"}} 1"),
        format!("shoal_view_nodes{{{node},readiness=\"unknown\"}} 1"),
        format!("shoal_kv_blocks{{{node},state=\"free\"}} 75"),
        format!("shoal_connections{{{node}}} 1"),
    ] {
        assert!(answer.text().contains(&line), "{line}");
    }
}

#[tokio::test]
async fn keys_guard_everything_but_health() {
    let config = ApiConfig {
        keys: Some(ApiKeys::parse("sk-1\nsk-2").unwrap()),
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    for path in ["/health", "/livez", "/readiness", "/ping"] {
        assert_eq!(server.ask(&get(path)).await.status, 200, "{path}");
    }
    let closed = [
        get("/metrics"),
        get("/mesh/nodes"),
        get("/v1/models"),
        get("/version"),
        get("/nowhere"),
        get("/health/"),
        chat(""),
    ];
    for request in &closed {
        let answer = server.ask(request).await;
        assert_eq!(answer.status, 401, "{request}");
        assert_eq!(answer.header("www-authenticate"), Some("bearer"));
        assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
        assert!(answer.header("x-request-id").is_some());
    }
    for header in [
        "authorization: Bearer sk-3",
        "x-api-key: sk-",
        "authorization: sk-1",
    ] {
        let request = get("/v1/models").replace("host: x", &format!("host: x\r\n{header}"));
        assert_eq!(server.ask(&request).await.status, 401, "{header}");
    }
    assert!(server.is_quiet());
    for header in ["authorization: Bearer sk-1", "x-api-key: sk-2"] {
        let request = get("/v1/models").replace("host: x", &format!("host: x\r\n{header}"));
        assert_eq!(server.ask(&request).await.status, 200, "{header}");
    }
    let mut client = server.connect().await;
    client
        .send(chat("").replace("host: x", "host: x\r\nauthorization: Bearer sk-2"))
        .await;
    server.arrival().await.accept(1);
}
