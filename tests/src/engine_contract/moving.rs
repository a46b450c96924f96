//! Requests that move from one engine to another.
//!
//! Two engines of the same make stand for two nodes; a [`Client`] reads on across moves, and must see what it
//! would have seen without.

mod refused;
mod whole;

pub use self::refused::*;
pub use self::whole::*;

use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Epoch, NodeId, RequestId, Tokens};
use shoal_migrate::CopyMode;
use shoal_node::engine::moving::{JobStatus, MoveError, MovingEngine, PausedJob};
use shoal_node::engine::work::{Job, SamplingParams};
use shoal_node::engine::{Engine, EngineEvent, ReservationId, ReserveAsk};
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;

use super::{Output, Shape, demand, job, made, receive};
use crate::wait;

/// A stage of KV at most, so that copies have several.
const STAGE: Tokens = Tokens(16);

fn moving(engine: &dyn Engine) -> &dyn MovingEngine {
    engine.moving().expect("its requests can move")
}

fn pair<M: Fn(Shape) -> Arc<dyn Engine>>(
    make: M,
    shape: Shape,
) -> (Arc<dyn Engine>, Arc<dyn Engine>) {
    (made(&make, shape), made(&make, shape))
}

/// Parameters that leave state behind: each must survive a move.
fn demanding() -> Vec<SamplingParams> {
    let greedy = SamplingParams {
        temperature: 0.0,
        max_tokens: 150,
        ignore_eos: true,
        ..SamplingParams::default()
    };
    vec![
        greedy.clone(),
        SamplingParams {
            temperature: 0.9,
            top_p: 0.95,
            seed: 11,
            logprobs: Some(2),
            ..greedy.clone()
        },
        SamplingParams {
            repetition_penalty: 1.2,
            presence_penalty: 0.3,
            frequency_penalty: 0.2,
            stop: vec![
                " never to be seen".to_owned(),
                "\u{fffd}\u{fffd}\u{fffd}q".to_owned(),
            ],
            ..greedy
        },
    ]
}

/// A job of these parameters.
fn job_of(engine: &dyn Engine, serial: u64, prompt: usize, params: &SamplingParams) -> Job {
    let mut job = job(engine, serial, prompt, params.max_tokens);
    job.prepared.params = params.clone();
    job
}

/// Whoever reads a request, wherever it runs.
struct Client {
    request: RequestId,
    epoch: Epoch,
    output: Output,
    events: Receiver<EngineEvent>,
}

impl Client {
    fn submit(engine: &dyn Engine, job: Job) -> Self {
        Self {
            request: job.request,
            epoch: job.epoch,
            output: Output::default(),
            events: engine.submit(job).expect("taken"),
        }
    }

    /// Reads until this many tokens are here, or the end.
    async fn read(&mut self, tokens: usize) {
        while self.output.ids.len() < tokens {
            match receive(&mut self.events).await {
                Some(event) => self.output.take(0, event),
                None => return,
            }
        }
    }

    /// Reads what is in the channel.
    fn drain(&mut self) {
        while self.take_one() {}
    }

    /// Reads an event if there is one.
    fn take_one(&mut self) -> bool {
        match self.events.try_recv() {
            Ok(event) => self.output.take(0, event),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => return false,
        }
        true
    }

    async fn rest(mut self) -> Output {
        while let Some(event) = receive(&mut self.events).await {
            self.output.take(0, event);
        }
        self.output
    }

    fn is_over(&self) -> bool {
        self.output.finish.is_some()
    }

    fn status(&self, engine: &dyn Engine) -> Option<JobStatus> {
        moving(engine).job(self.request)
    }

    /// Makes room at the target and has the job admitted there.
    fn admit(&self, from: &dyn Engine, to: &dyn Engine, mode: CopyMode) -> Result<(), MoveError> {
        let job = self.described(from)?;
        let job = Job {
            reservation: Some(reserve(to, &job)),
            ..job
        };
        moving(to).admit(job, mode).expect("admitted");
        Ok(())
    }

    /// The job as the target gets it, without a promise.
    fn described(&self, from: &dyn Engine) -> Result<Job, MoveError> {
        let opening = moving(from).describe(self.request, self.epoch)?;
        Ok(Job {
            request: self.request,
            epoch: self.epoch,
            kind: opening.kind,
            http: opening.http,
            spoken: Vec::new(),
            body: opening.body,
            prepared: opening.prepared,
            generated: opening.output,
            reservation: None,
        })
    }

    /// Copies stages while the request runs on. Gives how far.
    async fn copy(
        &mut self,
        from: &dyn Engine,
        to: &dyn Engine,
        stages: usize,
    ) -> Result<Tokens, MoveError> {
        let mut sent = Tokens::ZERO;
        for _ in 0..stages {
            let exported = moving(from)
                .export(self.request, self.epoch, sent, STAGE)
                .await?;
            let Some(kv) = exported.kv else { break };
            assert_eq!(kv.range.start(), sent);
            assert!(kv.range.tokens() <= STAGE && kv.range.end() <= exported.computed);
            sent = kv.range.end();
            moving(to).import(self.request, self.epoch, kv).await?;
            // One at a time: the request runs on, but not to its end.
            self.take_one();
        }
        Ok(sent)
    }

    /// Goes on at the target with what the source paused at.
    async fn arrive(&mut self, from: &dyn Engine, to: &dyn Engine, paused: PausedJob) {
        let PausedJob { state, kv, .. } = paused;
        self.drain();
        assert_eq!(
            self.output.ids, state.output,
            "all events were in the channel"
        );
        let completed = moving(to).complete(self.request, self.epoch, state, kv);
        completed.await.expect("complete");
        let next = self.epoch.next();
        let seen = self.output.ids.len() as u32;
        let resumed = moving(to).resume(self.request, self.epoch, next, seen);
        self.events = resumed.expect("resumed");
        from.abort(self.request, self.epoch);
        self.epoch = next;
    }

    /// Moves the request with its KV, after this many stages. False when it ended first.
    async fn move_over(&mut self, from: &dyn Engine, to: &dyn Engine, stages: usize) -> bool {
        if let Err(error) = self.admit(from, to, CopyMode::Kv) {
            assert_eq!(error, MoveError::Gone);
            self.drain();
            return false;
        }
        let copied = self.copy(from, to, stages).await;
        let paused = match copied {
            Ok(sent) => {
                moving(from)
                    .pause(self.request, self.epoch, Some(sent))
                    .await
            }
            Err(error) => Err(error),
        };
        match paused {
            Ok(paused) => {
                self.arrive(from, to, paused).await;
                true
            }
            Err(error) => {
                assert_eq!(error, MoveError::Gone);
                self.drain();
                to.abort(self.request, self.epoch);
                false
            }
        }
    }
}

fn ask(engine: &dyn Engine, job: &Job) -> ReserveAsk {
    ReserveAsk {
        demand: demand(engine, job),
        lease: wait::PATIENCE,
        at_once: true,
        waited: Duration::ZERO,
        resumed: false,
        home: NodeId(1),
    }
}

fn reserve(engine: &dyn Engine, job: &Job) -> ReservationId {
    engine.reserve(ask(engine, job)).expect("room at once")
}
