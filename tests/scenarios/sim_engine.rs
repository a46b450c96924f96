//! The simulated engine keeps the engine contract, and says when it has said enough.

use std::sync::Arc;

use bytes::Bytes;
use shoal_gossip::{Epoch, MonotonicClock, NodeId, RequestId, Tokens};
use shoal_node::engine::sim::{self, SimConfig};
use shoal_node::engine::work::{HttpAsk, Job, RequestKind};
use shoal_node::engine::{Engine, EngineEvent, FinishReason};
use shoal_tests::engine_contract::Shape;
use shoal_tests::engine_contract_tests;

fn make(shape: Shape) -> Arc<dyn Engine> {
    let context = if shape.pool {
        shape.kv
    } else {
        shape.kv / shape.slots
    };
    let config = SimConfig {
        speed: 0.0,
        kv: Some(Tokens(shape.kv)),
        slots: Some(shape.slots),
        context: Some(Tokens(context)),
        step_tokens: Some(64),
        queue_limit: shape.queue_limit,
        ..SimConfig::new("a10/llama-7b")
    };
    sim::start(&config, Arc::new(MonotonicClock::start())).expect("starts")
}

engine_contract_tests!(make);

#[tokio::test]
async fn an_output_has_a_length_of_its_own_and_ends_with_the_end_token() {
    let config = SimConfig {
        speed: 0.0,
        mean_output: 20,
        ..SimConfig::new("h100/llama-3.1-8b")
    };
    let engine = sim::start(&config, Arc::new(MonotonicClock::start())).expect("starts");
    let body =
        r#"{"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "Tell me."}]}"#;
    let body = Bytes::from_static(body.as_bytes());
    let prepared = engine
        .prepare(RequestKind::Chat, body.clone())
        .await
        .expect("good");
    let job = Job {
        request: RequestId {
            home: NodeId(1),
            serial: 1,
        },
        epoch: Epoch::FIRST,
        kind: Some(RequestKind::Chat),
        http: HttpAsk::default(),
        spoken: Vec::new(),
        body,
        prepared,
        generated: Vec::new(),
        reservation: None,
    };
    let mut events = engine.submit(job).expect("taken");
    let mut text = String::new();
    let finish = loop {
        match events.recv().await {
            Some(EngineEvent::Tokens(batch)) => text.push_str(&batch.text),
            Some(EngineEvent::Finished(finish)) => break finish,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(finish.reason, FinishReason::Stop);
    assert!(finish.output_tokens > 1 && finish.output_tokens < 2000);
    assert!(text.starts_with(' '), "{text}");
}
