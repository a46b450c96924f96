use std::time::Duration;

use shoal_gossip::Tokens;

use super::*;
use crate::config::from_flags;
use crate::dispatch::PolicyName;
use crate::report::{Outcome, Summary};

mod faults;

fn plan(nodes: usize, scheduling: Scheduling) -> Plan {
    let profile = Profile::find("a10/llama-7b").expect("shipped");
    Plan {
        nodes: vec![profile; nodes],
        scheduling,
        gossip: GossipModel {
            interval: Duration::from_millis(250),
            extra: Duration::ZERO,
            loss: 0.0,
        },
        network: Network {
            latency: Duration::from_micros(280),
            bytes_per_second: 2.5e9,
        },
        entries: nodes,
        queue_limit: 10_000,
        context: None,
        llumnix: (10, 30),
        faults: Vec::new(),
        node: from_flags(["--engine", "sim:a10/llama-7b", "--data-dir", "."]).expect("good"),
        seed: 7,
    }
}

/// Requests of changing size at an even rate; every seventh is long.
fn arrivals(count: u32, every: Duration) -> impl Iterator<Item = Arrival> {
    (0..count).map(move |n| Arrival {
        at: every * n,
        prompt: Tokens(20 + n * 37 % 400),
        output: Tokens(if n % 7 == 0 { 900 } else { 10 + n * 13 % 150 }),
    })
}

fn simulated(plan: &Plan, count: u32, every: Duration) -> Run {
    run(plan, arrivals(count, every), |_| {}).expect("it runs")
}

#[test]
fn every_request_ends_with_all_its_output_under_every_scheduling() {
    for scheduling in Scheduling::all() {
        let run = simulated(&plan(4, scheduling), 300, Duration::from_millis(300));
        assert_eq!(run.records.len(), 300);
        for (record, arrival) in run
            .records
            .iter()
            .zip(arrivals(300, Duration::from_millis(300)))
        {
            assert_eq!(record.outcome, Outcome::Finished, "{scheduling:?}");
            assert_eq!(
                (record.at, record.output),
                (arrival.at, arrival.output),
                "{scheduling:?}"
            );
            let (first, end) = (record.first.expect("a token"), record.end.expect("an end"));
            assert!(Duration::ZERO < first && first <= end, "{scheduling:?}");
        }
    }
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    let plan = plan(5, Scheduling::Shoal);
    let one = simulated(&plan, 200, Duration::from_millis(250));
    assert_eq!(one, simulated(&plan, 200, Duration::from_millis(250)));
    let other = Plan { seed: 8, ..plan };
    assert_ne!(one, simulated(&other, 200, Duration::from_millis(250)));
}

#[test]
fn a_lone_request_takes_what_its_steps_take() {
    let plan = plan(1, Scheduling::Shoal);
    let alone = Arrival {
        at: Duration::ZERO,
        prompt: Tokens(100),
        output: Tokens(11),
    };
    let run = run(&plan, std::iter::once(alone), |_| {}).expect("it runs");
    let step = |position, tokens| {
        let mut load = crate::engine::sim::StepLoad::default();
        load.add(position, tokens, true);
        plan.nodes[0].step.step_time(&load)
    };
    let record = &run.records[0];
    assert_eq!(record.first, Some(step(0, 100)));
    let decode: Duration = (100..110).map(|position| step(position, 1)).sum();
    assert_eq!(record.end, Some(step(0, 100) + decode));
    assert_eq!((record.moves, record.preemptions), (0, 0));
}

#[test]
fn requests_move_away_from_nodes_that_run_short() {
    // One entry node whose view is two seconds old overfills others.
    let mut crowded = plan(4, Scheduling::Shoal);
    crowded.entries = 1;
    crowded.gossip.extra = Duration::from_secs(2);
    let run = simulated(&crowded, 800, Duration::from_millis(110));
    let (begun, moved) = run.moves;
    assert!(moved > 0 && moved <= begun, "{moved} of {begun}");
    let told: u32 = run.records.iter().map(|record| record.moves).sum();
    assert_eq!(u64::from(told), moved);
    let hosts: std::collections::BTreeSet<_> =
        run.records.iter().map(|record| record.host).collect();
    assert_eq!(hosts.len(), 4);
}

#[test]
fn views_that_are_as_fresh_as_can_be_beat_old_ones() {
    let mut fresh = plan(4, Scheduling::Policy(PolicyName::LeastQueue));
    fresh.gossip.interval = Duration::ZERO;
    let mut stale = plan(4, Scheduling::Policy(PolicyName::LeastQueue));
    stale.gossip.extra = Duration::from_millis(2_500);
    let mean = |plan: &Plan| {
        let run = simulated(plan, 800, Duration::from_millis(110));
        Summary::of(&run.records, run.span)
            .ttft_mean
            .expect("measured")
    };
    // The least queue of a view that is seconds old is where everybody went.
    assert!(mean(&fresh) < mean(&stale));
}

#[test]
fn a_fleet_may_be_mixed() {
    let mut mixed = plan(2, Scheduling::Shoal);
    mixed
        .nodes
        .push(Profile::find("h100/llama-3.1-8b").expect("shipped"));
    let run = simulated(&mixed, 300, Duration::from_millis(150));
    let at = |host| {
        run.records
            .iter()
            .filter(|record| record.host == Some(host))
            .count()
    };
    assert!(at(2) > at(0) && at(2) > at(1), "the large node takes most");
}

#[test]
fn a_plan_without_nodes_is_refused() {
    let empty = Plan {
        nodes: Vec::new(),
        ..plan(1, Scheduling::Shoal)
    };
    assert!(matches!(
        run(&empty, arrivals(1, Duration::ZERO), |_| {}),
        Err(SimulateError::NoNodes)
    ));
}

#[test]
fn the_state_is_sampled_from_start_to_end() {
    let run = simulated(&plan(2, Scheduling::Shoal), 50, Duration::from_millis(300));
    let samples = run.series.fleet.len();
    let expected = run.span.as_nanos() / run.series.every.as_nanos();
    assert!(
        (samples as u128).abs_diff(expected + 1) <= 1,
        "{samples} of {expected}"
    );
    assert!(
        run.series
            .fleet
            .iter()
            .any(|sample| sample.running > 0 && sample.used_max > 0.0)
    );
    assert_eq!(run.series.nodes.len(), 2);
}
