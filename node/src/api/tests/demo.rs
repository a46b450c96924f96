//! The routes of the demo servers: what the mesh is asked for them, and what clients get.

use bytes::Bytes;
use serde_json::{Value, json};

use super::support::{HOST, PROMPT_TOKENS, Server, THIS, finished, get, post, tokens, within};
use crate::api::ApiConfig;
use crate::engine::answer::{AnswerHead, Wire};
use crate::engine::work::{Fit, RequestKind};
use crate::engine::{Finish, FinishReason, TokenBatch};
use crate::frontend::{HomeError, HomeEvent};

/// A request to `/generate`; `more` are further fields.
fn generate(more: &str) -> String {
    post(
        "/generate",
        &format!(r#"{{"model":"m","prompt":"Say "{more}}}"#),
    )
}

fn benchmark(more: &str) -> String {
    generate(more).replace("/generate", "/generate_benchmark")
}

fn head(status: u16, kind: &str) -> Option<Box<AnswerHead>> {
    Some(Box::new(AnswerHead {
        status,
        headers: vec![("content-type".into(), kind.into())],
        going_on: None,
    }))
}

/// A piece of what an engine writes that tells no ids.
fn piece(head: Option<Box<AnswerHead>>, bytes: &'static str) -> HomeEvent {
    HomeEvent::Tokens(TokenBatch {
        wire: Wire {
            head,
            bytes: Bytes::from_static(bytes.as_bytes()),
        },
        ..TokenBatch::default()
    })
}

fn last_piece(head: Option<Box<AnswerHead>>, bytes: &'static str) -> HomeEvent {
    HomeEvent::Finished(Finish {
        reason: FinishReason::Stop,
        output_tokens: 0,
        text: String::new(),
        wire: Wire {
            head,
            bytes: Bytes::from_static(bytes.as_bytes()),
        },
        prompt_tokens: None,
    })
}

#[tokio::test]
async fn a_whole_answer_is_the_prompt_and_what_follows() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client
        .send(generate(r#","ignore_eos":true,"max_tokens":2"#))
        .await;
    let arrival = server.arrival().await;
    assert_eq!(arrival.ask.kind, Some(RequestKind::Completion));
    assert_eq!(arrival.ask.fit, Fit::Any);
    assert_eq!(arrival.ask.http.path, "/v1/completions");
    assert_eq!(arrival.ask.sketch.model, "m");
    let asked: Value = serde_json::from_slice(&arrival.ask.body).unwrap();
    let expected = json!({"model": "m", "prompt": "Say ", "ignore_eos": true, "max_tokens": 2,
        "temperature": 1.0, "stream": true});
    assert_eq!(asked, expected);
    let events = arrival.accept(4);
    events.send(tokens("Hé")).await.unwrap();
    events.send(tokens("llo")).await.unwrap();
    events.send(finished()).await.unwrap();
    let answer = client.answer().await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let host = HOST.to_string().to_ascii_lowercase();
    assert_eq!(answer.header("x-shoal-host"), Some(host.as_str()));
    assert_eq!(answer.text(), r#"{"text":["Say Héllo"]}"#);
    let node = format!("node=\"{THIS}\"");
    for line in [
        format!(
            "shoal_requests_total{{{node},path=\"/generate\",status=\"200\",outcome=\"completed\"}} 1"
        ),
        format!("shoal_prompt_tokens_total{{{node}}} {PROMPT_TOKENS}"),
        format!("shoal_output_tokens_total{{{node}}} 2"),
        format!("shoal_request_seconds_count{{{node}}} 1"),
        format!("shoal_requests_in_flight{{{node}}} 0"),
    ] {
        server.counted(&line).await;
    }
}

#[tokio::test]
async fn a_stream_is_a_line_for_each_piece_with_all_text_so_far() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(generate(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("Hé")).await.unwrap();
    let head = client.head().await;
    assert_eq!(head.status, 200);
    assert_eq!(head.header("content-type"), Some("application/x-ndjson"));
    let line = |text: &str| format!("{{\"text\":[\"{text}\"]}}\n").into_bytes();
    assert_eq!(client.chunk().await.unwrap(), line("Say Hé"));
    // A token without text says nothing.
    events.send(tokens("")).await.unwrap();
    events.send(tokens("llo")).await.unwrap();
    assert_eq!(client.chunk().await.unwrap(), line("Say Héllo"));
    events.send(finished()).await.unwrap();
    assert_eq!(client.chunk().await.unwrap(), b"");
    server
        .counted(&format!(
            "shoal_requests_total{{node=\"{THIS}\",path=\"/generate\",status=\"200\",outcome=\"completed\"}} 1"
        ))
        .await;
}

#[tokio::test]
async fn a_stream_with_nothing_to_say_repeats_itself() {
    let config = ApiConfig {
        keep_alive: std::time::Duration::from_millis(30),
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    let mut client = server.connect().await;
    client.send(generate(r#","stream":true"#)).await;
    let _events = server.arrival().await.accept(4);
    assert_eq!(client.head().await.status, 200);
    for _ in 0..2 {
        assert_eq!(client.chunk().await.unwrap(), b"{\"text\":[\"Say \"]}\n");
    }
}

#[tokio::test]
async fn what_an_engine_writes_by_itself_is_taken_from_its_chunks() {
    let mut server = Server::start(ApiConfig::default()).await;
    for (kind, expected) in [
        ("", "{\"text\":[\"Say ab\"]}"),
        (
            r#","stream":true"#,
            "{\"text\":[\"Say a\"]}\n{\"text\":[\"Say ab\"]}\n",
        ),
    ] {
        let mut client = server.connect().await;
        client.send(generate(kind)).await;
        let events = server.arrival().await.accept(4);
        for event in [
            piece(
                head(200, "text/event-stream"),
                "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"cho",
            ),
            piece(None, "ices\":[{\"text\":\"b\"}]}\n"),
            last_piece(None, "\ndata: [DONE]\n\n"),
        ] {
            events.send(event).await.unwrap();
        }
        let answer = client.answer().await;
        assert!(answer.status == 200 && answer.whole);
        assert_eq!(answer.text(), expected);
    }
}

#[tokio::test]
async fn an_engines_refusal_is_passed_on() {
    let mut server = Server::start(ApiConfig::default()).await;
    for kind in ["", r#","stream":true"#] {
        let refused = r#"{"error":{"message":"too long"}}"#;
        for event in [last_piece, piece] {
            let mut client = server.connect().await;
            client.send(generate(kind)).await;
            let events = server.arrival().await.accept(4);
            let event = event(head(422, "application/json"), refused);
            events.send(event).await.unwrap();
            events.send(last_piece(None, "")).await.unwrap();
            let answer = client.answer().await;
            assert_eq!((answer.status, answer.text()), (422, refused));
        }
    }
}

#[tokio::test]
async fn a_failure_has_a_status_or_a_line_of_its_own() {
    let mut server = Server::start(ApiConfig::default()).await;
    for (kind, begun, status) in [
        ("", true, 503),
        (r#","stream":true"#, false, 503),
        (r#","stream":true"#, true, 200),
    ] {
        let mut client = server.connect().await;
        client.send(generate(kind)).await;
        let events = server.arrival().await.accept(4);
        if begun {
            events.send(tokens("a")).await.unwrap();
        }
        let lost = HomeError::Lost("10.1.2.3 went away".into());
        events.send(HomeEvent::Failed(lost)).await.unwrap();
        let answer = client.answer().await;
        assert!(answer.whole);
        assert_eq!(answer.status, status);
        let error = answer.text().lines().last().unwrap();
        let error: Value = serde_json::from_str(error).unwrap();
        assert_eq!(error["error"]["code"], "request_lost");
        assert!(!answer.text().contains("10.1.2.3"), "{}", answer.text());
    }
    server
        .counted(&format!(
            "shoal_requests_total{{node=\"{THIS}\",path=\"/generate\",status=\"200\",outcome=\"failed\"}} 1"
        ))
        .await;
}

#[tokio::test]
async fn a_model_must_be_named_unless_there_is_one_only() {
    let mut server = Server::start(ApiConfig::default()).await;
    let nameless = post("/generate", r#"{"prompt":"x"}"#);
    let answer = server.ask(&nameless).await;
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!(error["param"], "model");
    let message = "`model` is required: this mesh has `m`, `org/m 2`";
    assert_eq!(error["message"], message);
    assert!(server.is_quiet());
    server.fake.models.lock().unwrap().truncate(1);
    let mut client = server.connect().await;
    client.send(nameless).await;
    let arrival = server.arrival().await;
    assert_eq!(arrival.ask.sketch.model, "m");
    assert!(arrival.ask.body.ends_with(b"}"));
    arrival.refuse(HomeError::UnknownModel("m".into()));
    assert_eq!(client.answer().await.status, 404);
    server.fake.models.lock().unwrap().clear();
    assert_eq!(
        server
            .ask(&post("/generate", r#"{"prompt":"x"}"#))
            .await
            .status,
        503
    );
}

#[tokio::test]
async fn bad_bodies_name_the_field() {
    let mut server = Server::start(ApiConfig::default()).await;
    for (body, param) in [
        (r#"{"model":"m"}"#, json!("prompt")),
        (r#"{"model":"m","prompt":null}"#, json!("prompt")),
        (r#"{"model":"m","prompt":[1,2]}"#, json!("prompt")),
        (
            r#"{"model":"m","prompt":"x","stream":"yes"}"#,
            json!("stream"),
        ),
        (r#"{"model":"m","prompt":"x","n":2}"#, json!("n")),
        (
            r#"{"model":"m","prompt":"x","best_of":3}"#,
            json!("best_of"),
        ),
        (
            r#"{"model":"m","prompt":"x","use_beam_search":true}"#,
            json!("use_beam_search"),
        ),
        (
            r#"{"model":"m","prompt":"x","max_tokens":0}"#,
            json!("max_tokens"),
        ),
        (r#"{"model":"m","prompt":"x","prompt":"y"}"#, json!(null)),
        (r#"{"model":"m","prompt":"x""#, json!(null)),
        ("[]", json!(null)),
        ("", json!(null)),
    ] {
        for path in ["/generate", "/generate_benchmark"] {
            let answer = server.ask(&post(path, body)).await;
            assert_eq!(answer.status, 400, "{body}");
            assert_eq!(answer.json()["error"]["param"], param, "{body}");
        }
    }
    assert!(server.is_quiet());
    let answer = server.ask(&get("/generate")).await;
    assert_eq!(answer.status, 405);
    assert!(answer.text().contains("use POST with a JSON body"));
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request() {
    let mut server = Server::start(ApiConfig::default()).await;
    for request in [generate(""), generate(r#","stream":true"#), benchmark("")] {
        let mut client = server.connect().await;
        client.send(&request).await;
        let arrival = server.arrival().await;
        drop(client);
        arrival.given_up().await;
        let mut client = server.connect().await;
        client.send(&request).await;
        let events = server.arrival().await.accept(4);
        events.send(tokens("a")).await.unwrap();
        drop(client);
        within(events.closed()).await;
    }
    server
        .counted(&format!("shoal_requests_in_flight{{node=\"{THIS}\"}} 0"))
        .await;
}

#[tokio::test]
async fn a_full_node_says_so() {
    let config = ApiConfig {
        max_requests: 1,
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    let mut client = server.connect().await;
    client.send(generate("")).await;
    let _events = server.arrival().await.accept(4);
    assert_eq!(server.ask(&generate("")).await.status, 429);
    assert_eq!(server.ask(&benchmark("")).await.status, 429);
}

#[tokio::test]
async fn sglangs_own_form_goes_to_an_engine_as_it_is() {
    let mut server = Server::start(ApiConfig::default()).await;
    let body = r#"{"text":"x","sampling_params":{"max_new_tokens":3}}"#;
    let answer = server.ask(&post("/generate", body)).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("send `prompt`"), "{}", answer.text());
    server.fake.models.lock().unwrap()[1].api = shoal_gossip::ModelApi::Http;
    let mut client = server.connect().await;
    client.send(post("/generate?x=1", body)).await;
    let arrival = server.arrival().await;
    assert_eq!((arrival.ask.kind, arrival.ask.fit), (None, Fit::Http));
    assert_eq!(arrival.ask.http.path, "/generate?x=1");
    assert_eq!(arrival.ask.sketch.model, "org/m 2");
    assert_eq!(arrival.ask.body, body);
    let events = arrival.accept(4);
    let said = r#"{"text":"y"}"#;
    let event = last_piece(head(200, "application/json"), said);
    events.send(event).await.unwrap();
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.text()), (200, said));
}

#[tokio::test]
async fn a_benchmark_tells_the_time_of_each_token() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    // That a stream is wished for counts for nothing.
    client.send(benchmark(r#","stream":true"#)).await;
    let arrival = server.arrival().await;
    let asked: Value = serde_json::from_slice(&arrival.ask.body).unwrap();
    assert_eq!(asked["stream_options"], json!({"include_usage": true}));
    let events = arrival.accept(4);
    events.send(tokens("Hé")).await.unwrap();
    let HomeEvent::Tokens(mut both) = tokens("llo") else {
        return;
    };
    both.ids = vec![2, 3];
    events.send(HomeEvent::Tokens(both)).await.unwrap();
    let HomeEvent::Finished(mut end) = finished() else {
        return;
    };
    end.output_tokens = 4;
    events.send(HomeEvent::Finished(end)).await.unwrap();
    let answer = client.answer().await;
    assert_eq!(answer.status, 200);
    let mut body = answer.json();
    let latencies = body["per_token_latency"].take();
    let latencies: Vec<(f64, f64)> = serde_json::from_value(latencies).unwrap();
    assert_eq!(latencies.len(), 4);
    assert!(latencies.is_sorted_by_key(|(at, _)| *at));
    assert!(latencies.iter().all(|(at, took)| *at > 1e9 && *took >= 0.0));
    assert_eq!(
        body,
        json!({"request_id": format!("{THIS}-00000000000000ab"), "generated_text": "Héllo",
            "num_output_tokens_cf": 4, "per_token_latency": null})
    );
}

#[tokio::test]
async fn a_benchmark_counts_as_the_engine_does() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(benchmark("")).await;
    let events = server.arrival().await.accept(4);
    for event in [
        piece(
            head(200, "text/event-stream"),
            "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\n",
        ),
        last_piece(
            None,
            "data: {\"choices\":[],\"usage\":{\"completion_tokens\":3}}\n\ndata: [DONE]\n\n",
        ),
    ] {
        events.send(event).await.unwrap();
    }
    let body = client.answer().await.json();
    assert_eq!(body["generated_text"], "ab");
    assert_eq!(body["num_output_tokens_cf"], 3);
    assert_eq!(body["per_token_latency"].as_array().unwrap().len(), 3);
}
