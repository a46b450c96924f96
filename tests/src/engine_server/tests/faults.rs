//! Faults, seen from the wire.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

/// All bytes of the answer to a chat, and how they ended.
async fn raw(server: &EngineServer) -> (String, Result<(), ErrorKind>) {
    let mut stream = TcpStream::connect(server.address()).await.expect("listens");
    let body = with(
        chat(),
        json!({"stream": true, "max_tokens": 8, "ignore_eos": true}),
    );
    let body = body.to_string();
    let length = body.len();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut bytes = Vec::new();
    let end = stream.read_to_end(&mut bytes).await;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (text, end.map(drop).map_err(|error| error.kind()))
}

async fn vllm() -> EngineServer {
    EngineServer::start(Dialect::Vllm, engine()).await
}

fn count(text: &str) -> usize {
    text.matches("data: {").count()
}

#[tokio::test]
async fn a_server_dies_where_it_is_told_to() {
    let server = vllm().await;
    for events in [0, 1, 5] {
        server.fault(Fault::DieAfterEvents(events));
        let (text, end) = raw(&server).await;
        assert_eq!(
            (count(&text), end),
            (events, Err(ErrorKind::ConnectionReset)),
            "{text}"
        );
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    }
    server.fault(Fault::DieAfterHead);
    let (text, end) = raw(&server).await;
    assert!(
        text.starts_with("HTTP/1.1 200 OK\r\n") && count(&text) == 0,
        "{text}"
    );
    assert_eq!(end, Err(ErrorKind::ConnectionReset));
    server.fault(Fault::DieBeforeHead);
    assert_eq!(
        raw(&server).await,
        (String::new(), Err(ErrorKind::ConnectionReset))
    );
    server.fault(Fault::CutAfterEvents(2));
    let (text, end) = raw(&server).await;
    assert_eq!((count(&text), end), (2, Ok(())));
    assert!(!text.ends_with("0\r\n\r\n"), "{text}");
    let seen = server.seen();
    assert!(
        seen.iter().all(|seen| seen.ending == Ending::Broken),
        "{seen:?}"
    );
    // Only those it was told to.
    let (text, end) = raw(&server).await;
    assert!(
        end.is_ok() && text.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"),
        "{text}"
    );
    empty(&**server.engine()).await;
}

#[tokio::test]
async fn half_an_event_ends_in_order() {
    let server = vllm().await;
    server.fault(Fault::HalfEvent(2));
    let (text, end) = raw(&server).await;
    assert!(end.is_ok() && text.ends_with("\r\n0\r\n\r\n"), "{text}");
    assert_eq!(
        (count(&text), text.matches("]}\n\n").count()),
        (3, 1),
        "{text}"
    );
}

#[tokio::test]
async fn manners_change_the_form_and_not_the_text() {
    let server = vllm().await;
    let client = Client::default();
    let body = with(chat(), json!({"stream": true, "return_token_ids": true}));
    let events = client
        .stream(server.address(), "/v1/chat/completions", &body)
        .await;
    let plain = all(events).await;
    server.fault(Fault::Comments);
    server.fault(Fault::SplitAt(7));
    server.fault(Fault::ManyTokensPerEvent(3));
    server.fault(Fault::OddClock);
    let events = client
        .stream(server.address(), "/v1/chat/completions", &body)
        .await;
    assert_eq!(events.header("date"), "Thu, 01 Jan 1970 00:00:07 GMT");
    let odd = all(events).await;
    let at = "/choices/0/token_ids";
    assert_eq!(ids(&odd, at), ids(&plain, at));
    assert_eq!(
        odd[1]["choices"][0]["token_ids"].as_array().map(Vec::len),
        Some(3)
    );
    assert_eq!(
        odd[1]["created"].as_u64().map(|at| at % 32_503_680_000),
        Some(0)
    );

    server.fault(Fault::CrLf);
    let (text, end) = raw(&server).await;
    assert!(end.is_ok() && text.contains(": p"), "{text}");
    server.mend();
    server.fault(Fault::CrLf);
    let (text, _) = raw(&server).await;
    assert!(text.contains("data: [DONE]\r\n\r\n"), "{text}");
    server.mend();
    server.fault(Fault::LongLine(70_000));
    let (text, _) = raw(&server).await;
    assert!(text.lines().any(|line| line.len() >= 70_000));
    server.fault(Fault::ContentType("text/html"));
    let (text, _) = raw(&server).await;
    assert!(text.contains("content-type: text/html\r\n"), "{text}");
}

