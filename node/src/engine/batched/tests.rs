//! The engine around executors that misbehave. What well-behaved ones give is the contract suite's.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use shoal_gossip::{
    BlockSize, Blocks, Clock, Epoch, ModelApi, ModelFacts, MonotonicClock, NodeId, Readiness,
    RequestId, Tokens,
};

use shoal_migrate::{CopyMode, KvRange};

use super::*;
use crate::engine::moving::{MoveError, MovingEngine};
use crate::engine::sim::{SimExecutor, SimKv, SimText, StepModel};
use crate::engine::work::HttpAsk;
use crate::engine::work::{Job, Prepared, Priority, RequestKind, SamplingParams};
use crate::engine::{
    Capabilities, Engine, EngineError, EngineEvent, EngineFacts, FinishReason, ReserveAsk,
    ReserveRefusal,
};

/// Far longer than anything here takes; only a failure ever reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

fn config() -> BatchConfig {
    BatchConfig {
        block_size: BlockSize::DEFAULT,
        total: Blocks(32),
        slots: 4,
        layout: Layout::Pool,
        step_tokens: 64,
        prefill_grid: None,
        queue_limit: 4,
        watermark_permille: 0,
        context: Tokens(256),
    }
}

fn facts() -> EngineFacts {
    EngineFacts {
        models: vec![ModelFacts {
            id: "m".to_owned(),
            context: Tokens(256),
            fingerprint: 1,
            created: 0,
            api: ModelApi::Tokens,
        }],
        block_size: BlockSize::DEFAULT,
        total: Blocks(32),
        capabilities: Capabilities::default(),
    }
}

fn clock() -> Arc<dyn Clock> {
    Arc::new(MonotonicClock::start())
}

fn start<X: Executor>(executor: X) -> Arc<BatchedEngine> {
    let make = move || Ok(executor);
    BatchedEngine::start(config(), facts(), make, Arc::new(SimText), clock()).expect("starts")
}

fn job(serial: u64) -> Job {
    Job {
        request: RequestId {
            home: NodeId(1),
            serial,
        },
        epoch: Epoch::FIRST,
        kind: Some(RequestKind::Completion),
        http: HttpAsk::default(),
        spoken: Vec::new(),
        body: Bytes::new(),
        prepared: Prepared {
            model: "m".to_owned(),
            prompt: Arc::from([1, 2, 3]),
            params: SamplingParams {
                temperature: 0.0,
                max_tokens: 5,
                ignore_eos: true,
                ..SamplingParams::default()
            },
            seeded: false,
            priority: Priority(0),
        },
        generated: Vec::new(),
        reservation: None,
    }
}

/// Does whatever the closure does.
struct Scripted<F>(F);

impl<F> Executor for Scripted<F>
where
    F: FnMut(&Step) -> Result<Vec<Sampled>, EngineError> + Send + 'static,
{
    fn step(&mut self, step: &Step) -> Result<Vec<Sampled>, EngineError> {
        (self.0)(step)
    }
}

fn good() -> SimExecutor {
    SimExecutor::new(StepModel::default(), 0.0, 0)
}

/// The engine fails its jobs with this, and answers from then on that it is broken.
async fn breaks_with(
    step: impl FnMut(&Step) -> Result<Vec<Sampled>, EngineError> + Send + 'static,
    why: &str,
) {
    let engine = start(Scripted(step));
    let mut events = engine.submit(job(1)).expect("taken");
    let broken = EngineError::Broken(why.to_owned());
    assert_eq!(
        events.recv().await,
        Some(EngineEvent::Failed(broken.clone()))
    );
    assert_eq!(events.recv().await, None);
    assert_eq!(engine.submit(job(2)).map(drop), Err(broken));
    let ask = ReserveAsk {
        demand: Blocks(1),
        lease: PATIENCE,
        at_once: false,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    };
    assert_eq!(engine.reserve(ask), Err(ReserveRefusal::NotReady));
    let load = engine.load();
    assert_eq!(
        (load.readiness, load.used),
        (Readiness::Failed, Blocks::ZERO)
    );
    engine.abort(job(1).request, Epoch::FIRST);
    engine.shutdown().await;
}

