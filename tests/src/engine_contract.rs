//! What every engine must do, whatever runs inside: the suite behind the `Engine` trait.
//!
//! `engine_contract_tests!(make)` makes one test of each check; `make` builds an engine of a
//! [`Shape`]. No check depends on how fast the engine is: a job whose events nobody reads stops by
//! itself once its channel is full, and holds its place for as long as a check needs.
//!
//! What the suite cannot prove: that text is what the model would say, and that outputs are
//! independent of load, beyond the few jobs that run together here.

mod flow;
mod moving;
mod requests;
mod resume;
mod room;

pub use self::flow::*;
pub use self::moving::*;
pub use self::requests::*;
pub use self::resume::*;
pub use self::room::*;

use std::sync::Arc;

use bytes::Bytes;
use shoal_gossip::{Blocks, Epoch, LoadSummary, NodeId, RequestId, Tokens};
use shoal_node::engine::work::{HttpAsk, Job, Prepared, Priority, RequestKind, SamplingParams};
use shoal_node::engine::{
    Engine, EngineEvent, Finish, FinishReason, ReservationId, TokenLogprob, starting_demand,
};
use tokio::sync::mpsc::Receiver;

use crate::wait;

/// What a check asks an engine to be.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Tokens of KV in all.
    pub kv: u32,
    /// Sequences that run at once.
    pub slots: u32,
    /// Requests that may wait.
    pub queue_limit: u32,
    /// All of the KV is open to every sequence. Else each slot may have a part of its own, of
    /// `kv / slots` tokens, and outputs are reproducible.
    pub pool: bool,
}

impl Shape {
    /// Four sequences of 512 tokens each and four that wait.
    pub const SPLIT: Self = Self {
        kv: 2048,
        slots: 4,
        queue_limit: 4,
        pool: false,
    };

    /// Four sequences that share too little KV for all of them.
    pub const TIGHT_POOL: Self = Self {
        kv: 512,
        slots: 4,
        queue_limit: 4,
        pool: true,
    };
}

/// Makes a test of each check of the engine contract.
#[macro_export]
macro_rules! engine_contract_tests {
    ($make:expr) => {
        $crate::engine_contract_tests! { $make;
            events_come_in_order_and_usage_is_counted
            an_output_ends_before_its_stop_string
            logprobs_come_one_per_token_when_asked_for
            a_slow_reader_pauses_its_own_job_only_and_loses_nothing
            a_job_that_is_aborted_in_any_phase_leaves_nothing
            a_receiver_that_is_dropped_in_any_phase_leaves_nothing
            loads_add_up_while_jobs_come_and_go
            shortage_of_kv_neither_loses_nor_repeats_a_token
            shutdown_lets_running_jobs_finish_and_takes_no_more
            dropping_the_engine_ends_its_jobs
            a_resumed_job_goes_on_where_it_was
            a_job_that_arrives_complete_ends_at_once
            a_newer_epoch_replaces_an_older_one
            a_promise_ends_in_use_in_release_or_by_lease
            the_queue_is_bounded
            a_waiting_job_starts_when_room_is_freed
            listeners_hear_that_the_load_changed
            a_body_is_read_checked_and_clamped
            a_bad_body_is_refused_with_the_field_to_blame
            a_job_that_contradicts_itself_is_refused
            a_moved_request_goes_on_as_if_it_had_not_moved
            a_request_moves_between_shared_pools
            a_request_moves_back_and_forth
            neighbours_do_not_notice_a_move
            a_paused_request_stands_still_and_goes_on
            a_resumed_request_sends_again_just_what_is_wanted
            a_move_that_is_aborted_in_any_phase_leaves_nothing
            wrong_kv_is_refused_and_harms_nobody
            a_state_that_contradicts_the_request_is_refused
            a_target_without_room_says_so
            a_waiting_request_moves_without_kv
            a_request_in_prefill_moves_with_what_it_has
            a_request_moves_by_recompute
            what_is_asked_of_a_request_that_is_gone_changes_nothing
            a_request_is_described_as_it_is
        }
    };
    ($make:expr; $($check:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $check() {
                $crate::engine_contract::$check($make).await;
            }
        )*
    };
}

/// Prompt ids: bytes in every vocabulary we test with, different for each request.
fn prompt(serial: u64, length: usize) -> Vec<u32> {
    (0..length as u64)
        .map(|n| 10 + ((n * 7 + serial * 13 + n * n * (serial % 5)) % 180) as u32)
        .collect()
}

