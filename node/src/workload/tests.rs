//! The sequence: repeatable, comparable between rates, lazy, within its bound.

use proptest::prelude::*;

use super::*;

fn spec(lengths: &str, arrivals: &str, rate: f64) -> WorkloadSpec {
    WorkloadSpec {
        lengths: Some(lengths.parse().expect("lengths")),
        arrivals: Some(arrivals.parse().expect("arrivals")),
        rate: Some(rate),
        ..WorkloadSpec::default()
    }
}

fn run(spec: &WorkloadSpec, seed: u64) -> Vec<Arrival> {
    Workload::new(spec, seed).expect("sound").collect()
}

fn lengths(arrivals: &[Arrival]) -> Vec<(Tokens, Tokens)> {
    arrivals.iter().map(|a| (a.prompt, a.output)).collect()
}

#[test]
fn one_seed_is_one_sequence_and_another_seed_another() {
    let spec = spec("burstgpt", "gamma:2", 5.0);
    assert_eq!(run(&spec, 1), run(&spec, 1));
    assert_ne!(lengths(&run(&spec, 1)), lengths(&run(&spec, 2)));
}

#[test]
fn another_rate_or_process_leaves_the_lengths_as_they_are() {
    let base = run(&spec("L-S", "poisson", 1.0), 9);
    for (arrivals, rate) in [
        ("poisson", 8.0),
        ("gamma:4", 1.0),
        ("burst:5:60:6", 3.0),
        ("uniform", 2.0),
    ] {
        let other = run(&spec("L-S", arrivals, rate), 9);
        assert_eq!(lengths(&other), lengths(&base), "{arrivals}");
        assert!(other.is_sorted_by_key(|arrival| arrival.at));
    }
}

#[test]
fn other_lengths_leave_the_arrival_times_as_they_are() {
    let times = |lengths| -> Vec<Duration> {
        let arrivals = run(&spec(lengths, "gamma:3", 2.0), 4);
        arrivals.iter().map(|arrival| arrival.at).collect()
    };
    assert_eq!(times("sharegpt"), times("fixed:10:10"));
}

#[test]
fn requests_are_drawn_one_by_one_and_counted() {
    let spec = WorkloadSpec {
        requests: Some(1_000_000_000),
        ..WorkloadSpec::default()
    };
    let mut workload = Workload::new(&spec, 1).expect("sound");
    assert_eq!(workload.size_hint().0, 1_000_000_000);
    assert_eq!(workload.by_ref().take(3).count(), 3);
    assert_eq!(workload.size_hint().0, 999_999_997);
    assert_eq!(run(&WorkloadSpec::default(), 1).len(), 1000);
}

#[test]
fn the_default_lengths_are_shipped() {
    let default: Lengths = spec::DEFAULT_LENGTHS.parse().expect("shipped");
    assert!(
        Lengths::shipped()
            .expect("sound")
            .iter()
            .any(|name| name == default.name())
    );
}

proptest! {
    #[test]
    fn a_request_is_cut_to_the_bound_output_first(
        prompt in 1..u32::MAX, output in 1..u32::MAX, most in 2..200_000u32, small in 1..100_000u32,
    ) {
        for (prompt, output) in [(prompt, output), (small, output), (small, small)] {
            let whole = Arrival { at: Duration::ZERO, prompt: Tokens(prompt), output: Tokens(output) };
            let cut = whole.within(Tokens(most));
            prop_assert!(cut.prompt.0 >= 1 && cut.output.0 >= 1);
            prop_assert!(cut.prompt.0 + cut.output.0 <= most);
            let total = u64::from(prompt) + u64::from(output);
            if total <= u64::from(most) {
                prop_assert_eq!(cut, whole);
            } else {
                prop_assert_eq!(cut.prompt.0 + cut.output.0, most);
                prop_assert!(cut.prompt == whole.prompt || cut.output == Tokens(1));
            }
        }
    }
}
