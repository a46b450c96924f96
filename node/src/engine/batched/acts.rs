//! Acts on KV: what the engine thread does between two steps for a hand-over.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use shoal_gossip::{Timestamp, Tokens};
use shoal_migrate::KvRange;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::engine::batched::engine::Shared;
use crate::engine::batched::job::{Outgoing, Ownership};
use crate::engine::batched::{Executor, KvFault, Slot, Step};
use crate::engine::moving::{ExportedKv, LastState, MoveError};

/// Acts that wait for the engine thread at most; whoever asks for more waits for a place. A node moves a few
/// requests at a time, each with one act at a time, so this is room to spare for a few kilobytes.
pub(super) const ACTS: usize = 64;

/// Where an act's answer goes.
pub(super) type Answer<T> = oneshot::Sender<Result<T, MoveError>>;

/// KV as the executor gave it.
#[derive(Debug)]
pub(super) struct RawKv {
    pub(super) range: KvRange,
    pub(super) bytes: Vec<u8>,
}

/// What is given out of a job that was stopped.
#[derive(Debug)]
pub(super) struct Paused {
    pub(super) kv: Option<RawKv>,
    pub(super) state: LastState,
    /// When it stopped.
    pub(super) at: Timestamp,
}

/// What the engine thread is asked to do.
#[derive(Debug)]
pub(super) enum Act {
    Export {
        from: Tokens,
        at_most: Tokens,
        answer: Answer<(Option<RawKv>, Tokens)>,
    },
    Pause {
        kv_from: Option<Tokens>,
        answer: Answer<Paused>,
    },
    Import {
        kv: ExportedKv,
        answer: Answer<()>,
    },
    Complete {
        state: LastState,
        /// All stages joined, for an executor that takes them so.
        whole: Option<Bytes>,
        answer: Answer<()>,
    },
}

/// An act in the queue.
#[derive(Debug)]
pub(super) struct QueuedAct {
    pub(super) job: Ownership,
    pub(super) act: Act,
    /// Its place in the queue.
    pub(super) place: OwnedSemaphorePermit,
}

impl QueuedAct {
    /// Whether nobody waits for the answer any more.
    pub(super) fn is_abandoned(&self) -> bool {
        match &self.act {
            Act::Export { answer, .. } => answer.is_closed(),
            Act::Pause { answer, .. } => answer.is_closed(),
            Act::Import { answer, .. } | Act::Complete { answer, .. } => answer.is_closed(),
        }
    }
}

/// Where imported KV goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) slot: Slot,
    /// The slot holds something that is of no use any more.
    pub(super) clear: bool,
}

/// Where exported KV comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) slot: Slot,
    pub(super) range: KvRange,
}

/// What comes in with the last act, in the order in which the executor needs it.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) target: Target,
    pub(super) range: KvRange,
    pub(super) ids: Vec<u32>,
}

/// Performs an act. False when the executor is broken.
pub(super) fn perform<X: Executor>(shared: &Shared, executor: &mut X, queued: QueuedAct) -> bool {
    let QueuedAct { job, act, place } = queued;
    let result = match act {
        Act::Export {
            from,
            at_most,
            answer,
        } => {
            let result = export(shared, executor, job, from, at_most);
            tell(answer, result)
        }
        Act::Pause { kv_from, answer } => pause(shared, executor, job, kv_from, answer),
        Act::Import { kv, answer } => {
            let result = import(shared, executor, job, &kv);
            tell(answer, result)
        }
        Act::Complete {
            state,
            whole,
            answer,
        } => {
            let result = complete(shared, executor, job, state, whole);
            tell(answer, result)
        }
    };
    drop(place);
    let Err(why) = result else {
        return true;
    };
    tracing::error!(target: "shoal::engine", %why, "the engine failed");
    let mut jobs = shared.lock();
    let outgoing = jobs.break_down(&why);
    shared.publish(&mut jobs);
    drop(jobs);
    outgoing.into_iter().for_each(Outgoing::send);
    false
}

/// Answers, and passes on that the executor is broken.
fn tell<T>(answer: Answer<T>, result: Result<T, MoveError>) -> Result<(), String> {
    let broken = match &result {
        Err(MoveError::Broken(why)) => Err(why.clone()),
        Ok(_) | Err(MoveError::Gone | MoveError::NoRoom | MoveError::Unfit(_)) => Ok(()),
    };
    // Whoever asked may have gone; then nobody needs the answer.
    answer.send(result).ok();
    broken
}