/// A greedy job that generates exactly `max_tokens`.
fn job(engine: &dyn Engine, serial: u64, prompt_len: usize, max_tokens: u32) -> Job {
    Job {
        request: RequestId {
            home: NodeId(7),
            serial,
        },
        epoch: Epoch::FIRST,
        kind: Some(RequestKind::Completion),
        http: HttpAsk::default(),
        spoken: Vec::new(),
        body: Bytes::new(),
        prepared: Prepared {
            model: engine.facts().models[0].id.clone(),
            prompt: prompt(serial, prompt_len).into(),
            params: SamplingParams {
                temperature: 0.0,
                max_tokens,
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

/// What a client would have seen of a job.
#[derive(Clone, Debug, Default, PartialEq)]
struct Output {
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprob>,
    finish: Option<Finish>,
}

impl Output {
    fn reason(&self) -> Option<FinishReason> {
        self.finish.as_ref().map(|finish| finish.reason)
    }

    /// Adds an event; the first of all had index `first`.
    fn take(&mut self, first: u32, event: EngineEvent) {
        assert_eq!(self.finish, None, "an event after the end: {event:?}");
        match event {
            EngineEvent::Tokens(batch) => {
                assert!(!batch.ids.is_empty(), "a batch without tokens");
                let next = first + self.ids.len() as u32;
                assert_eq!(batch.index, next, "a token is lost or repeated");
                self.ids.extend(batch.ids);
                self.text.push_str(&batch.text);
                self.logprobs.extend(batch.logprobs);
            }
            EngineEvent::Finished(finish) => {
                let tokens = first + self.ids.len() as u32;
                assert_eq!(finish.output_tokens, tokens, "usage is what was sent");
                self.text.push_str(&finish.text);
                self.finish = Some(finish);
            }
            EngineEvent::Failed(error) => panic!("the job failed: {error}"),
        }
    }
}

/// Reads a job to its end, and checks that indexes follow each other from `first`.
async fn collect_from(first: u32, events: &mut Receiver<EngineEvent>) -> Output {
    let mut output = Output::default();
    while let Some(event) = receive(events).await {
        output.take(first, event);
    }
    output
}

async fn collect(mut events: Receiver<EngineEvent>) -> Output {
    collect_from(0, &mut events).await
}

/// The next event, or a failed test.
async fn receive(events: &mut Receiver<EngineEvent>) -> Option<EngineEvent> {
    tokio::time::timeout(wait::PATIENCE, events.recv())
        .await
        .expect("an event or the end within the deadline")
}

/// Runs one job alone.
async fn run(engine: &dyn Engine, job: Job) -> Output {
    collect(engine.submit(job).expect("taken")).await
}

/// Waits until the load looks as wanted.
async fn load_becomes(engine: &dyn Engine, what: &str, wanted: impl Fn(&LoadSummary) -> bool) {
    wait::until(what, || async {
        let load = engine.load();
        assert!(load.used + load.reserved <= load.total, "{load:?}");
        if wanted(&load) { Ok(()) } else { Err(load) }
    })
    .await;
}

/// Waits until nothing is held and nobody waits.
async fn becomes_empty(engine: &dyn Engine) {
    load_becomes(engine, "an empty engine", |load| {
        let held = load.used + load.reserved + load.queued_demand;
        (held, load.running, load.queued) == (Blocks::ZERO, 0, 0)
    })
    .await;
}

/// Fills every slot with a job that nobody reads; they hold their room until dropped.
async fn occupy(engine: &dyn Engine, shape: Shape) -> Vec<Receiver<EngineEvent>> {
    let receivers = (0..u64::from(shape.slots))
        .map(|serial| {
            let job = job(engine, 1000 + serial, 40, 64);
            engine.submit(job).expect("a free slot")
        })
        .collect();
    load_becomes(engine, "all slots in use", |load| {
        load.running == shape.slots && load.reserved == Blocks::ZERO
    })
    .await;
    receivers
}

fn demand(engine: &dyn Engine, job: &Job) -> Blocks {
    let tokens = |length: usize| Tokens(u32::try_from(length).expect("a test's length"));
    starting_demand(
        engine.facts().block_size,
        tokens(job.prepared.prompt.len()),
        tokens(job.generated.len()),
    )
}

fn with_reservation(job: Job, reservation: ReservationId) -> Job {
    Job {
        reservation: Some(reservation),
        ..job
    }
}

/// An engine and the shape it was made with.
fn made<M: Fn(Shape) -> Arc<dyn Engine>>(make: M, shape: Shape) -> Arc<dyn Engine> {
    let engine = make(shape);
    let load = engine.load();
    assert_eq!(load.total, engine.facts().total);
    assert_eq!(
        (load.incarnation.0, load.seq),
        (0, 0),
        "the node fills these in"
    );
    engine
}
