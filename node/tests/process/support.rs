//! Nodes as processes, and a client that sees bytes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// How long anything may take before a test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A running `shoal node`, ended with the test.
pub(crate) struct Process {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// `flags` replace the defaults that they name.
fn command(home: &Path, flags: &[&str]) -> Command {
    let defaults = [
        ["--http-port", "0"],
        ["--mesh-port", "0"],
        ["--engine", "sim:a10/llama-2-7b"],
    ];
    let mut command = Command::new(env!("CARGO_BIN_EXE_shoal"));
    command.arg("node");
    for default in defaults
        .iter()
        .filter(|default| !flags.contains(&default[0]))
    {
        command.args(default);
    }
    if !flags.contains(&"llama") && !flags.contains(&"--sim-speed") {
        command.args(["--sim-speed", "100"]);
    }
    command
        .args(["--model-id", "m", "--data-dir"])
        .arg(home)
        .args(flags)
        .env_clear()
        .env("NO_COLOR", "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub(crate) fn start(home: &Path, flags: &[&str]) -> Process {
    let mut child = command(home, flags).spawn().expect("the binary runs");
    let (sender, lines) = mpsc::channel();
    let out = child.stdout.take().expect("a pipe");
    let err: ChildStderr = child.stderr.take().expect("a pipe");
    for stream in [Box::new(out) as Box<dyn Read + Send>, Box::new(err)] {
        let sender = sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                // The test may have ended.
                drop(sender.send(line));
            }
        });
    }
    Process { child, lines }
}

impl Process {
    /// The first line of its log that holds `text`.
    pub(crate) fn says(&self, text: &str) -> String {
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("{text:?} was not said; instead: {seen:#?}"),
            }
        }
    }

    /// Where clients ask it, once it serves.
    pub(crate) fn http(&self) -> String {
        word(&self.says("serving"), "http=")
    }

    /// Where clients ask it, what others name as a seed, and its name, once it serves.
    pub(crate) fn serving(&self) -> (String, String, String) {
        let line = self.says("serving");
        (word(&line, "http="), seed(&line), word(&line, "node="))
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([&format!("-{name}"), &self.child.id().to_string()])
            .status();
        assert!(status.expect("kill runs").success());
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        // Its output ends with it, and unlike the process it can be waited for with a deadline.
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => panic!("the process does not end"),
            }
        }
        self.child.wait().expect("a status")
    }
}

pub(crate) fn ask(http: &str, max_tokens: u32) -> TcpStream {
    let body = format!(
        r#"{{"model":"m","prompt":"x","max_tokens":{max_tokens},"ignore_eos":true,"temperature":0,"stream":true}}"#
    );
    let mut stream = TcpStream::connect(http).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("sent");
    stream
}

/// What others name to join a node, from the line in which it says that it serves.
pub(crate) fn seed(line: &str) -> String {
    let stream = word(line, "stream=");
    let (host, port) = stream.rsplit_once(':').expect("an address");
    let port: u16 = port.parse().expect("a port");
    format!("{host}:{}", port - 1)
}

/// What follows `name` in a line of the log.
pub(crate) fn word(line: &str, name: &str) -> String {
    let rest = line.split(name).nth(1).expect("a word");
    rest.split_whitespace().next().expect("a word").to_owned()
}

/// The body of a GET, or of a POST.
pub(crate) fn fetch(http: &str, path: &str, body: Option<&str>) -> String {
    let mut stream = TcpStream::connect(http).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let (method, body) = (
        if body.is_some() { "POST" } else { "GET" },
        body.unwrap_or_default(),
    );
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

/// The sum of a counter's lines whose labels hold `label`.
pub(crate) fn counted(http: &str, name: &str, label: &str) -> u64 {
    fetch(http, "/metrics", None)
        .lines()
        .filter(|line| line.starts_with(name) && line.contains(label))
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
        .sum()
}

/// Waits until a condition holds.
pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    /// Looks in all of [`PATIENCE`].
    const LOOKS: u32 = 3_000;
    for _ in 0..LOOKS {
        if holds() {
            return;
        }
        std::thread::sleep(PATIENCE / LOOKS);
    }
    panic!("never: {what}");
}
