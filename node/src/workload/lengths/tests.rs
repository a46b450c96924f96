//! What the shipped tables give when they are drawn from.

use proptest::prelude::*;
use rand::SeedableRng;

use super::*;

const DRAWS: usize = 20_000;

fn draws(name: &str) -> Vec<(f64, f64)> {
    let lengths: Lengths = name.parse().expect("shipped");
    let mut rng = StdRng::seed_from_u64(3);
    (0..DRAWS)
        .map(|_| lengths.draw(&mut rng))
        .map(|(prompt, output)| (f64::from(prompt.0), f64::from(output.0)))
        .collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Ranks, ties at their mean rank.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut below = 0;
    for tied in order.chunk_by(|a, b| values[*a] == values[*b]) {
        for index in tied {
            ranks[*index] = below as f64 + tied.len() as f64 / 2.0;
        }
        below += tied.len();
    }
    ranks
}

fn spearman(pairs: &[(f64, f64)]) -> f64 {
    let (prompts, outputs): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let (prompts, outputs) = (ranks(&prompts), ranks(&outputs));
    let (mean_p, mean_o) = (mean(&prompts), mean(&outputs));
    let products = prompts.iter().zip(&outputs);
    let both: f64 = products.map(|(p, o)| (p - mean_p) * (o - mean_o)).sum();
    let square = |values: &[f64], mean: f64| values.iter().map(|v| (v - mean).powi(2)).sum::<f64>();
    both / (square(&prompts, mean_p) * square(&outputs, mean_o)).sqrt()
}

/// The draws have the mean, the range and the quantiles of the table.
fn check(name: &str, side: &str, mut drawn: Vec<f64>, table: &RawQuantiles) {
    let found = mean(&drawn);
    let off = found / table.mean - 1.0;
    assert!(off.abs() < 0.05, "{name} {side}: mean {found}, {off:+.3}");
    drawn.sort_by(f64::total_cmp);
    let bounds = (table.quantiles[0], table.quantiles[100]);
    assert!(drawn[0] >= f64::from(bounds.0.max(1)) && drawn[DRAWS - 1] <= f64::from(bounds.1));
    for percent in [25, 50, 80, 95] {
        // The share of draws at or below a quantile is its percentage, or more where many are equal to it.
        let quantile = f64::from(table.quantiles[percent]);
        let below = drawn.partition_point(|v| *v < quantile) as f64 / DRAWS as f64;
        let up_to = drawn.partition_point(|v| *v <= quantile) as f64 / DRAWS as f64;
        let share = percent as f64 / 100.0;
        assert!(
            below < share + 0.01 && up_to > share - 0.01,
            "{name} {side}: {below} to {up_to} at {percent} %"
        );
    }
}

#[test]
fn draws_from_every_table_have_its_mean_its_quantiles_and_its_correlation() {
    for (name, pair) in pairs().expect("sound") {
        let drawn = draws(&name);
        let found = spearman(&drawn);
        assert!(
            (found - pair.spearman).abs() < 0.03,
            "{name}: Spearman {found} instead of {}",
            pair.spearman
        );
        let (prompts, outputs) = drawn.into_iter().unzip();
        check(&name, "prompt", prompts, &pair.prompt);
        check(&name, "output", outputs, &pair.output);
    }
}

/// 20,000 draws of a heavy tail scatter by some percent; the distribution itself is closer.
#[test]
fn the_mean_of_every_table_is_met_within_one_percent() {
    for (name, pair) in pairs().expect("sound") {
        for raw in [pair.prompt, pair.output] {
            let expected = raw.mean;
            let quantiles = Quantiles::try_from(raw).expect("sound");
            let shares = 1_000_000;
            let sum: f64 = (0..shares)
                .map(|i| quantiles.at((f64::from(i) + 0.5) / f64::from(shares)))
                .map(|tokens| f64::from(tokens.0))
                .sum();
            let off = sum / f64::from(shares) / expected - 1.0;
            assert!(off.abs() < 0.01, "{name}: {off:+.4}");
        }
    }
}

