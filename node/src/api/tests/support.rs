//! A server on a free port, a frontend that does what the test says, and a client that sees bytes.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::{
    BlockSize, Blocks, Clock, ClusterView, Epoch, Incarnation, LoadSummary, ModelApi, ModelFacts,
    MonotonicClock, NodeFacts, NodeId, NodeRow, Readiness, RequestId, Role, Timestamp, Tokens,
};
use shoal_migrate::CopyManner;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::api::{ApiConfig, Backend, Shutdown, serve};
use crate::engine::answer::Wire;
use crate::engine::{Finish, FinishReason, TokenBatch};
use crate::frontend::{
    ClientAsk, DrainAnswer, Frontend, HomeError, HomeEvent, RequestRow, Running,
};
use crate::mesh::messages::{MoveAnswer, MoveReport};
use crate::metrics::Metrics;

pub(super) const THIS: NodeId = NodeId(1);
pub(super) const HOST: NodeId = NodeId(2);
pub(super) const PROMPT_TOKENS: u32 = 5;

/// How long a test waits for what must come. Generous: other tests use the machine too.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for something that must happen.
pub(super) async fn within<F: Future>(what: F) -> F::Output {
    timeout(PATIENCE, what).await.expect("it never happened")
}

/// A request that has reached the frontend and waits for an answer.
pub(super) struct Arrival {
    pub(super) ask: ClientAsk,
    reply: oneshot::Sender<Result<Running, HomeError>>,
}

impl Arrival {
    /// A host takes it, with room for `room` events.
    pub(super) fn accept(self, room: usize) -> mpsc::Sender<HomeEvent> {
        let (sender, events) = mpsc::channel(room);
        let running = Running {
            id: RequestId {
                home: THIS,
                serial: 0xab,
            },
            host: HOST,
            prompt_tokens: PROMPT_TOKENS,
            events,
        };
        self.reply
            .send(Ok(running))
            .expect("the client plane gave up");
        sender
    }

    pub(super) fn refuse(self, error: HomeError) {
        self.reply
            .send(Err(error))
            .expect("the client plane gave up");
    }

    /// Waits until the client plane gives up on the start.
    pub(super) async fn given_up(mut self) {
        within(self.reply.closed()).await;
    }
}

/// The one request that the fake says it knows; it runs at [`HOST`].
pub(super) const MOVABLE: RequestId = RequestId {
    home: THIS,
    serial: 0xab,
};

#[derive(Debug)]
pub(super) struct Fake {
    clock: MonotonicClock,
    pub(super) accepting: AtomicBool,
    pub(super) usable: AtomicUsize,
    /// The models of the mesh.
    pub(super) models: Mutex<Vec<ModelFacts>>,
    view: Arc<ClusterView>,
    arrivals: mpsc::Sender<(ClientAsk, oneshot::Sender<Result<Running, HomeError>>)>,
}

