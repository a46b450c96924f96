//! Hosts that die, stand still, or are told to stop while they run other nodes' requests.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Process, ask, counted, fetch, start, until};

/// Output of a stream: long enough that its host can be killed meanwhile.
const TOKENS: u32 = 400;

/// Nodes of one mesh, where clients ask them, and their names.
struct Mesh {
    nodes: Vec<Process>,
    http: Vec<String>,
    names: Vec<String>,
    _homes: Vec<TempDir>,
}

impl Mesh {
    /// So many nodes, as fast as a small model, that see each other.
    fn of(count: usize, flags: &[&str]) -> Self {
        let mut mesh = Self {
            nodes: Vec::new(),
            http: Vec::new(),
            names: Vec::new(),
            _homes: Vec::new(),
        };
        let mut seed = String::new();
        for _ in 0..count {
            let home = tempfile::tempdir().unwrap();
            let mut all = vec!["--sim-speed", "5"];
            all.extend(flags);
            if !flags.contains(&"--gossip-interval-ms") {
                all.extend(["--gossip-interval-ms", "100"]);
            }
            if !seed.is_empty() {
                all.extend(["--seeds", &seed]);
            }
            let node = start(home.path(), &all);
            let (http, own, name) = node.serving();
            if seed.is_empty() {
                seed = own;
            }
            mesh.nodes.push(node);
            mesh.http.push(http);
            mesh.names.push(name);
            mesh._homes.push(home);
        }
        for http in &mesh.http {
            until("all nodes are ready", || ready(http) == count);
        }
        mesh
    }

    /// Streams of the first node until one runs at the last: of each, what was read so far.
    fn streams(&self) -> Vec<(String, BufReader<TcpStream>)> {
        let last = self.names.last().unwrap();
        let mut streams = Vec::new();
        for _ in 0..64 {
            let mut stream = BufReader::new(ask(&self.http[0], TOKENS));
            let mut head = String::new();
            while !head.contains("\ndata: ") {
                assert!(
                    stream.read_line(&mut head).unwrap() > 0,
                    "no stream: {head}"
                );
            }
            let there = head.contains(&format!("x-shoal-host: {last}"));
            streams.push((head, stream));
            if there {
                return streams;
            }
        }
        panic!("no stream runs at {last}");
    }
}

/// Nodes that are ready in this node's view.
fn ready(http: &str) -> usize {
    fetch(http, "/mesh/nodes", None)
        .matches("\"Ready\"")
        .count()
}

/// Reads streams to their end: each gives what an undisturbed one does, so no token is lost or there twice.
fn finish(mesh: &Mesh, streams: Vec<(String, BufReader<TcpStream>)>) {
    let mut whole = String::new();
    ask(&mesh.http[0], TOKENS)
        .read_to_string(&mut whole)
        .unwrap();
    for (mut said, mut stream) in streams {
        stream.read_to_string(&mut said).unwrap();
        assert!(said.contains("\"finish_reason\":\"length\""), "{said}");
        assert!(said.contains("data: [DONE]"), "{said}");
        assert_eq!(text(&said), text(&whole));
    }
}

/// The text in the events of a stream.
fn text(said: &str) -> String {
    let events = said.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    events
        .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
        .collect()
}

#[test]
fn a_killed_host_is_known_by_its_closed_port_and_its_streams_go_on() {
    // Gossip alone would need more than half a minute.
    let flags = [
        "--phi",
        "32",
        "--gossip-interval-ms",
        "1000",
        "--max-view-age-ms",
        "60000",
    ];
    let mut mesh = Mesh::of(3, &flags);
    let streams = mesh.streams();
    mesh.nodes.last().unwrap().signal("KILL");
    until("the death is known", || {
        counted(&mesh.http[0], "shoal_hosts_lost_total", "port closed") == 1
    });
    finish(&mesh, streams);
    assert!(counted(&mesh.http[0], "shoal_replays_total", "placed") > 0);
    assert_eq!(counted(&mesh.http[0], "shoal_replays_total", "lost"), 0);
    mesh.nodes.pop();
}

#[test]
fn a_host_that_stands_still_is_slow_and_not_dead() {
    let mesh = Mesh::of(3, &["--grace-ms", "60000"]);
    let (last, first) = (mesh.nodes.last().unwrap(), &mesh.http[0]);
    let streams = mesh.streams();
    last.signal("STOP");
    until("gossip misses it", || ready(first) == 2);
    last.signal("CONT");
    finish(&mesh, streams);
    until("gossip has it back", || ready(first) == 3);
    assert_eq!(counted(first, "shoal_replays_total", ""), 0);
    assert_eq!(counted(first, "shoal_hosts_lost_total", ""), 0);
}

#[test]
fn a_node_that_an_operator_drains_hands_over_what_it_runs() {
    let mut mesh = Mesh::of(3, &[]);
    let streams = mesh.streams();
    let (name, first) = (mesh.names[2].clone(), mesh.http[0].clone());
    // Told through another node, as an operator does who does not care where it is.
    let mut told = Command::new(env!("CARGO_BIN_EXE_shoal"));
    let told = told.args([
        "drain",
        &name,
        "--node",
        &format!("http://{}", mesh.http[1]),
    ]);
    let told = told.output().unwrap();
    let said = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(
        told.status.success() && said.contains("has left the mesh"),
        "{told:?}"
    );
    finish(&mesh, streams);
    assert!(counted(&first, "shoal_moves_followed_total", "") > 0);
    assert_eq!(counted(&first, "shoal_replays_total", ""), 0);
    let mut drained = mesh.nodes.pop().unwrap();
    drained.says("goodbye");
    assert_eq!(drained.ended().code(), Some(0));
}
