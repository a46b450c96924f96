//! Faults on a schedule.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shoal_gossip::testing::{kept_seeds, number};

use super::*;
use crate::simulate::{Fault, NoFault};

/// Sixteen requests a second for half a minute on eight nodes, of which half are entries: what is killed below is none.
fn with_faults(scheduling: Scheduling, faults: &[&str]) -> Run {
    let faults: Result<Vec<Fault>, NoFault> = faults.iter().map(|text| text.parse()).collect();
    let plan = Plan {
        faults: faults.expect("faults"),
        entries: 4,
        ..plan(8, scheduling)
    };
    run(&plan, arrivals(480, EVERY), |_| {}).expect("it runs")
}

const EVERY: Duration = Duration::from_millis(63);

fn failed(run: &Run) -> Vec<&Outcome> {
    let outcomes = run.records.iter().map(|record| &record.outcome);
    outcomes
        .filter(|outcome| **outcome != Outcome::Finished)
        .collect()
}

fn all_whole(run: &Run) {
    assert_eq!(failed(run), Vec::<&Outcome>::new());
    for (record, arrival) in run.records.iter().zip(arrivals(480, EVERY)) {
        assert_eq!(record.output, arrival.output);
    }
}

#[test]
fn requests_of_a_killed_host_go_on_elsewhere_and_none_is_lost() {
    let run = with_faults(Scheduling::Shoal, &["10:kill:6"]);
    all_whole(&run);
    assert!(run.replays > 3, "{}", run.replays);
    let gaps = run.records.iter().map(|record| record.longest_gap);
    let longest = gaps.max().expect("some");
    assert!(
        longest > Duration::from_millis(250),
        "nobody noticed: {longest:?}"
    );
    assert!(longest < Duration::from_secs(6), "{longest:?}");
    assert!(
        run.records
            .iter()
            .skip(200)
            .all(|record| record.host != Some(6))
    );
}

#[test]
fn the_central_schedulers_lose_what_a_host_had() {
    let run = with_faults(Scheduling::Llumnix, &["10:kill:6"]);
    let lost = failed(&run);
    assert!(lost.len() > 3 && lost.len() < 60, "{}", lost.len());
    assert!(
        lost.iter()
            .all(|it| **it == Outcome::Failed("host lost".to_owned()))
    );
}

#[test]
fn clients_of_a_killed_entry_see_it_and_others_go_elsewhere() {
    let run = with_faults(Scheduling::Shoal, &["10:kill:1"]);
    let lost = failed(&run);
    assert!(!lost.is_empty());
    assert!(
        lost.iter()
            .all(|it| **it == Outcome::Failed("entry lost".to_owned()))
    );
    let after = run
        .records
        .iter()
        .filter(|record| record.at > Duration::from_secs(10));
    assert!(
        after
            .clone()
            .all(|record| record.entry != 1 && record.outcome == Outcome::Finished)
    );
}

#[test]
fn a_node_that_joins_is_used_from_then_on() {
    let run = with_faults(Scheduling::Shoal, &["10:join:7"]);
    all_whole(&run);
    let at_it = run
        .records
        .iter()
        .filter(|record| record.host == Some(7) && record.moves == 0);
    let (mut count, mut first) = (0, Duration::MAX);
    for record in at_it {
        count += 1;
        first = first.min(record.at);
    }
    assert!(count > 20, "{count}");
    assert!(first >= Duration::from_millis(9_900), "{first:?}");
}

#[test]
fn a_node_that_was_killed_comes_back() {
    let run = with_faults(Scheduling::Shoal, &["5:kill:5", "15:join:5"]);
    all_whole(&run);
    let from = |second| {
        let after = run
            .records
            .iter()
            .filter(move |record| record.at > Duration::from_secs(second));
        after.filter(|record| record.host == Some(5)).count()
    };
    assert!(from(16) > 10, "{}", from(16));
}

#[test]
fn a_node_that_drains_ends_what_it_has_and_takes_nothing_new() {
    let run = with_faults(Scheduling::Shoal, &["10:drain:6"]);
    all_whole(&run);
    let before = run.records.iter().filter(|record| record.host == Some(6));
    assert!(before.count() > 10);
    assert!(
        run.records
            .iter()
            .skip(200)
            .all(|record| record.host != Some(6))
    );
}

#[test]
fn a_slow_node_gets_less() {
    let count = |run: &Run| {
        run.records
            .iter()
            .filter(|record| record.host == Some(6))
            .count()
    };
    let (even, slow) = (
        with_faults(Scheduling::Shoal, &["0:slow:6:1"]),
        with_faults(Scheduling::Shoal, &["0:slow:6:6"]),
    );
    all_whole(&slow);
    assert!(
        count(&slow) * 2 < count(&even),
        "{} of {}",
        count(&slow),
        count(&even)
    );
}

