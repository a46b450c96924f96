//! Sets of runs that are asked for by name, and how many runs share the processors.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::report::Summary;
use crate::simulate::{Plan, Run, Scheduling, SimulateError};
use crate::workload::{Workload, WorkloadError, WorkloadSpec};

/// One workload that several ways of scheduling are given.
#[derive(Clone, Debug)]
pub struct Case {
    /// For tables and JSON.
    pub name: String,
    /// What arrives.
    pub workload: WorkloadSpec,
}

/// Workloads of the paper's main experiment with the rates (requests a second, for 16 instances) that its artifact ran:
/// the lowest, the middle and the highest of each (`fig11`, AlibabaPAI/llumnix OSDI'24 artifact).
const PAPER: [(&str, &str, [f64; 3]); 7] = [
    ("ShareGPT", "llumnix-sharegpt", [7.0, 7.5, 8.0]),
    ("BurstGPT", "llumnix-burstgpt", [7.5, 8.0, 8.5]),
    ("S-S", "S-S", [32.0, 35.0, 38.0]),
    ("M-M", "M-M", [7.4, 7.7, 8.0]),
    ("L-L", "L-L", [2.6, 2.9, 3.2]),
    ("S-L", "S-L", [4.1, 4.25, 4.4]),
    ("L-S", "L-S", [10.0, 16.0, 22.0]),
];

/// The cases of the paper's main experiment.
///
/// # Errors
/// A name of lengths that is not shipped.
pub fn paper(requests: u64) -> Result<Vec<Case>, WorkloadError> {
    let mut cases = Vec::new();
    for (name, lengths, rates) in PAPER {
        for rate in rates {
            cases.push(Case {
                name: format!("{name} {rate}/s"),
                workload: WorkloadSpec {
                    lengths: Some(lengths.parse()?),
                    rate: Some(rate),
                    requests: Some(requests),
                    ..WorkloadSpec::default()
                },
            });
        }
    }
    Ok(cases)
}

/// Why a set of runs came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// A plan that cannot be.
    #[error(transparent)]
    Plan(#[from] SimulateError),
    /// A workload that cannot be.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
}

/// One run of a set.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// Of which case.
    pub case: &'a Case,
    /// How it schedules.
    pub scheduling: Scheduling,
    /// Its seed: of the workload and of the mesh alike.
    pub seed: u64,
}

/// What came of a run.
#[derive(Debug)]
pub struct Done {
    /// Its figures.
    pub summary: Summary,
    /// Everything, when it was to be kept.
    pub run: Option<Run>,
}

/// Runs all jobs, as many at a time as there are processors, and returns what came of each in their order. `keep` says
/// whether a job's records are wanted; `watch` is told how many requests are over in all.
///
/// # Errors
/// The first plan or workload that cannot be.
pub fn run_all(
    template: &Plan,
    jobs: &[Job<'_>],
    keep: impl Fn(&Job<'_>) -> bool + Sync,
    watch: impl Fn(usize) + Sync,
) -> Result<Vec<Done>, SuiteError> {
    let next = AtomicUsize::new(0);
    let over = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Done, SuiteError>>>> =
        Mutex::new(jobs.iter().map(|_| None).collect());
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(at) else {
                return;
            };
            let done = run_one(template, job, keep(job), |more| {
                watch(over.fetch_add(more, Ordering::Relaxed) + more);
            });
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(place) = results.get_mut(at) {
                *place = Some(done);
            }
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 1..processors.min(jobs.len()) {
            scope.spawn(work);
        }
        work();
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().flatten().collect()
}

fn run_one(
    template: &Plan,
    job: &Job<'_>,
    keep: bool,
    mut watch: impl FnMut(usize),
) -> Result<Done, SuiteError> {
    let plan = Plan {
        scheduling: job.scheduling,
        seed: job.seed,
        ..template.clone()
    };
    let arrivals = Workload::new(&job.case.workload, job.seed)?;
    let mut told = 0;
    let run = super::run(&plan, arrivals, |over| {
        watch(over - told);
        told = over;
    })?;
    watch(run.records.len() - told);
    let summary = Summary::of(&run.records, run.span);
    Ok(Done {
        summary,
        run: keep.then_some(run),
    })
}
