use std::collections::BTreeMap;

use shoal_gossip::{LoadSummary, NodeRow};

use super::*;
use crate::dispatch::pool::Corrections;
use crate::dispatch::testing::{MAX_AGE, at, load, need, rng, row, view};

/// How often each node is taken in 600 choices for a request of `blocks` blocks.
fn taken(name: PolicyName, blocks: u32, rows: Vec<NodeRow>) -> BTreeMap<u64, u32> {
    let view = view(rows);
    let corrections = Corrections::default();
    let need = need(blocks);
    let pool = Pool::new(&view, &corrections, &need, at(0), MAX_AGE);
    let mut policy = Policy::new(name);
    let mut rng = rng();
    let mut counts = BTreeMap::new();
    for _ in 0..600 {
        if let Some(choice) = policy.choose(&pool, &mut rng) {
            *counts.entry(choice.taken.node.0).or_default() += 1;
        }
    }
    counts
}

fn loads(loads: &[LoadSummary]) -> Vec<NodeRow> {
    (1..)
        .zip(loads)
        .map(|(node, load)| row(node, *load, at(0)))
        .collect()
}

#[test]
fn p2c_takes_the_freer_of_two_and_never_the_worst_of_three() {
    let counts = taken(
        PolicyName::P2c,
        1,
        loads(&[load(90, 9, 0), load(50, 5, 0), load(10, 1, 0)]),
    );
    assert_eq!(counts.get(&1), None);
    assert!(counts[&3] > counts[&2], "{counts:?}");
}

#[test]
fn p2c_prefers_a_node_where_the_request_fits_over_a_freer_one() {
    // 60 blocks left for one request, but 50 wanted and one waits already: it would queue there.
    let waiting = load(40, 0, 1);
    let tight = load(49, 4, 0);
    let counts = taken(PolicyName::P2c, 50, loads(&[waiting, tight]));
    assert_eq!(counts, BTreeMap::from([(2, 600)]));
}

#[test]
fn p2c_spreads_an_idle_mesh_evenly() {
    let counts = taken(PolicyName::P2c, 1, loads(&[load(0, 0, 0); 4]));
    for node in 1..=4 {
        assert!((100..=200).contains(&counts[&node]), "{counts:?}");
    }
}

#[test]
fn p2c_breaks_equal_freeness_by_the_prefill_backlog() {
    let busy = LoadSummary {
        prefill_backlog: Tokens(500),
        ..load(10, 1, 0)
    };
    let counts = taken(PolicyName::P2c, 1, loads(&[busy, load(10, 1, 0)]));
    assert_eq!(counts, BTreeMap::from([(2, 600)]));
}

#[test]
fn one_candidate_is_taken_and_none_is_none() {
    assert_eq!(
        taken(PolicyName::P2c, 1, loads(&[load(0, 0, 0)])),
        BTreeMap::from([(1, 600)])
    );
    for name in [
        PolicyName::P2c,
        PolicyName::RoundRobin,
        PolicyName::LeastQueue,
        PolicyName::Freest,
        PolicyName::Random,
    ] {
        assert_eq!(taken(name, 1, Vec::new()), BTreeMap::new());
    }
}

#[test]
fn round_robin_gives_everyone_the_same_number_of_turns() {
    let counts = taken(
        PolicyName::RoundRobin,
        1,
        loads(&[load(90, 9, 5), load(0, 0, 0), load(0, 0, 0)]),
    );
    assert_eq!(counts, BTreeMap::from([(1, 200), (2, 200), (3, 200)]));
}

#[test]
fn least_queue_counts_running_and_queued_requests_and_freest_counts_blocks() {
    let rows = || loads(&[load(10, 3, 1), load(80, 1, 0), load(30, 1, 1)]);
    assert_eq!(
        taken(PolicyName::LeastQueue, 1, rows()),
        BTreeMap::from([(2, 600)])
    );
    assert_eq!(
        taken(PolicyName::Freest, 1, rows()),
        BTreeMap::from([(3, 600)])
    );
}

#[test]
fn random_ignores_load() {
    let counts = taken(
        PolicyName::Random,
        1,
        loads(&[load(99, 9, 9), load(0, 0, 0)]),
    );
    assert!(counts[&1] > 200 && counts[&2] > 200, "{counts:?}");
}
