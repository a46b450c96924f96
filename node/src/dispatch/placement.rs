//! The course of one placement: offer, answer, next offer, until a host takes the request or none can.
//!
//! Pure: the shell performs one [`Step`] and feeds what came of it back in.

use std::time::Duration;

use rand::rngs::StdRng;
use shoal_gossip::{BlockSize, Blocks, LoadSummary, NodeId, Readiness, Timestamp};

use crate::dispatch::freeness::Freeness;
use crate::dispatch::policy::{Choice, Policy, Reason, Score};
use crate::dispatch::pool::{Candidate, Corrections, Need, NoCandidate, Pool, Sight};
use crate::engine::starting_demand;
use crate::mesh::messages::{Answer, MAX_EXCLUDED, MAX_HOPS, Offer, RefuseReason};

/// What the shell has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Offer the request to this node.
    Offer {
        /// Which, and what it was weighed on.
        choice: Choice,
        /// Redirects taken so far.
        hops: u8,
    },
    /// Submit it there: room is promised.
    Submit {
        /// Where.
        to: NodeId,
        /// The promise.
        reservation: u64,
    },
    /// Nobody takes it.
    GiveUp(GiveUp),
}

/// Why nobody takes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// No live node serves the model.
    UnknownModel,
    /// Every node that answered is full.
    Overloaded,
    /// The request fits no node, however empty.
    NeverFits,
    /// Nodes serve the model, and none could be had.
    Unavailable,
}

/// What came of an offer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome<'a> {
    /// The node answered, with its fresh load.
    Answered {
        /// The answer.
        answer: &'a Answer,
        /// Its load.
        load: LoadSummary,
    },
    /// No answer, or no way to it. What it did is unknown; a promise it made ends by lease.
    Silent,
}

/// Bounds of a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementLimits {
    /// Older loads are unknown.
    pub max_view_age: Duration,
    /// Offers in all, redirects included. Bounds the time a client waits to this many offer deadlines.
    pub max_offers: u32,
}

/// The mesh-wide knowledge a placement decides on: lent for the time of one call.
#[derive(Debug)]
pub struct World<'a> {
    /// The node that decides.
    pub this: NodeId,
    /// The time.
    pub now: Timestamp,
    /// The view.
    pub view: &'a dyn Sight,
    /// What is known better.
    pub corrections: &'a mut Corrections,
    /// How to choose.
    pub policy: &'a mut Policy,
    /// Where chance comes from.
    pub rng: &'a mut StdRng,
}

/// One request on its way to a host.
#[derive(Debug)]
pub struct Placement {
    need: Need,
    limits: PlacementLimits,
    hops: u8,
    offers: u32,
    pending: Option<(NodeId, Blocks)>,
    heard_full: bool,
    heard_never_fits: bool,
    heard_nothing: bool,
}

impl Placement {
    /// A request with this need.
    pub fn new(need: Need, limits: PlacementLimits) -> Self {
        Self {
            need,
            limits,
            hops: 0,
            offers: 0,
            pending: None,
            heard_full: false,
            heard_never_fits: false,
            heard_nothing: false,
        }
    }

    /// What it needs now; grows by excluded nodes.
    pub fn need(&self) -> &Need {
        &self.need
    }

    /// The first step.
    pub fn start(&mut self, world: &mut World<'_>) -> Step {
        self.next(world)
    }

    /// The step after an offer came to something.
    pub fn answered(&mut self, outcome: Outcome<'_>, world: &mut World<'_>) -> Step {
        let Some((node, _)) = self.abandon(world.corrections) else {
            return self.next(world);
        };
        match outcome {
            Outcome::Answered { answer, load } => {
                world.corrections.hear(node, load, world.now);
                self.judge(node, answer, world)
            }
            Outcome::Silent => {
                world.corrections.silent(node, world.now);
                self.heard_nothing = true;
                self.exclude(node);
                self.next(world)
            }
        }
    }

    /// The step after a submission failed at `node` before it started there.
    pub fn submit_failed(&mut self, node: NodeId, full: bool, world: &mut World<'_>) -> Step {
        self.heard_full |= full;
        self.exclude(node);
        self.next(world)
    }

    /// Takes back the charge of an offer without an answer, because the client is gone or the answer
    /// is here. Returns whose it was.
    pub fn abandon(&mut self, corrections: &mut Corrections) -> Option<(NodeId, Blocks)> {
        let (node, blocks) = self.pending.take()?;
        corrections.settle(node, blocks);
        Some((node, blocks))
    }

    fn judge(&mut self, node: NodeId, answer: &Answer, world: &mut World<'_>) -> Step {
        match answer {
            Answer::Accept { reservation, .. } => Step::Submit {
                to: node,
                reservation: *reservation,
            },
            Answer::Redirect { to, load } => {
                world.corrections.hear(*to, *load, world.now);
                self.follow(node, *to, world)
            }
            Answer::Refuse(reason) => {
                match reason {
                    RefuseReason::QueueFull => self.heard_full = true,
                    RefuseReason::NeverFits => self.heard_never_fits = true,
                    RefuseReason::Draining
                    | RefuseReason::NotReady
                    | RefuseReason::WrongModel
                    | RefuseReason::Protocol => {}
                }
                self.exclude(node);
                self.next(world)
            }
            // Not an answer to an offer: a peer that errs is passed over.
            Answer::Load
            | Answer::Done
            | Answer::Proposal(_)
            | Answer::Claim(_)
            | Answer::Move(_) => {
                self.exclude(node);
                self.next(world)
            }
        }
    }

