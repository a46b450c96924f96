//! Settings of the engine.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Surroundings, within, wrong};
use crate::config::layers::Given;
use crate::config::raw::{EngineKv, RawEngine};
use crate::config::{
    ConfigError, EngineKind, EngineSettings, HttpEngineSettings, LlamaSettings, SimSettings,
};
use crate::engine::llama::{MAX_CONTEXT_TOKENS, MAX_STEP_TOKENS};

/// KV of the embedded engine unless said otherwise: one full context of the demo model, 95 to 180 MB.
const LLAMA_CONTEXT: u32 = 8_192;

/// Sequences of the embedded engine: measured on two cores, more than eight at once add no tokens per second.
const LLAMA_MAX_SEQUENCES: u32 = 8;

/// Tokens of a step of the embedded engine: measured, 48 prefill tokens keep a step near 250 ms on
/// two cores; the rest is room for eight sequences that decode.
const LLAMA_STEP_TOKENS: u32 = 64;

/// Tokens of a step that are left for prompts at least, when many sequences may decode.
const LLAMA_PROMPT_TOKENS: u32 = 16;

/// llama.cpp's own bound on sequences in a context.
const LLAMA_SEQUENCES_BOUND: u32 = 256;

/// llama.cpp rounds the KV of a context, and of each sequence in a split one, up to this many tokens.
const LLAMA_CONTEXT_GRAIN: u32 = 256;

/// Time between two looks at a server, in milliseconds: with 700 for its answer, one that hangs shows within a second.
const POLL_MS: u64 = 250;

/// Silence of a stream that counts as death, in milliseconds: longer than any prefill of others that gets in between.
const STALL_MS: u64 = 60_000;

pub(super) fn check(
    raw: RawEngine,
    data_dir: &Path,
    given: &Given,
    surroundings: &Surroundings,
) -> Result<EngineSettings, ConfigError> {
    let kind = match raw.engine.split_once(':') {
        None if raw.engine == "llama" => EngineKind::Llama(llama(&raw, surroundings)?),
        Some(("http" | "https", _)) => EngineKind::Http(http(&raw, data_dir, given)?),
        Some(("sim", profile)) if !profile.is_empty() => {
            EngineKind::Sim(sim(&raw, profile, given)?)
        }
        _ => {
            return Err(wrong(
                "--engine",
                format!("there is no engine `{}`", raw.engine),
                "say `llama`, an address such as `http://127.0.0.1:8000`, or `sim:` and a profile such as `sim:a10/llama-2-7b`",
            ));
        }
    };
    let context = match &kind {
        EngineKind::Llama(llama) => Some(llama.context),
        EngineKind::Http(http) => http.context,
        EngineKind::Sim(sim) => sim.context,
    };
    if !matches!(kind, EngineKind::Http(_)) {
        refuse_http_settings(&raw)?;
    }
    let block_size = within("--block-size", raw.block_size, 1..=1_024)?;
    if context.is_some_and(|context| context < block_size) {
        return Err(wrong(
            "--block-size",
            "a block holds more than the whole context",
            "lower it, or raise --context",
        ));
    }
    let model_id = raw.model_id.map(model_id).transpose()?;
    Ok(EngineSettings {
        kind,
        model_id,
        block_size: NonZeroU32::new(block_size).unwrap_or(NonZeroU32::MIN),
        queue_limit: within("--queue-limit", raw.queue_limit, 1..=65_536)? as usize,
    })
}

