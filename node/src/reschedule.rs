//! Which request should leave this node, and where it might go: the rescheduling core. Pure.
//!
//! Power of two choices, a second time: a node that runs short of KV blocks per request draws two others whose
//! load says that they have plenty, and proposes one of its requests to the freer. Nobody looks at the whole mesh, so nobody herds
//! on a stale view, and the target decides with its own exact numbers.
//!
//! What keeps it calm: a gap between *short* and *plenty*, a minimum gain, a request rests after each move, a budget of
//! bytes, and the slots of source and target.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_gossip::{
    BlockSize, Blocks, ByteCount, LoadSummary, NodeId, RequestId, Timestamp, Tokens,
};

use crate::dispatch::{Candidate, Freeness, Need, Pool, World};
use crate::engine::moving::{JobPhase, JobStatus};
use crate::engine::work::Fit;

/// When a request is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RescheduleLimits {
    /// A node whose freeness is below this is short.
    pub low: Freeness,
    /// A node whose freeness is above this has plenty.
    pub high: Freeness,
    /// Freeness that the poorer of the two must gain by the move.
    pub min_gain: Freeness,
    /// How long a request stays where it is after it was moved, or was refused.
    pub rest: Duration,
    /// Output tokens that a running request must still be allowed to draw: less is not worth the move.
    pub min_output_left: Tokens,
    /// Requests that may leave at once.
    pub slots_out: usize,
    /// Bytes of KV that may leave in a second.
    pub bytes_per_second: u64,
}

impl RescheduleLimits {
    /// Two others at random among those that serve the model as `fit` says and have plenty, by loads of at most this age.
    pub fn draw(
        &self,
        (model, fit): (&str, Fit),
        max_age: Duration,
        world: &mut World<'_>,
    ) -> (Option<Candidate>, Option<Candidate>) {
        let need = Need {
            model: model.to_owned(),
            fit,
            prompt: Tokens::ZERO,
            generated: Tokens::ZERO,
            excluded: BTreeSet::from([world.this]),
        };
        let pool = Pool::new(world.view, world.corrections, &need, world.now, max_age);
        pool.two_that(|it| self.has_plenty(&it.load), world.rng)
    }

    /// Whether a node has plenty: one to draw from.
    pub fn has_plenty(&self, load: &LoadSummary) -> bool {
        Freeness::for_migration(load) > self.high
    }
}

/// One decision, with the numbers it was made on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What leaves.
    pub request: RequestId,
    /// Where to.
    pub to: NodeId,
    /// Freeness here.
    pub own: Freeness,
    /// Freeness there, as this node knows it.
    pub theirs: Freeness,
    /// Age of that knowledge.
    pub age: Duration,
    /// KV blocks that would leave.
    pub blocks: Blocks,
    /// Whether it runs (its KV is copied) or waits.
    pub running: bool,
}

/// This node, as a decision sees it.
#[derive(Clone, Copy, Debug)]
pub struct Here<'a> {
    /// Its exact load.
    pub load: &'a LoadSummary,
    /// The jobs in its engine.
    pub jobs: &'a [JobStatus],
    /// Tokens in one of its blocks.
    pub block_size: BlockSize,
    /// Bytes that the KV of one token takes on the way; zero when ids travel instead.
    pub bytes_per_token: ByteCount,
}

impl Here<'_> {
    /// KV blocks that a job will hold wherever it goes.
    fn need(&self, job: &JobStatus) -> Blocks {
        let starting = self
            .block_size
            .blocks_for(job.prompt + job.output + Tokens(1));
        job.blocks.max(starting)
    }

    fn copied(&self, job: &JobStatus) -> u64 {
        u64::from(job.computed.0).saturating_mul(self.bytes_per_token.0)
    }
}

/// The core. Keeps what makes it calm, and nothing of the mesh.
#[derive(Debug)]
pub struct Rescheduler {
    limits: RescheduleLimits,
    /// When requests were last chosen. Bounded: only those that are here are kept.
    chosen: BTreeMap<RequestId, Timestamp>,
    /// Bytes that may leave now: a bucket that holds one second.
    budget: u64,
    filled: Timestamp,
}

impl Rescheduler {
    /// A core with a full budget.
    pub fn new(limits: RescheduleLimits, now: Timestamp) -> Self {
        Self {
            budget: limits.bytes_per_second,
            limits,
            chosen: BTreeMap::new(),
            filled: now,
        }
    }

