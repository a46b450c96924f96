//! The jobs of an engine: the batch core with the token ids, text and channels it does not know.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Epoch, LoadSummary, Readiness, RequestId, Timestamp};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::engine::batched::{
    Batcher, Drawn, Sample, Sampled, SeqKey, SeqSpec, Step, StepItem, StepPlan, SubmitRefusal,
    TextModel,
};
use crate::engine::text::TextState;
use crate::engine::work::{Job, SamplingParams};
use crate::engine::{
    EngineError, EngineEvent, Finish, FinishReason, ReservationId, ReserveAsk, ReserveRefusal,
    TokenBatch,
};

/// Events that wait for a slow receiver before its job is paused: at 20 ms a step, half a second of
/// a stalled client. An event holds one token and its text, so a job's channel stays near a kilobyte.
const EVENTS: usize = 32;

/// Free places in a channel that a step needs: the last one sends tokens and the end.
const EVENTS_PER_STEP: usize = 2;

/// How long the engine thread sleeps when jobs are here and none can go on: then it looks whether a
/// slow receiver has read or has gone, which channels tell nobody. Short against a step of a model.
const STALL_POLL: Duration = Duration::from_millis(5);

/// An event on its way out of the lock.
#[derive(Debug)]
pub(super) struct Outgoing {
    to: mpsc::Sender<EngineEvent>,
    event: EngineEvent,
}

impl Outgoing {
    pub(super) fn send(self) {
        match self.to.try_send(self.event) {
            Ok(()) => {}
            // The receiver has gone; the job is removed before the next step.
            Err(TrySendError::Closed(_)) => {}
            Err(TrySendError::Full(event)) => {
                tracing::error!(
                    ?event,
                    "an event found no place in a channel kept free for it"
                );
            }
        }
    }
}

#[derive(Debug)]
struct RunningJob {
    request: RequestId,
    epoch: Epoch,
    params: Arc<SamplingParams>,
    prompt_len: u32,
    /// Prompt and output.
    ids: Vec<u32>,
    text: TextState,
    to: mpsc::Sender<EngineEvent>,
}

/// A job that is ready to be taken: text rebuilt, lengths known. Made outside of the lock.
#[derive(Debug)]
pub(super) struct Submission {
    spec: SeqSpec,
    job: RunningJob,
    events: mpsc::Receiver<EngineEvent>,
    /// The output given at submission is complete already.
    complete: Option<FinishReason>,
}

impl Submission {
    pub(super) fn new(job: Job, vocabulary: &dyn TextModel) -> Self {
        let prepared = job.prepared;
        let params = Arc::new(prepared.params);
        let mut text = TextState::new(&params.stop);
        let mut complete = None;
        for id in &job.generated {
            // The text was sent by whoever generated the ids.
            let (_, end) = take_piece(&mut text, *id, &params, vocabulary);
            complete = complete.or(end);
        }
        let generated_len = count(job.generated.len());
        if generated_len >= params.max_tokens {
            complete = complete.or(Some(FinishReason::Length));
        }
        let spec = SeqSpec {
            request: job.request,
            epoch: job.epoch,
            prompt_len: count(prepared.prompt.len()),
            generated_len,
            max_tokens: params.max_tokens,
            priority: prepared.priority,
            reservation: job.reservation,
        };
        let mut ids = prepared.prompt.to_vec();
        ids.extend_from_slice(&job.generated);
        let (to, events) = mpsc::channel(EVENTS);
        let job = RunningJob {
            request: job.request,
            epoch: job.epoch,
            params,
            prompt_len: spec.prompt_len,
            ids,
            text,
            to,
        };
        Self {
            spec,
            job,
            events,
            complete,
        }
    }
}

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
    course: Course,
    last_load: LoadSummary,
}

impl Jobs {
    pub(super) fn new(batcher: Batcher) -> Self {
        let last_load = batcher.load();
        Self {
            batcher,
            running: BTreeMap::new(),
            course: Course::Open,
            last_load,
        }
    }

