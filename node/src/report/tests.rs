use proptest::prelude::*;
use serde_json::{Value, json};

use super::summary::Values;
use super::*;

const SECOND: Duration = Duration::from_secs(1);

pub(super) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A finished request of 11 output tokens, a tenth of whose decode time is its TBT.
pub(super) fn finished(first_ms: u64, end_ms: u64) -> Record {
    Record {
        at: ms(500),
        prompt: Tokens(100),
        output: Tokens(11),
        outcome: Outcome::Finished,
        first: Some(ms(first_ms)),
        end: Some(ms(end_ms)),
        longest_gap: ms(70),
        entry: 0,
        host: Some(1),
        moves: 1,
        preemptions: 2,
        preemption_loss: ms(200),
    }
}

pub(super) fn failed(kind: &str) -> Record {
    Record {
        output: Tokens(0),
        outcome: Outcome::Failed(kind.to_owned()),
        first: None,
        host: None,
        moves: 0,
        preemptions: 0,
        preemption_loss: Duration::ZERO,
        ..finished(0, 5)
    }
}

fn near(value: Option<f64>, expected: f64) {
    let value = value.expect("a value");
    assert!((value - expected).abs() < 1e-9, "{value}, not {expected}");
}

#[test]
fn percentiles_interpolate_between_ranks_as_numpy_does() {
    // numpy.percentile([1, 2, 3, 4], [0, 50, 95, 99, 100])
    let values = Values::of([3.0, 1.0, 4.0, 2.0].into_iter());
    for (percent, expected) in [(0, 1.0), (50, 2.5), (95, 3.85), (99, 3.97), (100, 4.0)] {
        near(values.percentile(percent), expected);
    }
    let one = Values::of([7.0].into_iter());
    near(one.percentile(99), 7.0);
    assert_eq!(Values::of(std::iter::empty()).percentile(50), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn percentiles_grow_and_stay_within_the_values(
        values in prop::collection::vec(0.0f64..1e6, 1..200),
    ) {
        let sorted = Values::of(values.into_iter());
        let all: Vec<f64> = (0..=100).filter_map(|p| sorted.percentile(p)).collect();
        prop_assert_eq!(all.len(), 101);
        prop_assert!(all.windows(2).all(|pair| pair[0] <= pair[1]));
        prop_assert_eq!(all.first(), sorted.sorted().first());
        prop_assert_eq!(all.last(), sorted.sorted().last());
    }

    #[test]
    fn a_series_of_any_length_is_bounded_and_evenly_spaced(samples in 1u32..9_000) {
        let series = counted(samples, 2);
        prop_assert!(series.fleet.len() < MAX_SAMPLES);
        let step = u32::try_from(series.every.as_millis()).unwrap();
        for (number, sample) in (0u32..).zip(&series.fleet) {
            prop_assert_eq!(sample.queued, number * step);
        }
        prop_assert!(series.nodes.iter().all(|node| node.queued.len() == series.fleet.len()));
    }
}

/// A series sampled each millisecond that is due before `end_ms`; every sample holds its own time.
fn counted(end_ms: u32, nodes: u32) -> Series {
    let mut series = Series::new(ms(1), nodes);
    while series.due() < ms(u64::from(end_ms)) {
        let queued = u32::try_from(series.due().as_millis()).unwrap();
        let fleet = FleetSample {
            queued,
            ..FleetSample::default()
        };
        series.push(fleet, |_| (0.5, queued));
    }
    series
}

#[test]
fn a_full_series_drops_every_other_sample_and_doubles_its_distance() {
    let series = counted(1_999, 40);
    assert_eq!((series.every, series.fleet.len()), (ms(1), 1_999));
    assert_eq!(series.nodes.len(), MAX_SHOWN);
    let series = counted(2_000, 40);
    assert_eq!((series.every, series.fleet.len()), (ms(2), 1_000));
    assert_eq!(series.nodes[31].queued[..3], [0, 2, 4]);
    assert_eq!(series.due(), ms(2_000));
}

#[test]
fn only_heads_that_would_fit_elsewhere_make_free_blocks_stuck() {
    // Nobody waits; the head fits its own node.
    assert_eq!(stuck_blocks([(10, None), (3, Some(3))]), 0);
    // 8 are needed at a node with 5; all nodes together have 15.
    assert_eq!(stuck_blocks([(10, None), (5, Some(8))]), 8);
    // Not even all free blocks together would do: that is not fragmentation.
    assert_eq!(stuck_blocks([(10, None), (5, Some(16))]), 0);
    // The smaller head first; the larger does not fit beside it.
    assert_eq!(stuck_blocks([(6, Some(12)), (5, Some(8)), (4, None)]), 8);
}

#[test]
fn a_summary_counts_all_and_measures_finished_requests_only() {
    let records = [
        finished(100, 1_100),
        finished(300, 2_300),
        failed("http 429"),
        failed("http 429"),
        failed("timeout"),
    ];
    let summary = Summary::of(&records, ms(4_000));
    assert_eq!(
        (summary.requests, summary.finished, summary.failed),
        (5, 2, 3)
    );
    assert_eq!(summary.errors["http 429"], 2);
    near(summary.ttft_mean, 0.2);
    near(summary.ttft_p50, 0.2);
    near(summary.ttft_p99, 0.298);
    near(summary.tbt_mean, 0.15);
    near(summary.tbt_p95, 0.195);
    near(summary.gap_p99, 0.07);
    near(summary.e2e_p50, 1.7);
    near(summary.requests_per_s, 0.5);
    near(summary.output_tokens_per_s, 5.5);
    near(summary.preemption_loss, 0.2);
    assert_eq!((summary.preemptions, summary.moves), (Some(4), Some(2)));
    let outside = summary.seen_from_outside();
    assert_eq!((outside.preemptions, outside.moves), (None, None));
    assert_eq!(outside.preemption_loss, None);
}

#[test]
fn what_was_not_measured_is_null_and_never_zero() {
    let short = Record {
        output: Tokens(1),
        ..finished(100, 100)
    };
    let summary = Summary::of(&[short], SECOND);
    assert_eq!((summary.tbt_mean, summary.gap_p99), (None, None));
    near(summary.e2e_p99, 0.1);
    let summary = serde_json::to_value(Summary::of(&[failed("lost")], Duration::ZERO)).unwrap();
    for figure in [
        "ttft_p99",
        "tbt_mean",
        "e2e_mean",
        "preemption_loss",
        "requests_per_s",
    ] {
        assert_eq!(summary[figure], Value::Null, "{figure}");
    }
}

#[test]
fn kinds_of_error_are_bounded_in_number_and_length() {
    let records: Vec<Record> = (0..100)
        .map(|kind| failed(&format!("{kind:03} {}", "é".repeat(100))))
        .collect();
    let errors = Summary::of(&records, SECOND).errors;
    assert_eq!(errors.len(), 32);
    assert_eq!(errors["other"], 69);
    assert_eq!(errors.values().sum::<u64>(), 100);
    assert!(errors.keys().all(|kind| kind.len() <= 64));
}

#[test]
fn a_spread_is_a_student_interval() {
    // Worked by hand: s = 1.5811, t(4) = 2.776, half = 2.776 × 1.5811 / √5.
    let spread = Spread::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
    assert_eq!((spread.seeds, spread.mean), (5, 3.0));
    near(spread.half, 2.776 * 0.5f64.sqrt());
    near(Spread::of(&[10.0, 12.0]).unwrap().half, 12.706);
    assert_eq!(Spread::of(&[4.0]).unwrap().half, None);
    assert_eq!(Spread::of(&[]), None);
    // 31 seeds and more use the last quantile of the table.
    let many: Vec<f64> = (0..50u32).map(|n| f64::from(n % 2)).collect();
    let deviation = (50.0 * 0.25 / 49.0f64).sqrt();
    near(
        Spread::of(&many).unwrap().half,
        2.045 * deviation / 50f64.sqrt(),
    );
}

#[test]
fn a_spread_is_over_the_seeds_that_measured_the_figure() {
    let figure = FIGURES.iter().find(|one| one.name == "TTFT mean").unwrap();
    let seen = Summary::of(&[finished(100, 200)], SECOND);
    let unseen = Summary::of(&[], SECOND);
    let spread = Spread::over(&[seen.clone(), unseen.clone(), seen], figure).unwrap();
    assert_eq!((spread.seeds, spread.half), (2, Some(0.0)));
    assert_eq!(Spread::over(&[unseen], figure), None);
}

#[test]
fn csv_quotes_what_must_be_and_leaves_the_unknown_empty() {
    let mut out = Vec::new();
    csv::write(
        &mut out,
        &[finished(100, 1_100), failed("said \"no\", twice")],
    )
    .unwrap();
    let text = String::from_utf8(out).unwrap();
    let expected = "\
        arrival_s,prompt_tokens,output_tokens,outcome,ttft_s,tbt_s,e2e_s,longest_gap_s,\
        entry,host,moves,preemptions,preemption_loss_s\r\n\
        0.500000,100,11,finished,0.100000,0.100000,1.100000,0.070000,0,1,1,2,0.200000\r\n\
        0.500000,100,0,\"said \"\"no\"\", twice\",,,0.005000,0.070000,0,,0,0,0.000000\r\n";
    assert_eq!(text, expected);
}

fn run<'a>(label: &str, summaries: &'a [Summary]) -> Run<'a> {
    Run {
        label: label.to_owned(),
        records: &[],
        summaries,
        series: None,
    }
}

