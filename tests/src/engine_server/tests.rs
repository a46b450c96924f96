//! The stand-in itself: its tokens are the engine's, its faults are what they say.

mod faults;
mod shapes;

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};
use shoal_gossip::{Blocks, Epoch, MonotonicClock, NodeId, RequestId, Tokens};
use shoal_node::engine::sim::{self, SimConfig};
use shoal_node::engine::work::{HttpAsk, Job, RequestKind};
use shoal_node::engine::{Engine, EngineEvent};

use super::*;
use crate::client::{Client, Events};
use crate::wait::until;

/// An engine that takes no time.
fn engine() -> Arc<dyn Engine> {
    engine_at(0.0)
}

/// An engine that is this much faster than an A10.
fn engine_at(speed: f64) -> Arc<dyn Engine> {
    let config = SimConfig {
        speed,
        model: Some("sim".to_owned()),
        kv: Some(Tokens(2_048)),
        context: Some(Tokens(1_024)),
        slots: Some(4),
        mean_output: 40,
        ..SimConfig::new("a10/llama-7b")
    };
    sim::start(&config, Arc::new(MonotonicClock::start())).expect("starts")
}

async fn empty(engine: &dyn Engine) {
    until("an empty engine", || async {
        let load = engine.load();
        match (load.used, load.running, load.queued) {
            (Blocks::ZERO, 0, 0) => Ok(()),
            _ => Err(load),
        }
    })
    .await;
}

/// Waits until all requests have ended like this.
async fn ended(server: &EngineServer, ending: Ending) {
    until("the end of all requests", || async {
        let seen = server.seen();
        if seen.iter().all(|seen| seen.ending == ending) {
            Ok(())
        } else {
            Err(seen)
        }
    })
    .await;
}

