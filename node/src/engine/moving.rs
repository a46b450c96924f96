//! The port through which requests move between engines.
//!
//! All waiting methods act between two steps of the model, for an eighth of a step or one act, so that what runs beside is
//! held up by less than a step. A request that ends, is aborted or loses its KV meanwhile is [`MoveError::Gone`].

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shoal_gossip::{Blocks, Epoch, RequestId, Timestamp, Tokens};
use shoal_migrate::{CopyMode, KvRange};
use tokio::sync::mpsc;

use crate::engine::answer::Spoken;
use crate::engine::work::{HttpAsk, Job, Prepared, Priority, RequestKind};
use crate::engine::{EngineError, EngineEvent, TokenLogprob};

/// Where a job stands in its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JobPhase {
    /// In the queue; holds no KV.
    Waiting,
    /// Its prompt, or the output it came with, is being prefilled.
    Prefill,
    /// Draws a token a step.
    Decode,
    /// Stopped by a hand-over, here as source.
    Paused,
    /// Coming in by a hand-over: it does not run yet.
    Arriving,
    /// Runs, and cannot move: only this engine can finish it.
    Pinned,
}

/// A job as its engine sees it now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobStatus {
    /// Which request.
    pub request: RequestId,
    /// Which ownership.
    pub epoch: Epoch,
    /// The model.
    pub model: String,
    /// Rank.
    pub priority: Priority,
    /// Where it stands.
    pub phase: JobPhase,
    /// Prompt tokens.
    pub prompt: Tokens,
    /// Output tokens so far.
    pub output: Tokens,
    /// Tokens that have KV.
    pub computed: Tokens,
    /// Output tokens at most.
    pub max_output: Tokens,
    /// KV blocks it holds.
    pub blocks: Blocks,
    /// When its client asked, as far as this node was told, by this node's clock.
    pub came: Timestamp,
}

/// A request as the source describes it to the target: the head of the opening parcel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Opening {
    /// What the client asked for, if the mesh reads its path.
    pub kind: Option<RequestKind>,
    /// The client's request as it came.
    pub http: HttpAsk,
    /// Its body, untouched.
    pub body: Bytes,
    /// Prompt, parameters (with the seed in use) and rank.
    pub prepared: Prepared,
    /// Output ids so far.
    pub output: Vec<u32>,
}

/// What a request goes on with: the head of the last parcel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LastState {
    /// All output ids.
    pub output: Vec<u32>,
    /// Log-probabilities of the last output tokens, the newest last, when the request asked for them: those that may
    /// not have reached the home (at most [`KEPT_LOGPROBS`]).
    pub logprobs: Vec<TokenLogprob>,
    /// The text of the output, where an engine beside a node wrote it.
    pub spoken: Vec<Spoken>,
}

/// Log-probabilities a job keeps for a hand-over. Between an engine and its home lie at most 32 events, 8 frames and
/// a stream window of 64 KiB, in which a frame with log-probabilities takes 100 bytes or more.
pub const KEPT_LOGPROBS: usize = 1024;

/// KV that an engine has given out, in the form that travels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedKv {
    /// Of which tokens.
    pub range: KvRange,
    /// Self-contained: the target needs only these bytes and the range.
    pub bytes: Bytes,
}

/// What `export` gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The KV; `None` when there was none beyond the position asked for.
    pub kv: Option<ExportedKv>,
    /// Tokens with KV at that moment.
    pub computed: Tokens,
}

/// What `pause` gives.
#[derive(Clone, Debug, PartialEq)]
pub struct PausedJob {
    /// What the request goes on with.
    pub state: LastState,
    /// KV from the position asked for; `None` when there is none, or when none was asked for.
    pub kv: Option<ExportedKv>,
    /// When it stopped, by the engine's clock: the step boundary, before anything was exported.
    pub at: Timestamp,
}

/// Why a step of a hand-over did not happen in the engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// The request is not here in this ownership, has ended, or has lost its KV.
    #[error("the request is gone, or has lost its KV")]
    Gone,
    /// There is no room for it any more. What had arrived of it is dropped.
    #[error("no room for it")]
    NoRoom,
    /// The bytes are not what they should be. What had arrived of the request is dropped.
    #[error("the KV cannot be taken in: {0}")]
    Unfit(String),
    /// The engine is broken or ending.
    #[error("the engine failed: {0}")]
    Broken(String),
}

/// What an engine counts of the requests that came to it from elsewhere, since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovingCounts {
    /// Bytes of KV that went from engine to engine without passing through a node.
    pub direct_bytes: u64,
    /// Requests that went on though what they draw is not what they would have drawn, since their seeded generator began anew.
    pub seeds_anew: u64,
    /// The same, since a penalty forgot what it had counted, or was made up for only nearly.
    pub penalties_anew: u64,
}

/// An engine whose requests can move.
///
/// At the source: [`describe`](Self::describe), any number of [`export`](Self::export), [`pause`](Self::pause), then
/// either [`unpause`](Self::unpause), [`resume`](Self::resume) in a new ownership, or `Engine::abort`.
/// At the target: [`admit`](Self::admit), [`import`](Self::import) or [`catch_up`](Self::catch_up) in order,
/// [`complete`](Self::complete), [`resume`](Self::resume); `Engine::abort` at any point frees all.
#[async_trait]
pub trait MovingEngine: Send + Sync {
    /// All jobs that are here, by request.
    fn jobs(&self) -> Vec<JobStatus>;

