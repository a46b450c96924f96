//! OpenAI's answers: a whole body, or the chunks of a stream.
//!
//! What names an answer (`id`, `created`, `model`, `system_fingerprint`) is fixed once, in
//! [`Envelope`], so that it stays the same in every chunk wherever the request is moved to.

mod logprobs;

use serde::Serialize;
use shoal_gossip::RequestId;

use self::logprobs::{ChatLogprobs, CompletionLogprobs};
use crate::engine::answer::ChunkShape;
use crate::engine::work::RequestKind;
use crate::engine::{Finish, FinishReason, TokenBatch, TokenLogprob};

/// Tokens that a request took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Prompt, template and special tokens included.
    pub prompt_tokens: u32,
    /// Output.
    pub completion_tokens: u32,
    /// Both.
    pub total_tokens: u32,
}

impl Usage {
    /// The usage of a request.
    pub fn new(prompt_tokens: u32, completion_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
        }
    }
}

/// What all parts of one answer have in common.
#[derive(Clone, Debug)]
pub struct Envelope {
    kind: RequestKind,
    id: String,
    created: u64,
    model: String,
    fingerprint: Option<String>,
}

impl Envelope {
    /// The envelope of a request's answer. `created` is Unix time in seconds; `fingerprint` is the
    /// model's (`ModelFacts::fingerprint`), equal on all hosts that may run the request.
    pub fn new(
        kind: RequestKind,
        request: RequestId,
        created: u64,
        model: &str,
        fingerprint: Option<u64>,
    ) -> Self {
        let prefix = match kind {
            RequestKind::Chat => "chatcmpl",
            RequestKind::Completion => "cmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{request}"),
            created,
            model: model.to_owned(),
            fingerprint: fingerprint.map(|print| format!("fp_{print:016x}")),
        }
    }

    /// The same answer, named as an engine named it.
    #[must_use]
    pub fn like(&self, shape: &ChunkShape) -> Self {
        Self {
            kind: self.kind,
            id: shape.id.clone(),
            created: shape.created,
            model: shape.model.clone(),
            fingerprint: shape.fingerprint.clone(),
        }
    }

    fn body<C>(
        &self,
        object: &'static str,
        choices: C,
        usage: Option<Option<Usage>>,
    ) -> Body<'_, C> {
        Body {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            system_fingerprint: self.fingerprint.as_deref(),
        }
    }
}

/// Every object OpenAI answers with, whole or chunk, differs in its choices only.
#[derive(Serialize)]
struct Body<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: C,
    /// `Some(None)` is written as null, `None` not at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    system_fingerprint: Option<&'a str>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    message: ChatAnswer<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct ChatAnswer<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'a str>,
}

#[derive(Serialize)]
struct ChatChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<CompletionLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    /// vLLM's name and place for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

fn reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn append<T: Serialize>(out: &mut Vec<u8>, value: &T) {
    // Plain data into memory: neither the data nor the writer can fail.
    if let Err(error) = serde_json::to_writer(out, value) {
        tracing::error!(%error, "an answer could not be written as JSON");
    }
}

/// An answer in the making that goes out as one body.
#[derive(Debug)]
pub struct WholeAnswer {
    envelope: Envelope,
    prompt_tokens: u32,
    text: String,
    logprobs: Option<Vec<TokenLogprob>>,
}

impl WholeAnswer {
    /// An answer without text yet. `logprobs` says whether the client asked for them.
    pub fn new(envelope: Envelope, prompt_tokens: u32, logprobs: bool) -> Self {
        Self {
            envelope,
            prompt_tokens,
            text: String::new(),
            logprobs: logprobs.then(Vec::new),
        }
    }

    /// Takes the next tokens.
    pub fn push(&mut self, batch: TokenBatch) {
        self.text.push_str(&batch.text);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.extend(batch.logprobs);
        }
    }

    /// The body.
    pub fn finish(mut self, finish: &Finish) -> Vec<u8> {
        self.text.push_str(&finish.text);
        let usage = Some(Some(Usage::new(self.prompt_tokens, finish.output_tokens)));
        let reason = reason(finish.reason);
        let mut out = Vec::with_capacity(512 + self.text.len());
        match self.envelope.kind {
            RequestKind::Chat => {
                let choice = ChatChoice {
                    index: 0,
                    message: ChatAnswer {
                        role: "assistant",
                        content: &self.text,
                        refusal: None,
                    },
                    logprobs: self.logprobs.as_deref().map(ChatLogprobs::new),
                    finish_reason: reason,
                };
                append(
                    &mut out,
                    &self.envelope.body("chat.completion", [choice], usage),
                );
            }
            RequestKind::Completion => {
                let mut offset = 0;
                let choice = TextChoice {
                    index: 0,
                    text: &self.text,
                    logprobs: self
                        .logprobs
                        .as_deref()
                        .map(|tokens| CompletionLogprobs::new(tokens, &mut offset)),
                    finish_reason: Some(reason),
                    token_ids: None,
                };
                append(
                    &mut out,
                    &self.envelope.body("text_completion", [choice], usage),
                );
            }
        }
        out
    }
}