fn llama(raw: &RawEngine, surroundings: &Surroundings) -> Result<LlamaSettings, ConfigError> {
    let Some(model) = raw.model.clone() else {
        return Err(wrong(
            "--model",
            "the engine llama needs a model",
            "name a GGUF file (scripts/fetch-model.sh gets a small one), or say --engine sim:<profile>",
        ));
    };
    if raw.sim_kv.is_some() {
        return Err(wrong(
            "--sim-kv",
            "it has no meaning for a real engine",
            "leave it out, or say --engine sim:<profile>",
        ));
    }
    if raw.sim_speed.is_some() {
        return Err(wrong(
            "--sim-speed",
            "it has no meaning for the engine llama",
            "leave it out, or say --engine sim:<profile>",
        ));
    }
    let context = raw.context.unwrap_or(LLAMA_CONTEXT);
    let context = within(
        "--context",
        context,
        LLAMA_CONTEXT_GRAIN..=MAX_CONTEXT_TOKENS,
    )?;
    let max_sequences = raw.max_sequences.unwrap_or(LLAMA_MAX_SEQUENCES);
    let max_sequences = within("--max-sequences", max_sequences, 1..=LLAMA_SEQUENCES_BOUND)?;
    let share = context / max_sequences;
    if raw.reproducible && share < LLAMA_CONTEXT_GRAIN {
        return Err(wrong(
            "--context",
            format!(
                "with --reproducible each of {max_sequences} sequences would get {share} tokens"
            ),
            format!(
                "give at least {} tokens, or fewer --max-sequences",
                max_sequences * LLAMA_CONTEXT_GRAIN
            ),
        ));
    }
    let spare = u32::try_from(surroundings.cores.saturating_sub(1)).unwrap_or(1);
    Ok(LlamaSettings {
        model,
        context,
        max_sequences,
        step_tokens: step_tokens_of(
            raw.step_tokens.unwrap_or_else(|| {
                LLAMA_STEP_TOKENS.max(max_sequences.saturating_add(LLAMA_PROMPT_TOKENS))
            }),
            max_sequences,
        )?,
        threads: within(
            "--threads",
            raw.threads.unwrap_or_else(|| spare.clamp(1, 512)),
            1..=512,
        )?,
        reproducible: raw.reproducible,
    })
}

fn sim(raw: &RawEngine, profile: &str, given: &Given) -> Result<SimSettings, ConfigError> {
    for (key, flag) in [("model", "--model"), ("threads", "--threads")] {
        if given.has(key) {
            return Err(wrong(
                flag,
                "it has no meaning for the simulated engine",
                "leave it out, or say --engine llama",
            ));
        }
    }
    let range = |flag, value: Option<u32>| {
        value
            .map(|value| within(flag, value, 1..=i32::MAX as u32))
            .transpose()
    };
    let max_sequences = range("--max-sequences", raw.max_sequences)?;
    let step_tokens = match (raw.step_tokens, max_sequences) {
        (Some(tokens), Some(sequences)) => Some(step_tokens_of(tokens, sequences)?),
        (tokens, _) => range("--step-tokens", tokens)?,
    };
    Ok(SimSettings {
        profile: profile.to_owned(),
        kv: raw.sim_kv.unwrap_or_default(),
        speed: within("--sim-speed", raw.sim_speed.unwrap_or(1.0), 0.001..=1_000.0)?,
        context: range("--context", raw.context)?,
        max_sequences,
        step_tokens,
    })
}

fn step_tokens_of(tokens: u32, max_sequences: u32) -> Result<u32, ConfigError> {
    if tokens <= max_sequences {
        return Err(wrong(
            "--step-tokens",
            format!("{tokens} tokens a step cannot serve {max_sequences} sequences"),
            "give more than one token for each of --max-sequences, so that prompts advance while all decode",
        ));
    }
    within("--step-tokens", tokens, 1..=MAX_STEP_TOKENS)
}

fn model_id(id: String) -> Result<String, ConfigError> {
    let fits = (1..=256).contains(&id.chars().count());
    if !fits || id.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(wrong(
            "--model-id",
            "it must be 1 to 256 characters without spaces",
            "give the name that clients put in `model`",
        ));
    }
    Ok(id)
}

