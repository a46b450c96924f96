//! One job: the ids, text and channel of a sequence.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use shoal_gossip::{Epoch, RequestId};
use shoal_migrate::CopyMode;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::engine::answer::Wire;
use crate::engine::batched::{Drawn, Sampled, SeqSpec, TextModel};
use crate::engine::moving::{ExportedKv, KEPT_LOGPROBS, LastState, Opening};
use crate::engine::text::TextState;
use crate::engine::work::{HttpAsk, Job, Prepared, RequestKind, SamplingParams};
use crate::engine::{EngineEvent, Finish, FinishReason, TokenBatch, TokenLogprob};

/// Events that wait for a slow receiver before its job is paused: at 20 ms a step, half a second of
/// a stalled client. An event holds one token and its text, so a job's channel stays near a kilobyte.
const EVENTS: usize = 32;

/// Free places in a channel that a step needs: the last one sends tokens and the end.
pub(super) const EVENTS_PER_STEP: usize = 2;

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

/// A request in one ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ownership {
    pub(super) request: RequestId,
    pub(super) epoch: Epoch,
}

#[derive(Debug)]
pub(super) struct RunningJob {
    pub(super) request: RequestId,
    pub(super) epoch: Epoch,
    kind: Option<RequestKind>,
    http: HttpAsk,
    body: Bytes,
    pub(super) prepared: Prepared,
    pub(super) params: Arc<SamplingParams>,
    pub(super) prompt_len: u32,
    /// Prompt and output.
    pub(super) ids: Vec<u32>,
    text: TextState,
    /// The newest ones, kept for a hand-over when the request wants any.
    logprobs: VecDeque<TokenLogprob>,
    /// `None` until an arriving job is resumed.
    pub(super) to: Option<mpsc::Sender<EngineEvent>>,
    /// What a hand-over brings, until the job is resumed.
    pub(super) arrival: Option<Arrival>,
}

/// A job on its way in.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) mode: CopyMode,
    /// Stages that wait to be imported whole. At most one per token of the context, and as large as its KV together.
    pub(super) parts: Vec<ExportedKv>,
    /// Who waits until all that is known is prefilled.
    pub(super) prefilled: Vec<oneshot::Sender<()>>,
    /// Nothing is missing any more.
    pub(super) complete: bool,
}

impl Arrival {
    pub(super) fn new(mode: CopyMode) -> Self {
        Self {
            mode,
            parts: Vec::new(),
            prefilled: Vec::new(),
            complete: false,
        }
    }
}

/// A job that is ready to be taken: text rebuilt, lengths known. Made outside of the lock.
#[derive(Debug)]
pub(super) struct Submission {
    pub(super) spec: SeqSpec,
    pub(super) job: RunningJob,
    pub(super) events: mpsc::Receiver<EngineEvent>,
    /// The output given at submission is complete already.
    pub(super) complete: Option<FinishReason>,
}

impl Submission {
    pub(super) fn new(job: Job, vocabulary: &dyn TextModel) -> Self {
        let prepared = job.prepared;
        let params = Arc::new(prepared.params.clone());
        // The text was sent by whoever generated the ids.
        let told = Told::new(&job.generated, job.generated.len(), &params, vocabulary);
        let generated_len = count(job.generated.len());
        let spec = SeqSpec {
            request: job.request,
            epoch: job.epoch,
            prompt_len: prepared.prompt_tokens().0,
            generated_len,
            max_tokens: params.max_tokens,
            priority: prepared.priority,
            reservation: job.reservation,
        };
        let mut ids = prepared.prompt.to_vec();
        ids.extend_from_slice(&job.generated);
        let (to, events) = channel();
        let job = RunningJob {
            request: job.request,
            epoch: job.epoch,
            kind: job.kind,
            http: job.http,
            body: job.body,
            prepared,
            params,
            prompt_len: spec.prompt_len,
            ids,
            text: told.state,
            logprobs: VecDeque::new(),
            to: Some(to),
            arrival: None,
        };
        Self {
            spec,
            job,
            events,
            complete: told.end,
        }
    }
}

/// The text of an output, told again from its ids.
#[derive(Debug)]
pub(super) struct Told {
    state: TextState,
    /// What the output from the wanted index on made certain.
    text: String,
    /// Set when the output is complete.
    end: Option<FinishReason>,
}

