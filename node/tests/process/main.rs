//! The node as a process: signals, ports, identities, files that are not what they should be.
#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod losses;
mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, UdpSocket};

use support::{ask, seed, start};

#[test]
fn sigterm_lets_streams_finish_and_exits_with_zero() {
    let home = tempfile::tempdir().unwrap();
    let mut node = start(home.path(), &[]);
    let http = node.http();
    let mut stream = BufReader::new(ask(&http, 2_000));
    let mut head = String::new();
    while !head.contains("\ndata: ") {
        let read = stream.read_line(&mut head).expect("an event");
        assert!(read > 0, "no stream: {head}");
    }
    node.signal("TERM");
    node.says("closing");
    let mut rest = String::new();
    stream
        .read_to_string(&mut rest)
        .expect("the stream ends in order");
    assert!(rest.contains("\"finish_reason\":\"length\""), "{rest}");
    assert!(rest.contains("data: [DONE]"));
    assert_eq!(node.ended().code(), Some(0));
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let home = tempfile::tempdir().unwrap();
    let mut node = start(home.path(), &["--sim-speed", "0.5"]);
    let http = node.http();
    let mut stream = ask(&http, 3_000);
    let mut first = [0; 1];
    stream.read_exact(&mut first).expect("an answer begins");
    node.signal("INT");
    node.says("closing");
    node.signal("INT");
    assert_eq!(node.ended().code(), Some(1));
}

#[test]
fn a_port_in_use_is_named_with_the_flag_to_change() {
    let home = tempfile::tempdir().unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port().to_string();
    let mut node = start(home.path(), &["--http-port", &port]);
    let said = node.says("cannot listen");
    assert!(
        said.contains(&port) && said.contains("--http-port"),
        "{said}"
    );
    assert_eq!(node.ended().code(), Some(1));

    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = udp.local_addr().unwrap().port().to_string();
    let mut node = start(home.path(), &["--mesh-port", &port]);
    let said = node.says("cannot listen");
    assert!(
        said.contains(&port) && said.contains("--mesh-port"),
        "{said}"
    );
    assert_eq!(node.ended().code(), Some(1));
}

#[test]
fn two_nodes_with_one_identity_are_told_apart_from_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let first = start(home.path(), &[]);
    first.says("serving");
    let mut second = start(home.path(), &[]);
    second.says("another node");
    assert_eq!(second.ended().code(), Some(1));

    // A copy of the identity in another directory passes the lock, and the mesh tells the older one.
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(home.path()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    drop(first);
    let mut older = start(home.path(), &["--gossip-interval-ms", "100"]);
    let line = older.says("serving");
    let seed = seed(&line);
    let newer = start(
        copy.path(),
        &["--gossip-interval-ms", "100", "--seeds", &seed],
    );
    newer.says("serving");
    older.says("identity");
    assert_eq!(older.ended().code(), Some(1));
}

#[test]
fn a_model_that_is_missing_or_cut_short_is_told_and_nothing_starts() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model.gguf");
    let refused = |text: &str| {
        let model = model.to_string_lossy();
        let mut node = start(home.path(), &["--engine", "llama", "--model", &model]);
        let said = node.says("did not start");
        assert!(said.contains(text), "{said}");
        assert_eq!(node.ended().code(), Some(1));
    };
    refused("does not exist");
    fs::write(&model, b"").unwrap();
    refused("model.gguf");
    fs::write(&model, b"GGUF\x03\0\0\0 and then nothing of a model").unwrap();
    refused("model.gguf");
    fs::write(&model, vec![7; 4_096]).unwrap();
    refused("model.gguf");
}

#[test]
fn an_unreadable_key_file_is_told_with_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let missing = home.path().join("no-such-key");
    let mut node = start(
        home.path(),
        &["--cluster-key-file", &missing.to_string_lossy()],
    );
    let said = node.says("no-such-key");
    assert!(said.contains("cluster key"), "{said}");
    assert_eq!(node.ended().code(), Some(1));
}
