//! From settings as written to a configuration that holds: every relation, in one place.
//!
//! Pure: what the process is surrounded by comes in as a value.

mod mesh;
mod moves;

use std::env;
use std::fmt::Display;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use tracing_subscriber::EnvFilter;

use crate::config::layers::Given;
use crate::config::raw::{RawBasics, RawDispatch, RawEngine, RawHttp, RawMesh};
use crate::config::{
    ConfigError, DispatchSettings, EngineKind, EngineSettings, GossipSettings, HttpSettings,
    LlamaSettings, LogSettings, MAX_BODY_BYTES, NodeConfig, RawNode, ShutdownSettings, SimSettings,
    TlsFiles,
};
use crate::engine::llama::{MAX_CONTEXT_TOKENS, MAX_STEP_TOKENS};
use crate::mesh::messages::MAX_EXCLUDED;

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

/// Gossip rounds that must fit into the age bound. A load needs about two rounds to arrive, and one
/// lost datagram costs one more; with fewer than four, nodes would drop out of the view at random.
const ROUNDS_IN_VIEW_AGE: u64 = 4;

/// What the process is surrounded by, as far as the configuration depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Cores this process may use; 0 when unknown.
    pub cores: usize,
    /// `XDG_DATA_HOME`, or `HOME/.local/share`; `None` when neither is set.
    pub data_home: Option<PathBuf>,
    /// `SHOAL_CLUSTER_KEY`.
    pub cluster_key: Option<String>,
    /// `RUST_LOG`.
    pub rust_log: Option<String>,
    /// Names of all variables that start with `SHOAL_`.
    pub variables: Vec<String>,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process() -> Self {
        let path = |name| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let text = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let mut variables: Vec<String> = env::vars_os()
            .filter_map(|(name, _)| name.into_string().ok())
            .filter(|name| name.starts_with("SHOAL_"))
            .collect();
        variables.sort();
        Self {
            cores: thread::available_parallelism().map_or(0, usize::from),
            data_home: path("XDG_DATA_HOME")
                .or_else(|| path("HOME").map(|home| home.join(".local/share"))),
            cluster_key: text("SHOAL_CLUSTER_KEY"),
            rust_log: text("RUST_LOG"),
            variables,
        }
    }
}

/// Checks every value and every relation.
pub(super) fn check(
    raw: RawNode,
    given: &Given,
    surroundings: &Surroundings,
) -> Result<NodeConfig, ConfigError> {
    let RawNode {
        basics,
        engine,
        mesh,
        dispatch,
        moves,
        http,
    } = raw;
    let data_dir = data_dir(&basics, surroundings)?;
    let shutdown = ShutdownSettings {
        deadline: millis(
            "--shutdown-deadline-ms",
            basics.shutdown_deadline_ms,
            0..=3_600_000,
        )?,
    };
    let log = log(&basics, given, surroundings)?;
    let listen = mesh::listen_address(&basics.listen)?;
    let gossip = gossip(&mesh)?;
    let mut warnings = Vec::new();
    let dispatch = self::dispatch(&dispatch, &gossip)?;
    let moves = moves::check(&moves)?;
    let engine = self::engine(engine, given, surroundings)?;
    let mesh = mesh::check(mesh, &basics, listen, surroundings, &mut warnings)?;
    let http = self::http(http, listen)?;
    if http.api_key_file.is_none() && !listen.is_loopback() {
        warnings.push(format!(
            "clients need no API key: everyone who reaches {} may use this mesh; name keys with --api-key-file",
            http.listen
        ));
    }
    Ok(NodeConfig {
        data_dir,
        http,
        mesh,
        gossip,
        engine,
        dispatch,
        moves,
        shutdown,
        log,
        warnings,
    })
}

fn data_dir(basics: &RawBasics, surroundings: &Surroundings) -> Result<PathBuf, ConfigError> {
    if let Some(named) = &basics.data_dir {
        return Ok(named.clone());
    }
    match &surroundings.data_home {
        Some(home) => Ok(home.join("shoal")),
        None => Err(wrong(
            "--data-dir",
            "there is no home directory to put the identity in",
            "name a directory that survives restarts",
        )),
    }
}

fn log(
    basics: &RawBasics,
    given: &Given,
    surroundings: &Surroundings,
) -> Result<LogSettings, ConfigError> {
    let inherited = surroundings.rust_log.clone().filter(|_| !given.has("log"));
    let filter = inherited.unwrap_or_else(|| basics.log.clone());
    if let Err(error) = EnvFilter::try_new(&filter) {
        return Err(wrong(
            "--log",
            format!("`{filter}` is not a filter: {error}"),
            "give a level (error, warn, info, debug, trace) or pairs such as \
             `info,shoal_node=debug`; it may also come from RUST_LOG",
        ));
    }
    Ok(LogSettings {
        filter,
        format: basics.log_format,
    })
}

