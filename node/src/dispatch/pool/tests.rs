use shoal_gossip::NodeRow;
use std::sync::Arc;

use super::*;
use crate::dispatch::testing::{MAX_AGE, at, facts, load, need, rng, row, view};

fn names(view: &ClusterView, need: &Need, now: Timestamp) -> Vec<u64> {
    let corrections = Corrections::default();
    Pool::new(view, &corrections, need, now, MAX_AGE)
        .all()
        .map(|candidate| candidate.node.0)
        .collect()
}

#[test]
fn only_ready_nodes_with_the_model_and_protocol_are_candidates() {
    let mut starting = load(0, 0, 0);
    starting.readiness = Readiness::Starting;
    let mut draining = load(0, 0, 0);
    draining.readiness = Readiness::Draining;
    let mut other_model = facts(4);
    other_model.models[0].id = "other".into();
    let mut other_protocol = facts(5);
    other_protocol.protocol = PROTOCOL + 1;
    let known = Some((load(0, 0, 0), at(0)));
    let view = view(vec![
        row(1, load(0, 0, 0), at(0)),
        row(2, starting, at(0)),
        row(3, draining, at(0)),
        NodeRow {
            facts: Arc::new(other_model),
            load: known,
        },
        NodeRow {
            facts: Arc::new(other_protocol),
            load: known,
        },
        row(6, load(0, 0, 0), at(0)),
    ]);
    assert_eq!(names(&view, &need(1), at(1)), [1, 6]);
    let mut but_one = need(1);
    but_one.excluded.insert(NodeId(1));
    assert_eq!(names(&view, &but_one, at(1)), [6]);
}

#[test]
fn unknown_or_over_age_load_is_no_candidate_however_idle() {
    let unknown = NodeRow {
        facts: Arc::new(facts(1)),
        load: None,
    };
    let view = view(vec![unknown, row(2, load(0, 0, 0), at(0))]);
    assert_eq!(names(&view, &need(1), at(3_000)), [2]);
    assert_eq!(names(&view, &need(1), at(3_001)), Vec::<u64>::new());
}

#[test]
fn a_load_heard_directly_beats_an_older_gossiped_one_and_never_a_newer() {
    let view = view(vec![row(1, load(10, 1, 0), at(0))]);
    let mut corrections = Corrections::default();
    let newer = LoadSummary {
        seq: 2,
        ..load(50, 2, 0)
    };
    let used = |corrections: &Corrections| {
        Pool::new(&view, corrections, &need(1), at(5), MAX_AGE)
            .all()
            .next()
            .map(|candidate| candidate.load.used.0)
    };
    corrections.hear(NodeId(1), newer, at(5));
    assert_eq!(used(&corrections), Some(50));
    corrections.hear(NodeId(1), load(99, 9, 9), at(6));
    assert_eq!(used(&corrections), Some(50));
}

#[test]
fn a_heard_load_keeps_an_old_row_fresh() {
    let view = view(vec![row(1, load(10, 1, 0), at(0))]);
    let mut corrections = Corrections::default();
    corrections.hear(NodeId(1), load(10, 1, 0), at(4_000));
    let need = need(1);
    let pool = Pool::new(&view, &corrections, &need, at(5_000), MAX_AGE);
    assert_eq!(
        pool.all().next().map(|candidate| candidate.age),
        Some(Duration::from_secs(1))
    );
}

#[test]
fn nothing_fits_where_all_slots_are_taken() {
    let full = LoadSummary {
        slots_full: true,
        ..load(10, 4, 0)
    };
    let view = view(vec![row(1, load(10, 4, 0), at(0)), row(2, full, at(0))]);
    let (need, corrections) = (need(16), Corrections::default());
    let pool = Pool::new(&view, &corrections, &need, at(0), MAX_AGE);
    let fits: Vec<bool> = pool.all().map(|candidate| candidate.fits()).collect();
    assert_eq!(fits, [true, false]);
}

