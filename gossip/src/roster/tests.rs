//! Which records become rows.

use std::time::Duration;

use super::*;
use crate::testing::facts;
use crate::types::Incarnation;
use crate::wire::{pack_facts, pack_load};

const HERE: u16 = 1;

fn at(millis: u64) -> Timestamp {
    Timestamp::since_start(Duration::from_millis(millis))
}

fn id(node: u16, generation: u64) -> ChitchatId {
    let address = facts(node, 0).stream;
    ChitchatId::new(facts(node, 0).node.to_string(), generation, address)
}

fn load(incarnation: u64, seq: u64) -> LoadSummary {
    LoadSummary {
        incarnation: Incarnation(incarnation),
        seq,
        ..LoadSummary::default()
    }
}

fn record(node: u16, incarnation: u64, seq: u64) -> Observed {
    Observed {
        id: id(node, incarnation),
        values: Some(Values {
            version: seq + 2,
            facts: Some((1, pack_facts(&facts(node, incarnation)).unwrap())),
            load: Some(pack_load(&load(incarnation, seq)).unwrap()),
            left: false,
        }),
    }
}

fn roster() -> Roster {
    Roster::new(facts(HERE, 0).node)
}

fn names(roster: &Roster) -> BTreeSet<(NodeId, u64)> {
    roster
        .rows()
        .iter()
        .map(|row| (row.node(), row.facts.incarnation.0))
        .collect()
}

fn expected(lives: &[(u16, u64)]) -> BTreeSet<(NodeId, u64)> {
    lives
        .iter()
        .map(|(node, incarnation)| (facts(*node, 0).node, *incarnation))
        .collect()
}

#[test]
fn a_live_node_has_a_row_and_a_dead_one_has_none() {
    let mut roster = roster();
    roster.update(at(1), vec![record(2, 5, 1), record(3, 5, 1)]);
    assert_eq!(names(&roster), expected(&[(2, 5), (3, 5)]));
    roster.update(at(2), vec![record(3, 5, 1)]);
    assert_eq!(names(&roster), expected(&[(3, 5)]));
}

#[test]
fn the_age_counts_from_the_arrival_of_a_newer_load_only() {
    let mut roster = roster();
    roster.update(at(10), vec![record(2, 5, 7)]);
    for (when, seq, since) in [(20, 7, 10), (30, 6, 10), (40, 8, 40)] {
        roster.update(at(when), vec![record(2, 5, seq)]);
        let (_, received) = roster.rows()[0].load.unwrap();
        assert_eq!(received, at(since), "seq {seq}");
    }
}

#[test]
fn a_load_of_another_life_or_in_junk_is_not_taken() {
    let mut roster = roster();
    let mut stolen = record(2, 5, 1);
    stolen.values.as_mut().unwrap().load = Some(pack_load(&load(4, 900)).unwrap());
    assert_eq!(roster.update(at(1), vec![stolen]).loads, 1);
    assert_eq!(roster.rows()[0].load, None);
    let mut junk = record(2, 5, 1);
    junk.values.as_mut().unwrap().load = Some("junk".to_owned());
    assert_eq!(roster.update(at(1), vec![junk]).loads, 1);
    assert_eq!(names(&roster), expected(&[(2, 5)]));
}

#[test]
fn the_newer_life_replaces_the_older_one_though_both_seem_alive() {
    for order in [[5, 6], [6, 5]] {
        let mut roster = roster();
        let records = order.map(|incarnation| record(2, incarnation, 1)).to_vec();
        roster.update(at(1), records);
        assert_eq!(names(&roster), expected(&[(2, 6)]));
    }
}

#[test]
fn a_node_that_said_goodbye_has_no_row_and_does_not_bring_back_its_past() {
    let mut roster = roster();
    let mut leaving = record(2, 6, 1);
    leaving.values.as_mut().unwrap().left = true;
    roster.update(at(1), vec![record(2, 5, 1), leaving, record(3, 5, 1)]);
    assert_eq!(names(&roster), expected(&[(3, 5)]));
    assert!(!roster.addresses().is_empty());
}

#[test]
fn junk_facts_are_counted_and_left_out_and_the_rest_stays() {
    let mut roster = roster();
    let mut junk = record(2, 5, 1);
    junk.values.as_mut().unwrap().facts = Some((1, "zz".to_owned()));
    let mut lying = record(3, 5, 1);
    lying.values.as_mut().unwrap().facts = Some((1, pack_facts(&facts(4, 5)).unwrap()));
    let mut odd = record(5, 5, 1);
    odd.id.node_id = "not a node id".into();
    let rejected = roster.update(at(1), vec![junk, lying, odd, record(6, 5, 1)]);
    assert_eq!(rejected, Rejected { rows: 3, loads: 0 });
    assert_eq!(names(&roster), expected(&[(6, 5)]));
}

#[test]
fn an_unchanged_record_keeps_its_row() {
    let mut roster = roster();
    roster.update(at(1), vec![record(2, 5, 1)]);
    let before = roster.rows();
    let unchanged = Observed {
        id: id(2, 5),
        values: None,
    };
    roster.update(at(9), vec![unchanged]);
    assert_eq!(roster.rows(), before);
    assert_eq!(
        roster.seen(&id(2, 5)),
        Seen {
            version: 3,
            facts: 1
        }
    );
}

#[test]
fn our_own_past_is_not_a_row() {
    let mut roster = roster();
    roster.update(at(1), vec![record(HERE, 5, 1)]);
    assert!(roster.rows().is_empty());
}

#[test]
fn only_a_live_later_process_elsewhere_displaces_us() {
    let own = facts(HERE, 0).stream;
    let other = facts(2, 0).stream;
    let rival = |address, live| Rival {
        generation: 9,
        address,
        live,
    };
    assert_eq!(judge(own, &[]), Rivalry::None);
    assert_eq!(judge(own, &[rival(other, false)]), Rivalry::None);
    assert_eq!(judge(own, &[rival(other, true)]), Rivalry::Displaced(other));
    assert_eq!(judge(own, &[rival(own, false)]), Rivalry::Outbid(9));
    assert_eq!(judge(own, &[rival(own, true)]), Rivalry::Outbid(9));
    let both = [rival(own, true), rival(other, true)];
    assert_eq!(judge(own, &both), Rivalry::Displaced(other));
}

#[test]
fn exactly_the_latest_nodes_give_way() {
    let leaving: Vec<_> = (0..12).filter(|before| one_too_many(*before, 10)).collect();
    assert_eq!(leaving, [10, 11]);
}
