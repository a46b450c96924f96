//! The way down.

use std::sync::atomic::Ordering;

use tokio::net::TcpStream;

use super::support::{Server, THIS, chat, completion, finished, get, tokens, within};
use crate::api::ApiConfig;

#[tokio::test]
async fn a_running_stream_is_finished_and_new_connections_are_refused() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    assert_eq!(client.head().await.status, 200);
    client.chunk().await.unwrap();
    let mut idle = server.connect().await;
    idle.send(get("/ping")).await;
    assert_eq!(idle.answer().await.status, 200);

    server.shutdown.stop.cancel();
    // The idle connection ends, nobody new gets in, and the stream goes on.
    assert_eq!(idle.rest().await, b"");
    within(async {
        while TcpStream::connect(server.addr).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    events.send(tokens("b")).await.unwrap();
    let chunk = String::from_utf8(client.chunk().await.unwrap()).unwrap();
    assert!(chunk.contains("\"text\":\"b\""));
    events.send(finished()).await.unwrap();
    let rest = String::from_utf8(client.rest().await).unwrap();
    assert!(
        rest.contains("data: [DONE]") && rest.ends_with("0\r\n\r\n"),
        "{rest}"
    );
    server.ended().await;
}

#[tokio::test]
async fn a_request_that_was_on_its_way_is_answered_and_not_reset() {
    let server = Server::start(ApiConfig::default()).await;
    server.fake.accepting.store(false, Ordering::SeqCst);
    let mut opened = server.connect().await;
    let mut kept = server.connect().await;
    kept.send(get("/ping")).await;
    assert_eq!(kept.answer().await.status, 200);
    let mut late = server.connect().await;
    for client in [&mut opened, &mut kept, &mut late] {
        client.send(chat("")).await;
    }
    // The server has not run since: it learns of the stop first.
    server.shutdown.stop.cancel();
    for client in [&mut opened, &mut kept, &mut late] {
        let answer = client.answer().await;
        assert_eq!(answer.status, 503);
        assert_eq!(answer.json()["error"]["code"], "shutting_down");
        assert_eq!(client.rest().await, b"");
    }
    server.ended().await;
}

#[tokio::test]
async fn answers_that_take_too_long_are_cut_with_a_word() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut stream = server.connect().await;
    stream.send(chat(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    assert_eq!(stream.head().await.status, 200);
    let mut whole = server.connect().await;
    whole.send(chat("")).await;
    let held = server.arrival().await.accept(4);
    let mut placing = server.connect().await;
    placing.send(chat("")).await;
    let waiting = server.arrival().await;

    server.shutdown.stop.cancel();
    server.shutdown.cut.cancel();
    let rest = String::from_utf8(stream.rest().await).unwrap();
    assert!(rest.contains(r#""code":"shutting_down""#), "{rest}");
    assert!(
        rest.contains("data: [DONE]") && rest.ends_with("0\r\n\r\n"),
        "{rest}"
    );
    for client in [&mut whole, &mut placing] {
        let answer = client.answer().await;
        assert_eq!(answer.status, 503);
        assert_eq!(answer.json()["error"]["code"], "shutting_down");
    }
    within(events.closed()).await;
    within(held.closed()).await;
    waiting.given_up().await;
    server.ended().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_does_not_hold_the_end_up() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(1);
    let text = "x".repeat(64 * 1024);
    // Until nothing more goes in: the pump waits for the client then, and not for the cut.
    while tokio::time::timeout(
        std::time::Duration::from_millis(300),
        events.send(tokens(&text)),
    )
    .await
    .is_ok()
    {}
    server.shutdown.stop.cancel();
    server.shutdown.cut.cancel();
    server.ended().await;
    within(events.closed()).await;
}

#[tokio::test]
async fn dropping_the_server_drops_every_request() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(chat(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    assert_eq!(client.head().await.status, 200);
    let metrics = std::sync::Arc::clone(&server.metrics);
    drop(server);
    within(events.closed()).await;
    // Torn, and seen to be.
    assert!(!client.rest().await.ends_with(b"0\r\n\r\n"));
    assert!(
        metrics
            .render()
            .contains(&format!("shoal_connections{{node=\"{THIS}\"}} 0"))
    );
}
