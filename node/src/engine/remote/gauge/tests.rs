use std::num::NonZeroU32;

use shoal_gossip::NodeId;

use super::*;

const NOW: Timestamp = Timestamp::ZERO;

fn at(ms: u64) -> Timestamp {
    NOW + Duration::from_millis(ms)
}

fn gauge() -> Gauge {
    Gauge::new(Assumed {
        block_size: BlockSize::new(NonZeroU32::new(16).unwrap()),
        capacity: None,
        queue_limit: 2,
    })
}

fn reading() -> Reading {
    Reading {
        capacity: Some(1600),
        block_size: Some(16),
        used: Some(160),
        running: Some(2),
        waiting: Some(0),
        ..Reading::default()
    }
}

fn request(serial: u64) -> (RequestId, Epoch) {
    let home = NodeId(1);
    (RequestId { home, serial }, Epoch::FIRST)
}

fn ask(demand: u32) -> ReserveAsk {
    ReserveAsk {
        demand: Blocks(demand),
        lease: Duration::from_secs(5),
        at_once: false,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    }
}

#[test]
fn what_the_engine_tells_is_corrected_by_what_was_sent_since() {
    let mut gauge = gauge();
    gauge.sent(at(5), request(1), (Tokens(31), Tokens::ZERO));
    gauge.polled(at(10), at(12), Ok(reading()));
    let load = gauge.load(at(12));
    assert_eq!((load.basis, load.total), (LoadBasis::Polled, Blocks(100)));
    assert_eq!((load.used, load.running, load.queued), (Blocks(10), 2, 0));
    gauge.sent(at(20), request(2), (Tokens(31), Tokens::ZERO));
    let load = gauge.load(at(20));
    assert_eq!((load.used, load.running), (Blocks(12), 3));
    assert_eq!(load.prefill_backlog, Tokens(62));
    // One that the engine counted ends, and one that it did not.
    gauge.gone(request(1).0, Epoch::FIRST);
    gauge.gone(request(2).0, Epoch::FIRST);
    let load = gauge.load(at(30));
    assert_eq!((load.used, load.running), (Blocks(8), 1));
    gauge.polled(at(40), at(41), Ok(reading()));
    assert_eq!(gauge.load(at(41)).used, Blocks(10));
}

#[test]
fn what_is_not_told_is_estimated_and_never_idle() {
    let mut gauge = gauge();
    gauge.sent(at(1), request(1), (Tokens(31), Tokens::ZERO));
    let silent = Reading {
        used: None,
        running: None,
        waiting: None,
        ..reading()
    };
    gauge.polled(at(10), at(12), Ok(silent));
    let load = gauge.load(at(12));
    assert_eq!(load.basis, LoadBasis::Estimated);
    assert_eq!(
        (load.used, load.running, load.total),
        (Blocks(2), 1, Blocks(100))
    );
    gauge.polled(at(20), at(22), Ok(Reading::default()));
    let load = gauge.load(at(22));
    assert_eq!((load.basis, load.used), (LoadBasis::Estimated, Blocks(2)));
    assert_eq!(load.total, Blocks(100), "its size was told once");
}

#[test]
fn a_capacity_that_nobody_told_refuses_nobody() {
    let mut gauge = gauge();
    gauge.polled(at(20), at(22), Ok(Reading::default()));
    assert_eq!(gauge.load(at(22)).total, Blocks(ASSUMED_CAPACITY.0 / 16));
    assert!(gauge.reserve(at(22), ask(1_000_000)).is_ok());
}

#[test]
fn an_engine_that_is_not_well_takes_nothing() {
    let mut gauge = gauge();
    assert_eq!(gauge.load(NOW).readiness, Readiness::Starting);
    assert_eq!(gauge.reserve(NOW, ask(1)), Err(ReserveRefusal::NotReady));
    gauge.polled(at(1), at(2), Ok(reading()));
    assert_eq!(gauge.load(NOW).readiness, Readiness::Ready);
    gauge.polled(at(3), at(4), Err(Unwell::Silent));
    gauge.polled(at(5), at(6), Err(Unwell::Silent));
    assert_eq!(gauge.state(), State::Unwell(at(4), Unwell::Silent));
    assert_eq!(gauge.load(NOW).readiness, Readiness::Failed);
    gauge.polled(at(7), at(8), Err(Unwell::Loading));
    assert_eq!(gauge.load(NOW).readiness, Readiness::Starting);
    let asleep = Reading {
        asleep: true,
        ..reading()
    };
    gauge.polled(at(9), at(9), Ok(asleep));
    assert_eq!(gauge.load(NOW).readiness, Readiness::Starting);
    gauge.polled(at(9), at(9), Ok(reading()));
    gauge.drain();
    assert_eq!(gauge.load(NOW).readiness, Readiness::Draining);
}

