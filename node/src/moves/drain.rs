//! Emptying a node that is to stop: everything that runs or waits here is handed over to other nodes, KV and all.
//!
//! A core decides which request leaves next; the shell draws two nodes that have room for it, and begins the move to the freer.
//! What nobody takes now is offered again a moment later, as long as the node has time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{NodeId, RequestId, Timestamp, Tokens};
use shoal_migrate::{CopyManner, MoveReason};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::dispatch::{Freeness, Need, Pool};
use crate::engine::moving::{JobPhase, JobStatus};
use crate::engine::work::Fit;
use crate::moves::{Moves, source};

/// Time between two looks at what is still here: some steps of an engine.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long a request rests after an attempt, so that one that nobody takes does not keep the others waiting.
const REST: Duration = Duration::from_millis(200);

/// Which requests leave a node that drains: the core. Pure.
#[derive(Debug, Default)]
struct Exodus {
    /// When each was last chosen. Bounded: only those that are here are kept.
    tried: BTreeMap<RequestId, Timestamp>,
}

impl Exodus {
    /// The requests to move now, the first first. Those that wait cost nothing to move and would only start here; then comes
    /// who has the most output before it, for whoever is nearly done may be done before its copy is; a prompt that is being
    /// computed comes last, since more of it is worth copying every moment.
    fn next(
        &mut self,
        now: Timestamp,
        jobs: &[JobStatus],
        leaving: &BTreeSet<RequestId>,
    ) -> Vec<RequestId> {
        self.tried
            .retain(|request, _| jobs.iter().any(|job| job.request == *request));
        let mut able: Vec<_> = jobs
            .iter()
            .filter(|job| !leaving.contains(&job.request))
            .filter(|job| {
                let tried = self.tried.get(&job.request);
                tried.is_none_or(|tried| now.since(*tried) >= REST)
            })
            .filter_map(|job| {
                let class = match job.phase {
                    JobPhase::Waiting => 0,
                    JobPhase::Decode => 1,
                    JobPhase::Prefill => 2,
                    JobPhase::Paused | JobPhase::Arriving | JobPhase::Pinned => return None,
                };
                let left = job.max_output - job.output;
                Some((
                    (class, std::cmp::Reverse((job.priority, left))),
                    job.request,
                ))
            })
            .collect();
        able.sort_unstable();
        able.into_iter().map(|(_, request)| request).collect()
    }

    /// A move of the request was tried.
    fn tried(&mut self, now: Timestamp, request: RequestId) {
        self.tried.insert(request, now);
    }
}

/// Hands everything over that is in this node's engine, until `stop`.
pub async fn keep_emptying(moves: Arc<Moves>, max_view_age: Duration, stop: CancellationToken) {
    let mut exodus = Exodus::default();
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut begun = 0u64;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            _ = looks.tick() => {}
        }
        begun += look(&moves, &mut exodus, max_view_age);
    }
    info!(
        moves = begun,
        left = moves.jobs().len(),
        "handed over what ran here"
    );
}

/// Begins as many moves as may be under way; how many.
fn look(moves: &Arc<Moves>, exodus: &mut Exodus, max_view_age: Duration) -> u64 {
    let now = moves.clock.now();
    let leaving: BTreeSet<RequestId> = moves.lock().leaving.keys().copied().collect();
    let mut free = moves.settings.slots_out.saturating_sub(leaving.len());
    if free == 0 || moves.ways.get().is_none() {
        return 0;
    }
    let jobs = moves.jobs();
    let mut begun = 0;
    for request in exodus.next(now, &jobs, &leaving) {
        if free == 0 {
            break;
        }
        let Some(job) = jobs.iter().find(|job| job.request == request) else {
            continue;
        };
        exodus.tried(now, request);
        let Some(to) = target_for(moves, job, max_view_age) else {
            continue;
        };
        match source::begin(
            moves,
            job.clone(),
            to,
            (MoveReason::Drained, CopyManner::Staged),
        ) {
            Ok(_) => {
                debug!(target: "shoal::events::drain", %request, %to, phase = ?job.phase, "leaves");
                free -= 1;
                begun += 1;
            }
            Err(why) => debug!(%request, %to, why, "the move cannot begin"),
        }
    }
    begun
}

/// The freer of two nodes that have room for a request by what is known of them.
fn target_for(moves: &Moves, job: &JobStatus, max_view_age: Duration) -> Option<NodeId> {
    let facts = moves.engine.facts();
    let served = facts.models.iter().find(|served| served.id == job.model)?;
    let need = Need {
        model: job.model.clone(),
        fit: Fit::Same(served.fingerprint),
        prompt: job.prompt,
        generated: job.output + Tokens(1),
        excluded: BTreeSet::from([moves.this]),
    };
    moves.knowledge.decide(|world| {
        let pool = Pool::new(
            world.view,
            world.corrections,
            &need,
            world.now,
            max_view_age,
        );
        let (one, other) =
            pool.two_that(|it| it.load.usable() - it.charged >= it.demand, world.rng);
        [one, other]
            .into_iter()
            .flatten()
            .max_by_key(|it| Freeness::for_migration(&it.load))
            .map(|it| it.node)
    })
}

#[cfg(test)]
mod tests {
    use shoal_gossip::{Blocks, Epoch};

    use super::*;
    use crate::engine::work::Priority;

    fn job(serial: u64, phase: JobPhase, output: u32) -> JobStatus {
        JobStatus {
            request: request(serial),
            epoch: Epoch(1),
            model: "m".into(),
            priority: Priority(0),
            phase,
            prompt: Tokens(10),
            output: Tokens(output),
            computed: Tokens(10 + output),
            max_output: Tokens(100),
            blocks: Blocks(2),
            came: Timestamp::ZERO,
        }
    }

    fn request(serial: u64) -> RequestId {
        RequestId {
            home: NodeId(1),
            serial,
        }
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn who_waits_goes_first_and_who_cannot_move_stays() {
        let jobs = [
            job(1, JobPhase::Prefill, 0),
            job(2, JobPhase::Decode, 90),
            job(3, JobPhase::Pinned, 5),
            job(4, JobPhase::Decode, 10),
            job(5, JobPhase::Waiting, 0),
            job(6, JobPhase::Arriving, 0),
            job(7, JobPhase::Decode, 10),
        ];
        let leaving = BTreeSet::from([request(7)]);
        let order = Exodus::default().next(at(0), &jobs, &leaving);
        assert_eq!(order, [5, 4, 2, 1].map(request));
    }

    #[test]
    fn one_that_nobody_takes_rests_and_is_tried_again() {
        let jobs = [job(1, JobPhase::Decode, 0), job(2, JobPhase::Decode, 50)];
        let (mut exodus, none) = (Exodus::default(), BTreeSet::new());
        assert_eq!(exodus.next(at(0), &jobs, &none), [1, 2].map(request));
        exodus.tried(at(0), request(1));
        assert_eq!(exodus.next(at(100), &jobs, &none), [request(2)]);
        assert_eq!(exodus.next(at(200), &jobs, &none), [1, 2].map(request));
        exodus.next(at(300), &jobs[1..], &none);
        assert!(exodus.tried.is_empty());
    }
}
