//! What holds after any sequence of operations.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use shoal_gossip::{Blocks, Epoch, NodeId, Timestamp, Tokens};
use shoal_migrate::CopyMode;

use super::tests::{config, spec};
use super::*;

impl Batcher {
    /// Recounts everything from the sequences and promises, and compares.
    pub(super) fn audit(&self) {
        let mut used = Blocks::ZERO;
        let mut reserved = Blocks::ZERO;
        let mut slots = BTreeSet::new();
        let mut waiting = Queue::default();
        for (key, sequence) in &self.sequences {
            assert_eq!(self.by_request.get(&sequence.request), Some(key));
            match sequence.phase {
                Phase::Waiting => {
                    let queued = Queued::sequence(*key, sequence, self.config.block_size);
                    assert_eq!(self.waiting.get(sequence.place), Some(&queued));
                    waiting.enter(sequence.place, queued);
                }
                Phase::Aside(demand) => {
                    reserved += demand;
                    assert_eq!(self.aside.get(&sequence.place), Some(key));
                    assert_ne!(sequence.hold, Some(Hold::Recomputing));
                }
                Phase::Running { slot, held } => {
                    used += held;
                    assert!(slots.insert(slot), "a slot is used twice");
                    assert_eq!(self.slots[slot.0 as usize], Some(*key));
                    assert_eq!(self.running.get(&sequence.place), Some(key));
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
                    let home = self
                        .waiting
                        .get(reservation.place)
                        .map_or(NodeId(0), |queued| queued.home);
                    let queued = Queued::promise(*id, reservation.demand, home);
                    assert_eq!(self.waiting.get(reservation.place), Some(&queued));
                    waiting.enter(reservation.place, queued);
                }
            }
        }
        assert_eq!((self.used, self.reserved), (used, reserved));
        assert_eq!(used + reserved + self.free(), self.config.total);
        assert!(slots.len() + promised + self.aside.len() <= self.slots.len());
        let taken = slots.len() + promised + self.aside.len();
        assert_eq!(self.load().slots_full, taken == self.slots.len());
        assert_eq!(self.slots.iter().flatten().count(), slots.len());
        assert_eq!(self.running.len(), slots.len());
        assert_eq!(self.waiting, waiting, "the queue or its sums are off");
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
    /// A hand-over takes it away from here.
    Stop(usize),
    /// It stays, or what arrived runs.
    GoOn(usize),
    Arrive {
        prompt: u32,
        generated: u32,
        more: u32,
        promise: Option<usize>,
        mode: CopyMode,
    },
    Import(usize, u32),
    SetOutput(usize, u32),
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
        2 => any::<usize>().prop_map(Op::Stop),
        2 => any::<usize>().prop_map(Op::GoOn),
        2 => arrive(),
        3 => (any::<usize>(), 1u32..60).prop_map(|(which, tokens)| Op::Import(which, tokens)),
        1 => (any::<usize>(), 1u32..10).prop_map(|(which, more)| Op::SetOutput(which, more)),
        12 => Just(Op::Step),
        1 => any::<usize>().prop_map(Op::AbortInStep),
        1 => (1u64..100).prop_map(|ms| Op::Wait { ms }),
    ]
}

fn arrive() -> impl Strategy<Value = Op> {
    let mode = prop_oneof![
        Just(CopyMode::Kv),
        Just(CopyMode::Recompute),
        Just(CopyMode::Waiting)
    ];
    let promise = proptest::option::of(any::<usize>());
    (1u32..120, 0u32..20, 1u32..60, promise, mode).prop_map(
        |(prompt, generated, more, promise, mode)| Op::Arrive {
            prompt,
            generated,
            more,
            promise,
            mode,
        },
    )
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
                    at_once: false,
                    waited: Duration::ZERO,
                    resumed: false,
                    home: NodeId(1),
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
                let spec = SeqSpec {
                    priority: Priority(priority),
                    ..self.spec(prompt, generated, more, promise)
                };
                if let Ok(key) = self.core.submit(self.now, spec) {
                    self.live.insert(key, (generated, generated + more));
                }
            }
            Op::Arrive {
                prompt,
                generated,
                more,
                promise,
                mode,
            } => {
                let spec = self.spec(prompt, generated, more, promise);
                if let Ok(key) = self.core.arrive(self.now, spec, mode) {
                    self.live.insert(key, (generated, generated + more));
                }
            }
            Op::Stop(which) => {
                if let Some(key) = self.pick(which) {
                    self.core.stop(key);
                }
            }
            Op::GoOn(which) => {
                if let Some(key) = self.pick(which) {
                    self.core.go_on(key, Epoch::FIRST.next());
                }
            }
            Op::Import(which, tokens) => self.import(which, tokens),
            Op::SetOutput(which, more) => self.set_output(which, more),
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

    fn spec(&mut self, prompt: u32, generated: u32, more: u32, promise: Option<usize>) -> SeqSpec {
        self.serial += 1;
        let promise = promise.and_then(|n| self.promises.get(n % self.promises.len().max(1)));
        SeqSpec {
            generated_len: generated,
            reservation: promise.copied(),
            ..spec(self.serial, prompt, generated + more)
        }
    }

    fn remove(&mut self, key: SeqKey) {
        self.core.remove(key);
        self.live.remove(&key);
    }

    /// As the jobs do it: no more than the request can have, and what finds no room is gone.
    fn import(&mut self, which: usize, tokens: u32) {
        let Some(key) = self.pick(which) else { return };
        if self.core.slot_to_fill(key).is_none() {
            return;
        }
        let sequence = self.core.sequences[&key];
        let known = sequence.known();
        let end = (sequence.computed + tokens)
            .min(known - 1)
            .max(sequence.computed);
        if self.core.imported(key, Tokens(end)).is_err() {
            self.remove(key);
        }
    }

    fn set_output(&mut self, which: usize, more: u32) {
        let Some(key) = self.pick(which) else { return };
        let arrives = self.core.sequences[&key]
            .hold
            .is_some_and(|hold| hold != Hold::Stopped);
        let Some((next, end)) = self.live.get(&key).copied().filter(|_| arrives) else {
            return;
        };
        let output = (next + more).min(end - 1);
        if self.core.set_output(key, Tokens(output)).is_err() {
            self.remove(key);
        } else {
            self.live.insert(key, (output, end));
        }
    }

    /// What a plan may not do to sequences that a hand-over holds.
    fn check_holds(&mut self, plan: &StepPlan) {
        for item in &plan.items {
            match self.core.sequences[&item.key].hold {
                None => {}
                Some(Hold::Recomputing) => assert_eq!(item.sample, None, "it draws nothing"),
                Some(hold @ (Hold::Stopped | Hold::Arriving)) => panic!("a step for {hold:?}"),
            }
        }
        for key in &plan.preempted {
            assert_eq!(self.core.sequences[key].hold, None, "preempted while held");
        }
        for slot in &plan.clear {
            let key = self.core.slots[slot.0 as usize];
            let holds_kv = key.is_some_and(|key| self.core.sequences[&key].computed > 0);
            assert!(!holds_kv, "KV that came in is cleared");
        }
    }

    fn step(&mut self, abort: Option<SeqKey>) {
        let plan = self.core.plan(self.now);
        self.core.audit();
        check_plan(&plan, self.core.config());
        self.check_holds(&plan);
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
            outside.core.go_on(*key, Epoch::FIRST.next());
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
