//! Moves that come to their end.

use std::sync::Arc;

use shoal_gossip::{Blocks, Tokens};
use shoal_migrate::CopyMode;
use shoal_node::engine::moving::{JobPhase, MoveError, PausedJob};
use shoal_node::engine::work::SamplingParams;
use shoal_node::engine::{Engine, EngineError, EngineEvent};

use super::super::{Shape, becomes_empty, job, load_becomes, made, occupy, receive, run};
use super::{Client, STAGE, demanding, job_of, moving, pair};
use crate::wait;

/// Greedy and seeded, with penalties, log-probabilities and stop strings; early, late, in one or many stages.
pub async fn a_moved_request_goes_on_as_if_it_had_not_moved<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let (source, target) = pair(make, Shape::SPLIT);
    let mut serial = 0;
    for params in demanding() {
        serial += 1;
        let whole = run(&*source, job_of(&*source, serial, 90, &params)).await;
        for (tokens, stages) in [(1, 0), (7, 1), (20, 9), (45, 20)] {
            let mut client = Client::submit(&*source, job_of(&*source, serial, 90, &params));
            client.read(tokens).await;
            let moved = client.move_over(&*source, &*target, stages).await;
            assert!(moved || client.is_over());
            assert_eq!(
                client.rest().await,
                whole,
                "after {tokens} tokens in {stages} stages"
            );
            becomes_empty(&*source).await;
            becomes_empty(&*target).await;
        }
    }
}

/// The same where all sequences share the KV, as long as nothing else disturbs its order.
pub async fn a_request_moves_between_shared_pools<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (source, target) = pair(make, Shape::TIGHT_POOL);
    for (serial, params) in (1..).zip(demanding()) {
        let whole = run(&*source, job_of(&*source, serial, 90, &params)).await;
        let mut client = Client::submit(&*source, job_of(&*source, serial, 90, &params));
        client.read(20).await;
        assert!(client.move_over(&*source, &*target, 5).await);
        assert_eq!(client.rest().await, whole);
        becomes_empty(&*source).await;
        becomes_empty(&*target).await;
    }
}

/// Move after move, also back to where it was.
pub async fn a_request_moves_back_and_forth<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (mut here, mut there) = pair(make, Shape::SPLIT);
    for (serial, params) in (1..).zip(demanding()) {
        let params = SamplingParams {
            max_tokens: 300,
            ..params
        };
        let whole = run(&*here, job_of(&*here, serial, 50, &params)).await;
        let mut client = Client::submit(&*here, job_of(&*here, serial, 50, &params));
        let mut moves = 0;
        for round in 0..6 {
            client.read(10 + 20 * round).await;
            if !client.move_over(&*here, &*there, round % 3).await {
                break;
            }
            moves += 1;
            std::mem::swap(&mut here, &mut there);
        }
        assert!(moves >= 3, "{moves} moves");
        assert_eq!(client.rest().await, whole);
        becomes_empty(&*here).await;
        becomes_empty(&*there).await;
    }
}

/// What runs beside, at both ends, gets what it would get alone.
pub async fn neighbours_do_not_notice_a_move<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (source, target) = pair(make, Shape::SPLIT);
    let plain = |serial| job(&*source, serial, 40 + 9 * serial as usize, 300);
    let mut alone = Vec::new();
    for serial in 0..5 {
        alone.push(run(&*source, plain(serial)).await);
    }
    let mut neighbours = Vec::new();
    for serial in 0..2 {
        neighbours.push(Client::submit(&*source, plain(serial)));
        neighbours.push(Client::submit(&*target, plain(serial)));
    }
    let mut moved = Client::submit(&*source, plain(4));
    for round in 1..=4 {
        moved.read(20 * round).await;
        let (from, to) = if round % 2 == 1 {
            (&source, &target)
        } else {
            (&target, &source)
        };
        assert!(moved.move_over(&**from, &**to, 3).await);
        for neighbour in &mut neighbours {
            neighbour.read(20 * round + 5).await;
        }
    }
    assert_eq!(moved.rest().await, alone[4]);
    for (number, neighbour) in neighbours.into_iter().enumerate() {
        assert_eq!(neighbour.rest().await, alone[number / 2]);
    }
    becomes_empty(&*source).await;
    becomes_empty(&*target).await;
}