#[async_trait]
impl Frontend for Fake {
    fn this(&self) -> NodeId {
        THIS
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn view(&self) -> Arc<ClusterView> {
        Arc::clone(&self.view)
    }

    fn models(&self) -> Arc<[ModelFacts]> {
        self.models.lock().unwrap().as_slice().into()
    }

    fn accepting(&self) -> bool {
        self.accepting.load(Ordering::SeqCst)
    }

    fn preemptions(&self) -> u64 {
        3
    }

    fn usable_nodes(&self) -> usize {
        self.usable.load(Ordering::SeqCst)
    }

    fn requests(&self) -> Vec<RequestRow> {
        vec![RequestRow {
            id: MOVABLE,
            host: HOST,
            epoch: Epoch(2),
            prompt: Tokens(12),
            output: Tokens(3),
            job: None,
        }]
    }

    async fn migrate(&self, request: RequestId, to: NodeId, _: CopyManner) -> MoveAnswer {
        match (request == MOVABLE, to == HOST) {
            (false, _) => MoveAnswer::Unknown,
            (true, true) => MoveAnswer::Stayed {
                reason: "it runs on this node".into(),
            },
            (true, false) => MoveAnswer::Moved(MoveReport {
                pause_us: 1_500,
                total_us: 20_000,
                bytes: 4_096,
                stages: 3,
                tokens: 15,
                direct_tokens: 12,
            }),
        }
    }

    async fn drain(&self, node: NodeId) -> DrainAnswer {
        match node {
            THIS => DrainAnswer::Begun,
            HOST => DrainAnswer::Silent,
            _ => DrainAnswer::Unknown,
        }
    }

    async fn start(&self, ask: ClientAsk) -> Result<Running, HomeError> {
        let (reply, answer) = oneshot::channel();
        self.arrivals
            .send((ask, reply))
            .await
            .expect("the test is over");
        answer.await.expect("the test dropped an arrival")
    }
}

fn model(id: &str) -> ModelFacts {
    ModelFacts {
        id: id.to_owned(),
        context: Tokens(2048),
        fingerprint: 0xbeef,
        created: 1_700_000_000,
        api: ModelApi::Tokens,
    }
}

fn row(node: NodeId, load: Option<LoadSummary>) -> NodeRow {
    NodeRow {
        facts: Arc::new(NodeFacts {
            node,
            incarnation: Incarnation(7),
            peer_id: "12D3".into(),
            protocol: 1,
            control: ([10, 0, 0, 1], 7400).into(),
            stream: ([10, 0, 0, 1], 7401).into(),
            http: "10.0.0.1:8080".into(),
            role: Role::Mixed,
            block_size: BlockSize::DEFAULT,
            models: vec![model("m")],
            version: "0.1.0".into(),
        }),
        load: load.map(|load| (load, Timestamp::ZERO)),
    }
}

/// A running server.
pub(super) struct Server {
    pub(super) addr: SocketAddr,
    pub(super) fake: Arc<Fake>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) shutdown: Shutdown,
    arrivals: mpsc::Receiver<(ClientAsk, oneshot::Sender<Result<Running, HomeError>>)>,
    task: JoinSet<()>,
}

impl Server {
    pub(super) async fn start(config: ApiConfig) -> Self {
        let (sender, arrivals) = mpsc::channel(64);
        let load = LoadSummary {
            readiness: Readiness::Ready,
            total: Blocks(100),
            used: Blocks(25),
            ..LoadSummary::default()
        };
        let rows = vec![row(THIS, Some(load)), row(HOST, None)];
        let fake = Arc::new(Fake {
            clock: MonotonicClock::start(),
            accepting: AtomicBool::new(true),
            usable: AtomicUsize::new(1),
            models: Mutex::new(["m", "org/m 2"].map(model).to_vec()),
            view: Arc::new(ClusterView::new(THIS, Timestamp::ZERO, rows)),
            arrivals: sender,
        });
        let metrics = Arc::new(Metrics::new(THIS, "0.1.0"));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let shutdown = Shutdown {
            stop: CancellationToken::new(),
            cut: CancellationToken::new(),
        };
        let backend = Backend {
            frontend: Arc::clone(&fake) as _,
            metrics: Arc::clone(&metrics),
        };
        let mut task = JoinSet::new();
        task.spawn(serve(listener, config, backend, shutdown.clone()));
        Self {
            addr,
            fake,
            metrics,
            shutdown,
            arrivals,
            task,
        }
    }

    pub(super) async fn connect(&self) -> Client<TcpStream> {
        Client::new(TcpStream::connect(self.addr).await.unwrap())
    }

    /// Sends one request on a connection of its own and reads the answer.
    pub(super) async fn ask(&self, request: &str) -> Answer {
        let mut client = self.connect().await;
        client.send(request).await;
        client.answer().await
    }

    /// The next request to reach the frontend.
    pub(super) async fn arrival(&mut self) -> Arrival {
        let (ask, reply) = within(self.arrivals.recv()).await.unwrap();
        Arrival { ask, reply }
    }

    /// Whether a request has reached the frontend that nobody has looked at.
    pub(super) fn is_quiet(&mut self) -> bool {
        self.arrivals.try_recv().is_err()
    }

    /// Waits until the server has ended by itself.
    pub(super) async fn ended(mut self) {
        within(self.task.join_next()).await.unwrap().unwrap();
    }

