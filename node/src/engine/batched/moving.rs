//! The engine's side of a hand-over: what callers ask, with all heavy work away from the engine thread.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use shoal_gossip::{Epoch, RequestId, Tokens};
use shoal_migrate::CopyMode;
use tokio::sync::{mpsc, oneshot};

use crate::engine::batched::acts::{Act, Paused, QueuedAct, RawKv};
use crate::engine::batched::job::{Ownership, Resumption, Submission, Told, channel};
use crate::engine::batched::{BatchedEngine, KvForm, KvImport, prepare};
use crate::engine::moving::{
    Exported, ExportedKv, JobStatus, LastState, MoveError, MovingEngine, Opening, PausedJob,
};
use crate::engine::work::Job;
use crate::engine::{EngineError, EngineEvent};

impl BatchedEngine {
    /// Has the engine thread do something for a job.
    async fn act<T>(
        &self,
        job: Ownership,
        make: impl FnOnce(oneshot::Sender<Result<T, MoveError>>) -> Act,
    ) -> Result<T, MoveError> {
        let place = Arc::clone(&self.acts).acquire_owned().await;
        let place = place.map_err(|error| MoveError::Broken(error.to_string()))?;
        let (answer, answered) = oneshot::channel();
        let act = QueuedAct {
            job,
            act: make(answer),
            place,
        };
        self.shared.change(|jobs| jobs.ask(act))?;
        // Unanswered when the thread has ended: so has the job.
        answered
            .await
            .unwrap_or_else(|_| Err(self.shared.lock().absence()))
    }

    fn form(&self) -> Result<Arc<dyn KvForm>, MoveError> {
        let form = self.form.clone();
        form.ok_or_else(|| MoveError::Unfit("this engine moves no KV".to_owned()))
    }

    /// Brings what the executor gave into the form that travels.
    async fn cut(&self, raw: Option<RawKv>) -> Result<Option<ExportedKv>, MoveError> {
        let Some(RawKv { range, bytes }) = raw else {
            return Ok(None);
        };
        let form = self.form()?;
        let bytes = aside(move || form.cut(bytes, range)).await?;
        let bytes = bytes.map_err(MoveError::Broken)?;
        Ok(Some(ExportedKv { range, bytes }))
    }

    /// Brings the stages that were kept into one import.
    async fn join_stages(&self, job: Ownership) -> Result<Option<Bytes>, MoveError> {
        let Some((slot, stages)) = self.shared.lock().kept_stages(job)? else {
            return Ok(None);
        };
        let form = self.form()?;
        let joined = aside(move || form.join(slot, &stages)).await?;
        joined
            .map(Some)
            .map_err(|why| self.shared.change(|jobs| jobs.unfit(job, &why)))
    }

    async fn prefill(&self, job: Ownership, state: LastState) -> Result<(), MoveError> {
        let text = &*self.shared.text;
        let told = self.shared.change(|jobs| jobs.catch_up(job, state, text))?;
        told.await.map_err(|_| self.shared.lock().absence())
    }
}

/// Does work for a core where it holds up neither the engine nor the callers.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, MoveError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| MoveError::Broken(format!("work on KV failed: {error}")))
}

#[async_trait]
impl MovingEngine for BatchedEngine {
    fn jobs(&self) -> Vec<JobStatus> {
        self.shared.lock().statuses()
    }

    fn job(&self, request: RequestId) -> Option<JobStatus> {
        self.shared.lock().status(request)
    }

    fn kv_bytes_per_token(&self) -> u32 {
        self.form.as_ref().map_or(0, |form| form.bytes_per_token())
    }

    fn describe(&self, request: RequestId, epoch: Epoch) -> Result<Opening, MoveError> {
        self.shared.lock().describe(Ownership { request, epoch })
    }

    async fn export(
        &self,
        request: RequestId,
        epoch: Epoch,
        from: Tokens,
        at_most: Tokens,
    ) -> Result<Exported, MoveError> {
        self.form()?;
        let job = Ownership { request, epoch };
        let exported = self.act(job, |answer| Act::Export {
            from,
            at_most,
            answer,
        });
        let (raw, computed) = exported.await?;
        let kv = self.cut(raw).await?;
        Ok(Exported { kv, computed })
    }

    async fn pause(
        &self,
        request: RequestId,
        epoch: Epoch,
        kv_from: Option<Tokens>,
    ) -> Result<PausedJob, MoveError> {
        if kv_from.is_some() {
            self.form()?;
        }
        let job = Ownership { request, epoch };
        // Whoever asked may be gone before all is done, and must not leave a job that nobody lets go on.
        let guard = Unpause {
            engine: self,
            job: Some(job),
        };
        let paused = self.act(job, |answer| Act::Pause { kv_from, answer }).await;
        let Paused { kv, state, at } = match paused {
            Ok(paused) => paused,
            Err(error) => {
                guard.defuse();
                return Err(error);
            }
        };
        let kv = self.cut(kv).await?;
        guard.defuse();
        Ok(PausedJob { state, kv, at })
    }

