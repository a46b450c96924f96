//! Hand-over: with KV where the engine gives it away ([`super::kv`]), else by recompute: the target's engine reads what is known
//! beforehand, and keeps its KV for when the request runs.

use std::sync::Arc;

use async_trait::async_trait;
use shoal_gossip::{Epoch, RequestId, Tokens};
use shoal_migrate::CopyMode;
use tokio::sync::mpsc;

use super::exchange::warm_up;
use super::job::{RemoteJob, SharedJob};
use super::question::Asked;
use super::{RemoteEngine, lock, run};
use crate::engine::moving::{
    Exported, ExportedKv, JobStatus, LastState, MoveError, MovingCounts, MovingEngine, Opening,
    PausedJob,
};
use crate::engine::work::Job;
use crate::engine::{EngineError, EngineEvent};

impl RemoteEngine {
    fn here(&self, request: RequestId, epoch: Epoch) -> Result<SharedJob, MoveError> {
        self.shared.find(request, epoch).ok_or(MoveError::Gone)
    }

    /// One that comes in by a hand-over.
    fn arriving(&self, request: RequestId, epoch: Epoch) -> Result<SharedJob, MoveError> {
        let entry = self.here(request, epoch)?;
        let arriving = entry.lock().arriving;
        if arriving {
            Ok(entry)
        } else {
            Err(MoveError::Gone)
        }
    }

    /// Has the engine read what is known of an arriving request, beside everything else.
    fn prefill(&self, entry: &SharedJob, asked: Asked) {
        entry.prefilled.send_replace(None);
        let (client, entry) = (self.shared.client.clone(), Arc::clone(entry));
        let job = entry.lock().job.clone();
        self.shared.tasks.spawn_on(
            async move {
                let warmed = tokio::select! {
                    biased;
                    () = entry.stop.cancelled() => return,
                    warmed = warm_up(&client, asked, job) => warmed,
                };
                let told = warmed.map_err(|error| error.to_string()).map(|job| {
                    // Its prompt may have been made from its body on the way.
                    entry.lock().job.prepared.prompt = job.prepared.prompt;
                });
                entry.prefilled.send_replace(Some(told));
            },
            &self.shared.runtime,
        );
    }

    /// Waits for the engine to have read what it was given last.
    async fn prefilled(&self, entry: &SharedJob) -> Result<(), MoveError> {
        let mut prefilled = entry.prefilled.subscribe();
        let told = tokio::select! {
            biased;
            () = entry.stop.cancelled() => return Err(MoveError::Gone),
            told = prefilled.wait_for(Option::is_some) => match told {
                Ok(told) => told.clone(),
                Err(_) => return Err(MoveError::Gone),
            },
        };
        match told {
            Some(Err(error)) => {
                entry.end();
                self.shared.leave(entry);
                Err(MoveError::Broken(error))
            }
            Some(Ok(())) | None => Ok(()),
        }
    }

    /// What could not be taken in ends the request that comes in.
    fn or_end(&self, entry: &SharedJob, taken: Result<(), MoveError>) -> Result<(), MoveError> {
        if taken.is_err() {
            entry.end();
            self.shared.leave(entry);
        }
        taken
    }

    fn asked_of(&self, entry: &SharedJob) -> Result<(Asked, u64), EngineError> {
        let model = entry.lock().job.prepared.model.clone();
        self.shared.asked(&model)
    }
}

#[async_trait]
impl MovingEngine for RemoteEngine {
    fn jobs(&self) -> Vec<JobStatus> {
        let block_size = self.shared.facts().block_size;
        let entries: Vec<SharedJob> = lock(&self.shared.jobs).values().cloned().collect();
        entries
            .iter()
            .filter_map(|entry| entry.lock().status(block_size))
            .collect()
    }

    fn job(&self, request: RequestId) -> Option<JobStatus> {
        let block_size = self.shared.facts().block_size;
        let entry = lock(&self.shared.jobs).get(&request).cloned()?;
        entry.lock().status(block_size)
    }

    fn kv_bytes_per_token(&self) -> u32 {
        let shape = self.shared.kv.shape();
        shape.map_or(0, |shape| shape.bytes_per_token)
    }

    fn kv_grain(&self) -> Option<Tokens> {
        self.shared.kv.shape().and_then(|shape| shape.grain)
    }

    fn exports(&self, request: RequestId) -> bool {
        let entry = lock(&self.shared.jobs).get(&request).cloned();
        entry.is_some_and(|entry| entry.lock().has_kv())
    }

    fn is_direct(&self) -> bool {
        self.shared.kv.is_direct(self.shared.clock.now())
    }

    fn go_direct(&self, request: RequestId, epoch: Epoch, direct: bool) {
        if let Some(entry) = self.shared.find(request, epoch) {
            entry.lock().direct = direct;
        }
    }