#[test]
fn a_table_is_aligned_and_shows_units_and_spreads() {
    let seeds = [
        Summary::of(&[finished(100, 1_100)], SECOND),
        Summary::of(&[finished(104, 1_104), failed("lost")], SECOND),
    ];
    let blind = [Summary::of(&[finished(20, 620)], SECOND).seen_from_outside()];
    let text = table::render(&[run("p2c", &seeds), run("a\u{1b}[2J", &blind)]);
    let lines: Vec<&str> = text.lines().collect();
    let figures = &lines[..=FIGURES.len()];
    let width = figures[0].chars().count();
    assert!(
        figures.iter().all(|line| line.chars().count() == width),
        "{text}"
    );
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(figures[0]), "FIGURE p2c a?[2J");
    assert_eq!(words(figures[3]), "failed 0.5 ± 6.4 0.0");
    assert_eq!(words(figures[4]), "TTFT mean (s) 0.1020 ± 0.0254 0.0200");
    assert_eq!(words(figures[17]), "preemptions 2 ± 0 -");
    assert_eq!(words(figures[20]), "herd ratio - -");
    assert_eq!(words(figures[21]), "requests (1/s) 1.00 ± 0.00 1.00");
    assert!(lines[FIGURES.len() + 1].starts_with("Mean over 1 to 2 seeds"));
    assert_eq!(lines.last(), Some(&"p2c: 1 failed with lost"));
}

