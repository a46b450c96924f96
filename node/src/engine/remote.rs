//! An engine that speaks HTTP, beside the node: vLLM, SGLang, llama-server, or any OpenAI-compatible server.
//!
//! ```text
//!  watch     asks what the engine is and how it is (identity, reading, scrape) → gauge: its load
//!  question  what it is asked for a job (the client's own bytes, or to go on from ids)
//!  exchange  one HTTP request (client) → answer, chunk, sse: pieces with the ids they stand for (told: the text of ids)
//!  job       what was drawn and what of it is on its way; run: the task that moves it on
//!  moving    hand-over, with KV where the engine gives it away (kv), else by recompute
//! ```
//!
//! Bodies go to the engine as they came and answers come back as they were written. Where the engine tells token ids they are
//! taken note of, and another engine of the same kind can go on with the request. `docs/engines.md` says what each can do.

mod answer;
mod chunk;
mod client;
mod exchange;
pub(crate) mod fuzz;
mod gauge;
mod identity;
mod job;
mod kind;
mod kv;
mod moving;
mod question;
mod reading;
mod run;
mod scrape;
mod sse;
mod told;
mod watch;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hyper::header::HeaderValue;
use shoal_gossip::{BlockSize, Clock, Epoch, LoadSummary, RequestId, Tokens};
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch as channel};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::client::Client;
use self::gauge::{Assumed, Gauge};
use self::job::{RemoteJob, SharedJob};
pub use self::kind::ServerKind;
use self::kv::KvSide;
use self::question::Asked;
use crate::engine::moving::{MovingCounts, MovingEngine};
use crate::engine::work::{Job, Prepared, RequestKind};
use crate::engine::{
    Capabilities, Engine, EngineError, EngineEvent, EngineFacts, ReservationId, ReserveAsk,
    ReserveRefusal, starting_demand,
};

/// How an engine beside the node is reached and looked at.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// `host:port`.
    pub authority: String,
    /// What it is, if it should not be found out.
    pub kind: Option<ServerKind>,
    /// Sent as a bearer token.
    pub key: Option<String>,
    /// Time between two looks.
    pub poll: Duration,
    /// Longest that a stream may say nothing once it has begun.
    pub stall: Duration,
    /// KV tokens it holds, if it does not say or says it wrong.
    pub capacity: Option<Tokens>,
    /// Tokens in a block, as long as it does not say.
    pub block_size: BlockSize,
    /// Requests that may wait for KV.
    pub queue_limit: u32,
    /// Folder that node and engine share for the KV of requests that move; `None` moves them by recompute.
    pub kv_folder: Option<PathBuf>,
    /// What is done with requests that would draw other tokens elsewhere.
    pub inexact: Inexact,
}

/// Whether a request may go on in another engine that draws other tokens than its own would have: a seeded generator begins anew
/// there, and a penalty forgets.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    clap::ValueEnum,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Inexact {
    /// It stays, and stands or falls with its engine.
    #[default]
    Refuse,
    /// It goes on; that is counted and logged each time.
    Allow,
}

/// An engine beside the node.
#[derive(Debug)]
pub struct RemoteEngine {
    shared: Arc<Shared>,
    watcher: TaskTracker,
}

/// What the callers, the watcher and the tasks of requests share.
struct Shared {
    config: RemoteConfig,
    client: Client,
    clock: Arc<dyn Clock>,
    gauge: Mutex<Gauge>,
    facts: Mutex<Arc<EngineFacts>>,
    /// What it is; `None` before it was heard of.
    known: Mutex<Option<Known>>,
    jobs: Mutex<BTreeMap<RequestId, SharedJob>>,
    kv: KvSide,
    /// Requests that went on inexactly.
    inexact: Mutex<MovingCounts>,
    changed: channel::Sender<()>,
    /// Wakes the watcher before its time: something went wrong with the engine.
    look: Notify,
    stop: CancellationToken,
    tasks: TaskTracker,
    runtime: Handle,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("config", &self.config.authority)
            .finish_non_exhaustive()
    }
}

/// What an engine is, as far as asking it depends on that.
#[derive(Clone, Copy, Debug)]
struct Known {
    kind: ServerKind,
    has_ids: bool,
    high_first: bool,
}

/// A request in the table.
#[derive(Debug)]
struct Entry {
    state: Mutex<RemoteJob>,
    wake: Notify,
    /// Ends what prefills it while it arrives.
    stop: CancellationToken,
    /// What came of the prefill of an arriving request, once it ended.
    prefilled: channel::Sender<Option<Result<(), String>>>,
}

