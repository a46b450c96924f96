//! Counters of the control plane, and the round-trip times it measures.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use shoal_gossip::NodeId;

/// Weight of the newest round trip: 1/8, as TCP smooths its own.
const RTT_SHARE: u32 = 8;

/// The counters at one moment, since the start. They only ever rise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlStats {
    /// Questions asked by this node.
    pub asked: u64,
    /// Of those, questions without an answer in time.
    pub unanswered: u64,
    /// Questions answered by this node.
    pub answered: u64,
    /// Questions dropped because too many were being answered.
    pub overrun: u64,
    /// Messages that could not be read, or were too long.
    pub malformed: u64,
    /// Connections refused because no current record names the peer, or at a limit.
    pub refused: u64,
}

/// One counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The live counters.
#[derive(Debug, Default)]
pub(crate) struct ControlCounters {
    pub(crate) asked: Counter,
    pub(crate) unanswered: Counter,
    pub(crate) answered: Counter,
    pub(crate) overrun: Counter,
    pub(crate) malformed: Counter,
    pub(crate) refused: Counter,
    rtt: Mutex<BTreeMap<NodeId, Duration>>,
}

impl ControlCounters {
    pub(crate) fn snapshot(&self) -> ControlStats {
        ControlStats {
            asked: self.asked.get(),
            unanswered: self.unanswered.get(),
            answered: self.answered.get(),
            overrun: self.overrun.get(),
            malformed: self.malformed.get(),
            refused: self.refused.get(),
        }
    }

    pub(crate) fn measured(&self, node: NodeId, rtt: Duration) {
        let mut table = self.rtt.lock().unwrap_or_else(PoisonError::into_inner);
        table
            .entry(node)
            .and_modify(|smooth| *smooth = (*smooth * (RTT_SHARE - 1) + rtt) / RTT_SHARE)
            .or_insert(rtt);
    }

    /// Forgets nodes that are gone, which bounds the table by the view.
    pub(crate) fn forget(&self, node: NodeId) {
        let mut table = self.rtt.lock().unwrap_or_else(PoisonError::into_inner);
        table.remove(&node);
    }

    pub(crate) fn rtt(&self, node: NodeId) -> Option<Duration> {
        let table = self.rtt.lock().unwrap_or_else(PoisonError::into_inner);
        table.get(&node).copied()
    }
}
