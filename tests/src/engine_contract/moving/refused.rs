//! Moves that do not come to their end.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use shoal_gossip::{Blocks, Epoch, NodeId, Tokens};
use shoal_migrate::{CopyMode, KvRange};
use shoal_node::engine::moving::{ExportedKv, LastState, MoveError, PausedJob};
use shoal_node::engine::work::Job;
use shoal_node::engine::{Engine, EngineError, ReserveAsk, TokenLogprob};

use super::super::{Shape, becomes_empty, job, made, occupy, run};
use super::{Client, STAGE, moving, pair, reserve};
use crate::wait;

/// Admitted, copying, copied, paused, complete: an abort frees all, at either end.
pub async fn a_move_that_is_aborted_in_any_phase_leaves_nothing<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let (source, target) = pair(make, Shape::SPLIT);
    for mode in [CopyMode::Kv, CopyMode::Recompute, CopyMode::Waiting] {
        for phase in 0..4 {
            let mut client = Client::submit(&*source, job(&*source, 1, 100, 200));
            client.read(5).await;
            client.admit(&*source, &*target, mode).expect("is here");
            assert_ne!(target.load().used + target.load().reserved, Blocks::ZERO);
            if phase > 0 && mode == CopyMode::Kv {
                client.copy(&*source, &*target, 2).await.expect("copied");
            }
            if phase > 1 {
                let from = (mode == CopyMode::Kv).then_some(STAGE + STAGE);
                let paused = moving(&*source)
                    .pause(client.request, client.epoch, from)
                    .await;
                let PausedJob { state, kv, .. } = paused.expect("paused");
                if phase > 2 {
                    let completed =
                        moving(&*target).complete(client.request, client.epoch, state, kv);
                    completed.await.expect("complete");
                }
            }
            target.abort(client.request, Epoch(0));
            assert!(
                client.status(&*target).is_some(),
                "an older ownership ends nothing"
            );
            target.abort(client.request, client.epoch);
            becomes_empty(&*target).await;
            let gone =
                moving(&*target).resume(client.request, client.epoch, client.epoch.next(), 0);
            assert!(matches!(gone, Err(EngineError::BadRequest { .. })));
            moving(&*source).unpause(client.request, client.epoch);
            let read = client.output.ids.len();
            client.read(read + 40).await;
            assert!(
                client.output.ids.len() >= read + 40,
                "it runs on at the source"
            );
            source.abort(client.request, client.epoch);
            becomes_empty(&*source).await;
        }
    }
    assert_eq!(run(&*target, job(&*target, 1, 40, 8)).await.ids.len(), 8);
}

/// A source whose job is paused, with KV of two stages and the rest.
async fn copied(source: &dyn Engine) -> (Client, Job, [ExportedKv; 2], PausedJob) {
    let mut client = Client::submit(source, job(source, 1, 50, 100));
    client.read(8).await;
    let described = client.described(source).expect("is here");
    let mut stages = Vec::new();
    for from in [Tokens::ZERO, STAGE] {
        let exported = moving(source)
            .export(client.request, client.epoch, from, STAGE)
            .await;
        stages.push(exported.expect("exported").kv.expect("there is KV"));
    }
    let paused = moving(source)
        .pause(client.request, client.epoch, Some(STAGE + STAGE))
        .await;
    client.drain();
    let stages = stages.try_into().expect("two stages");
    (client, described, stages, paused.expect("paused"))
}

fn admit(target: &dyn Engine, job: &Job) {
    let job = Job {
        reservation: Some(reserve(target, job)),
        ..job.clone()
    };
    moving(target).admit(job, CopyMode::Kv).expect("admitted");
}

fn range(start: u32, end: u32) -> KvRange {
    KvRange::new(Tokens(start), Tokens(end)).expect("not empty")
}

/// The first stage in all ways in which it is not what it should be.
fn spoilt(first: &ExportedKv, second: &ExportedKv) -> Vec<ExportedKv> {
    let good = first.bytes.to_vec();
    let with = |bytes: Vec<u8>| ExportedKv {
        range: first.range,
        bytes: Bytes::from(bytes),
    };
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 0x40;
        with(bytes)
    };
    let moved = |range| ExportedKv {
        range,
        bytes: first.bytes.clone(),
    };
    vec![
        flipped(0),
        flipped(5),
        with(good[..good.len() - 1].to_vec()),
        with(good[..good.len() / 2].to_vec()),
        with([&good[..], &[0]].concat()),
        with(Vec::new()),
        with(vec![0; good.len()]),
        moved(range(1, 17)),
        moved(range(0, 17)),
        moved(range(0, 15)),
        moved(range(0, u32::MAX)),
        second.clone(),
    ]
}