    fn counts(&self) -> MovingCounts {
        MovingCounts {
            direct_bytes: self.shared.kv.direct_bytes(),
            ..*lock(&self.shared.inexact)
        }
    }

    fn describe(&self, request: RequestId, epoch: Epoch) -> Result<Opening, MoveError> {
        self.here(request, epoch)?.lock().describe()
    }

    async fn export(
        &self,
        request: RequestId,
        epoch: Epoch,
        from: Tokens,
        at_most: Tokens,
    ) -> Result<Exported, MoveError> {
        let entry = self.here(request, epoch)?;
        self.export_kv(&entry, from, at_most).await
    }

    async fn pause(
        &self,
        request: RequestId,
        epoch: Epoch,
        kv_from: Option<Tokens>,
    ) -> Result<PausedJob, MoveError> {
        let entry = self.here(request, epoch)?;
        if let Some(from) = kv_from {
            return self.pause_with_kv(&entry, from).await;
        }
        let now = self.shared.clock.now();
        let paused = entry.lock().pause(now);
        entry.wake.notify_one();
        paused
    }

    fn unpause(&self, request: RequestId, epoch: Epoch) {
        if let Some(entry) = self.shared.find(request, epoch) {
            entry.lock().unpause();
            entry.wake.notify_one();
        }
    }

    fn admit(&self, job: Job, mode: CopyMode) -> Result<(), EngineError> {
        job.reservation.into_iter().for_each(|reservation| {
            self.shared.gauge(|gauge| gauge.release(reservation));
        });
        let (asked, _) = self.shared.asked(&job.prepared.model)?;
        let by_ids = mode != CopyMode::Waiting;
        let no_way = mode == CopyMode::Kv && self.shared.kv.shape().is_none();
        let resumes = self.shared.facts().capabilities.resumes && asked.can_take(&job);
        if no_way || (by_ids && !resumes) {
            return Err(EngineError::BadRequest {
                message: "this engine cannot take a request in that way".into(),
                param: None,
            });
        }
        let mut arriving = RemoteJob::new(job, asked.context, self.shared.clock.now());
        arriving.arriving = true;
        let entry = self.shared.enter(arriving)?;
        if mode == CopyMode::Recompute {
            self.prefill(&entry, asked);
        }
        Ok(())
    }

    async fn import(
        &self,
        request: RequestId,
        epoch: Epoch,
        kv: ExportedKv,
    ) -> Result<(), MoveError> {
        let entry = self.arriving(request, epoch)?;
        let taken = self.import_kv(&entry, kv).await;
        self.or_end(&entry, taken)
    }

    async fn catch_up(
        &self,
        request: RequestId,
        epoch: Epoch,
        output: Vec<u32>,
    ) -> Result<(), MoveError> {
        let entry = self.arriving(request, epoch)?;
        self.prefilled(&entry).await?;
        let more = {
            let mut job = entry.lock();
            let more = output.len() > job.output().0 as usize;
            if more {
                job.goes_on_from(output, Vec::new(), &[]);
            }
            more
        };
        if !more {
            return Ok(());
        }
        let (asked, _) = self
            .asked_of(&entry)
            .map_err(|error| MoveError::Broken(error.to_string()))?;
        self.prefill(&entry, asked);
        self.prefilled(&entry).await
    }

    async fn complete(
        &self,
        request: RequestId,
        epoch: Epoch,
        state: LastState,
        kv: Option<ExportedKv>,
    ) -> Result<(), MoveError> {
        let entry = self.arriving(request, epoch)?;
        if let Some(kv) = kv {
            let taken = self.import_last_kv(&entry, kv).await;
            self.or_end(&entry, taken)?;
        }
        self.prefilled(&entry).await?;
        entry.lock().completed(state);
        Ok(())
    }

    fn resume(
        &self,
        request: RequestId,
        epoch: Epoch,
        next: Epoch,
        from: u32,
    ) -> Result<mpsc::Receiver<EngineEvent>, EngineError> {
        let entry = self.shared.find(request, epoch);
        let entry = entry.ok_or_else(|| EngineError::BadRequest {
            message: format!("request {request} is not here in epoch {}", epoch.0),
            param: None,
        })?;
        let (asked, fingerprint) = self.asked_of(&entry)?;
        let (events, arrived) = {
            let mut job = entry.lock();
            let arrived = job.arriving;
            (job.resume(next, from)?, arrived)
        };
        self.shared.gauge(|gauge| gauge.owned(request, next));
        match arrived {
            true => run::spawn(&self.shared, entry, asked, fingerprint),
            false => entry.wake.notify_one(),
        }
        Ok(events)
    }
}
