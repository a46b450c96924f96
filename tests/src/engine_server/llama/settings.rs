//! How llama-server tells its settings and those of a request.

use shoal_node::engine::work::SamplingParams;

use crate::engine_server::json::{Json, ordered};
use crate::engine_server::shared::Shared;

/// `/props`.
pub(super) fn props(server: &Shared) -> Json {
    let params = ordered! {
        "seed": u32::MAX,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "max_tokens": -1,
        "n_predict": -1,
        "ignore_eos": false,
        "stream": false,
        "n_probs": 0,
    };
    ordered! {
        "default_generation_settings": ordered! {"params": params, "n_ctx": server.context()},
        "total_slots": server.slots(),
        "model_alias": server.model(),
        "model_ftype": "Q4_1",
        "model_path": format!("gguf/{}.gguf", server.engine_model()),
        "modalities": ordered! {"vision": false, "video": false, "audio": false},
        "endpoint_slots": true,
        "endpoint_props": true,
        "endpoint_metrics": true,
        "ui": true,
        "bos_token": "<|turn|>",
        "eos_token": "<|end|>",
        "build_info": "b0-unknown",
        "is_sleeping": false,
    }
}

/// The settings of one request, as its last event tells them.
pub(super) fn of_request(params: &SamplingParams, stream: bool) -> Json {
    ordered! {
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop,
        "max_tokens": params.max_tokens,
        "n_predict": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "n_probs": params.logprobs.unwrap_or(0),
    }
}

/// Times of one request: a millisecond a token, so that the same request tells the same.
pub(super) fn timings(prompt: u32, predicted: u32) -> Json {
    let (prompt_ms, predicted_ms) = (f64::from(prompt), f64::from(predicted));
    ordered! {
        "cache_n": 0,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": 1.0,
        "prompt_per_second": 1000.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": 1.0,
        "predicted_per_second": 1000.0,
    }
}
