//! The rules of the core, one by one.

use std::time::Duration;

use shoal_gossip::{BlockSize, Blocks, Epoch, NodeId, Readiness, RequestId, Timestamp, Tokens};
use shoal_migrate::CopyMode;

use super::*;

mod order;

pub(super) fn config(total: u32) -> BatchConfig {
    BatchConfig {
        block_size: BlockSize::DEFAULT,
        total: Blocks(total),
        slots: 4,
        layout: Layout::Pool,
        step_tokens: 64,
        prefill_grid: None,
        queue_limit: 4,
        watermark_permille: 0,
        context: Tokens(total * 16),
    }
}

pub(super) fn request(serial: u64) -> RequestId {
    RequestId {
        home: NodeId(1),
        serial,
    }
}

pub(super) fn spec(serial: u64, prompt_len: u32, max_tokens: u32) -> SeqSpec {
    SeqSpec {
        request: request(serial),
        epoch: Epoch::FIRST,
        prompt_len,
        generated_len: 0,
        max_tokens,
        priority: Priority(0),
        reservation: None,
    }
}

const NOW: Timestamp = Timestamp::ZERO;
const LEASE: Duration = Duration::from_secs(1);

fn ask(demand: u32) -> ReserveAsk {
    ReserveAsk {
        demand: Blocks(demand),
        lease: LEASE,
        at_once: false,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    }
}

fn batcher(config: BatchConfig) -> Batcher {
    Batcher::new(config).expect("the sizes fit together")
}

/// Plans, applies, and gives back (slot, position, tokens, sampled index) of each item.
fn step(core: &mut Batcher) -> Vec<(u32, u32, u32, Option<u32>)> {
    let plan = core.plan(NOW);
    for drawn in core.applied(&plan, Duration::from_millis(10)) {
        if drawn.last {
            core.remove(drawn.key);
        }
    }
    core.audit();
    plan.items
        .iter()
        .map(|item| (item.slot.0, item.position, item.tokens, item.sample))
        .collect()
}

#[test]
fn a_prompt_is_prefilled_in_chunks_and_then_decodes_a_token_a_step() {
    let mut core = batcher(config(100));
    core.submit(NOW, spec(1, 100, 3)).expect("fits");
    assert_eq!(core.load().reserved, Blocks(7));
    assert_eq!(core.load().prefill_backlog, Tokens(100));
    assert_eq!(step(&mut core), [(0, 0, 64, None)]);
    assert_eq!(core.load().used, Blocks(7));
    assert_eq!(step(&mut core), [(0, 64, 36, Some(0))]);
    assert_eq!(step(&mut core), [(0, 100, 1, Some(1))]);
    assert_eq!(step(&mut core), [(0, 101, 1, Some(2))]);
    assert!(core.is_empty());
    assert_eq!(core.load().used, Blocks::ZERO);
    assert_eq!(step(&mut core), []);
}

#[test]
fn decoding_comes_first_and_prompts_get_what_is_left_of_the_step() {
    let mut core = batcher(config(100));
    core.submit(NOW, spec(1, 10, 50)).expect("fits");
    assert_eq!(step(&mut core), [(0, 0, 10, Some(0))]);
    core.submit(NOW, spec(2, 200, 50)).expect("fits");
    core.submit(NOW, spec(3, 30, 50)).expect("fits");
    assert_eq!(step(&mut core), [(0, 10, 1, Some(1)), (1, 0, 63, None)]);
    assert_eq!(step(&mut core), [(0, 11, 1, Some(2)), (1, 63, 63, None)]);
    step(&mut core);
    assert_eq!(
        step(&mut core),
        [
            (0, 13, 1, Some(4)),
            (1, 189, 11, Some(0)),
            (2, 0, 30, Some(0))
        ]
    );
}