impl Told {
    /// Tells all of `output`; keeps the text from index `from` on.
    pub(super) fn new(
        output: &[u32],
        from: usize,
        params: &SamplingParams,
        vocabulary: &dyn TextModel,
    ) -> Self {
        let mut told = Self {
            state: TextState::new(&params.stop),
            text: String::new(),
            end: None,
        };
        for (index, id) in output.iter().enumerate() {
            let (text, end) = take_piece(&mut told.state, *id, params, vocabulary);
            told.end = told.end.or(end);
            if index >= from {
                told.text.push_str(&text);
            }
        }
        if output.len() >= params.max_tokens as usize {
            told.end = told.end.or(Some(FinishReason::Length));
        }
        told
    }
}

/// All that the events of a job begin with in a new ownership. Made outside of the lock.
#[derive(Debug)]
pub(super) struct Resumption {
    pub(super) next: Epoch,
    pub(super) from: u32,
    /// Output that was told; the job must still have just this much.
    pub(super) output: usize,
    pub(super) told: Told,
    pub(super) to: mpsc::Sender<EngineEvent>,
}

/// The channel of a job's events.
pub(super) fn channel() -> (mpsc::Sender<EngineEvent>, mpsc::Receiver<EngineEvent>) {
    mpsc::channel(EVENTS)
}

impl RunningJob {
    /// Nothing while nobody listens: the job arrives.
    pub(super) fn outgoing(&self, event: EngineEvent) -> Option<Outgoing> {
        let to = self.to.clone()?;
        Some(Outgoing { to, event })
    }

    pub(super) fn output(&self) -> &[u32] {
        self.ids.get(self.prompt_len as usize..).unwrap_or(&[])
    }

    /// Replaces the output by a longer one that goes on from it.
    pub(super) fn set_output(&mut self, output: &[u32]) {
        self.ids.truncate(self.prompt_len as usize);
        self.ids.extend_from_slice(output);
    }

    pub(super) fn opening(&self) -> Opening {
        Opening {
            kind: self.kind,
            http: self.http.clone(),
            body: self.body.clone(),
            prepared: self.prepared.clone(),
            output: self.output().to_vec(),
        }
    }

    pub(super) fn last_state(&self) -> LastState {
        LastState {
            output: self.output().to_vec(),
            logprobs: self.logprobs.iter().cloned().collect(),
            spoken: Vec::new(),
        }
    }

    pub(super) fn keep_logprobs(&mut self, logprobs: Vec<TokenLogprob>) {
        self.logprobs = logprobs.into();
    }

    /// The least index that output can be sent from again.
    pub(super) fn resumable_from(&self) -> usize {
        if self.params.logprobs.is_some() {
            self.output().len().saturating_sub(self.logprobs.len())
        } else {
            0
        }
    }

    /// Goes over to the new ownership and channel. Gives what the events begin with, and whether they end there.
    pub(super) fn resume(&mut self, resumption: Resumption) -> (Vec<Outgoing>, bool) {
        let Resumption {
            next,
            from,
            told,
            to,
            ..
        } = resumption;
        self.epoch = next;
        self.to = Some(to);
        self.arrival = None;
        self.text = told.state;
        let ids = self.output().get(from as usize..).unwrap_or(&[]).to_vec();
        let mut events = Vec::new();
        if !ids.is_empty() {
            let skipped = self.logprobs.len().saturating_sub(ids.len());
            events.push(EngineEvent::Tokens(TokenBatch {
                index: from,
                ids,
                text: told.text,
                logprobs: self.logprobs.iter().skip(skipped).cloned().collect(),
                wire: Wire::default(),
            }));
        }
        if let Some(reason) = told.end {
            events.push(EngineEvent::Finished(self.finish(reason)));
        }
        let outgoing = events.into_iter().filter_map(|event| self.outgoing(event));
        (outgoing.collect(), told.end.is_some())
    }

    pub(super) fn finish(&mut self, reason: FinishReason) -> Finish {
        Finish {
            reason,
            output_tokens: count(self.ids.len()).saturating_sub(self.prompt_len),
            text: self.text.finish(),
            wire: Wire::default(),
            prompt_tokens: None,
        }
    }

    /// Takes in one token; true when it was the last.
    pub(super) fn take(
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
            wire: Wire::default(),
        };
        self.logprobs.extend(batch.logprobs.iter().cloned());
        let excess = self.logprobs.len().saturating_sub(KEPT_LOGPROBS);
        self.logprobs.drain(..excess);
        outgoing.extend(self.outgoing(EngineEvent::Tokens(batch)));
        let Some(reason) = end.or_else(|| drawn.last.then_some(FinishReason::Length)) else {
            return false;
        };
        let finish = self.finish(reason);
        outgoing.extend(self.outgoing(EngineEvent::Finished(finish)));
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

/// Lengths are bounded by the context, which is a `u32`.
pub(super) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
