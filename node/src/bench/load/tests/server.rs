//! A server on loopback that misbehaves as its script says.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A request as it came in.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// Number among those of its connection.
    pub(super) turn: usize,
    /// Request line and headers.
    pub(super) head: String,
    /// The body, or null.
    pub(super) body: Value,
}

/// How an answer ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// As it should.
    Whole,
    /// As it should, and then the connection is closed without a word.
    WholeThenClosed,
    /// In the middle.
    Cut,
    /// Never.
    Hangs,
}

/// One answer.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// Its status.
    pub(super) status: u16,
    /// The chunks of its body, each sent by itself.
    pub(super) pieces: Vec<Vec<u8>>,
    /// How it ends.
    pub(super) end: End,
    /// It begins once so many requests have come in.
    pub(super) after: usize,
}

impl Answer {
    /// A success with this body in one piece.
    pub(super) fn with(body: &str) -> Self {
        Self {
            status: 200,
            pieces: vec![body.as_bytes().to_vec()],
            end: End::Whole,
            after: 0,
        }
    }
}

#[derive(Debug, Default)]
struct Seen {
    asked: Mutex<Vec<Asked>>,
    /// Length of `asked`.
    count: watch::Sender<usize>,
    connections: AtomicUsize,
    waiting: AtomicUsize,
    most_waiting: AtomicUsize,
}

/// The server. It ends with its value.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) url: String,
    seen: Arc<Seen>,
    _task: JoinSet<()>,
}

impl Server {
    /// Answers as `script` says; `None` closes the connection without an answer.
    pub(super) async fn start(
        script: impl Fn(&Asked) -> Option<Answer> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Seen::default());
        let mut task = JoinSet::new();
        task.spawn(accept(listener, Arc::new(script), seen.clone()));
        Self {
            url,
            seen,
            _task: task,
        }
    }

    /// The requests that came in so far.
    pub(super) fn asked(&self) -> Vec<Asked> {
        self.seen.asked.lock().unwrap().clone()
    }

    /// Returns once so many requests have come in.
    pub(super) async fn until_asked(&self, count: usize) {
        let mut seen = self.seen.count.subscribe();
        seen.wait_for(|seen| *seen >= count).await.unwrap();
    }

    /// Connections made so far.
    pub(super) fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// The most requests that waited for an answer at once.
    pub(super) fn most_waiting(&self) -> usize {
        self.seen.most_waiting.load(Ordering::SeqCst)
    }
}

type Script = Arc<dyn Fn(&Asked) -> Option<Answer> + Send + Sync>;

async fn accept(listener: TcpListener, script: Script, seen: Arc<Seen>) {
    let mut connections = JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        tcp.set_nodelay(true).unwrap();
        seen.connections.fetch_add(1, Ordering::SeqCst);
        connections.spawn(serve(tcp, script.clone(), seen.clone()));
    }
}

async fn serve(mut tcp: TcpStream, script: Script, seen: Arc<Seen>) {
    for turn in 0.. {
        let Some((head, body)) = read(&mut tcp).await else {
            return;
        };
        let asked = note(&seen, turn, head, body);
        let Some(answer) = script(&asked) else {
            return;
        };
        let mut count = seen.count.subscribe();
        count
            .wait_for(|count| *count >= answer.after)
            .await
            .unwrap();
        seen.waiting.fetch_sub(1, Ordering::SeqCst);
        // The client may be gone, and that is its right.
        if write(&mut tcp, &answer).await.is_err() {
            return;
        }
        match answer.end {
            End::Whole => {}
            End::WholeThenClosed | End::Cut => return,
            End::Hangs => {
                // Until the client has had enough.
                tcp.read_u8().await.unwrap_err();
                return;
            }
        }
    }
}

fn note(seen: &Seen, turn: usize, head: String, body: Value) -> Asked {
    let waiting = seen.waiting.fetch_add(1, Ordering::SeqCst) + 1;
    seen.most_waiting.fetch_max(waiting, Ordering::SeqCst);
    let mut all = seen.asked.lock().unwrap();
    let asked = Asked { turn, head, body };
    all.push(asked.clone());
    seen.count.send_replace(all.len());
    asked
}

async fn read(tcp: &mut TcpStream) -> Option<(String, Value)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(tcp.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    tcp.read_exact(&mut body).await.ok()?;
    Some((head, serde_json::from_slice(&body).unwrap_or_default()))
}

async fn write(tcp: &mut TcpStream, answer: &Answer) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 {} Whatever\r\ntransfer-encoding: chunked\r\n\r\n",
        answer.status
    );
    tcp.write_all(head.as_bytes()).await?;
    for piece in &answer.pieces {
        let mut chunk = format!("{:x}\r\n", piece.len()).into_bytes();
        chunk.extend_from_slice(piece);
        chunk.extend_from_slice(b"\r\n");
        tcp.write_all(&chunk).await?;
    }
    match answer.end {
        End::Whole | End::WholeThenClosed => tcp.write_all(b"0\r\n\r\n").await,
        End::Cut | End::Hangs => Ok(()),
    }
}