#[test]
fn the_classes_of_llumnix_have_the_rows_of_its_table_1() {
    for (name, [p50, p80, p95, p99]) in [
        ("S-S", [38, 113, 413, 1464]),
        ("M-M", [32, 173, 1288, 4208]),
        ("L-L", [55, 582, 3113, 5166]),
    ] {
        let lengths: Lengths = name.parse().expect("shipped");
        let Kind::Table(table) = lengths.kind else {
            panic!("{name} is a table");
        };
        for side in [&table.prompt, &table.output] {
            let row = [0.50, 0.80, 0.95, 0.99].map(|share| side.at(share).0);
            assert_eq!(row, [p50, p80, p95, p99], "{name}");
        }
    }
}

#[test]
fn the_shipped_tables_stay_small_and_name_their_sources() {
    assert!(SHIPPED.len() <= 40 * 1024);
    let names = Lengths::shipped().expect("sound");
    for needed in
        "llumnix-sharegpt llumnix-burstgpt sharegpt sharegpt-vllm burstgpt azure-conv azure-code \
                   mooncake-conversation S-S M-M L-L S-L L-S"
            .split_whitespace()
    {
        assert!(names.iter().any(|name| name == needed), "{needed}");
    }
    for name in names {
        let lengths: Lengths = name.parse().expect("shipped");
        assert_eq!(lengths.name(), name);
        assert!(lengths.source().is_some_and(|text| text.len() > 20));
    }
}

#[test]
fn fixed_lengths_are_as_written() {
    let lengths: Lengths = "fixed:512:128".parse().expect("fixed");
    let mut rng = StdRng::seed_from_u64(1);
    assert_eq!(lengths.draw(&mut rng), (Tokens(512), Tokens(128)));
    assert_eq!(lengths.source(), None);
    for text in [
        "fixed:",
        "fixed:1",
        "fixed:0:1",
        "fixed:1:0",
        "fixed:1:2:3",
        "fixed:-1:2",
    ] {
        let error = text.parse::<Lengths>().expect_err(text).to_string();
        assert!(error.contains("fixed:PROMPT:OUTPUT"), "{error}");
    }
}

#[test]
fn an_unknown_name_is_answered_with_the_nearest_and_the_list() {
    let error = |text: &str| text.parse::<Lengths>().expect_err(text).to_string();
    for (text, meant) in [
        ("sharegtp", "sharegpt"),
        ("azure_conv", "azure-conv"),
        ("s-s", "S-S"),
    ] {
        let message = error(text);
        assert!(
            message.contains(&format!("did you mean `{meant}`?")),
            "{message}"
        );
        assert!(message.contains("mooncake-conversation"), "{message}");
    }
    assert!(!error("zzz").contains("did you mean"));
}

#[test]
fn damaged_tables_are_refused() {
    let damaged = |mean, quantiles: &[u32]| {
        Quantiles::try_from(RawQuantiles {
            mean,
            quantiles: quantiles.to_vec(),
        })
        .is_err()
    };
    assert!(damaged(5.0, &[]));
    assert!(damaged(5.0, &[5]));
    assert!(damaged(5.0, &[1, 9, 8]));
    assert!(damaged(10.0, &[1, 9]));
    assert!(damaged(f64::NAN, &[1, 9]));
    assert!(!damaged(5.0, &[1, 9]));
}

proptest! {
    #[test]
    fn a_larger_share_is_never_shorter_and_the_ends_are_the_tables(
        mut points in prop::collection::vec(1..100_000u32, 2..50), part in 0.0..=1.0f64,
        mut shares in prop::collection::vec(0.0..=1.0f64, 2..20),
    ) {
        points.sort_unstable();
        let (first, last) = (points[0], points[points.len() - 1]);
        let mean = f64::from(first) + part * f64::from(last - first);
        let quantiles = Quantiles::try_from(RawQuantiles { mean, quantiles: points }).expect("sound");
        shares.sort_by(f64::total_cmp);
        let lengths: Vec<Tokens> = shares.iter().map(|share| quantiles.at(*share)).collect();
        prop_assert!(lengths.is_sorted());
        prop_assert_eq!(quantiles.at(0.0), Tokens(first));
        prop_assert_eq!(quantiles.at(1.0), Tokens(last));
    }
}
