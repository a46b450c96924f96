//! Bounds: bodies, heads, requests, connections, time, and bytes that are not HTTP.

use std::time::Duration;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::support::{Server, THIS, chat, completion, finished, get, within};
use crate::api::ApiConfig;

fn small() -> ApiConfig {
    ApiConfig {
        max_body: 1000,
        ..ApiConfig::default()
    }
}

fn with_prompt(length: usize) -> String {
    let rest = r#"{"model":"m","prompt":""}"#.len();
    super::support::post(
        "/v1/completions",
        &format!(
            r#"{{"model":"m","prompt":"{}"}}"#,
            "x".repeat(length - rest)
        ),
    )
}

fn chunked(body: &str, size: usize) -> String {
    let mut request =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    for piece in body.as_bytes().chunks(size) {
        request += &format!(
            "{:x}\r\n{}\r\n",
            piece.len(),
            str::from_utf8(piece).unwrap()
        );
    }
    request + "0\r\n\r\n"
}

#[tokio::test]
async fn a_body_at_the_limit_is_taken_and_one_byte_more_is_a_413() {
    let mut server = Server::start(small()).await;
    let mut client = server.connect().await;
    client.send(with_prompt(1000)).await;
    assert_eq!(server.arrival().await.ask.body.len(), 1000);
    let answer = server.ask(&with_prompt(1001)).await;
    assert_eq!(answer.status, 413);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "request_too_large");
    assert_eq!(error["message"], "the body is longer than 1000 bytes");
    assert!(server.is_quiet());
}

#[tokio::test]
async fn a_body_far_beyond_the_limit_still_gets_its_answer() {
    let server = Server::start(small()).await;
    // More than the sockets hold: a server that closed at once would reset the connection.
    let answer = server.ask(&with_prompt(8 * 1024 * 1024)).await;
    assert_eq!(answer.status, 413);
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_is_told_at_once() {
    let server = Server::start(small()).await;
    let mut client = server.connect().await;
    client
        .send(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n\
             content-length: 5000\r\n\r\n",
        )
        .await;
    assert_eq!(client.answer().await.status, 413);
}

#[tokio::test]
async fn a_body_in_chunks_has_the_same_limit() {
    let mut server = Server::start(small()).await;
    let body = |length: usize| format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(length));
    let mut client = server.connect().await;
    client.send(chunked(&body(900), 100)).await;
    assert!(server.arrival().await.ask.body.len() > 900);
    let answer = server.ask(&chunked(&body(1000), 100)).await;
    assert_eq!(answer.status, 413);
    assert!(server.is_quiet());
}

#[tokio::test]
async fn a_body_that_does_not_come_is_a_408() {
    let config = ApiConfig {
        body_timeout: Duration::from_millis(50),
        ..ApiConfig::default()
    };
    let server = Server::start(config).await;
    let mut client = server.connect().await;
    let request = completion("");
    client.send(&request[..request.len() - 1]).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 408);
    assert_eq!(answer.json()["error"]["code"], "request_timeout");
    assert_eq!(answer.header("connection"), Some("close"));
}

#[tokio::test]
async fn connections_that_bring_no_whole_head_are_closed() {
    let config = ApiConfig {
        header_timeout: Duration::from_millis(100),
        ..ApiConfig::default()
    };
    let server = Server::start(config).await;
    for begun in [
        "",
        "G",
        // Could become HTTP/2 yet.
        "PRI * HT",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ",
    ] {
        let mut client = server.connect().await;
        client.send(begun).await;
        client.rest().await;
    }
    // One that is kept alive counts anew from its last answer.
    let mut client = server.connect().await;
    client.send(get("/ping")).await;
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(client.rest().await, b"");
    server
        .counted(&format!("shoal_connections{{node=\"{THIS}\"}} 0"))
        .await;
}

#[tokio::test]
async fn the_time_for_a_head_does_not_run_while_a_request_is_at_work() {
    let config = ApiConfig {
        header_timeout: Duration::from_millis(50),
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    let mut client = server.connect().await;
    client.send(completion("")).await;
    let events = server.arrival().await.accept(1);
    tokio::time::sleep(Duration::from_millis(200)).await;
    events.send(finished()).await.unwrap();
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test]
async fn a_head_that_is_too_long_is_a_431() {
    let server = Server::start(ApiConfig::default()).await;
    let long = "x".repeat(crate::api::BUFFER);
    let mut client = server.connect().await;
    client
        .send(get("/health").replace("host: x", &format!("host: x\r\nx-long: {long}")))
        .await;
    assert_eq!(client.head().await.status, 431);
}

#[tokio::test]
async fn requests_beyond_the_limit_are_a_429_and_others_go_on() {
    let config = ApiConfig {
        max_requests: 2,
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    let mut first = server.connect().await;
    first.send(chat("")).await;
    let events = server.arrival().await.accept(1);
    let mut second = server.connect().await;
    second.send(chat(r#","stream":true"#)).await;
    let waiting = server.arrival().await;
    let answer = server.ask(&chat("")).await;
    assert_eq!(answer.status, 429);
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.json()["error"]["code"], "overloaded");
    // What is no request for tokens needs no place.
    assert_eq!(server.ask(&get("/health")).await.status, 200);
    events.send(finished()).await.unwrap();
    assert_eq!(first.answer().await.status, 200);
    let mut third = server.connect().await;
    third.send(chat("")).await;
    server.arrival().await;
    drop(waiting);
    server
        .counted(&format!(
            "shoal_requests_rejected_total{{node=\"{THIS}\",reason=\"requests\"}} 1"
        ))
        .await;
}

#[tokio::test]
async fn a_connection_too_many_is_told_so_and_closed() {
    let config = ApiConfig {
        max_connections: 1,
        ..ApiConfig::default()
    };
    let server = Server::start(config).await;
    let mut first = server.connect().await;
    first.send(get("/ping")).await;
    assert_eq!(first.answer().await.status, 200);
    let mut second = server.connect().await;
    let answer = second.answer().await;
    assert_eq!(answer.status, 503);
    assert_eq!(
        answer.json()["error"]["message"],
        "this node has too many connections"
    );
    assert_eq!(second.rest().await, b"");
    drop(first);
    server
        .counted(&format!("shoal_connections{{node=\"{THIS}\"}} 0"))
        .await;
    assert_eq!(server.ask(&get("/ping")).await.status, 200);
}

#[tokio::test]
async fn random_bytes_end_their_connection_and_nothing_else() {
    let config = ApiConfig {
        header_timeout: Duration::from_millis(100),
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    let mut runner = TestRunner::deterministic();
    let junk = proptest::collection::vec(proptest::num::u8::ANY, 1..3000);
    for _ in 0..50 {
        let bytes = junk.new_tree(&mut runner).unwrap().current();
        let mut client = server.connect().await;
        client.send(&bytes).await;
        client.rest().await;
    }
    // HTTP/2 that turns to junk after its first words.
    for _ in 0..20 {
        let bytes = junk.new_tree(&mut runner).unwrap().current();
        let mut client = server.connect().await;
        client.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        client.send(&bytes).await;
        client.rest().await;
    }
    assert_eq!(server.ask(&get("/health")).await.status, 200);
    assert!(server.is_quiet());
    within(server.counted(&format!("shoal_connections{{node=\"{THIS}\"}} 0"))).await;
}
