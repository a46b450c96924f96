//! What a client sees where another engine went on: log-probabilities as of one request, and what only an operator's leave lets
//! pass.

use serde_json::{Value, json};
use shoal_node::config::Inexact;
use shoal_tests::client::Events;
use shoal_tests::engine_server::{Dialect, EngineServer, Fault};

use super::moves::{migrate_as, under_way};
use super::{Beside, CHAT, COMPLETIONS, chat, completion, engine};

/// Two nodes beside stand-ins of vLLM.
async fn vllms(inexact: Inexact) -> Beside {
    let mut servers = Vec::new();
    for _ in 0..2 {
        servers.push(EngineServer::start(Dialect::Vllm, engine("m", 1.0)).await);
    }
    Beside::of_with(servers, inexact).await
}

/// The choices of the next events that have one, up to so many, or all.
async fn choices(events: &mut Events, most: usize) -> Vec<Value> {
    let mut all = Vec::new();
    while all.len() < most
        && let Some(event) = events.next().await
    {
        let chunk: Value = serde_json::from_str(&event).unwrap_or_default();
        let choice = &chunk["choices"][0];
        if choice.is_object() {
            all.push(choice.clone());
        }
    }
    all
}

/// Moves the only stream so many times to the other node, and reads it to its end.
async fn moved(mesh: &Beside, events: &mut Events, times: usize) -> Vec<Value> {
    let mut got = Vec::new();
    for _ in 0..times {
        let (id, host) = under_way(mesh).await;
        let (status, answer) = migrate_as(mesh, &id, 1 - host, "staged").await;
        assert_eq!(status, 200, "{answer}");
        got.extend(choices(events, 3).await);
    }
    got.extend(choices(events, usize::MAX).await);
    got
}

/// Log-probabilities of all tokens in the order of these choices, whatever the pieces they came in, and the text.
fn told(choices: &[Value]) -> (Vec<Value>, String) {
    let (mut tokens, mut text) = (Vec::new(), String::new());
    for choice in choices {
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        text.push_str(choice["text"].as_str().unwrap_or_default());
        let logprobs = &choice["logprobs"];
        tokens.extend(logprobs["content"].as_array().cloned().unwrap_or_default());
        let count = logprobs["tokens"].as_array().map_or(0, Vec::len);
        for at in 0..count {
            let of = |name: &str| logprobs[name][at].clone();
            tokens.push(json!([
                of("tokens"),
                of("token_logprobs"),
                of("top_logprobs"),
                of("text_offset")
            ]));
        }
    }
    (tokens, text)
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_are_those_of_one_request() {
    let mesh = vllms(Inexact::Refuse).await;
    for (path, mut body, asks) in [
        (
            CHAT,
            chat("m", 100),
            json!({"logprobs": true, "top_logprobs": 2}),
        ),
        (CHAT, chat("m", 100), json!({"logprobs": true})),
        (COMPLETIONS, completion("m", 100), json!({"logprobs": 1})),
    ] {
        for (name, value) in asks.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let mut unmoved = mesh.stream(path, &body).await;
        let (expected, text) = told(&choices(&mut unmoved, usize::MAX).await);
        assert_eq!(expected.len(), 100, "{path} {asks}");

        let mut events = mesh.stream(path, &body).await;
        let mut got = choices(&mut events, 6).await;
        got.extend(moved(&mesh, &mut events, 2).await);
        let (tokens, all) = told(&got);
        assert_eq!(all, text, "{path} {asks}");
        assert_eq!(tokens, expected, "{path} {asks}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_draws_other_tokens_elsewhere_moves_with_leave_and_is_counted() {
    let mesh = vllms(Inexact::Allow).await;
    // The lines of both nodes that count moves of this kind and are not zero.
    let counted = async |what: &str| {
        let mut all = Vec::new();
        for index in 0..2 {
            let url = mesh.cluster.http(index);
            let metrics = mesh.cluster.client().get(url, "/metrics").await;
            let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
            let ours =
                |line: &&str| line.starts_with("shoal_engine_inexact") && line.contains(what);
            let lines = metrics.lines().filter(ours).map(str::to_owned);
            all.extend(lines.filter(|line| !line.ends_with(" 0")));
        }
        all
    };
    for (what, more) in [
        ("seed", json!({"seed": 7, "temperature": 1})),
        ("penalty", json!({"presence_penalty": 0.5})),
    ] {
        let mut body = chat("m", 150);
        for (name, value) in more.as_object().expect("an object") {
            body[name] = value.clone();
        }
        assert_eq!(counted(what).await, Vec::<String>::new());
        let mut events = mesh.stream(CHAT, &body).await;
        choices(&mut events, 4).await;
        let (id, host) = under_way(&mesh).await;
        let (status, answer) = migrate_as(&mesh, &id, 1 - host, "staged").await;
        assert_eq!(status, 200, "{more}: {answer}");
        let (_, reason) = events.text().await;
        assert_eq!(reason.as_deref(), Some("length"), "{more}");
        shoal_tests::wait::until("the move in the metrics", || async {
            let lines = counted(what).await;
            match lines.is_empty() {
                false => Ok(()),
                true => Err(lines),
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn control_tokens_are_not_told_where_another_engine_goes_on() {
    let mesh = vllms(Inexact::Refuse).await;
    // Some of the tokens so far, often of the last few, have a name before them when the engine is asked for their text.
    for server in &mesh.servers {
        server.fault(Fault::ControlTokens(5));
    }
    for stop in [json!([]), json!(["and none of the kind"])] {
        let mut body = chat("m", 100);
        body["stop"] = stop.clone();
        let mut unmoved = mesh.stream(CHAT, &body).await;
        let (_, text) = told(&choices(&mut unmoved, usize::MAX).await);
        let mut events = mesh.stream(CHAT, &body).await;
        let mut got = choices(&mut events, 20).await;
        got.extend(moved(&mesh, &mut events, 3).await);
        assert_eq!(told(&got).1, text, "{stop}");
    }
}
