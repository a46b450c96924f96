//! One request at the engine as this node keeps it: what was drawn, what of it is on its way, where it stands.
//!
//! Pure. The engine is read only when everything read before is on its way, so a reader that stops reading stops the engine
//! by the socket between, and a paused request stands still.

mod moving;

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::BytesMut;
use shoal_gossip::{BlockSize, Timestamp, Tokens};
use tokio::sync::mpsc;

use super::answer::{End, Said};
use super::kv::Laid;
use crate::engine::answer::{GoingOn, Spoken};
use crate::engine::moving::{JobPhase, JobStatus};
use crate::engine::work::Job;
use crate::engine::{EngineError, EngineEvent, Finish, TokenBatch, TokenLogprob};
use crate::openai::Sketch;

/// Events that wait for a slow receiver before the engine is no longer read, as in the embedded engines.
pub(super) const EVENTS: usize = 32;

/// Pieces kept for a home that lost them on the way: between an engine and its home lie at most 32 events, 8 frames and a
/// stream window of 64 KiB, in which a piece takes 100 bytes or more.
const KEPT: usize = 1024;

/// What its task does next for a request.
#[derive(Debug)]
pub(super) enum Step {
    /// Send this, when there is room.
    Send(mpsc::Sender<EngineEvent>, EngineEvent),
    /// Read on at the engine, unless the receiver goes away.
    Read(mpsc::Sender<EngineEvent>),
    /// Nothing, until it is woken or the receiver goes away.
    Hold(Option<mpsc::Sender<EngineEvent>>),
    /// All is said.
    Over,
}

/// The state of one request.
#[derive(Debug)]
pub(super) struct RemoteJob {
    /// As submitted. Its `generated` are the ids it came with.
    pub(super) job: Job,
    /// Prompt length, estimated as long as nobody told it.
    pub(super) prompt: Tokens,
    longest_output: Tokens,
    ids: Vec<u32>,
    spoken: Vec<Spoken>,
    /// Goes on from ids, and so can go on elsewhere too.
    by_ids: bool,
    going_on: Option<GoingOn>,
    /// The engine has begun to answer.
    pub(super) begun: bool,
    /// Only this engine can finish the answer.
    torn: bool,
    kept: VecDeque<TokenBatch>,
    /// Pieces that left `kept` at its front.
    dropped: usize,
    /// Pieces sent, of all.
    sent: usize,
    end: Option<EngineEvent>,
    end_sent: bool,
    to: Option<mpsc::Sender<EngineEvent>>,
    paused: bool,
    /// Comes in by a hand-over and does not run yet.
    pub(super) arriving: bool,
    complete: bool,
    pub(super) over: bool,
    came: Timestamp,
    /// What its KV goes by at the engine.
    name: Option<String>,
    /// Its answer was given up in the middle: it must be asked for anew.
    stopped: bool,
    /// The engine keeps its KV under this name, though it does not run there any more.
    held: Option<String>,
    /// KV at the engine that it finds when it is asked for.
    pub(super) laid: Option<Laid>,
    /// The ids of the KV that has arrived.
    arrived: Vec<u32>,
    /// Its KV goes straight to the target's engine.
    pub(super) direct: bool,
    /// The name under which the engine keeps blocks for that.
    pub(super) pinned: Option<String>,
}