/// Writes the chunks of a streamed answer as server-sent events.
#[derive(Debug)]
pub struct ChunkWriter {
    envelope: Envelope,
    prompt_tokens: u32,
    include_usage: bool,
    logprobs: bool,
    ids: bool,
    opened: bool,
    /// What is no whole character has the bytes of its replacement, as vLLM writes it, and not none.
    lossy_bytes: bool,
    /// Characters of all tokens so far, for the completion API's `text_offset`.
    offset: usize,
}

impl ChunkWriter {
    /// A stream of which nothing has been written. The two flags say what the client asked for.
    pub fn new(
        envelope: Envelope,
        prompt_tokens: u32,
        include_usage: bool,
        logprobs: bool,
    ) -> Self {
        Self {
            envelope,
            prompt_tokens,
            include_usage,
            logprobs,
            ids: false,
            opened: false,
            lossy_bytes: false,
            offset: 0,
        }
    }

    /// The same stream, if an engine began it; with the ids of its tokens if `ids`.
    #[must_use]
    pub fn begun(self, ids: bool) -> Self {
        Self {
            opened: true,
            lossy_bytes: true,
            ids,
            ..self
        }
    }

    /// Takes note of tokens that the engine wrote itself.
    pub fn skip(&mut self, tokens: &[TokenLogprob]) {
        for token in tokens {
            self.offset += token.token.chars().count();
        }
    }

    /// Writes new tokens. Writes nothing when they have nothing to show yet: a part of a character,
    /// or of what may become a stop string.
    pub fn tokens(&mut self, batch: &TokenBatch, out: &mut Vec<u8>) {
        self.open(out);
        if self.ids || !batch.text.is_empty() || (self.logprobs && !batch.logprobs.is_empty()) {
            let ids = self.ids.then_some(batch.ids.as_slice());
            self.choice((&batch.text, ids), &batch.logprobs, None, out);
        }
    }

    /// Writes the last chunk, the usage if it was asked for, and the mark that ends the stream.
    pub fn finish(&mut self, finish: &Finish, out: &mut Vec<u8>) {
        self.open(out);
        let ids: Option<&[u32]> = self.ids.then_some(&[]);
        self.choice((&finish.text, ids), &[], Some(reason(finish.reason)), out);
        if self.include_usage {
            let prompt = finish.prompt_tokens.unwrap_or(self.prompt_tokens);
            let usage = Usage::new(prompt, finish.output_tokens);
            let choices: [TextChoice<'_>; 0] = [];
            let object = self.chunk_object();
            event(out, &self.envelope.body(object, choices, Some(Some(usage))));
        }
        done(out);
    }

    /// Chat streams begin with a chunk that says who speaks.
    fn open(&mut self, out: &mut Vec<u8>) {
        let first = !std::mem::replace(&mut self.opened, true);
        if first && self.envelope.kind == RequestKind::Chat {
            let delta = Delta {
                role: Some("assistant"),
                content: Some(""),
            };
            self.chat_choice((delta, None), None, None, out);
        }
    }

    fn choice(
        &mut self,
        (text, token_ids): (&str, Option<&[u32]>),
        logprobs: &[TokenLogprob],
        finish_reason: Option<&'static str>,
        out: &mut Vec<u8>,
    ) {
        let logprobs = (self.logprobs && !logprobs.is_empty()).then_some(logprobs);
        match self.envelope.kind {
            RequestKind::Chat => {
                let nothing_to_add = finish_reason.is_some() && text.is_empty();
                let delta = Delta {
                    role: None,
                    content: (!nothing_to_add).then_some(text),
                };
                self.chat_choice((delta, token_ids), logprobs, finish_reason, out);
            }
            RequestKind::Completion => {
                let choice = TextChoice {
                    index: 0,
                    text,
                    logprobs: logprobs
                        .map(|tokens| CompletionLogprobs::new(tokens, &mut self.offset)),
                    finish_reason,
                    token_ids,
                };
                let object = self.chunk_object();
                event(out, &self.envelope.body(object, [choice], self.no_usage()));
            }
        }
    }

    fn chat_choice(
        &self,
        (delta, token_ids): (Delta<'_>, Option<&[u32]>),
        logprobs: Option<&[TokenLogprob]>,
        finish_reason: Option<&'static str>,
        out: &mut Vec<u8>,
    ) {
        let choice = ChatChunkChoice {
            index: 0,
            delta,
            logprobs: logprobs.map(|tokens| ChatLogprobs::new(tokens).lossily(self.lossy_bytes)),
            finish_reason,
            token_ids,
        };
        let object = self.chunk_object();
        event(out, &self.envelope.body(object, [choice], self.no_usage()));
    }

    fn chunk_object(&self) -> &'static str {
        match self.envelope.kind {
            RequestKind::Chat => "chat.completion.chunk",
            RequestKind::Completion => "text_completion",
        }
    }

    /// When usage is asked for, every chunk but the last says that it has none.
    fn no_usage(&self) -> Option<Option<Usage>> {
        self.include_usage.then_some(None)
    }
}

/// Appends one server-sent event.
pub fn event<T: Serialize>(out: &mut Vec<u8>, data: &T) {
    out.extend_from_slice(b"data: ");
    append(out, data);
    out.extend_from_slice(b"\n\n");
}

/// Appends the mark that ends every stream, also one that failed.
pub fn done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

#[cfg(test)]
mod tests;
