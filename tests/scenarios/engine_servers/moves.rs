//! Running requests move between engines that speak HTTP, by recompute, and their clients do not notice.

use serde_json::{Value, json};
use shoal_tests::engine_server::Dialect;
use shoal_tests::wait::until;

use super::{Beside, CHAT, COMPLETIONS, chat, completion};

/// The only request under way, as its home lists it.
pub(super) async fn under_way(mesh: &Beside) -> (String, usize) {
    until("a request under way", || async {
        let answer = mesh
            .cluster
            .client()
            .get(mesh.cluster.http(0), "/mesh/requests")
            .await
            .json();
        let rows = answer["requests"].as_array().cloned().unwrap_or_default();
        let [row] = rows.as_slice() else {
            return Err(answer);
        };
        let host = (0..2).find(|index| row["host"] == mesh.cluster.id(*index).to_string());
        match (row["id"].as_str(), host) {
            (Some(id), Some(host)) => Ok((id.to_owned(), host)),
            _ => Err(answer),
        }
    })
    .await
}

async fn migrate(mesh: &Beside, id: &str, to: usize) -> (u16, Value) {
    migrate_as(mesh, id, to, "staged").await
}

/// Moves a request in this manner.
pub(super) async fn migrate_as(mesh: &Beside, id: &str, to: usize, copy: &str) -> (u16, Value) {
    let path = format!("/mesh/requests/{id}/migrate");
    let to = mesh.cluster.id(to).to_string();
    let answer = mesh.post(&path, &json!({"to": to, "copy": copy})).await;
    (answer.status.as_u16(), answer.json())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_moves_to_and_fro() {
    for dialect in [Dialect::Vllm, Dialect::LlamaServer] {
        let mesh = Beside::at_speed(&[(dialect, "m"), (dialect, "m")], 1.0).await;
        for (path, mut body) in [(CHAT, chat("m", 120)), (COMPLETIONS, completion("m", 120))] {
            body["stream_options"] = json!({"include_usage": true});
            let (expected, _) = mesh.stream(path, &body).await.text().await;
            let mut events = mesh.stream(path, &body).await;
            let mut first = String::new();
            for _ in 0..6 {
                let event = events.next().await.expect("an event");
                let chunk: Value = serde_json::from_str(&event).expect("JSON");
                let choice = &chunk["choices"][0];
                first.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
                first.push_str(choice["text"].as_str().unwrap_or_default());
            }
            for _ in 0..2 {
                let (id, host) = under_way(&mesh).await;
                let (status, answer) = migrate(&mesh, &id, 1 - host).await;
                assert_eq!(status, 200, "{dialect:?} {path}: {answer}");
                for _ in 0..3 {
                    let event = events.next().await.expect("an event");
                    let chunk: Value = serde_json::from_str(&event).expect("JSON");
                    let choice = &chunk["choices"][0];
                    first.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
                    first.push_str(choice["text"].as_str().unwrap_or_default());
                }
            }
            let (rest, reason) = events.text().await;
            assert_eq!(first + &rest, expected, "{dialect:?} {path}");
            assert_eq!(reason.as_deref(), Some("length"));
            let metrics = mesh
                .cluster
                .client()
                .get(mesh.cluster.http(0), "/metrics")
                .await;
            let metrics = String::from_utf8(metrics.body.to_vec()).expect("text");
            assert!(
                !metrics.contains("shoal_replays_total{"),
                "a move needs no replay"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_engine_would_get_wrong_does_not_move() {
    let mesh = Beside::at_speed(&[(Dialect::Vllm, "m"), (Dialect::Vllm, "m")], 1.0).await;
    for more in [
        json!({"seed": 7, "temperature": 1}),
        json!({"presence_penalty": 0.5}),
        json!({"response_format": {"type": "json_object"}}),
    ] {
        let mut body = chat("m", 200);
        for (name, value) in more.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let mut events = mesh.stream(CHAT, &body).await;
        assert_eq!(events.status(), 200, "{more}");
        for _ in 0..4 {
            events.next().await.expect("an event");
        }
        let (id, host) = under_way(&mesh).await;
        let (status, answer) = migrate(&mesh, &id, 1 - host).await;
        assert_eq!(status, 409, "{more}: {answer}");
        let (_, reason) = events.text().await;
        assert_eq!(reason.as_deref(), Some("length"), "{more}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_of_two_kinds_do_not_take_over_from_each_other() {
    let mesh = Beside::at_speed(&[(Dialect::Vllm, "m"), (Dialect::LlamaServer, "m")], 1.0).await;
    let mut events = mesh.stream(CHAT, &chat("m", 200)).await;
    for _ in 0..4 {
        events.next().await.expect("an event");
    }
    let (id, host) = under_way(&mesh).await;
    let (status, answer) = migrate(&mesh, &id, 1 - host).await;
    assert_eq!(status, 409, "{answer}");
    let (_, reason) = events.text().await;
    assert_eq!(reason.as_deref(), Some("length"));
}
