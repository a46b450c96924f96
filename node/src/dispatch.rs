//! Where a request goes: freeness, policies and the course of one placement. Pure cores.
//!
//! [`Pool`] is the view corrected by what this node knows better and filtered by what the request
//! needs; [`Policy`] chooses from it; [`Placement`] turns choices and answers into steps. None of
//! them reads a clock, draws entropy by itself, waits or locks.

mod freeness;
mod placement;
mod policy;
mod pool;
#[cfg(test)]
pub(crate) mod testing;

pub use freeness::Freeness;
pub use placement::{
    GiveUp, Outcome, Placement, PlacementLimits, Step, World, better_elsewhere, demand_at,
    should_probe,
};
pub use policy::{Choice, Policy, PolicyName, Reason};
pub use pool::{Candidate, Corrections, Need, NoCandidate, Pool, Seen, Sight};
