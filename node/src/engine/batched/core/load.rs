//! What the core says of its load.

use std::time::Duration;

use shoal_gossip::{Blocks, Incarnation, LoadBasis, LoadSummary, Tokens};

use super::Batcher;
use super::sequence::Sequence;

/// Weight of the newest step in the smoothed step time: 1/8, as TCP smooths its round-trip time.
/// About 20 steps forget the past.
const STEP_TIME_SHARE: u32 = 8;

impl Batcher {
    /// Its load now. `incarnation` and `seq` are zero: the node fills them in.
    pub fn load(&self) -> LoadSummary {
        let queued = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
        let running = self.running.len() + self.aside.len();
        let step_time = self.step_time.unwrap_or_default();
        LoadSummary {
            basis: LoadBasis::Exact,
            incarnation: Incarnation::default(),
            seq: 0,
            readiness: self.readiness,
            total: self.config.total,
            used: self.used,
            reserved: self.reserved,
            queued_demand: self.waiting.demand(),
            head_of_line: self
                .first_waiting()
                .map_or(Blocks::ZERO, |(_, _, demand)| demand),
            running: u32::try_from(running).unwrap_or(u32::MAX),
            queued,
            queue_room: self.queue_room(false),
            prefill_backlog: self.prefill_backlog(),
            step_time_us: u32::try_from(step_time.as_micros()).unwrap_or(u32::MAX),
            slots_full: !self.has_slot(),
        }
    }

    fn prefill_backlog(&self) -> Tokens {
        let started = self.running.values().chain(self.aside.values());
        let backlogs = started.filter_map(|key| self.sequences.get(key));
        self.waiting.backlog() + backlogs.map(Sequence::backlog).sum()
    }

    pub(super) fn note_step(&mut self, took: Duration) {
        self.step_time = Some(match self.step_time {
            None => took,
            Some(smooth) => (smooth * (STEP_TIME_SHARE - 1) + took) / STEP_TIME_SHARE,
        });
    }
}
