//! This node's own load: the engine's numbers, stamped so that any two of them can be ordered.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use shoal_gossip::{Incarnation, LoadSummary, Readiness};

use crate::engine::Engine;

/// Makes load summaries. One per node: every summary it sends, on whatever plane, comes from here.
#[derive(Debug)]
pub struct LoadSource {
    engine: Arc<dyn Engine>,
    incarnation: Incarnation,
    draining: AtomicBool,
    last_seq: Mutex<u64>,
}

impl LoadSource {
    /// Of this engine, in this life of the node.
    pub fn new(engine: Arc<dyn Engine>, incarnation: Incarnation) -> Self {
        Self {
            engine,
            incarnation,
            draining: AtomicBool::new(false),
            last_seq: Mutex::new(0),
        }
    }

    /// The load now. Reading and numbering are one step, so a higher number is never older news.
    pub fn summary(&self) -> LoadSummary {
        let mut last_seq = self.last_seq.lock().unwrap_or_else(PoisonError::into_inner);
        let mut load = self.engine.load();
        *last_seq += 1;
        load.seq = *last_seq;
        load.incarnation = self.incarnation;
        if self.is_draining() {
            load.readiness = Readiness::Draining;
        }
        load
    }

    /// From now on the node says that it takes nothing new.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether the node takes nothing new.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}
