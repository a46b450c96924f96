//! What a hand-over asks of the jobs.

use shoal_gossip::{Epoch, RequestId, Timestamp, Tokens};
use shoal_migrate::{CopyMode, KvRange};
use tokio::sync::oneshot;

use super::{Course, Jobs, refused};
use crate::engine::batched::acts::{Completion, QueuedAct, Source, Target};
use crate::engine::batched::job::{
    Arrival, Outgoing, Ownership, Resumption, RunningJob, Submission, count,
};
use crate::engine::batched::{Hold, NoRoom, SeqKey, Slot, TextModel};
use crate::engine::moving::{ExportedKv, JobStatus, KEPT_LOGPROBS, LastState, MoveError, Opening};
use crate::engine::{EngineError, ReservationId};

impl Jobs {
    /// All jobs.
    pub(in crate::engine::batched) fn statuses(&mut self) -> Vec<JobStatus> {
        self.remove_gone();
        let keys: Vec<_> = self.running.keys().copied().collect();
        keys.into_iter()
            .filter_map(|key| self.status_of(key))
            .collect()
    }

    pub(in crate::engine::batched) fn status(&mut self, request: RequestId) -> Option<JobStatus> {
        self.remove_gone();
        let (key, _) = self.batcher.find(request)?;
        self.status_of(key)
    }

    fn status_of(&self, key: SeqKey) -> Option<JobStatus> {
        let job = self.running.get(&key)?;
        let standing = self.batcher.standing(key)?;
        Some(JobStatus {
            request: job.request,
            epoch: job.epoch,
            model: job.prepared.model.clone(),
            priority: job.prepared.priority,
            phase: standing.phase(),
            prompt: Tokens(job.prompt_len),
            output: Tokens(count(job.output().len())),
            computed: standing.computed,
            max_output: Tokens(job.params.max_tokens),
            blocks: standing.blocks,
            came: standing.came,
        })
    }

    /// Why a job that is asked for is not here.
    pub(in crate::engine::batched) fn absence(&self) -> MoveError {
        match &self.course {
            Course::Broken(why) => MoveError::Broken(why.clone()),
            Course::Open | Course::Stopping | Course::Abandoned => MoveError::Gone,
        }
    }

    fn find(&self, job: Ownership) -> Result<SeqKey, MoveError> {
        match self.batcher.find(job.request) {
            Some((key, epoch)) if epoch == job.epoch => Ok(key),
            Some(_) | None => Err(self.absence()),
        }
    }

    fn running(&self, job: Ownership) -> Result<(SeqKey, &RunningJob), MoveError> {
        let key = self.find(job)?;
        let running = self.running.get(&key).ok_or(MoveError::Gone)?;
        Ok((key, running))
    }

    pub(in crate::engine::batched) fn describe(
        &mut self,
        job: Ownership,
    ) -> Result<Opening, MoveError> {
        self.remove_gone();
        let (_, running) = self.running(job)?;
        if running.arrival.is_some() {
            return Err(MoveError::Gone);
        }
        Ok(running.opening())
    }

    /// Takes an act into the queue, unless its job is gone.
    pub(in crate::engine::batched) fn ask(&mut self, act: QueuedAct) -> Result<(), MoveError> {
        self.remove_gone();
        self.find(act.job)?;
        self.acts.push_back(act);
        Ok(())
    }

    /// The next act that somebody waits for.
    pub(in crate::engine::batched) fn next_act(&mut self) -> Option<QueuedAct> {
        while let Some(act) = self.acts.pop_front() {
            if !act.is_abandoned() {
                return Some(act);
            }
        }
        None
    }

    /// Drops the acts that nobody will perform: their askers hear that the jobs are gone.
    pub(in crate::engine::batched) fn drop_acts(&mut self) {
        self.acts.clear();
    }

