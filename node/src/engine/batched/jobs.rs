//! The jobs of an engine: the batch core with the token ids, text and channels it does not know.

mod moving;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Epoch, LoadSummary, Readiness, RequestId, Timestamp};
use tokio::sync::mpsc;

use crate::engine::batched::acts::QueuedAct;
use crate::engine::batched::job::{EVENTS_PER_STEP, Outgoing, RunningJob, Submission};
use crate::engine::batched::{
    Batcher, Sample, Sampled, SeqKey, Step, StepItem, StepPlan, SubmitRefusal, TextModel,
};
use crate::engine::{EngineError, EngineEvent, ReservationId, ReserveAsk, ReserveRefusal};

/// How long the engine thread sleeps when jobs are here and none can go on: then it looks whether a
/// slow receiver has read or has gone, which channels tell nobody. Short against a step of a model.
const STALL_POLL: Duration = Duration::from_millis(5);

/// Whether work is taken and done.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Course {
    Open,
    /// Finishes what is here.
    Stopping,
    /// Nobody holds the engine any more.
    Abandoned,
    /// The executor failed with this.
    Broken(String),
}

/// Everything behind the engine's lock.
#[derive(Debug)]
pub(super) struct Jobs {
    batcher: Batcher,
    running: BTreeMap<SeqKey, RunningJob>,
    acts: VecDeque<QueuedAct>,
    course: Course,
    last_load: LoadSummary,
}

impl Jobs {
    pub(super) fn new(batcher: Batcher) -> Self {
        let last_load = batcher.load();
        Self {
            batcher,
            running: BTreeMap::new(),
            acts: VecDeque::new(),
            course: Course::Open,
            last_load,
        }
    }

    pub(super) fn load(&mut self, now: Timestamp) -> LoadSummary {
        self.remove_gone();
        self.batcher.expire(now);
        self.batcher.load()
    }

    /// Usual time of a step; zero before the first.
    pub(super) fn step_time(&self) -> Duration {
        self.last_load.step_time()
    }

    pub(super) fn preemptions(&self) -> u64 {
        self.batcher.preemptions()
    }

    pub(super) fn load_has_changed(&mut self) -> bool {
        let load = self.batcher.load();
        std::mem::replace(&mut self.last_load, load) != load
    }

    pub(super) fn reserve(
        &mut self,
        now: Timestamp,
        ask: ReserveAsk,
    ) -> Result<ReservationId, ReserveRefusal> {
        self.remove_gone();
        self.batcher.reserve(now, ask)
    }

    pub(super) fn release(&mut self, reservation: ReservationId) {
        self.batcher.release(reservation);
    }

    pub(super) fn submit(
        &mut self,
        now: Timestamp,
        submission: Submission,
    ) -> Result<mpsc::Receiver<EngineEvent>, EngineError> {
        self.replace_older(&submission)?;
        let Submission {
            spec,
            mut job,
            events,
            complete,
        } = submission;
        if let Some(reason) = complete {
            spec.reservation.into_iter().for_each(|id| self.release(id));
            let finish = job.finish(reason);
            let finished = job.outgoing(EngineEvent::Finished(finish));
            finished.into_iter().for_each(Outgoing::send);
            return Ok(events);
        }
        let submitted = self.batcher.submit(now, spec);
        let key = submitted.map_err(|refusal| refused(refusal, &job))?;
        self.running.insert(key, job);
        Ok(events)
    }

    /// Makes way for a new job: only the latest ownership of a request is here.
    fn replace_older(&mut self, submission: &Submission) -> Result<(), EngineError> {
        match &self.course {
            Course::Open => {}
            Course::Stopping | Course::Abandoned => return Err(EngineError::NotReady),
            Course::Broken(why) => return Err(EngineError::Broken(why.clone())),
        }
        self.remove_gone();
        let Submission { spec, job, .. } = submission;
        if let Some((key, epoch)) = self.batcher.find(job.request) {
            if job.epoch <= epoch {
                spec.reservation.into_iter().for_each(|id| self.release(id));
                return Err(duplicate(job.request, epoch));
            }
            // The older ownership is over, whatever becomes of the newer one here.
            self.remove(key);
        }
        Ok(())
    }

    pub(super) fn abort(&mut self, request: RequestId, epoch: Epoch) {
        if let Some((key, current)) = self.batcher.find(request)
            && current <= epoch
        {
            self.remove(key);
        }
    }

    /// Takes no work from now on and finishes what is here.
    pub(super) fn stop(&mut self) {
        if self.course == Course::Open {
            self.course = Course::Stopping;
            self.batcher.set_readiness(Readiness::Draining);
            self.batcher.release_all();
        }
    }

    /// Ends every job without a word: nobody can be listening for long.
    pub(super) fn abandon(&mut self) {
        self.stop();
        self.remove_all();
        if self.course == Course::Stopping {
            self.course = Course::Abandoned;
        }
    }

    /// Ends every job with this failure and takes no more.
    pub(super) fn break_down(&mut self, why: &str) -> Vec<Outgoing> {
        self.course = Course::Broken(why.to_owned());
        self.batcher.set_readiness(Readiness::Failed);
        self.batcher.release_all();
        let failure = EngineEvent::Failed(EngineError::Broken(why.to_owned()));
        let outgoing = self
            .running
            .values()
            .filter_map(|job| job.outgoing(failure.clone()))
            .collect();
        self.remove_all();
        outgoing
    }

