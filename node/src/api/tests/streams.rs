//! Answers that work: whole ones, and streams to the byte.

use std::time::Duration;

use serde_json::json;
use shoal_gossip::unix_time;

use super::support::{HOST, Server, THIS, chat, completion, finished, tokens, within};
use crate::api::ApiConfig;
use crate::engine::work::Fit;
use crate::engine::work::RequestKind;
use crate::frontend::{HomeError, HomeEvent};

/// A stream with the number that depends on the time replaced.
fn timeless(text: &str) -> String {
    let created = text
        .split_once("\"created\":")
        .and_then(|(_, rest)| rest.split_once(','))
        .map(|(number, _)| number.to_owned())
        .unwrap();
    let now = unix_time().as_secs();
    assert!((now - 60..=now).contains(&created.parse().unwrap()));
    text.replace(&format!("\"created\":{created},"), "\"created\":0,")
}

#[tokio::test]
async fn a_chat_stream_is_what_openais_clients_expect_to_the_byte() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client
        .send(chat(
            r#","stream":true,"stream_options":{"include_usage":true}"#,
        ))
        .await;
    let arrival = server.arrival().await;
    assert_eq!(arrival.ask.kind, Some(RequestKind::Chat));
    assert!(arrival.ask.body.ends_with(b"}}"));
    let events = arrival.accept(4);
    events.send(tokens("Hé")).await.unwrap();
    events.send(tokens("llo")).await.unwrap();
    events.send(finished()).await.unwrap();
    let answer = client.answer().await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    assert_eq!(answer.header("cache-control"), Some("no-cache"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    let host = HOST.to_string().to_ascii_lowercase();
    assert_eq!(answer.header("x-shoal-host"), Some(host.as_str()));
    assert!(answer.whole);
    let head = format!(
        r#"data: {{"id":"chatcmpl-{THIS}-00000000000000ab","object":"chat.completion.chunk","created":0,"model":"m","choices":"#
    );
    let tail = r#","system_fingerprint":"fp_000000000000beef"}"#;
    let expected = [
        r#"[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null"#,
        r#"[{"index":0,"delta":{"content":"Hé"},"logprobs":null,"finish_reason":null}],"usage":null"#,
        r#"[{"index":0,"delta":{"content":"llo"},"logprobs":null,"finish_reason":null}],"usage":null"#,
        r#"[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null"#,
        r#"[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}"#,
    ]
    .map(|middle| format!("{head}{middle}{tail}\n\n"))
    .concat()
        + "data: [DONE]\n\n";
    assert_eq!(timeless(answer.text()), expected);
    let node = format!("node=\"{THIS}\"");
    for line in [
        format!(
            "shoal_requests_total{{{node},path=\"/v1/chat/completions\",status=\"200\",outcome=\"completed\"}} 1"
        ),
        format!("shoal_prompt_tokens_total{{{node}}} 5"),
        format!("shoal_output_tokens_total{{{node}}} 2"),
        format!("shoal_time_to_first_token_seconds_count{{{node}}} 1"),
        format!("shoal_inter_token_seconds_count{{{node}}} 1"),
        format!("shoal_request_seconds_count{{{node}}} 1"),
        format!("shoal_requests_in_flight{{{node}}} 0"),
    ] {
        server.counted(&line).await;
    }
}

#[tokio::test]
async fn each_event_goes_out_at_once() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    for text in ["a", "b", "c"] {
        // The next is sent only when this one has been seen.
        events.send(tokens(text)).await.unwrap();
        if text == "a" {
            assert_eq!(client.head().await.status, 200);
        }
        let chunk = String::from_utf8(client.chunk().await.unwrap()).unwrap();
        assert!(
            chunk.starts_with("data: {") && chunk.ends_with("}\n\n"),
            "{chunk}"
        );
        assert!(chunk.contains(&format!("\"text\":\"{text}\"")), "{chunk}");
    }
}

#[tokio::test]
async fn a_whole_chat_answer_is_one_body() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(chat("")).await;
    let arrival = server.arrival().await;
    assert_eq!(arrival.ask.fit, Fit::Any);
    let events = arrival.accept(4);
    events.send(tokens("Hé")).await.unwrap();
    events.send(tokens("llo")).await.unwrap();
    events.send(finished()).await.unwrap();
    let answer = client.answer().await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert!(answer.header("x-shoal-host").is_some());
    let body = answer.json();
    assert_eq!(body["choices"][0]["message"]["content"], "Héllo");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7})
    );
    assert_eq!(body["system_fingerprint"], "fp_000000000000beef");
}

#[tokio::test]
async fn a_connection_serves_one_request_after_another_however_it_is_cut_up() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    for stream in ["", r#","stream":true"#] {
        let request = completion(stream);
        // Every way a request may be cut by the network is the same request.
        for byte in request.as_bytes().chunks(7) {
            client.send(byte).await;
            tokio::task::yield_now().await;
        }
        let events = server.arrival().await.accept(4);
        events.send(tokens("x")).await.unwrap();
        events.send(finished()).await.unwrap();
        let answer = client.answer().await;
        assert!(answer.status == 200 && answer.whole);
    }
}

#[tokio::test]
async fn a_failure_after_the_first_byte_is_told_in_the_stream() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    let lost = HomeError::Lost("10.1.2.3 went away".into());
    events.send(HomeEvent::Failed(lost)).await.unwrap();
    let answer = client.answer().await;
    assert!(answer.whole);
    let frames: Vec<&str> = answer.text().split_terminator("\n\n").collect();
    assert_eq!(
        frames[1..],
        [
            r#"data: {"error":{"message":"the request was lost and could not go on elsewhere; try again","type":"stream_error","param":null,"code":"request_lost"}}"#,
            "data: [DONE]"
        ]
    );
    server
        .counted(&format!(
            "shoal_requests_total{{node=\"{THIS}\",path=\"/v1/completions\",status=\"200\",outcome=\"failed\"}} 1"
        ))
        .await;
}

#[tokio::test]
async fn events_that_end_without_an_end_are_told_in_the_stream_too() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    drop(events);
    let answer = client.answer().await;
    assert!(answer.text().contains("request_lost"));
    assert!(answer.text().ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_failure_before_the_first_token_has_a_status() {
    let mut server = Server::start(ApiConfig::default()).await;
    for stream in ["", r#","stream":true"#] {
        let mut client = server.connect().await;
        client.send(completion(stream)).await;
        let events = server.arrival().await.accept(4);
        let lost = HomeError::Lost("gone".into());
        events.send(HomeEvent::Failed(lost)).await.unwrap();
        let answer = client.answer().await;
        assert_eq!(answer.status, 503);
        assert_eq!(answer.json()["error"]["code"], "request_lost");
    }
}

#[tokio::test]
async fn a_silent_stream_is_kept_alive_by_comments() {
    let config = ApiConfig {
        keep_alive: Duration::from_millis(20),
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    // Nothing has happened yet, and still the answer begins: the request may wait in a queue for long.
    assert_eq!(client.head().await.status, 200);
    for _ in 0..3 {
        assert_eq!(client.chunk().await.unwrap(), b": keep-alive\n\n");
    }
    events.send(tokens("a")).await.unwrap();
    events.send(finished()).await.unwrap();
    let mut text = String::new();
    let read = async {
        loop {
            let chunk = client.chunk().await.unwrap();
            if chunk.is_empty() {
                return;
            }
            text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    };
    within(read).await;
    assert!(
        text.contains("\"text\":\"a\"") && text.ends_with("data: [DONE]\n\n"),
        "{text}"
    );
}
