//! KV into and out of an engine beside the node.
//!
//! ```text
//!  connector  vLLM's: blocks through shared memory, while requests run (socket: how it is asked)
//!  slots      llama-server's: a file of a whole slot, once its request has stopped
//!  moves      what a hand-over asks of either (blob: the form that travels)
//! ```

mod blob;
mod connector;
mod moves;
mod slots;
mod socket;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Map, Value, json};
use shoal_gossip::{Timestamp, Tokens};
use tokio::task::spawn_blocking;
use tracing::{info, warn};

use self::connector::Connector;
use self::slots::Slots;
use self::socket::CallError;
use super::client::Client;
use super::kind::ServerKind;
use super::lock;

/// How KV goes in and out.
#[derive(Clone, Debug)]
enum Way {
    Connector(Arc<Connector>),
    Slots(Arc<Slots>),
}

/// What travels of an engine's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes of one token.
    pub(super) bytes_per_token: u32,
    /// Tokens in which it can be exported while a request runs; `None` when only a stopped one can.
    pub(super) grain: Option<Tokens>,
}

impl Way {
    fn shape(&self) -> Shape {
        match self {
            Self::Connector(connector) => Shape {
                bytes_per_token: u32::try_from(
                    connector.block_bytes.div_ceil(u64::from(connector.block)),
                )
                .unwrap_or(u32::MAX),
                grain: connector.stages.then_some(Tokens(connector.block)),
            },
            Self::Slots(_) => Shape {
                bytes_per_token: slots::MOST_BYTES_PER_TOKEN,
                grain: None,
            },
        }
    }

    /// Whether it is the same engine, started once.
    fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Connector(one), Self::Connector(two)) => {
                (&one.generation, &one.address) == (&two.generation, &two.address)
            }
            (Self::Slots(_), Self::Slots(_)) => true,
            (Self::Connector(_), Self::Slots(_)) | (Self::Slots(_), Self::Connector(_)) => false,
        }
    }
}

/// The KV side of an engine: whether there is one, and by what names its requests go.
#[derive(Debug)]
pub(super) struct KvSide {
    /// What node and engine share; `None` when KV stays where it is.
    folder: Option<PathBuf>,
    way: Mutex<Option<Way>>,
    /// When it last turned out that another engine's KV cannot be read from here.
    unreachable: Mutex<Option<Timestamp>>,
    /// Tells names of this process from those of an earlier one.
    salt: String,
    names: AtomicU64,
    /// Bytes read out of other engines.
    fetched: AtomicU64,
    /// Looks in a row at which there was none, and why at the last.
    trouble: Mutex<(u32, String)>,
}

/// Looks in a row at which the engine's KV is out of reach before requests move by recompute: an engine that has more to do
/// than it can answers one or two of them late.
const MISSED: u32 = 3;

/// How long KV goes through the nodes after another engine's could not be read: engines that cannot reach each other are
/// not asked to for each move, and a peer that was only starting is tried again.
const UNREACHABLE: Duration = Duration::from_secs(60);

/// What is put into a request for the sake of its KV.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Along(Map<String, Value>);

/// KV that was laid out at the engine for a request that is to come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Laid {
    /// Blocks from `first` on, under a key, up to a token.
    Blocks {
        key: String,
        first: u32,
        blocks: u32,
        tokens: u32,
    },
    /// A slot.
    Slot(u32),
}

impl Along {
    /// For a vLLM request of this name. `prompt` is what came from the client when output follows it; `laid` is what the
    /// request finds there.
    pub(super) fn for_connector(name: &str, prompt: Option<usize>, laid: Option<&Laid>) -> Self {
        let mut shoal = json!({ "id": name });
        if let Some(prompt) = prompt {
            shoal["prompt"] = json!(prompt);
        }
        if let Some(Laid::Blocks {
            key,
            first,
            blocks,
            tokens,
        }) = laid
        {
            shoal["import"] =
                json!({ "key": key, "first": first, "blocks": blocks, "tokens": tokens });
        }
        let mut members = Map::new();
        members.insert("kv_transfer_params".into(), json!({ "shoal": shoal }));
        Self(members)
    }

    fn for_slot(slot: u32) -> Self {
        let mut members = Map::new();
        members.insert("id_slot".into(), json!(slot));
        Self(members)
    }

    /// Puts it into a body that this node writes.
    pub(super) fn put_into(&self, body: &mut Map<String, Value>) {
        body.extend(self.0.clone());
    }

    /// As members of a JSON object, each with a comma before it.
    pub(super) fn members(&self) -> String {
        self.0
            .iter()
            .map(|(name, value)| format!(",{}:{value}", json!(name)))
            .collect()
    }
}

