use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const VIEW: &str = r#"{"this":"aaa","nodes":[{"node":"aaa","load":null}]}"#;

fn args(node: String) -> StatusArgs {
    StatusArgs {
        at: NodeArgs {
            node,
            api_key: Some("sk-1".to_owned()),
            ca_cert: None,
        },
        json: false,
        timeout_ms: 5_000,
    }
}

/// Asks a server that gives one answer, whatever it is asked; returns the request as well.
async fn asked(answer: String) -> (Result<String, FetchError>, String) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; 4_096];
        let length = stream.read(&mut request).await.unwrap();
        stream.write_all(answer.as_bytes()).await.unwrap();
        request.truncate(length);
        String::from_utf8(request).unwrap()
    };
    let args = args(format!("http://{address}"));
    tokio::join!(report(&args), server)
}

fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{body}")
}

#[tokio::test]
async fn a_node_is_asked_with_the_key_and_its_view_is_shown() {
    let (shown, request) = asked(answer("200 OK", VIEW)).await;
    assert!(shown.unwrap().contains("aaa*"));
    assert!(
        request.starts_with("GET /mesh/nodes HTTP/1.1\r\n"),
        "{request}"
    );
    assert!(request.contains("authorization: Bearer sk-1"), "{request}");
}

#[tokio::test]
async fn each_wrong_answer_says_what_to_do() {
    for (answer, remedy) in [
        (answer("401 Unauthorized", "{}"), "--api-key"),
        (answer("404 Not Found", ""), "not a shoal node"),
        (answer("200 OK", "<html>"), "not a shoal node"),
        (answer("200 OK", "{}"), "not a shoal node"),
        ("SSH-2.0-x\r\n".to_owned(), "not a shoal node"),
        (String::new(), "not a shoal node"),
    ] {
        let (shown, _) = asked(answer).await;
        let text = shown.unwrap_err().to_string();
        assert!(text.contains(remedy), "{text}");
    }
}

#[tokio::test]
async fn an_endless_answer_is_cut() {
    let endless = "x".repeat(9 * 1024 * 1024);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let args = args(listener.local_addr().unwrap().to_string());
    let server = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        // The client hangs up half-way, so a write that fails is what is wanted.
        stream
            .write_all(answer("200 OK", &endless).as_bytes())
            .await
            .is_ok()
    };
    let (shown, _) = tokio::join!(report(&args), server);
    assert!(
        matches!(shown, Err(FetchError::NotANode { .. })),
        "{shown:?}"
    );
}

#[tokio::test]
async fn a_node_that_is_not_there_is_told_from_one_that_is_silent() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let mut args = args(listener.local_addr().unwrap().to_string());
    args.timeout_ms = 20;
    let silent = report(&args).await.unwrap_err().to_string();
    assert!(silent.contains("20 ms"), "{silent}");
    drop(listener);
    args.timeout_ms = 5_000;
    let absent = report(&args).await.unwrap_err().to_string();
    assert!(absent.contains("is it running"), "{absent}");
}

#[tokio::test]
async fn addresses_that_mean_nothing_are_refused() {
    for url in ["", "ftp://a", "http://", "http://a b", "http://[::1"] {
        let error = report(&args(url.to_owned())).await.unwrap_err();
        assert!(matches!(error, FetchError::BadUrl(_)), "{url}: {error}");
    }
    let error = report(&args("https://127.0.0.1:1".to_owned()))
        .await
        .unwrap_err();
    assert!(matches!(error, FetchError::NoAuthority), "{error}");
}
