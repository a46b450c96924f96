//! Freeness: KV headroom per request, in thousandths of a block, so that scores are integers.

use std::fmt;

use serde::Serialize;
use shoal_gossip::{Blocks, LoadSummary, Readiness};

/// KV blocks left per request, in thousandths. May be negative: demand beyond what the node has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Freeness(i64);

impl Freeness {
    /// Of a node that takes nothing more.
    pub const LEAST: Self = Self(i64::MIN);
    /// Of an empty node, where moving work is concerned.
    pub const MOST: Self = Self(i64::MAX);

    /// `blocks` left per request.
    pub const fn of_blocks(blocks: i64) -> Self {
        Self(blocks.saturating_mul(1_000))
    }

    /// Blocks left per request, for people; infinite at the two ends.
    pub fn blocks(self) -> f64 {
        match self {
            Self::LEAST => f64::NEG_INFINITY,
            Self::MOST => f64::INFINITY,
            #[expect(clippy::cast_precision_loss, reason = "for display only")]
            Self(thousandths) => thousandths as f64 / 1_000.0,
        }
    }

    /// So much more.
    #[must_use]
    pub fn plus(self, more: Self) -> Self {
        Self(self.0.saturating_add(more.0))
    }

    fn per_request(headroom: i64, requests: u32) -> Self {
        Self(
            headroom
                .saturating_mul(1_000)
                .div_euclid(i64::from(requests.max(1))),
        )
    }

    /// Headroom for one more request (design §4.1, after Llumnix OSDI'24 Algorithm 1):
    /// `F_d = (total − used − reserved − Σ demand(queued) − charged) / max(1, running + queued)`,
    /// where free blocks count for nothing while all slots are taken.
    ///
    /// `charged` is what the asking node has offered there and `load` cannot contain yet.
    pub fn for_dispatch(load: &LoadSummary, charged: Blocks) -> Self {
        match load.readiness {
            Readiness::Ready => {}
            Readiness::Starting | Readiness::Draining | Readiness::Failed => return Self::LEAST,
        }
        let headroom = left(load) - signed(load.queued_demand) - signed(charged);
        Self::per_request(headroom, load.running.saturating_add(load.queued))
    }

    /// Headroom of the requests that run there already:
    /// `F_m = (total − used − reserved − demand(head of line)) / max(1, running)`, with the slots as above; empty is
    /// [`Self::MOST`].
    pub fn for_migration(load: &LoadSummary) -> Self {
        match load.readiness {
            Readiness::Ready => {}
            Readiness::Starting | Readiness::Draining | Readiness::Failed => return Self::LEAST,
        }
        if load.running == 0 && load.queued == 0 && load.reserved == Blocks::ZERO {
            return Self::MOST;
        }
        let headroom = left(load) - signed(load.head_of_line);
        Self::per_request(headroom, load.running)
    }
}

impl fmt::Debug for Freeness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Freeness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1}", self.blocks())
    }
}

/// Blocks that are left for use, or lack: figures from elsewhere may name more than there are.
fn left(load: &LoadSummary) -> i64 {
    let left = signed(load.total) - signed(load.used) - signed(load.reserved);
    if load.slots_full { left.min(0) } else { left }
}

fn signed(blocks: Blocks) -> i64 {
    i64::from(blocks.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(used: u32, running: u32, queued: u32) -> LoadSummary {
        LoadSummary {
            readiness: Readiness::Ready,
            total: Blocks(100),
            used: Blocks(used),
            running,
            queued,
            ..LoadSummary::default()
        }
    }

    #[test]
    fn dispatch_freeness_counts_queue_reservations_and_charges() {
        let busy = LoadSummary {
            reserved: Blocks(10),
            queued_demand: Blocks(5),
            ..load(60, 4, 1)
        };
        assert_eq!(
            Freeness::for_dispatch(&busy, Blocks(5)),
            Freeness::of_blocks(4)
        );
        assert_eq!(
            Freeness::for_dispatch(&load(0, 0, 0), Blocks::ZERO),
            Freeness::of_blocks(100)
        );
    }

    #[test]
    fn more_demand_than_blocks_is_negative_and_worse_the_more_it_is() {
        let over = LoadSummary {
            queued_demand: Blocks(50),
            ..load(90, 1, 1)
        };
        assert_eq!(
            Freeness::for_dispatch(&over, Blocks::ZERO),
            Freeness::of_blocks(-20)
        );
        assert!(
            Freeness::for_dispatch(&over, Blocks(1)) < Freeness::for_dispatch(&over, Blocks::ZERO)
        );
    }

    #[test]
    fn a_node_that_takes_nothing_is_below_every_node_that_does() {
        for readiness in [Readiness::Starting, Readiness::Draining, Readiness::Failed] {
            let load = LoadSummary {
                readiness,
                ..load(0, 0, 0)
            };
            assert_eq!(Freeness::for_dispatch(&load, Blocks::ZERO), Freeness::LEAST);
            assert_eq!(Freeness::for_migration(&load), Freeness::LEAST);
        }
    }

    #[test]
    fn migration_freeness_sees_the_head_of_line_and_calls_an_empty_node_freest() {
        let blocked = LoadSummary {
            head_of_line: Blocks(30),
            ..load(60, 2, 1)
        };
        assert_eq!(Freeness::for_migration(&blocked), Freeness::of_blocks(5));
        assert_eq!(Freeness::for_migration(&load(0, 0, 0)), Freeness::MOST);
    }

    #[test]
    fn free_blocks_are_no_headroom_while_all_slots_are_taken() {
        let full = LoadSummary {
            slots_full: true,
            ..load(20, 4, 0)
        };
        let waits = LoadSummary {
            queued: 1,
            queued_demand: Blocks(10),
            head_of_line: Blocks(10),
            ..full
        };
        let dispatch = |load| Freeness::for_dispatch(load, Blocks::ZERO);
        assert_eq!(dispatch(&full), Freeness::of_blocks(0));
        assert_eq!(dispatch(&waits), Freeness::of_blocks(-2));
        assert_eq!(Freeness::for_migration(&full), Freeness::of_blocks(0));
        assert!(Freeness::for_migration(&waits) < Freeness::for_migration(&full));
    }

    #[test]
    fn hostile_numbers_do_not_overflow() {
        let absurd = LoadSummary {
            readiness: Readiness::Ready,
            used: Blocks(u32::MAX),
            reserved: Blocks(u32::MAX),
            queued_demand: Blocks(u32::MAX),
            running: u32::MAX,
            queued: u32::MAX,
            ..LoadSummary::default()
        };
        assert!(Freeness::for_dispatch(&absurd, Blocks(u32::MAX)) < Freeness::of_blocks(0));
    }
}
