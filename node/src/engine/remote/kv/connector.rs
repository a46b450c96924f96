//! The connector that runs inside vLLM (`migrate/vllm`), as this node asks it: one socket for its scheduler, one for its worker.
//!
//! All calls block; what they mean is in `docs/protocol.md`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
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

/// How long the engine keeps blocks where they are for another engine to read, if nobody says that it has: what is read later would
/// be the KV of other tokens. A parcel that says where they are is taken by a target whose session lives, for
/// [`shoal_migrate::SessionLimits::lease`] after the last it heard, and read within [`COPY_PATIENCE`]; this is twice that.
const KEPT_FOR_OTHERS: Duration = Duration::from_secs(40);

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
    /// Where other engines find its KV, for their connectors alone to read; `None` when they cannot.
    pub(super) address: Option<Value>,
}

/// Blocks that lie in another engine.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Elsewhere {
    /// Where its KV is.
    pub(super) address: Value,
    /// The blocks there.
    pub(super) ids: Vec<u32>,
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
    direct: bool,
    #[serde(default)]
    why_not: String,
}

#[derive(Deserialize)]
struct Address {
    address: Value,
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
        let address = match worker.direct {
            true => {
                let question = json!({ "op": "address" });
                let told = socket::call(&folder.join("worker.sock"), &question, None, PATIENCE);
                told.ok().map(|Address { address }| address)
            }
            false => None,
        };
        match digest {
            Ok(digest) if spoken && sound => Ok(Self {
                folder: folder.to_owned(),
                generation: scheduler.generation,
                digest,
                block_bytes: layout.block_bytes,
                block: scheduler.block_size,
                stages: scheduler.prefix_caching,
                grammar: scheduler.grammar,
                address,
            }),
            Ok(_) | Err(_) => Err(CallError::Failed(format!(
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

    fn worker(
        &self,
        question: &Value,
        file: Option<&File>,
        patience: Duration,
    ) -> Result<(), CallError> {
        let path = self.folder.join("worker.sock");
        socket::call::<Done>(&path, question, file, patience).map(drop)
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
        self.worker(&question_of_worker, Some(&memory), COPY_PATIENCE)?;
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
        self.worker(&question, Some(&memory), COPY_PATIENCE)
    }

    /// As [`Self::export`], but only says where the blocks are. They stay there until `key` is unpinned, or
    /// [`KEPT_FOR_OTHERS`] is over.
    pub(super) fn point_out(
        &self,
        (name, key): (&str, &str),
        (first, count): (u32, u32),
        into: &mut Vec<u8>,
    ) -> Result<(), CallError> {
        let address = self.address.clone();
        let address = address.ok_or_else(|| CallError::Failed("it has no address".into()))?;
        let question = json!({
            "op": "pin", "id": name, "key": key, "first": first, "count": count,
            "ttl_ms": millis(KEPT_FOR_OTHERS), "timeout_ms": millis(HELD_PATIENCE),
        });
        let table: Table = self.scheduler(&question, HELD_PATIENCE + PATIENCE)?;
        let ids = table.ids;
        if ids.len() != count as usize {
            return Err(CallError::Failed("other blocks than asked for".into()));
        }
        serde_json::to_writer(into, &Elsewhere { address, ids })
            .map_err(|error| CallError::Failed(error.to_string()))
    }

    /// Nobody reads these blocks any more.
    pub(super) fn unpin(&self, key: &str) -> Result<(), CallError> {
        let question = json!({ "op": "unpin", "key": key });
        self.scheduler::<Done>(&question, PATIENCE).map(drop)
    }

    /// Has the engine read blocks out of another one, and lay them out as [`Self::stage`] does.
    pub(super) fn fetch(&self, key: &str, from: &Elsewhere) -> Result<(), CallError> {
        let blocks = from.ids.len() as u64;
        let memory = socket::memory(blocks * self.block_bytes)?;
        let question = json!({
            "op": "stage", "key": key, "blocks": blocks, "ttl_ms": millis(KEPT),
            "timeout_ms": millis(COPY_PATIENCE), "from": from,
        });
        self.worker(&question, Some(&memory), COPY_PATIENCE + PATIENCE)
    }

    /// Takes them away again.
    pub(super) fn unstage(&self, key: &str) -> Result<(), CallError> {
        self.worker(&json!({ "op": "drop", "key": key }), None, PATIENCE)
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
