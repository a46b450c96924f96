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

/// The one life of a simulated node.
const LIFE: Incarnation = Incarnation(1);

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
    running: Option<(StepPlan, Duration)>,
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
            incarnation: LIFE,
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

    /// Its exact load. The number rises when it has changed.
    pub(super) fn load(&mut self) -> LoadSummary {
        if let Some(load) = self.load {
            return load;
        }
        self.seq += 1;
        let mut load = self.batcher.load();
        load.seq = self.seq;
        load.incarnation = LIFE;
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
        let took = self.step.step_time(&StepLoad::of_plan(&plan));
        self.running = Some((plan, took));
        (Some(took), preempted)
    }

    /// Ends the step: the tokens it drew.
    pub(super) fn end_step(&mut self) -> Vec<Drawn> {
        let Some((plan, took)) = self.running.take() else {
            return Vec::new();
        };
        self.touch();
        self.batcher.applied(&plan, took)
    }

    /// Takes a request out of the engine. Whether it was there.
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
                })
            })
            .collect()
    }

    /// Bytes that the KV of so many tokens takes on the way.
    pub(super) fn bytes(&self, tokens: Tokens) -> ByteCount {
        ByteCount(u64::from(self.bytes_per_token) * u64::from(tokens.0))
    }
}
