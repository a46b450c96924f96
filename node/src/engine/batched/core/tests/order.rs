//! Who is served first, and whom a full queue still lets in.

use super::*;

fn at(seconds: u64) -> Timestamp {
    Timestamp::ZERO + Duration::from_secs(seconds)
}

/// A core whose one sequence takes all the room, so that everybody else waits.
fn full() -> (Batcher, SeqKey) {
    let mut core = batcher(config(10));
    let key = core.submit(NOW, spec(100, 150, 5)).expect("fits");
    step(&mut core);
    (core, key)
}

/// Has a request wait here that was asked for so long before `at(100)`.
fn wait(core: &mut Batcher, serial: u64, waited: u64, resumed: bool) {
    let ask = ReserveAsk {
        waited: Duration::from_secs(waited),
        lease: Duration::from_secs(600),
        resumed,
        ..ask(10)
    };
    let promise = core.reserve(at(100), ask).expect("a place in the queue");
    let spec = SeqSpec {
        reservation: Some(promise),
        ..spec(serial, 150, 5)
    };
    core.submit(at(100), spec).expect("promised");
}

/// The requests in the order in which they start, each alone.
fn order(mut core: Batcher, first: SeqKey) -> Vec<u64> {
    core.remove(first);
    let mut started = Vec::new();
    while !core.is_empty() {
        core.plan(at(100));
        let (key, sequence) = core
            .sequences
            .iter()
            .find(|(_, sequence)| matches!(sequence.phase, Phase::Running { .. }))
            .expect("one starts");
        let (key, serial) = (*key, sequence.request.serial);
        started.push(serial);
        core.remove(key);
        core.audit();
    }
    started
}

#[test]
fn who_asked_first_is_served_first_wherever_it_waited_before() {
    let (mut core, first) = full();
    for (serial, waited) in [(1, 5), (2, 50), (3, 0), (4, 20)] {
        wait(&mut core, serial, waited, false);
    }
    assert_eq!(order(core, first), [2, 4, 1, 3]);
}

#[test]
fn a_request_that_lost_its_host_gets_in_where_a_new_one_does_not() {
    let (mut core, first) = full();
    for serial in 1..=4 {
        wait(&mut core, serial, 0, false);
    }
    let new = core.reserve(at(100), ask(1));
    assert_eq!(new, Err(ReserveRefusal::QueueFull));
    for serial in 5..=8 {
        wait(&mut core, serial, serial, true);
    }
    let resumed = ReserveAsk {
        resumed: true,
        ..ask(1)
    };
    assert_eq!(
        core.reserve(at(100), resumed),
        Err(ReserveRefusal::QueueFull)
    );
    assert_eq!(core.load().queue_room, 0);
    assert_eq!(order(core, first), [8, 7, 6, 5, 1, 2, 3, 4]);
}

#[test]
fn the_newest_client_loses_its_kv_first_not_the_newest_arrival() {
    let mut core = batcher(config(10));
    // Two that fill the pool together: the older client comes later, by a replay.
    core.submit(at(100), spec(1, 70, 60)).expect("fits");
    let ask = ReserveAsk {
        waited: Duration::from_secs(30),
        ..ask(5)
    };
    let promise = core.reserve(at(100), ask).expect("room");
    let old = SeqSpec {
        reservation: Some(promise),
        ..spec(2, 70, 60)
    };
    core.submit(at(100), old).expect("promised");
    for _ in 0..60 {
        step(&mut core);
        if core.preemptions() > 0 {
            break;
        }
    }
    let waits = |serial| {
        let (key, _) = core.find(request(serial)).expect("here");
        matches!(core.sequences[&key].phase, Phase::Waiting)
    };
    assert_eq!((waits(1), waits(2)), (true, false));
}

#[test]
fn a_request_that_moves_keeps_its_age() {
    let mut core = batcher(config(10));
    let ask = ReserveAsk {
        waited: Duration::from_secs(30),
        at_once: true,
        ..ask(5)
    };
    let promise = core.reserve(at(100), ask).expect("room");
    let spec = SeqSpec {
        reservation: Some(promise),
        ..spec(1, 70, 60)
    };
    let key = core.arrive(at(100), spec, CopyMode::Kv).expect("promised");
    assert_eq!(core.standing(key).map(|it| it.came), Some(at(70)));
}

#[test]
fn a_home_that_floods_a_node_does_not_shut_the_others_out() {
    let mut core = batcher(BatchConfig {
        queue_limit: 8,
        ..config(10)
    });
    core.submit(NOW, spec(100, 150, 5)).expect("fits");
    step(&mut core);
    let take = |core: &mut Batcher, home: u64| {
        let ask = ReserveAsk {
            home: NodeId(home),
            ..ask(10)
        };
        core.reserve(at(0), ask).is_ok()
    };
    // Alone it may have all of the queue.
    let mut alone = 0;
    while take(&mut core, 1) {
        alone += 1;
    }
    assert_eq!(alone, 8);
    core.release_all();
    let flood: Vec<bool> = (0..6).map(|_| take(&mut core, 1)).collect();
    assert!(flood.iter().all(|taken| *taken));
    // With a second home there its share is half, which it has; the other's is free.
    assert!(take(&mut core, 2));
    assert!(!take(&mut core, 1));
    assert!(take(&mut core, 2));
    core.audit();
}