/// Damaged, short, long, foreign, in the wrong order: refused, the job is gone, and its neighbours are well.
pub async fn wrong_kv_is_refused_and_harms_nobody<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (source, target) = pair(make, Shape::SPLIT);
    let whole = run(&*source, job(&*source, 1, 50, 100)).await;
    let beside = run(&*target, job(&*target, 2, 60, 150)).await;
    let mut neighbour = Client::submit(&*target, job(&*target, 2, 60, 150));
    neighbour.read(3).await;
    let (mut client, described, [first, second], paused) = copied(&*source).await;

    let wrong = spoilt(&first, &second);
    for (number, kv) in wrong.into_iter().enumerate() {
        admit(&*target, &described);
        let refused = moving(&*target)
            .import(client.request, client.epoch, kv)
            .await;
        assert!(
            matches!(refused, Err(MoveError::Unfit(_))),
            "{number}: {refused:?}"
        );
        assert!(client.status(&*target).is_none(), "{number}: it is dropped");
    }
    // The same stage twice, and more KV than the output has.
    admit(&*target, &described);
    let import =
        |kv: &ExportedKv| moving(&*target).import(client.request, client.epoch, kv.clone());
    import(&first).await.expect("imported");
    assert!(matches!(import(&first).await, Err(MoveError::Unfit(_))));
    admit(&*target, &described);
    import(&first).await.expect("imported");
    import(&second).await.expect("imported");
    let rest = paused.kv.clone().expect("asked for");
    import(&rest).await.expect("imported");
    let shorter = LastState {
        output: described.generated.clone(),
        ..LastState::default()
    };
    if shorter.output.len() < paused.state.output.len() {
        let early = moving(&*target)
            .complete(client.request, client.epoch, shorter, None)
            .await;
        assert!(matches!(early, Err(MoveError::Unfit(_))), "{early:?}");
    } else {
        target.abort(client.request, client.epoch);
    }

    // After all that the right one gets in.
    admit(&*target, &described);
    import(&first).await.expect("imported");
    import(&second).await.expect("imported");
    client.arrive(&*source, &*target, paused).await;
    assert_eq!(client.rest().await, whole);
    assert_eq!(neighbour.rest().await, beside);
    becomes_empty(&*source).await;
    becomes_empty(&*target).await;
}

/// Output that does not go on from what was opened, unknown ids, too much of it.
pub async fn a_state_that_contradicts_the_request_is_refused<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let (source, target) = pair(make, Shape::SPLIT);
    let (client, described, [first, second], paused) = copied(&*source).await;
    let output = &paused.state.output;
    let logprob = TokenLogprob::default();
    let state = |output: Vec<u32>| LastState {
        output,
        ..LastState::default()
    };
    let mut other = output.clone();
    other[0] ^= 1;
    let wrong = [
        state(other),
        state(Vec::new()),
        state([&output[..], &[u32::MAX]].concat()),
        state([&output[..], &[20; 100]].concat()),
        LastState {
            logprobs: vec![logprob; output.len() + 1],
            ..paused.state.clone()
        },
    ];
    for state in wrong {
        admit(&*target, &described);
        for kv in [&first, &second] {
            let imported = moving(&*target).import(client.request, client.epoch, kv.clone());
            imported.await.expect("imported");
        }
        let completed =
            moving(&*target).complete(client.request, client.epoch, state, paused.kv.clone());
        let refused = completed.await;
        assert!(matches!(refused, Err(MoveError::Unfit(_))), "{refused:?}");
        assert!(client.status(&*target).is_none(), "it is dropped");
    }
    // KV for one that comes without, and the bounds that every job has.
    for mode in [CopyMode::Recompute, CopyMode::Waiting] {
        let job = Job {
            reservation: Some(reserve(&*target, &described)),
            ..described.clone()
        };
        moving(&*target).admit(job, mode).expect("admitted");
        let refused = moving(&*target)
            .import(client.request, client.epoch, first.clone())
            .await;
        assert!(matches!(refused, Err(MoveError::Unfit(_))), "{refused:?}");
    }
    let mut long = described.clone();
    long.prepared.params.max_tokens = 100_000;
    long.reservation = Some(reserve(&*target, &described));
    let refused = moving(&*target).admit(long, CopyMode::Kv);
    assert!(matches!(refused, Err(EngineError::BadRequest { .. })));
    becomes_empty(&*target).await;
}

