//! The list of requests, and moving one by hand.

use std::time::Duration;

use serde_json::json;

use shoal_gossip::NodeId;

use super::support::{HOST, MOVABLE, Server, THIS, get, post};
use crate::api::{ApiConfig, ApiKeys};

fn migrate(id: &str, to: &str) -> String {
    let body = json!({ "to": to }).to_string();
    post(&format!("/mesh/requests/{id}/migrate"), &body)
}

#[tokio::test]
async fn the_list_says_what_runs_where() {
    let server = Server::start(ApiConfig::default()).await;
    assert_eq!(
        server.ask(&get("/mesh/requests")).await.json(),
        json!({"this": THIS.to_string(), "requests": [{
            "id": MOVABLE.to_string(),
            "home": THIS.to_string(),
            "host": HOST.to_string(),
            "epoch": 2,
            "prompt_tokens": 12,
            "output_tokens": 3,
            "phase": null,
            "kv_blocks": null,
            "kv_tokens": null,
        }]})
    );
}

#[tokio::test]
async fn a_move_by_hand_is_answered_with_its_figures_or_why_not() {
    let server = Server::start(ApiConfig::default()).await;
    let id = MOVABLE.to_string();
    let moved = server.ask(&migrate(&id, &THIS.to_string())).await;
    assert_eq!(moved.status, 200);
    assert_eq!(moved.json()["pause_ms"], 1.5);
    assert_eq!(moved.json()["stages"], 3);
    assert_eq!(moved.json()["direct_tokens"], 12);
    let stays = server.ask(&migrate(&id, &HOST.to_string())).await;
    assert_eq!(stays.status, 409);
    assert_eq!(stays.json()["error"]["code"], "conflict");
    let other = format!("{THIS}-00000000000000cd");
    let unknown = server.ask(&migrate(&other, &HOST.to_string())).await;
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["error"]["code"], "request_not_found");
}

#[tokio::test]
async fn a_wish_that_cannot_be_read_is_told_what_is_wrong_with_it() {
    let server = Server::start(ApiConfig::default()).await;
    let id = MOVABLE.to_string();
    let bad = server.ask(&migrate("x", &HOST.to_string())).await;
    assert_eq!(
        (bad.status, bad.json()["error"]["param"].clone()),
        (400, json!("id"))
    );
    let bad = server.ask(&migrate(&id, "0OIl")).await;
    assert_eq!(
        (bad.status, bad.json()["error"]["param"].clone()),
        (400, json!("to"))
    );
    let path = format!("/mesh/requests/{id}/migrate");
    for body in ["", "{}", "{\"to\":1}", "{\"to\":\"x\",\"now\":true}"] {
        assert_eq!(server.ask(&post(&path, body)).await.status, 400, "{body}");
    }
    assert_eq!(server.ask(&get(&path)).await.status, 405);
}

#[tokio::test]
async fn a_node_is_drained_by_name_or_is_the_one_that_is_asked() {
    let server = Server::start(ApiConfig::default()).await;
    let drain = |body: String| post("/mesh/drain", &body);
    let this = json!({ "node": THIS.to_string(), "draining": true });
    for body in [
        String::new(),
        "{}".into(),
        json!({ "node": THIS.to_string() }).to_string(),
    ] {
        let answer = server.ask(&drain(body)).await;
        assert_eq!((answer.status, answer.json()), (202, this.clone()));
    }
    for (body, status) in [
        (json!({ "node": HOST.to_string() }).to_string(), 503),
        (json!({ "node": NodeId(77).to_string() }).to_string(), 400),
        (r#"{"node":"nobody!"}"#.into(), 400),
        (r#"{"nod":"x"}"#.into(), 400),
        ("[".into(), 400),
    ] {
        let answer = server.ask(&drain(body.clone())).await;
        assert_eq!(answer.status, status, "{body}");
        assert!(answer.json()["error"]["message"].is_string());
    }
}

#[tokio::test]
async fn no_web_page_changes_the_mesh_and_half_a_wish_is_not_waited_for() {
    let config = ApiConfig {
        body_timeout: Duration::from_millis(50),
        ..ApiConfig::default()
    };
    let server = Server::start(config).await;
    let moved = migrate(&MOVABLE.to_string(), &THIS.to_string());
    for wish in [post("/mesh/drain", "{}"), moved] {
        let page = wish.replace("host: x", "host: x\r\norigin: http://elsewhere.example");
        assert_eq!(server.ask(&page).await.status, 403);
        let form = wish.replace("application/json", "text/plain");
        assert_eq!(server.ask(&form).await.status, 400);
        let mut client = server.connect().await;
        client.send(&wish[..wish.len() - 1]).await;
        assert_eq!(client.answer().await.status, 408);
    }
}

#[tokio::test]
async fn operators_have_keys_of_their_own_that_do_what_clients_may_as_well() {
    let config = ApiConfig {
        keys: Some(ApiKeys::parse("client").unwrap()),
        operators: Some(ApiKeys::parse("operator").unwrap()),
        ..ApiConfig::default()
    };
    let server = Server::start(config).await;
    let with = |request: String, key: &str| {
        request.replace(
            "host: x",
            &format!("host: x\r\nauthorization: Bearer {key}"),
        )
    };
    let moved = || migrate(&MOVABLE.to_string(), &THIS.to_string());
    for (request, key, status) in [
        (post("/mesh/drain", ""), "client", 401),
        (moved(), "client", 401),
        (post("/mesh/drain", ""), "operator", 202),
        (moved(), "operator", 200),
        (get("/mesh/requests"), "client", 200),
        (get("/mesh/requests"), "operator", 200),
        (get("/mesh/requests"), "nobody", 401),
    ] {
        let answer = server.ask(&with(request.clone(), key)).await;
        assert_eq!(answer.status, status, "{key}: {request}");
    }
    assert_eq!(server.ask(&post("/mesh/drain", "")).await.status, 401);
}