    /// Where a job's KV from `from` on is, and up to where there is any.
    pub(in crate::engine::batched) fn source(
        &mut self,
        job: Ownership,
        from: Tokens,
        at_most: Tokens,
    ) -> Result<(Option<Source>, Tokens), MoveError> {
        self.remove_gone();
        let (key, running) = self.running(job)?;
        let standing = self.batcher.standing(key).ok_or(MoveError::Gone)?;
        // Preempted meanwhile: what was sent before cannot be gone on from.
        if running.arrival.is_some() || standing.computed < from {
            return Err(MoveError::Gone);
        }
        let end = standing.computed.min(from + at_most);
        let source = match (standing.slot, KvRange::new(from, end)) {
            (Some(slot), Some(range)) => Some(Source { slot, range }),
            (Some(_) | None, _) => None,
        };
        Ok((source, standing.computed))
    }

    /// Stops a job. One that is stopped already is stopped again.
    pub(in crate::engine::batched) fn pause(
        &mut self,
        job: Ownership,
    ) -> Result<LastState, MoveError> {
        self.remove_gone();
        let (key, running) = self.running(job)?;
        if running.arrival.is_some() {
            return Err(MoveError::Gone);
        }
        let state = running.last_state();
        self.batcher.stop(key);
        Ok(state)
    }

    pub(in crate::engine::batched) fn unpause(&mut self, job: Ownership) {
        if let Ok(key) = self.find(job)
            && self.hold(key) == Some(Hold::Stopped)
        {
            self.batcher.go_on(key, job.epoch);
        }
    }

    fn hold(&self, key: SeqKey) -> Option<Hold> {
        self.batcher.standing(key)?.hold
    }

    pub(in crate::engine::batched) fn admit(
        &mut self,
        now: Timestamp,
        submission: Submission,
        mode: CopyMode,
    ) -> Result<(), EngineError> {
        self.replace_older(&submission)?;
        let Submission { spec, mut job, .. } = submission;
        job.to = None;
        job.arrival = Some(Arrival::new(mode));
        let arrived = self.batcher.arrive(now, spec, mode);
        let key = arrived.map_err(|refusal| refused(refusal, &job))?;
        self.running.insert(key, job);
        Ok(())
    }

    /// An arriving job that copies like this and is not complete.
    fn arriving(
        &mut self,
        job: Ownership,
        modes: &[CopyMode],
    ) -> Result<(SeqKey, &mut RunningJob), MoveError> {
        let key = self.find(job)?;
        let fits = self
            .running
            .get(&key)
            .and_then(|running| running.arrival.as_ref())
            .is_some_and(|arrival| !arrival.complete && modes.contains(&arrival.mode));
        if !fits {
            // Whoever asks takes it for something else than it is; a job that runs here is not harmed.
            return Err(MoveError::Gone);
        }
        let running = self.running.get_mut(&key).ok_or(MoveError::Gone)?;
        Ok((key, running))
    }

    /// How an arriving job copies.
    pub(in crate::engine::batched) fn mode(&self, job: Ownership) -> Result<CopyMode, MoveError> {
        let (_, running) = self.running(job)?;
        let arrival = running.arrival.as_ref().ok_or(MoveError::Gone)?;
        Ok(arrival.mode)
    }

    /// Drops a job that cannot be taken in.
    pub(in crate::engine::batched) fn unfit(&mut self, job: Ownership, why: &str) -> MoveError {
        self.abort(job.request, job.epoch);
        MoveError::Unfit(why.to_owned())
    }

    /// Notes a stage that is about to be imported, and says where to.
    pub(in crate::engine::batched) fn stage_in(
        &mut self,
        job: Ownership,
        range: KvRange,
    ) -> Result<Target, MoveError> {
        let key = self.count_stage(job, range)?;
        let (slot, clear) = self.batcher.slot_to_fill(key).ok_or(MoveError::Gone)?;
        Ok(Target { slot, clear })
    }

    fn count_stage(&mut self, job: Ownership, range: KvRange) -> Result<SeqKey, MoveError> {
        let (key, running) = self.arriving(job, &[CopyMode::Kv])?;
        // The last token drawn has no KV yet.
        let longest = running.prompt_len.saturating_add(running.params.max_tokens) - 1;
        let standing = self.batcher.standing(key).ok_or(MoveError::Gone)?;
        if range.start() != standing.computed {
            let held = standing.computed;
            let why = format!("KV from {} on does not follow {held}", range.start());
            return Err(self.unfit(job, &why));
        }
        if range.end() > Tokens(longest) {
            return Err(self.unfit(job, "more KV than the request can have"));
        }
        if let Err(NoRoom) = self.batcher.imported(key, range.end()) {
            self.remove(key);
            return Err(MoveError::NoRoom);
        }
        Ok(key)
    }

