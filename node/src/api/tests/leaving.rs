//! Clients that leave, and clients that do not read.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::support::{Server, THIS, chat, completion, tokens, within};
use crate::api::ApiConfig;
use crate::frontend::HomeEvent;

const KINDS: [&str; 2] = ["", r#","stream":true"#];

async fn counted_as_gone(server: &Server, status: u16, count: usize) {
    server
        .counted(&format!(
            "shoal_requests_total{{node=\"{THIS}\",path=\"/v1/chat/completions\",status=\"{status}\",outcome=\"client_gone\"}} {count}"
        ))
        .await;
    server
        .counted(&format!("shoal_requests_in_flight{{node=\"{THIS}\"}} 0"))
        .await;
}

#[tokio::test]
async fn a_client_that_leaves_while_its_request_is_being_placed_ends_it() {
    let mut server = Server::start(ApiConfig::default()).await;
    for kind in KINDS {
        let mut client = server.connect().await;
        client.send(chat(kind)).await;
        let arrival = server.arrival().await;
        drop(client);
        arrival.given_up().await;
    }
    counted_as_gone(&server, 499, 2).await;
}

#[tokio::test]
async fn a_client_that_leaves_before_the_first_token_ends_its_request() {
    let mut server = Server::start(ApiConfig::default()).await;
    for kind in KINDS {
        let mut client = server.connect().await;
        client.send(chat(kind)).await;
        let events = server.arrival().await.accept(4);
        drop(client);
        within(events.closed()).await;
    }
    counted_as_gone(&server, 499, 2).await;
}

#[tokio::test]
async fn a_client_that_leaves_between_tokens_ends_its_request() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(chat(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    assert_eq!(client.head().await.status, 200);
    client.chunk().await.unwrap();
    drop(client);
    // Not one more token is needed to find out.
    within(events.closed()).await;
    counted_as_gone(&server, 200, 1).await;
}

#[tokio::test]
async fn a_client_that_leaves_before_a_whole_answer_ends_its_request() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(chat("")).await;
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    drop(client);
    within(events.closed()).await;
    counted_as_gone(&server, 499, 1).await;
}

#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    let request = chat("");
    client.send(&request[..request.len() - 5]).await;
    server
        .counted(&format!("shoal_requests_in_flight{{node=\"{THIS}\"}} 1"))
        .await;
    drop(client);
    server
        .counted(&format!("shoal_requests_in_flight{{node=\"{THIS}\"}} 0"))
        .await;
    assert!(server.is_quiet());
}

/// Sends big events until there has been no room for a while; says how many.
async fn fill(events: &mpsc::Sender<HomeEvent>) -> usize {
    let text = "x".repeat(16 * 1024);
    for count in 0.. {
        match timeout(Duration::from_millis(500), events.send(tokens(&text))).await {
            Ok(sent) => sent.expect("the request was dropped"),
            Err(_) => return count,
        }
        // 64 MB: far more than two sockets and all buffers between hold.
        assert!(count < 4096, "nothing held the events back");
    }
    0
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_its_request_back_and_goes_on_when_it_reads() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(2);
    let sent = fill(&events).await;
    assert!(sent > 2);
    // Nothing was lost: as many events come out as went in, and then there is room again.
    assert_eq!(client.head().await.status, 200);
    let mut seen = 0;
    while seen < sent {
        let chunk = client.chunk().await.unwrap();
        seen += chunk.windows(6).filter(|part| part == b"data: ").count();
    }
    events.send(tokens("last")).await.unwrap();
    let chunk = String::from_utf8(client.chunk().await.unwrap()).unwrap();
    assert!(chunk.contains("\"text\":\"last\""), "{chunk}");
}

#[tokio::test]
async fn a_client_that_never_reads_counts_as_gone_after_a_while() {
    let config = ApiConfig {
        stall_timeout: Duration::from_millis(1500),
        ..ApiConfig::default()
    };
    let mut server = Server::start(config).await;
    let mut client = server.connect().await;
    client.send(completion(r#","stream":true"#)).await;
    let events = server.arrival().await.accept(2);
    fill(&events).await;
    within(events.closed()).await;
    for line in [
        format!(
            "shoal_requests_total{{node=\"{THIS}\",path=\"/v1/completions\",status=\"200\",outcome=\"client_stalled\"}} 1"
        ),
        format!("shoal_requests_in_flight{{node=\"{THIS}\"}} 0"),
        format!("shoal_connections{{node=\"{THIS}\"}} 0"),
    ] {
        server.counted(&line).await;
    }
    // What had been sent ends in the middle: it cannot be taken for a whole answer.
    let rest = client.rest().await;
    assert!(!rest.ends_with(b"0\r\n\r\n"));
}