    /// Goes where a host pointed, unless that is used up, excluded or no candidate in our own eyes.
    /// The host that pointed away is not excluded: it may be the best that is left.
    fn follow(&mut self, from: NodeId, to: NodeId, world: &mut World<'_>) -> Step {
        if self.hops >= MAX_HOPS {
            // It may not redirect a request that has no hops left: an error of the peer.
            self.exclude(from);
            return self.next(world);
        }
        self.hops += 1;
        let pool = Pool::new(
            world.view,
            world.corrections,
            &self.need,
            world.now,
            self.limits.max_view_age,
        );
        let Some(taken) = pool.one(to) else {
            return self.next(world);
        };
        self.offer(
            Choice {
                taken,
                reason: Reason::Redirected,
                other: Some(from),
            },
            world.corrections,
        )
    }

    fn next(&mut self, world: &mut World<'_>) -> Step {
        if self.offers >= self.limits.max_offers || self.need.excluded.len() >= MAX_EXCLUDED {
            return Step::GiveUp(self.verdict(NoCandidate::NoneUsable));
        }
        let pool = Pool::new(
            world.view,
            world.corrections,
            &self.need,
            world.now,
            self.limits.max_view_age,
        );
        // A node that is cut off from most others would ask them one by one and turn its client away.
        let last = self.heard_nothing && self.offers + 1 == self.limits.max_offers;
        let own = pool.one(world.this).filter(|_| last).map(|taken| Choice {
            taken,
            reason: Reason::Home,
            other: None,
        });
        let chosen = own.or_else(|| world.policy.choose(&pool, world.rng));
        let pool = pool.with_silent();
        match chosen.or_else(|| world.policy.choose(&pool, world.rng)) {
            Some(choice) => self.offer(choice, world.corrections),
            None => {
                let why = pool.why_empty();
                Step::GiveUp(self.verdict(why))
            }
        }
    }

    fn offer(&mut self, choice: Choice, corrections: &mut Corrections) -> Step {
        let Candidate { node, demand, .. } = choice.taken;
        if self.offers >= self.limits.max_offers {
            return Step::GiveUp(self.verdict(NoCandidate::NoneUsable));
        }
        self.offers += 1;
        corrections.charge(node, demand);
        self.pending = Some((node, demand));
        // A host that pointed away in answer to the last offer would have the client turned away.
        let last = self.offers == self.limits.max_offers;
        Step::Offer {
            choice,
            hops: if last { MAX_HOPS } else { self.hops },
        }
    }

    fn exclude(&mut self, node: NodeId) {
        if self.need.excluded.len() < MAX_EXCLUDED {
            self.need.excluded.insert(node);
        }
    }

    fn verdict(&self, why: NoCandidate) -> GiveUp {
        match why {
            NoCandidate::UnknownModel => GiveUp::UnknownModel,
            NoCandidate::NoneUsable if self.heard_full => GiveUp::Overloaded,
            NoCandidate::NoneUsable if self.heard_never_fits => GiveUp::NeverFits,
            NoCandidate::NoneUsable => GiveUp::Unavailable,
        }
    }
}

/// Whether a host that was offered a request should look for a better node before it answers.
///
/// Only when it would have to queue the request or has less freeness than `low` (`F_d` after taking it), and the request
/// has hops left. An idle host asks like any other: a faster node may be better with much to do.
pub fn should_probe(load: &LoadSummary, demand: Blocks, hops: u8, low: Freeness) -> bool {
    let after = Freeness::for_dispatch(load, demand);
    let waits = load.queued > 0 || load.usable() < demand;
    hops < MAX_HOPS && (waits || after < low)
}

/// The node to point to after probing: the best of `probed`, if it could start the request at once and the request is
/// better off there. All loads are exact: `own` is this host, and all are weighed with the request in them.
pub fn better_elsewhere(own: &Candidate, probed: &[Candidate]) -> Option<Candidate> {
    let with = |candidate: &Candidate| {
        Score::exact(&Candidate {
            charged: candidate.demand,
            demand: Blocks::ZERO,
            ..*candidate
        })
    };
    let here = with(own);
    probed
        .iter()
        .copied()
        .filter(|candidate| candidate.load.readiness == Readiness::Ready)
        .filter(Candidate::fits)
        .filter(|candidate| !own.fits() || with(candidate) < here)
        .min_by_key(with)
}

/// Blocks a request will need on a node with this block size; for hosts.
pub fn demand_at(offer: &Offer, block_size: BlockSize) -> Blocks {
    starting_demand(block_size, offer.prompt, offer.generated)
}

#[cfg(test)]
mod tests;
