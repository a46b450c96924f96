//! What holds after any sequence of operations.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use shoal_gossip::{Blocks, Timestamp, Tokens};

use super::tests::{config, spec};
use super::*;

impl Batcher {
    /// Recounts everything from the sequences and promises, and compares.
    pub(super) fn audit(&self) {
        let mut used = Blocks::ZERO;
        let mut reserved = Blocks::ZERO;
        let mut slots = BTreeSet::new();
        for (key, sequence) in &self.sequences {
            assert_eq!(self.by_request.get(&sequence.request), Some(key));
            match sequence.phase {
                Phase::Waiting => {
                    assert_eq!(
                        self.waiting.get(&sequence.place),
                        Some(&Waiter::Sequence(*key))
                    );
                }
                Phase::Aside(demand) => {
                    reserved += demand;
                    assert_eq!(self.aside.get(&sequence.place), Some(key));
                }
                Phase::Running { slot, held } => {
                    used += held;
                    assert!(slots.insert(slot), "a slot is used twice");
                    assert_eq!(self.slots[slot.0 as usize], Some(*key));
                    let size = self.config.block_size;
                    assert!(size.blocks_for(Tokens(sequence.computed)) <= held);
                    if let Layout::Split { tokens_per_slot } = self.config.layout {
                        assert!(Tokens(sequence.computed) <= tokens_per_slot);
                    }
                }
            }
        }
        let mut promised = 0;
        for (id, reservation) in &self.reservations {
            match reservation.promise {
                Promise::Aside => {
                    reserved += reservation.demand;
                    promised += 1;
                }
                Promise::Queued => {
                    let waiter = self.waiting.get(&reservation.place);
                    assert_eq!(waiter, Some(&Waiter::Promise(*id)));
                }
            }
        }
        assert_eq!((self.used, self.reserved), (used, reserved));
        assert_eq!(used + reserved + self.free(), self.config.total);
        assert!(slots.len() + promised + self.aside.len() <= self.slots.len());
        assert_eq!(self.slots.iter().flatten().count(), slots.len());
        assert_eq!(self.by_request.len(), self.sequences.len());
        let bound = self.config.queue_limit as usize + self.slots.len();
        assert!(self.waiting.len() <= bound, "the queue outgrew its bound");
    }
}

/// Operations name sequences and promises by number; the number is taken modulo what exists.
#[derive(Clone, Debug)]
enum Op {
    Reserve {
        demand: u32,
        lease_ms: u64,
    },
    Release(usize),
    Submit {
        prompt: u32,
        generated: u32,
        more: u32,
        priority: i32,
        promise: Option<usize>,
    },
    Remove(usize),
    Pause(usize, bool),
    /// Plan, do this many things while it runs, apply.
    Step,
    AbortInStep(usize),
    Wait {
        ms: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0u32..14, 1u64..200).prop_map(|(demand, lease_ms)| Op::Reserve { demand, lease_ms }),
        1 => any::<usize>().prop_map(Op::Release),
        4 => (1u32..120, 0u32..20, 1u32..60, -1i32..2, proptest::option::of(any::<usize>()))
            .prop_map(|(prompt, generated, more, priority, promise)| {
                Op::Submit { prompt, generated, more, priority, promise }
            }),
        1 => any::<usize>().prop_map(Op::Remove),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(which, paused)| Op::Pause(which, paused)),
        12 => Just(Op::Step),
        1 => any::<usize>().prop_map(Op::AbortInStep),
        1 => (1u64..100).prop_map(|ms| Op::Wait { ms }),
    ]
}

fn layouts() -> impl Strategy<Value = BatchConfig> {
    let grid = proptest::option::of(1u32..40);
    (any::<bool>(), grid, 0u32..400).prop_map(|(split, prefill_grid, watermark_permille)| {
        let (layout, context) = if split {
            (
                Layout::Split {
                    tokens_per_slot: Tokens(48),
                },
                Tokens(48),
            )
        } else {
            (Layout::Pool, Tokens(12 * 16))
        };
        BatchConfig {
            layout,
            context,
            prefill_grid,
            watermark_permille,
            ..config(12)
        }
    })
}

/// What the outside knows: enough to tell a lost or repeated token.
struct Outside {
    core: Batcher,
    now: Timestamp,
    serial: u64,
    promises: Vec<ReservationId>,
    /// Next output index and last one plus one, of every sequence that was taken and not removed.
    live: BTreeMap<SeqKey, (u32, u32)>,
    finished: usize,
}