/// No token comes while it is paused; then it goes on, in its old ownership or in a new one.
pub async fn a_paused_request_stands_still_and_goes_on<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let plain = job(&*engine, 1, 60, 120);
    let whole = run(&*engine, plain.clone()).await;
    let mut client = Client::submit(&*engine, plain);
    client.read(10).await;
    let paused = moving(&*engine)
        .pause(client.request, client.epoch, None)
        .await
        .expect("paused");
    assert_eq!(paused.kv, None, "none was asked for");
    client.drain();
    assert_eq!(client.output.ids, paused.state.output);
    let status = client.status(&*engine).expect("is here");
    assert_eq!(status.phase, JobPhase::Paused);
    // Others run meanwhile, and it does not.
    run(&*engine, job(&*engine, 2, 30, 40)).await;
    assert_eq!(client.status(&*engine), Some(status));
    moving(&*engine).unpause(client.request, client.epoch);
    let stand = client.output.ids.len();
    client.read(stand + 5).await;

    let paused = moving(&*engine)
        .pause(client.request, client.epoch, Some(Tokens(3)))
        .await;
    let paused = paused.expect("paused");
    client.drain();
    let kv = paused.kv.expect("asked for");
    let known = 60 + paused.state.output.len() as u32;
    assert_eq!(
        (kv.range.start(), kv.range.end()),
        (Tokens(3), Tokens(known - 1))
    );
    let next = client.epoch.next();
    let seen = client.output.ids.len() as u32;
    let earlier = shoal_gossip::Epoch(client.epoch.0 - 1);
    let back = moving(&*engine).resume(client.request, client.epoch, earlier, seen);
    assert!(
        matches!(back, Err(EngineError::BadRequest { .. })),
        "an earlier ownership"
    );
    client.events = moving(&*engine)
        .resume(client.request, client.epoch, next, seen)
        .expect("resumed");
    engine.abort(client.request, client.epoch);
    assert_eq!(client.rest().await, whole);
    becomes_empty(&*engine).await;
}

/// Text, ids and log-probabilities from any index that is kept; nothing from beyond.
pub async fn a_resumed_request_sends_again_just_what_is_wanted<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    for (serial, params) in (1..).zip(demanding()) {
        // Each new channel lets some more tokens come.
        let params = SamplingParams {
            max_tokens: 300,
            ..params
        };
        let whole = run(&*engine, job_of(&*engine, serial, 40, &params)).await;
        let mut client = Client::submit(&*engine, job_of(&*engine, serial, 40, &params));
        client.read(30).await;
        for from in [0, 1, 13, 29] {
            let paused = moving(&*engine)
                .pause(client.request, client.epoch, None)
                .await;
            let output = paused.expect("paused").state.output.len();
            let next = client.epoch.next();
            let resume = |from| moving(&*engine).resume(client.request, client.epoch, next, from);
            let beyond = resume(output as u32 + 1);
            assert!(matches!(beyond, Err(EngineError::BadRequest { .. })));
            let mut events = resume(from).expect("resumed");
            let Some(EngineEvent::Tokens(batch)) = receive(&mut events).await else {
                panic!("no tokens first");
            };
            let range = from as usize..output;
            assert_eq!(
                (batch.index, &batch.ids[..]),
                (from, &whole.ids[range.clone()])
            );
            if params.logprobs.is_some() {
                assert_eq!(batch.logprobs, whole.logprobs[range]);
            }
            assert!(whole.text.contains(&batch.text));
            client.epoch = next;
            client.events = events;
        }
        let paused = moving(&*engine)
            .pause(client.request, client.epoch, None)
            .await;
        paused.expect("paused");
        let next = client.epoch.next();
        client.events = moving(&*engine)
            .resume(client.request, client.epoch, next, 0)
            .expect("resumed");
        client.output = super::Output::default();
        assert_eq!(client.rest().await, whole, "all of it, from the first");
        becomes_empty(&*engine).await;
    }
}

/// It holds nothing at the source, and its place is taken by nobody who should not.
pub async fn a_waiting_request_moves_without_kv<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (source, target) = pair(make, Shape::SPLIT);
    let plain = job(&*source, 1, 80, 30);
    let whole = run(&*source, plain.clone()).await;
    let mut held = occupy(&*source, Shape::SPLIT).await;
    let mut client = Client::submit(&*source, plain);
    let behind = Client::submit(&*source, job(&*source, 2, 20, 8));
    assert_eq!(
        client.status(&*source).expect("is here").phase,
        JobPhase::Waiting
    );

    client
        .admit(&*source, &*target, CopyMode::Waiting)
        .expect("is here");
    let paused = moving(&*source)
        .pause(client.request, client.epoch, None)
        .await
        .expect("paused");
    drop(held.pop());
    assert_eq!(behind.rest().await.ids.len(), 8, "it holds up nobody");
    assert_eq!(
        client.status(&*source).expect("is here").phase,
        JobPhase::Paused
    );
    assert_eq!(
        client.status(&*target).expect("is here").phase,
        JobPhase::Arriving
    );
    client.arrive(&*source, &*target, paused).await;
    assert_eq!(client.rest().await, whole);
    becomes_empty(&*target).await;
    drop(held);
    becomes_empty(&*source).await;
}

