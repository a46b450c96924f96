//! What the engine is asked for a job: the client's own request, or to go on from ids.

mod body;

use std::borrow::Cow;
use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::{Map, Value, json};
use shoal_gossip::Tokens;

use self::body::{grammar_of, negated_priority, only_known_fields, with_members, without_grammar};
use super::Inexact;
use super::chunk::IdSource;
use super::kind::ServerKind;
use super::kv::Along;
use crate::engine::EngineError;
use crate::engine::work::{HttpAsk, Job, Prepared, RequestKind, SamplingParams};
use crate::openai::{self, GenerateRequest};

/// vLLM's and OpenAI's bound for a completion that names none.
const COMPLETION_TOKENS: u32 = 16;

/// vLLM's bound for a bias, of either sign. A token with more has been drawn fifty times or more.
const MOST_BIAS: f64 = 100.0;

/// A request to the engine, and how to read its answer.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) http: HttpAsk,
    pub(super) body: Bytes,
    pub(super) manner: Manner,
}

/// How an answer is read.
#[derive(Debug)]
pub(super) enum Manner {
    /// Its bytes go through; nobody knows what is in them.
    Opaque,
    /// Its bytes go through, and its ids are taken note of. With a prepared request another engine can go on with it.
    Ids(IdSource, Box<Prepared>),
    /// It goes on from ids: the home writes what the client sees.
    GoOn,
}

/// What must be known of the engine and the model to ask.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) kind: ServerKind,
    /// The engine tells ids.
    pub(super) has_ids: bool,
    /// It runs higher priorities first.
    pub(super) high_first: bool,
    /// A grammar can be told what was drawn elsewhere: vLLM's connector does.
    pub(super) grammar: bool,
    /// What is done with requests that would draw other tokens elsewhere.
    pub(super) inexact: Inexact,
    pub(super) context: Tokens,
}

/// What a request loses by going on elsewhere: from there on it draws other tokens than it would have here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lost {
    /// The generator of its seed begins anew.
    pub(super) seed: bool,
    /// A penalty forgets what it has counted, or is made up for only nearly.
    pub(super) penalty: bool,
}

impl Asked {
    /// The client's request as it came, except that ids are asked for where that changes nothing else, and that its KV gets
    /// a name.
    pub(super) fn raw(self, job: &Job, along: &Along) -> Question {
        let as_came = |body: Bytes| Question {
            http: job.http.clone(),
            body,
            manner: Manner::Opaque,
        };
        let Some((kind, source)) = job.kind.zip(self.id_source()) else {
            return as_came(self.with_own_priority(&job.body));
        };
        let Some((prepared, asks_for_ids)) = self.can_go_on(kind, &job.body) else {
            return as_came(job.body.clone());
        };
        let source = if asks_for_ids { IdSource::Told } else { source };
        let ids = match (source, kind) {
            (IdSource::Told, _) => "",
            (IdSource::TokenIds, _) => ",\"return_token_ids\":true",
            (IdSource::Logprobs, RequestKind::Chat) => ",\"logprobs\":true,\"top_logprobs\":1",
            (IdSource::Logprobs, RequestKind::Completion) => ",\"logprobs\":1",
        };
        let added = format!("{ids}{}", along.members());
        match with_members(&job.body, &added) {
            Some(body) => Question {
                manner: Manner::Ids(source, Box::new(prepared)),
                ..as_came(body)
            },
            None => as_came(job.body.clone()),
        }
    }

    /// Where ids come from in answers to OpenAI's paths.
    fn id_source(self) -> Option<IdSource> {
        match self.kind {
            ServerKind::Vllm if self.has_ids => Some(IdSource::TokenIds),
            ServerKind::LlamaServer if self.has_ids => Some(IdSource::Logprobs),
            ServerKind::Vllm
            | ServerKind::LlamaServer
            | ServerKind::Sglang
            | ServerKind::OpenAi => None,
        }
    }

