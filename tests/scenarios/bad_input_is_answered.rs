//! What clients and strangers get wrong is answered clearly by a running mesh, which goes on serving.

use std::io::Write;
use std::net::{TcpStream, UdpSocket};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use shoal_tests::cluster::{Cluster, MODEL};

async fn assert_serves(cluster: &Cluster) {
    let body =
        json!({"model": MODEL, "prompt": "still here?", "max_tokens": 3, "ignore_eos": true});
    for entry in 0..2 {
        let answer = cluster
            .client()
            .post(cluster.http(entry), "/v1/completions", &body)
            .await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
    }
    cluster.converged(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_requests_are_400_with_the_field_to_blame() {
    let cluster = Cluster::start(2, |_, _| {}).await;
    let long = "word ".repeat(40_000);
    let cases: [(&str, Value, &str); 8] = [
        ("max_tokens", json!(0), "max_tokens"),
        ("max_tokens", json!(-1), "max_tokens"),
        ("max_tokens", json!(99_999_999_999u64), "max_tokens"),
        ("n", json!(2), "n"),
        ("messages", json!([]), "messages"),
        ("messages", json!("hello"), "messages"),
        ("temperature", json!("warm"), "temperature"),
        (
            "messages",
            json!([{"role": "user", "content": long}]),
            "messages",
        ),
    ];
    for (field, value, param) in cases {
        let mut body = json!({
            "model": MODEL, "messages": [{"role": "user", "content": "hi"}],
        });
        body[field] = value;
        for entry in 0..2 {
            let answer = cluster
                .client()
                .post(cluster.http(entry), "/v1/chat/completions", &body)
                .await;
            assert_eq!(answer.status, 400, "{field}: {answer:?}");
            assert_eq!(answer.json()["error"]["param"], param, "{answer:?}");
        }
    }
    assert_serves(&cluster).await;
    cluster.empty().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_bytes_on_every_port_change_nothing() {
    let cluster = Cluster::start(2, |_, _| {}).await;
    let mut rng = StdRng::seed_from_u64(3);
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    for round in 0..200 {
        let mut junk = vec![0u8; 1 + round * 7 % 1_400];
        rng.fill_bytes(&mut junk);
        for index in 0..2 {
            let node = cluster.node(index);
            for port in [node.control_addr(), node.stream_addr()] {
                socket.send_to(&junk, port).expect("sent");
            }
            if round % 10 == 0 {
                let mut stream = TcpStream::connect(node.http_addr()).expect("connected");
                // The server may close before all is written.
                drop(stream.write_all(&junk));
            }
        }
    }
    assert_serves(&cluster).await;
    cluster.stop_all().await;
}