    /// One of them.
    fn job(&self, request: RequestId) -> Option<JobStatus>;

    /// Bytes that the KV of one token takes on the way; zero when KV cannot be exported, and requests move by
    /// recompute.
    fn kv_bytes_per_token(&self) -> u32;

    /// Tokens of which KV can be exported together while a request runs: stages end at multiples of it. `None` when only
    /// what stands still can be exported.
    fn kv_grain(&self) -> Option<Tokens> {
        Some(Tokens(1))
    }

    /// Whether this request has KV that can be exported. One that has not moves by recompute.
    fn exports(&self, _request: RequestId) -> bool {
        true
    }

    /// Whether KV can go between this engine and another one without a node between.
    fn is_direct(&self) -> bool {
        false
    }

    /// Says how the KV of a request is exported from now on: as bytes, or, where both engines can ([`Self::is_direct`]), as the
    /// place where the target's engine finds it.
    fn go_direct(&self, _request: RequestId, _epoch: Epoch, _direct: bool) {}

    /// What is counted of moves in the engine itself.
    fn counts(&self) -> MovingCounts {
        MovingCounts::default()
    }

    /// Describes a job to a target. Its output may grow while this is on the way.
    ///
    /// # Errors
    /// [`MoveError::Gone`].
    fn describe(&self, request: RequestId, epoch: Epoch) -> Result<Opening, MoveError>;

    /// Exports KV from `from` on, at most `at_most` tokens of it. The request runs on.
    ///
    /// # Errors
    /// See [`MoveError`]; nothing has changed. `Unfit` when KV cannot be exported.
    async fn export(
        &self,
        request: RequestId,
        epoch: Epoch,
        from: Tokens,
        at_most: Tokens,
    ) -> Result<Exported, MoveError>;

    /// Stops a job at the next step boundary and gives out all that it goes on with, with the KV from
    /// `kv_from` on if that is asked for. It keeps what it holds, and is not preempted. A waiting job stops waiting
    /// its turn. All its events so far are in its channel, whose receiver must be kept: dropping it ends the job in
    /// this phase too. One that is paused is paused again; one whose asker goes away runs on.
    ///
    /// # Errors
    /// See [`MoveError`]; nothing has changed. `Unfit` when KV is asked for and cannot be exported.
    async fn pause(
        &self,
        request: RequestId,
        epoch: Epoch,
        kv_from: Option<Tokens>,
    ) -> Result<PausedJob, MoveError>;

    /// Lets a paused job run on as if nothing had happened. Unknown ones are ignored.
    fn unpause(&self, request: RequestId, epoch: Epoch);

    /// Takes in a job that is to arrive. It uses up `job.reservation`, which must be of the kind that sets room aside
    /// at once, holds a slot (not in [`CopyMode::Waiting`]), and runs no step, except in [`CopyMode::Recompute`]
    /// the prefill of what it has.
    ///
    /// # Errors
    /// As `Engine::submit`; the promise is used up.
    fn admit(&self, job: Job, mode: CopyMode) -> Result<(), EngineError>;

    /// Takes in a stage of KV. Ranges follow each other from zero.
    ///
    /// # Errors
    /// See [`MoveError`]; on any of them the job is gone.
    async fn import(
        &self,
        request: RequestId,
        epoch: Epoch,
        kv: ExportedKv,
    ) -> Result<(), MoveError>;

    /// Recompute: adds the output drawn at the source meanwhile (all of it, from the first) and waits until it is prefilled.
    ///
    /// # Errors
    /// See [`MoveError`]; on any of them the job is gone.
    async fn catch_up(
        &self,
        request: RequestId,
        epoch: Epoch,
        output: Vec<u32>,
    ) -> Result<(), MoveError>;

    /// Takes in the rest: afterwards `resume` has nothing to wait for. In recompute mode this waits for the prefill. In
    /// [`CopyMode::Kv`] tokens that have no KV by now, because the source was in prefill itself, are prefilled once
    /// the job runs.
    ///
    /// # Errors
    /// See [`MoveError`]; on any of them the job is gone.
    async fn complete(
        &self,
        request: RequestId,
        epoch: Epoch,
        state: LastState,
        kv: Option<ExportedKv>,
    ) -> Result<(), MoveError>;

    /// Lets a paused or completed job run in the ownership `next`. It had `epoch`, which may be the same for one that
    /// was admitted under the ownership to come, and is not later. Its events come out of the new
    /// channel: first the output from index `from` on, as one batch if there is any, then what it draws.
    ///
    /// # Errors
    /// `BadRequest` when it is not here in `epoch`, or `from` is beyond its output, or before what it kept of
    /// log-probabilities. Nothing has changed.
    fn resume(
        &self,
        request: RequestId,
        epoch: Epoch,
        next: Epoch,
        from: u32,
    ) -> Result<mpsc::Receiver<EngineEvent>, EngineError>;
}
