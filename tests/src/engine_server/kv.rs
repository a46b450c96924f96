//! What the connector inside a vLLM does, as far as a node sees it: blocks that can be copied out and laid in, holds, a prefix
//! cache. See `docs/protocol.md`.
//!
//! The KV of a token is a number made from all ids up to it, so that KV that is lost, torn or another's is seen when it is
//! used.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use serde_json::{Value, json};

use super::kv_socket::{self, Answering, Question};

/// Tokens in a block, as the simulated engine has them.
const BLOCK: usize = 16;

/// Bytes of the KV of a token.
const TOKEN: usize = 8;

/// Blocks that the ids of one request are apart from those of the next.
const APART: u32 = 4096;

/// The ids of a request as the engine has them.
#[derive(Clone, Debug, Default)]
struct Ids {
    serial: u32,
    all: Vec<u32>,
    prompt: usize,
}

impl Ids {
    /// Tokens that have KV: all but the newest, once there is an output.
    fn computed(&self) -> usize {
        match self.all.len() > self.prompt {
            true => self.all.len() - 1,
            false => 0,
        }
    }
}

/// What came of the requests of a node so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvFigures {
    /// For each request that went on from elsewhere, in their order: tokens that it had to compute before it drew one.
    pub computed: Vec<usize>,
    /// Tokens whose KV was laid in.
    pub imported: usize,
    /// Tokens whose KV was laid in and is not what it should be.
    pub wrong: usize,
    /// Questions about requests and their KV.
    pub asked: usize,
    /// Requests that run.
    pub live: usize,
    /// Requests that are held.
    pub held: usize,
    /// Parts that lie ready.
    pub staged: usize,
    /// Blocks that were read out of other engines.
    pub fetched: usize,
    /// Of these, blocks that their engine did not keep for it: they may be another request's.
    pub unkept: usize,
    /// Parts of running requests that are kept for other engines to read.
    pub pinned: usize,
}

#[derive(Debug, Default)]
struct State {
    serial: u32,
    live: BTreeMap<String, Ids>,
    holds: BTreeSet<String>,
    held: BTreeMap<String, Ids>,
    staged: BTreeMap<String, Vec<u8>>,
    cache: HashSet<u64>,
    /// Where other engines find it, if they can.
    address: Option<u64>,
    /// What is kept for them, by key.
    pins: BTreeMap<String, Vec<u32>>,
    figures: KvFigures,
    /// The next question of this kind is answered so.
    faults: BTreeMap<String, &'static str>,
}

type Shared = (Mutex<State>, Condvar);

/// All connectors of this process that others can read from.
static READABLE: Mutex<BTreeMap<u64, Weak<Shared>>> = Mutex::new(BTreeMap::new());

/// The connector of one stand-in.
#[derive(Clone, Debug, Default)]
pub struct Kv {
    shared: Arc<Shared>,
}

/// A request that has a name here. Dropping it ends the request.
#[derive(Debug)]
pub(super) struct Ticket {
    kv: Kv,
    name: String,
    over: bool,
}

impl Kv {
    /// Answers nodes in this folder until the process ends, or [`Answering`] does.
    pub(super) fn listen(&self, folder: &Path) -> Answering {
        let (scheduler, worker) = (self.clone(), self.clone());
        kv_socket::listen(
            folder,
            [
                (
                    "scheduler.sock",
                    Arc::new(move |asked| scheduler.scheduler(&asked)),
                ),
                ("worker.sock", Arc::new(move |asked| worker.worker(&asked))),
            ],
        )
    }

