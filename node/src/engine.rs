//! The engine: what runs the model beside or inside a node.
//!
//! One trait for the embedded llama.cpp, the simulated engine and servers beside the node ([`remote`]).
//! What an engine cannot do it says in [`Capabilities`]; `engine/contract.rs` is the suite that
//! every engine passes.
//!
//! The unit of truth of a request is *(prompt ids, generated ids, sampling parameters)*. Text is
//! derived from it, by [`text`], the same way at every host.

pub mod answer;
pub mod batched;
pub mod llama;
pub mod moving;
pub mod remote;
pub mod sim;
pub mod text;
pub mod work;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use shoal_gossip::{BlockSize, Blocks, Epoch, LoadSummary, ModelFacts, NodeId, RequestId, Tokens};
use tokio::sync::{mpsc, watch};

use crate::engine::answer::Wire;
use crate::engine::moving::MovingEngine;
use crate::engine::work::{Job, Prepared, RequestKind};

/// What an engine can do beyond submit, stream and abort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Output is a function of (prompt, generated ids, parameters) alone, whatever else runs.
    pub reproducible: bool,
    /// A job may start with generated ids: the engine prefills them and goes on. Needed for replay.
    pub resumes: bool,
    /// KV of a token range can be exported and imported: see [`MovingEngine`].
    pub kv_export: bool,
}

/// What seldom changes about an engine once it has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineFacts {
    /// The models it serves; empty while one beside the node has not said.
    pub models: Vec<ModelFacts>,
    /// Tokens in one KV block.
    pub block_size: BlockSize,
    /// KV blocks it has.
    pub total: Blocks,
    /// What it can do.
    pub capabilities: Capabilities,
}

/// A promise of room, made before the request itself arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReservationId(pub u64);

/// What an offer asks an engine to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReserveAsk {
    /// KV blocks the request needs to start.
    pub demand: Blocks,
    /// How long the promise is kept without a job.
    pub lease: Duration,
    /// Only room that can be set aside now will do, not a place in the queue: KV that travels cannot wait.
    pub at_once: bool,
    /// How long ago its client asked. Of the same rank the oldest is served first, wherever it waited before.
    pub waited: Duration,
    /// It ran before and lost its host: its client was promised an answer, so there is as much room in the queue for such
    /// requests as for all others, on top of theirs.
    pub resumed: bool,
    /// Whose client asked. Once a queue is half full, no home gets more of it than its share.
    pub home: NodeId,
}

/// Why an engine promises nothing. It holds nothing for the asker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveRefusal {
    /// The queue is at its bound.
    #[error("the queue is full")]
    QueueFull,
    /// Room was asked for at once, and there is none or somebody waits for it.
    #[error("no room now")]
    NoRoomNow,
    /// The request could never fit, however empty the engine.
    #[error("needs more KV blocks than the engine has")]
    NeverFits,
    /// The engine is loading, draining or failed.
    #[error("the engine takes no work now")]
    NotReady,
}

/// What an engine tells of one job, in order. Ends with `Finished` or `Failed`, or when the
/// receiver is dropped, which aborts the job.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// New tokens, at least one.
    Tokens(TokenBatch),
    /// The end. Nothing follows.
    Finished(Finish),
    /// The job ended without a result. Nothing follows; its KV is free.
    Failed(EngineError),
}

/// Tokens an engine generated, with the text they complete.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TokenBatch {
    /// Output index of the first id: 0 is the first token after the prompt.
    pub index: u32,
    /// The ids.
    pub ids: Vec<u32>,
    /// Text that became certain: whole UTF-8 characters that belong to no possible stop string. May be empty.
    pub text: String,
    /// One per id when the job asked for them, else empty.
    pub logprobs: Vec<TokenLogprob>,
    /// The answer as an engine beside the node wrote it; empty when the home is to write it.
    pub wire: Wire,
}

