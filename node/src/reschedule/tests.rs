use std::time::Duration;

use shoal_gossip::{Epoch, Readiness};

use super::*;
use crate::engine::work::Priority;

const NOW: Timestamp = Timestamp::ZERO;

fn limits() -> RescheduleLimits {
    RescheduleLimits {
        low: Freeness::of_blocks(10),
        high: Freeness::of_blocks(30),
        min_gain: Freeness::of_blocks(2),
        rest: Duration::from_secs(5),
        min_output_left: Tokens(16),
        slots_out: 2,
        bytes_per_second: 1_000,
    }
}

fn load(used: u32, running: u32) -> LoadSummary {
    LoadSummary {
        readiness: Readiness::Ready,
        total: Blocks(100),
        used: Blocks(used),
        running,
        ..LoadSummary::default()
    }
}

fn target(node: u64, used: u32, running: u32) -> Candidate {
    Candidate {
        node: NodeId(node),
        load: load(used, running),
        age: Duration::from_millis(80),
        charged: Blocks::ZERO,
        demand: Blocks(1),
        block_size: BlockSize::DEFAULT,
    }
}

/// A decoding job of so many blocks of 16 tokens.
fn job(serial: u64, blocks: u32) -> JobStatus {
    JobStatus {
        request: RequestId {
            home: NodeId(9),
            serial,
        },
        epoch: Epoch::FIRST,
        model: "m".into(),
        priority: Priority(0),
        phase: JobPhase::Decode,
        prompt: Tokens(blocks * 16 - 1),
        output: Tokens::ZERO,
        computed: Tokens(blocks * 16 - 1),
        max_output: Tokens(100),
        blocks: Blocks(blocks),
        came: NOW,
    }
}

fn waiting(serial: u64, blocks: u32) -> JobStatus {
    JobStatus {
        phase: JobPhase::Waiting,
        computed: Tokens::ZERO,
        blocks: Blocks::ZERO,
        ..job(serial, blocks)
    }
}

struct Case {
    core: Rescheduler,
    own: LoadSummary,
    jobs: Vec<JobStatus>,
    bytes_per_token: u64,
}

impl Case {
    /// A node with 90 of 100 blocks in use by these jobs.
    fn of(jobs: Vec<JobStatus>) -> Self {
        Self {
            core: Rescheduler::new(limits(), NOW),
            own: load(90, 3),
            jobs,
            bytes_per_token: 1,
        }
    }

    fn decide(&mut self, now: Timestamp, first: Candidate) -> Option<u64> {
        self.decide_of(now, (Some(first), None))
            .map(|decision| decision.request.serial)
    }

    fn decide_of(
        &mut self,
        now: Timestamp,
        two: (Option<Candidate>, Option<Candidate>),
    ) -> Option<Decision> {
        let here = Here {
            load: &self.own,
            jobs: &self.jobs,
            block_size: BlockSize::DEFAULT,
            bytes_per_token: ByteCount(self.bytes_per_token),
        };
        self.core.decide(now, here, two)
    }
}

fn later(seconds: u64) -> Timestamp {
    NOW + Duration::from_secs(seconds)
}

#[test]
fn short_and_plenty_are_apart_at_their_edges() {
    let core = Rescheduler::new(limits(), NOW);
    assert!(!core.is_short(&load(90, 1), 0));
    assert!(core.is_short(&load(91, 1), 0));
    assert!(!core.is_short(&load(91, 1), 2), "no slot is free");
    assert!(!core.limits().has_plenty(&load(70, 1)));
    assert!(core.limits().has_plenty(&load(69, 1)));
    let draining = LoadSummary {
        readiness: Readiness::Draining,
        ..load(0, 0)
    };
    assert!(!core.limits().has_plenty(&draining));
}

#[test]
fn a_node_without_a_free_slot_is_short_whatever_blocks_are_free_and_is_no_target() {
    let full = LoadSummary {
        slots_full: true,
        ..load(20, 2)
    };
    let mut case = Case {
        own: full,
        ..Case::of(vec![job(1, 10), job(2, 5)])
    };
    assert!(case.core.is_short(&full, 0));
    assert!(!case.core.limits().has_plenty(&full));
    let refused = Candidate {
        load: full,
        ..target(7, 20, 2)
    };
    assert_eq!(case.decide(NOW, refused), None);
    assert_eq!(case.decide(NOW, target(7, 20, 2)), Some(2));
}