    /// From now on it says that other engines can read its KV, and it theirs.
    pub fn be_direct(&self) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let address = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut readable = READABLE.lock().unwrap_or_else(PoisonError::into_inner);
        readable.insert(address, Arc::downgrade(&self.shared));
        self.lock().address = Some(address);
    }

    /// What came of it so far.
    pub fn figures(&self) -> KvFigures {
        let state = self.lock();
        KvFigures {
            live: state.live.len(),
            held: state.held.len(),
            staged: state.staged.len(),
            pinned: state.pins.len(),
            ..state.figures.clone()
        }
    }

    /// The next question of this kind is answered with a no of this kind.
    pub fn fault(&self, op: &str, why: &'static str) {
        self.lock().faults.insert(op.to_owned(), why);
    }

    /// No question is answered with a no by itself any more.
    pub fn mend(&self) {
        self.lock().faults.clear();
    }

    /// Forgets all KV of requests that ended, as an engine short of memory does.
    pub fn forget_cache(&self) {
        self.lock().cache.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a request, if its body names it.
    pub(super) fn begin(&self, body: &Value, prompt: &[u32]) -> Option<Ticket> {
        let told = &body["kv_transfer_params"]["shoal"];
        let name = told["id"].as_str()?.to_owned();
        let mut state = self.lock();
        let hashes = hashes(prompt);
        let whole = prompt.len() / BLOCK;
        let cached = |blocks: &usize| state.cache.contains(&hashes[blocks * BLOCK - 1]);
        let mut hit = (1..=whole).rev().find(cached).unwrap_or(0) * BLOCK;
        let import = &told["import"];
        let number = |name: &str| import[name].as_u64().map_or(0, |it| it as usize);
        if let Some(bytes) = import["key"]
            .as_str()
            .and_then(|key| state.staged.remove(key))
        {
            let (first, tokens) = (number("first") * BLOCK, number("tokens"));
            assert_eq!(bytes.len(), number("blocks") * BLOCK * TOKEN);
            if hit >= first {
                let right = |at: &usize| {
                    let from = (at - first) * TOKEN;
                    bytes.get(from..from + TOKEN) == Some(&hashes[*at].to_le_bytes())
                };
                let wrong = (hit..tokens).filter(|at| !right(at)).count();
                state.figures.wrong += wrong;
                state.figures.imported += tokens.saturating_sub(hit);
                hit = hit.max(tokens.min(prompt.len() - 1));
            }
        }
        if told["prompt"].is_u64() {
            state.figures.computed.push(prompt.len() - hit);
        }
        state.remember(&hashes);
        state.serial += 1;
        let ids = Ids {
            serial: state.serial,
            all: prompt.to_vec(),
            prompt: prompt.len(),
        };
        state.live.insert(name.clone(), ids);
        drop(state);
        Some(Ticket {
            kv: self.clone(),
            name,
            over: false,
        })
    }

    fn scheduler(&self, asked: &Question) -> Value {
        let told = &asked.told;
        let id = told["id"].as_str().unwrap_or_default();
        let mut state = self.lock();
        if let Some(no) = state.fault(told) {
            return no;
        }
        match told["op"].as_str() {
            Some("hello") => {
                json!({ "ok": true, "protocol": 1, "package": "0.1.0", "vllm": "0.32.0",
                "generation": "stand-in", "block_size": BLOCK, "prefix_caching": true, "kv": true })
            }
            Some("info") => match state.ids(id) {
                Some(ids) => json!({ "ok": true, "state": "running", "computed": ids.computed() }),
                None => json!({ "ok": true, "state": "none", "computed": 0 }),
            },
            Some("blocks") => match state.table(told) {
                Some(blocks) => json!({ "ok": true, "ids": blocks, "preemptions": 0 }),
                None => no("gone"),
            },
            Some("pin") => match state.table(told) {
                Some(blocks) => {
                    let key = told["key"].as_str().unwrap_or_default();
                    if state.live.contains_key(id) {
                        state.pins.insert(key.to_owned(), blocks.clone());
                    }
                    json!({ "ok": true, "ids": blocks, "preemptions": 0 })
                }
                None => no("gone"),
            },
            Some("unpin") => {
                let key = told["key"].as_str().unwrap_or_default();
                json!({ "ok": true, "unpinned": state.pins.remove(key).is_some() })
            }
            Some("hold") if state.live.contains_key(id) => {
                state.holds.insert(id.to_owned());
                json!({ "ok": true })
            }
            Some("wait_held") => {
                let patience = told["timeout_ms"].as_u64().map(Duration::from_millis);
                let waits = |state: &mut State| state.live.contains_key(id);
                let (state, _) = self
                    .shared
                    .1
                    .wait_timeout_while(state, patience.unwrap_or_default(), waits)
                    .unwrap_or_else(PoisonError::into_inner);
                match state.held.get(id) {
                    Some(ids) => {
                        json!({ "ok": true, "computed": ids.computed(), "token_ids": ids.all })
                    }
                    None => no("gone"),
                }
            }
            Some("release") => {
                state.holds.remove(id);
                let released = state.held.remove(id).is_some();
                json!({ "ok": true, "released": released })
            }
            _ => no("gone"),
        }
    }

    fn worker(&self, asked: &Question) -> Value {
        let told = &asked.told;
        // Before anything is locked here: the other one may be reading too.
        let fetched = told["from"].is_object().then(|| self.fetch(&told["from"]));
        let mut state = self.lock();
        if let Some(no) = state.fault(told) {
            return no;
        }
        match (told["op"].as_str(), &asked.file) {
            (Some("hello"), _) => json!({ "ok": true, "protocol": 1, "generation": "stand-in",
                "layout": { "digest": "00000000000000aa", "block_bytes": BLOCK * TOKEN },
                "direct": state.address.is_some() }),
            (Some("address"), _) => json!({ "ok": true, "address": { "at": state.address } }),
            (Some("export"), Some(file)) => {
                let blocks = told["blocks"].as_array().cloned().unwrap_or_default();
                let blocks = blocks.iter().filter_map(Value::as_u64);
                let bytes: Vec<u8> = blocks.flat_map(|block| state.block(block as u32)).collect();
                kv_socket::fill(file, &bytes);
                json!({ "ok": true })
            }
            (Some("stage"), Some(file)) => {
                match fetched {
                    Some(Some(fetched)) if !state.faults.contains_key("fetch") => {
                        kv_socket::fill(file, &fetched.bytes);
                        state.figures.fetched += fetched.blocks;
                        state.figures.unkept += fetched.unkept;
                    }
                    Some(_) => {
                        state.faults.remove("fetch");
                        return no("unfit");
                    }
                    None => {}
                }
                let key = told["key"].as_str().unwrap_or_default().to_owned();
                state.staged.insert(key, kv_socket::contents(file));
                json!({ "ok": true })
            }
            (Some("drop"), _) => {
                let key = told["key"].as_str().unwrap_or_default();
                json!({ "ok": true, "dropped": state.staged.remove(key).is_some() })
            }
            _ => no("bad"),
        }
    }
}