    pub(super) fn load(&mut self, now: Timestamp) -> LoadSummary {
        self.remove_gone();
        self.batcher.expire(now);
        self.batcher.load()
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
        match &self.course {
            Course::Open => {}
            Course::Stopping | Course::Abandoned => return Err(EngineError::NotReady),
            Course::Broken(why) => return Err(EngineError::Broken(why.clone())),
        }
        self.remove_gone();
        let Submission {
            spec,
            mut job,
            events,
            complete,
        } = submission;
        if let Some((key, epoch)) = self.batcher.find(job.request) {
            if job.epoch <= epoch {
                spec.reservation.into_iter().for_each(|id| self.release(id));
                return Err(duplicate(job.request, epoch));
            }
            // The older ownership is over, whatever becomes of the newer one here.
            self.remove(key);
        }
        if let Some(reason) = complete {
            spec.reservation.into_iter().for_each(|id| self.release(id));
            let finish = job.finish(reason);
            job.outgoing(EngineEvent::Finished(finish)).send();
            return Ok(events);
        }
        let key = self
            .batcher
            .submit(now, spec)
            .map_err(|refusal| match refusal {
                SubmitRefusal::QueueFull => EngineError::QueueFull,
                SubmitRefusal::NotReady => EngineError::NotReady,
                SubmitRefusal::NeverFits => EngineError::BadRequest {
                    message: refusal.to_string(),
                    param: None,
                },
                SubmitRefusal::Duplicate => duplicate(job.request, job.epoch),
            })?;
        self.running.insert(key, job);
        Ok(events)
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
            .map(|job| job.outgoing(failure.clone()))
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
        for (key, job) in &self.running {
            let paused = job.to.capacity() < EVENTS_PER_STEP;
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
            .filter(|(_, job)| job.to.is_closed())
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

impl RunningJob {
    fn outgoing(&self, event: EngineEvent) -> Outgoing {
        Outgoing {
            to: self.to.clone(),
            event,
        }
    }

    fn finish(&mut self, reason: FinishReason) -> Finish {
        Finish {
            reason,
            output_tokens: count(self.ids.len()).saturating_sub(self.prompt_len),
            text: self.text.finish(),
        }
    }

    /// Takes in one token; true when it was the last.
    fn take(
        &mut self,
        drawn: Drawn,
        sampled: Sampled,
        vocabulary: &dyn TextModel,
        outgoing: &mut Vec<Outgoing>,
    ) -> bool {
        self.ids.push(sampled.id);
        let (text, end) = take_piece(&mut self.text, sampled.id, &self.params, vocabulary);
        let batch = TokenBatch {
            index: drawn.index,
            ids: vec![sampled.id],
            text,
            logprobs: sampled.logprob.into_iter().collect(),
        };
        outgoing.push(self.outgoing(EngineEvent::Tokens(batch)));
        let Some(reason) = end.or_else(|| drawn.last.then_some(FinishReason::Length)) else {
            return false;
        };
        let finish = self.finish(reason);
        outgoing.push(self.outgoing(EngineEvent::Finished(finish)));
        true
    }
}

/// Adds one id to the text; says what became certain and whether the output ends here.
fn take_piece(
    text: &mut TextState,
    id: u32,
    params: &SamplingParams,
    vocabulary: &dyn TextModel,
) -> (String, Option<FinishReason>) {
    if vocabulary.is_end(id) && !params.ignore_eos {
        return (String::new(), Some(FinishReason::Stop));
    }
    let pushed = text.push(&vocabulary.piece(id));
    (pushed.text, pushed.stopped.then_some(FinishReason::Stop))
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

fn duplicate(request: RequestId, epoch: Epoch) -> EngineError {
    EngineError::BadRequest {
        message: format!("request {request} is here already, with epoch {}", epoch.0),
        param: None,
    }
}

/// Lengths are bounded by the context, which is a `u32`.
fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