#[test]
fn a_grid_cuts_every_prompt_at_the_same_places_whatever_else_runs() {
    let with_grid = BatchConfig {
        prefill_grid: Some(24),
        ..config(100)
    };
    let mut alone = batcher(with_grid.clone());
    alone.submit(NOW, spec(1, 60, 2)).expect("fits");
    let cuts = [(0, 0, 24, None), (0, 24, 24, None), (0, 48, 12, Some(0))];
    assert_eq!([(); 3].map(|()| step(&mut alone)).concat(), cuts);

    let mut loaded = batcher(with_grid);
    for serial in 1..=4 {
        loaded.submit(NOW, spec(serial, 60, 2)).expect("fits");
    }
    let mut seen = vec![Vec::new(); 4];
    for _ in 0..20 {
        for (slot, position, tokens, sample) in step(&mut loaded) {
            seen[slot as usize].push((0, position, tokens, sample));
        }
    }
    for of_one in seen {
        assert_eq!(of_one[..3], cuts);
    }
}

#[test]
fn a_resumed_request_is_cut_at_the_end_of_its_prompt_and_goes_on_with_the_next_index() {
    let mut core = batcher(BatchConfig {
        prefill_grid: Some(24),
        ..config(100)
    });
    let resumed = SeqSpec {
        generated_len: 20,
        ..spec(1, 30, 40)
    };
    core.submit(NOW, resumed).expect("fits");
    assert_eq!(step(&mut core), [(0, 0, 24, None)]);
    assert_eq!(step(&mut core), [(0, 24, 6, None)]);
    assert_eq!(step(&mut core), [(0, 30, 18, None)]);
    assert_eq!(step(&mut core), [(0, 48, 2, Some(20))]);
    assert_eq!(step(&mut core), [(0, 50, 1, Some(21))]);
}

#[test]
fn the_newest_is_preempted_when_blocks_run_out_and_comes_back_with_its_output() {
    let mut core = batcher(config(8));
    core.submit(NOW, spec(1, 47, 60)).expect("fits");
    core.submit(NOW, spec(2, 47, 60)).expect("fits");
    let newest = core.find(request(2)).expect("is here").0;
    let mut plans = Vec::new();
    while !core.is_empty() {
        let plan = core.plan(NOW);
        for drawn in core.applied(&plan, LEASE) {
            plans.push((drawn.key, drawn.index));
            if drawn.last {
                core.remove(drawn.key);
            }
        }
        core.audit();
        assert!(plan.preempted.iter().all(|key| *key == newest));
        assert!(core.load().used <= Blocks(8));
    }
    for key in [newest, SeqKey(newest.0 - 1)] {
        let of_one: Vec<u32> = plans.iter().filter(|p| p.0 == key).map(|p| p.1).collect();
        assert_eq!(of_one, (0..60).collect::<Vec<_>>());
    }
}

#[test]
fn a_lower_rank_is_preempted_before_a_newer_one_and_a_paused_one_before_all() {
    let run = |paused: bool| {
        let mut core = batcher(config(9));
        let low = SeqSpec {
            priority: Priority(-1),
            ..spec(1, 47, 60)
        };
        let low = core.submit(NOW, low).expect("fits");
        let old = core.submit(NOW, spec(2, 47, 60)).expect("fits");
        core.submit(NOW, spec(3, 47, 60)).expect("fits");
        while core.find(request(3)).is_some() {
            let plan = core.plan(NOW);
            core.applied(&plan, LEASE);
            if paused {
                core.set_paused(old, true);
            }
            if let Some(victim) = plan.preempted.first() {
                return (*victim, low, old);
            }
        }
        panic!("nobody was preempted");
    };
    let (victim, low, _) = run(false);
    assert_eq!(victim, low);
    let (victim, _, old) = run(true);
    assert_eq!(victim, old);
}