/// What was read out of another engine.
struct Fetched {
    bytes: Vec<u8>,
    blocks: usize,
    unkept: usize,
}

impl Kv {
    /// Reads blocks out of another engine.
    fn fetch(&self, from: &Value) -> Option<Fetched> {
        let at = from["address"]["at"].as_u64()?;
        let readable = READABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let other = readable.get(&at).and_then(Weak::upgrade);
        drop(readable);
        let other = other.filter(|other| !Arc::ptr_eq(other, &self.shared))?;
        let ids = from["ids"].as_array().cloned().unwrap_or_default();
        let ids: Vec<u32> = ids
            .iter()
            .filter_map(|id| u32::try_from(id.as_u64()?).ok())
            .collect();
        let there = other.0.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Fetched {
            bytes: ids.iter().flat_map(|id| there.block(*id)).collect(),
            blocks: ids.len(),
            unkept: ids.iter().filter(|id| !there.keeps(**id)).count(),
        })
    }
}

impl State {
    /// The blocks that are asked about.
    fn table(&self, told: &Value) -> Option<Vec<u32>> {
        let ids = self.ids(told["id"].as_str()?)?;
        let number = |name: &str| told[name].as_u64().map_or(0, |it| it as u32);
        let first = ids.serial * APART + number("first");
        Some((first..first + number("count")).collect())
    }

    /// Whether a block stays what it is while another engine reads it.
    fn keeps(&self, id: u32) -> bool {
        let held = self.held.values().any(|ids| ids.serial == id / APART);
        held || self.pins.values().flatten().any(|pinned| *pinned == id)
    }

    fn fault(&mut self, told: &Value) -> Option<Value> {
        let op = told["op"].as_str()?;
        self.figures.asked += usize::from(!matches!(op, "hello" | "address"));
        self.faults.remove(op).map(no)
    }

    fn ids(&self, name: &str) -> Option<&Ids> {
        self.live.get(name).or_else(|| self.held.get(name))
    }

    /// The bytes of a block of some request; those of tokens without KV are zero.
    fn block(&self, id: u32) -> Vec<u8> {
        let of = |ids: &&Ids| ids.serial == id / APART;
        let owner = self.live.values().chain(self.held.values()).find(of);
        let mut bytes = vec![0; BLOCK * TOKEN];
        let Some(owner) = owner else {
            return bytes;
        };
        let from = (id % APART) as usize * BLOCK;
        let hashes = hashes(&owner.all);
        let has = owner.computed().min(from + BLOCK);
        for at in from..has {
            bytes[(at - from) * TOKEN..][..TOKEN].copy_from_slice(&hashes[at].to_le_bytes());
        }
        bytes
    }

    /// Keeps the whole blocks of these ids.
    fn remember(&mut self, hashes: &[u64]) {
        let ends = hashes.iter().skip(BLOCK - 1).step_by(BLOCK);
        self.cache.extend(ends);
    }
}

impl Ticket {
    /// The request drew these.
    pub(super) fn drew(&self, ids: &[u32]) {
        if let Some(live) = self.kv.lock().live.get_mut(&self.name) {
            live.all.extend(ids);
        }
    }

    /// It came to its own end.
    pub(super) fn over(&mut self) {
        self.over = true;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.kv.lock();
        if let Some(ids) = state.live.remove(&self.name) {
            let computed = ids.computed();
            let hashes = hashes(&ids.all[..computed]);
            state.remember(&hashes);
            if state.holds.remove(&self.name) && !self.over && computed > 0 {
                state.held.insert(self.name.clone(), ids);
            }
        }
        drop(state);
        self.kv.shared.1.notify_all();
    }
}

fn no(why: &str) -> Value {
    json!({ "ok": false, "why": why, "message": "by a test" })
}

/// For each position a number made from all ids up to it.
fn hashes(ids: &[u32]) -> Vec<u64> {
    let step = |hash: &mut u64, id: &u32| {
        *hash = (*hash ^ u64::from(*id)).wrapping_mul(0x0100_0000_01B3);
        Some(*hash)
    };
    ids.iter().scan(0xCBF2_9CE4_8422_2325, step).collect()
}