/// Where a server is, from its address.
fn http(
    raw: &RawEngine,
    data_dir: &Path,
    given: &Given,
) -> Result<HttpEngineSettings, ConfigError> {
    for (key, flag) in [
        ("model", "--model"),
        ("model-id", "--model-id"),
        ("threads", "--threads"),
        ("max-sequences", "--max-sequences"),
        ("step-tokens", "--step-tokens"),
        ("reproducible", "--reproducible"),
        ("sim-speed", "--sim-speed"),
        ("sim-kv", "--sim-kv"),
    ] {
        if given.has(key) {
            return Err(wrong(
                flag,
                "it has no meaning for an engine that is a server of its own",
                "leave it out and set it at the server, or say --engine llama",
            ));
        }
    }
    let context = raw
        .context
        .map(|tokens| within("--context", tokens, 1..=i32::MAX as u32));
    let poll = within(
        "--engine-poll-ms",
        raw.engine_poll_ms.unwrap_or(POLL_MS),
        50..=10_000,
    )?;
    let stall = raw.engine_stall_ms.unwrap_or(STALL_MS);
    let stall = within("--engine-stall-ms", stall, 1_000..=3_600_000)?;
    Ok(HttpEngineSettings {
        authority: authority(&raw.engine)?,
        kind: raw.engine_kind,
        key_file: raw.engine_api_key_file.clone(),
        poll: Duration::from_millis(poll),
        stall: Duration::from_millis(stall),
        context: context.transpose()?,
        kv_folder: kv_folder(raw, data_dir)?,
        inexact: raw.engine_inexact.unwrap_or_default(),
    })
}

/// The folder for KV, where it is to move.
fn kv_folder(raw: &RawEngine, data_dir: &Path) -> Result<Option<PathBuf>, ConfigError> {
    match (raw.engine_kv.unwrap_or_default(), &raw.engine_kv_dir) {
        (EngineKv::Auto, named) => Ok(Some(kv_folder_of(data_dir, named.as_deref()))),
        (EngineKv::Off, None) => Ok(None),
        (EngineKv::Off, Some(_)) => Err(wrong(
            "--engine-kv-dir",
            "it has no meaning while no KV moves",
            "leave it out, or say --engine-kv auto",
        )),
    }
}

/// The folder that a node with this data directory shares with its engine, unless another is named.
pub(crate) fn kv_folder_of(data_dir: &Path, named: Option<&Path>) -> PathBuf {
    named.map_or_else(|| data_dir.join("engine"), Path::to_owned)
}

/// `host:port` of an address without anything behind it.
fn authority(address: &str) -> Result<String, ConfigError> {
    let refuse = |what: &str| {
        wrong(
            "--engine",
            format!("{what} in `{address}`"),
            "give the server's address alone, such as http://127.0.0.1:8000",
        )
    };
    let uri: hyper::Uri = address.parse().map_err(|_| refuse("there is no address"))?;
    if uri.scheme_str() != Some("http") {
        return Err(wrong(
            "--engine",
            "an engine is reached by plain http",
            "put the node on the engine's host, and give http://127.0.0.1:PORT",
        ));
    }
    if uri.path() != "/" || uri.query().is_some() {
        return Err(refuse("there is a path"));
    }
    let authority = uri
        .authority()
        .filter(|authority| !authority.host().is_empty());
    let authority = authority.ok_or_else(|| refuse("there is no host"))?;
    if authority.as_str().contains('@') {
        return Err(refuse("there are credentials (see --engine-api-key-file)"));
    }
    let port = authority.port_u16().unwrap_or(80);
    Ok(format!("{}:{port}", authority.host()))
}

/// Settings that only a server has.
fn refuse_http_settings(raw: &RawEngine) -> Result<(), ConfigError> {
    let given = [
        ("--engine-kind", raw.engine_kind.is_some()),
        ("--engine-api-key-file", raw.engine_api_key_file.is_some()),
        ("--engine-poll-ms", raw.engine_poll_ms.is_some()),
        ("--engine-stall-ms", raw.engine_stall_ms.is_some()),
        ("--engine-kv", raw.engine_kv.is_some()),
        ("--engine-kv-dir", raw.engine_kv_dir.is_some()),
        ("--engine-inexact", raw.engine_inexact.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(wrong(
            flag,
            "it has no meaning for an engine in this process",
            "leave it out, or say --engine http://HOST:PORT",
        )),
        None => Ok(()),
    }
}