fn export<X: Executor>(
    shared: &Shared,
    executor: &mut X,
    job: Ownership,
    from: Tokens,
    at_most: Tokens,
) -> Result<(Option<RawKv>, Tokens), MoveError> {
    let (source, computed) = shared.lock().source(job, from, at_most)?;
    Ok((take_out(executor, source)?, computed))
}

fn take_out<X: Executor>(
    executor: &mut X,
    source: Option<Source>,
) -> Result<Option<RawKv>, MoveError> {
    let Some(Source { slot, range }) = source else {
        return Ok(None);
    };
    let bytes = guard(|| executor.export(slot, range))?;
    Ok(Some(RawKv { range, bytes }))
}

fn pause<X: Executor>(
    shared: &Shared,
    executor: &mut X,
    job: Ownership,
    kv_from: Option<Tokens>,
    answer: Answer<Paused>,
) -> Result<(), String> {
    let at = shared.clock.now();
    let result = (|| {
        let kv = match kv_from {
            None => None,
            Some(from) => {
                let (source, _) = shared.lock().source(job, from, Tokens(u32::MAX))?;
                take_out(executor, source)?
            }
        };
        let mut jobs = shared.lock();
        let state = jobs.pause(job)?;
        shared.publish(&mut jobs);
        Ok(Paused { kv, state, at })
    })();
    let paused = result.is_ok();
    let broken = match &result {
        Err(MoveError::Broken(why)) => Err(why.clone()),
        Ok(_) | Err(_) => Ok(()),
    };
    if answer.send(result).is_err() && paused {
        // Nobody knows that it is paused, so nobody would ever let it go on.
        shared.lock().unpause(job);
    }
    broken
}

fn import<X: Executor>(
    shared: &Shared,
    executor: &mut X,
    job: Ownership,
    kv: &ExportedKv,
) -> Result<(), MoveError> {
    let mut jobs = shared.lock();
    let target = jobs.stage_in(job, kv.range)?;
    shared.publish(&mut jobs);
    drop(jobs);
    put_in(shared, job, || {
        clear(executor, target)?;
        executor.import(target.slot, kv.range, &kv.bytes)
    })
}

fn complete<X: Executor>(
    shared: &Shared,
    executor: &mut X,
    job: Ownership,
    state: LastState,
    whole: Option<Bytes>,
) -> Result<(), MoveError> {
    let mut jobs = shared.lock();
    let completion = jobs.completion(job, state, &*shared.text)?;
    shared.publish(&mut jobs);
    drop(jobs);
    if let Some(Completion { target, range, ids }) = completion {
        put_in(shared, job, || {
            clear(executor, target)?;
            if let Some(whole) = whole {
                executor.import(target.slot, range, &whole)?;
            }
            executor.adopt(target.slot, &ids)
        })?;
    }
    shared.lock().completed(job)
}

/// Runs what puts KV into the executor. When that fails the job is gone, and its slot is cleared before its next use.
fn put_in(
    shared: &Shared,
    job: Ownership,
    act: impl FnOnce() -> Result<(), KvFault>,
) -> Result<(), MoveError> {
    guard(act).inspect_err(|_| {
        let mut jobs = shared.lock();
        jobs.abort(job.request, job.epoch);
        shared.publish(&mut jobs);
    })
}

fn clear<X: Executor>(executor: &mut X, target: Target) -> Result<(), KvFault> {
    if !target.clear {
        return Ok(());
    }
    let step = Step {
        clear: vec![target.slot],
        items: Vec::new(),
    };
    let cleared = executor.step(&step);
    cleared
        .map(drop)
        .map_err(|error| KvFault::Broken(error.to_string()))
}

fn guard<T>(act: impl FnOnce() -> Result<T, KvFault>) -> Result<T, MoveError> {
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(KvFault::Unfit(why))) => Err(MoveError::Unfit(why)),
        Ok(Err(KvFault::Broken(why))) => Err(MoveError::Broken(why)),
        Err(panic) => Err(MoveError::Broken(panic_text(&*panic))),
    }
}

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", text.unwrap_or("without a text"))
}
