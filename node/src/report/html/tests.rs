use crate::report::tests::{failed, finished, ms};
use crate::report::{FleetSample, Series, Summary};

use super::*;

/// Tags opened and closed in order, empty elements written as such, and no bare `<` or `&`.
fn assert_well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let body = page.strip_prefix("<!DOCTYPE html>").unwrap();
    for piece in body.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').expect("a tag that ends");
        assert!(!text.contains('>'), "{text}");
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        let name = tag.split([' ', '/']).next().unwrap();
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if tag.ends_with('/') => {}
            None => open.push(name),
        }
    }
    assert_eq!(open, [""; 0]);
    for entity in page.split('&').skip(1) {
        let known = ["amp;", "lt;", "gt;", "quot;", "#39;"];
        assert!(known.iter().any(|end| entity.starts_with(end)), "{entity}");
    }
}

fn page(runs: &[Run<'_>]) -> String {
    let mut out = Vec::new();
    write(&mut out, "Policies <at> \"16\" & more", runs).unwrap();
    String::from_utf8(out).unwrap()
}

fn series(nodes: u32, samples: u32) -> Series {
    let mut series = Series::new(ms(100), nodes);
    for number in 0..samples {
        let fleet = FleetSample {
            used_mean: 0.4,
            used_max: 0.9,
            queued: number % 7,
            stuck_blocks: u64::from(number % 50),
            ..FleetSample::default()
        };
        series.push(fleet, |node| (0.5, (number + node) % 9));
    }
    series
}

#[test]
fn a_page_is_well_formed_and_needs_nothing_else() {
    let records: Vec<Record> = (1..3_000)
        .map(|n| finished(n, n * 12))
        .chain([failed("<script>alert(1)</script>")])
        .collect();
    let summaries = [Summary::of(&records, ms(60_000))];
    let series = series(40, 1_500);
    let labels = ["p2c", "\"><script>", "a & b\u{1b}", "'quoted'"];
    let runs = labels.map(|label| Run {
        label: label.to_owned(),
        records: &records,
        summaries: &summaries,
        series: Some(&series),
    });
    let page = page(&runs);
    assert_well_formed(&page);
    assert!(!page.contains("<script") && !page.contains("http://") && !page.contains("url("));
    assert!(page.contains("<title>Policies &lt;at&gt; &quot;16&quot; &amp; more</title>"));
    assert!(page.contains("&quot;&gt;&lt;script&gt;"));
    // 3 distributions and 4 charts of the mesh with 4 lines each, 2 charts with 32 nodes for each case.
    let paths: Vec<&str> = page.split("<path class=\"line ").skip(1).collect();
    let drawn = paths.iter().filter(|path| path.contains("</title>"));
    assert_eq!(drawn.count(), 7 * 4 + 4 * 2 * 32);
    for path in paths {
        let path = path.split('"').nth(2).unwrap();
        assert!(path.matches('L').count() < MAX_POINTS, "{path}");
        assert!(!path.contains("NaN") && !path.contains("inf"), "{path}");
    }
}

#[test]
fn a_page_without_measurements_has_its_table_only() {
    let records = [failed("lost")];
    let summaries = [Summary::of(&records, ms(1_000))];
    let run = Run {
        label: "p2c".to_owned(),
        records: &records,
        summaries: &summaries,
        series: None,
    };
    let page = page(&[run]);
    assert_well_formed(&page);
    assert!(page.contains("<td>-</td>") && !page.contains("<svg"));
    assert_well_formed(&self::page(&[]));
}

#[test]
fn more_cases_than_lines_stay_in_the_table() {
    let records = [finished(10, 100)];
    let summaries = [Summary::of(&records, ms(1_000))];
    let runs: Vec<Run<'_>> = (0..40)
        .map(|number| Run {
            label: format!("case {number}."),
            records: &records,
            summaries: &summaries,
            series: None,
        })
        .collect();
    let page = page(&runs);
    assert_well_formed(&page);
    assert!(page.contains("The charts leave out the last 8 cases."));
    // In the table, and in three charts: as a line and in the legend.
    assert_eq!(page.matches("case 31.").count(), 7);
    assert_eq!(page.matches("case 32.").count(), 1);
}

#[test]
fn a_distribution_keeps_its_ends_and_is_bounded() {
    let values: Vec<f64> = (1..=10_000u32).map(f64::from).collect();
    let points = distribution(&values);
    assert_eq!(points.len(), MAX_POINTS);
    assert_eq!(points.first(), Some(&(1.0, 0.0)));
    assert_eq!(points.last(), Some(&(10_000.0, 100.0)));
    let rises = |pair: &[(f64, f64)]| pair[0].0 <= pair[1].0 && pair[0].1 < pair[1].1;
    assert!(points.windows(2).all(rises));
    let few = distribution(&[1.0, 3.0]);
    assert_eq!(few, [(1.0, 0.0), (1.0, 50.0), (3.0, 100.0)]);
    assert_eq!(distribution(&[2.0]), [(2.0, 0.0), (2.0, 100.0)]);
    assert_eq!(distribution(&[]), []);
}

#[test]
fn a_line_over_time_keeps_its_peaks() {
    let values = (0..1_999u32).map(|n| if n == 1_234 { 50.0 } else { 1.0 });
    let line = line("node".to_owned(), ms(10), values);
    assert_eq!(line.points.len(), MAX_POINTS);
    let peak = line.points.iter().find(|(_, value)| *value > 1.0).unwrap();
    assert!((peak.0 - 12.3).abs() < 1e-9, "{peak:?}");
}
