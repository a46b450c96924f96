//! The embedded engine keeps the engine contract, with a model of random weights.

use std::num::NonZeroU32;
use std::sync::Arc;

use shoal_gossip::MonotonicClock;
use shoal_node::engine::Engine;
use shoal_node::engine::llama::{self, LlamaConfig};
use shoal_tests::engine_contract::Shape;
use shoal_tests::{engine_contract_tests, tiny_gguf};
use tempfile::TempDir;

fn make(shape: Shape) -> Arc<dyn Engine> {
    let folder = TempDir::new().expect("a folder");
    let nonzero = |value| NonZeroU32::new(value).expect("a shape is above zero");
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write_tiny_gguf(&path).expect("written");
    let config = LlamaConfig {
        context_tokens: nonzero(shape.kv),
        max_sequences: nonzero(shape.slots),
        queue_limit: shape.queue_limit,
        reproducible: !shape.pool,
        ..LlamaConfig::new(path)
    };
    llama::start(&config, Arc::new(MonotonicClock::start())).expect("starts")
}

engine_contract_tests!(make);