#[test]
fn room_is_promised_once_and_the_queue_is_bounded() {
    let mut gauge = gauge();
    gauge.polled(at(1), at(2), Ok(reading()));
    let first = gauge.reserve(at(2), ask(60)).unwrap();
    assert_eq!(gauge.load(at(2)).free(), Blocks(30));
    let at_once = ReserveAsk {
        at_once: true,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
        ..ask(60)
    };
    assert_eq!(
        gauge.reserve(at(2), at_once),
        Err(ReserveRefusal::NoRoomNow)
    );
    assert_eq!(
        gauge.reserve(at(2), ask(101)),
        Err(ReserveRefusal::NeverFits)
    );
    gauge.reserve(at(2), ask(60)).unwrap();
    gauge.reserve(at(2), ask(60)).unwrap();
    assert_eq!(
        gauge.reserve(at(2), ask(60)),
        Err(ReserveRefusal::QueueFull)
    );
    gauge.release(first);
    assert_eq!(gauge.load(at(2)).free(), Blocks(90));
    // Leases end by themselves.
    assert!(gauge.reserve(at(5_100), at_once).is_ok());
}

#[test]
fn slots_and_what_waits_in_the_engine_count() {
    let mut gauge = gauge();
    gauge.identified(Some(2), None);
    let waiting = Reading {
        waiting: Some(3),
        waiting_tokens: Some(96),
        ..reading()
    };
    gauge.polled(at(1), at(2), Ok(waiting));
    let load = gauge.load(at(2));
    assert_eq!((load.running, load.queued, load.queue_room), (2, 3, 0));
    assert!(load.slots_full);
    assert_eq!(
        (load.head_of_line, load.queued_demand),
        (Blocks(2), Blocks(6))
    );
    assert_eq!(gauge.reserve(at(2), ask(1)), Err(ReserveRefusal::QueueFull));
}

#[test]
fn an_engine_that_asks_for_time_gets_it() {
    let mut gauge = gauge();
    gauge.polled(at(1), at(2), Ok(reading()));
    gauge.told_full(at(2), Some(Duration::from_secs(3)));
    assert_eq!(
        gauge.reserve(at(100), ask(1)),
        Err(ReserveRefusal::QueueFull)
    );
    assert!(gauge.reserve(at(3_100), ask(1)).is_ok());
    gauge.told_full(at(4_000), Some(Duration::from_secs(100_000)));
    assert!(gauge.reserve(at(35_000), ask(1)).is_ok());
}

#[test]
fn the_step_time_is_what_streams_show() {
    let mut gauge = gauge();
    gauge.sent(at(0), request(1), (Tokens(31), Tokens::ZERO));
    gauge.drew(at(100), request(1).0, 1);
    assert_eq!(gauge.load(at(100)).step_time_us, 0);
    gauge.drew(at(140), request(1).0, 2);
    assert_eq!(gauge.load(at(140)).step_time_us, 20_000);
    assert_eq!(gauge.load(at(140)).prefill_backlog, Tokens::ZERO);
}

#[test]
fn figures_that_are_late_stand_for_a_while() {
    let mut gauge = gauge();
    assert!(!gauge.late(at(5)), "there are none");
    gauge.polled(at(10), at(12), Ok(reading()));
    gauge.polled(at(20), at(22), Err(Unwell::Silent));
    assert!(gauge.late(at(1_000)));
    assert_eq!(gauge.load(at(1_000)).readiness, Readiness::Ready);
    assert_eq!(gauge.load(at(1_000)).basis, LoadBasis::Polled);
    assert!(!gauge.late(at(1_600)));
}