impl RemoteJob {
    pub(super) fn new(job: Job, context: Tokens, now: Timestamp) -> Self {
        let told = job.prepared.prompt_tokens().0;
        let unread = job.prepared.prompt.is_empty() && !job.body.is_empty();
        let sketch = if unread {
            Sketch::read(&job.body).unwrap_or_default()
        } else {
            Sketch::default()
        };
        let longest = match unread {
            true => sketch.max_tokens.map_or(context, Tokens),
            false => Tokens(job.prepared.params.max_tokens),
        };
        let mut new = Self {
            prompt: if unread {
                sketch.prompt.min(context)
            } else {
                Tokens(told)
            },
            longest_output: longest.min(context),
            by_ids: !job.generated.is_empty() || job.body.is_empty(),
            ids: Vec::new(),
            spoken: Vec::new(),
            going_on: None,
            begun: false,
            torn: false,
            kept: VecDeque::new(),
            dropped: 0,
            sent: 0,
            end: None,
            end_sent: false,
            to: None,
            paused: false,
            arriving: false,
            complete: false,
            over: false,
            came: now,
            name: None,
            stopped: false,
            held: None,
            laid: None,
            arrived: Vec::new(),
            direct: false,
            pinned: None,
            job,
        };
        new.goes_on_from(new.job.generated.clone(), new.job.spoken.clone(), &[]);
        new.sent = new.kept.len() + new.dropped;
        new
    }

    /// Sets all output so far, as a hand-over or a replay brings it, with the log-probabilities of the last tokens.
    pub(super) fn goes_on_from(
        &mut self,
        ids: Vec<u32>,
        spoken: Vec<Spoken>,
        logprobs: &[TokenLogprob],
    ) {
        self.kept.clear();
        (self.dropped, self.sent) = (0, 0);
        let untold = ids.len().saturating_sub(logprobs.len());
        let mut from = 0;
        for piece in &spoken {
            let end = (piece.end as usize).min(ids.len());
            if let Some(part) = ids.get(from..end).filter(|part| !part.is_empty()) {
                self.kept.push_back(TokenBatch {
                    index: u32::try_from(from).unwrap_or(u32::MAX),
                    ids: part.to_vec(),
                    text: piece.text.clone(),
                    logprobs: match from.checked_sub(untold) {
                        Some(start) => logprobs.get(start..end - untold).unwrap_or_default(),
                        None => &[],
                    }
                    .to_vec(),
                    ..TokenBatch::default()
                });
                from = end;
            }
        }
        self.by_ids |= !ids.is_empty();
        self.ids.clone_from(&ids);
        self.job.generated = ids;
        self.job.spoken.clone_from(&spoken);
        self.spoken = spoken;
    }

    /// Where its events go from now on.
    pub(super) fn open(&mut self) -> mpsc::Receiver<EngineEvent> {
        let (to, events) = mpsc::channel(EVENTS);
        self.to = Some(to);
        events
    }

    pub(super) fn output(&self) -> Tokens {
        Tokens(u32::try_from(self.ids.len()).unwrap_or(u32::MAX))
    }

    /// What is to be done now.
    pub(super) fn step(&self) -> Step {
        if self.over {
            return Step::Over;
        }
        let Some(to) = self.to.clone().filter(|_| !self.paused && !self.arriving) else {
            return Step::Hold(self.to.clone());
        };
        match (self.kept.get(self.sent - self.dropped), &self.end) {
            (Some(piece), _) => Step::Send(to, EngineEvent::Tokens(piece.clone())),
            (None, Some(_)) if self.end_sent => Step::Over,
            (None, Some(end)) => Step::Send(to, end.clone()),
            (None, None) => Step::Read(to),
        }
    }

    /// Notes that what [`Self::step`] gave for `to` has been sent; false when it must not be, since something changed.
    pub(super) fn sent(&mut self, to: &mpsc::Sender<EngineEvent>) -> bool {
        let same = self.to.as_ref().is_some_and(|known| known.same_channel(to));
        if !same || self.paused || self.over {
            return false;
        }
        if self.sent - self.dropped < self.kept.len() {
            self.sent += 1;
        } else {
            self.end_sent = true;
        }
        true
    }