#[tokio::test]
async fn an_executor_that_fails_breaks_the_engine_and_not_its_callers() {
    breaks_with(
        |_| Err(EngineError::Broken("out of memory".to_owned())),
        "out of memory",
    )
    .await;
}

#[tokio::test]
async fn an_executor_that_panics_breaks_the_engine_and_not_the_process() {
    breaks_with(|_| panic!("slot {}", 3), "it panicked: slot 3").await;
}

#[tokio::test]
async fn an_executor_that_draws_what_it_was_not_asked_for_is_not_trusted() {
    let other_slot = "it drew tokens for other slots than it was asked to";
    breaks_with(|_| Ok(Vec::new()), other_slot).await;
    let token = |slot, id| Sampled {
        slot: Slot(slot),
        id,
        logprob: None,
    };
    breaks_with(move |_| Ok(vec![token(7, 1)]), other_slot).await;
    breaks_with(
        move |_| Ok(vec![token(0, u32::MAX)]),
        "it drew token 4294967295 of a vocabulary of 322",
    )
    .await;
}

#[tokio::test]
async fn an_executor_that_cannot_be_made_is_an_error_at_the_start() {
    let failed = |make: fn() -> Result<SimExecutor, EngineError>| {
        BatchedEngine::start(config(), facts(), make, Arc::new(SimText), clock()).map(drop)
    };
    let why = EngineError::Broken("no such file".to_owned());
    assert_eq!(
        failed(|| Err(EngineError::Broken("no such file".to_owned()))),
        Err(why)
    );
    let why = EngineError::Broken("it panicked: no file".to_owned());
    assert_eq!(failed(|| panic!("no file")), Err(why));
}

#[tokio::test]
async fn facts_that_contradict_the_sizes_are_refused() {
    let wrong: [fn(&mut EngineFacts); 4] = [
        |facts| facts.total = Blocks(31),
        |facts| facts.models.clear(),
        |facts| facts.models[0].context = Tokens(255),
        |facts| facts.block_size = BlockSize::new(std::num::NonZeroU32::MIN),
    ];
    for change in wrong {
        let mut facts = facts();
        change(&mut facts);
        let engine =
            BatchedEngine::start(config(), facts, || Ok(good()), Arc::new(SimText), clock());
        assert!(matches!(engine, Err(EngineError::Broken(_))));
    }
}