/// Log-probability of a chosen token and of the likeliest alternatives.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TokenLogprob {
    /// The chosen token's bytes, lossily as text.
    pub token: String,
    /// Its natural log-probability.
    pub logprob: f32,
    /// (text, log-probability) of the likeliest tokens, best first.
    pub top: Vec<(String, f32)>,
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// Output tokens in all, those given at submission included.
    pub output_tokens: u32,
    /// Text that was held back until now.
    pub text: String,
    /// Prompt length, where the home cannot know it otherwise.
    pub prompt_tokens: Option<u32>,
    /// The end of the answer as an engine beside the node wrote it; empty when the home is to write it.
    pub wire: Wire,
}

/// OpenAI's `finish_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum FinishReason {
    /// End-of-sequence token or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

/// Why an engine could not do a job. The job holds nothing afterwards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
pub enum EngineError {
    /// The request itself is wrong: no engine would take it. Carries OpenAI's `param` where one is to blame.
    #[error("{message}")]
    BadRequest {
        /// For the client.
        message: String,
        /// The body field to blame.
        param: Option<String>,
    },
    /// This engine does not serve the model.
    #[error("the model `{0}` does not exist")]
    UnknownModel(String),
    /// The queue is at its bound; another node may have room.
    #[error("the queue is full")]
    QueueFull,
    /// The engine takes no work now; another node may.
    #[error("the engine takes no work now")]
    NotReady,
    /// The engine broke; another node may do the job.
    #[error("the engine failed: {0}")]
    Broken(String),
}

/// An engine. Methods may be called from any task and never wait for a step of the model.
#[async_trait]
pub trait Engine: Send + Sync + fmt::Debug {
    /// What it is now.
    fn facts(&self) -> Arc<EngineFacts>;

    /// Its load now. `incarnation` and `seq` are zero: the node fills them in.
    fn load(&self) -> LoadSummary;

    /// Whether requests of this mesh run or wait here. An engine beside the node may be busy with others as well.
    fn has_work(&self) -> bool {
        let load = self.load();
        load.running > 0 || load.queued > 0
    }

    /// Signals that the load or the facts changed, at most once a step.
    fn load_changed(&self) -> watch::Receiver<()>;

    /// Reads a request body: checks it, renders the chat template, tokenises, clamps `max_tokens` to
    /// the context. Pure in (kind, body): every engine with the same fingerprint answers alike. The prompt is empty
    /// when the engine reads the body itself, once it is submitted.
    async fn prepare(&self, kind: RequestKind, body: Bytes) -> Result<Prepared, EngineError>;

    /// Promises room until the lease ends or a job with this reservation is submitted.
    fn reserve(&self, ask: ReserveAsk) -> Result<ReservationId, ReserveRefusal>;

    /// Gives a promise back. Unknown ids are ignored: the lease may have ended.
    fn release(&self, reservation: ReservationId);

    /// Starts a job. `job.prepared` may come from a peer: it is checked again (ids in the vocabulary,
    /// length within the context) and refused as `BadRequest` if wrong. Events come in order; a full channel pauses the job at a step boundary
    /// without holding up others; dropping the receiver aborts it in every phase.
    fn submit(&self, job: Job) -> Result<mpsc::Receiver<EngineEvent>, EngineError>;

    /// Ends a job, in whatever phase. Unknown or older epochs are ignored.
    fn abort(&self, request: RequestId, epoch: Epoch);

    /// Times since its start that a request lost its KV to another one, and has it computed again.
    fn preemptions(&self) -> u64 {
        0
    }

    /// The port through which its requests move; `None` when they cannot.
    fn moving(&self) -> Option<&dyn MovingEngine> {
        None
    }

    /// Stops taking work and frees the model once running jobs have ended or been dropped.
    async fn shutdown(&self);
}

/// KV blocks that a request needs to start: its prompt, what was generated before, and one token.
pub fn starting_demand(block_size: BlockSize, prompt: Tokens, generated: Tokens) -> Blocks {
    block_size.blocks_for(prompt + generated + Tokens(1))
}