#[test]
fn both_sides_of_a_cut_serve_and_find_each_other_again() {
    let run = with_faults(Scheduling::Shoal, &["8:cut:2", "20:heal"]);
    all_whole(&run);
    assert!(run.replays > 3, "{}", run.replays);
    let across = |record: &&Record| {
        record
            .host
            .is_some_and(|host| (host < 2) != (record.entry < 2))
    };
    let between = |from: u64, to: u64| {
        let inside = run.records.iter().filter(move |record| {
            record.at > Duration::from_secs(from) && record.at < Duration::from_secs(to)
        });
        // Those that moved later are not what is asked about.
        inside.filter(across).filter(|it| it.moves == 0).count()
    };
    // Views lose the other side within two seconds.
    assert_eq!(between(11, 18), 0);
    assert!(between(22, 30) > 20, "{}", between(22, 30));
}

#[test]
fn a_short_cut_costs_a_gap_and_no_replay() {
    let run = with_faults(Scheduling::Shoal, &["8:cut:4", "9:heal"]);
    all_whole(&run);
    assert_eq!(run.replays, 0);
}

#[test]
fn a_fault_of_a_node_that_is_not_there_is_refused() {
    let plan = Plan {
        faults: vec!["1:kill:8".parse().expect("a fault")],
        ..plan(8, Scheduling::Shoal)
    };
    let refused = run(&plan, arrivals(1, EVERY), |_| {});
    assert!(matches!(refused, Err(SimulateError::Fault(what)) if what == "1:kill:8"));
}

/// Up to six faults of a seed within twenty seconds, of nodes that are no entries, and never all of them at once. A
/// cut heals, and whoever is killed may come back.
fn schedule(seed: u64) -> Vec<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut faults = Vec::new();
    let mut dead = Vec::new();
    for _ in 0..rng.random_range(1..=6) {
        let at = rng.random_range(2.0..20.0);
        let node = rng.random_range(4..8);
        match rng.random_range(0..5) {
            0 | 1 if dead.len() < 3 && !dead.contains(&node) => {
                dead.push(node);
                faults.push(format!("{at:.3}:kill:{node}"));
                if rng.random_bool(0.5) {
                    faults.push(format!(
                        "{:.3}:join:{node}",
                        at + rng.random_range(0.2..6.0)
                    ));
                }
            }
            2 => faults.push(format!("{at:.3}:slow:{node}:{}", rng.random_range(2..8))),
            3 if !dead.contains(&node) => {
                dead.push(node);
                faults.push(format!("{at:.3}:drain:{node}"));
            }
            _ => {
                faults.push(format!("{at:.3}:cut:{}", rng.random_range(1..8)));
                faults.push(format!("{:.3}:heal", at + rng.random_range(0.3..9.0)));
            }
        }
    }
    faults
}

/// Seeds that are always run: those in `tests/seeds.txt`, and so many from the first on. `SHOAL_SEED=n` runs one,
/// `SHOAL_SEEDS=n` so many.
fn seeds() -> Vec<u64> {
    if let Some(seed) = number("SHOAL_SEED") {
        return vec![seed];
    }
    let kept = kept_seeds().expect("each line begins with a seed");
    kept.into_iter()
        .chain(0..number("SHOAL_SEEDS").unwrap_or(60))
        .collect()
}

#[test]
fn no_seeded_schedule_of_faults_loses_a_request() {
    let (mut replays, mut moves) = (0, 0);
    for seed in seeds() {
        let faults = schedule(seed);
        let faults: Vec<&str> = faults.iter().map(String::as_str).collect();
        let run = with_faults(Scheduling::Shoal, &faults);
        let lost = failed(&run);
        assert!(
            lost.is_empty(),
            "seed {seed}, {faults:?}: {lost:?}\nrerun: SHOAL_SEED={seed} cargo nextest run --workspace -E 'test(no_seeded_schedule)'"
        );
        for (record, arrival) in run.records.iter().zip(arrivals(480, EVERY)) {
            assert_eq!(record.output, arrival.output, "seed {seed}");
        }
        replays += run.replays;
        moves += run
            .records
            .iter()
            .map(|record| u64::from(record.moves))
            .sum::<u64>();
    }
    println!("{replays} replays, {moves} moves");
    assert!(replays > 0, "nothing was ever lost");
}