    /// How the request would go on elsewhere, if that could give what it would have got here, and whether the client asks
    /// for ids by itself: `docs/engines.md` has the table.
    fn can_go_on(self, kind: RequestKind, body: &[u8]) -> Option<(Prepared, bool)> {
        let free = match self.grammar {
            true => without_grammar(body)?,
            false => Cow::Borrowed(body),
        };
        let parsed = openai::parse(kind, &free).ok()?;
        let asks_for_ids = only_known_fields(&free, self.kind)?;
        // llama-server's own path tells log-probabilities in another form.
        let unwritable = parsed.params.logprobs.is_some() && self.kind != ServerKind::Vllm;
        let lost = self.lost(&parsed.params, parsed.seed.is_some());
        if !parsed.stream || unwritable || !self.may_lose(lost) {
            return None;
        }
        let max_tokens = self.output_bound(kind, &parsed);
        let prepared = Prepared {
            model: parsed.model,
            params: SamplingParams {
                max_tokens,
                seed: parsed.seed.unwrap_or(0),
                ..parsed.params
            },
            seeded: parsed.seed.is_some(),
            priority: parsed.priority,
            prompt: [].into(),
        };
        Some((prepared, asks_for_ids))
    }

    /// What a request with these parameters would lose by going on elsewhere.
    pub(super) fn lost(self, params: &SamplingParams, seeded: bool) -> Lost {
        // vLLM counts these over what it generated itself, llama-server over the prompt as well. What is subtracted for each
        // occurrence can be told as a bias, unless that would be scaled before.
        let penalty = match (params.presence_penalty, params.frequency_penalty) {
            _ if self.kind == ServerKind::LlamaServer => false,
            (0.0, 0.0) => false,
            (0.0, _) => params.repetition_penalty != 1.0,
            _ => true,
        };
        Lost {
            seed: seeded && params.temperature > 0.0,
            penalty,
        }
    }

    fn may_lose(self, lost: Lost) -> bool {
        self.inexact == Inexact::Allow || lost == Lost::default()
    }

    /// Output at most, before the prompt is known.
    fn output_bound(self, kind: RequestKind, parsed: &GenerateRequest) -> u32 {
        match (parsed.max_tokens, kind, self.kind) {
            (Some(asked), ..) => asked,
            (None, RequestKind::Completion, ServerKind::Vllm) => COMPLETION_TOKENS,
            (None, ..) => self.context.0,
        }
    }

    /// The request from its ids on: prompt, what was generated, and as much as is left.
    ///
    /// # Errors
    /// When this engine cannot, or what is left is nothing.
    pub(super) fn go_on(
        self,
        job: &Job,
        at_most: Option<u32>,
        along: &Along,
    ) -> Result<Question, EngineError> {
        let prepared = &job.prepared;
        let known = u32::try_from(prepared.prompt.len() + job.generated.len()).unwrap_or(u32::MAX);
        let generated = u32::try_from(job.generated.len()).unwrap_or(u32::MAX);
        let left = prepared.params.max_tokens.saturating_sub(generated);
        let left = left.min(self.context.0.saturating_sub(known));
        let left = at_most.map_or(left, |bound| left.min(bound));
        if left == 0 {
            return Err(bad("there is no room for more output in the context"));
        }
        let ids: Vec<u32> = prepared
            .prompt
            .iter()
            .chain(&job.generated)
            .copied()
            .collect();
        let mut body = sampling(job, self.kind);
        if !self.can_take(job) {
            return Err(bad("it would not draw here what it would have drawn"));
        }
        let path = match self.kind {
            ServerKind::Vllm => {
                body.insert("model".into(), json!(prepared.model));
                body.insert("max_tokens".into(), json!(left));
                body.insert("return_token_ids".into(), json!(true));
                body.extend(grammar_of(&job.body));
                body.extend(bias_for(&prepared.params, &job.generated));
                if let Some(top) = prepared.params.logprobs {
                    body.insert("logprobs".into(), json!(top));
                }
                "/v1/completions"
            }
            ServerKind::LlamaServer => {
                body.insert("n_predict".into(), json!(left));
                body.insert("return_tokens".into(), json!(true));
                body.insert("cache_prompt".into(), json!(true));
                "/completion"
            }
            ServerKind::Sglang | ServerKind::OpenAi => {
                return Err(bad("this engine cannot go on from token ids"));
            }
        };
        along.put_into(&mut body);
        body.insert("prompt".into(), json!(ids));
        body.insert("stream".into(), json!(at_most.is_none()));
        let headers = job.http.headers.clone();
        Ok(Question {
            http: HttpAsk {
                path: path.into(),
                headers,
            },
            body: Value::Object(body).to_string().into(),
            manner: Manner::GoOn,
        })
    }