impl KvSide {
    /// One that shares `folder` with its engine.
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        let started = shoal_gossip::unix_time().as_nanos();
        Self {
            folder,
            way: Mutex::new(None),
            unreachable: Mutex::new(None),
            salt: format!("{:x}-{started:x}", std::process::id()),
            names: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            trouble: Mutex::default(),
        }
    }

    /// How it goes in and out; `None` as long as it does not.
    fn way(&self) -> Option<Way> {
        lock(&self.way).clone()
    }

    /// What travels; `None` as long as nothing does.
    pub(super) fn shape(&self) -> Option<Shape> {
        lock(&self.way).as_ref().map(|way| way.shape())
    }

    /// Whether a grammar can be told what was drawn elsewhere.
    pub(super) fn tells_grammars(&self) -> bool {
        match self.way() {
            Some(Way::Connector(connector)) => connector.grammar,
            Some(Way::Slots(_)) | None => false,
        }
    }

    /// Whether other engines can be given this one's KV, and this one theirs, without a node between.
    pub(super) fn is_direct(&self, now: Timestamp) -> bool {
        let since = |at: Timestamp| now.since(at);
        let tried = lock(&self.unreachable).map(since);
        matches!(self.way(), Some(Way::Connector(connector)) if connector.address.is_some())
            && tried.is_none_or(|ago| ago >= UNREACHABLE)
    }

    /// Takes note of KV that was read out of another engine.
    fn fetched(&self, bytes: u64) {
        self.fetched.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of KV read out of other engines so far.
    pub(super) fn direct_bytes(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }

    /// Takes note that another engine's KV could not be read.
    fn could_not_reach(&self, now: Timestamp, why: &CallError) {
        warn!(
            pause_s = UNREACHABLE.as_secs(),
            "KV of another engine cannot be read from here, it goes through the nodes for a while: {why}"
        );
        *lock(&self.unreachable) = Some(now);
    }

    /// A name that no other request has or had.
    pub(super) fn name(&self) -> String {
        let serial = self.names.fetch_add(1, Ordering::Relaxed);
        format!("{}-{serial:x}", self.salt)
    }

    /// What a request of this name takes along.
    pub(super) fn along(&self, name: &str, prompt: Option<usize>, laid: Option<&Laid>) -> Along {
        match (self.way(), laid) {
            (Some(Way::Connector(_)), laid) => Along::for_connector(name, prompt, laid),
            (Some(Way::Slots(_)), Some(Laid::Slot(slot))) => Along::for_slot(*slot),
            (Some(Way::Slots(_)) | None, _) => Along::default(),
        }
    }

    /// Looks whether the engine gives its KV away.
    pub(super) async fn look(&self, kind: ServerKind, client: &Client) {
        let Some(folder) = self.folder.clone() else {
            return;
        };
        let found = match kind {
            ServerKind::Vllm => {
                let found = blocking(move || Connector::find(&folder)).await;
                found.map(|connector| Way::Connector(Arc::new(connector)))
            }
            ServerKind::LlamaServer => {
                let found = Slots::find(&folder, client).await;
                found.map(|slots| Way::Slots(Arc::new(slots)))
            }
            ServerKind::Sglang | ServerKind::OpenAi => Err(CallError::Failed(format!(
                "{} has no way to give it away",
                kind.as_str()
            ))),
        };
        match found {
            Ok(way) => self.found(way),
            Err(error) => self.lost(&error.to_string()),
        }
    }

    fn found(&self, way: Way) {
        *lock(&self.trouble) = (0, String::new());
        let mut known = lock(&self.way);
        if known.as_ref().is_none_or(|known| !known.same(&way)) {
            let Shape {
                bytes_per_token, ..
            } = way.shape();
            let direct = matches!(&way, Way::Connector(connector) if connector.address.is_some());
            info!(bytes_per_token, direct, "the engine's KV can be moved");
            *known = Some(way);
        }
    }

    fn lost(&self, why: &str) {
        let mut trouble = lock(&self.trouble);
        let (missed, last) = &mut *trouble;
        *missed = missed.saturating_add(1);
        let mut way = lock(&self.way);
        if way.is_some() && *missed < MISSED {
            return;
        }
        *way = None;
        drop(way);
        if last != why {
            let folder = self.folder.as_deref().unwrap_or_else(|| Path::new(""));
            warn!(folder = %folder.display(), "the engine's KV cannot be moved, requests move by recompute: {why}");
            why.clone_into(last);
        }
    }
}

/// Runs what blocks where that is allowed.
async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, CallError> + Send + 'static,
) -> Result<T, CallError> {
    spawn_blocking(act)
        .await
        .unwrap_or_else(|_| Err(CallError::Failed("it was given up".into())))
}
