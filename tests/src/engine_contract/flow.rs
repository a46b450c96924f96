//! How events flow: order, ends, slow readers, aborts, shortage, shutdown.

use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Epoch, NodeId, Readiness, RequestId};
use shoal_node::engine::work::{Job, SamplingParams};
use shoal_node::engine::{
    Engine, EngineError, EngineEvent, FinishReason, ReserveAsk, ReserveRefusal,
};
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;

use super::{
    Output, Shape, becomes_empty, collect, collect_from, job, load_becomes, made, occupy, receive,
    run,
};
use crate::wait;

/// Indexes follow each other, the end counts them, nothing follows and nothing is held.
pub async fn events_come_in_order_and_usage_is_counted<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    for max_tokens in [1, 2, 40] {
        let output = run(
            &*engine,
            job(&*engine, u64::from(max_tokens), 40, max_tokens),
        )
        .await;
        assert_eq!(output.ids.len() as u32, max_tokens);
        assert_eq!(output.reason(), Some(FinishReason::Length));
        assert!(
            output.logprobs.is_empty(),
            "nobody asked for log-probabilities"
        );
        // The job ends before its end is told.
        let load = engine.load();
        assert_eq!((load.used.0, load.running), (0, 0), "{load:?}");
    }
}

fn with_params(job: Job, params: SamplingParams) -> Job {
    let mut job = job;
    job.prepared.params = params;
    job
}

/// The text stops before the stop string, wherever pieces were cut.
pub async fn an_output_ends_before_its_stop_string<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let whole = run(&*engine, job(&*engine, 1, 40, 60)).await;
    let middle = whole.text.chars().count() / 2;
    let stop: String = whole.text.chars().skip(middle).take(3).collect();
    let before = whole.text.find(&stop).expect("it is in there");
    let plain = job(&*engine, 1, 40, 60);
    let params = SamplingParams {
        stop: vec!["does not occur".to_owned(), stop],
        ..plain.prepared.params.clone()
    };
    let stopped = run(&*engine, with_params(plain, params)).await;
    assert_eq!(stopped.text, whole.text[..before]);
    assert_eq!(stopped.reason(), Some(FinishReason::Stop));
    assert_eq!(stopped.ids, whole.ids[..stopped.ids.len()]);
    assert!(stopped.ids.len() < whole.ids.len());
    becomes_empty(&*engine).await;
}

/// One for each token, with as many alternatives as were asked for.
pub async fn logprobs_come_one_per_token_when_asked_for<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let plain = job(&*engine, 1, 20, 8);
    let params = SamplingParams {
        logprobs: Some(3),
        ..plain.prepared.params.clone()
    };
    let output = run(&*engine, with_params(plain, params)).await;
    assert_eq!(output.logprobs.len(), 8);
    for token in &output.logprobs {
        assert!(token.logprob <= 0.0);
        assert_eq!(token.top.len(), 3);
        assert!(token.top.is_sorted_by(|a, b| a.1 >= b.1), "best first");
    }
}

/// While one does not read, others run to their end; when it reads again it has missed nothing.
pub async fn a_slow_reader_pauses_its_own_job_only_and_loses_nothing<
    M: Fn(Shape) -> Arc<dyn Engine>,
>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    let alone = run(&*engine, job(&*engine, 1, 40, 200)).await;
    let mut slow = engine.submit(job(&*engine, 1, 40, 200)).expect("taken");
    let first = receive(&mut slow).await;
    assert!(matches!(first, Some(EngineEvent::Tokens(batch)) if batch.index == 0));
    for serial in 2..6 {
        let other = run(&*engine, job(&*engine, serial, 30, 100)).await;
        assert_eq!(other.ids.len(), 100);
    }
    assert_eq!(
        engine.load().running,
        1,
        "it waits for its reader and keeps its KV"
    );
    let rest = collect_from(1, &mut slow).await;
    assert_eq!(rest.ids, alone.ids[1..]);
    assert!(alone.text.ends_with(&rest.text));
    becomes_empty(&*engine).await;
}

/// Brings one job each into decode, prefill and the queue, ends them, and looks what is left.
async fn end_in_every_phase(
    engine: &dyn Engine,
    shape: Shape,
    end: impl Fn(RequestId, Receiver<EngineEvent>),
) {
    let decoding = occupy(engine, shape).await;
    let queued = job(engine, 1, 40, 8);
    let waiting = engine.submit(queued.clone()).expect("a place in the queue");
    load_becomes(engine, "a job in the queue", |load| load.queued == 1).await;
    end(queued.request, waiting);
    load_becomes(engine, "an empty queue", |load| load.queued == 0).await;
    for (serial, receiver) in (1000..).zip(decoding) {
        let request = RequestId {
            serial,
            ..queued.request
        };
        end(request, receiver);
    }
    becomes_empty(engine).await;
    for serial in 2..20 {
        // Some of these are caught before their first token, some after.
        let prefilling = job(engine, serial, 400, 8);
        let receiver = engine.submit(prefilling.clone()).expect("a free slot");
        end(prefilling.request, receiver);
    }
    becomes_empty(engine).await;
    assert_eq!(run(engine, job(engine, 1, 40, 8)).await.ids.len(), 8);
}