#[tokio::test]
async fn callers_are_answered_while_a_step_runs_and_a_drop_waits_for_it_only_so_long() {
    let (entered, has_entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let mut inner = good();
    let engine = start(Scripted(move |step: &Step| {
        entered.send(()).expect("the test listens");
        // An error means that the test has gone on without us.
        released.recv().ok();
        inner.step(step)
    }));
    let mut first = engine.submit(job(1)).expect("taken");
    has_entered.recv_timeout(PATIENCE).expect("a step runs");
    let load = engine.load();
    assert_eq!((load.running, load.used), (1, Blocks(1)));
    let second = engine.submit(job(2)).expect("taken");
    engine.abort(job(1).request, Epoch::FIRST);
    assert_eq!(first.recv().await, None, "aborted while its step runs");
    assert_eq!(engine.load().used, Blocks::ZERO);
    release.send(()).expect("the step waits");
    has_entered
        .recv_timeout(PATIENCE)
        .expect("the step of the second job");
    let mut second = second;
    drop(engine);
    assert_eq!(second.recv().await, None, "ended before its step has");
    drop(release);
}

#[tokio::test]
async fn a_job_that_is_refused_uses_up_its_promise() {
    let engine = start(good());
    let ask = ReserveAsk {
        demand: Blocks(4),
        lease: PATIENCE,
        at_once: false,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    };
    let mut bad = job(1);
    bad.reservation = engine.reserve(ask).ok();
    bad.prepared.params.max_tokens = 0;
    assert_eq!(engine.load().reserved, Blocks(4));
    assert!(matches!(
        engine.submit(bad),
        Err(EngineError::BadRequest { .. })
    ));
    assert_eq!(engine.load().reserved, Blocks::ZERO);
}

#[tokio::test]
async fn a_resumed_job_whose_output_holds_its_end_finishes_with_the_text_it_had() {
    let engine = start(good());
    let mut ended = job(1);
    ended.prepared.params.ignore_eos = false;
    // Two letters and the end token of the simulated vocabulary.
    ended.generated = vec![104, 105, 256];
    let mut events = engine.submit(ended.clone()).expect("taken");
    let finished = |event: Option<EngineEvent>| match event {
        Some(EngineEvent::Finished(finish)) => finish,
        other => panic!("{other:?}"),
    };
    let finish = finished(events.recv().await);
    assert_eq!(
        (finish.reason, finish.output_tokens),
        (FinishReason::Stop, 3)
    );
    assert_eq!(finish.text, "", "whoever generated the ids has sent it");
    assert_eq!(events.recv().await, None);

    // A stop string was begun, so its text was held back and comes now.
    ended.request.serial = 2;
    ended.prepared.params.stop = vec!["ix".to_owned()];
    let mut events = engine.submit(ended.clone()).expect("taken");
    assert_eq!(finished(events.recv().await).text, "i");
    assert_eq!(engine.load().running, 0);
}

#[tokio::test]
async fn a_prompt_beyond_the_context_is_told_in_openais_words() {
    let engine = start(good());
    let refused = async |body: String| {
        let answer = engine
            .prepare(RequestKind::Completion, Bytes::from(body))
            .await;
        match answer {
            Err(EngineError::BadRequest { message, param }) => (message, param),
            other => panic!("{other:?}"),
        }
    };
    let ids = vec!["5"; 300].join(",");
    let (message, param) = refused(format!(r#"{{"model":"m","prompt":[{ids}]}}"#)).await;
    assert_eq!(
        message,
        "This model's maximum context length is 256 tokens. However, your prompt resulted in 300 tokens. \
         Please reduce the length of the prompt."
    );
    assert_eq!(param.as_deref(), Some("prompt"));
    let body = r#"{"model":"m","prompt":[5,6],"max_tokens":255}"#;
    let (message, param) = refused(body.to_owned()).await;
    assert_eq!(
        message,
        "This model's maximum context length is 256 tokens. However, you requested 257 tokens \
         (2 in the prompt, 255 in the completion). Please reduce the length of the prompt or completion."
    );
    assert_eq!(param.as_deref(), Some("max_tokens"));
}

/// A simulated executor whose exports do what the closure does first.
struct Watched<F> {
    inner: SimExecutor,
    before: F,
}

impl<F> Watched<F>
where
    F: FnMut(&str) + Send + 'static,
{
    fn new(before: F) -> Self {
        let inner = good().with_kv(SimKv::new(0));
        Self { inner, before }
    }
}

impl<F> Executor for Watched<F>
where
    F: FnMut(&str) + Send + 'static,
{
    fn step(&mut self, step: &Step) -> Result<Vec<Sampled>, EngineError> {
        (self.before)("step");
        self.inner.step(step)
    }

    fn kv_form(&self) -> Option<Arc<dyn KvForm>> {
        self.inner.kv_form()
    }

    fn export(&mut self, slot: Slot, range: KvRange) -> Result<Vec<u8>, KvFault> {
        (self.before)("export");
        self.inner.export(slot, range)
    }
}

fn long_job(serial: u64) -> Job {
    let mut long = job(serial);
    long.prepared.params.max_tokens = 200;
    long
}

#[tokio::test]
async fn acts_that_queue_up_do_not_keep_a_job_from_its_steps() {
    let (seen, sees) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let mut steps = 0;
    let engine = start(Watched::new(move |what: &str| {
        steps += u32::from(what == "step");
        if what == "step" && steps == 2 {
            released.recv().ok();
        }
        // An error means that the test has gone on without us.
        seen.send(what.to_owned()).ok();
    }));
    let mut events = engine.submit(long_job(1)).expect("taken");
    assert!(events.recv().await.is_some());
    let export = || {
        let id = job(1).request;
        engine.export(id, Epoch::FIRST, Tokens::ZERO, Tokens(1))
    };
    // All are in the queue before the second step ends; the job stops for want of a reader only much later.
    let all_asked = async { release.send(()) };
    let exported = futures::join!(export(), export(), export(), export(), all_asked);
    for exported in [exported.0, exported.1, exported.2, exported.3] {
        assert!(exported.expect("is here").kv.is_some());
    }
    // More than a channel holds: steps came after the acts.
    for _ in 0..40 {
        assert!(events.recv().await.is_some());
    }
    drop(events);
    engine.shutdown().await;
    let order: Vec<String> = sees.try_iter().collect();
    assert_eq!(order.iter().filter(|what| *what == "export").count(), 4);
    assert_eq!(order.last().map(String::as_str), Some("step"), "{order:?}");
}

#[tokio::test]
async fn an_executor_that_panics_over_kv_breaks_the_engine_and_not_the_process() {
    let engine = start(Watched::new(|what: &str| assert_ne!(what, "export")));
    let mut events = engine.submit(long_job(1)).expect("taken");
    assert!(events.recv().await.is_some());
    let exported = engine
        .export(job(1).request, Epoch::FIRST, Tokens::ZERO, Tokens(1))
        .await;
    assert!(
        matches!(exported, Err(MoveError::Broken(_))),
        "{exported:?}"
    );
    while let Some(event) = events.recv().await {
        let failed = matches!(event, EngineEvent::Failed(EngineError::Broken(_)));
        assert!(
            failed || matches!(event, EngineEvent::Tokens(_)),
            "{event:?}"
        );
    }
    assert_eq!(engine.load().readiness, Readiness::Failed);
    let later = engine.pause(job(1).request, Epoch::FIRST, None).await;
    assert!(matches!(later, Err(MoveError::Broken(_))), "{later:?}");
    engine.shutdown().await;
}

#[tokio::test]
async fn a_pause_that_nobody_waits_for_any_more_does_not_stop_the_job() {
    let (entered, has_entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let engine = start(Watched::new(move |what: &str| {
        if what == "export" {
            entered.send(()).expect("the test listens");
            released.recv().ok();
        }
    }));
    let mut events = engine.submit(long_job(1)).expect("taken");
    assert!(events.recv().await.is_some());
    let asking = Arc::clone(&engine);
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move {
        let paused = asking.pause(job(1).request, Epoch::FIRST, Some(Tokens::ZERO));
        paused.await.map(drop)
    });
    let inside = tokio::task::spawn_blocking(move || has_entered.recv_timeout(PATIENCE));
    inside
        .await
        .expect("joined")
        .expect("the pause is under way");
    tasks.shutdown().await;
    release.send(()).expect("the export waits");
    let mut tokens = 1;
    while let Some(event) = events.recv().await {
        tokens += u32::from(matches!(event, EngineEvent::Tokens(_)));
    }
    assert_eq!(tokens, 200);
}

#[tokio::test]
async fn an_engine_without_kv_takes_none_in_and_gives_none_out() {
    let engine = start(good());
    assert!(!engine.facts().capabilities.kv_export);
    assert_eq!(engine.kv_bytes_per_token(), 0);
    let admitted = engine.admit(job(1), CopyMode::Kv);
    assert!(matches!(admitted, Err(EngineError::BadRequest { .. })));
    let mut events = engine.submit(long_job(2)).expect("taken");
    assert!(events.recv().await.is_some());
    let asked = engine
        .pause(job(2).request, Epoch::FIRST, Some(Tokens::ZERO))
        .await;
    assert!(matches!(asked, Err(MoveError::Unfit(_))), "{asked:?}");
    let paused = engine.pause(job(2).request, Epoch::FIRST, None).await;
    assert!(paused.expect("is here").kv.is_none());
}