#[test]
fn a_paused_sequence_keeps_its_blocks_and_takes_no_step() {
    let mut core = batcher(config(100));
    let key = core.submit(NOW, spec(1, 10, 5)).expect("fits");
    step(&mut core);
    core.set_paused(key, true);
    assert_eq!(step(&mut core), []);
    assert_eq!(core.load().used, Blocks(1));
    core.set_paused(key, false);
    assert_eq!(step(&mut core), [(0, 10, 1, Some(1))]);
}

#[test]
fn room_is_set_aside_when_it_is_free_and_a_place_is_promised_when_not() {
    let mut core = batcher(config(10));
    let held = core.reserve(NOW, ask(6)).expect("free");
    assert_eq!((core.load().reserved, core.load().queued), (Blocks(6), 0));
    let promised = core.reserve(NOW, ask(6)).expect("queue");
    let load = core.load();
    assert_eq!(
        (load.reserved, load.queued, load.queued_demand),
        (Blocks(6), 1, Blocks(6))
    );
    assert_eq!((load.head_of_line, load.queue_room), (Blocks(6), 3));
    // Nobody overtakes a promise, even if there is room for a small one.
    let small = core.reserve(NOW, ask(1)).expect("queue");
    assert_eq!(core.load().queued, 2);
    core.release(held);
    core.plan(NOW);
    assert_eq!((core.load().reserved, core.load().queued), (Blocks(7), 0));
    core.release(promised);
    core.release(small);
    core.release(small);
    assert_eq!(core.free(), Blocks(10));
    core.audit();
}

#[test]
fn a_promise_is_refused_when_it_can_never_be_kept_or_the_queue_is_full() {
    let mut core = batcher(config(10));
    assert_eq!(core.reserve(NOW, ask(11)), Err(ReserveRefusal::NeverFits));
    for _ in 0..5 {
        core.reserve(NOW, ask(10)).expect("room or queue");
    }
    assert_eq!(core.reserve(NOW, ask(1)), Err(ReserveRefusal::QueueFull));
    assert_eq!(
        core.submit(NOW, spec(1, 1, 1)),
        Err(SubmitRefusal::QueueFull)
    );
    core.set_readiness(Readiness::Draining);
    assert_eq!(core.reserve(NOW, ask(1)), Err(ReserveRefusal::NotReady));
}

#[test]
fn a_lease_that_ends_frees_its_room_and_deadline_says_when() {
    let mut core = batcher(config(10));
    let id = core.reserve(NOW, ask(10)).expect("free");
    assert_eq!(core.deadline(), Some(NOW + LEASE));
    core.expire(NOW + LEASE / 2);
    assert_eq!(core.load().reserved, Blocks(10));
    core.expire(NOW + LEASE);
    assert_eq!((core.free(), core.deadline()), (Blocks(10), None));
    // The late job is treated like one without a promise.
    let late = SeqSpec {
        reservation: Some(id),
        ..spec(1, 10, 5)
    };
    assert!(core.submit(NOW + LEASE, late).is_ok());
}

#[test]
fn a_promise_is_used_by_its_job_even_when_the_queue_is_full_or_the_node_drains() {
    let mut core = batcher(config(10));
    let held = core.reserve(NOW, ask(10)).expect("free");
    let places: Vec<_> = (0..4)
        .map(|_| core.reserve(NOW, ask(10)).expect("queue"))
        .collect();
    core.set_readiness(Readiness::Draining);
    let using = |id, serial| SeqSpec {
        reservation: Some(id),
        ..spec(serial, 100, 5)
    };
    core.submit(NOW, using(places[0], 1)).expect("promised");
    core.submit(NOW, using(held, 2)).expect("promised");
    assert_eq!(
        core.submit(NOW, spec(3, 1, 1)),
        Err(SubmitRefusal::NotReady)
    );
    assert_eq!(step(&mut core), [(0, 0, 64, None)]);
    let load = core.load();
    assert_eq!(
        (load.running, load.queued, load.reserved),
        (1, 4, Blocks::ZERO)
    );
}

