//! Going on with what another host began.

use std::sync::Arc;

use shoal_gossip::Epoch;
use shoal_node::engine::work::Job;
use shoal_node::engine::{Engine, EngineError, EngineEvent, FinishReason};

use super::{Shape, becomes_empty, collect, collect_from, job, made, receive, run};

fn resumed(job: Job, generated: &[u32]) -> Job {
    Job {
        epoch: job.epoch.next(),
        generated: generated.to_vec(),
        ..job
    }
}

/// The same tokens and the same text as without the interruption, from the next index on.
pub async fn a_resumed_job_goes_on_where_it_was<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    if !engine.facts().capabilities.resumes {
        return;
    }
    let plain = job(&*engine, 1, 50, 60);
    let mut before = Vec::new();
    let mut events = engine.submit(plain.clone()).expect("taken");
    let mut text_after = vec![String::new()];
    while let Some(event) = receive(&mut events).await {
        match event {
            EngineEvent::Tokens(batch) => {
                before.extend(batch.ids);
                let so_far = text_after.last().cloned().unwrap_or_default();
                text_after.push(so_far + &batch.text);
            }
            EngineEvent::Finished(finish) => {
                let so_far = text_after.last().cloned().unwrap_or_default();
                text_after.push(so_far + &finish.text);
            }
            EngineEvent::Failed(error) => panic!("the job failed: {error}"),
        }
    }
    let whole_text = text_after.last().cloned().unwrap_or_default();
    for at in [1, 17, 33, 59] {
        let mut events = engine
            .submit(resumed(plain.clone(), &before[..at]))
            .expect("taken");
        let after = collect_from(at as u32, &mut events).await;
        assert_eq!(after.reason(), Some(FinishReason::Length));
        assert_eq!(after.ids.len(), 60 - at);
        if engine.facts().capabilities.reproducible {
            assert_eq!(after.ids, before[at..]);
            assert_eq!(text_after[at].clone() + &after.text, whole_text);
        }
    }
    becomes_empty(&*engine).await;
}

/// A host may be lost after its last token and before it could say so.
pub async fn a_job_that_arrives_complete_ends_at_once<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    if !engine.facts().capabilities.resumes {
        return;
    }
    let plain = job(&*engine, 1, 50, 10);
    let whole = run(&*engine, plain.clone()).await;
    let mut events = engine.submit(resumed(plain, &whole.ids)).expect("taken");
    let rest = collect_from(10, &mut events).await;
    assert!(rest.ids.is_empty(), "{rest:?}");
    assert_eq!(rest.reason(), Some(FinishReason::Length));
    becomes_empty(&*engine).await;
}

/// Only one ownership of a request runs here, and it is the latest.
pub async fn a_newer_epoch_replaces_an_older_one<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let first = job(&*engine, 1, 40, 100);
    let mut old = engine.submit(first.clone()).expect("taken");
    assert!(receive(&mut old).await.is_some());
    assert!(matches!(
        engine.submit(first.clone()),
        Err(EngineError::BadRequest { .. })
    ));
    let second = Job {
        epoch: Epoch::FIRST.next(),
        ..first.clone()
    };
    let new = engine.submit(second).expect("taken");
    assert!(engine.submit(first.clone()).is_err(), "its time is over");
    engine.abort(first.request, Epoch::FIRST);
    while let Some(event) = receive(&mut old).await {
        assert!(matches!(event, EngineEvent::Tokens(_)), "{event:?}");
    }
    assert_eq!(collect(new).await.ids.len(), 100);
    becomes_empty(&*engine).await;
}