    /// Notes and keeps a stage that is to be imported with all others.
    pub(in crate::engine::batched) fn keep_stage(
        &mut self,
        job: Ownership,
        kv: ExportedKv,
    ) -> Result<(), MoveError> {
        self.count_stage(job, kv.range)?;
        let (_, running) = self.arriving(job, &[CopyMode::Kv])?;
        if let Some(arrival) = &mut running.arrival {
            arrival.parts.push(kv);
        }
        Ok(())
    }

    /// Gives out the stages that were kept, and the slot they are for.
    pub(in crate::engine::batched) fn kept_stages(
        &mut self,
        job: Ownership,
    ) -> Result<Option<(Slot, Vec<ExportedKv>)>, MoveError> {
        let (key, running) = self.arriving(job, &[CopyMode::Kv])?;
        let stages = running
            .arrival
            .as_mut()
            .map(|arrival| std::mem::take(&mut arrival.parts))
            .unwrap_or_default();
        let slot = self
            .batcher
            .standing(key)
            .and_then(|standing| standing.slot);
        Ok(slot
            .filter(|_| !stages.is_empty())
            .map(|slot| (slot, stages)))
    }

    /// Checks the state a job goes on with and takes it over.
    fn take_state(
        &mut self,
        job: Ownership,
        state: LastState,
        vocabulary: &dyn TextModel,
    ) -> Result<SeqKey, MoveError> {
        let modes = [CopyMode::Kv, CopyMode::Recompute, CopyMode::Waiting];
        let (key, running) = self.arriving(job, &modes)?;
        if let Err(why) = check_output(running, &state.output, vocabulary) {
            return Err(self.unfit(job, why));
        }
        if state.logprobs.len() > state.output.len().min(KEPT_LOGPROBS) {
            return Err(self.unfit(job, "more log-probabilities than output"));
        }
        running.set_output(&state.output);
        if running.params.logprobs.is_some() {
            running.keep_logprobs(state.logprobs);
        }
        let output = Tokens(count(state.output.len()));
        if let Err(NoRoom) = self.batcher.set_output(key, output) {
            self.remove(key);
            return Err(MoveError::NoRoom);
        }
        Ok(key)
    }

    /// Takes over the last state of a job whose KV has come, and says what of it is left to import.
    pub(in crate::engine::batched) fn completion(
        &mut self,
        job: Ownership,
        state: LastState,
        vocabulary: &dyn TextModel,
    ) -> Result<Option<Completion>, MoveError> {
        let key = self.take_state(job, state, vocabulary)?;
        let computed = self.batcher.standing(key).ok_or(MoveError::Gone)?.computed;
        let running = self.running.get(&key).ok_or(MoveError::Gone)?;
        if computed >= Tokens(count(running.ids.len())) {
            return Err(self.unfit(job, "KV of tokens that do not exist"));
        }
        let Some(range) = KvRange::new(Tokens::ZERO, computed) else {
            return Ok(None);
        };
        let ids = running
            .ids
            .get(..computed.0 as usize)
            .unwrap_or(&[])
            .to_vec();
        let (slot, clear) = self.batcher.slot_to_fill(key).ok_or(MoveError::Gone)?;
        let target = Target { slot, clear };
        Ok(Some(Completion { target, range, ids }))
    }

    /// Takes over the last state of a job that waits at the source.
    pub(in crate::engine::batched) fn complete_waiting(
        &mut self,
        job: Ownership,
        state: LastState,
        vocabulary: &dyn TextModel,
    ) -> Result<(), MoveError> {
        self.take_state(job, state, vocabulary)?;
        self.completed(job)
    }

