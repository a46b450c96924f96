//! The settings of the engine, in the order of `--help`.

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::engine::remote::{Inexact, ServerKind};
use crate::engine::sim::Travels;

/// Whether KV of a server's requests moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKv {
    /// Where the server gives it away.
    Auto,
    /// Never.
    #[default]
    Off,
}

/// The engine.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Engine")]
#[serde(rename_all = "kebab-case")]
pub struct RawEngine {
    /// What runs the model: `llama` (llama.cpp in this process), the address of a server beside the node such as
    /// `http://127.0.0.1:8000` (vLLM, SGLang, llama-server, or any OpenAI-compatible one), or `sim:<profile>` (simulated, for
    /// tests of the mesh).
    ///
    /// Unit: name or address. Cost: llama computes on the CPU; a server is asked for its load a few times a second; sim takes next to
    /// nothing.
    #[arg(
        long,
        env = "SHOAL_ENGINE",
        value_name = "ENGINE",
        default_value = "llama"
    )]
    pub engine: String,

    /// What kind of server the address in --engine is, if it should not be found out [default: found out].
    ///
    /// Unit: name. Cost: none; openai treats any server as one that tells no load and no token ids.
    #[arg(long, env = "SHOAL_ENGINE_KIND", value_name = "KIND", value_enum)]
    pub engine_kind: Option<ServerKind>,

    /// File with the API key that the server in --engine wants; clients' keys are never sent there [default: none].
    ///
    /// Unit: path. Cost: none.
    #[arg(long, env = "SHOAL_ENGINE_API_KEY_FILE", value_name = "FILE")]
    pub engine_api_key_file: Option<PathBuf>,

    /// Time between two looks at the server in --engine; a look waits 700 ms for its answer [default: 250].
    ///
    /// Unit: milliseconds from 50 to 10000. Cost: its /health and load pages, some milliseconds of a processor for vLLM.
    #[arg(long, env = "SHOAL_ENGINE_POLL_MS", value_name = "MS")]
    pub engine_poll_ms: Option<u64>,

    /// Longest that a stream of the server in --engine may say nothing once it has begun; then it counts as dead [default: 60000].
    ///
    /// Unit: milliseconds, at least 1000. Cost: how long clients of an engine that hangs wait before their request goes elsewhere.
    #[arg(long, env = "SHOAL_ENGINE_STALL_MS", value_name = "MS")]
    pub engine_stall_ms: Option<u64>,

    /// Whether requests of the server in --engine move with their KV: `auto` where it can be had (a vLLM with the arguments of
    /// `shoal vllm-args`, a llama-server with --slot-save-path), `off` by recompute alone [default: off].
    ///
    /// Unit: name. Cost: while a request moves, its KV is in this process and in shared memory as well, a stage at a time.
    #[arg(long, env = "SHOAL_ENGINE_KV", value_name = "HOW", value_enum)]
    pub engine_kv: Option<EngineKv>,

    /// Folder that node and engine share for --engine-kv; a llama-server's --slot-save-path [default: engine in --data-dir].
    ///
    /// Unit: path. Cost: nothing for vLLM (it holds two sockets); for llama-server the KV of each request that moves, written and
    /// removed at once, so a folder in memory is best.
    #[arg(long, env = "SHOAL_ENGINE_KV_DIR", value_name = "DIR")]
    pub engine_kv_dir: Option<PathBuf>,

    /// Whether requests of the server in --engine may go on elsewhere though they draw other tokens there: those with a seed, and with
    /// penalties that the engine forgets. `refuse` pins them to their engine, `allow` lets them go on, counted in
    /// shoal_engine_inexact_total and logged [default: refuse].
    ///
    /// Unit: name. Cost: with `refuse` such a stream ends when its engine dies, and a drain waits for it; with `allow` its output is
    /// not what its seed promises. Must be equal on all nodes between which they are to move.
    #[arg(long, env = "SHOAL_ENGINE_INEXACT", value_name = "HOW", value_enum)]
    pub engine_inexact: Option<Inexact>,

    /// Model file in GGUF format; needed by llama, refused by the others [default: none].
    ///
    /// Unit: path. Cost: memory of the file's size, mapped and shared between processes.
    #[arg(long, env = "SHOAL_MODEL", value_name = "FILE")]
    pub model: Option<PathBuf>,

    /// Name that clients put in `model` [default: the file's name without .gguf; sim: the profile's].
    ///
    /// Unit: text of at most 256 characters. Cost: none; must be equal on all nodes that serve the same weights.
    #[arg(long, env = "SHOAL_MODEL_ID", value_name = "NAME")]
    pub model_id: Option<String>,

    /// KV cache over all sequences [default: 8192; sim: the profile's; a server: what it says].
    ///
    /// Unit: tokens. Cost: memory, taken at start; a token takes layers × KV heads × head size × 4 bytes (f16), half with
    /// --reproducible. For a server it takes nothing, and goes before what it says: a llama-server whose slots share one cache
    /// says it once for each slot.
    #[arg(long, env = "SHOAL_CONTEXT", value_name = "TOKENS")]
    pub context: Option<u32>,

    /// Sequences computed together at most [default: 8; sim: the profile's].
    ///
    /// Unit: sequences. Cost: each one more makes every step longer; with --reproducible each gets an equal share of --context.
    #[arg(long, env = "SHOAL_MAX_SEQUENCES", value_name = "N")]
    pub max_sequences: Option<u32>,

    /// Tokens computed in one step at most, prefill and decode together [default: 64; sim: the profile's].
    ///
    /// Unit: tokens. Cost: more shortens long prefills and lengthens the pause that a prefill puts between two tokens of others.
    #[arg(long, env = "SHOAL_STEP_TOKENS", value_name = "TOKENS")]
    pub step_tokens: Option<u32>,

    /// Threads that compute; llama only [default: cores - 1, at least 1].
    ///
    /// Unit: threads. Cost: they spin while they wait for each other, so more than there are free cores makes all far slower.
    #[arg(long, env = "SHOAL_THREADS", value_name = "N")]
    pub threads: Option<u32>,

    /// Make outputs independent of load and of the node that runs them (split q8_0 KV, fixed prefill grid); sim always is.
    ///
    /// Unit: true or false. Cost: a sequence may use no more than context / max-sequences tokens, and room left by one helps no other.
    #[arg(
        long,
        env = "SHOAL_REPRODUCIBLE",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = false,
        default_missing_value = "true",
        action = ArgAction::Set,
        value_parser = BoolishValueParser::new()
    )]
    pub reproducible: bool,

    /// Size of the blocks in which KV is counted and promised.
    ///
    /// Unit: tokens. Cost: larger wastes half a block a request on average, smaller makes larger numbers and nothing else.
    #[arg(
        long,
        env = "SHOAL_BLOCK_SIZE",
        value_name = "TOKENS",
        default_value_t = 16
    )]
    pub block_size: u32,

    /// Requests that may wait for KV before the node refuses.
    ///
    /// Unit: requests. Cost: each holds its body and prompt ids; a longer queue means longer waits instead of 429.
    #[arg(
        long,
        env = "SHOAL_QUEUE_LIMIT",
        value_name = "N",
        default_value_t = 64
    )]
    pub queue_limit: u32,

    /// How many times faster than its profile the simulated engine runs; sim only [default: 1].
    ///
    /// Unit: factor from 0.001 to 1000. Cost: CPU time in proportion.
    #[arg(long, env = "SHOAL_SIM_SPEED", value_name = "FACTOR")]
    pub sim_speed: Option<f64>,

    /// What of its KV the simulated engine sends when a request moves; sim only [default: digest].
    ///
    /// Unit: name. Cost: digest 16 bytes a token, true-size what the profile's model has, nothing makes the target prefill again.
    #[arg(long, env = "SHOAL_SIM_KV", value_name = "KIND", value_enum)]
    pub sim_kv: Option<Travels>,
}
