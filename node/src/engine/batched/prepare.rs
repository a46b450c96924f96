//! From a client's body to a job that can run, and the checks of both.

use std::sync::Arc;

use shoal_gossip::ModelFacts;

use crate::engine::EngineError;
use crate::engine::batched::TextModel;
use crate::engine::work::{Job, Prepared, RequestKind, SamplingParams};
use crate::openai::{self, GenerateRequest, PromptInput};

/// Output tokens of a completion that names no bound: OpenAI's default for this path. Chats get what
/// the context leaves.
const COMPLETION_TOKENS: u32 = 16;

/// Reads, checks and tokenises a body. Takes a core for as long as tokenising takes.
pub(super) fn prepare(
    kind: RequestKind,
    body: &[u8],
    models: &[ModelFacts],
    text: &dyn TextModel,
) -> Result<Prepared, EngineError> {
    let request = openai::parse(kind, body)?;
    let model = find_model(models, &request.model)?;
    let prompt = encode(&request.prompt, text)?;
    let param = match kind {
        RequestKind::Chat => "messages",
        RequestKind::Completion => "prompt",
    };
    check_prompt(&prompt, text, param)?;
    let max_tokens = output_bound(kind, &request, prompt.len(), model.context.0)?;
    Ok(Prepared {
        model: request.model,
        prompt: Arc::from(prompt),
        params: SamplingParams {
            max_tokens,
            seed: request.seed.unwrap_or(0),
            ..request.params
        },
        seeded: request.seed.is_some(),
        priority: request.priority,
    })
}

fn find_model<'a>(models: &'a [ModelFacts], id: &str) -> Result<&'a ModelFacts, EngineError> {
    models
        .iter()
        .find(|model| model.id == id)
        .ok_or_else(|| EngineError::UnknownModel(id.to_owned()))
}

fn encode(prompt: &PromptInput, text: &dyn TextModel) -> Result<Vec<u32>, EngineError> {
    match prompt {
        PromptInput::Chat(messages) => text.encode_chat(messages),
        PromptInput::Text(prompt) => text.encode_text(prompt),
        PromptInput::Tokens(ids) => Ok(ids.clone()),
    }
}

fn check_prompt(prompt: &[u32], text: &dyn TextModel, param: &str) -> Result<(), EngineError> {
    if prompt.is_empty() {
        return Err(bad("the prompt is empty".to_owned(), param));
    }
    match out_of_vocabulary(prompt, text) {
        Some(id) => Err(bad(format!("token {id} is not in the vocabulary"), param)),
        None => Ok(()),
    }
}

/// The bound on the output. A bound that the client named and the context cannot hold is refused, as
/// vLLM does, and not lowered in silence: the client would take the short answer for a whole one.
fn output_bound(
    kind: RequestKind,
    request: &GenerateRequest,
    prompt: usize,
    context: u32,
) -> Result<u32, EngineError> {
    let (param, what) = match kind {
        RequestKind::Chat => ("messages", "messages"),
        RequestKind::Completion => ("prompt", "prompt"),
    };
    let room = u32::try_from(prompt).map_or(0, |prompt| context.saturating_sub(prompt));
    if room == 0 {
        let message = format!(
            "This model's maximum context length is {context} tokens. However, your {what} resulted in {prompt} tokens. \
             Please reduce the length of the {what}."
        );
        return Err(bad(message, param));
    }
    match (request.max_tokens, kind) {
        (Some(asked), _) if asked > room => {
            let total = prompt.saturating_add(asked as usize);
            let message = format!(
                "This model's maximum context length is {context} tokens. However, you requested {total} tokens \
                 ({prompt} in the {what}, {asked} in the completion). Please reduce the length of the {what} or completion."
            );
            Err(bad(message, "max_tokens"))
        }
        (Some(asked), _) => Ok(asked),
        (None, RequestKind::Chat) => Ok(room),
        (None, RequestKind::Completion) => Ok(room.min(COMPLETION_TOKENS)),
    }
}

/// Checks a job, which may come from a peer that counts differently.
pub(super) fn check_job(
    job: &Job,
    models: &[ModelFacts],
    text: &dyn TextModel,
) -> Result<(), EngineError> {
    let prepared = &job.prepared;
    let model = find_model(models, &prepared.model)?;
    check_prompt(&prepared.prompt, text, "prompt")?;
    let longest = (prepared.prompt.len() as u64) + u64::from(prepared.params.max_tokens);
    if longest > u64::from(model.context.0) {
        let context = model.context;
        let message = format!("{longest} tokens do not fit in a context of {context}");
        return Err(bad(message, "max_tokens"));
    }
    if prepared.params.max_tokens == 0 {
        return Err(bad("must be at least 1".to_owned(), "max_tokens"));
    }
    if job.generated.len() as u64 > u64::from(prepared.params.max_tokens) {
        let message = "more output exists than the request may have".to_owned();
        return Err(bad(message, "max_tokens"));
    }
    match out_of_vocabulary(&job.generated, text) {
        Some(id) => Err(bad(
            format!("token {id} is not in the vocabulary"),
            "prompt",
        )),
        None => Ok(()),
    }
}

fn out_of_vocabulary(ids: &[u32], text: &dyn TextModel) -> Option<u32> {
    let bound = text.vocabulary();
    ids.iter().copied().find(|id| *id >= bound)
}

fn bad(message: String, param: &str) -> EngineError {
    EngineError::BadRequest {
        message,
        param: Some(param.to_owned()),
    }
}