    /// Whether a request can go on here as far as its grammar, and if it has begun its sampling, are concerned.
    pub(super) fn can_take(self, job: &Job) -> bool {
        let Prepared { params, seeded, .. } = &job.prepared;
        let grammar = self.grammar || grammar_of(&job.body).is_empty();
        let begun = !job.generated.is_empty();
        grammar && (!begun || self.may_lose(self.lost(params, *seeded)))
    }

    /// SGLang runs higher numbers first as a rule; everybody else, and the mesh, lower ones.
    fn with_own_priority(self, body: &Bytes) -> Bytes {
        if !self.high_first {
            return body.clone();
        }
        negated_priority(body).unwrap_or_else(|| body.clone())
    }
}

fn bad(message: &str) -> EngineError {
    EngineError::Broken(message.to_owned())
}

/// How to sample, in the client's own words: what it left out the engine's defaults decide, as they did before.
fn sampling(job: &Job, kind: ServerKind) -> Map<String, Value> {
    const COPIED: [&str; 11] = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "ignore_eos",
        "priority",
        "user",
    ];
    if let Ok(mut fields) = serde_json::from_slice::<Map<String, Value>>(&job.body) {
        fields.retain(|name, value| COPIED.contains(&name.as_str()) && !value.is_null());
        return fields;
    }
    let params = &job.prepared.params;
    let mut fields = Map::new();
    fields.insert("temperature".into(), json!(params.temperature));
    fields.insert("top_p".into(), json!(params.top_p));
    fields.insert("min_p".into(), json!(params.min_p));
    fields.insert("ignore_eos".into(), json!(params.ignore_eos));
    fields.insert("presence_penalty".into(), json!(params.presence_penalty));
    fields.insert("frequency_penalty".into(), json!(params.frequency_penalty));
    if params.top_k > 0 {
        fields.insert("top_k".into(), json!(params.top_k));
    }
    if kind == ServerKind::Vllm {
        let first_is_low = job.prepared.priority.0.saturating_neg();
        fields.insert(
            "repetition_penalty".into(),
            json!(params.repetition_penalty),
        );
        fields.insert("priority".into(), json!(first_is_low));
    }
    if job.prepared.seeded {
        fields.insert("seed".into(), json!(params.seed));
    }
    fields
}

/// What vLLM, which counts its own output alone, must be told of penalties: so much is subtracted already. It subtracts once more
/// for the presence of what it draws again; that is why such a request goes on only with leave.
fn bias_for(params: &SamplingParams, generated: &[u32]) -> Map<String, Value> {
    let (frequency, presence) = (params.frequency_penalty, params.presence_penalty);
    let mut members = Map::new();
    if (frequency != 0.0 || presence != 0.0) && !generated.is_empty() {
        let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
        for id in generated {
            *counts.entry(*id).or_default() += 1;
        }
        let bias = |(id, count): (u32, u32)| {
            let bias = -f64::from(frequency) * f64::from(count) - f64::from(presence);
            (id.to_string(), json!(bias.clamp(-MOST_BIAS, MOST_BIAS)))
        };
        let bias: Map<String, Value> = counts.into_iter().map(bias).collect();
        members.insert("logit_bias".into(), Value::Object(bias));
    }
    members
}

#[cfg(test)]
mod tests;
