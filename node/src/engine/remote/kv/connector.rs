//! The connector that runs inside vLLM (`migrate/vllm`), as this node asks it: one socket for its scheduler, one for its worker.
//!
//! All calls block; what they mean is in `docs/protocol.md`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::socket::{self, CallError};

/// The protocol that both sides speak.
const PROTOCOL: u32 = 1;

/// Time for a question that is answered from memory. The engine's own thread goes first; on a processor that has more to do than
/// it can, the answer took two seconds and more.
const PATIENCE: Duration = Duration::from_secs(5);

/// Time to copy KV between the engine and shared memory: a gigabyte takes half a second.
const COPY_PATIENCE: Duration = Duration::from_secs(10);

/// Time until an aborted request is held: the rest of the step that runs, which on a crowded processor was seen to take
/// five seconds. It is the connector's own bound, and less than a source waits for its engine to stop a request.
const HELD_PATIENCE: Duration = Duration::from_secs(10);

/// How long the engine keeps what is held or staged if this node does not come back: longer than a hand-over waits for
/// its home.
const KEPT: Duration = Duration::from_secs(30);

/// A connector that has said what it is.
#[derive(Debug)]
pub(super) struct Connector {
    folder: PathBuf,
    /// Tells one start of the engine from another.
    pub(super) generation: String,
    /// Equal where KV can be exchanged.
    pub(super) digest: u64,
    /// Bytes of a block, over all layers.
    pub(super) block_bytes: u64,
    /// Tokens in it.
    pub(super) block: u32,
    /// Blocks can be brought in before their request comes: the engine keeps a prefix cache.
    pub(super) stages: bool,
    /// Grammars are told what was drawn elsewhere.
    pub(super) grammar: bool,
}

#[derive(Deserialize)]
struct SchedulerHello {
    protocol: u32,
    generation: String,
    block_size: u32,
    prefix_caching: bool,
    #[serde(default)]
    grammar: bool,
    kv: bool,
    #[serde(default)]
    why_not: String,
}

#[derive(Deserialize)]
struct WorkerHello {
    protocol: u32,
    layout: Option<Layout>,
    #[serde(default)]
    why_not: String,
}

#[derive(Deserialize)]
struct Layout {
    digest: String,
    block_bytes: u64,
}

/// Blocks of a request, and what they are worth.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Table {
    ids: Vec<u32>,
    preemptions: u64,
}

/// A request whose KV stays though it was aborted.
#[derive(Debug, Deserialize)]
pub(super) struct Held {
    /// Tokens that have KV.
    pub(super) computed: u32,
    /// Prompt and output.
    pub(super) token_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Info {
    computed: u32,
}

#[derive(Deserialize)]
struct Done {}

impl Connector {
    /// Asks for one in a folder.
    ///
    /// # Errors
    /// When there is none, or its engine gives no KV away.
    pub(super) fn find(folder: &Path) -> Result<Self, CallError> {
        let hello = json!({ "op": "hello", "protocol": PROTOCOL });
        let scheduler: SchedulerHello =
            socket::call(&folder.join("scheduler.sock"), &hello, None, PATIENCE)?;
        if !scheduler.kv {
            return Err(CallError::Failed(format!(
                "its engine gives no KV away: {}",
                scheduler.why_not
            )));
        }
        let worker: WorkerHello =
            socket::call(&folder.join("worker.sock"), &hello, None, PATIENCE)?;
        let Some(layout) = worker.layout else {
            let why = format!("its engine gives no KV away: {}", worker.why_not);
            return Err(CallError::Failed(why));
        };
        let digest = u64::from_str_radix(&layout.digest, 16);
        let spoken = (scheduler.protocol, worker.protocol) == (PROTOCOL, PROTOCOL);
        let sound = scheduler.block_size > 0 && layout.block_bytes > 0;
        match digest {
            Ok(digest) if spoken && sound => Ok(Self {
                folder: folder.to_owned(),
                generation: scheduler.generation,
                digest,
                block_bytes: layout.block_bytes,
                block: scheduler.block_size,
                stages: scheduler.prefix_caching,
                grammar: scheduler.grammar,
            }),
            _ => Err(CallError::Failed(format!(
                "it speaks another protocol than {PROTOCOL}: install the shoal-vllm of this version"
            ))),
        }
    }

    fn scheduler<T: DeserializeOwned>(
        &self,
        question: &Value,
        patience: Duration,
    ) -> Result<T, CallError> {
        socket::call(
            &self.folder.join("scheduler.sock"),
            question,
            None,
            patience,
        )
    }

    fn worker(&self, question: &Value, file: Option<&std::fs::File>) -> Result<(), CallError> {
        let path = self.folder.join("worker.sock");
        socket::call::<Done>(&path, question, file, COPY_PATIENCE).map(drop)
    }

    /// Tokens of a request that surely have KV.
    pub(super) fn computed(&self, name: &str) -> Result<u32, CallError> {
        let info: Info = self.scheduler(&json!({ "op": "info", "id": name }), PATIENCE)?;
        Ok(info.computed)
    }

    /// Copies blocks `[first, first + count)` of a request behind what is in `into`.
    ///
    /// # Errors
    /// Gone as well when the engine took blocks away meanwhile.
    pub(super) fn export(
        &self,
        name: &str,
        (first, count): (u32, u32),
        into: &mut Vec<u8>,
    ) -> Result<(), CallError> {
        let question = json!({ "op": "blocks", "id": name, "first": first, "count": count });
        let table: Table = self.scheduler(&question, PATIENCE)?;
        if table.ids.len() != count as usize {
            return Err(CallError::Failed("other blocks than asked for".into()));
        }
        let bytes = u64::from(count) * self.block_bytes;
        let memory = socket::memory(bytes)?;
        let question_of_worker = json!({ "op": "export", "blocks": table.ids });
        self.worker(&question_of_worker, Some(&memory))?;
        // What was read is the request's if its blocks are the same afterwards.
        let after: Table = self.scheduler(&question, PATIENCE)?;
        if after != table {
            return Err(CallError::Gone("it was preempted meanwhile".into()));
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        socket::contents(&memory, bytes, into)
    }

    /// Has the engine keep a request's KV when it is aborted.
    pub(super) fn hold(&self, name: &str) -> Result<(), CallError> {
        let question = json!({ "op": "hold", "id": name, "ttl_ms": millis(KEPT) });
        self.scheduler::<Done>(&question, PATIENCE).map(drop)
    }

    /// Waits until an aborted request is held.
    pub(super) fn held(&self, name: &str) -> Result<Held, CallError> {
        let timeout = millis(HELD_PATIENCE);
        let question = json!({ "op": "wait_held", "id": name, "timeout_ms": timeout });
        self.scheduler(&question, HELD_PATIENCE + PATIENCE)
    }

    /// Lets the engine have held blocks back. It does so by itself in the end.
    pub(super) fn release(&self, name: &str) -> Result<(), CallError> {
        let question = json!({ "op": "release", "id": name });
        self.scheduler::<Done>(&question, PATIENCE).map(drop)
    }

    /// Lays blocks out for a request that is to come.
    pub(super) fn stage(&self, key: &str, blocks: u32, bytes: &[u8]) -> Result<(), CallError> {
        let memory = socket::filled(bytes)?;
        let kept = millis(KEPT);
        let question = json!({ "op": "stage", "key": key, "blocks": blocks, "ttl_ms": kept });
        self.worker(&question, Some(&memory))
    }

    /// Takes them away again.
    pub(super) fn unstage(&self, key: &str) -> Result<(), CallError> {
        self.worker(&json!({ "op": "drop", "key": key }), None)
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
