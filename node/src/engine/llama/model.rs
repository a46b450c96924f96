//! Loads a model: check the file, let llama.cpp map it, make its one context, state the facts.

use std::fs::File;
use std::io;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::{KvCacheType, LlamaContextParams};
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_ENABLED;
use sha2::{Digest, Sha256};
use shoal_gossip::{Clock, ModelApi, ModelFacts, Tokens};

use crate::engine::batched::{BatchConfig, BatchedEngine, Executor};
use crate::engine::llama::config::{LlamaConfig, LlamaConfigError, LlamaLayout};
use crate::engine::llama::executor::LlamaExecutor;
use crate::engine::llama::gguf::{self, Gguf, GgufError};
use crate::engine::llama::native;
use crate::engine::llama::vocabulary::LlamaText;
use crate::engine::{Capabilities, EngineError, EngineFacts};

/// Version of the crates llama-cpp-2 and llama-cpp-sys-2, part of the fingerprint: both are pinned
/// in Cargo.toml and a test compares.
const LLAMA_CPP_VERSION: &str = "0.1.160";

/// A loaded model, in the parts that the batched engine is made of.
#[derive(Debug)]
pub struct LlamaParts {
    /// Model, block size, KV blocks and capabilities.
    pub facts: EngineFacts,
    /// How the KV is divided.
    pub layout: LlamaLayout,
    /// Sizes for the batch core.
    pub batch: BatchConfig,
    /// Computes steps; for the engine thread.
    pub executor: LlamaExecutor,
    /// The vocabulary; for all threads.
    pub text: Arc<LlamaText>,
}

