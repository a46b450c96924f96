//! Engines that die, hang, refuse or talk nonsense: the client gets its answer from another, or a reason.

use bytes::Bytes;
use serde_json::Value;
use shoal_tests::client::Events;
use shoal_tests::engine_server::{Dialect, EngineServer, Fault};
use shoal_tests::wait::until;

use super::{Beside, CHAT, COMPLETIONS, chat, completion, whole};

/// A stream's text, reason, and the error it ended with.
async fn outcome(events: &mut Events) -> (String, Option<String>, Option<Value>) {
    let (mut text, mut reason) = (String::new(), None);
    while let Some(data) = events.next().await {
        if data == "[DONE]" {
            break;
        }
        let chunk: Value = serde_json::from_str(&data).expect("a JSON event");
        if let Some(error) = chunk.get("error") {
            return (text, reason, Some(error.clone()));
        }
        let choice = &chunk["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        text.push_str(choice["text"].as_str().unwrap_or_default());
        reason = choice["finish_reason"]
            .as_str()
            .map(str::to_owned)
            .or(reason);
    }
    (text, reason, None)
}

/// Whichever engine is asked first meets a fault. Those that go on from ids are asked elsewhere, and do not.
fn one_meets(mesh: &Beside, fault: &Fault) {
    for server in &mesh.servers {
        server.fault_at(CHAT, fault.clone());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_dies_before_its_first_word_is_asked_of_another() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m"), (Dialect::Vllm, "m")]).await;
    let (expected, _) = mesh.stream(CHAT, &chat("m", 12)).await.text().await;
    let html = Fault::Status {
        status: 200,
        headers: vec![("content-type", "text/html".into())],
        body: Bytes::from_static(b"<html>nginx</html>"),
    };
    let moved = Fault::Status {
        status: 307,
        headers: vec![("location", "http://127.0.0.1:1/elsewhere".into())],
        body: Bytes::new(),
    };
    for fault in [
        Fault::DieBeforeHead,
        Fault::DieAfterHead,
        Fault::DieAfterEvents(0),
        Fault::HalfEvent(0),
        Fault::CutAfterEvents(0),
        Fault::ContentType("text/plain"),
        Fault::refusal(429, Some(1)),
        Fault::refusal(503, None),
        Fault::refusal(500, None),
        html,
        moved,
    ] {
        // Only one of the two, and only if it is the one that is asked first: then again until it was.
        for _ in 0..20 {
            mesh.servers[0].fault(fault.clone());
            let (text, reason, error) = outcome(&mut mesh.stream(CHAT, &chat("m", 12)).await).await;
            assert_eq!(
                (text.as_str(), error),
                (expected.as_str(), None),
                "{fault:?}"
            );
            assert_eq!(reason.as_deref(), Some("length"), "{fault:?}");
            let answer = mesh.post(CHAT, &whole(&chat("m", 12))).await;
            assert_eq!(answer.status, 200, "{fault:?}: {:?}", answer.body);
            assert_eq!(answer.json()["choices"][0]["message"]["content"], *expected);
        }
        mesh.servers[0].mend();
        until("both to be ready", || async {
            let rows = (mesh.row(0).await?, mesh.row(1).await?);
            let ready = |row: &Value| row["load"]["readiness"] == "Ready";
            match ready(&rows.0) && ready(&rows.1) {
                true => Ok(()),
                false => Err(format!("{rows:?}")),
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_dies_in_the_middle_goes_on_at_another_engine() {
    for dialect in [Dialect::Vllm, Dialect::LlamaServer] {
        let mesh = Beside::start(&[(dialect, "m"), (dialect, "m")]).await;
        let body = chat("m", 30);
        let (expected, _) = mesh.stream(CHAT, &body).await.text().await;
        for fault in [
            Fault::DieAfterEvents(7),
            Fault::HalfEvent(5),
            Fault::CutAfterEvents(9),
            Fault::StallAfterEvents(4),
        ] {
            one_meets(&mesh, &fault);
            let (text, reason, error) = outcome(&mut mesh.stream(CHAT, &body).await).await;
            assert_eq!(
                (text.as_str(), error),
                (expected.as_str(), None),
                "{dialect:?} {fault:?}"
            );
            assert_eq!(reason.as_deref(), Some("length"), "{dialect:?} {fault:?}");
            mesh.servers.iter().for_each(EngineServer::mend);
        }
        // Completions go on at the path they began at: one engine alone dies of them.
        let body = completion("m", 30);
        let (expected, _) = mesh.stream(COMPLETIONS, &body).await.text().await;
        mesh.servers[0].fault_always(Fault::DieAfterEvents(7));
        for _ in 0..10 {
            let (text, reason, error) = outcome(&mut mesh.stream(COMPLETIONS, &body).await).await;
            assert_eq!(
                (text.as_str(), error),
                (expected.as_str(), None),
                "{dialect:?}"
            );
            assert_eq!(reason.as_deref(), Some("length"), "{dialect:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_stay_the_same_when_another_engine_goes_on() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m"), (Dialect::Vllm, "m")]).await;
    one_meets(&mesh, &Fault::DieAfterEvents(6));
    let mut body = chat("m", 20);
    body["stream_options"] = serde_json::json!({"include_usage": true});
    let mut events = mesh.stream(CHAT, &body).await;
    let (mut names, mut usage) = (Vec::new(), Value::Null);
    while let Some(data) = events.next().await {
        let Ok(chunk) = serde_json::from_str::<Value>(&data) else {
            break;
        };
        names.push((
            chunk["id"].clone(),
            chunk["created"].clone(),
            chunk["model"].clone(),
        ));
        if chunk["usage"].is_object() {
            usage = chunk["usage"].clone();
        }
    }
    names.dedup();
    assert_eq!(names.len(), 1, "{names:?}");
    assert_eq!(usage["completion_tokens"], 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_nobody_can_go_on_with_says_so_and_ends_like_any_other() {
    let mesh = Beside::start(&[(Dialect::OpenAi, "m"), (Dialect::OpenAi, "m")]).await;
    for fault in [
        Fault::DieAfterEvents(5),
        Fault::HalfEvent(5),
        Fault::StallAfterEvents(5),
    ] {
        one_meets(&mesh, &fault);
        let mut events = mesh.stream(CHAT, &chat("m", 20)).await;
        let (text, reason, error) = outcome(&mut events).await;
        let error = error.expect("an error");
        assert_eq!(
            (error["type"].as_str(), reason),
            (Some("stream_error"), None),
            "{fault:?}"
        );
        assert!(!text.is_empty());
        assert_eq!(events.next().await.as_deref(), Some("[DONE]"), "{fault:?}");
        mesh.servers.iter().for_each(EngineServer::mend);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engines_own_reason_is_told_when_there_is_no_other() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m")]).await;
    let full = Fault::refusal(429, Some(1));
    for (fault, status) in [
        (full, 429),
        (Fault::refusal(503, None), 503),
        (Fault::refusal(422, None), 422),
    ] {
        mesh.servers[0].fault(fault.clone());
        let answer = mesh.post(CHAT, &chat("m", 3)).await;
        assert_eq!(answer.status, status, "{fault:?}");
        assert_eq!(
            answer.header("retry-after").is_empty(),
            status == 422,
            "{fault:?}"
        );
        until("work again", || async {
            let answer = mesh.post(CHAT, &whole(&chat("m", 3))).await;
            if answer.status == 200 {
                Ok(())
            } else {
                Err(answer)
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_killed_takes_nobody_with_it() {
    let mesh = Beside::at_speed(&[(Dialect::Vllm, "m"), (Dialect::Vllm, "m")], 2.0).await;
    let (expected, _) = mesh.stream(CHAT, &chat("m", 60)).await.text().await;
    let mut streams = Vec::new();
    for _ in 0..8 {
        streams.push(mesh.stream(CHAT, &chat("m", 60)).await);
    }
    mesh.servers[1].kill().await;
    for mut stream in streams {
        let (text, reason, error) = outcome(&mut stream).await;
        assert_eq!((text.as_str(), error), (expected.as_str(), None));
        assert_eq!(reason.as_deref(), Some("length"));
    }
    until("it shows", || async {
        let row = mesh.row(1).await?;
        if row["load"]["readiness"] == "Failed" {
            Ok(())
        } else {
            Err(row.to_string())
        }
    })
    .await;
    let (text, _, error) = outcome(&mut mesh.stream(CHAT, &chat("m", 60)).await).await;
    assert_eq!((text.as_str(), error), (expected.as_str(), None));
    mesh.servers[1].restart().await;
    until("it is back", || async {
        let row = mesh.row(1).await?;
        if row["load"]["readiness"] == "Ready" {
            Ok(())
        } else {
            Err(row.to_string())
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_holds_up_its_own_stream_and_no_memory() {
    let mesh = Beside::at_speed(&[(Dialect::Vllm, "m")], 0.0).await;
    let mut body = chat("m", 4_000);
    body["messages"][0]["content"] = "x".into();
    let mut slow = mesh.stream(CHAT, &body).await;
    slow.next().await.expect("an event");
    let (_, reason) = mesh.stream(CHAT, &chat("m", 50)).await.text().await;
    assert_eq!(reason.as_deref(), Some("length"));
    let (_, reason) = slow.text().await;
    assert_eq!(reason.as_deref(), Some("length"));
}