    /// Makes one piece of those from `first` on.
    fn gather(&mut self, first: usize) {
        let mut rest = self.kept.drain(first..);
        let Some(mut one) = rest.next() else {
            return;
        };
        let mut bytes = BytesMut::from(&*one.wire.bytes);
        for piece in rest {
            one.ids.extend(piece.ids);
            one.text.push_str(&piece.text);
            one.logprobs.extend(piece.logprobs);
            bytes.extend_from_slice(&piece.wire.bytes);
        }
        one.wire.bytes = bytes.freeze();
        self.kept.push_back(one);
    }

    /// Whether `to` is where its events go still.
    pub(super) fn goes_to(&self, to: &mpsc::Sender<EngineEvent>) -> bool {
        self.to.as_ref().is_some_and(|known| known.same_channel(to))
    }

    /// Takes a piece of the answer.
    pub(super) fn said(&mut self, said: Said) {
        let Said {
            ids,
            text,
            logprobs,
            wire,
        } = said;
        self.begun = true;
        if let Some(head) = &wire.head {
            self.going_on.clone_from(&head.going_on);
            self.torn = self.going_on.is_none();
            if let Some(on) = &self.going_on {
                if !on.prepared.prompt.is_empty() {
                    self.prompt = on.prepared.prompt_tokens();
                }
                self.longest_output = Tokens(on.prepared.params.max_tokens);
            }
        }
        self.torn |= ids.is_empty();
        let index = self.output().0;
        self.ids.extend_from_slice(&ids);
        if !ids.is_empty() {
            self.spoken.push(Spoken {
                end: self.output().0,
                text: text.clone(),
            });
        }
        self.kept.push_back(TokenBatch {
            index,
            ids,
            text,
            logprobs,
            wire,
        });
        if self.kept.len() > KEPT && self.dropped < self.sent {
            self.kept.pop_front();
            self.dropped += 1;
        }
    }

    /// Takes the end of the answer.
    pub(super) fn ended(&mut self, end: Result<End, EngineError>) {
        self.begun = true;
        self.end = Some(match end {
            Ok(End { reason, text, wire }) => EngineEvent::Finished(Finish {
                reason,
                output_tokens: self.output().0,
                text,
                wire,
                prompt_tokens: self.by_ids.then_some(self.prompt.0),
            }),
            Err(error) => EngineEvent::Failed(error),
        });
    }

    /// Whether it could run elsewhere: it has not begun, or another engine can go on.
    fn can_move(&self) -> bool {
        let begun = self.begun || !self.ids.is_empty();
        !self.over && self.end.is_none() && !self.torn && (!begun || self.is_known())
    }

    /// Its ids are known, and what to do with them.
    fn is_known(&self) -> bool {
        self.by_ids || self.going_on.is_some()
    }

    fn phase(&self) -> JobPhase {
        match (self.arriving, self.paused) {
            (true, _) => JobPhase::Arriving,
            (_, true) => JobPhase::Paused,
            _ if !self.can_move() => JobPhase::Pinned,
            _ if !self.begun && self.ids.is_empty() && !self.by_ids => JobPhase::Waiting,
            _ if !self.begun => JobPhase::Prefill,
            _ => JobPhase::Decode,
        }
    }

    /// How it stands; `None` when it is over.
    pub(super) fn status(&self, block_size: BlockSize) -> Option<JobStatus> {
        let known = self.prompt + self.output();
        // The last token drawn has no KV yet.
        let computed = if self.ids.is_empty() {
            self.prompt
        } else {
            known - Tokens(1)
        };
        (!self.over && self.end.is_none()).then(|| JobStatus {
            request: self.job.request,
            epoch: self.job.epoch,
            model: self.job.prepared.model.clone(),
            priority: self.job.prepared.priority,
            phase: self.phase(),
            prompt: self.prompt,
            output: self.output(),
            computed,
            max_output: self.longest_output,
            blocks: block_size.blocks_for(known),
            came: self.came,
        })
    }
}

/// What may be shared of a job: the lock is held for bookkeeping only.
pub(super) type SharedJob = Arc<super::Entry>;

#[cfg(test)]
mod tests;