/// At once or never: one that arrives does not queue, and pushes nobody out.
pub async fn a_target_without_room_says_so<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (source, target) = pair(&make, Shape::SPLIT);
    let (client, described, _, _) = copied(&*source).await;
    let held = occupy(&*target, Shape::SPLIT).await;
    for mode in [CopyMode::Kv, CopyMode::Recompute, CopyMode::Waiting] {
        let refused = moving(&*target).admit(described.clone(), mode);
        assert_eq!(refused, Err(EngineError::QueueFull));
    }
    assert!(client.status(&*target).is_none());
    drop(held);
    becomes_empty(&*target).await;

    // All other blocks are promised away while it grows.
    let (source, target) = pair(&make, Shape::TIGHT_POOL);
    let (mut client, described, _, _) = copied(&*source).await;
    admit(&*target, &described);
    let ask = ReserveAsk {
        demand: target.load().total - target.load().used,
        lease: wait::PATIENCE,
        at_once: true,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    };
    let others = target.reserve(ask).expect("all that is left");
    moving(&*source).unpause(client.request, client.epoch);
    client.read(60).await;
    let mut sent = Tokens::ZERO;
    let mut imported = Ok(());
    while imported.is_ok() && sent < Tokens(100) {
        let exported = moving(&*source)
            .export(client.request, client.epoch, sent, STAGE)
            .await;
        let kv = exported.expect("exported").kv.expect("there is more");
        sent = kv.range.end();
        imported = moving(&*target)
            .import(client.request, client.epoch, kv)
            .await;
    }
    assert_eq!(imported, Err(MoveError::NoRoom));
    assert!(client.status(&*target).is_none(), "it is dropped");
    assert_eq!(target.load().used, Blocks::ZERO);
    target.release(others);
    assert_eq!(
        client.rest().await.ids.len(),
        100,
        "it runs on at the source"
    );
    becomes_empty(&*source).await;
}

/// Nothing is known of it, so nothing is done.
pub async fn what_is_asked_of_a_request_that_is_gone_changes_nothing<
    M: Fn(Shape) -> Arc<dyn Engine>,
>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    let plain = job(&*engine, 1, 40, 60);
    let request = plain.request;
    let gone = async |epoch: Epoch| {
        let moving = moving(&*engine);
        assert_eq!(moving.describe(request, epoch), Err(MoveError::Gone));
        let exported = moving.export(request, epoch, Tokens::ZERO, STAGE).await;
        assert_eq!(exported, Err(MoveError::Gone));
        assert_eq!(
            moving.pause(request, epoch, None).await,
            Err(MoveError::Gone)
        );
        moving.unpause(request, epoch);
        let kv = ExportedKv {
            range: range(0, 1),
            bytes: Bytes::new(),
        };
        assert_eq!(
            moving.import(request, epoch, kv).await,
            Err(MoveError::Gone)
        );
        let completed = moving
            .complete(request, epoch, LastState::default(), None)
            .await;
        assert_eq!(completed, Err(MoveError::Gone));
        assert_eq!(
            moving.catch_up(request, epoch, Vec::new()).await,
            Err(MoveError::Gone)
        );
        let resumed = moving.resume(request, epoch, epoch.next(), 0);
        assert!(matches!(resumed, Err(EngineError::BadRequest { .. })));
    };
    gone(Epoch::FIRST).await;
    let whole = run(&*engine, plain.clone()).await;
    gone(Epoch::FIRST).await;
    let mut client = Client::submit(&*engine, plain);
    client.read(4).await;
    gone(Epoch::FIRST.next()).await;
    gone(Epoch(0)).await;
    // What is here in this ownership, but not to arrive, is not touched either.
    let kv = ExportedKv {
        range: range(0, 1),
        bytes: Bytes::new(),
    };
    let moving = moving(&*engine);
    assert_eq!(
        moving.import(request, client.epoch, kv).await,
        Err(MoveError::Gone)
    );
    let beyond = moving
        .export(request, client.epoch, Tokens(5000), STAGE)
        .await;
    assert_eq!(beyond, Err(MoveError::Gone));
    assert_eq!(client.rest().await, whole);
    becomes_empty(&*engine).await;
}
