//! Every refusal: its status, its shape, its headers.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;

use super::support::{Server, chat, completion, get, post};
use crate::api::ApiConfig;
use crate::frontend::HomeError;

#[tokio::test]
async fn a_bad_body_is_a_400_that_names_the_field() {
    let mut server = Server::start(ApiConfig::default()).await;
    for (request, message, param) in [
        (
            completion(r#","max_tokens":0"#),
            "`max_tokens` must be an integer from 1 to 4294967295, got 0",
            json!("max_tokens"),
        ),
        (
            post("/v1/completions", "{\"model\""),
            "the body is not valid JSON: EOF while parsing an object at line 1 column 8",
            json!(null),
        ),
        (
            chat(r#","n":2"#),
            "`n` must be 1: one answer per request is supported",
            json!("n"),
        ),
        (
            post("/v1/chat/completions", ""),
            "the body is empty: expected a JSON object",
            json!(null),
        ),
    ] {
        let answer = server.ask(&request).await;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert!(answer.header("x-request-id").is_some());
        assert_eq!(
            answer.json(),
            json!({"error": {"message": message, "type": "invalid_request_error",
                "param": param, "code": null}})
        );
    }
    assert!(server.is_quiet());
}

#[tokio::test]
async fn a_body_of_another_type_or_compressed_is_a_400() {
    let server = Server::start(ApiConfig::default()).await;
    let form = completion("").replace("application/json", "application/x-www-form-urlencoded");
    let answer = server.ask(&form).await;
    assert_eq!(answer.status, 400);
    assert!(
        answer
            .text()
            .contains("content-type must be application/json")
    );
    let zipped = completion("").replace("host: x", "host: x\r\ncontent-encoding: gzip");
    let answer = server.ask(&zipped).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("compressed"));
}

#[tokio::test]
async fn a_body_that_is_not_utf8_is_a_400() {
    let server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    let mut request = completion("").into_bytes();
    let at = request.len() - 3;
    request[at] = 0xff;
    client.send(&request).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("not UTF-8"));
}

#[tokio::test]
async fn what_the_mesh_says_becomes_its_status() {
    let mut server = Server::start(ApiConfig::default()).await;
    let soon = Duration::from_millis(2_300);
    for (error, status, code, retry) in [
        (
            HomeError::BadRequest {
                message: "too long".into(),
                param: Some("messages".into()),
            },
            400,
            json!(null),
            None,
        ),
        (
            HomeError::UnknownModel("m".into()),
            404,
            json!("model_not_found"),
            None,
        ),
        (
            HomeError::Overloaded { retry_after: soon },
            429,
            json!("overloaded"),
            Some("3"),
        ),
        (
            HomeError::Unavailable {
                retry_after: Duration::ZERO,
            },
            503,
            json!("unavailable"),
            Some("1"),
        ),
        (
            HomeError::ShuttingDown,
            503,
            json!("shutting_down"),
            Some("1"),
        ),
        (
            HomeError::Lost("node at 10.1.2.3:7401 broke".into()),
            503,
            json!("request_lost"),
            Some("1"),
        ),
    ] {
        let mut client = server.connect().await;
        client.send(chat(r#","stream":true"#)).await;
        server.arrival().await.refuse(error.clone());
        let answer = client.answer().await;
        assert_eq!(answer.status, status, "{error:?}");
        assert_eq!(answer.json()["error"]["code"], code, "{error:?}");
        assert_eq!(answer.header("retry-after"), retry, "{error:?}");
        assert!(!answer.text().contains("10.1.2.3"), "{}", answer.text());
    }
    let node = super::support::THIS;
    server
        .counted(&format!(
            "shoal_requests_total{{node=\"{node}\",path=\"/v1/chat/completions\",status=\"429\",outcome=\"error\"}} 1"
        ))
        .await;
}

#[tokio::test]
async fn an_unknown_path_is_a_404_with_a_hint() {
    let server = Server::start(ApiConfig::default()).await;
    for path in [
        "/",
        "/v1/chat/completion",
        "/v1/models/",
        "/%ff",
        "/v2/models",
    ] {
        let answer = server.ask(&get(path)).await;
        assert_eq!(answer.status, 404, "{path}");
        let error = &answer.json()["error"];
        assert_eq!(error["code"], "unknown_path");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("/v1/chat/completions"), "{message}");
        assert!(answer.header("x-request-id").is_some());
    }
    let node = super::support::THIS;
    server
        .counted(&format!(
            "shoal_requests_total{{node=\"{node}\",path=\"other\",status=\"404\",outcome=\"error\"}} 5"
        ))
        .await;
}

#[tokio::test]
async fn a_wrong_method_is_a_405_that_names_the_right_one() {
    let server = Server::start(ApiConfig::default()).await;
    let answer = server.ask(&get("/v1/completions")).await;
    assert_eq!(answer.status, 405);
    assert_eq!(answer.header("allow"), Some("post"));
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "method_not_allowed");
    assert!(error["message"].as_str().unwrap().contains("use POST"));
    let answer = server.ask(&post("/v1/models", "{}")).await;
    assert_eq!(answer.status, 405);
    assert_eq!(answer.header("allow"), Some("get,head"));
    let options = get("/v1/chat/completions").replace("GET", "OPTIONS");
    let answer = server.ask(&options).await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("post")));
}

#[tokio::test]
async fn a_node_that_is_going_down_takes_no_request() {
    let mut server = Server::start(ApiConfig::default()).await;
    server.fake.accepting.store(false, Ordering::SeqCst);
    let answer = server.ask(&chat("")).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error"]["code"], "shutting_down");
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert!(server.is_quiet());
}

#[tokio::test]
async fn a_request_id_is_echoed_on_every_answer_if_it_can_be() {
    let server = Server::start(ApiConfig::default()).await;
    for path in ["/health", "/nowhere", "/v1/completions"] {
        let request = get(path).replace("host: x", "host: x\r\nX-Request-Id: abc-1");
        assert_eq!(
            server.ask(&request).await.header("x-request-id"),
            Some("abc-1")
        );
    }
    let long = "x".repeat(129);
    let request = get("/health").replace("host: x", &format!("host: x\r\nx-request-id: {long}"));
    let answer = server.ask(&request).await;
    let id = answer.header("x-request-id").unwrap();
    assert!(!id.is_empty() && id.len() < 100);
}