impl Entry {
    fn new(job: RemoteJob) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(job),
            wake: Notify::new(),
            stop: CancellationToken::new(),
            prefilled: channel::Sender::new(Some(Ok(()))),
        })
    }

    fn lock(&self) -> MutexGuard<'_, RemoteJob> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it, whatever it does.
    fn end(&self) {
        self.lock().over = true;
        self.stop.cancel();
        self.wake.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stands by an engine. It need not be there yet: the load says when it is. Must be called where tasks can be spawned.
pub fn start(
    config: RemoteConfig,
    clock: Arc<dyn Clock>,
) -> Result<Arc<RemoteEngine>, EngineError> {
    let key = config.key.as_deref().map(|key| {
        let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
            .map_err(|_| EngineError::Broken("the engine's API key is not printable".into()))?;
        value.set_sensitive(true);
        Ok(value)
    });
    let assumed = Assumed {
        block_size: config.block_size,
        capacity: config.capacity,
        queue_limit: config.queue_limit,
    };
    let gauge = Gauge::new(assumed);
    let facts = EngineFacts {
        models: Vec::new(),
        block_size: gauge.block_size(),
        total: gauge.total(),
        capabilities: Capabilities::default(),
    };
    let kv = KvSide::new(config.kv_folder.clone());
    let shared = Arc::new(Shared {
        client: Client::new(config.authority.clone(), key.transpose()?),
        config,
        clock,
        gauge: Mutex::new(gauge),
        facts: Mutex::new(Arc::new(facts)),
        known: Mutex::new(None),
        jobs: Mutex::new(BTreeMap::new()),
        kv,
        inexact: Mutex::default(),
        changed: channel::Sender::new(()),
        look: Notify::new(),
        stop: CancellationToken::new(),
        tasks: TaskTracker::new(),
        runtime: Handle::current(),
    });
    let watcher = TaskTracker::new();
    watcher.spawn_on(watch::watch(Arc::clone(&shared)), &shared.runtime);
    Ok(Arc::new(RemoteEngine { shared, watcher }))
}

impl Shared {
    fn gauge<T>(&self, act: impl FnOnce(&mut Gauge) -> T) -> T {
        let result = act(&mut lock(&self.gauge));
        self.changed.send_replace(());
        result
    }

    fn facts(&self) -> Arc<EngineFacts> {
        Arc::clone(&lock(&self.facts))
    }

    /// What must be known to ask for a request of this model.
    fn asked(&self, model: &str) -> Result<(Asked, u64), EngineError> {
        let known = *lock(&self.known);
        let known = known.ok_or(EngineError::NotReady)?;
        let facts = self.facts();
        let served = facts.models.iter().find(|served| served.id == model);
        let served = served.ok_or_else(|| EngineError::UnknownModel(model.to_owned()))?;
        let asked = Asked {
            kind: known.kind,
            has_ids: known.has_ids,
            high_first: known.high_first,
            grammar: self.kv.tells_grammars(),
            inexact: self.config.inexact,
            context: served.context,
        };
        Ok((asked, served.fingerprint))
    }

    fn find(&self, request: RequestId, epoch: Epoch) -> Option<SharedJob> {
        let entry = Arc::clone(lock(&self.jobs).get(&request)?);
        let same = entry.lock().job.epoch == epoch;
        same.then_some(entry)
    }

    /// Enters a request, in the place of an older ownership of it.
    fn enter(&self, job: RemoteJob) -> Result<SharedJob, EngineError> {
        let (request, epoch) = (job.job.request, job.job.epoch);
        let size = (job.prompt, job.output());
        let entry = Entry::new(job);
        let mut jobs = lock(&self.jobs);
        if let Some(older) = jobs.get(&request) {
            let known = older.lock().job.epoch;
            if known >= epoch {
                return Err(EngineError::BadRequest {
                    message: format!("request {request} is here already, in epoch {}", known.0),
                    param: None,
                });
            }
            older.end();
        }
        jobs.insert(request, Arc::clone(&entry));
        drop(jobs);
        let now = self.clock.now();
        self.gauge(|gauge| gauge.sent(now, (request, epoch), size));
        Ok(entry)
    }

    /// Takes a request out, if it is still this one.
    fn leave(self: &Arc<Self>, entry: &SharedJob) {
        let (request, epoch, (held, laid)) = {
            let mut job = entry.lock();
            (job.job.request, job.job.epoch, job.let_go())
        };
        self.let_go(held, laid);
        let mut jobs = lock(&self.jobs);
        if jobs
            .get(&request)
            .is_some_and(|known| Arc::ptr_eq(known, entry))
        {
            jobs.remove(&request);
        }
        drop(jobs);
        self.gauge(|gauge| gauge.gone(request, epoch));
    }

    /// Checks a job that may come from a peer.
    fn check(&self, job: &Job) -> Result<(Asked, u64), EngineError> {
        let (asked, fingerprint) = self.asked(&job.prepared.model)?;
        let bad = |message: &str, param: &str| EngineError::BadRequest {
            message: message.to_owned(),
            param: Some(param.to_owned()),
        };
        let by_ids = job.body.is_empty() || !job.generated.is_empty();
        if !by_ids {
            return Ok((asked, fingerprint));
        }
        let goes_on = self.facts().capabilities.resumes && asked.can_take(job);
        if !goes_on {
            return Err(bad("this engine cannot go on from token ids", "prompt"));
        }
        if job.body.is_empty() && job.prepared.prompt.is_empty() {
            return Err(bad("the prompt is empty", "prompt"));
        }
        let (prompt, most) = (
            job.prepared.prompt.len() as u64,
            job.prepared.params.max_tokens,
        );
        if most == 0 || job.generated.len() as u64 > u64::from(most) {
            return Err(bad(
                "more output exists than the request may have",
                "max_tokens",
            ));
        }
        if job.body.is_empty() && prompt + u64::from(most) > u64::from(asked.context.0) {
            let message = format!(
                "{} tokens do not fit in a context of {}",
                prompt + u64::from(most),
                asked.context
            );
            return Err(bad(&message, "max_tokens"));
        }
        Ok((asked, fingerprint))
    }

    /// Uses up a promise, or sees whether there is room without one.
    fn take_room(&self, job: &Job) -> Result<(), EngineError> {
        let now = self.clock.now();
        if let Some(reservation) = job.reservation {
            self.gauge(|gauge| gauge.release(reservation));
            return Ok(());
        }
        let prompt = job.prepared.prompt_tokens();
        let generated = Tokens(u32::try_from(job.generated.len()).unwrap_or(u32::MAX));
        let ask = ReserveAsk {
            demand: starting_demand(self.facts().block_size, prompt, generated),
            lease: Duration::from_secs(1),
            at_once: false,
            waited: Duration::ZERO,
            resumed: false,
            home: job.request.home,
        };
        self.gauge(|gauge| {
            let reservation = gauge.reserve(now, ask)?;
            gauge.release(reservation);
            Ok(())
        })
        .map_err(|refusal: ReserveRefusal| match refusal {
            ReserveRefusal::QueueFull | ReserveRefusal::NoRoomNow => EngineError::QueueFull,
            ReserveRefusal::NotReady => EngineError::NotReady,
            ReserveRefusal::NeverFits => EngineError::BadRequest {
                message: refusal.to_string(),
                param: None,
            },
        })
    }
}

#[async_trait]
impl Engine for RemoteEngine {
    fn facts(&self) -> Arc<EngineFacts> {
        self.shared.facts()
    }

    fn load(&self) -> LoadSummary {
        let now = self.shared.clock.now();
        lock(&self.shared.gauge).load(now)
    }

    fn has_work(&self) -> bool {
        !lock(&self.shared.jobs).is_empty()
    }

    fn load_changed(&self) -> channel::Receiver<()> {
        self.shared.changed.subscribe()
    }

    async fn prepare(&self, kind: RequestKind, body: Bytes) -> Result<Prepared, EngineError> {
        let request = crate::openai::parse(kind, &body)?;
        self.shared.asked(&request.model)?;
        Ok(Prepared::unread(&request.model))
    }

    fn reserve(&self, ask: ReserveAsk) -> Result<ReservationId, ReserveRefusal> {
        let now = self.shared.clock.now();
        self.shared.gauge(|gauge| gauge.reserve(now, ask))
    }

    fn release(&self, reservation: ReservationId) {
        self.shared.gauge(|gauge| gauge.release(reservation));
    }

    fn submit(&self, job: Job) -> Result<mpsc::Receiver<EngineEvent>, EngineError> {
        let shared = &self.shared;
        let checked = if shared.stop.is_cancelled() {
            Err(EngineError::NotReady)
        } else {
            shared.check(&job)
        };
        // Whatever comes of it, the promise is used up: nobody will come back for it.
        let (asked, fingerprint) = checked.inspect_err(|_| {
            job.reservation.into_iter().for_each(|id| self.release(id));
        })?;
        shared.take_room(&job)?;
        let entry = shared.enter(RemoteJob::new(job, asked.context, shared.clock.now()))?;
        let events = entry.lock().open();
        run::spawn(shared, entry, asked, fingerprint);
        Ok(events)
    }

    fn abort(&self, request: RequestId, epoch: Epoch) {
        let entry = lock(&self.shared.jobs).get(&request).cloned();
        if let Some(entry) = entry
            && entry.lock().job.epoch <= epoch
        {
            entry.end();
            self.shared.leave(&entry);
        }
    }

    fn preemptions(&self) -> u64 {
        lock(&self.shared.gauge).preemptions()
    }

    fn moving(&self) -> Option<&dyn MovingEngine> {
        Some(self)
    }

    async fn shutdown(&self) {
        let shared = &self.shared;
        shared.gauge(Gauge::drain);
        shared.tasks.close();
        shared.tasks.wait().await;
        shared.stop.cancel();
        self.watcher.close();
        self.watcher.wait().await;
    }
}

impl Drop for RemoteEngine {
    fn drop(&mut self) {
        self.shared.stop.cancel();
    }
}
