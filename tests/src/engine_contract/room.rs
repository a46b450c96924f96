//! Promises, the queue, and what the load says of them.

use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Blocks, NodeId};
use shoal_node::engine::{Engine, EngineError, ReservationId, ReserveAsk, ReserveRefusal};

use super::{
    Shape, becomes_empty, collect, demand, job, load_becomes, made, occupy, run, with_reservation,
};
use crate::wait;

fn ask(demand: Blocks) -> ReserveAsk {
    ReserveAsk {
        demand,
        lease: wait::PATIENCE,
        at_once: false,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    }
}

/// Blocks are held from the promise on, and free again by each of its three ends.
pub async fn a_promise_ends_in_use_in_release_or_by_lease<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    let plain = job(&*engine, 1, 100, 8);
    let blocks = demand(&*engine, &plain);

    let released = engine.reserve(ask(blocks)).expect("room");
    assert_eq!(engine.load().reserved, blocks);
    engine.release(released);
    engine.release(released);
    engine.release(ReservationId(u64::MAX));
    assert_eq!(engine.load().reserved, Blocks::ZERO);

    let used = engine.reserve(ask(blocks)).expect("room");
    let output = run(&*engine, with_reservation(plain.clone(), used)).await;
    assert_eq!(output.ids.len(), 8);
    becomes_empty(&*engine).await;

    let short = ReserveAsk {
        demand: blocks,
        lease: Duration::from_millis(1),
        at_once: false,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    };
    let expired = engine.reserve(short).expect("room");
    becomes_empty(&*engine).await;
    // Its job comes late, and is a job like any other.
    let late = run(&*engine, with_reservation(plain, expired)).await;
    assert_eq!(late.ids.len(), 8);

    let too_much = Blocks(engine.facts().total.0.saturating_add(1));
    assert_eq!(
        engine.reserve(ask(too_much)),
        Err(ReserveRefusal::NeverFits)
    );
    becomes_empty(&*engine).await;
}

/// Beyond the bound nobody is promised anything; what was promised stands.
pub async fn the_queue_is_bounded<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let shape = Shape::SPLIT;
    let engine = made(make, shape);
    let running = occupy(&*engine, shape).await;
    let promised = engine.reserve(ask(Blocks(2))).expect("a place");
    let load = engine.load();
    assert_eq!((load.queued, load.queued_demand), (1, Blocks(2)));
    assert_eq!(
        (load.head_of_line, load.reserved),
        (Blocks(2), Blocks::ZERO)
    );
    let mut waiting = Vec::new();
    for serial in 1..u64::from(shape.queue_limit) {
        waiting.push(
            engine
                .submit(job(&*engine, serial, 20, 8))
                .expect("a place"),
        );
    }
    let load = engine.load();
    assert_eq!((load.queued, load.queue_room), (shape.queue_limit, 0));
    assert_eq!(
        engine.reserve(ask(Blocks(1))),
        Err(ReserveRefusal::QueueFull)
    );
    assert!(matches!(
        engine.submit(job(&*engine, 50, 20, 8)),
        Err(EngineError::QueueFull)
    ));
    let promised = with_reservation(job(&*engine, 51, 20, 8), promised);
    waiting.push(engine.submit(promised).expect("promised"));
    drop(running);
    for events in waiting {
        assert_eq!(collect(events).await.ids.len(), 8);
    }
    becomes_empty(&*engine).await;
}

/// Whoever waits is served once there is room, without anybody asking again.
pub async fn a_waiting_job_starts_when_room_is_freed<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let mut running = occupy(&*engine, Shape::SPLIT).await;
    let plain = job(&*engine, 1, 40, 8);
    let blocks = demand(&*engine, &plain);
    let waiting = engine.submit(plain).expect("a place");
    let load = engine.load();
    assert_eq!((load.queued, load.queued_demand), (1, blocks));
    assert!(load.prefill_backlog.0 >= 40, "{load:?}");
    drop(running.pop());
    assert_eq!(collect(waiting).await.ids.len(), 8);
    for events in running {
        assert_eq!(collect(events).await.ids.len(), 64);
    }
    becomes_empty(&*engine).await;
}

/// A node tells its neighbours of its load when it changed, and must hear of it.
pub async fn listeners_hear_that_the_load_changed<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let mut changes = engine.load_changed();
    let heard = |what: &'static str, result: bool| assert!(result, "not told of {what}");
    changes.mark_unchanged();
    let promise = engine.reserve(ask(Blocks(1))).expect("room");
    heard("a promise", changes.has_changed().unwrap_or(false));
    changes.mark_unchanged();
    engine.release(promise);
    heard("a release", changes.has_changed().unwrap_or(false));
    changes.mark_unchanged();
    let events = engine.submit(job(&*engine, 1, 40, 8)).expect("taken");
    heard("a job", changes.has_changed().unwrap_or(false));
    drop(events);
    load_becomes(&*engine, "nothing in use", |load| load.used == Blocks::ZERO).await;
    becomes_empty(&*engine).await;
}
