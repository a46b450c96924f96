//! The engine that callers hold: everything here answers at once, from state behind a short lock.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use shoal_gossip::{Clock, Epoch, LoadSummary, RequestId};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::engine::batched::acts::ACTS;
use crate::engine::batched::job::Submission;
use crate::engine::batched::jobs::Jobs;
use crate::engine::batched::thread::Started;
use crate::engine::batched::{BatchConfig, Batcher, Executor, KvForm, TextModel, prepare, thread};
use crate::engine::moving::MovingEngine;
use crate::engine::work::{Job, Prepared, RequestKind};
use crate::engine::{
    Engine, EngineError, EngineEvent, EngineFacts, ReservationId, ReserveAsk, ReserveRefusal,
};

/// A drop looks this often, with this pause between, whether the last step has ended: a second in all,
/// several steps of the models served from a CPU.
const DROP_LOOKS: u32 = 200;

/// See [`DROP_LOOKS`].
const DROP_PAUSE: Duration = Duration::from_millis(5);

/// What the engine thread and the callers share.
pub(super) struct Shared {
    /// Held for planning and bookkeeping only, never while a step runs.
    jobs: Mutex<Jobs>,
    /// Wakes the engine thread.
    pub(super) wake: Condvar,
    pub(super) text: Arc<dyn TextModel>,
    pub(super) clock: Arc<dyn Clock>,
    load_changed: watch::Sender<()>,
}

impl Shared {
    /// A panic under the lock leaves counts that are at worst too high; going on beats ending.
    pub(super) fn lock(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells listeners if the load is not what it was.
    pub(super) fn publish(&self, jobs: &mut Jobs) {
        if jobs.load_has_changed() {
            self.load_changed.send_replace(());
        }
    }

    /// Does something under the lock, then tells listeners and the engine thread.
    pub(super) fn change<T>(&self, act: impl FnOnce(&mut Jobs) -> T) -> T {
        let mut jobs = self.lock();
        let result = act(&mut jobs);
        self.publish(&mut jobs);
        drop(jobs);
        self.wake.notify_one();
        result
    }
}

/// An [`Engine`] around any [`Executor`].
///
/// Dropping it ends every job without a result and waits a second at most for the thread's current step;
/// [`Engine::shutdown`] waits for the jobs first.
pub struct BatchedEngine {
    pub(super) facts: Arc<EngineFacts>,
    pub(super) shared: Arc<Shared>,
    /// How its KV travels, when it does.
    pub(super) form: Option<Arc<dyn KvForm>>,
    /// Places in the queue of acts on KV.
    pub(super) acts: Arc<Semaphore>,
    preparing: Arc<Semaphore>,
    stopped: watch::Receiver<bool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for BatchedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchedEngine")
            .field("facts", &self.facts)
            .finish_non_exhaustive()
    }
}

impl BatchedEngine {
    /// Starts the engine thread and waits until its executor is made there. Loading a model may
    /// take long: async callers use `spawn_blocking`. Whether KV travels the executor says, not `facts`.
    ///
    /// # Errors
    /// `Broken` when the sizes do not fit together or the facts contradict them, and whatever
    /// `make_executor` returns. Nothing runs then.
    pub fn start<X: Executor>(
        config: BatchConfig,
        facts: EngineFacts,
        make_executor: impl FnOnce() -> Result<X, EngineError> + Send + 'static,
        text: Arc<dyn TextModel>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, EngineError> {
        check_facts(&config, &facts)?;
        let batcher =
            Batcher::new(config).map_err(|error| EngineError::Broken(error.to_string()))?;
        let shared = Arc::new(Shared {
            jobs: Mutex::new(Jobs::new(batcher)),
            wake: Condvar::new(),
            text,
            clock,
            load_changed: watch::Sender::new(()),
        });
        let started = thread::spawn(Arc::clone(&shared), make_executor)?;
        let Started {
            thread,
            stopped,
            form,
        } = started;
        let mut facts = facts;
        facts.capabilities.kv_export = form.is_some();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Arc::new(Self {
            facts: Arc::new(facts),
            shared,
            form,
            acts: Arc::new(Semaphore::new(ACTS)),
            preparing: Arc::new(Semaphore::new(cores)),
            stopped,
            thread: Mutex::new(Some(thread)),
        }))
    }
}

