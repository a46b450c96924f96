use shoal_gossip::NodeId;

use super::*;
use crate::identity::Identity;
use crate::mesh::testing::{facts, view};

fn at(seconds: u64) -> Timestamp {
    Timestamp::since_start(Duration::from_secs(seconds))
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// How many of these knock and enter, one after the other.
fn enter(places: &mut Places, now: Timestamp, proven: bool, knocks: usize) -> usize {
    (0..knocks)
        .filter(|_| places.knock(now, proven) == Answer::Enter)
        .count()
}

#[test]
fn strangers_who_take_all_their_places_leave_those_of_nodes() {
    let mut door = Door::new();
    assert_eq!(door.strangers.knock(at(0), false), Answer::Prove);
    assert_eq!(enter(&mut door.strangers, at(0), true, 1_000), STRANGERS);
    assert_eq!(door.strangers.knock(at(0), true), Answer::Refuse);
    assert_eq!(enter(&mut door.neighbours, at(0), true, 1_000), NEIGHBOURS);
    assert_eq!(enter(&mut door.named, at(0), true, 1_000), NAMED);
}

#[test]
fn forged_addresses_of_nodes_take_half_their_places_at_most() {
    let mut door = Door::new();
    for (standing, most) in [
        (Standing::Named, NAMED),
        (Standing::Neighbour, NEIGHBOURS),
        (Standing::Stranger, 0),
    ] {
        let places = door.of(standing);
        assert_eq!(enter(places, at(0), false, 1_000), most / 2, "{standing:?}");
        assert_eq!(places.knock(at(0), false), Answer::Prove, "{standing:?}");
        assert_eq!(places.knock(at(0), true), Answer::Enter, "{standing:?}");
    }
}

#[test]
fn a_handshake_that_failed_keeps_its_place_as_long_as_quic_remembers_it() {
    let mut places = Places::new(2, 0);
    assert_eq!(enter(&mut places, at(0), true, 3), 2);
    places.leave(at(1), false);
    assert_eq!(places.knock(at(1), true), Answer::Refuse);
    let free = at(1) + LINGERS;
    let before = free.before(Duration::from_nanos(1));
    assert_eq!(places.knock(before, true), Answer::Refuse);
    assert_eq!(places.knock(free, true), Answer::Enter);
    places.leave(free, true);
    assert_eq!(places.knock(free, true), Answer::Enter);
}

#[test]
fn callers_are_known_by_the_records_of_the_newest_view() {
    let node = Identity::ephemeral();
    let record = |control: &str, stream: &str| facts(&node, address(control), address(stream));
    let one = view(&[record("10.0.0.1:7400", "10.0.0.1:7401")]);
    let views = tokio::sync::watch::Sender::new(Arc::clone(&one));
    let mut keeper = Doorkeeper::new(Members::new(views.subscribe()), |facts| facts.stream);
    for (from, standing) in [
        ("10.0.0.1:7401", Standing::Named),
        ("[::ffff:10.0.0.1]:7401", Standing::Named),
        ("10.0.0.1:7400", Standing::Neighbour),
        ("10.0.0.2:7401", Standing::Stranger),
    ] {
        assert_eq!(keeper.standing(address(from)), standing, "{from}");
    }
    views.send_replace(view(&[record("10.0.0.2:7400", "10.0.0.2:7401")]));
    for (from, standing) in [
        ("10.0.0.1:7401", Standing::Stranger),
        ("10.0.0.2:7401", Standing::Named),
    ] {
        assert_eq!(keeper.standing(address(from)), standing, "{from}");
    }
}

#[test]
fn a_place_is_given_back_when_it_is_dropped() {
    let nobody = Arc::new(ClusterView::new(NodeId(0), Timestamp::ZERO, Vec::new()));
    let views = tokio::sync::watch::Sender::new(nobody);
    let keeper = Doorkeeper::new(Members::new(views.subscribe()), |facts| facts.stream);
    lock(&keeper.door).strangers.held = 2;
    keeper.place(Standing::Stranger).welcome();
    assert_eq!(lock(&keeper.door).strangers.held, 1);
    assert!(lock(&keeper.door).strangers.lingering.is_empty());
    drop(keeper.place(Standing::Stranger));
    assert_eq!(lock(&keeper.door).strangers.held, 0);
    assert_eq!(lock(&keeper.door).strangers.lingering.len(), 1);
}