/// Ids and text of a body that is handed to the engine itself.
async fn straight(engine: &dyn Engine, kind: RequestKind, body: &Value) -> (Vec<u32>, String) {
    let body = Bytes::from(body.to_string());
    let prepared = engine.prepare(kind, body.clone()).await.expect("good");
    let job = Job {
        request: RequestId {
            home: NodeId(1),
            serial: 1,
        },
        epoch: Epoch::FIRST,
        kind: Some(kind),
        http: HttpAsk::default(),
        body,
        prepared,
        generated: Vec::new(),
        spoken: Vec::new(),
        reservation: None,
    };
    let mut events = engine.submit(job).expect("taken");
    let (mut ids, mut text) = (Vec::new(), String::new());
    loop {
        match events.recv().await {
            Some(EngineEvent::Tokens(batch)) => {
                ids.extend(batch.ids);
                text.push_str(&batch.text);
            }
            Some(EngineEvent::Finished(finish)) => {
                text.push_str(&finish.text);
                return (ids, text);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The events of a stream, read as JSON, without `[DONE]`.
async fn all(mut events: Events) -> Vec<Value> {
    assert_eq!(events.status(), 200);
    let mut found = Vec::new();
    while let Some(data) = events.next().await {
        if data != "[DONE]" {
            found.push(serde_json::from_str(&data).expect("JSON"));
        }
    }
    found
}

fn ids(events: &[Value], at: &str) -> Vec<u32> {
    let lists = events
        .iter()
        .filter_map(|event| event.pointer(at)?.as_array());
    lists
        .flatten()
        .map(|id| u32::try_from(id.as_u64().expect("an id")).expect("an id"))
        .collect()
}

fn texts(events: &[Value], at: &str) -> String {
    events
        .iter()
        .filter_map(|event| event.pointer(at)?.as_str())
        .collect()
}

fn chat() -> Value {
    json!({
        "model": "sim",
        "messages": [{"role": "user", "content": "Where do fish sleep?"}],
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": true,
    })
}

fn completion(prompt: impl Into<Value>) -> Value {
    json!({"model": "sim", "prompt": prompt.into(), "temperature": 0, "max_tokens": 24, "seed": 3})
}

fn with(mut body: Value, more: Value) -> Value {
    let members = body.as_object_mut().expect("an object");
    members.extend(more.as_object().expect("an object").clone());
    body
}

#[tokio::test]
async fn vllm_streams_the_tokens_of_the_engine() {
    let server = EngineServer::start(Dialect::Vllm, engine()).await;
    let (client, at) = (Client::default(), server.address());
    let streamed = json!({
        "stream": true,
        "return_token_ids": true,
        "stream_options": {"include_usage": true},
    });
    let paths = [
        ("/v1/chat/completions", RequestKind::Chat, chat()),
        (
            "/v1/completions",
            RequestKind::Completion,
            completion(" deep water"),
        ),
        (
            "/v1/completions",
            RequestKind::Completion,
            completion(vec![20, 21, 22]),
        ),
    ];
    for (path, kind, body) in paths {
        let (wanted, text) = straight(&**server.engine(), kind, &body).await;
        let events = all(client.stream(at, path, &with(body, streamed.clone())).await).await;
        assert_eq!(ids(&events, "/choices/0/token_ids"), wanted);
        let told = texts(&events, "/choices/0/text") + &texts(&events, "/choices/0/delta/content");
        assert_eq!(told, text);
        let last = events.last().expect("usage");
        assert_eq!(last["usage"]["completion_tokens"], wanted.len());
        assert!(events[events.len() - 2]["choices"][0]["finish_reason"].is_string());
    }
}

#[tokio::test]
async fn llama_server_streams_the_tokens_of_the_engine() {
    let server = EngineServer::start(Dialect::LlamaServer, engine()).await;
    let (client, at) = (Client::default(), server.address());
    let body = completion(vec![20, 21, 22]);
    let (wanted, text) = straight(&**server.engine(), RequestKind::Completion, &body).await;
    let own = with(
        body,
        json!({"stream": true, "return_tokens": true, "n_predict": 24}),
    );
    let events = all(client.stream(at, "/completion", &own).await).await;
    assert_eq!(ids(&events, "/tokens"), wanted);
    assert_eq!(texts(&events, "/content"), text);
    let last = events.last().expect("the last event");
    assert_eq!(
        (&last["stop"], &last["stop_type"], &last["tokens_predicted"]),
        (&json!(true), &json!("limit"), &json!(wanted.len()))
    );

    let (wanted, text) = straight(&**server.engine(), RequestKind::Chat, &chat()).await;
    let told = json!({"stream": true, "logprobs": true, "top_logprobs": 2});
    let events = client
        .stream(at, "/v1/chat/completions", &with(chat(), told))
        .await;
    let events = all(events).await;
    let told: Vec<u64> = events
        .iter()
        .filter_map(|event| event.pointer("/choices/0/logprobs/content/0/id")?.as_u64())
        .collect();
    let wanted: Vec<u64> = wanted.into_iter().map(u64::from).collect();
    assert_eq!(told, wanted);
    assert_eq!(texts(&events, "/choices/0/delta/content"), text);
}

#[tokio::test]
async fn sglang_streams_the_tokens_of_the_engine() {
    let server = EngineServer::start(Dialect::Sglang, engine()).await;
    let (client, at) = (Client::default(), server.address());
    let body = completion(vec![20, 21, 22]);
    let (wanted, text) = straight(&**server.engine(), RequestKind::Completion, &body).await;
    let own = json!({
        "input_ids": [20, 21, 22],
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "sampling_seed": 3},
        "stream": true,
    });
    let events = all(client.stream(at, "/generate", &own).await).await;
    let last = events.last().expect("the last event");
    assert_eq!(ids(std::slice::from_ref(last), "/output_ids"), wanted);
    assert_eq!(last["text"], text);
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "length");
    assert_eq!(ids(&events[..1], "/output_ids"), wanted[..1]);
}

#[tokio::test]
async fn plain_servers_say_what_the_engine_says() {
    for dialect in [Dialect::OpenAi, Dialect::Sglang, Dialect::LlamaServer] {
        let server = EngineServer::start(dialect, engine()).await;
        let (client, at) = (Client::default(), server.address());
        for (path, kind, body) in [
            ("/v1/chat/completions", RequestKind::Chat, chat()),
            (
                "/v1/completions",
                RequestKind::Completion,
                completion("the"),
            ),
        ] {
            let (_, text) = straight(&**server.engine(), kind, &body).await;
            let whole = client.post(at, path, &body).await.json();
            let choice = &whole["choices"][0];
            let told = choice["text"]
                .as_str()
                .or_else(|| choice["message"]["content"].as_str());
            assert_eq!(told, Some(text.as_str()), "{dialect:?} {path}");
            let body = with(body, json!({"stream": true}));
            let mut events = client.stream(at, path, &body).await;
            let (told, reason) = events.text().await;
            assert_eq!((told, reason.is_some()), (text, true), "{dialect:?} {path}");
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_kv() {
    for dialect in [
        Dialect::Vllm,
        Dialect::LlamaServer,
        Dialect::Sglang,
        Dialect::OpenAi,
    ] {
        let server = EngineServer::start(dialect, engine_at(1.0)).await;
        let (client, at) = (Client::default(), server.address());
        let long = json!({"max_tokens": 900, "ignore_eos": true});
        let streamed = with(with(chat(), long.clone()), json!({"stream": true}));
        let mut events = client.stream(at, "/v1/chat/completions", &streamed).await;
        assert!(events.next().await.is_some());
        let whole = with(chat(), long);
        let waiting = client.post(at, "/v1/chat/completions", &whole);
        tokio::select! {
            answer = waiting => panic!("{answer:?}"),
            () = until("two that run", || async {
                let load = server.engine().load();
                if load.running == 2 { Ok(()) } else { Err(load) }
            }) => {}
        }
        drop((events, client));
        empty(&**server.engine()).await;
        assert_eq!(server.seen().len(), 2, "{dialect:?}");
        ended(&server, Ending::ClientLeft).await;
    }
}
