//! Configuration of a node: flags = `SHOAL_*` environment = keys of `shoal.toml`.
//!
//! ```text
//! defaults < file < environment < flags        (layers)
//!        └───────── RawNode ─────────┘         as written; one definition for all three
//!                      │ check                 every relation between settings
//!                  NodeConfig                  what the node is built from
//! ```
//!
//! A [`NodeConfig`] in hand means that every relation holds; whether files exist and can be read is
//! asked by [`inspect()`], since that can change at any time.

mod check;
mod error;
mod inspect;
mod layers;
mod raw;

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use crate::dispatch::PolicyName;
pub use crate::engine::remote::{Inexact, ServerKind};
pub use crate::engine::sim::Travels;
pub use check::Surroundings;
pub(crate) use check::{data_dir, kv_folder_of};
pub use error::ConfigError;
pub use inspect::inspect;
pub use layers::{from_flags, load};
pub use raw::{
    Described, EngineKv, RawBasics, RawDispatch, RawEngine, RawHttp, RawMesh, RawMoves, RawNode,
    describe,
};

/// Mesh port when none is named; streams and gossip take the next one.
pub const DEFAULT_MESH_PORT: u16 = 7400;

/// Largest `--max-body-bytes`: a submission between nodes carries the client's body whole, and its
/// bound (`MAX_SUBMIT_BYTES`) is derived from this number.
pub const MAX_BODY_BYTES: u64 = 16 * 1024 * 1024;

/// Everything a node is built from. Every relation between the settings holds.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeConfig {
    /// Where the identity is kept. One node at a time.
    pub data_dir: PathBuf,
    /// The client plane.
    pub http: HttpSettings,
    /// Addresses, keys and seeds of the planes between nodes.
    pub mesh: MeshSettings,
    /// Membership and failure detection.
    pub gossip: GossipSettings,
    /// The engine.
    pub engine: EngineSettings,
    /// Placement of requests.
    pub dispatch: DispatchSettings,
    /// Hand-over of running requests.
    pub moves: MovesSettings,
    /// The end of the process.
    pub shutdown: ShutdownSettings,
    /// What is logged and how.
    pub log: LogSettings,
    /// Things a person should know, to be logged once at start.
    pub warnings: Vec<String>,
}

/// The client plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// Where clients connect; port 0 takes any free one.
    pub listen: SocketAddr,
    /// File with one API key per line; `None` lets everyone in.
    pub api_key_file: Option<PathBuf>,
    /// File with one operator's key per line; `None` lets those operate who ask from this host.
    pub operator_key_file: Option<PathBuf>,
    /// Certificate and key for HTTPS; `None` speaks plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Look like a vLLM server to routers.
    pub vllm_names: bool,
    /// Longest request body in bytes, at most [`MAX_BODY_BYTES`].
    pub max_body_bytes: usize,
    /// Client requests at work at once; beyond it 429.
    pub max_requests: usize,
    /// Time a client has to send its request headers.
    pub header_timeout: Duration,
    /// Time a client may take no byte of a waiting answer before it counts as gone.
    pub stall_timeout: Duration,
}

/// A certificate and its private key, both PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain, leaf first.
    pub cert: PathBuf,
    /// Private key of the leaf.
    pub key: PathBuf,
}

/// Addresses, keys and seeds of the planes between nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshSettings {
    /// Where the control plane listens (UDP): the mesh port. Port 0 takes any free one.
    pub control: SocketAddr,
    /// Where streams and gossip listen (UDP): the next port. Port 0 when the mesh port is 0.
    pub stream: SocketAddr,
    /// Host (address or name) under which others reach this node on all its ports; `None` is the
    /// address it listens on, which is then never the wildcard.
    pub advertise: Option<String>,
    /// Seeds as `host:port`, checked for form only. The port is the one their *gossip* listens on,
    /// one above the mesh port that the user wrote.
    pub seeds: Vec<String>,
    /// Find neighbours on the local network by mDNS as well.
    pub mdns: bool,
    /// Name of the mesh; nodes of another name are ignored.
    pub cluster: String,
    /// Where the cluster key comes from. `None` only when both sockets listen on loopback.
    pub key: KeySource,
    /// Files with older keys whose datagrams are still accepted, for changing the key without a stop.
    pub accepted_keys: Vec<PathBuf>,
}

/// Where the cluster key comes from.
#[derive(Clone, PartialEq, Eq)]
pub enum KeySource {
    /// No key: everyone who reaches the loopback interface may join.
    None,
    /// A file as `shoal keygen --out` writes it.
    File(PathBuf),
    /// The text of the key, from `SHOAL_CLUSTER_KEY`.
    Text(String),
}