fn check_facts(config: &BatchConfig, facts: &EngineFacts) -> Result<(), EngineError> {
    let same = facts.block_size == config.block_size
        && facts.total == config.total
        && !facts.models.is_empty()
        && facts
            .models
            .iter()
            .all(|model| model.context == config.context);
    if same {
        Ok(())
    } else {
        let message = "the engine's facts contradict its sizes, or name no model".to_owned();
        Err(EngineError::Broken(message))
    }
}

#[async_trait]
impl Engine for BatchedEngine {
    fn facts(&self) -> Arc<EngineFacts> {
        Arc::clone(&self.facts)
    }

    fn load(&self) -> LoadSummary {
        let now = self.shared.clock.now();
        self.shared.lock().load(now)
    }

    fn preemptions(&self) -> u64 {
        self.shared.lock().preemptions()
    }

    fn load_changed(&self) -> watch::Receiver<()> {
        self.shared.load_changed.subscribe()
    }

    async fn prepare(&self, kind: RequestKind, body: Bytes) -> Result<Prepared, EngineError> {
        // Tokenising is work for a core, so no more of it at once than there are cores.
        let permit = Arc::clone(&self.preparing).acquire_owned().await;
        let permit = permit.map_err(|_| EngineError::NotReady)?;
        let models = self.facts.models.clone();
        let text = Arc::clone(&self.shared.text);
        let work = tokio::task::spawn_blocking(move || {
            let prepared = prepare::prepare(kind, &body, &models, &*text);
            drop(permit);
            prepared
        });
        work.await
            .map_err(|error| EngineError::Broken(format!("reading the request failed: {error}")))?
    }

    fn reserve(&self, ask: ReserveAsk) -> Result<ReservationId, ReserveRefusal> {
        let now = self.shared.clock.now();
        self.shared.change(|jobs| jobs.reserve(now, ask))
    }

    fn release(&self, reservation: ReservationId) {
        self.shared.change(|jobs| jobs.release(reservation));
    }

    fn submit(&self, job: Job) -> Result<mpsc::Receiver<EngineEvent>, EngineError> {
        // Whatever comes of it, the promise is used up: nobody will come back for it.
        prepare::check_job(&job, &self.facts.models, &*self.shared.text).inspect_err(|_| {
            job.reservation.into_iter().for_each(|id| self.release(id));
        })?;
        let submission = Submission::new(job, &*self.shared.text);
        let now = self.shared.clock.now();
        self.shared.change(|jobs| jobs.submit(now, submission))
    }

    fn abort(&self, request: RequestId, epoch: Epoch) {
        self.shared.change(|jobs| jobs.abort(request, epoch));
    }

    fn moving(&self) -> Option<&dyn MovingEngine> {
        Some(self)
    }

    async fn shutdown(&self) {
        self.shared.change(Jobs::stop);
        let mut stopped = self.stopped.clone();
        if stopped.wait_for(|stopped| *stopped).await.is_err() {
            tracing::error!(target: "shoal::engine", "the engine thread ended without a word");
        }
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        // It said so in its last statement, so this waits for nothing.
        if let Some(Err(_)) = thread.map(JoinHandle::join) {
            tracing::error!(target: "shoal::engine", "the engine thread panicked");
        }
    }
}

impl Drop for BatchedEngine {
    /// Gives the step that runs a moment to end, so that it does not run on while the process ends: native
    /// code would then meet its own statics half destroyed.
    fn drop(&mut self) {
        self.shared.change(Jobs::abandon);
        for _ in 0..DROP_LOOKS {
            if *self.stopped.borrow() {
                return;
            }
            std::thread::sleep(DROP_PAUSE);
        }
        tracing::debug!(target: "shoal::engine", "dropped while a long step runs");
    }
}
