//! Accidents drawn from a seed, in virtual time: more nodes, requests, moves and accidents than can be explored.
//!
//! Messages are late, lost, doubled and out of order; nodes die and come back; networks part; clients leave; engines
//! fail, finish and preempt. After every event the invariants must hold, and when all is quiet every client
//! whose home lived must have all of its tokens, and no block may be held.
//!
//! A seed is the whole story: `SHOAL_SEED=<seed>` runs one, `SHOAL_SEEDS=<n>` so many. Seeds that have failed are
//! kept in `tests/seeds.txt` and always run.

mod schedule;

use shoal_gossip::testing::{kept_seeds, number};
use shoal_gossip::{Clock, MonotonicClock};

use crate::mesh::Mutant;
use schedule::{Schedule, Tally};

/// Seeds of a run without `SHOAL_SEEDS`.
const SEEDS: u64 = 1000;

/// What must have happened in so many seeds: every end of a session among it.
const HAPPENS: [&str; 27] = [
    "requests finished",
    "requests over",
    "claimed by a target",
    "claimed back by a source",
    "placed anew",
    "messages lost",
    "messages doubled",
    "deaths",
    "partings",
    "other accidents",
    "Source moved",
    "Source stayed refused",
    "Source stayed target_silent",
    "Source stayed target_dead",
    "Source stayed copy",
    "Source stayed stopped",
    "Source over request_gone",
    "Source over lost",
    "Source over home_silent",
    "Target moved",
    "Target stayed source_lost",
    "Target stayed copy",
    "Target stayed stopped",
    "Target over lost",
    "Target over home_silent",
    "Target over source_lost",
    "Target over request_gone",
];

/// Runs one seed; fails with what must be known to run it again.
#[track_caller]
fn check(seed: u64, tally: &mut Tally) {
    let outcome = Schedule::new(seed, &[]).run();
    if let Ok(run) = &outcome {
        tally.add(run);
    }
    assert!(
        outcome.is_ok(),
        "seed {seed}: {}\nrerun: SHOAL_SEED={seed} cargo nextest run --workspace -E 'test(no_seeded_schedule)'",
        outcome.err().unwrap_or_default()
    );
}

#[test]
fn no_seeded_schedule_of_accidents_breaks_an_invariant() {
    let mut tally = Tally::default();
    if let Some(seed) = number("SHOAL_SEED") {
        check(seed, &mut tally);
        println!("seed {seed}: {tally:#?}");
        return;
    }
    let seeds = number("SHOAL_SEEDS").unwrap_or(SEEDS);
    let clock = MonotonicClock::start();
    for seed in 0..seeds {
        check(seed, &mut tally);
    }
    println!("{seeds} seeds in {}: {tally:#?}", clock.now());
    // A schedule in which something never happens says nothing about it.
    if seeds >= SEEDS {
        for what in HAPPENS {
            assert!(tally.of(what) > 0, "{what:?} never happened");
        }
    }
}

#[test]
fn seeds_that_failed_once_pass() {
    let mut tally = Tally::default();
    let seeds = kept_seeds().expect("each line begins with a seed");
    assert!(!seeds.is_empty(), "tests/seeds.txt is missing or empty");
    for seed in seeds {
        check(seed, &mut tally);
    }
}

#[test]
fn a_seed_is_the_whole_story() {
    let run = || Schedule::new(7, &[]).run().expect("seed 7 passes");
    assert_eq!(run(), run());
}

#[test]
fn errors_put_in_around_the_cores_are_found() {
    for mutant in [
        Mutant::SourceResumesOnDoubt,
        Mutant::SourceRunsWhileInDoubt,
        Mutant::SourceFreesOnArrival,
        Mutant::SourceKeepsWhatItLost,
        Mutant::SourceWaitsForEver,
        Mutant::TargetRunsBeforeTheGrant,
        Mutant::TargetAsksOnce,
        Mutant::TargetKeepsWhatWasCancelled,
        Mutant::TargetSkipsAToken,
        Mutant::HomeGrantsTwice,
        Mutant::HomeLetsThePlacedBeClaimed,
    ] {
        let found = (0..SEEDS).find(|&seed| Schedule::new(seed, &[mutant]).run().is_err());
        println!("{mutant:?}: found by seed {found:?}");
        assert!(found.is_some(), "{mutant:?} was not found");
    }
}