/// Pauses a request that has just been submitted, in its prefill if it can be caught there. Where steps are slow, the engine's word
/// that something is computed comes in time for it; where they are quick, acts that are asked for together come between different
/// steps. So both are tried, the latter with more acts each time.
async fn pause_in_prefill(engine: &dyn Engine, client: &Client, turn: u64) -> PausedJob {
    let (request, epoch) = (client.request, client.epoch);
    let export = || moving(engine).export(request, epoch, Tokens::ZERO, STAGE);
    let pause = || moving(engine).pause(request, epoch, Some(Tokens::ZERO));
    let paused = if turn.is_multiple_of(2) {
        while export().await.expect("runs").computed == Tokens::ZERO {}
        pause().await
    } else {
        let before = (0..turn % 16).map(|_| export());
        let (_, paused) = futures::join!(futures::future::join_all(before), pause());
        paused
    };
    paused.expect("paused")
}

/// Wherever its prefill is, what is computed moves and the rest is computed at the target.
pub async fn a_request_in_prefill_moves_with_what_it_has<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (source, target) = pair(make, Shape::SPLIT);
    let mut partial = 0;
    for serial in 1..80 {
        if partial == 2 {
            break;
        }
        let plain = job(&*source, serial, 420, 80);
        let whole = run(&*source, plain.clone()).await;
        let mut client = Client::submit(&*source, plain);
        let paused = pause_in_prefill(&*source, &client, serial).await;
        client
            .admit(&*source, &*target, CopyMode::Kv)
            .expect("is here");
        let end = paused.kv.as_ref().map_or(Tokens::ZERO, |kv| kv.range.end());
        partial += u32::from(end > Tokens::ZERO && end < Tokens(419));
        client.arrive(&*source, &*target, paused).await;
        assert_eq!(client.rest().await, whole, "with KV up to {end}");
    }
    assert!(partial > 0, "none was caught in prefill");
    becomes_empty(&*source).await;
    becomes_empty(&*target).await;
}

/// The target computes what is known and draws nothing until it owns the request.
pub async fn a_request_moves_by_recompute<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let (source, target) = pair(make, Shape::SPLIT);
    for (serial, params) in (1..).zip(demanding()) {
        let whole = run(&*source, job_of(&*source, serial, 100, &params)).await;
        let mut client = Client::submit(&*source, job_of(&*source, serial, 100, &params));
        client.read(9).await;
        client
            .admit(&*source, &*target, CopyMode::Recompute)
            .expect("is here");
        client.read(15).await;
        let output = moving(&*source)
            .describe(client.request, client.epoch)
            .expect("is here")
            .output;
        let known = Tokens(100 + output.len() as u32);
        moving(&*target)
            .catch_up(client.request, client.epoch, output)
            .await
            .expect("prefilled");
        let status = client.status(&*target).expect("is here");
        assert_eq!(
            (status.phase, status.computed),
            (JobPhase::Arriving, known - Tokens(1))
        );
        let paused = moving(&*source)
            .pause(client.request, client.epoch, None)
            .await
            .expect("paused");
        client.arrive(&*source, &*target, paused).await;
        assert_eq!(client.rest().await, whole);
        becomes_empty(&*source).await;
        becomes_empty(&*target).await;
    }
}

/// Phase, tokens and blocks of every job that is here.
pub async fn a_request_is_described_as_it_is<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let held = occupy(&*engine, Shape::SPLIT).await;
    let waiting = job(&*engine, 1, 33, 8);
    let events = engine.submit(waiting.clone()).expect("taken");
    load_becomes(&*engine, "one in the queue", |load| load.queued == 1).await;
    let jobs = moving(&*engine).jobs();
    assert_eq!(jobs.len(), held.len() + 1);
    let status = moving(&*engine).job(waiting.request).expect("is here");
    assert!(jobs.contains(&status));
    assert_eq!(
        (
            status.phase,
            status.prompt,
            status.output,
            status.computed,
            status.max_output
        ),
        (
            JobPhase::Waiting,
            Tokens(33),
            Tokens::ZERO,
            Tokens::ZERO,
            Tokens(8)
        )
    );
    let opening = moving(&*engine)
        .describe(waiting.request, waiting.epoch)
        .expect("is here");
    assert_eq!(
        (opening.prepared, opening.output),
        (waiting.prepared.clone(), Vec::new())
    );
    let older = moving(&*engine).describe(waiting.request, shoal_gossip::Epoch(0));
    assert_eq!(older, Err(MoveError::Gone));
    // The two are asked one after the other, and a step between them takes blocks.
    wait::until("the jobs' blocks are those of the load", || async {
        let jobs = moving(&*engine).jobs();
        let blocks: Blocks = jobs.iter().map(|job| job.blocks).sum();
        let load = engine.load();
        if blocks == load.used + load.reserved {
            Ok(())
        } else {
            Err((blocks, load))
        }
    })
    .await;
    drop(events);
    assert_eq!(moving(&*engine).job(waiting.request), None);
    drop(held);
    becomes_empty(&*engine).await;
}