    /// When it moves requests.
    pub fn limits(&self) -> &RescheduleLimits {
        &self.limits
    }

    /// Whether this node is short, has a slot, and should look for a target.
    pub fn is_short(&self, own: &LoadSummary, leaving: usize) -> bool {
        leaving < self.limits.slots_out && Freeness::for_migration(own) < self.limits.low
    }

    /// Decides. `two` were [drawn](RescheduleLimits::draw). A decision counts against the budget and
    /// lets the request rest.
    pub fn decide(
        &mut self,
        now: Timestamp,
        here: Here<'_>,
        two: (Option<Candidate>, Option<Candidate>),
    ) -> Option<Decision> {
        self.refill(now);
        self.chosen
            .retain(|request, _| here.jobs.iter().any(|job| job.request == *request));
        let target = freer(two)?;
        let victim = here
            .jobs
            .iter()
            .filter(|job| self.may_leave(now, here, job))
            .filter(|job| here.need(job) <= target.load.usable())
            .filter(|job| self.gains(here, &target.load, job))
            .min_by_key(|job| (job.priority, here.copied(job), job.computed, job.request))?;
        self.budget = self.budget.saturating_sub(here.copied(victim));
        self.chosen.insert(victim.request, now);
        Some(Decision {
            request: victim.request,
            to: target.node,
            own: Freeness::for_migration(here.load),
            theirs: Freeness::for_migration(&target.load),
            age: target.age,
            blocks: victim.blocks,
            running: victim.phase == JobPhase::Decode,
        })
    }

    fn may_leave(&self, now: Timestamp, here: Here<'_>, job: &JobStatus) -> bool {
        let rested = self
            .chosen
            .get(&job.request)
            .is_none_or(|chosen| now.since(*chosen) >= self.limits.rest);
        let worth = match job.phase {
            JobPhase::Decode => job.max_output - job.output >= self.limits.min_output_left,
            JobPhase::Waiting => true,
            JobPhase::Prefill | JobPhase::Paused | JobPhase::Arriving | JobPhase::Pinned => false,
        };
        // A full bucket lets even the largest go, or it never would.
        let affordable =
            here.copied(job) <= self.budget || self.budget >= self.limits.bytes_per_second;
        rested && worth && affordable
    }

    /// Whether the poorer of the two nodes is better off afterwards, by enough.
    fn gains(&self, here: Here<'_>, theirs: &LoadSummary, job: &JobStatus) -> bool {
        let before = poorer(here.load, theirs);
        let (mut own, mut theirs) = (*here.load, *theirs);
        if job.phase == JobPhase::Waiting {
            // If it is the first in line, the second is not known: nobody is assumed to wait behind it.
            if own.head_of_line == here.need(job) {
                own.head_of_line = Blocks::ZERO;
            }
            own.queued = own.queued.saturating_sub(1);
        } else {
            own.used -= job.blocks;
            own.running = own.running.saturating_sub(1);
            own.slots_full = false;
        }
        theirs.used += here.need(job);
        theirs.running = theirs.running.saturating_add(1);
        poorer(&own, &theirs) >= before.plus(self.limits.min_gain)
    }

    fn refill(&mut self, now: Timestamp) {
        let passed = now.since(self.filled).as_millis();
        let new = u128::from(self.limits.bytes_per_second) * passed / 1_000;
        // Time too short for a whole byte is not lost: it counts from the last filling.
        if new > 0 {
            self.filled = now;
            let new = u64::try_from(new).unwrap_or(u64::MAX);
            self.budget = self
                .budget
                .saturating_add(new)
                .min(self.limits.bytes_per_second);
        }
    }
}

fn poorer(one: &LoadSummary, other: &LoadSummary) -> Freeness {
    Freeness::for_migration(one).min(Freeness::for_migration(other))
}

/// The freer of two, by what a move counts; the first drawn of equals.
fn freer((first, second): (Option<Candidate>, Option<Candidate>)) -> Option<Candidate> {
    let freeness = |candidate: &Candidate| Freeness::for_migration(&candidate.load);
    match (first, second) {
        (Some(first), Some(second)) if freeness(&second) > freeness(&first) => Some(second),
        (first, second) => first.or(second),
    }
}

#[cfg(test)]
mod tests;