impl fmt::Debug for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Text(_) => f.write_str("Text(…)"),
        }
    }
}

/// Membership and failure detection.
#[derive(Clone, Debug, PartialEq)]
pub struct GossipSettings {
    /// Time between two rounds.
    pub interval: Duration,
    /// Suspicion at which a silent node counts as dead (phi accrual).
    pub phi: f64,
}

/// The engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Which, with the settings it alone has.
    pub kind: EngineKind,
    /// Name that clients put in `model`; `None` lets the engine name it.
    pub model_id: Option<String>,
    /// Tokens in one KV block.
    pub block_size: NonZeroU32,
    /// Requests that may wait for KV; beyond it the node refuses.
    pub queue_limit: usize,
}

/// Which engine.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineKind {
    /// llama.cpp in this process.
    Llama(LlamaSettings),
    /// A server beside the node.
    Http(HttpEngineSettings),
    /// The simulated engine.
    Sim(SimSettings),
}

/// A server beside the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpEngineSettings {
    /// `host:port`.
    pub authority: String,
    /// What it is; `None` finds out.
    pub kind: Option<ServerKind>,
    /// File with the API key it wants.
    pub key_file: Option<PathBuf>,
    /// Time between two looks.
    pub poll: Duration,
    /// Longest that a stream may say nothing once it has begun.
    pub stall: Duration,
    /// KV tokens it holds; `None` asks it.
    pub context: Option<u32>,
    /// Folder shared with it for the KV of requests that move; `None` moves them by recompute.
    pub kv_folder: Option<PathBuf>,
    /// What is done with requests that would draw other tokens elsewhere.
    pub inexact: Inexact,
}

/// llama.cpp in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LlamaSettings {
    /// The GGUF file.
    pub model: PathBuf,
    /// Tokens of KV in all, over all sequences.
    pub context: u32,
    /// Sequences computed together, at most.
    pub max_sequences: u32,
    /// Tokens computed in one step, prefill and decode together. More than `max_sequences`.
    pub step_tokens: u32,
    /// Threads that compute.
    pub threads: u32,
    /// Outputs independent of load: each sequence gets its own `context / max_sequences` tokens.
    pub reproducible: bool,
}

/// The simulated engine. `None` takes the profile's figure.
#[derive(Clone, Debug, PartialEq)]
pub struct SimSettings {
    /// Name of the latency profile.
    pub profile: String,
    /// How many times faster than the profile it runs.
    pub speed: f64,
    /// What of its KV travels when a request moves.
    pub kv: Travels,
    /// Tokens of KV in all.
    pub context: Option<u32>,
    /// Sequences computed together, at most.
    pub max_sequences: Option<u32>,
    /// Tokens computed in one step, prefill and decode together.
    pub step_tokens: Option<u32>,
}

/// Placement of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DispatchSettings {
    /// How a candidate is chosen.
    pub policy: PolicyName,
    /// A summary older than this is unknown, and its node no candidate.
    pub max_view_age: Duration,
    /// A host whose freeness is below this looks for a better one (KV blocks per request).
    pub redirect_below: u32,
    /// Time a candidate has to answer an offer.
    pub offer_timeout: Duration,
    /// Time a host keeps room for an offer it accepted. At least twice `offer_timeout`.
    pub lease: Duration,
    /// Further candidates that are tried after the first.
    pub max_retries: u8,
    /// Hosts that one request may lose.
    pub max_replays: u16,
    /// How long another host is looked for after a loss.
    pub replay_patience: Duration,
    /// How long a host that gossip misses may keep its requests.
    pub grace: Duration,
}

/// Hand-over of running requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovesSettings {
    /// Time between two looks whether requests should move; `None` moves only what an operator names.
    pub interval: Option<Duration>,
    /// Freeness (KV blocks per request) below which this node moves requests away.
    pub below: u32,
    /// Freeness above which it takes requests of others. More than `below`.
    pub above: u32,
    /// Requests that may leave at once; at least one.
    pub slots_out: usize,
    /// Requests that may come in at once; at least one.
    pub slots_in: usize,
    /// Bytes of KV that rescheduling may send in a second.
    pub bytes_per_second: u64,
}

/// The end of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShutdownSettings {
    /// Time that running requests have to finish.
    pub deadline: Duration,
}

/// What is logged and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// Filter in the syntax of `RUST_LOG`.
    pub filter: String,
    /// Form of the lines.
    pub format: LogFormat,
}

/// Form of the log lines.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

#[cfg(test)]
mod tests;
