//! The shell of the rescheduling core: looks every so often, draws two, and begins the move that was decided.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rand::seq::IteratorRandom;
use shoal_gossip::ByteCount;
use shoal_migrate::{CopyManner, MoveReason};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::engine::moving::MovingEngine;
use crate::engine::work::Fit;
use crate::moves::{Moves, source};
use crate::reschedule::{Decision, Here, RescheduleLimits, Rescheduler};

/// Moves requests away whenever this node runs short, until `stop`.
pub async fn keep_rescheduling(
    moves: Arc<Moves>,
    limits: RescheduleLimits,
    every: Duration,
    max_view_age: Duration,
    stop: CancellationToken,
) {
    let mut core = Rescheduler::new(limits, moves.clock.now());
    let mut tick = interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = tick.tick() => {}
        }
        if let Some(decision) = look(&moves, &mut core, max_view_age) {
            begin(&moves, &decision);
        }
    }
}

/// One look: what should leave, if anything.
fn look(moves: &Moves, core: &mut Rescheduler, max_view_age: Duration) -> Option<Decision> {
    let load = moves.loads.summary();
    let (leaving, _) = moves.under_way();
    if moves.ways.get().is_none() || !core.is_short(&load, leaving) {
        return None;
    }
    let moving = moves.engine.moving()?;
    let facts = moves.engine.facts();
    let mut jobs = moving.jobs();
    // One of the models that requests run for; a look at the others comes soon enough.
    let asked: BTreeSet<String> = jobs.iter().map(|job| job.model.clone()).collect();
    let (model, two) = moves.knowledge.decide(|world| {
        let model = asked.iter().choose(world.rng)?;
        let served = facts.models.iter().find(|served| served.id == *model)?;
        let wanted = (model.as_str(), Fit::Same(served.fingerprint));
        Some((model, core.limits().draw(wanted, max_view_age, world)))
    })?;
    jobs.retain(|job| job.model == *model);
    let here = Here {
        load: &load,
        jobs: &jobs,
        block_size: facts.block_size,
        bytes_per_token: ByteCount(u64::from(moving.kv_bytes_per_token())),
    };
    core.decide(moves.clock.now(), here, two)
}

fn begin(moves: &Arc<Moves>, decision: &Decision) {
    let Some(job) = moves
        .engine
        .moving()
        .and_then(|moving: &dyn MovingEngine| moving.job(decision.request))
    else {
        return;
    };
    debug!(target: "shoal::events::reschedule", request = %decision.request, to = %decision.to,
        own = %decision.own, theirs = %decision.theirs, age_ms = decision.age.as_millis() as u64,
        blocks = decision.blocks.0, running = decision.running);
    // What comes of it is told by the session; here only a move that cannot begin is of interest.
    let how = (MoveReason::Rescheduled, CopyManner::Staged);
    match source::begin(moves, job, decision.to, how) {
        Ok(_) => {}
        Err(why) => debug!(request = %decision.request, why, "the move cannot begin"),
    }
}
