//! Rates, variation, bursts, and what is refused.

use proptest::prelude::*;
use rand::SeedableRng;

use super::*;

/// Arrival times in seconds.
fn times(text: &str, rate: f64, count: usize) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(5);
    let mut clock = ArrivalClock::new(text.parse().expect("known"), rate);
    (0..count)
        .map(|_| clock.next(&mut rng).as_secs_f64())
        .collect()
}

/// Mean rate, and coefficient of variation of the times between arrivals.
fn shape(times: &[f64]) -> (f64, f64) {
    let gaps: Vec<f64> = std::iter::once(times[0])
        .chain(times.windows(2).map(|pair| pair[1] - pair[0]))
        .collect();
    let count = gaps.len() as f64;
    let mean = gaps.iter().sum::<f64>() / count;
    let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count;
    (1.0 / mean, variance.sqrt() / mean)
}

fn check(text: &str, cv: f64) {
    let (rate, found) = shape(&times(text, 7.5, 200_000));
    assert!((rate / 7.5 - 1.0).abs() < 0.04, "{text}: {rate}/s");
    assert!((found - cv).abs() < 0.05 * cv + 1e-6, "{text}: CV {found}");
}

#[test]
fn every_process_keeps_the_rate_and_has_its_variation() {
    check("poisson", 1.0);
    check("uniform", 0.0);
    check("gamma:1", 1.0);
    check("gamma:0.5", 0.5);
    check("gamma:4", 4.0);
}

#[test]
fn a_burst_has_its_share_of_the_requests_and_the_mean_rate_stays() {
    let times = times("burst:4:60:10", 20.0, 120_000);
    let (rate, _) = shape(&times);
    assert!((rate / 20.0 - 1.0).abs() < 0.02, "{rate}/s");
    let in_burst = times.iter().filter(|at| **at % 60.0 >= 50.0).count();
    let share = in_burst as f64 / times.len() as f64;
    // 10 s at four times the rate, 50 s at the rate.
    let expected = 4.0 * 10.0 / (4.0 * 10.0 + 50.0);
    assert!((share - expected).abs() < 0.01, "{share}");
}

#[test]
fn a_burst_of_factor_one_is_a_poisson_process() {
    let plain = times("poisson", 3.0, 1000);
    for (burst, plain) in times("burst:1:20:5", 3.0, 1000).iter().zip(plain) {
        assert!((burst - plain).abs() < 1e-6);
    }
}

#[test]
fn twice_the_rate_is_the_same_pattern_at_half_the_times() {
    for text in ["poisson", "uniform", "gamma:3"] {
        let slow = times(text, 2.0, 500);
        for (slow, fast) in slow.iter().zip(times(text, 4.0, 500)) {
            assert!((slow / 2.0 - fast).abs() < 1e-8);
        }
    }
}

#[test]
fn a_process_reads_as_it_is_written() {
    for text in ["poisson", "uniform", "gamma:2.5", "burst:4:60:7.5"] {
        let arrivals: Arrivals = text.parse().expect("known");
        assert_eq!(arrivals.to_string(), text);
    }
}

#[test]
fn what_is_no_process_is_refused_with_the_list_of_them() {
    for text in [
        "",
        "poison",
        "poisson:2",
        "gamma",
        "gamma:x",
        "gamma:0",
        "gamma:-1",
        "gamma:nan",
        "gamma:inf",
        "gamma:2:2",
        "burst:4:60",
        "burst:0.5:60:10",
        "burst:4:60:60",
        "burst:4:60:0",
        "burst:4:inf:10",
        "burst:4:nan:10",
    ] {
        let error = text.parse::<Arrivals>().expect_err(text);
        let message = error.to_string();
        assert!(message.contains("gamma:CV"), "{message}");
    }
}

proptest! {
    #[test]
    fn arrivals_never_step_back(
        factor in 1.0..100.0f64, period in 0.01..100.0f64, part in 0.01..0.99f64, rate in 0.01..1000.0f64,
    ) {
        let text = format!("burst:{factor}:{period}:{}", period * part);
        let times = times(&text, rate, 300);
        prop_assert!(times.is_sorted());
        prop_assert!(times[0] >= 0.0);
    }
}
