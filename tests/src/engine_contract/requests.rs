//! Bodies and jobs, good and bad.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Value, json};
use shoal_node::engine::work::{Job, Prepared, RequestKind};
use shoal_node::engine::{Engine, EngineError};

use super::{Shape, becomes_empty, job, made, run};

async fn prepare(
    engine: &dyn Engine,
    kind: RequestKind,
    body: &Value,
) -> Result<Prepared, EngineError> {
    engine.prepare(kind, Bytes::from(body.to_string())).await
}

/// Chats get what the context leaves, completions OpenAI's 16, both what they ask for; the same
/// body gives the same job.
pub async fn a_body_is_read_checked_and_clamped<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let model = engine.facts().models[0].clone();
    let chat = json!({
        "model": model.id,
        "messages": [{"role": "user", "content": "Where do fish sleep?"}],
        "temperature": 0,
        "ignore_eos": true,
    });
    let prepared = prepare(&*engine, RequestKind::Chat, &chat)
        .await
        .expect("good");
    let room = model.context.0 - prepared.prompt.len() as u32;
    assert_eq!(prepared.params.max_tokens, room);
    assert_eq!(
        prepare(&*engine, RequestKind::Chat, &chat).await.as_ref(),
        Ok(&prepared)
    );
    assert!(!prepared.seeded);

    let ids = json!({"model": model.id, "prompt": [20, 21, 22], "seed": 5});
    let completion = prepare(&*engine, RequestKind::Completion, &ids)
        .await
        .expect("good");
    assert_eq!(&*completion.prompt, [20, 21, 22]);
    assert_eq!(
        (completion.params.max_tokens, completion.params.seed),
        (16, 5)
    );
    assert!(completion.seeded);

    let mut short = chat.clone();
    short["max_tokens"] = json!(7);
    let prepared = prepare(&*engine, RequestKind::Chat, &short)
        .await
        .expect("good");
    assert_eq!(prepared.params.max_tokens, 7);
    let output = run(
        &*engine,
        Job {
            prepared,
            ..job(&*engine, 1, 1, 1)
        },
    )
    .await;
    assert_eq!(output.ids.len(), 7);
}

/// Each with the field that is to blame, and nothing is held afterwards.
pub async fn a_bad_body_is_refused_with_the_field_to_blame<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
) {
    let engine = made(make, Shape::SPLIT);
    let model = engine.facts().models[0].clone();
    let context = model.context.0 as usize;
    let completion = |prompt: Value, max_tokens: Value| json!({"model": model.id, "prompt": prompt, "max_tokens": max_tokens});
    let cases = [
        (completion(json!(vec![20; context]), json!(1)), "prompt"),
        (completion(json!(vec![20; context + 9]), json!(1)), "prompt"),
        (completion(json!([u32::MAX]), json!(1)), "prompt"),
        (completion(json!([20]), json!(context)), "max_tokens"),
        (completion(json!([20]), json!(0)), "max_tokens"),
        (completion(json!([20]), json!(u32::MAX)), "max_tokens"),
    ];
    for (body, blamed) in cases {
        let answer = prepare(&*engine, RequestKind::Completion, &body).await;
        let Err(EngineError::BadRequest { message, param }) = answer else {
            panic!("{answer:?} for a bad {blamed}");
        };
        assert_eq!(param.as_deref(), Some(blamed), "{message}");
    }
    let long = json!({
        "model": model.id,
        "messages": [{"role": "user", "content": "fish ".repeat(context)}],
    });
    let answer = prepare(&*engine, RequestKind::Chat, &long).await;
    let Err(EngineError::BadRequest { message, param }) = answer else {
        panic!("{answer:?} for a long chat");
    };
    assert_eq!(param.as_deref(), Some("messages"));
    assert!(
        message.contains(&context.to_string()),
        "{message} names no bound"
    );

    for junk in [&b""[..], b"{", b"[]", b"\xff\xfe", b"{\"model\": 5}"] {
        let answer = engine
            .prepare(RequestKind::Chat, Bytes::from_static(junk))
            .await;
        assert!(
            matches!(answer, Err(EngineError::BadRequest { .. })),
            "{answer:?}"
        );
    }
    let other = json!({"model": "no-such-model", "prompt": "x"});
    let answer = prepare(&*engine, RequestKind::Completion, &other).await;
    assert_eq!(
        answer,
        Err(EngineError::UnknownModel("no-such-model".to_owned()))
    );
    becomes_empty(&*engine).await;
}

/// Jobs come from peers; one that could not have come from `prepare` is not run.
pub async fn a_job_that_contradicts_itself_is_refused<M: Fn(Shape) -> Arc<dyn Engine>>(make: M) {
    let engine = made(make, Shape::SPLIT);
    let context = engine.facts().models[0].context.0;
    let changed = |change: &dyn Fn(&mut Job)| {
        let mut job = job(&*engine, 1, 20, 8);
        change(&mut job);
        engine.submit(job).map(drop)
    };
    let bad: [&dyn Fn(&mut Job); 6] = [
        &|job| job.prepared.prompt = Arc::from([]),
        &|job| job.prepared.prompt = Arc::from([u32::MAX]),
        &|job| job.prepared.params.max_tokens = 0,
        &|job| job.prepared.params.max_tokens = context,
        &|job| job.generated = vec![20; 9],
        &|job| job.generated = vec![u32::MAX],
    ];
    for change in bad {
        let answer = changed(change);
        assert!(
            matches!(answer, Err(EngineError::BadRequest { .. })),
            "{answer:?}"
        );
    }
    let answer = changed(&|job| job.prepared.model = "no-such-model".to_owned());
    assert!(
        matches!(answer, Err(EngineError::UnknownModel(_))),
        "{answer:?}"
    );
    becomes_empty(&*engine).await;
}
