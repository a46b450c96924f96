//! What came of simulations: tables, JSON, files.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cli::output::{WriteError, write_file};
use crate::cli::simulate::SimulateArgs;
use crate::report::{self, Spread, Summary};
use crate::simulate::suite::{Case, Done, Group, Job};

/// Summaries of each case and policy, in the order of the jobs.
pub(super) fn grouped<'a>(jobs: &'a [Job<'_>], done: &[Done]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (job, done) in jobs.iter().zip(done) {
        let name = job.case.name.as_str();
        match groups.last_mut() {
            Some((case, scheduling, summaries))
                if *case == name && *scheduling == job.scheduling =>
            {
                summaries.push(done.summary.clone());
            }
            Some(_) | None => groups.push((name, job.scheduling, vec![done.summary.clone()])),
        }
    }
    groups
}

pub(super) fn tables(cases: &[Case], groups: &[Group<'_>]) -> String {
    let mut text = String::new();
    for case in cases {
        let runs: Vec<_> = groups
            .iter()
            .filter(|(name, _, _)| *name == case.name)
            .map(|(_, scheduling, summaries)| report::Run {
                label: scheduling.as_str().to_owned(),
                records: &[],
                summaries,
                series: None,
            })
            .collect();
        if cases.len() > 1 {
            text.push_str(&format!("{}\n", case.name));
        }
        text.push_str(&report::table::render(&runs));
        if cases.len() > 1 {
            text.push('\n');
        }
    }
    text
}

#[derive(Serialize)]
struct JsonReport<'a> {
    cases: Vec<JsonCase<'a>>,
}

#[derive(Serialize)]
struct JsonCase<'a> {
    name: &'a str,
    policies: BTreeMap<&'static str, BTreeMap<String, serde_json::Value>>,
}

/// Every figure is the mean over the seeds, in seconds where it is a time; `…_ci95` is half the width of its 95 %
/// confidence interval when there are several seeds.
pub(super) fn json(groups: &[Group<'_>]) -> String {
    let mut cases: Vec<JsonCase<'_>> = Vec::new();
    for (name, scheduling, summaries) in groups {
        if cases.last().is_none_or(|case| case.name != *name) {
            cases.push(JsonCase {
                name,
                policies: BTreeMap::new(),
            });
        }
        if let Some(case) = cases.last_mut() {
            case.policies
                .insert(scheduling.as_str(), figures(summaries));
        }
    }
    let text = serde_json::to_string_pretty(&JsonReport { cases });
    text.map_or_else(
        |error| format!("{{\"error\": \"{error}\"}}\n"),
        |text| text + "\n",
    )
}

fn figures(summaries: &[Summary]) -> BTreeMap<String, serde_json::Value> {
    let mut figures = BTreeMap::new();
    for figure in &report::FIGURES {
        let values: Vec<f64> = summaries.iter().filter_map(|one| figure.of(one)).collect();
        let spread = Spread::of(&values);
        let key = figure.key;
        figures.insert(
            key.to_owned(),
            spread.as_ref().map(|spread| spread.mean).into(),
        );
        if let Some(half) = spread.and_then(|spread| spread.half) {
            figures.insert(format!("{key}_ci95"), half.into());
        }
    }
    figures
}

pub(super) fn write_files(
    args: &SimulateArgs,
    jobs: &[Job<'_>],
    done: &[Done],
) -> Result<(), WriteError> {
    let kept: Vec<_> = jobs
        .iter()
        .zip(done)
        .filter_map(|(job, done)| Some((job, &done.summary, done.run.as_ref()?)))
        .collect();
    if let (Some(path), Some((_, _, run))) = (&args.csv, kept.first()) {
        write_file(path, |out| report::csv::write(out, &run.records))?;
    }
    if let Some(path) = &args.html {
        let runs: Vec<_> = kept
            .iter()
            .map(|(job, summary, run)| report::Run {
                label: job.scheduling.as_str().to_owned(),
                records: &run.records,
                summaries: std::slice::from_ref(*summary),
                series: Some(&run.series),
            })
            .collect();
        write_file(path, |out| {
            report::html::write(out, "shoal simulate", &runs)
        })?;
    }
    Ok(())
}