impl Outside {
    fn new(config: BatchConfig) -> Self {
        Self {
            core: Batcher::new(config).expect("the sizes fit together"),
            now: Timestamp::ZERO,
            serial: 0,
            promises: Vec::new(),
            live: BTreeMap::new(),
            finished: 0,
        }
    }

    fn pick(&self, which: usize) -> Option<SeqKey> {
        self.live
            .keys()
            .nth(which % self.live.len().max(1))
            .copied()
    }

    fn act(&mut self, op: Op) {
        match op {
            Op::Reserve { demand, lease_ms } => {
                let ask = ReserveAsk {
                    demand: Blocks(demand),
                    lease: Duration::from_millis(lease_ms),
                };
                self.promises.extend(self.core.reserve(self.now, ask));
            }
            Op::Release(which) => {
                if let Some(id) = self.promises.get(which % self.promises.len().max(1)) {
                    self.core.release(*id);
                }
            }
            Op::Submit {
                prompt,
                generated,
                more,
                priority,
                promise,
            } => {
                self.serial += 1;
                let promise =
                    promise.and_then(|n| self.promises.get(n % self.promises.len().max(1)));
                let spec = SeqSpec {
                    generated_len: generated,
                    priority: Priority(priority),
                    reservation: promise.copied(),
                    ..spec(self.serial, prompt, generated + more)
                };
                if let Ok(key) = self.core.submit(self.now, spec) {
                    self.live.insert(key, (generated, generated + more));
                }
            }
            Op::Remove(which) => {
                if let Some(key) = self.pick(which) {
                    self.core.remove(key);
                    self.live.remove(&key);
                }
            }
            Op::Pause(which, paused) => {
                if let Some(key) = self.pick(which) {
                    self.core.set_paused(key, paused);
                }
            }
            Op::Step => self.step(None),
            Op::AbortInStep(which) => self.step(self.pick(which)),
            Op::Wait { ms } => self.now = self.now + Duration::from_millis(ms),
        }
        self.core.audit();
    }

    fn step(&mut self, abort: Option<SeqKey>) {
        let plan = self.core.plan(self.now);
        self.core.audit();
        check_plan(&plan, self.core.config());
        if let Some(key) = abort {
            self.core.remove(key);
            self.live.remove(&key);
        }
        for drawn in self.core.applied(&plan, Duration::from_millis(1)) {
            let (next, end) = self.live.get_mut(&drawn.key).expect("is live");
            assert_eq!(drawn.index, *next, "a token is lost or repeated");
            *next += 1;
            assert_eq!(drawn.last, *next == *end);
            if drawn.last {
                self.core.remove(drawn.key);
                self.live.remove(&drawn.key);
                self.finished += 1;
            }
        }
    }
}

fn check_plan(plan: &StepPlan, config: &BatchConfig) {
    assert!(
        plan.items.is_sorted_by(|a, b| a.slot < b.slot),
        "slots ascend, each once"
    );
    let tokens: u32 = plan.items.iter().map(|item| item.tokens).sum();
    assert!(tokens <= config.step_tokens);
    assert!(plan.items.iter().all(|item| item.tokens > 0));
    if let Some(grid) = config.prefill_grid {
        for item in &plan.items {
            assert!(item.position / grid == (item.position + item.tokens - 1) / grid);
        }
    }
    assert!(config.layout == Layout::Pool || plan.preempted.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn blocks_add_up_and_everything_ends(
        config in layouts(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut outside = Outside::new(config);
        for op in ops {
            outside.act(op);
        }
        // Readers read again and leases end: now everything must come to its end.
        outside.now = outside.now + Duration::from_secs(1);
        outside.core.expire(outside.now);
        for key in outside.live.keys() {
            outside.core.set_paused(*key, false);
        }
        let left: u32 = outside.live.values().map(|(next, end)| end - next).sum();
        // At worst one token of one sequence a step, after a prefill of its 192 tokens, cell by cell.
        let mut patience = (left + 1) * 200;
        while !outside.live.is_empty() {
            prop_assert!(patience > 0, "no progress: {:?}", outside.core);
            patience -= 1;
            outside.act(Op::Step);
        }
        prop_assert!(outside.core.is_empty());
        prop_assert_eq!(outside.core.free(), outside.core.config().total);
        prop_assert_eq!(outside.core.load().queued, 0);
    }
}