    /// Whether the engine thread has nothing left to do, ever.
    pub(super) fn is_over(&self) -> bool {
        match self.course {
            Course::Open => false,
            Course::Stopping => self.batcher.is_empty(),
            Course::Abandoned | Course::Broken(_) => true,
        }
    }

    /// How long the engine thread may sleep when there is no step to run; for ever if `None`.
    pub(super) fn patience(&self, now: Timestamp) -> Option<Duration> {
        let lease = self.batcher.deadline().map(|deadline| deadline.since(now));
        if self.batcher.is_empty() {
            lease
        } else {
            Some(lease.map_or(STALL_POLL, |lease| lease.min(STALL_POLL)))
        }
    }

    /// Removes jobs whose receiver has gone, pauses those whose channel is full, resumes those whose
    /// channel was read, and plans a step. `None` if there is nothing to compute.
    pub(super) fn next_step(&mut self, now: Timestamp) -> Option<(StepPlan, Step)> {
        self.remove_gone();
        self.tell_prefilled();
        for (key, job) in &self.running {
            let full = |to: &mpsc::Sender<EngineEvent>| to.capacity() < EVENTS_PER_STEP;
            let paused = job.to.as_ref().is_some_and(full);
            self.batcher.set_paused(*key, paused);
        }
        let plan = self.batcher.plan(now);
        for key in &plan.preempted {
            if let Some(job) = self.running.get(key) {
                tracing::debug!(target: "shoal::engine", request = %job.request, "preempted");
            }
        }
        if plan.items.is_empty() {
            return None;
        }
        let items = plan.items.iter().filter_map(|item| {
            let job = self.running.get(&item.key)?;
            let start = item.position as usize;
            let tokens = job.ids.get(start..start + item.tokens as usize)?;
            Some(StepItem {
                slot: item.slot,
                request: job.request,
                position: item.position,
                tokens: tokens.to_vec(),
                sample: item.sample.map(|index| Sample {
                    params: Arc::clone(&job.params),
                    index,
                    prompt_len: job.prompt_len,
                }),
            })
        });
        let step = Step {
            clear: plan.clear.clone(),
            items: items.collect(),
        };
        Some((plan, step))
    }

    /// Takes in what a step drew and says what to send.
    ///
    /// # Errors
    /// When the executor did not draw what it was asked to: its answers cannot be trusted.
    pub(super) fn absorb(
        &mut self,
        plan: &StepPlan,
        took: Duration,
        sampled: Vec<Sampled>,
        vocabulary: &dyn TextModel,
    ) -> Result<Vec<Outgoing>, String> {
        check_sampled(plan, &sampled, vocabulary)?;
        let drawn = self.batcher.applied(plan, took);
        let mut by_slot: BTreeMap<_, _> = sampled
            .into_iter()
            .map(|token| (token.slot, token))
            .collect();
        let mut outgoing = Vec::new();
        for token in drawn {
            let slot = plan.items.iter().find(|item| item.key == token.key);
            let sampled = slot.and_then(|item| by_slot.remove(&item.slot));
            if let (Some(sampled), Some(job)) = (sampled, self.running.get_mut(&token.key)) {
                let end = job.take(token, sampled, vocabulary, &mut outgoing);
                if end {
                    self.remove(token.key);
                }
            }
        }
        Ok(outgoing)
    }

    /// Removes the jobs whose receiver was dropped; they hold up nobody who asks for room.
    fn remove_gone(&mut self) {
        let gone: Vec<SeqKey> = self
            .running
            .iter()
            .filter(|(_, job)| job.to.as_ref().is_some_and(mpsc::Sender::is_closed))
            .map(|(key, _)| *key)
            .collect();
        for key in gone {
            self.remove(key);
        }
    }

    fn remove(&mut self, key: SeqKey) {
        self.batcher.remove(key);
        self.running.remove(&key);
    }

    fn remove_all(&mut self) {
        for key in std::mem::take(&mut self.running).into_keys() {
            self.batcher.remove(key);
        }
    }
}

fn check_sampled(
    plan: &StepPlan,
    sampled: &[Sampled],
    vocabulary: &dyn TextModel,
) -> Result<(), String> {
    let asked = plan.items.iter().filter(|item| item.sample.is_some());
    if !asked
        .map(|item| item.slot)
        .eq(sampled.iter().map(|token| token.slot))
    {
        return Err("it drew tokens for other slots than it was asked to".to_owned());
    }
    let ids = vocabulary.vocabulary();
    match sampled.iter().find(|token| token.id >= ids) {
        Some(token) => Err(format!(
            "it drew token {} of a vocabulary of {ids}",
            token.id
        )),
        None => Ok(()),
    }
}

fn refused(refusal: SubmitRefusal, job: &RunningJob) -> EngineError {
    match refusal {
        SubmitRefusal::QueueFull => EngineError::QueueFull,
        SubmitRefusal::NotReady => EngineError::NotReady,
        SubmitRefusal::NeverFits => EngineError::BadRequest {
            message: refusal.to_string(),
            param: None,
        },
        SubmitRefusal::Duplicate => duplicate(job.request, job.epoch),
    }
}

fn duplicate(request: RequestId, epoch: Epoch) -> EngineError {
    EngineError::BadRequest {
        message: format!("request {request} is here already, with epoch {}", epoch.0),
        param: None,
    }
}
