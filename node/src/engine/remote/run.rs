//! The task of one request: reads its answer, passes it on, and ends it with whoever wants it.

use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::Timestamp;
use tokio::time::sleep;
use tracing::{debug, info};

use super::answer::End;
use super::exchange::{Exchange, Told};
use super::gauge::State;
use super::job::{SharedJob, Step};
use super::question::{Asked, Lost};
use super::{Shared, lock};
use crate::engine::answer::Wire;
use crate::engine::work::Job;
use crate::engine::{EngineError, FinishReason};

/// How often a task looks whether its engine is still there while nothing comes.
const LOOK: Duration = Duration::from_secs(1);

/// How long an engine may be unwell before what waits for its first word is given up: a poll that comes late is no death.
const UNWELL: Duration = Duration::from_secs(5);

/// Starts the task of a request that is in the table.
pub(super) fn spawn(shared: &Arc<Shared>, entry: SharedJob, asked: Asked, fingerprint: u64) {
    let run = Run {
        heard: shared.clock.now(),
        shared: Arc::clone(shared),
        entry,
        asked,
        fingerprint,
        exchange: None,
    };
    shared.tasks.spawn_on(run.run(), &shared.runtime);
}

struct Run {
    shared: Arc<Shared>,
    entry: SharedJob,
    asked: Asked,
    fingerprint: u64,
    /// `None` before the engine was asked. Dropped when the answer is complete or nobody wants it: that ends it at the engine.
    exchange: Option<Exchange>,
    heard: Timestamp,
}

impl Run {
    async fn run(mut self) {
        let stop = self.shared.stop.clone();
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.steps() => {}
        }
        self.entry.end();
        // The connection is closed before anybody is told that the request is gone.
        drop(self.exchange.take());
        self.shared.leave(&self.entry);
    }

    async fn steps(&mut self) {
        let entry = Arc::clone(&self.entry);
        loop {
            let (step, stopped) = {
                let job = entry.lock();
                (job.step(), job.is_stopped())
            };
            if stopped {
                // The connection is closed: that stops it at the engine.
                self.exchange = None;
            }
            match step {
                Step::Over => return,
                Step::Read(_) if self.exchange.is_none() => self.ask(),
                Step::Hold(to) => {
                    let closed = async {
                        match &to {
                            Some(to) => to.closed().await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        () = entry.wake.notified() => {}
                        () = closed => {
                            if to.is_none_or(|to| entry.lock().goes_to(&to)) {
                                return;
                            }
                        }
                    }
                }
                Step::Send(to, event) => {
                    tokio::select! {
                        () = entry.wake.notified() => {}
                        permit = to.reserve() => match permit {
                            Ok(permit) => {
                                if entry.lock().sent(&to) {
                                    permit.send(event);
                                }
                            }
                            Err(_) if entry.lock().goes_to(&to) => return,
                            Err(_) => {}
                        }
                    }
                }
                Step::Read(to) => {
                    tokio::select! {
                        () = entry.wake.notified() => {}
                        () = to.closed() => {
                            if entry.lock().goes_to(&to) {
                                return;
                            }
                        }
                        told = read(self.exchange.as_mut()) => self.take(told),
                        () = sleep(LOOK) => self.look(),
                    }
                }
            }
        }
    }

    /// Asks the engine, for the first time or to go on after the answer was given up.
    fn ask(&mut self) {
        let name = self.shared.kv.name();
        let (job, laid) = {
            let mut entry = self.entry.lock();
            (entry.ask_anew(name.clone()), entry.laid.clone())
        };
        let most = job.prepared.params.max_tokens as usize;
        if !job.generated.is_empty() && job.generated.len() >= most {
            // It came complete: nobody has to be asked.
            return self.entry.lock().ended(Ok(End {
                reason: FinishReason::Length,
                text: String::new(),
                wire: Wire::default(),
            }));
        }
        self.note_inexact(&job);
        let prompt = (!job.generated.is_empty()).then_some(job.prepared.prompt.len());
        let along = self.shared.kv.along(&name, prompt, laid.as_ref());
        self.heard = self.shared.clock.now();
        self.exchange = Some(Exchange::new(
            self.shared.client.clone(),
            (self.asked, along),
            job,
            self.fingerprint,
        ));
    }

    /// Counts and logs a request that goes on though it draws other tokens from here on, as the operator allowed.
    fn note_inexact(&self, job: &Job) {
        let lost = self.asked.lost(&job.prepared.params, job.prepared.seeded);
        if job.generated.is_empty() || lost == Lost::default() {
            return;
        }
        let request = job.request;
        info!(%request, seed = lost.seed, penalty = lost.penalty, "goes on inexactly, as --engine-inexact allows");
        let mut counts = lock(&self.shared.inexact);
        counts.seeds_anew += u64::from(lost.seed);
        counts.penalties_anew += u64::from(lost.penalty);
    }

    fn take(&mut self, told: Result<Told, EngineError>) {
        let now = self.shared.clock.now();
        self.heard = now;
        let request = {
            let mut job = self.entry.lock();
            if let Some(prompt) = self.exchange.as_ref().and_then(|exchange| exchange.prompt) {
                job.prompt = prompt;
            }
            match told {
                Ok(Told::Said(said)) => {
                    let count = u32::try_from(said.ids.len()).unwrap_or(u32::MAX);
                    job.said(said);
                    let request = job.job.request;
                    let (held, laid) = job.let_go();
                    drop(job);
                    if held.is_some() || laid.is_some() {
                        // It runs, and has found what was kept for it.
                        self.shared.let_go(held, laid);
                    }
                    // Too often to tell everybody: the next look does.
                    return lock(&self.shared.gauge).drew(now, request, count);
                }
                Ok(Told::End(end)) => job.ended(Ok(end)),
                Err(error) => {
                    let pause = self
                        .exchange
                        .as_ref()
                        .and_then(|exchange| exchange.retry_after);
                    let full = error == EngineError::QueueFull;
                    debug!(request = %job.job.request, %error, "the engine ended it");
                    job.ended(Err(error));
                    if full {
                        self.shared.gauge(|gauge| gauge.told_full(now, pause));
                    }
                    // Whether it is the engine that is ill, and not the request, shows the next look.
                    self.shared.look.notify_one();
                }
            }
            job.job.request
        };
        debug!(%request, "answered");
        self.exchange = None;
    }

    /// Gives up an engine that says nothing, when it should or when it is not there.
    fn look(&mut self) {
        let now = self.shared.clock.now();
        let begun = self.entry.lock().begun;
        let silent = now.since(self.heard);
        let stalled = begun && silent > self.shared.config.stall;
        let state = lock(&self.shared.gauge).state();
        let gone = matches!(state, State::Unwell(since, _) if now.since(since) > UNWELL)
            && silent > UNWELL;
        if stalled || gone {
            let why = format!("it said nothing for {} ms", silent.as_millis());
            self.take(Err(EngineError::Broken(why)));
        }
    }
}

async fn read(exchange: Option<&mut Exchange>) -> Result<Told, EngineError> {
    match exchange {
        Some(exchange) => exchange.next().await,
        None => std::future::pending().await,
    }
}