    /// Waits until a line of the metrics is there.
    pub(super) async fn counted(&self, line: &str) {
        let look = async {
            while !self.metrics.render().contains(line) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(PATIENCE, look).await.is_err() {
            panic!("{line} is missing in\n{}", self.metrics.render());
        }
    }
}

/// The text of a POST with a JSON body.
pub(super) fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

pub(super) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")
}

/// A chat request; `more` are further fields.
pub(super) fn chat(more: &str) -> String {
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}]{more}}}"#);
    post("/v1/chat/completions", &body)
}

pub(super) fn completion(more: &str) -> String {
    post(
        "/v1/completions",
        &format!(r#"{{"model":"m","prompt":"hi"{more}}}"#),
    )
}

pub(super) fn tokens(text: &str) -> HomeEvent {
    HomeEvent::Tokens(TokenBatch {
        index: 0,
        ids: vec![1],
        text: text.to_owned(),
        logprobs: Vec::new(),
        wire: Wire::default(),
    })
}

pub(super) fn finished() -> HomeEvent {
    HomeEvent::Finished(Finish {
        reason: FinishReason::Stop,
        output_tokens: 2,
        text: String::new(),
        wire: Wire::default(),
        prompt_tokens: None,
    })
}

/// An answer as it came.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// Lower case, one a line.
    pub(super) head: String,
    pub(super) body: Vec<u8>,
    /// Whether the body came to its proper end.
    pub(super) whole: bool,
}

impl Answer {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    pub(super) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }
}

/// One connection.
pub(super) struct Client<S> {
    pub(super) socket: S,
    buffer: Vec<u8>,
}

impl<S: AsyncReadExt + AsyncWriteExt + Unpin> Client<S> {
    pub(super) fn new(socket: S) -> Self {
        Self {
            socket,
            buffer: Vec::new(),
        }
    }

    pub(super) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        within(self.socket.write_all(bytes.as_ref())).await.unwrap();
        within(self.socket.flush()).await.unwrap();
    }

    /// Whether more has come; not when the connection has ended.
    async fn more(&mut self) -> bool {
        within(self.socket.read_buf(&mut self.buffer))
            .await
            .unwrap_or(0)
            > 0
    }

    /// Everything until the server closes.
    pub(super) async fn rest(&mut self) -> Vec<u8> {
        while self.more().await {}
        std::mem::take(&mut self.buffer)
    }

    /// The bytes up to and with `mark`, or none if the connection ends before.
    async fn until(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self
                .buffer
                .windows(mark.len())
                .position(|part| part == mark)
            {
                return Some(self.buffer.drain(..at + mark.len()).collect());
            }
            if !self.more().await {
                return None;
            }
        }
    }

    async fn exactly(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.buffer.len() < length {
            if !self.more().await {
                return None;
            }
        }
        Some(self.buffer.drain(..length).collect())
    }

    /// Status and headers.
    pub(super) async fn head(&mut self) -> Answer {
        let head = self.until(b"\r\n\r\n").await.expect("no answer came");
        let head = String::from_utf8(head).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer {
            status,
            head: head.to_ascii_lowercase(),
            body: Vec::new(),
            whole: false,
        }
    }

    /// The next piece of a chunked body; empty at its proper end, none when it is torn.
    pub(super) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.until(b"\r\n").await?;
        let size = usize::from_str_radix(std::str::from_utf8(&size).unwrap().trim(), 16).unwrap();
        let mut chunk = self.exactly(size + 2).await?;
        chunk.truncate(size);
        Some(chunk)
    }

    /// A whole answer.
    pub(super) async fn answer(&mut self) -> Answer {
        let mut answer = self.head().await;
        if let Some(length) = answer.header("content-length") {
            let length = length.parse().unwrap();
            if let Some(body) = self.exactly(length).await {
                answer.body = body;
                answer.whole = true;
            }
            return answer;
        }
        assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
        while let Some(chunk) = self.chunk().await {
            if chunk.is_empty() {
                answer.whole = true;
                break;
            }
            answer.body.extend(chunk);
        }
        answer
    }
}