fn gossip(raw: &RawMesh) -> Result<GossipSettings, ConfigError> {
    Ok(GossipSettings {
        interval: millis("--gossip-interval-ms", raw.gossip_interval_ms, 50..=10_000)?,
        phi: within("--phi", raw.phi, 1.0..=32.0)?,
    })
}

fn dispatch(raw: &RawDispatch, gossip: &GossipSettings) -> Result<DispatchSettings, ConfigError> {
    let settings = DispatchSettings {
        policy: raw.policy,
        max_view_age: millis("--max-view-age-ms", raw.max_view_age_ms, 200..=600_000)?,
        redirect_below: within("--redirect-below", raw.redirect_below, 0..=1_000_000)?,
        offer_timeout: millis("--offer-timeout-ms", raw.offer_timeout_ms, 10..=60_000)?,
        lease: millis("--lease-ms", raw.lease_ms, 20..=600_000)?,
        // An offer names the nodes that were tried, and has room for so many.
        max_retries: within("--max-retries", raw.max_retries, 0..=MAX_EXCLUDED as u8 - 1)?,
    };
    let rounds = gossip.interval * ROUNDS_IN_VIEW_AGE as u32;
    if settings.max_view_age < rounds {
        return Err(wrong(
            "--max-view-age-ms",
            format!(
                "{} ms is less than {ROUNDS_IN_VIEW_AGE} gossip intervals of {} ms, so live nodes would drop out of the view",
                raw.max_view_age_ms,
                gossip.interval.as_millis()
            ),
            format!("give at least {}", rounds.as_millis()),
        ));
    }
    if settings.lease < settings.offer_timeout * 2 {
        return Err(wrong(
            "--lease-ms",
            format!(
                "{} ms is less than twice the offer timeout of {} ms, so a promise could end before the request comes",
                raw.lease_ms, raw.offer_timeout_ms
            ),
            format!("give at least {}", raw.offer_timeout_ms.saturating_mul(2)),
        ));
    }
    Ok(settings)
}

fn engine(
    raw: RawEngine,
    given: &Given,
    surroundings: &Surroundings,
) -> Result<EngineSettings, ConfigError> {
    let kind = match raw.engine.split_once(':') {
        None if raw.engine == "llama" => EngineKind::Llama(llama(&raw, surroundings)?),
        Some(("sim", profile)) if !profile.is_empty() => {
            EngineKind::Sim(sim(&raw, profile, given)?)
        }
        _ => {
            return Err(wrong(
                "--engine",
                format!("there is no engine `{}`", raw.engine),
                "say `llama`, or `sim:` and a profile such as `sim:a10/llama-2-7b`",
            ));
        }
    };
    let context = match &kind {
        EngineKind::Llama(llama) => Some(llama.context),
        EngineKind::Sim(sim) => sim.context,
    };
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

fn http(raw: RawHttp, listen: std::net::IpAddr) -> Result<HttpSettings, ConfigError> {
    let tls = match (raw.tls_cert, raw.tls_key) {
        (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
        (None, None) => None,
        (Some(_), None) => {
            return Err(wrong(
                "--tls-key",
                "a certificate without its key",
                "name the private key of --tls-cert",
            ));
        }
        (None, Some(_)) => {
            return Err(wrong(
                "--tls-cert",
                "a key without its certificate",
                "name the certificate chain of --tls-key",
            ));
        }
    };
    let max_body = within(
        "--max-body-bytes",
        raw.max_body_bytes,
        1_024..=MAX_BODY_BYTES,
    )?;
    Ok(HttpSettings {
        listen: (listen, raw.http_port).into(),
        api_key_file: raw.api_key_file,
        tls,
        max_body_bytes: usize::try_from(max_body).unwrap_or(usize::MAX),
        max_requests: within("--max-requests", raw.max_requests, 1..=65_536)? as usize,
        header_timeout: millis("--header-timeout-ms", raw.header_timeout_ms, 100..=600_000)?,
        stall_timeout: millis(
            "--stall-timeout-ms",
            raw.stall_timeout_ms,
            1_000..=3_600_000,
        )?,
    })
}

/// Builds the error of one setting.
fn wrong(key: &'static str, wrong: impl Into<String>, remedy: impl Into<String>) -> ConfigError {
    ConfigError::Setting {
        key,
        wrong: wrong.into(),
        remedy: remedy.into(),
    }
}

/// Lets through what lies between two bounds.
fn within<T: PartialOrd + Display + Copy>(
    key: &'static str,
    value: T,
    bounds: std::ops::RangeInclusive<T>,
) -> Result<T, ConfigError> {
    if bounds.contains(&value) {
        return Ok(value);
    }
    Err(wrong(
        key,
        format!("{value} is out of bounds"),
        format!("give a value from {} to {}", bounds.start(), bounds.end()),
    ))
}

fn millis(
    key: &'static str,
    value: u64,
    bounds: std::ops::RangeInclusive<u64>,
) -> Result<Duration, ConfigError> {
    within(key, value, bounds).map(Duration::from_millis)
}

#[cfg(test)]
mod tests;
