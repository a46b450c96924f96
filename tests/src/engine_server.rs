//! A stand-in for an engine that speaks HTTP: the simulated engine behind the paths, shapes and
//! errors of vLLM, SGLang, llama-server or a plain OpenAI server, which misbehaves on demand.
//!
//! Tokens, KV, queues and aborts are real: each request is a job of an [`Engine`], and ends with its
//! connection. What is not real: sizes of batches, prefix caches, and everything a model would say.

mod call;
mod fault;
mod feed;
mod figures;
mod json;
mod kv;
mod kv_socket;
mod llama;
mod openai;
mod run;
mod seen;
mod sglang;
mod shared;
mod text;
mod vllm;
mod wire;

#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, PoisonError};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use shoal_gossip::unix_time;
use shoal_node::engine::Engine;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use self::fault::Fault;
pub use self::kv::{Kv, KvFigures};
pub use self::seen::{Ending, Seen};

use self::kv_socket::Answering;
use self::shared::Shared;
use self::wire::{ResetCord, Wire};

/// Whose HTTP a stand-in speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM 0.32.
    Vllm,
    /// SGLang 0.5.23.
    Sglang,
    /// llama.cpp's server.
    LlamaServer,
    /// A server that has OpenAI's paths and no others.
    OpenAi,
}

/// A stand-in engine server on a loopback port. Dropping it ends it.
#[derive(Debug)]
pub struct EngineServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    life: Mutex<Option<Life>>,
    answering: std::sync::Mutex<Option<Answering>>,
}

/// What ends with a kill.
#[derive(Debug)]
struct Life {
    reset: ResetCord,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl EngineServer {
    /// Starts a server over `engine`, which must be a simulated one: the tokenizer is its own.
    pub async fn start(dialect: Dialect, engine: Arc<dyn Engine>) -> Self {
        let shared = Arc::new(Shared::new(dialect, engine));
        let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = TcpListener::bind(free).await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let life = Life::begin(listener, shared.clone());
        Self {
            shared,
            address,
            life: Mutex::new(Some(life)),
            answering: std::sync::Mutex::default(),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens, as clients write it.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The engine behind it.
    pub fn engine(&self) -> &Arc<dyn Engine> {
        &self.shared.engine
    }

    /// The next request for work that meets nothing yet meets this; a manner begins now.
    pub fn fault(&self, fault: Fault) {
        self.shared.faults().add(None, fault);
    }

    /// The next request to `path` that meets nothing yet meets this.
    pub fn fault_at(&self, path: &str, fault: Fault) {
        self.shared.faults().add(Some(path), fault);
    }

    /// Every request for work meets this from now on.
    pub fn fault_always(&self, fault: Fault) {
        self.shared.faults().always(fault);
    }

    /// No request meets anything any more.
    pub fn mend(&self) {
        self.shared.faults().clear();
    }

    /// The requests it got, in the order they came.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.log.all()
    }

    /// The requests it got at this path.
    pub fn seen_at(&self, path: &str) -> Vec<Seen> {
        let mut seen = self.seen();
        seen.retain(|seen| seen.path == path);
        seen
    }

    /// Answers a node in this folder as the connector inside vLLM does, from now on and over restarts.
    pub fn give_kv(&self, folder: &Path) {
        let answering = self.shared.kv.listen(folder);
        *self
            .answering
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(answering);
    }

    /// Its connector.
    pub fn kv(&self) -> &Kv {
        &self.shared.kv
    }

    /// Nobody answers in the folder any more.
    pub fn take_kv_away(&self) {
        self.answering
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// What its model is called from now on; the first name is its own, the others are aliases.
    pub fn set_models(&self, names: &[&str]) {
        self.shared.set_models(names);
    }

    /// Sequences that llama-server says it runs at once; 4 if nothing is said.
    pub fn set_slots(&self, slots: u32) {
        self.shared.set_slots(slots);
    }

    /// Resets all connections and stops listening, as the kernel does for a killed process. Its
    /// requests leave the engine.
    pub async fn kill(&self) {
        if let Some(mut life) = self.life.lock().await.take() {
            life.reset.pull();
            life.stop.cancel();
            while life.tasks.join_next().await.is_some() {}
        }
    }

    /// Listens again at the same port, as a new process: killed before if it still runs.
    ///
    /// # Panics
    /// When somebody else has taken the port.
    pub async fn restart(&self) {
        self.kill().await;
        let listener = TcpListener::bind(self.address)
            .await
            .expect("the port is still free");
        *self.life.lock().await = Some(Life::begin(listener, self.shared.clone()));
    }
}

impl Life {
    fn begin(listener: TcpListener, shared: Arc<Shared>) -> Self {
        shared.begin_life(unix_time());
        let (reset, stop) = (ResetCord::default(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(listen(listener, shared, reset.clone(), stop.clone()));
        Self { reset, stop, tasks }
    }
}

async fn listen(
    listener: TcpListener,
    shared: Arc<Shared>,
    reset: ResetCord,
    stop: CancellationToken,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(serve(stream, shared.clone(), reset.clone()));
                }
            }
            Some(ended) = connections.join_next() => ended.expect("a connection does not panic"),
        }
    }
    drop(listener);
    connections.shutdown().await;
}

async fn serve(stream: TcpStream, shared: Arc<Shared>, server: ResetCord) {
    let own = ResetCord::default();
    let wire = TokioIo::new(Wire::new(stream, own.clone(), server.clone()));
    let service =
        service_fn(move |request| shared.clone().answer(request, own.clone(), server.clone()));
    // Clients leave, and faults break connections: both are what tests ask for.
    drop(http1::Builder::new().serve_connection(wire, service).await);
}
