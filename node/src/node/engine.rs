//! Builds the engine that the configuration asks for.

use std::num::NonZeroU32;
use std::sync::Arc;

use shoal_gossip::{BlockSize, Clock, Tokens};

use crate::config::{EngineKind, EngineSettings, HttpEngineSettings, LlamaSettings, SimSettings};
use crate::engine::llama::LlamaConfig;
use crate::engine::remote::RemoteConfig;
use crate::engine::sim::SimConfig;
use crate::engine::{Engine, llama, remote, sim};
use crate::node::StartError;

/// Loads the engine. Takes as long as the model takes to load: call it where blocking is allowed.
pub(super) fn load(
    settings: &EngineSettings,
    clock: Arc<dyn Clock>,
) -> Result<Arc<dyn Engine>, StartError> {
    match &settings.kind {
        EngineKind::Llama(own) => {
            let engine = llama::start(&llama_config(settings, own), clock);
            Ok(engine.map_err(|error| StartError::Model(error.to_string()))?)
        }
        EngineKind::Http(own) => {
            let engine = remote::start(remote_config(settings, own)?, clock);
            Ok(engine.map_err(|error| StartError::Model(error.to_string()))?)
        }
        EngineKind::Sim(own) => {
            let engine = sim::start(&sim_config(settings, own), clock);
            Ok(engine.map_err(|error| StartError::Model(error.to_string()))?)
        }
    }
}

fn llama_config(settings: &EngineSettings, own: &LlamaSettings) -> LlamaConfig {
    let at_least_one = |value| NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN);
    LlamaConfig {
        model_path: own.model.clone(),
        model_id: settings.model_id.clone(),
        context_tokens: at_least_one(own.context),
        max_sequences: at_least_one(own.max_sequences),
        step_tokens: at_least_one(own.step_tokens),
        threads: at_least_one(own.threads),
        block_size: BlockSize::new(settings.block_size),
        queue_limit: queue_limit(settings),
        reproducible: own.reproducible,
    }
}

fn remote_config(
    settings: &EngineSettings,
    own: &HttpEngineSettings,
) -> Result<RemoteConfig, StartError> {
    let key = own.key_file.as_ref().map(|path| {
        let text = std::fs::read_to_string(path)
            .map_err(|error| StartError::Model(format!("{}: {error}", path.display())))?;
        let key = text.trim().to_owned();
        if key.is_empty() {
            let message = format!("{}: it holds no key", path.display());
            return Err(StartError::Model(message));
        }
        Ok(key)
    });
    Ok(RemoteConfig {
        authority: own.authority.clone(),
        kind: own.kind,
        key: key.transpose()?,
        poll: own.poll,
        stall: own.stall,
        capacity: own.context.map(Tokens),
        block_size: BlockSize::new(settings.block_size),
        queue_limit: queue_limit(settings),
        kv_folder: own.kv_folder.clone(),
        inexact: own.inexact,
    })
}

fn sim_config(settings: &EngineSettings, own: &SimSettings) -> SimConfig {
    SimConfig {
        speed: own.speed,
        travels: own.kv,
        model: settings.model_id.clone(),
        block_size: BlockSize::new(settings.block_size),
        kv: own.context.map(Tokens),
        slots: own.max_sequences,
        step_tokens: own.step_tokens,
        queue_limit: queue_limit(settings),
        ..SimConfig::new(&own.profile)
    }
}

fn queue_limit(settings: &EngineSettings) -> u32 {
    u32::try_from(settings.queue_limit).unwrap_or(u32::MAX)
}
