//! A request's part in hand-overs: what it is described by, how it stops, and how it comes in.

use shoal_gossip::{Epoch, Timestamp, Tokens};
use shoal_migrate::KvRange;
use tokio::sync::mpsc;

use super::RemoteJob;
use crate::engine::moving::{JobPhase, KEPT_LOGPROBS, LastState, MoveError, Opening, PausedJob};
use crate::engine::remote::kv::Laid;
use crate::engine::work::Job;
use crate::engine::{EngineError, EngineEvent, TokenLogprob};

impl RemoteJob {
    /// As a target needs it.
    pub(in super::super) fn describe(&self) -> Result<Opening, MoveError> {
        if !self.can_move() {
            return Err(MoveError::Gone);
        }
        let prepared = self.going_on.as_ref().map(|on| &on.prepared);
        Ok(Opening {
            kind: self.job.kind,
            http: self.job.http.clone(),
            body: self.job.body.clone(),
            prepared: prepared.unwrap_or(&self.job.prepared).clone(),
            output: self.ids.clone(),
        })
    }

    /// Stops it: what is not on its way yet stays here. A copy that began when nothing was drawn cannot go on once something is.
    pub(in super::super) fn pause(&mut self, now: Timestamp) -> Result<PausedJob, MoveError> {
        if !self.can_move() || self.arriving {
            return Err(MoveError::Gone);
        }
        self.paused = true;
        let unsent = self.kept.get(self.sent - self.dropped);
        let output = unsent.map_or_else(|| self.output().0, |piece| piece.index);
        let ids = self.ids.get(..output as usize).unwrap_or_default();
        let spoken = self.spoken.iter().filter(|piece| piece.end <= output);
        let told = self.kept.iter().filter(|piece| piece.index < output);
        let told: Vec<&TokenLogprob> = told.flat_map(|piece| &piece.logprobs).collect();
        let last = told.iter().skip(told.len().saturating_sub(KEPT_LOGPROBS));
        Ok(PausedJob {
            state: LastState {
                output: ids.to_vec(),
                spoken: spoken.cloned().collect(),
                logprobs: last.copied().cloned().collect(),
            },
            kv: None,
            at: now,
        })
    }

    pub(in super::super) fn unpause(&mut self) {
        self.paused = false;
    }

    /// What its KV goes by at the engine.
    pub(in super::super) fn name(&self) -> Option<String> {
        self.name.clone()
    }

    /// Its prompt, as far as it is known.
    pub(in super::super) fn prompt_ids(&self) -> &[u32] {
        let on = self.going_on.as_ref().map(|on| &on.prepared);
        &on.unwrap_or(&self.job.prepared).prompt
    }

    /// Prompt and output.
    pub(in super::super) fn all_ids(&self) -> Vec<u32> {
        let mut ids = self.prompt_ids().to_vec();
        ids.extend(&self.ids);
        ids
    }

    /// Takes note of its prompt, which the engine had not told.
    pub(in super::super) fn learn_prompt(&mut self, ids: Vec<u32>) {
        self.prompt = Tokens(u32::try_from(ids.len()).unwrap_or(u32::MAX));
        let prepared = match &mut self.going_on {
            Some(on) => &mut on.prepared,
            None => &mut self.job.prepared,
        };
        prepared.prompt = ids.into();
    }

    /// Whether it draws at this engine and can move, so that it has KV to take along.
    pub(in super::super) fn has_kv(&self) -> bool {
        self.phase() == JobPhase::Decode && !self.ids.is_empty() && self.name.is_some()
    }

    /// Its answer is given up, and its task lets the engine know; the engine keeps its KV under that name.
    pub(in super::super) fn stop(&mut self, held: Option<String>) {
        self.stopped = true;
        self.held = held;
    }

    /// Whether its answer has been given up.
    pub(in super::super) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// What is to be asked for, under a new name at the engine: all that is known of it.
    pub(in super::super) fn ask_anew(&mut self, name: String) -> Job {
        if self.stopped {
            if let Some(on) = &self.going_on {
                self.job.prepared = on.prepared.clone();
            }
            self.job.generated.clone_from(&self.ids);
            self.job.spoken.clone_from(&self.spoken);
            self.by_ids |= !self.ids.is_empty();
            (self.stopped, self.begun) = (false, false);
        }
        self.name = Some(name);
        self.job.clone()
    }

    /// What the engine keeps for it and has no use for any more.
    pub(in super::super) fn let_go(&mut self) -> (Option<String>, Option<Laid>) {
        (self.held.take(), self.laid.take())
    }

    /// Takes note of a stage of KV; gives all ids up to its end.
    ///
    /// # Errors
    /// When it does not follow what came before, or belongs to another request.
    pub(in super::super) fn arrived(
        &mut self,
        range: KvRange,
        ids: &[u32],
    ) -> Result<Vec<u32>, String> {
        if self.arrived.len() != range.start().0 as usize || ids.len() != range.tokens().0 as usize
        {
            return Err("a stage that does not follow the one before".to_owned());
        }
        let mut all = self.arrived.clone();
        all.extend(ids);
        let same = |(one, two): (&u32, &u32)| one == two;
        if !all.iter().zip(&self.all_ids()).all(same) {
            return Err("KV of other ids than the request has".to_owned());
        }
        self.arrived.clone_from(&all);
        Ok(all)
    }

    /// All of an arriving job is here.
    pub(in super::super) fn completed(&mut self, state: LastState) {
        let LastState {
            output,
            spoken,
            logprobs,
        } = state;
        self.goes_on_from(output, spoken, &logprobs);
        self.complete = true;
    }

    /// Runs in a new ownership, and tells its output again from `from` on.
    ///
    /// # Errors
    /// When it does not stand still, or that output is no longer here.
    pub(in super::super) fn resume(
        &mut self,
        next: Epoch,
        from: u32,
    ) -> Result<mpsc::Receiver<EngineEvent>, EngineError> {
        let bad = |message: &str| EngineError::BadRequest {
            message: message.to_owned(),
            param: None,
        };
        if self.over || next < self.job.epoch || !(self.paused || (self.arriving && self.complete))
        {
            return Err(bad("it is not here, or runs already"));
        }
        if from > self.output().0 {
            return Err(bad("there is less output than that"));
        }
        let first = self
            .kept
            .iter()
            .position(|piece| piece.index as usize + piece.ids.len() > from as usize);
        let first = first.unwrap_or(self.kept.len());
        // A piece is whole or nothing: its text and bytes belong to all of its tokens.
        let begins = self.kept.get(first).is_none_or(|piece| piece.index == from);
        if !begins || (first == 0 && self.dropped > 0) {
            return Err(bad("that output is no longer kept"));
        }
        let wanted = self.job.prepared.params.logprobs.is_some();
        let mut untold = self.kept.iter().skip(first);
        if wanted && untold.any(|piece| piece.logprobs.len() != piece.ids.len()) {
            return Err(bad("log-probabilities of that output are no longer kept"));
        }
        self.gather(first);
        self.sent = self.dropped + first;
        self.job.epoch = next;
        (self.paused, self.arriving) = (false, false);
        Ok(self.open())
    }
}