    /// Adds output that was drawn at the source. The answer comes when it is prefilled.
    pub(in crate::engine::batched) fn catch_up(
        &mut self,
        job: Ownership,
        state: LastState,
        vocabulary: &dyn TextModel,
    ) -> Result<oneshot::Receiver<()>, MoveError> {
        self.arriving(job, &[CopyMode::Recompute])?;
        let key = self.take_state(job, state, vocabulary)?;
        let (tell, told) = oneshot::channel();
        let running = self.running.get_mut(&key).ok_or(MoveError::Gone)?;
        if let Some(arrival) = &mut running.arrival {
            // Of those who ask again only the last one still listens.
            arrival.prefilled.retain(|asker| !asker.is_closed());
            arrival.prefilled.push(tell);
        }
        Ok(told)
    }

    /// Answers those who wait for a prefill that has ended.
    pub(super) fn tell_prefilled(&mut self) {
        for (key, job) in &mut self.running {
            let Some(arrival) = &mut job.arrival else {
                continue;
            };
            let standing = self.batcher.standing(*key);
            if standing.is_some_and(|standing| standing.uncomputed == Tokens::ZERO) {
                for asker in arrival.prefilled.drain(..) {
                    // Whoever asked may have gone.
                    asker.send(()).ok();
                }
            }
        }
    }

    /// Nothing is missing any more.
    pub(in crate::engine::batched) fn completed(
        &mut self,
        job: Ownership,
    ) -> Result<(), MoveError> {
        let key = self.find(job)?;
        let running = self.running.get_mut(&key).ok_or(MoveError::Gone)?;
        let arrival = running.arrival.as_mut().ok_or(MoveError::Gone)?;
        arrival.complete = true;
        Ok(())
    }

    /// A job that may be resumed from this index: it is held, and all of it is here.
    pub(in crate::engine::batched) fn resumable(
        &self,
        job: Ownership,
        next: Epoch,
        from: u32,
    ) -> Result<(SeqKey, &RunningJob), EngineError> {
        let bad = |message: String| EngineError::BadRequest {
            message,
            param: None,
        };
        let held = self.running(job).ok().filter(|(key, running)| {
            self.hold(*key).is_some() && running.arrival.as_ref().is_none_or(|a| a.complete)
        });
        let Some((key, running)) = held else {
            let message = format!("request {} is not here to be resumed", job.request);
            return Err(bad(message));
        };
        if next < job.epoch {
            return Err(bad(
                "an ownership is not followed by an earlier one".to_owned()
            ));
        }
        let (least, most) = (running.resumable_from(), running.output().len());
        if !(least..=most).contains(&(from as usize)) {
            let message = format!("output is here from {least} to {most}, not from {from}");
            return Err(bad(message));
        }
        Ok((key, running))
    }

    pub(in crate::engine::batched) fn resume(
        &mut self,
        job: Ownership,
        resumption: Resumption,
    ) -> Result<Vec<Outgoing>, EngineError> {
        let (key, running) = self.resumable(job, resumption.next, resumption.from)?;
        if running.output().len() != resumption.output {
            return Err(EngineError::Broken("a held request grew".to_owned()));
        }
        self.batcher.go_on(key, resumption.next);
        let Some(running) = self.running.get_mut(&key) else {
            return Ok(Vec::new());
        };
        let (outgoing, over) = running.resume(resumption);
        if over {
            self.remove(key);
        }
        Ok(outgoing)
    }

    /// Gives back a promise of a job that will not be taken.
    pub(in crate::engine::batched) fn give_back(&mut self, reservation: Option<ReservationId>) {
        reservation.into_iter().for_each(|id| self.release(id));
    }
}

fn check_output(
    running: &RunningJob,
    output: &[u32],
    vocabulary: &dyn TextModel,
) -> Result<(), &'static str> {
    if !output.starts_with(running.output()) {
        return Err("the output is not a longer one of the same request");
    }
    if output.len() > running.params.max_tokens as usize {
        return Err("more output than the request may have");
    }
    let ids = vocabulary.vocabulary();
    if output.iter().any(|id| *id >= ids) {
        return Err("an id that is not in the vocabulary");
    }
    Ok(())
}
