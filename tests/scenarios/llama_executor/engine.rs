//! The whole embedded engine, from body to text, under load.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use shoal_gossip::{Blocks, Epoch, LoadSummary, MonotonicClock, NodeId, RequestId};
use shoal_node::engine::batched::BatchedEngine;
use shoal_node::engine::llama::{LlamaConfig, start};
use shoal_node::engine::work::{HttpAsk, Job, Prepared, RequestKind};
use shoal_node::engine::{Engine, EngineEvent, Finish};
use tempfile::TempDir;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinSet;

use super::config;

fn engine(change: impl FnOnce(LlamaConfig) -> LlamaConfig) -> Arc<BatchedEngine> {
    let folder = TempDir::new().expect("a folder");
    let config = change(config(&folder, true));
    start(&config, Arc::new(MonotonicClock::start())).expect("starts")
}

/// A chat whose length, sampling and stop strings depend on `number`.
fn body(number: usize) -> Bytes {
    let text = format!("Question {number}: ").repeat(1 + number % 9);
    let temperature = if number.is_multiple_of(2) { 0.0 } else { 0.9 };
    let body = serde_json::json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "temperature": temperature,
        "seed": number,
        "max_tokens": 20 + number * 3,
        "presence_penalty": 0.1,
        "stop": ["zz", "\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}"],
    });
    Bytes::from(body.to_string())
}

fn job(number: usize, prepared: Prepared, generated: Vec<u32>) -> Job {
    Job {
        request: RequestId {
            home: NodeId(1),
            serial: number as u64,
        },
        epoch: Epoch::FIRST,
        kind: Some(RequestKind::Chat),
        http: HttpAsk::default(),
        spoken: Vec::new(),
        body: body(number),
        prepared,
        generated,
        reservation: None,
    }
}

/// What a client would have seen.
#[derive(Clone, Debug, Default, PartialEq)]
struct Output {
    ids: Vec<u32>,
    text: String,
    finish: Option<Finish>,
}

async fn collect(mut events: Receiver<EngineEvent>) -> Output {
    let mut output = Output::default();
    while let Some(event) = events.recv().await {
        match event {
            EngineEvent::Tokens(batch) => {
                output.ids.extend(batch.ids);
                output.text.push_str(&batch.text);
            }
            EngineEvent::Finished(finish) => {
                output.text.push_str(&finish.text);
                output.finish = Some(finish);
            }
            EngineEvent::Failed(error) => panic!("{error}"),
        }
    }
    output
}

async fn run(engine: &BatchedEngine, number: usize) -> Output {
    let prepared = engine.prepare(RequestKind::Chat, body(number)).await;
    let job = job(number, prepared.expect("prepared"), Vec::new());
    collect(engine.submit(job).expect("taken")).await
}

async fn idle(engine: &BatchedEngine) -> LoadSummary {
    let mut changed = engine.load_changed();
    let wait = async {
        while engine.load().used != Blocks::ZERO {
            changed.changed().await.expect("the engine runs");
        }
    };
    let patience = Duration::from_secs(60);
    tokio::time::timeout(patience, wait)
        .await
        .expect("idle again");
    engine.load()
}

#[tokio::test]
async fn every_request_gets_the_answer_it_would_get_alone() {
    let engine = engine(|config| config);
    let mut alone = Vec::new();
    for number in 0..24 {
        alone.push(run(&engine, number).await);
    }
    assert!(alone.iter().any(|output| !output.text.is_empty()));

    let mut together = JoinSet::new();
    for number in 0..24 {
        let engine = Arc::clone(&engine);
        together.spawn(async move { (number, run(&engine, number).await) });
    }
    while let Some(ended) = together.join_next().await {
        let (number, output) = ended.expect("ran");
        assert_eq!(output, alone[number], "request {number}");
    }
    let load = idle(&engine).await;
    assert_eq!(
        (load.used, load.reserved, load.queued),
        (Blocks::ZERO, Blocks::ZERO, 0)
    );
    engine.shutdown().await;
}

#[tokio::test]
async fn a_replayed_request_goes_on_with_the_same_tokens() {
    let engine = engine(|config| config);
    let number = 7;
    let whole = run(&engine, number).await;
    let half = whole.ids.len() / 2;
    let prepared = engine
        .prepare(RequestKind::Chat, body(number))
        .await
        .expect("prepared");
    let replay = job(number, prepared, whole.ids[..half].to_vec());
    let rest = collect(engine.submit(replay).expect("taken")).await;
    assert_eq!(rest.ids, whole.ids[half..]);
    assert!(whole.text.ends_with(&rest.text));
    assert_eq!(rest.finish, whole.finish);
    engine.shutdown().await;
}

#[tokio::test]
async fn a_shared_pool_preempts_and_still_finishes_everything() {
    // 32 blocks for four sequences that want up to 16 each.
    let engine = engine(|config| LlamaConfig {
        reproducible: false,
        context_tokens: 512.try_into().expect("not zero"),
        ..config
    });
    let mut together = JoinSet::new();
    for number in 0..24 {
        let engine = Arc::clone(&engine);
        together.spawn(async move { run(&engine, number).await });
    }
    let outputs = together.join_all().await;
    assert_eq!(outputs.len(), 24);
    for output in outputs {
        let finish = output.finish.expect("finished");
        assert_eq!(finish.output_tokens as usize, output.ids.len());
    }
    idle(&engine).await;
    engine.shutdown().await;
}