    fn unpause(&self, request: RequestId, epoch: Epoch) {
        let job = Ownership { request, epoch };
        self.shared.change(|jobs| jobs.unpause(job));
    }

    fn admit(&self, job: Job, mode: CopyMode) -> Result<(), EngineError> {
        let reservation = job.reservation;
        let checked = prepare::check_job(&job, &self.facts.models, &*self.shared.text);
        let possible = checked.and_then(|()| match (mode, &self.form) {
            (CopyMode::Kv, None) => Err(EngineError::BadRequest {
                message: "this engine takes in no KV".to_owned(),
                param: None,
            }),
            (CopyMode::Kv | CopyMode::Recompute | CopyMode::Waiting, _) => Ok(()),
        });
        // Whatever comes of it, the promise is used up: nobody will come back for it.
        possible.inspect_err(|_| {
            self.shared.change(|jobs| jobs.give_back(reservation));
        })?;
        let submission = Submission::new(job, &*self.shared.text);
        let now = self.shared.clock.now();
        self.shared.change(|jobs| jobs.admit(now, submission, mode))
    }

    async fn import(
        &self,
        request: RequestId,
        epoch: Epoch,
        kv: ExportedKv,
    ) -> Result<(), MoveError> {
        let job = Ownership { request, epoch };
        let mode = self.shared.lock().mode(job)?;
        let form = match (mode, self.form.clone()) {
            (CopyMode::Kv, Some(form)) => form,
            (CopyMode::Kv | CopyMode::Recompute | CopyMode::Waiting, _) => {
                let why = "KV for a request that comes without";
                return Err(self.shared.change(|jobs| jobs.unfit(job, why)));
            }
        };
        let takes = form.takes();
        let (kv, checked) = aside(move || {
            let checked = form.check(&kv);
            (kv, checked)
        })
        .await?;
        checked.map_err(|why| self.shared.change(|jobs| jobs.unfit(job, &why)))?;
        match takes {
            KvImport::Stages => self.act(job, |answer| Act::Import { kv, answer }).await,
            KvImport::Whole => self.shared.change(|jobs| jobs.keep_stage(job, kv)),
        }
    }

    async fn catch_up(
        &self,
        request: RequestId,
        epoch: Epoch,
        output: Vec<u32>,
    ) -> Result<(), MoveError> {
        let state = LastState {
            output,
            ..LastState::default()
        };
        self.prefill(Ownership { request, epoch }, state).await
    }

    async fn complete(
        &self,
        request: RequestId,
        epoch: Epoch,
        state: LastState,
        kv: Option<ExportedKv>,
    ) -> Result<(), MoveError> {
        let job = Ownership { request, epoch };
        if let Some(kv) = kv {
            self.import(request, epoch, kv).await?;
        }
        let mode = self.shared.lock().mode(job)?;
        match mode {
            CopyMode::Kv => {
                let whole = self.join_stages(job).await?;
                let completed = self.act(job, |answer| Act::Complete {
                    state,
                    whole,
                    answer,
                });
                completed.await
            }
            CopyMode::Recompute => {
                self.prefill(job, state).await?;
                self.shared.change(|jobs| jobs.completed(job))
            }
            CopyMode::Waiting => {
                let text = &*self.shared.text;
                self.shared
                    .change(|jobs| jobs.complete_waiting(job, state, text))
            }
        }
    }

    fn resume(
        &self,
        request: RequestId,
        epoch: Epoch,
        next: Epoch,
        from: u32,
    ) -> Result<mpsc::Receiver<EngineEvent>, EngineError> {
        let job = Ownership { request, epoch };
        let jobs = self.shared.lock();
        let (_, running) = jobs.resumable(job, next, from)?;
        let output = running.output().to_vec();
        let params = Arc::clone(&running.params);
        drop(jobs);
        let told = Told::new(&output, from as usize, &params, &*self.shared.text);
        let (to, events) = channel();
        let resumption = Resumption {
            next,
            from,
            output: output.len(),
            told,
            to,
        };
        let outgoing = self.shared.change(|jobs| {
            let outgoing = jobs.resume(job, resumption)?;
            // Under the lock, so that what the job draws next comes after it.
            outgoing.into_iter().for_each(|event| event.send());
            Ok(())
        });
        outgoing.map(|()| events)
    }
}

/// Lets a paused job go on when whoever paused it is gone.
struct Unpause<'a> {
    engine: &'a BatchedEngine,
    job: Option<Ownership>,
}

impl Unpause<'_> {
    fn defuse(mut self) {
        self.job = None;
    }
}

impl Drop for Unpause<'_> {
    fn drop(&mut self) {
        if let Some(job) = self.job {
            self.engine.shared.change(|jobs| jobs.unpause(job));
        }
    }
}
