//! One node: its engine in counts, and what it knows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use shoal_gossip::{
    Blocks, ByteCount, Incarnation, LoadSummary, NodeFacts, NodeId, Role, Timestamp, Tokens,
};

use crate::dispatch::{Corrections, Policy, PolicyName};
use crate::engine::batched::{Batcher, Drawn, SeqKey, StepPlan};
use crate::engine::moving::JobStatus;
use crate::engine::sim::{Profile, SimConfig, StepLoad, StepModel};
use crate::mesh::messages::PROTOCOL;
use crate::reschedule::{RescheduleLimits, Rescheduler};
use crate::simulate::hand_over::Act;
use crate::simulate::request::Request;
use crate::simulate::{SimulateError, gossip};

/// A step that is being computed.
#[derive(Debug)]
struct Running {
    plan: StepPlan,
    took: Duration,
    ends: Timestamp,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) batcher: Batcher,
    step: StepModel,
    pub(super) bytes_per_token: u32,
    context: Tokens,
    model: String,
    pub(super) corrections: Corrections,
    pub(super) policy: Policy,
    pub(super) rng: StdRng,
    pub(super) rescheduler: Rescheduler,
    /// Requests in its engine, by the engine's names for them.
    pub(super) here: BTreeMap<SeqKey, usize>,
    /// What the engine does between two steps.
    pub(super) acts: Vec<Act>,
    running: Option<Running>,
    /// Whether its process is there, and which life it is.
    pub(super) alive: bool,
    pub(super) life: Incarnation,
    /// How many times as long its steps take.
    pub(super) slowness: f64,
    /// Until when the engine has nothing to do, if it was told when to look again.
    pub(super) wakes: Option<Timestamp>,
    /// Hand-overs that this node is the source of, and the target of.
    pub(super) leaving: usize,
    pub(super) arriving: usize,
    /// Until when it sends KV.
    pub(super) sends_until: Timestamp,
    /// Blocks that the central scheduler has sent here and that are not here yet.
    pub(super) on_its_way: Blocks,
    seq: u64,
    /// Its load, while nothing has changed.
    load: Option<LoadSummary>,
}

