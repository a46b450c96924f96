//! Many runs on all processors.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Case, SuiteError};
use crate::report::Summary;
use crate::simulate::{Plan, Run, Scheduling};
use crate::workload::Workload;

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
    let mut plan = Plan {
        scheduling: job.scheduling,
        seed: job.seed,
        ..template.clone()
    };
    job.case.setting.apply(&mut plan);
    let arrivals = Workload::new(&job.case.workload, job.seed)?;
    let mut told = 0;
    let run = crate::simulate::run(&plan, arrivals, |over| {
        watch(over - told);
        told = over;
    })?;
    watch(run.records.len() - told);
    let summary = Summary {
        herd_ratio: run.herding.map(|herding| herding.ratio),
        ..Summary::of(&run.records, run.span)
    };
    Ok(Done {
        summary,
        run: keep.then_some(run),
    })
}
