//! The figures of several cases side by side, for a terminal.

use std::collections::BTreeMap;

use super::{FIGURES, Figure, Run, Spread, Unit, plain};

/// Shown for what was not measured.
const UNKNOWN: &str = "-";

/// Digits that are shown of the smallest number in a row.
const DIGITS: i32 = 3;

/// Most digits behind the point: microseconds.
const MAX_DECIMALS: usize = 6;

/// The table: a column a case, a row a figure, `mean ± half` where a case has several seeds. Lines below
/// say what `±` is, and what failed.
pub fn render(runs: &[Run<'_>]) -> String {
    let cells = cells(runs);
    let widths: Vec<usize> = (0..=runs.len())
        .map(|column| {
            let cell = |row: &Vec<String>| row.get(column).map_or(0, |cell| cell.chars().count());
            cells.iter().map(cell).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in &cells {
        text.push_str(&line(row, &widths));
    }
    for remark in remarks(runs) {
        text.push_str(&format!("{remark}\n"));
    }
    text
}

fn line(cells: &[String], widths: &[usize]) -> String {
    let padded: Vec<String> = cells
        .iter()
        .zip(widths)
        .enumerate()
        .map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        })
        .collect();
    format!("{}\n", padded.join("  ").trim_end())
}

/// The cells row by row; the first row holds the labels, the first column the figures with their units.
pub(super) fn cells(runs: &[Run<'_>]) -> Vec<Vec<String>> {
    let labels = runs.iter().map(|run| plain(&run.label));
    let head = std::iter::once("FIGURE".to_owned()).chain(labels).collect();
    std::iter::once(head)
        .chain(FIGURES.iter().map(|figure| row(figure, runs)))
        .collect()
}

/// What belongs below a table: what `±` means, and the errors of each case.
pub(super) fn remarks(runs: &[Run<'_>]) -> Vec<String> {
    let errors = runs.iter().flat_map(|run| {
        let remark = |(kind, count)| format!("{}: {count} failed with {kind}", run.label);
        errors(run).into_iter().map(remark)
    });
    let remarks = spread_note(runs).into_iter().chain(errors);
    remarks.map(|remark| plain(&remark)).collect()
}

fn spread_note(runs: &[Run<'_>]) -> Option<String> {
    let seeds = runs.iter().map(|run| run.summaries.len());
    let (least, most) = (seeds.clone().min()?, seeds.max()?);
    let seeds = match least == most {
        true => format!("{most}"),
        false => format!("{least} to {most}"),
    };
    (most > 1).then(|| {
        format!(
            "Mean over {seeds} seeds, as far as they measured it, ± half the 95 % confidence interval (Student's t)."
        )
    })
}

/// Errors of a case by kind, over all its seeds.
fn errors<'a>(run: &Run<'a>) -> BTreeMap<&'a str, u64> {
    let mut errors = BTreeMap::new();
    for (kind, count) in run.summaries.iter().flat_map(|summary| &summary.errors) {
        *errors.entry(kind.as_str()).or_insert(0) += count;
    }
    errors
}

fn row(figure: &Figure, runs: &[Run<'_>]) -> Vec<String> {
    let spreads: Vec<Option<Spread>> = runs
        .iter()
        .map(|run| Spread::over(run.summaries, figure))
        .collect();
    let numbers = spreads
        .iter()
        .flatten()
        .flat_map(|spread| [Some(spread.mean), spread.half])
        .flatten();
    let decimals = match figure.unit {
        Unit::Count if numbers.clone().all(|number| number.fract() == 0.0) => 0,
        Unit::Count => 1,
        Unit::Seconds | Unit::PerSecond => {
            decimals(spreads.iter().flatten().map(|spread| spread.mean))
        }
    };
    let cell = |spread: &Option<Spread>| match spread {
        None => UNKNOWN.to_owned(),
        Some(Spread { mean, half, .. }) => match half {
            None => format!("{mean:.decimals$}"),
            Some(half) => format!("{mean:.decimals$} ± {half:.decimals$}"),
        },
    };
    std::iter::once(format!("{}{}", figure.name, figure.unit.suffix()))
        .chain(spreads.iter().map(cell))
        .collect()
}

/// Places behind the point that show [`DIGITS`] digits of the smallest number above zero.
fn decimals(numbers: impl Iterator<Item = f64>) -> usize {
    let smallest = numbers
        .filter(|number| *number > 0.0)
        .min_by(f64::total_cmp)
        .unwrap_or(1.0);
    let above = |places: &usize| {
        let places = i32::try_from(*places).unwrap_or(0);
        smallest * 10f64.powi(places) >= 10f64.powi(DIGITS - 1)
    };
    (0..MAX_DECIMALS).find(above).unwrap_or(MAX_DECIMALS)
}