/// Why a model was not loaded. Memory that llama.cpp took for it may stay taken: the process is
/// expected to end.
#[derive(Debug, thiserror::Error)]
pub enum LlamaLoadError {
    /// The configuration cannot work. Nothing was opened.
    #[error(transparent)]
    Config(#[from] LlamaConfigError),
    /// There is no such file.
    #[error("the model file {0} does not exist")]
    Missing(PathBuf),
    /// A directory, a socket or the like.
    #[error("{0} is not a file")]
    NotAFile(PathBuf),
    /// The file is not a whole, well-formed GGUF file.
    #[error("the model file {path} {error}")]
    File {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        error: GgufError,
    },
    /// The file is well-formed, but holds a kind of model that this engine does not run.
    #[error("the model file {path} cannot be served: {reason}")]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// llama.cpp could not be started in this process.
    #[error("llama.cpp does not start: {0}")]
    Backend(String),
    /// llama.cpp refused the file.
    #[error("llama.cpp cannot load {path}: {reason}")]
    Refused {
        /// Which file.
        path: PathBuf,
        /// llama.cpp's own words.
        reason: String,
    },
    /// llama.cpp could not make room for KV and computation.
    #[error("llama.cpp cannot make a context of {context_tokens} tokens: {reason}")]
    Context {
        /// KV tokens asked for.
        context_tokens: u32,
        /// llama.cpp's own words.
        reason: String,
    },
    /// The engine around the model did not start.
    #[error(transparent)]
    Engine(EngineError),
}

/// Loads a model. Blocks for the time it takes to read the file once: call it from a thread that
/// may block.
///
/// # Errors
/// See [`LlamaLoadError`].
pub fn load(config: &LlamaConfig) -> Result<LlamaParts, LlamaLoadError> {
    config.check()?;
    let path = config.model_path.as_path();
    let gguf = read_head(path)?;
    let digest = digest(path)?;
    let backend = native::backend().map_err(LlamaLoadError::Backend)?;
    let model = map_model(backend, path)?;
    if model.is_recurrent() || model.is_hybrid() {
        return Err(unsupported(
            path,
            "it keeps a recurrent state, not a plain KV cache",
        ));
    }
    let (context, layout) = make_context(backend, model, config)?;
    let text = Arc::new(LlamaText::new(model, gguf.chat_template.as_deref(), layout));
    let executor = LlamaExecutor::new(context, layout, Arc::clone(&text));
    let batch = layout.batch_config(config);
    let facts = EngineFacts {
        models: vec![ModelFacts {
            id: model_id(config),
            context: batch.context,
            fingerprint: fingerprint(&digest, config, native::build_features()),
            created: modified(path),
            api: ModelApi::Tokens,
        }],
        block_size: batch.block_size,
        total: batch.total,
        capabilities: Capabilities {
            reproducible: config.reproducible,
            resumes: true,
            kv_export: executor.kv_form().is_some(),
        },
    };
    tracing::info!(
        target: "shoal::llama",
        model = facts.models[0].id,
        fingerprint = format_args!("{:016x}", facts.models[0].fingerprint),
        total_tokens = layout.total_tokens.0,
        tokens_per_slot = layout.tokens_per_slot.0,
        slots = layout.slots,
        split = layout.split,
        "model loaded"
    );
    Ok(LlamaParts {
        facts,
        layout,
        batch,
        executor,
        text,
    })
}

/// Loads a model and starts the engine around it. Blocks as [`load`] does.
///
/// # Errors
/// See [`LlamaLoadError`].
pub fn start(
    config: &LlamaConfig,
    clock: Arc<dyn Clock>,
) -> Result<Arc<BatchedEngine>, LlamaLoadError> {
    let parts = load(config)?;
    let executor = parts.executor;
    BatchedEngine::start(
        parts.batch,
        parts.facts,
        move || Ok(executor),
        parts.text,
        clock,
    )
    .map_err(LlamaLoadError::Engine)
}

/// Reads the head of the file and refuses what llama.cpp would crash on or we cannot run.
fn read_head(path: &Path) -> Result<Gguf, LlamaLoadError> {
    let wrong = |error| LlamaLoadError::File {
        path: path.to_owned(),
        error,
    };
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => return Err(LlamaLoadError::NotAFile(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(LlamaLoadError::Missing(path.to_owned()));
        }
        Err(error) => return Err(wrong(error.into())),
    }
    let gguf = gguf::read(path).map_err(wrong)?;
    if gguf.parts > 1 {
        return Err(unsupported(
            path,
            "it is one of several parts; join them with `llama-gguf-split --merge`",
        ));
    }
    if !gguf.causal || gguf.architecture.contains("bert") || gguf.architecture.starts_with("t5") {
        return Err(unsupported(
            path,
            "it does not generate text token by token",
        ));
    }
    match gguf.tokenizer.as_deref() {
        None | Some("none" | "no_vocab") => Err(unsupported(path, "it has no vocabulary")),
        Some(_) => Ok(gguf),
    }
}

fn unsupported(path: &Path, reason: &str) -> LlamaLoadError {
    LlamaLoadError::Unsupported {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Lets llama.cpp map the file.
///
/// The model is never freed: vocabulary and context refer to it from several threads, and an engine
/// lives as long as its process. What it holds is mostly the mapping of the file, which the system
/// may drop; the KV belongs to the context and is freed with the executor.
fn map_model(backend: &LlamaBackend, path: &Path) -> Result<&'static LlamaModel, LlamaLoadError> {
    native::take_errors();
    LlamaModel::load_from_file(backend, path, &LlamaModelParams::default())
        .map(|model| &*Box::leak(Box::new(model)))
        .map_err(|error| LlamaLoadError::Refused {
            path: path.to_owned(),
            reason: reason(&error),
        })
}

/// Makes the model's only context. (llama.cpp writes to the model while it makes one, so two made
/// at once would race.)
fn make_context(
    backend: &LlamaBackend,
    model: &'static LlamaModel,
    config: &LlamaConfig,
) -> Result<(LlamaContext<'static>, LlamaLayout), LlamaLoadError> {
    native::take_errors();
    let context = model
        .new_context(backend, context_params(config))
        .map_err(|error| LlamaLoadError::Context {
            context_tokens: config.context_tokens.get(),
            reason: reason(&error),
        })?;
    let layout = LlamaLayout::new(
        config.reproducible,
        config.max_sequences.get(),
        Tokens(context.n_ctx()),
        Tokens(model.n_ctx_train()),
    );
    Ok((context, layout))
}

/// Why the two layouts look as they do was measured. With a shared pool the order of a sequence's
/// cells depends on what was freed before, and so do the sums of attention. With f16 KV the kernels
/// change with the number of rows. Split, q8_0 and flash attention together gave every request the
/// tokens of its solo run, under any company and any cut of the prefill (weights: Q4_1).
fn context_params(config: &LlamaConfig) -> LlamaContextParams {
    let threads = i32::try_from(config.threads.get()).unwrap_or(1);
    let kv_type = kv_type(config);
    LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(config.context_tokens.get()))
        .with_n_batch(config.step_tokens.get())
        .with_n_ubatch(config.step_tokens.get())
        .with_n_seq_max(config.llama_sequences())
        .with_n_threads(threads)
        .with_n_threads_batch(threads)
        .with_kv_unified(!config.reproducible)
        // Sliding-window layers keep all tokens as well, so that one count of tokens is true for
        // all layers.
        .with_swa_full(true)
        .with_flash_attention_policy(LLAMA_FLASH_ATTN_TYPE_ENABLED)
        .with_type_k(kv_type)
        .with_type_v(kv_type)
}

fn kv_type(config: &LlamaConfig) -> KvCacheType {
    if config.reproducible {
        KvCacheType::Q8_0
    } else {
        KvCacheType::F16
    }
}

/// llama.cpp's own words for an error, if it wrote any.
fn reason(error: &dyn std::error::Error) -> String {
    let logged = native::take_errors();
    if logged.is_empty() {
        error.to_string()
    } else {
        logged
    }
}

/// SHA-256 of the whole file.
fn digest(path: &Path) -> Result<[u8; 32], LlamaLoadError> {
    let hash = || {
        let mut hasher = Sha256::new();
        io::copy(&mut File::open(path)?, &mut hasher)?;
        Ok::<_, io::Error>(hasher.finalize().into())
    };
    hash().map_err(|error| LlamaLoadError::File {
        path: path.to_owned(),
        error: error.into(),
    })
}

/// Names all that decides over tokens and over the form of KV: weights, llama.cpp's version and
/// build, KV type and layout, the prefill grid, the machine's architecture.
///
/// The build counts (an AVX2 and an AVX-512 build were seen to give different tokens), the
/// processor does not: llama.cpp chose its code when it was compiled.
fn fingerprint(digest: &[u8; 32], config: &LlamaConfig, build_features: &str) -> u64 {
    let text = format!(
        "{LLAMA_CPP_VERSION}|{}|{build_features}|{:?}|split={}|flash|grid={:?}",
        std::env::consts::ARCH,
        kv_type(config),
        config.reproducible,
        config.prefill_grid(),
    );
    let hash = Sha256::new()
        .chain_update(digest)
        .chain_update(text)
        .finalize();
    hash.iter()
        .take(8)
        .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

fn model_id(config: &LlamaConfig) -> String {
    config.model_id.clone().unwrap_or_else(|| {
        let stem = config.model_path.file_stem().unwrap_or_default();
        stem.to_string_lossy().into_owned()
    })
}

/// When the file was last written, in Unix seconds; zero when the system does not say.
fn modified(path: &Path) -> u64 {
    std::fs::metadata(path)
        .and_then(|metadata| metadata.modified())
        .ok()
        .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok())
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_names_the_version_that_is_built() {
        let manifest = include_str!("../../../../Cargo.toml");
        for name in ["llama-cpp-2", "llama-cpp-sys-2"] {
            let pinned = format!("{name} = {{ version = \"={LLAMA_CPP_VERSION}\"");
            assert!(manifest.contains(&pinned), "{pinned}");
        }
    }

    #[test]
    fn the_fingerprint_changes_with_all_that_decides_over_tokens() {
        let shared = LlamaConfig::new("model.gguf");
        let reproducible = LlamaConfig {
            reproducible: true,
            ..shared.clone()
        };
        let other_grid = LlamaConfig {
            step_tokens: NonZeroU32::MIN.saturating_add(99),
            ..reproducible.clone()
        };
        let mut all = vec![
            fingerprint(&[1; 32], &shared, "AVX2 = 1"),
            fingerprint(&[2; 32], &shared, "AVX2 = 1"),
            fingerprint(&[1; 32], &shared, "AVX512 = 1"),
            fingerprint(&[1; 32], &reproducible, "AVX2 = 1"),
            fingerprint(&[1; 32], &other_grid, "AVX2 = 1"),
        ];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 5);
        // Neither the number of threads nor the name changes tokens or the form of KV.
        let more_threads = LlamaConfig {
            threads: NonZeroU32::MIN.saturating_add(1),
            model_id: Some("other".to_owned()),
            ..shared.clone()
        };
        assert_eq!(
            fingerprint(&[1; 32], &shared, "AVX2 = 1"),
            fingerprint(&[1; 32], &more_threads, "AVX2 = 1")
        );
    }

    #[test]
    fn a_model_is_named_by_the_operator_else_by_its_file() {
        let mut config = LlamaConfig::new("/models/Some-1B.Q4_1.gguf");
        assert_eq!(model_id(&config), "Some-1B.Q4_1");
        config.model_id = Some("mine".to_owned());
        assert_eq!(model_id(&config), "mine");
    }
}
