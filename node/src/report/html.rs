//! All cases in one HTML file: the table, distributions and state over time. It holds all it needs: no
//! script, no font, nothing from a network.

mod chart;

use std::io::{self, Write};
use std::time::Duration;

use self::chart::{Axis, Chart, Line, MAX_LINES, MAX_POINTS};
use super::summary::Values;
use super::table::{cells, remarks};
use super::{FleetSample, NodeSeries, Record, Run, Series, len, plain, real};

const STYLE: &str = include_str!("html/style.css");

/// Forbids the page to load or run anything, whatever a label holds.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// A figure of one record, if it has it.
type OfRecord = fn(&Record) -> Option<f64>;

/// A figure of all nodes at one moment.
type OfFleet = fn(&FleetSample) -> f64;

/// Writes the page. Give it a buffered writer. Charts show the first 32 cases; the table shows all.
///
/// # Errors
/// Those of the writer.
pub fn write(out: &mut impl Write, title: &str, runs: &[Run<'_>]) -> io::Result<()> {
    let title = escape(title);
    writeln!(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>")?;
    writeln!(out, "<meta charset=\"utf-8\"/>")?;
    writeln!(
        out,
        "<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\"/>"
    )?;
    writeln!(
        out,
        "<meta name=\"viewport\" content=\"width=device-width\"/>"
    )?;
    writeln!(out, "<title>{title}</title>\n<style>\n{STYLE}</style>")?;
    writeln!(out, "</head>\n<body>\n<h1>{title}</h1>")?;
    table(out, runs)?;
    distributions(out, runs)?;
    fleets(out, runs)?;
    for run in runs.iter().take(MAX_LINES) {
        if let Some(series) = run.series {
            nodes(out, &run.label, series)?;
        }
    }
    writeln!(out, "</body>\n</html>")?;
    out.flush()
}

fn table(out: &mut impl Write, runs: &[Run<'_>]) -> io::Result<()> {
    writeln!(out, "<div class=\"wide\">\n<table>")?;
    for (number, row) in cells(runs).iter().enumerate() {
        write!(out, "<tr>")?;
        for (column, cell) in row.iter().enumerate() {
            let cell = escape(cell);
            match (number, column) {
                (0, _) => write!(out, "<th scope=\"col\">{cell}</th>")?,
                (_, 0) => write!(out, "<th scope=\"row\">{cell}</th>")?,
                _ => write!(out, "<td>{cell}</td>")?,
            }
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</table>\n</div>")?;
    for remark in remarks(runs) {
        writeln!(out, "<p class=\"remark\">{}</p>", escape(&remark))?;
    }
    if runs.len() > MAX_LINES {
        let left = runs.len() - MAX_LINES;
        writeln!(
            out,
            "<p class=\"remark\">The charts leave out the last {left} cases.</p>"
        )?;
    }
    Ok(())
}

fn distributions(out: &mut impl Write, runs: &[Run<'_>]) -> io::Result<()> {
    let figures: [(&str, OfRecord); 3] = [
        ("Time to first token (TTFT)", |record| {
            Some(record.first?.as_secs_f64())
        }),
        ("Time between tokens (TBT)", Record::tbt),
        ("End to end (E2E)", |record| Some(record.end?.as_secs_f64())),
    ];
    let mut charts = Vec::new();
    for (title, figure) in figures {
        let mut lines = Vec::new();
        let mut range: Option<(f64, f64)> = None;
        for run in runs.iter().take(MAX_LINES) {
            let finished = run.records.iter().filter(|record| record.finished());
            let values = Values::of(finished.filter_map(figure));
            let (low, high) = range.unwrap_or((f64::INFINITY, 0.0));
            if let (Some(first), Some(last)) = (values.sorted().first(), values.sorted().last()) {
                range = Some((first.min(low), last.max(high)));
            }
            lines.push(Line {
                label: run.label.clone(),
                points: distribution(values.sorted()),
            });
        }
        let Some((low, high)) = range else { continue };
        charts.push(Chart {
            title: title.to_owned(),
            x: Axis::log("seconds, logarithmic", low, high),
            y: Axis::linear("% of finished requests", 100.0),
            lines,
        });
    }
    section(out, "Distributions", &charts)
}

/// The cumulative distribution in percent, in at most [`MAX_POINTS`] points. First and last value are kept.
fn distribution(sorted: &[f64]) -> Vec<(f64, f64)> {
    let Some((first, last)) = sorted.first().zip(sorted.len().checked_sub(1)) else {
        return Vec::new();
    };
    let steps = last.min(MAX_POINTS - 2);
    let at = |step: usize| {
        let rank = (last * step).checked_div(steps).unwrap_or(0);
        let share = 100.0 * real(rank as u64 + 1) / len(sorted);
        sorted.get(rank).map(|value| (*value, share))
    };
    std::iter::once((*first, 0.0))
        .chain((0..=steps).filter_map(at))
        .collect()
}

fn fleets(out: &mut impl Write, runs: &[Run<'_>]) -> io::Result<()> {
    let figures: [(&str, &str, OfFleet); 4] = [
        ("KV in use, mean of all nodes", "% of blocks", |fleet| {
            percent(fleet.used_mean)
        }),
        ("KV in use, fullest node", "% of blocks", |fleet| {
            percent(fleet.used_max)
        }),
        ("Waiting, all nodes", "requests", |fleet| {
            f64::from(fleet.queued)
        }),
        ("Lost to fragmentation", "free KV blocks", |fleet| {
            real(fleet.stuck_blocks)
        }),
    ];
    let charts: Vec<Chart> = figures
        .into_iter()
        .filter_map(|(title, unit, figure)| {
            let lines = runs.iter().take(MAX_LINES).filter_map(|run| {
                let series = run.series?;
                let values = series.fleet.iter().map(figure);
                Some(line(run.label.clone(), series.every, values))
            });
            over_time(title, unit, lines.collect())
        })
        .collect();
    section(out, "The mesh over time", &charts)
}

fn nodes(out: &mut impl Write, label: &str, series: &Series) -> io::Result<()> {
    let lines = |values: fn(&NodeSeries) -> Vec<f64>| {
        let line = |node: &NodeSeries| {
            let label = format!("node {}", node.node);
            line(label, series.every, values(node).into_iter())
        };
        series.nodes.iter().take(MAX_LINES).map(line).collect()
    };
    let used = lines(|node| node.used.iter().copied().map(percent).collect());
    let queued = lines(|node| node.queued.iter().copied().map(f64::from).collect());
    let charts: Vec<Chart> = [
        over_time("KV in use by node", "% of blocks", used),
        over_time("Waiting by node", "requests", queued),
    ]
    .into_iter()
    .flatten()
    .collect();
    section(out, &format!("Nodes over time: {label}"), &charts)
}

fn percent(share: f32) -> f64 {
    100.0 * f64::from(share)
}

/// A line over time in at most [`MAX_POINTS`] points: the largest value of each stretch, so that a peak shows.
fn line(label: String, every: Duration, values: impl Iterator<Item = f64>) -> Line {
    let values: Vec<f64> = values.collect();
    let stretch = values.len().div_ceil(MAX_POINTS).max(1);
    let point = |(number, part): (usize, &[f64])| {
        let at = real(number as u64) * real(stretch as u64) * every.as_secs_f64();
        (at, part.iter().copied().fold(0.0, f64::max))
    };
    let points = values.chunks(stretch).enumerate().map(point).collect();
    Line { label, points }
}

/// `None` if there is nothing to draw.
fn over_time(title: &str, unit: &'static str, lines: Vec<Line>) -> Option<Chart> {
    let points = || lines.iter().flat_map(|line| &line.points);
    points().next()?;
    let end = points().map(|(at, _)| *at).fold(0.0, f64::max);
    let top = match unit.starts_with('%') {
        true => 100.0,
        false => points().map(|(_, value)| *value).fold(0.0, f64::max),
    };
    Some(Chart {
        title: title.to_owned(),
        x: Axis::linear("seconds since the start", end),
        y: Axis::linear(unit, top),
        lines,
    })
}

fn section(out: &mut impl Write, title: &str, charts: &[Chart]) -> io::Result<()> {
    if charts.is_empty() {
        return Ok(());
    }
    let title = escape(title);
    writeln!(out, "<h2>{title}</h2>\n<div class=\"charts\">")?;
    for chart in charts {
        chart.write(out)?;
    }
    writeln!(out, "</div>")
}

/// A text as it may stand between tags and in a quoted attribute.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in plain(text).chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests;