#[test]
fn the_head_of_the_line_makes_a_node_short_and_that_defragments() {
    let core = Rescheduler::new(limits(), NOW);
    let blocked = LoadSummary {
        head_of_line: Blocks(30),
        queued: 1,
        ..load(60, 2)
    };
    assert!(!core.is_short(&load(60, 2), 0));
    assert!(core.is_short(&blocked, 0));
}

#[test]
fn the_lowest_rank_leaves_first_and_then_the_shortest() {
    let low = JobStatus {
        priority: Priority(-1),
        ..job(3, 40)
    };
    let mut case = Case::of(vec![job(1, 20), job(2, 10), low]);
    case.bytes_per_token = 0;
    assert_eq!(case.decide(NOW, target(5, 0, 0)), Some(3));
    assert_eq!(case.decide(NOW, target(5, 0, 0)), Some(2));
    assert_eq!(case.decide(NOW, target(5, 0, 0)), Some(1));
    assert_eq!(case.decide(NOW, target(5, 0, 0)), None, "all of them rest");
    assert_eq!(case.decide(later(5), target(5, 0, 0)), Some(3));
}

#[test]
fn a_waiting_request_goes_before_a_running_one_of_its_rank_since_nothing_is_copied() {
    let mut case = Case::of(vec![job(1, 10), waiting(2, 20)]);
    case.own.head_of_line = Blocks(20);
    case.own.queued = 1;
    assert_eq!(case.decide(NOW, target(5, 0, 0)), Some(2));
}

#[test]
fn what_is_about_to_end_prefills_or_moves_stays() {
    let ending = JobStatus {
        output: Tokens(85),
        ..job(1, 10)
    };
    let phases = [JobPhase::Prefill, JobPhase::Paused, JobPhase::Arriving];
    let mut jobs = vec![ending];
    jobs.extend((2..).zip(phases).map(|(serial, phase)| JobStatus {
        phase,
        ..job(serial, 10)
    }));
    assert_eq!(Case::of(jobs).decide(NOW, target(5, 0, 0)), None);
}

#[test]
fn a_request_leaves_only_where_it_fits_and_only_for_a_gain() {
    let mut case = Case::of(vec![job(1, 20)]);
    assert_eq!(
        case.decide(NOW, target(5, 81, 1)),
        None,
        "19 blocks are free there"
    );
    // It would leave this node with 10 per request and make that one as poor as this one was.
    assert_eq!(case.decide(NOW, target(5, 73, 1)), None);
    assert_eq!(case.decide(NOW, target(5, 40, 1)), Some(1));
}

#[test]
fn the_freer_of_two_is_taken_and_the_first_of_equals() {
    let to = |first, second| {
        Case::of(vec![job(1, 10)])
            .decide_of(NOW, (first, second))
            .map(|decision| decision.to.0)
    };
    assert_eq!(to(Some(target(5, 40, 1)), Some(target(6, 30, 1))), Some(6));
    assert_eq!(to(Some(target(5, 30, 1)), Some(target(6, 30, 1))), Some(5));
    assert_eq!(to(None, Some(target(6, 30, 1))), Some(6));
    assert_eq!(to(None, None), None);
}

#[test]
fn the_byte_budget_bounds_what_leaves_in_a_second_but_never_blocks_a_large_one_for_ever() {
    let mut case = Case::of(vec![job(1, 30), job(2, 31), job(3, 32)]);
    case.bytes_per_token = 2;
    // 958 of the 1,000 bytes go with the first.
    assert_eq!(case.decide(NOW, target(5, 0, 0)), Some(1));
    assert_eq!(case.decide(NOW, target(5, 0, 0)), None);
    assert_eq!(case.decide(later(1), target(5, 0, 0)), Some(2));
    // 1,022 bytes are more than a second's worth; a full bucket lets them go.
    assert_eq!(case.decide(later(2), target(5, 0, 0)), Some(3));
}