#[test]
fn a_job_larger_than_its_promise_waits_when_the_rest_is_not_free() {
    let mut core = batcher(config(10));
    let small = core.reserve(NOW, ask(2)).expect("free");
    core.reserve(NOW, ask(6)).expect("free");
    let larger = SeqSpec {
        reservation: Some(small),
        ..spec(1, 100, 5)
    };
    core.submit(NOW, larger).expect("promised");
    assert_eq!(step(&mut core), []);
    assert_eq!((core.load().queued, core.load().reserved), (1, Blocks(6)));
}

#[test]
fn a_split_layout_is_bounded_by_slots_and_never_preempts() {
    let mut core = batcher(BatchConfig {
        slots: 2,
        layout: Layout::Split {
            tokens_per_slot: Tokens(80),
        },
        context: Tokens(80),
        ..config(10)
    });
    for serial in 1..=3 {
        core.submit(NOW, spec(serial, 20, 60))
            .expect("fits or waits");
    }
    assert_eq!((core.load().reserved, core.load().queued), (Blocks(4), 1));
    assert_eq!(
        core.submit(NOW, spec(9, 21, 60)),
        Err(SubmitRefusal::NeverFits)
    );
    while !core.is_empty() {
        let plan = core.plan(NOW);
        assert_eq!(plan.preempted, []);
        for drawn in core
            .applied(&plan, LEASE)
            .into_iter()
            .filter(|drawn| drawn.last)
        {
            core.remove(drawn.key);
        }
        core.audit();
    }
}

#[test]
fn the_watermark_keeps_room_for_growth_but_not_from_the_only_one() {
    let mut core = batcher(BatchConfig {
        watermark_permille: 200,
        ..config(10)
    });
    core.submit(NOW, spec(1, 100, 50)).expect("fits");
    step(&mut core);
    // 3 free, 2 of them kept for growth.
    core.submit(NOW, spec(2, 20, 5)).expect("queue");
    assert_eq!(core.load().queued, 1);
    step(&mut core);
    assert_eq!(core.load().queued, 1);
    let only = core.find(request(1)).expect("is here").0;
    core.remove(only);
    step(&mut core);
    assert_eq!((core.load().queued, core.load().running), (0, 1));
    core.remove(core.find(request(2)).expect("is here").0);
    core.submit(NOW, spec(3, 155, 5)).expect("fits");
    assert_eq!(core.load().reserved, Blocks(10));
}

#[test]
fn a_freed_slot_is_cleared_before_it_is_used_again() {
    let mut core = batcher(config(100));
    let first = core.submit(NOW, spec(1, 10, 5)).expect("fits");
    step(&mut core);
    core.remove(first);
    assert_eq!(core.plan(NOW), StepPlan::default());
    core.submit(NOW, spec(2, 10, 5)).expect("fits");
    let plan = core.plan(NOW);
    assert_eq!(
        (plan.clear.as_slice(), plan.items[0].position),
        (&[Slot(0)][..], 0)
    );
    core.applied(&plan, LEASE);
    assert_eq!(core.plan(NOW).clear, []);
}

#[test]
fn a_sequence_removed_while_its_step_runs_is_left_out_of_the_result() {
    let mut core = batcher(config(100));
    let key = core.submit(NOW, spec(1, 10, 5)).expect("fits");
    let plan = core.plan(NOW);
    core.remove(key);
    assert_eq!(core.applied(&plan, LEASE), []);
    assert_eq!(core.free(), Blocks(100));
}

#[test]
fn the_same_request_is_not_taken_twice_and_contradictory_counts_never() {
    let mut core = batcher(config(100));
    core.submit(NOW, spec(1, 10, 5)).expect("fits");
    assert_eq!(
        core.submit(NOW, spec(1, 10, 5)),
        Err(SubmitRefusal::Duplicate)
    );
    for (prompt, generated, max) in [(0, 0, 1), (1, 5, 5), (1600, 0, 1), (u32::MAX, 0, u32::MAX)] {
        let bad = SeqSpec {
            generated_len: generated,
            ..spec(2, prompt, max)
        };
        assert_eq!(core.submit(NOW, bad), Err(SubmitRefusal::NeverFits));
    }
}