impl Node {
    /// An idle node at this place of the mesh.
    ///
    /// # Errors
    /// The profile's sizes do not fit together.
    pub(super) fn new(
        place: usize,
        profile: &Profile,
        config: &SimConfig,
        (policy, limits): (PolicyName, RescheduleLimits),
        seed: u64,
    ) -> Result<Self, SimulateError> {
        let batch = config.batch(profile);
        let context = batch.context;
        let batcher = Batcher::new(batch).map_err(|error| SimulateError::Profile {
            name: profile.name.clone(),
            why: error.to_string(),
        })?;
        Ok(Self {
            id: gossip::name_of(place),
            batcher,
            step: profile.step,
            bytes_per_token: u32::try_from(profile.kv_bytes_per_token).unwrap_or(u32::MAX),
            context,
            model: config.model.clone().unwrap_or_default(),
            corrections: Corrections::default(),
            policy: Policy::new(policy),
            rng: StdRng::seed_from_u64(
                seed ^ (place as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            ),
            rescheduler: Rescheduler::new(limits, Timestamp::ZERO),
            here: BTreeMap::new(),
            acts: Vec::new(),
            running: None,
            alive: true,
            life: Incarnation(1),
            slowness: 1.0,
            wakes: None,
            leaving: 0,
            arriving: 0,
            sends_until: Timestamp::ZERO,
            on_its_way: Blocks::ZERO,
            seq: 0,
            load: None,
        })
    }

    /// What it says of itself to others.
    pub(super) fn facts(&self, config: &SimConfig, profile: &Profile) -> Arc<NodeFacts> {
        let engine = config.facts(profile);
        Arc::new(NodeFacts {
            node: self.id,
            incarnation: self.life,
            peer_id: String::new(),
            protocol: PROTOCOL,
            control: ([127, 0, 0, 1], 1).into(),
            stream: ([127, 0, 0, 1], 2).into(),
            http: String::new(),
            role: Role::Mixed,
            block_size: engine.block_size,
            models: engine.models,
            version: String::new(),
        })
    }

    /// Its exact load. The number rises when it has changed. Of a dead node nothing is known, and it is not ready.
    pub(super) fn load(&mut self) -> LoadSummary {
        if !self.alive {
            return LoadSummary::default();
        }
        if let Some(load) = self.load {
            return load;
        }
        self.seq += 1;
        let mut load = self.batcher.load();
        load.seq = self.seq;
        load.incarnation = self.life;
        self.load = Some(load);
        load
    }

    /// Something in the engine has changed.
    pub(super) fn touch(&mut self) {
        self.load = None;
    }

    /// Whether a step is being computed.
    pub(super) fn is_stepping(&self) -> bool {
        self.running.is_some()
    }

    /// Plans the next step and begins it. What it takes, and who lost their KV for it; `None` when there is nothing to do.
    pub(super) fn begin_step(&mut self, now: Timestamp) -> (Option<Duration>, Vec<SeqKey>) {
        let mut plan = self.batcher.plan(now);
        self.touch();
        let preempted = std::mem::take(&mut plan.preempted);
        if plan.items.is_empty() {
            return (None, preempted);
        }
        let step = self.step.step_time(&StepLoad::of_plan(&plan));
        let took = step.mul_f64(self.slowness);
        let ends = now + took;
        self.running = Some(Running { plan, took, ends });
        (Some(took), preempted)
    }

    /// Ends the step that ends now: the tokens it drew. One of a former life is void.
    pub(super) fn end_step(&mut self, now: Timestamp) -> Vec<Drawn> {
        let Some(step) = self.running.take_if(|step| step.ends == now) else {
            return Vec::new();
        };
        self.touch();
        self.batcher.applied(&step.plan, step.took)
    }

    /// Its process is gone, with everything in it.
    pub(super) fn die(&mut self) {
        self.alive = false;
        self.batcher.clear();
        self.here.clear();
        self.acts.clear();
        self.running = None;
        self.wakes = None;
        (self.leaving, self.arriving) = (0, 0);
        self.on_its_way = Blocks::ZERO;
        self.touch();
    }

    /// A new process under its name, which knows nothing of the former one.
    pub(super) fn live_again(&mut self) {
        self.alive = true;
        self.life = Incarnation(self.life.0 + 1);
        self.corrections = Corrections::default();
        self.slowness = 1.0;
        self.touch();
    }

    /// Takes a request out of the engine, if it is there.
    pub(super) fn remove(&mut self, key: SeqKey) {
        self.batcher.remove(key);
        self.here.remove(&key);
        self.touch();
    }

    /// The requests in its engine, as the rescheduler sees them. It is told of no output length: `max_output` is what the
    /// context leaves.
    pub(super) fn jobs(&self, requests: &[Request]) -> Vec<JobStatus> {
        self.here
            .iter()
            .filter_map(|(key, at)| {
                let request = requests.get(*at)?;
                let standing = self.batcher.standing(*key)?;
                Some(JobStatus {
                    request: request.id,
                    epoch: request.arbiter.epoch(),
                    model: self.model.clone(),
                    priority: crate::engine::work::Priority::default(),
                    phase: standing.phase(),
                    prompt: request.prompt,
                    output: Tokens(request.drawn),
                    computed: standing.computed,
                    max_output: self.context - request.prompt,
                    blocks: standing.blocks,
                    came: standing.came,
                })
            })
            .collect()
    }

    /// Bytes that the KV of so many tokens takes on the way.
    pub(super) fn bytes(&self, tokens: Tokens) -> ByteCount {
        ByteCount(u64::from(self.bytes_per_token) * u64::from(tokens.0))
    }
}