#[tokio::test]
async fn lost_ids_leave_the_text_and_the_count() {
    let server = EngineServer::start(Dialect::LlamaServer, engine()).await;
    server.fault(Fault::LostIds(3));
    let body = json!({"prompt": [20, 21], "n_predict": 9, "ignore_eos": true, "stream": true,
        "return_tokens": true, "temperature": 0});
    let events = Client::default()
        .stream(server.address(), "/completion", &body)
        .await;
    let events = all(events).await;
    assert_eq!(ids(&events, "/tokens").len(), 3);
    assert_eq!(events[0]["tokens_predicted"], 3);
}

#[tokio::test]
async fn a_stalled_server_keeps_the_connection() {
    let server = vllm().await;
    server.fault(Fault::StallAfterEvents(2));
    let body = with(chat(), json!({"stream": true}));
    let client = Client::default();
    let mut events = client
        .stream(server.address(), "/v1/chat/completions", &body)
        .await;
    assert!(events.next().await.is_some() && events.next().await.is_some());
    let third = tokio::time::timeout(Duration::from_millis(200), events.next()).await;
    assert!(third.is_err(), "{third:?}");
    assert_eq!(server.seen()[0].ending, Ending::Open);
    drop((events, client));
    empty(&**server.engine()).await;
    ended(&server, Ending::ClientLeft).await;
}

#[tokio::test]
async fn a_refusal_meets_the_request_it_is_meant_for() {
    let server = vllm().await;
    let (client, at) = (Client::default(), server.address());
    server.fault(Fault::refusal(429, Some(7)));
    server.fault_at("/tokenize", Fault::refusal(500, None));
    assert_eq!(client.get(at, "/v1/models").await.status, 200);
    assert_eq!(client.post(at, "/tokenize", &chat()).await.status, 500);
    let answer = client.post(at, "/v1/chat/completions", &chat()).await;
    assert_eq!(
        (answer.status.as_u16(), answer.header("retry-after")),
        (429, "7")
    );
    let answer = client.post(at, "/v1/custom", &json!({"a": 1})).await;
    assert_eq!(answer.json(), json!({"a": 1}));
    assert_eq!(server.seen_at("/tokenize").len(), 1);
}

#[tokio::test]
async fn a_kill_resets_and_a_restart_is_a_new_life() {
    let server = EngineServer::start(Dialect::Vllm, engine_at(1.0)).await;
    let born = server.shared.born();
    let cut = async {
        let mut stream = TcpStream::connect(server.address()).await.expect("listens");
        let body = with(
            chat(),
            json!({"max_tokens": 900, "ignore_eos": true, "stream": true}),
        );
        let body = body.to_string();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream
            .write_all((head + &body).as_bytes())
            .await
            .expect("sent");
        let mut bytes = Vec::new();
        let end = stream.read_to_end(&mut bytes).await;
        end.map_err(|error| error.kind())
    };
    let kill = async {
        until("a request that runs", || async {
            let load = server.engine().load();
            if load.running == 1 { Ok(()) } else { Err(load) }
        })
        .await;
        server.kill().await;
    };
    let (end, ()) = tokio::join!(cut, kill);
    assert_eq!(end, Err(ErrorKind::ConnectionReset));
    empty(&**server.engine()).await;
    assert_eq!(server.seen()[0].ending, Ending::Broken);
    let refused = TcpStream::connect(server.address()).await.map(drop);
    assert_eq!(
        refused.map_err(|error| error.kind()),
        Err(ErrorKind::ConnectionRefused)
    );

    server.restart().await;
    assert!(server.shared.born() > born);
    let short = with(chat(), json!({"max_tokens": 4}));
    let answer = Client::default()
        .post(server.address(), "/v1/chat/completions", &short)
        .await;
    assert_eq!(answer.status, 200);
}