#[test]
fn a_charge_counts_until_it_is_settled() {
    let view = view(vec![row(1, load(0, 0, 0), at(0))]);
    let mut corrections = Corrections::default();
    let need = need(40);
    let fits = |corrections: &Corrections| {
        Pool::new(&view, corrections, &need, at(0), MAX_AGE)
            .all()
            .next()
            .unwrap()
            .fits()
    };
    corrections.charge(NodeId(1), Blocks(40));
    assert!(fits(&corrections));
    corrections.charge(NodeId(1), Blocks(40));
    assert!(!fits(&corrections));
    corrections.settle(NodeId(1), Blocks(40));
    assert!(fits(&corrections));
    corrections.settle(NodeId(1), Blocks(40));
    assert_eq!(corrections.charged(NodeId(1)), Blocks::ZERO);
}

#[test]
fn what_was_heard_of_nodes_that_left_is_forgotten() {
    let mut corrections = Corrections::default();
    corrections.hear(NodeId(1), load(0, 0, 0), at(0));
    corrections.hear(NodeId(2), load(0, 0, 0), at(0));
    corrections.forget_absent(&view(vec![row(1, load(0, 0, 0), at(0))]));
    assert_eq!(corrections.heard.len(), 1);
}

#[test]
fn two_are_distinct_and_every_pair_is_drawn() {
    let mut rng = rng();
    for nodes in [2u64, 3, 9] {
        let view = view(
            (1..=nodes)
                .map(|node| row(node, load(0, 0, 0), at(0)))
                .collect(),
        );
        let corrections = Corrections::default();
        let need = need(1);
        let pool = Pool::new(&view, &corrections, &need, at(0), MAX_AGE);
        let mut seen = BTreeSet::new();
        for _ in 0..2_000 {
            let (Some(first), Some(second)) = pool.two(&mut rng) else {
                panic!("two candidates exist");
            };
            assert_ne!(first.node, second.node);
            seen.insert((first.node, second.node));
        }
        assert_eq!(seen.len() as u64, nodes * (nodes - 1));
    }
}

#[test]
fn two_finds_the_only_usable_node_in_a_large_mesh() {
    let mut draining = load(0, 0, 0);
    draining.readiness = Readiness::Draining;
    let mut rows: Vec<_> = (1..=500).map(|node| row(node, draining, at(0))).collect();
    rows.push(row(501, load(0, 0, 0), at(0)));
    let view = view(rows);
    let corrections = Corrections::default();
    let need = need(1);
    let pool = Pool::new(&view, &corrections, &need, at(0), MAX_AGE);
    let (first, second) = pool.two(&mut rng());
    assert_eq!(first.map(|candidate| candidate.node), Some(NodeId(501)));
    assert_eq!(second, None);
}

#[test]
fn a_host_asks_the_freest_two_of_those_it_draws() {
    let asked = |nodes: u64| {
        let used = |node| 10 * u32::try_from(node % 10).unwrap();
        let rows = (1..=nodes).map(|node| row(node, load(used(node), 1, 0), at(0)));
        let view = view(rows.collect());
        let corrections = Corrections::default();
        let need = need(1);
        let pool = Pool::new(&view, &corrections, &need, at(0), MAX_AGE);
        pool.two_to_ask(&mut rng()).collect::<Vec<_>>()
    };
    assert_eq!(asked(0), []);
    assert_eq!(asked(1).len(), 1);
    // Of three all are drawn.
    let names: Vec<_> = asked(3).iter().map(|candidate| candidate.node).collect();
    assert_eq!(names, [NodeId(1), NodeId(2)]);
    // Of many, eight are, so that the fuller half is asked once in more than a hundred times.
    let two = asked(1_000);
    assert_eq!(two.len(), 2);
    assert!(two[0].node != two[1].node && two[0].load.used <= two[1].load.used);
    assert!(two[1].load.used < Blocks(50), "{two:?}");
}

#[test]
fn an_empty_pool_says_whether_anybody_serves_the_model() {
    let mut draining = load(0, 0, 0);
    draining.readiness = Readiness::Draining;
    let view = view(vec![row(1, draining, at(0))]);
    let corrections = Corrections::default();
    let mut need = need(1);
    let why = |need: &Need| Pool::new(&view, &corrections, need, at(0), MAX_AGE).why_empty();
    assert_eq!(why(&need), NoCandidate::NoneUsable);
    need.model = "nobody's".into();
    assert_eq!(why(&need), NoCandidate::UnknownModel);
}