#[test]
fn step_time_is_smoothed_and_unknown_before_the_first_step() {
    let mut core = batcher(config(100));
    assert_eq!(core.load().step_time(), Duration::ZERO);
    core.applied(&StepPlan::default(), Duration::from_millis(8));
    assert_eq!(core.load().step_time(), Duration::from_millis(8));
    core.applied(&StepPlan::default(), Duration::from_millis(16));
    assert_eq!(core.load().step_time(), Duration::from_millis(9));
}

fn arriving(core: &mut Batcher, serial: u64, mode: CopyMode, blocks: u32) -> SeqKey {
    let reservation = core.reserve(NOW, ask(blocks)).expect("free");
    let spec = SeqSpec {
        generated_len: 4,
        reservation: Some(reservation),
        ..spec(serial, 40, 20)
    };
    core.arrive(NOW, spec, mode).expect("promised")
}

#[test]
fn a_stopped_sequence_keeps_what_it_has_and_gets_no_step() {
    let mut core = batcher(config(100));
    let key = core.submit(NOW, spec(1, 30, 20)).expect("fits");
    core.submit(NOW, spec(2, 10, 20)).expect("fits");
    step(&mut core);
    let used = core.load().used;
    assert!(core.stop(key));
    assert!(!core.stop(key), "it is held already");
    assert_eq!(step(&mut core), [(1, 10, 1, Some(1))]);
    assert_eq!(
        (core.load().used, core.load().prefill_backlog),
        (used, Tokens::ZERO)
    );
    core.go_on(key, Epoch::FIRST.next());
    assert_eq!(step(&mut core), [(0, 30, 1, Some(1)), (1, 11, 1, Some(2))]);
    assert_eq!(core.find(request(1)), Some((key, Epoch::FIRST.next())));
}

#[test]
fn a_held_sequence_is_not_preempted_and_the_only_other_one_waits_for_it() {
    let mut core = batcher(config(4));
    let held = core.submit(NOW, spec(1, 16, 40)).expect("fits");
    core.submit(NOW, spec(2, 31, 30)).expect("fits");
    step(&mut core);
    core.stop(held);
    // 2 and 2 blocks: one more token fits, the next does not.
    assert_eq!(step(&mut core), [(1, 31, 1, Some(1))]);
    let plan = core.plan(NOW);
    assert_eq!((plan.preempted, plan.items), (Vec::new(), Vec::new()));
    core.go_on(held, Epoch::FIRST.next());
    let plan = core.plan(NOW);
    assert_eq!(plan.preempted.len(), 1);
    core.audit();
}

#[test]
fn a_stopped_waiting_sequence_leaves_the_front_of_the_queue_to_others() {
    let mut core = batcher(config(10));
    core.submit(NOW, spec(1, 100, 5)).expect("fits");
    step(&mut core);
    let large = core.submit(NOW, spec(2, 140, 5)).expect("queue");
    core.submit(NOW, spec(3, 20, 5)).expect("queue");
    step(&mut core);
    assert_eq!(core.load().running, 1, "nobody overtakes");
    core.stop(large);
    assert_eq!(core.load().head_of_line, Blocks(2));
    step(&mut core);
    assert_eq!((core.load().running, core.load().queued), (2, 1));
}

#[test]
fn an_arriving_sequence_fills_its_promise_and_then_draws_as_if_it_had_run_here() {
    let mut core = batcher(config(100));
    let key = arriving(&mut core, 1, CopyMode::Kv, 6);
    assert_eq!(
        (core.load().used, core.load().reserved),
        (Blocks(6), Blocks::ZERO)
    );
    assert_eq!(step(&mut core), []);
    assert_eq!(core.slot_to_fill(key), Some((Slot(0), false)));
    core.imported(key, Tokens(30)).expect("room");
    core.set_output(key, Tokens(9)).expect("room");
    core.imported(key, Tokens(48)).expect("room");
    assert_eq!(step(&mut core), []);
    core.go_on(key, Epoch::FIRST.next());
    assert_eq!(core.load().used, Blocks(4), "what it does not need is free");
    assert_eq!(step(&mut core), [(0, 48, 1, Some(9))]);
}