#[test]
fn an_empty_table_has_its_figures() {
    let text = table::render(&[]);
    assert_eq!(text.lines().count(), FIGURES.len() + 1);
    let none = table::render(&[run("none", &[])]);
    assert!(
        none.lines().skip(1).all(|line| line.ends_with("   -")),
        "{none}"
    );
}

#[test]
fn json_holds_labels_figures_and_series() {
    let seeds = [Summary::of(&[finished(100, 1_100)], SECOND)];
    let series = counted(2, 1);
    let run = Run {
        series: Some(&series),
        ..run("p2c", &seeds)
    };
    let mut out = Vec::new();
    write_json(&mut out, "policies", &[run]).unwrap();
    let report: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(report["title"], "policies");
    assert_eq!(report["runs"][0]["summaries"][0]["ttft_p50"], json!(0.1));
    assert_eq!(report["runs"][0]["series"]["every_s"], json!(0.001));
    let node = json!({"node": 0, "used": [0.5, 0.5], "queued": [0, 1]});
    assert_eq!(report["runs"][0]["series"]["nodes"], json!([node]));
}

#[test]
fn an_even_mesh_has_herd_ratio_one_and_a_herd_has_n() {
    let mut even = HerdMeter::default();
    even.sample(&[3, 3, 3, 3]);
    even.sample(&[0, 0, 0, 0]);
    let even = even.finish().unwrap();
    assert_eq!(
        (even.ratio, even.ratio_p95, even.variation),
        (1.0, 1.0, 0.0)
    );
    let mut herd = HerdMeter::default();
    herd.sample(&[8, 0, 0, 0]);
    let herd = herd.finish().unwrap();
    assert_eq!(herd.ratio, 4.0);
    near(Some(herd.variation), 3f64.sqrt());
    assert_eq!(HerdMeter::default().finish(), None);
}

#[test]
fn progress_is_quiet_at_first_and_then_at_most_twice_a_second() {
    let mut progress = Progress::new(ms(500));
    assert_eq!(progress.line(ms(1_999), 10, 100), None);
    let line = progress.line(ms(2_000), 10, 100).unwrap();
    assert_eq!(line, " 10 %  10 of 100  5.0/s  about 18 s left");
    assert_eq!(progress.line(ms(2_499), 12, 100), None);
    assert!(progress.line(ms(2_500), 12, 100).is_some());
    let line = Progress::new(ms(500)).line(ms(3_000), 0, 100).unwrap();
    assert_eq!(line, "  0 %  0 of 100  0.0/s  time left unknown");
    assert_eq!(progress.line(ms(9_000), 0, 0), None);
}
