//! The engine contract, over HTTP. Left out is what these engines cannot be asked for through their servers (they read
//! bodies themselves and know their vocabulary, KV and log-probabilities stay with them), and what takes a load that is
//! exact at every moment: theirs is asked for now and then.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{BlockSize, MonotonicClock, Readiness, Tokens};
use shoal_node::engine::Engine;
use shoal_node::engine::remote::{self, Inexact, RemoteConfig};
use shoal_node::engine::sim::{self, SimConfig};
use shoal_tests::engine_contract::Shape;
use shoal_tests::engine_server::{Dialect, EngineServer};
use shoal_tests::wait::until;

/// An adapter beside a stand-in beside the simulated engine.
fn make(dialect: Dialect, shape: Shape) -> Arc<dyn Engine> {
    let clock = Arc::new(MonotonicClock::start());
    let context = if shape.pool {
        shape.kv
    } else {
        shape.kv / shape.slots
    };
    let config = SimConfig {
        // Slow enough that a test sees all of its jobs at work: an answer that nobody reads does not hold a server up.
        speed: 2.0,
        kv: Some(Tokens(shape.kv)),
        slots: Some(shape.slots),
        context: Some(Tokens(context)),
        step_tokens: Some(64),
        queue_limit: shape.queue_limit,
        ..SimConfig::new("a10/llama-7b")
    };
    let simulated = sim::start(&config, Arc::clone(&clock) as _).expect("starts");
    let started = async {
        let server = EngineServer::start(dialect, simulated).await;
        server.set_slots(shape.slots);
        let config = RemoteConfig {
            authority: server.address().to_string(),
            kind: None,
            key: None,
            poll: Duration::from_millis(10),
            stall: Duration::from_secs(60),
            capacity: None,
            block_size: BlockSize::new(NonZeroU32::new(16).expect("not zero")),
            queue_limit: shape.queue_limit,
            kv_folder: None,
            // The simulated engine behind it draws by seed and position, so all of it is exact.
            inexact: Inexact::Allow,
        };
        // It stands as long as the test runs.
        Box::leak(Box::new(server));
        let engine = remote::start(config, clock).expect("starts");
        until("an engine that is known and well", || async {
            let load = engine.load();
            let known = !engine.facts().models.is_empty();
            match known && load.readiness == Readiness::Ready {
                true => Ok(()),
                false => Err(load),
            }
        })
        .await;
        engine
    };
    let runtime = tokio::runtime::Handle::current();
    tokio::task::block_in_place(|| runtime.block_on(started))
}

mod vllm {
    use super::*;

    shoal_tests::engine_contract_tests! { |shape| make(Dialect::Vllm, shape);
        events_come_in_order_and_usage_is_counted
        an_output_ends_before_its_stop_string
        shortage_of_kv_neither_loses_nor_repeats_a_token
        shutdown_lets_running_jobs_finish_and_takes_no_more
        dropping_the_engine_ends_its_jobs
        a_resumed_job_goes_on_where_it_was
        a_job_that_arrives_complete_ends_at_once
        a_newer_epoch_replaces_an_older_one
        a_promise_ends_in_use_in_release_or_by_lease
        listeners_hear_that_the_load_changed
        a_request_moves_by_recompute
    }
}

mod llama_server {
    use super::*;

    shoal_tests::engine_contract_tests! { |shape| make(Dialect::LlamaServer, shape);
        events_come_in_order_and_usage_is_counted
        an_output_ends_before_its_stop_string
        a_job_that_is_aborted_in_any_phase_leaves_nothing
        shutdown_lets_running_jobs_finish_and_takes_no_more
        dropping_the_engine_ends_its_jobs
        a_resumed_job_goes_on_where_it_was
        a_job_that_arrives_complete_ends_at_once
        a_newer_epoch_replaces_an_older_one
        a_promise_ends_in_use_in_release_or_by_lease
        the_queue_is_bounded
        a_waiting_job_starts_when_room_is_freed
        a_request_moves_by_recompute
    }
}
