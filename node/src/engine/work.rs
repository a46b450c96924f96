//! What an engine is asked to do: the request as checked, tokenised, and ready to run.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shoal_gossip::{Epoch, ModelApi, ModelFacts, RequestId, Tokens};

use crate::engine::ReservationId;
use crate::engine::answer::Spoken;

/// Which client path a body came in on; decides how it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RequestKind {
    /// `POST /v1/chat/completions`.
    Chat,
    /// `POST /v1/completions`.
    Completion,
}

/// A client's request as HTTP, for engines that speak it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpAsk {
    /// Path and query.
    pub path: String,
    /// Headers that concern an engine, names in lower case: no credentials, none of the connection's own.
    pub headers: Vec<(String, String)>,
}

/// Which of the nodes that serve its model can take a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Fit {
    /// All of them.
    #[default]
    Any,
    /// Those whose engine reads the body itself: it has something in it, or goes to a path, that this node does not read.
    Http,
    /// Those that can go on with what one of this fingerprint began.
    Same(u64),
}

impl Fit {
    /// Whether a node that serves `model` can take it.
    pub fn takes(self, model: &ModelFacts) -> bool {
        match self {
            Self::Any => true,
            Self::Http => model.api == ModelApi::Http,
            Self::Same(fingerprint) => model.fingerprint == fingerprint,
        }
    }
}

/// How the next token is drawn. Defaults are OpenAI's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the likeliest tokens whose probabilities reach this sum. 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the likeliest tokens. 0 keeps all.
    pub top_k: u32,
    /// Keep tokens at least this fraction as likely as the likeliest. 0 keeps all.
    pub min_p: f32,
    /// Randomness is a function of (seed, output index) alone, so that nothing else travels in a hand-over.
    pub seed: u64,
    /// Subtracted once from the logit of each token already generated.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logit of each token already generated.
    pub frequency_penalty: f32,
    /// Divides (or multiplies, if negative) the logits of tokens in prompt or output. 1 is off.
    pub repetition_penalty: f32,
    /// Texts that end the output; not part of it. At most 16 of at most 256 bytes.
    pub stop: Vec<String>,
    /// Output tokens at most, already clamped to what the context leaves.
    pub max_tokens: u32,
    /// Go on after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Give the log-probability of each token and of this many alternatives (at most 20).
    pub logprobs: Option<u8>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            stop: Vec::new(),
            max_tokens: 16,
            ignore_eos: false,
            logprobs: None,
        }
    }
}

/// Rank among waiting and running requests: higher runs first and is preempted last. 0 is normal.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Priority(pub i32);

/// A body an engine has read and found good.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    /// The model that was asked for.
    pub model: String,
    /// Prompt ids, template and special tokens included. Empty as long as nobody but the engine has read the body.
    pub prompt: Arc<[u32]>,
    /// How to sample; `seed` is the client's or zero.
    pub params: SamplingParams,
    /// Whether the client named a seed.
    pub seeded: bool,
    /// Rank.
    pub priority: Priority,
}

impl Prepared {
    /// A body that only its engine reads.
    pub fn unread(model: &str) -> Self {
        Self {
            model: model.to_owned(),
            prompt: Arc::from([]),
            params: SamplingParams::default(),
            seeded: false,
            priority: Priority(0),
        }
    }

    /// Length of the prompt; 0 as long as nobody but the engine has read the body.
    pub fn prompt_tokens(&self) -> Tokens {
        Tokens(u32::try_from(self.prompt.len()).unwrap_or(u32::MAX))
    }
}

/// A request for an engine to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// Which request.
    pub request: RequestId,
    /// Which ownership of it.
    pub epoch: Epoch,
    /// What the client asked for, if the mesh reads its path.
    pub kind: Option<RequestKind>,
    /// The request as it came, for engines that take it so.
    pub http: HttpAsk,
    /// Its body, untouched.
    pub body: Bytes,
    /// Prompt, parameters and rank.
    pub prepared: Prepared,
    /// Output ids that exist already (a replay or a hand-over); the first new index is their count.
    pub generated: Vec<u32>,
    /// The text that clients got for them, where an engine beside a node wrote it.
    pub spoken: Vec<Spoken>,
    /// The promise this job uses up, if one was made.
    pub reservation: Option<ReservationId>,
}