#[test]
fn what_an_arriving_sequence_finds_in_its_slot_is_cleared_once_and_not_again() {
    let mut core = batcher(config(100));
    let old = core.submit(NOW, spec(1, 10, 5)).expect("fits");
    step(&mut core);
    core.remove(old);
    let key = arriving(&mut core, 2, CopyMode::Kv, 4);
    assert_eq!(core.slot_to_fill(key), Some((Slot(0), true)));
    assert_eq!(core.slot_to_fill(key), Some((Slot(0), false)));
    core.imported(key, Tokens(30)).expect("room");
    core.submit(NOW, spec(3, 10, 5)).expect("fits");
    assert_eq!(core.plan(NOW).clear, []);
    core.remove(key);
    core.submit(NOW, spec(4, 10, 5)).expect("fits");
    assert_eq!(core.plan(NOW).clear, [Slot(0)]);
}

#[test]
fn kv_that_finds_no_block_is_refused_and_nobody_is_pushed_out_for_it() {
    let mut core = batcher(config(10));
    let key = arriving(&mut core, 1, CopyMode::Kv, 3);
    core.reserve(NOW, ask(7)).expect("the rest");
    core.imported(key, Tokens(48)).expect("promised");
    assert_eq!(core.imported(key, Tokens(49)), Err(NoRoom));
    assert_eq!(core.set_output(key, Tokens(9)), Err(NoRoom));
    let standing = core.standing(key).expect("is here");
    assert_eq!(
        (standing.computed, standing.blocks),
        (Tokens(48), Blocks(3))
    );
}

#[test]
fn a_recomputed_sequence_is_prefilled_up_to_its_last_token_and_draws_nothing() {
    let mut core = batcher(config(100));
    let key = arriving(&mut core, 1, CopyMode::Recompute, 3);
    assert_eq!(step(&mut core), [(0, 0, 43, None)]);
    assert_eq!(step(&mut core), []);
    core.set_output(key, Tokens(9)).expect("room");
    assert_eq!(step(&mut core), [(0, 43, 5, None)]);
    core.go_on(key, Epoch::FIRST.next());
    assert_eq!(step(&mut core), [(0, 48, 1, Some(9))]);
}

#[test]
fn a_sequence_that_waited_elsewhere_keeps_its_promise_and_starts_when_it_may() {
    let mut core = batcher(config(100));
    let key = arriving(&mut core, 1, CopyMode::Waiting, 5);
    assert_eq!(
        (core.load().used, core.load().reserved),
        (Blocks::ZERO, Blocks(5))
    );
    assert_eq!(step(&mut core), []);
    core.go_on(key, Epoch::FIRST.next());
    assert_eq!(
        core.load().reserved,
        Blocks(3),
        "what it does not need is free"
    );
    assert_eq!(step(&mut core), [(0, 0, 44, Some(4))]);
}

#[test]
fn nothing_arrives_without_room_at_once() {
    let mut core = batcher(config(10));
    core.submit(NOW, spec(1, 140, 5)).expect("fits");
    let queued = core.reserve(NOW, ask(5)).expect("queue");
    let waits = SeqSpec {
        reservation: Some(queued),
        ..spec(2, 40, 20)
    };
    for spec in [waits, spec(2, 40, 20)] {
        let refused = core.arrive(NOW, spec, CopyMode::Kv);
        assert_eq!(refused, Err(SubmitRefusal::QueueFull));
        core.audit();
    }
    assert_eq!(core.load().queued, 0, "the promise is used up");
}
