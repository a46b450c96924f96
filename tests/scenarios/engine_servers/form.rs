//! What goes through, byte for byte.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use shoal_node::config::EngineKind;
use shoal_tests::client::Events;
use shoal_tests::cluster::Cluster;
use shoal_tests::engine_server::{Dialect, Ending, EngineServer, Fault};
use shoal_tests::wait::until;

use super::{Beside, CHAT, COMPLETIONS, chat, completion, whole};

/// All events of a stream, `[DONE]` included.
async fn events(stream: &mut Events) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(event) = stream.next().await {
        all.push(event);
    }
    all
}

/// A stream's events without what differs between two requests.
async fn nameless(stream: &mut Events) -> Vec<String> {
    let mut all = events(stream).await;
    for event in &mut all {
        if let Ok(mut chunk) = serde_json::from_str::<Value>(event) {
            chunk["id"] = json!("");
            chunk["created"] = json!(0);
            *event = chunk.to_string();
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_of_the_engine() {
    for dialect in [
        Dialect::Vllm,
        Dialect::LlamaServer,
        Dialect::Sglang,
        Dialect::OpenAi,
    ] {
        let mesh = Beside::start(&[(dialect, "m")]).await;
        let client = mesh.cluster.client();
        let direct = mesh.servers[0].address();
        for (path, body) in [(CHAT, chat("m", 20)), (COMPLETIONS, completion("m", 20))] {
            let mut expected = client.stream(direct, path, &body).await;
            let mut got = mesh.stream(path, &body).await;
            assert_eq!(got.status(), 200);
            assert_eq!(got.header("content-type"), expected.header("content-type"));
            assert_eq!(got.header("x-shoal-host"), mesh.cluster.id(0).to_string());
            let expected = nameless(&mut expected).await;
            assert_eq!(nameless(&mut got).await, expected, "{dialect:?} {path}");
            let got = mesh.post(path, &whole(&body)).await;
            let expected = client.post(direct, path, &whole(&body)).await;
            assert_eq!(
                (got.status, got.header("content-type")),
                (expected.status, expected.header("content-type"))
            );
            let name = if path == CHAT { "message" } else { "text" };
            assert_eq!(
                got.json()["choices"][0][name],
                expected.json()["choices"][0][name]
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_reach_the_engine_as_they_came() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m")]).await;
    let mut odd = whole(&chat("m", 3));
    odd["tools"] = json!([]);
    odd["some_new_field"] = json!({"deep": [1, 2.50, "ü"]});
    odd["messages"][0]["content"] = json!([{"type": "text", "text": "hello"}]);
    for body in [odd, whole(&completion("m", 3))] {
        let path = if body.get("messages").is_some() {
            CHAT
        } else {
            COMPLETIONS
        };
        assert_eq!(mesh.post(path, &body).await.status, 200);
        let seen = mesh.servers[0].seen_at(path);
        let last = seen.last().expect("a request");
        assert_eq!(last.body, body.to_string().as_bytes());
    }
    // One that may move asks for ids at its end, and is else the same.
    let body = chat("m", 3);
    events(&mut mesh.stream(CHAT, &body).await).await;
    let seen = mesh.servers[0].seen_at(CHAT);
    let sent = String::from_utf8(seen.last().expect("a request").body.to_vec()).expect("text");
    let text = body.to_string();
    let beginning = text.strip_suffix('}').expect("an object");
    assert_eq!(sent, format!("{beginning},\"return_token_ids\":true}}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_of_lines_comments_and_cuts_go_through_and_confuse_nobody() {
    let manners: [&[Fault]; 5] = [
        &[Fault::CrLf],
        &[Fault::Comments],
        &[Fault::SplitAt(1)],
        &[Fault::SplitAt(7), Fault::CrLf, Fault::Comments],
        &[Fault::ManyTokensPerEvent(5)],
    ];
    let mesh = Beside::start(&[(Dialect::Vllm, "m")]).await;
    let mut plain = mesh.stream(CHAT, &chat("m", 20)).await;
    let (expected, _) = plain.text().await;
    for manner in manners {
        for fault in manner {
            mesh.servers[0].fault_always(fault.clone());
        }
        let uri = format!("http://{}{CHAT}", mesh.cluster.http(0));
        let request = hyper::Request::post(uri)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(chat("m", 20).to_string())))
            .expect("a request");
        let pool = Pool::builder(TokioExecutor::new()).build_http();
        let answer = pool.request(request).await.expect("an answer");
        let body = answer
            .into_body()
            .collect()
            .await
            .expect("a body")
            .to_bytes();
        let body = String::from_utf8(body.to_vec()).expect("text");
        assert_eq!(
            body.contains("\r\n"),
            manner.contains(&Fault::CrLf),
            "{manner:?}"
        );
        let told = body.replace("\r\n", "\n");
        let text: String = told
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .filter_map(|data| serde_json::from_str::<Value>(data).ok())
            .filter_map(|chunk| {
                chunk["choices"][0]["delta"]["content"]
                    .as_str()
                    .map(str::to_owned)
            })
            .collect();
        assert_eq!(text, expected, "{manner:?}");
        assert!(told.ends_with("data: [DONE]\n\n"), "{manner:?}");
        assert!(!told.contains("token_ids\":["), "{manner:?}");
        mesh.servers[0].mend();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_with_an_odd_clock_or_a_long_line_is_read_like_any_other() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m")]).await;
    for fault in [Fault::OddClock, Fault::OddClock, Fault::LongLine(300_000)] {
        mesh.servers[0].fault(fault.clone());
        let (_, reason) = mesh.stream(CHAT, &chat("m", 8)).await.text().await;
        assert_eq!(reason.as_deref(), Some("length"), "{fault:?}");
        mesh.servers[0].mend();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_paths_are_passed_on_and_those_that_control_an_engine_are_not() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m")]).await;
    for (path, body) in [
        ("/tokenize", json!({"model": "m", "prompt": "hello"})),
        ("/detokenize", json!({"model": "m", "tokens": [72, 73]})),
        ("/v1/custom?x=1", json!({"model": "m", "anything": [1]})),
        ("/tokenize", json!({"prompt": "without a model"})),
    ] {
        let direct = mesh
            .cluster
            .client()
            .post(mesh.servers[0].address(), path, &body)
            .await;
        let got = mesh.post(path, &body).await;
        assert_eq!(
            (got.status, &got.body),
            (direct.status, &direct.body),
            "{path}"
        );
        assert_eq!(got.status, 200, "{path}");
    }
    for path in [
        "/sleep",
        "/slots/0?action=erase",
        "/v1/load_lora_adapter",
        "/abort_request",
    ] {
        let got = mesh.post(path, &json!({"model": "m"})).await;
        assert_eq!(got.status, 404, "{path}");
        let plain = path.split('?').next().expect("a path");
        assert_eq!(mesh.servers[0].seen_at(plain).len(), 0, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_hears_of_a_client_that_leaves() {
    let mesh = Beside::at_speed(&[(Dialect::Vllm, "m")], 1.0).await;
    // In the middle of a stream, and before a whole answer.
    let mut events = mesh.stream(CHAT, &chat("m", 2_000)).await;
    for _ in 0..5 {
        events.next().await.expect("an event");
    }
    drop(events);
    let body = whole(&completion("m", 2_000));
    let waiting = mesh.post(COMPLETIONS, &body);
    tokio::select! {
        answer = waiting => panic!("it takes long: {answer:?}"),
        () = until("a request under way", || async {
            match mesh.servers[0].seen_at(COMPLETIONS).len() {
                0 => Err("none"),
                _ => Ok(()),
            }
        }) => {}
    }
    until("both to be aborted", || async {
        let seen = mesh.servers[0].seen();
        let work = seen
            .iter()
            .filter(|seen| [CHAT, COMPLETIONS].contains(&seen.path.as_str()));
        let endings: Vec<_> = work.map(|seen| seen.ending).collect();
        let load = mesh.servers[0].engine().load();
        match endings.iter().all(|ending| *ending == Ending::ClientLeft) && load.running == 0 {
            true => Ok(()),
            false => Err((endings, load)),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engine_gets_its_own_key_and_not_the_clients() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let key = folder.path().join("key");
    std::fs::write(&key, "sk-engine\n").expect("written");
    let server = EngineServer::start(Dialect::Vllm, super::engine("m", 20.0)).await;
    let cluster = Cluster::start(1, |_, config| {
        super::beside(&server, config);
        if let EngineKind::Http(http) = &mut config.engine.kind {
            http.key_file = Some(key.clone());
        }
    })
    .await;
    let request = hyper::Request::post(format!("http://{}{CHAT}", cluster.http(0)))
        .header("content-type", "application/json")
        .header("authorization", "Bearer sk-client")
        .header("cookie", "session=1")
        .header("traceparent", "00-abc")
        .header("x-request-id", "mine")
        .body(Full::new(Bytes::from(whole(&chat("m", 2)).to_string())))
        .expect("a request");
    let pool = Pool::builder(TokioExecutor::new()).build_http();
    let answer = pool.request(request).await.expect("an answer");
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["x-request-id"], "mine");
    let seen = server.seen_at(CHAT);
    let seen = seen.last().expect("a request");
    assert_eq!(seen.header("authorization"), "Bearer sk-engine");
    assert_eq!(seen.header("cookie"), "");
    assert_eq!(seen.header("traceparent"), "00-abc");
    assert!(!seen.header("x-request-id").is_empty());
    assert_ne!(
        seen.header("x-request-id"),
        "mine",
        "a client's may not be unique"
    );
}