/// Queue, prefill, decode: an abort frees everything and ends the events.
pub async fn a_job_that_is_aborted_in_any_phase_leaves_nothing<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    let mut kept = JoinSet::new();
    let (send, mut ended) = tokio::sync::mpsc::channel(64);
    end_in_every_phase(&*engine, Shape::SPLIT, |request, receiver| {
        engine.abort(request, Epoch(0));
        engine.abort(request, Epoch::FIRST);
        engine.abort(request, Epoch::FIRST);
        send.try_send(receiver).expect("room for every receiver");
    })
    .await;
    drop(send);
    while let Some(mut receiver) = ended.recv().await {
        kept.spawn(async move {
            while let Some(event) = receive(&mut receiver).await {
                assert!(!matches!(event, EngineEvent::Failed(_)), "{event:?}");
            }
        });
    }
    while let Some(result) = kept.join_next().await {
        result.expect("events end after an abort");
    }
}

/// The same for receivers that go away without a word.
pub async fn a_receiver_that_is_dropped_in_any_phase_leaves_nothing<
    M: Fn(Shape) -> Arc<dyn Engine>,
>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    end_in_every_phase(&*engine, Shape::SPLIT, |_, receiver| drop(receiver)).await;
}

/// Blocks add up in every summary, whatever runs.
pub async fn loads_add_up_while_jobs_come_and_go<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let mut jobs = JoinSet::new();
    for serial in 0..8 {
        let events = engine.submit(job(&*engine, serial, 20 + 9 * serial as usize, 40));
        let mut events = events.expect("a slot or a place in the queue");
        let engine = Arc::clone(&engine);
        jobs.spawn(async move {
            let mut tokens = 0;
            while let Some(event) = receive(&mut events).await {
                let load = engine.load();
                assert!(load.used + load.reserved <= load.total, "{load:?}");
                assert!(load.running <= 4 && load.queued <= 4, "{load:?}");
                tokens += u32::from(matches!(event, EngineEvent::Tokens(_)));
                if serial % 3 == 0 && tokens == 10 {
                    return;
                }
            }
            assert_eq!(tokens, 40);
        });
    }
    while let Some(result) = jobs.join_next().await {
        result.expect("every job ends");
    }
    becomes_empty(&*engine).await;
}

/// Four jobs that need twice the KV there is, together: each gets every token once. Where outputs
/// are reproducible they are also the same as alone.
pub async fn shortage_of_kv_neither_loses_nor_repeats_a_token<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let engine = made(make, Shape::TIGHT_POOL);
    let reproducible = engine.facts().capabilities.reproducible;
    let mut alone = Vec::new();
    if reproducible {
        for serial in 0..4 {
            alone.push(run(&*engine, job(&*engine, serial, 60, 190)).await);
        }
    }
    let mut jobs = JoinSet::new();
    for serial in 0..4 {
        let events = engine
            .submit(job(&*engine, serial, 60, 190))
            .expect("taken");
        jobs.spawn(async move { (serial as usize, collect(events).await) });
    }
    while let Some(result) = jobs.join_next().await {
        let (serial, output): (usize, Output) = result.expect("every job ends");
        assert_eq!(output.ids.len(), 190);
        assert_eq!(output.reason(), Some(FinishReason::Length));
        if reproducible {
            assert_eq!(output, alone[serial]);
        }
        let load = engine.load();
        assert!(load.used + load.reserved <= load.total, "{load:?}");
    }
    becomes_empty(&*engine).await;
}

/// What runs and what waits comes to its end; what is new is refused; then the engine is gone.
pub async fn shutdown_lets_running_jobs_finish_and_takes_no_more<
    M: Fn(Shape) -> Arc<dyn Engine>,
>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    let held = occupy(&*engine, Shape::SPLIT).await;
    let waiting = engine.submit(job(&*engine, 1, 40, 8)).expect("taken");
    let mut closing = JoinSet::new();
    let closed = Arc::clone(&engine);
    closing.spawn(async move { closed.shutdown().await });
    load_becomes(&*engine, "draining", |load| {
        load.readiness == Readiness::Draining
    })
    .await;
    assert!(matches!(
        engine.submit(job(&*engine, 2, 40, 8)),
        Err(EngineError::NotReady)
    ));
    let ask = ReserveAsk {
        demand: shoal_gossip::Blocks(1),
        lease: wait::PATIENCE,
        at_once: false,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    };
    assert_eq!(engine.reserve(ask), Err(ReserveRefusal::NotReady));
    for events in held {
        assert_eq!(collect(events).await.ids.len(), 64);
    }
    assert_eq!(collect(waiting).await.ids.len(), 8);
    let closed = tokio::time::timeout(wait::PATIENCE, closing.join_next()).await;
    closed
        .expect("shutdown ends")
        .expect("one task")
        .expect("without a panic");
    engine.shutdown().await;
}

/// Nobody waits for events that will never come.
pub async fn dropping_the_engine_ends_its_jobs<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let held = occupy(&*engine, Shape::SPLIT).await;
    drop(engine);
    for mut events in held {
        while let Some(event) = receive(&mut events).await {
            assert!(matches!(event, EngineEvent::Tokens(_)), "{event:?}");
        }
    }
}
