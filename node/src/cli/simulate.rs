//! `shoal simulate`: a whole mesh in virtual time.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;
use shoal_gossip::{Clock, MonotonicClock, Timestamp};

use crate::cli::output::{WriteError, fail, print, write_file};
use crate::config::{self, ConfigError};
use crate::engine::sim::{Profile, ProfileError};
use crate::report::{self, Progress, Spread, Summary};
use crate::simulate::suite::{self, Case, Done, Job, SuiteError};
use crate::simulate::{Fault, GossipModel, Network, Plan, Scheduling};
use crate::workload::{Workload, WorkloadArgs, WorkloadError};

/// Requests of each case of a suite, as many as the paper's.
const SUITE_REQUESTS: u64 = 10_000;

/// Flags of `shoal simulate`.
#[derive(Debug, Args)]
pub(super) struct SimulateArgs {
    #[command(flatten)]
    workload: WorkloadArgs,

    /// Nodes in the mesh.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    nodes: u32,

    /// Latency profile of the nodes' engines, by name or as FILE.json#NAME; several take turns.
    #[arg(
        long = "profile",
        value_name = "PROFILE",
        default_value = "a10/llama-7b"
    )]
    profiles: Vec<String>,

    /// How requests are placed and moved; several are compared on the same workload [default: shoal; all for a suite].
    #[arg(long, value_name = "NAME", value_enum, value_delimiter = ',')]
    policies: Vec<Scheduling>,

    /// Nodes that clients ask, each request a random one of them [default: all].
    #[arg(long, value_name = "N")]
    entries: Option<u32>,

    /// Time between two words of a node about its load; 0 shows every node everything as it is.
    ///
    /// Unit: milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 250, value_parser = clap::value_parser!(u64).range(..=60_000))]
    gossip_interval_ms: u64,

    /// Time that every word about a load takes in addition.
    ///
    /// Unit: milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=60_000))]
    view_delay_ms: u64,

    /// Share of words about loads that are lost, from 0 to 0.9.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    loss: f64,

    /// One way between two nodes.
    ///
    /// Unit: microseconds.
    #[arg(long, value_name = "US", default_value_t = 280, value_parser = clap::value_parser!(u64).range(..=10_000_000))]
    latency_us: u64,

    /// KV that a node sends in a second.
    ///
    /// Unit: MB, a million bytes.
    #[arg(long, value_name = "MB", default_value_t = 2_500, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    kv_mb_per_second: u32,

    /// Requests that may wait at one node.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    queue_limit: u32,

    /// Freeness below which `llumnix` moves requests away.
    ///
    /// Unit: KV blocks a request.
    #[arg(long, value_name = "BLOCKS", default_value_t = 10)]
    llumnix_below: u32,

    /// Freeness above which `llumnix` moves requests to a node.
    ///
    /// Unit: KV blocks a request.
    #[arg(long, value_name = "BLOCKS", default_value_t = 30)]
    llumnix_above: u32,

    /// Something that goes wrong at a moment; may be given often.
    ///
    /// SECONDS:kill:NODE · join:NODE (not there before, if it is its first) · drain:NODE · slow:NODE:TIMES · cut:NODES (the first
    /// so many from the others) · heal. Nodes are counted from 0.
    #[arg(long = "fault", value_name = "FAULT")]
    faults: Vec<Fault>,

    /// Seed of everything that chance does. The same seed gives the same run.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Seeds to run, from --seed on; figures are means with 95 % confidence intervals then.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=30))]
    seeds: u32,

    /// A set of cases in place of one workload.
    #[arg(long, value_name = "NAME", value_enum)]
    suite: Option<Suite>,

    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,

    /// Write every request of the first case, policy and seed to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Write a report with charts of the first case and seed to this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Flags of `shoal node`, that every node of the mesh gets, e.g. -- --move-below 20.
    #[arg(last = true, value_name = "NODE FLAGS")]
    node: Vec<String>,
}

/// Sets of cases.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Suite {
    /// The main experiment of Llumnix (OSDI'24): seven workloads at three rates each, 16 nodes, 10,000 requests.
    Paper,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=0.9).contains(&share) => Ok(share),
        Ok(_) | Err(_) => Err("give a number from 0 to 0.9".to_owned()),
    }
}

/// Why nothing was simulated, or not told.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Suite(#[from] SuiteError),
    #[error("the flags of the nodes: {0}")]
    Node(#[from] ConfigError),
    #[error("--entries {entries} of {nodes} nodes: give from 1 to as many as there are")]
    Entries { entries: u32, nodes: u32 },
    #[error("--suite brings its own workloads: leave out the flags of one")]
    SuiteAndWorkload,
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Runs `shoal simulate`.
pub(super) fn run(args: &SimulateArgs) -> ExitCode {
    match simulate(args) {
        Ok(text) => print(&text),
        Err(error) => fail(error),
    }
}

fn simulate(args: &SimulateArgs) -> Result<String, Failure> {
    let plan = plan(args)?;
    let cases = cases(args)?;
    let mut jobs = Vec::new();
    let policies = match (args.policies.as_slice(), args.suite) {
        ([], None) => &[Scheduling::Shoal],
        ([], Some(_)) => &Scheduling::ALL[..],
        (named, _) => named,
    };
    for case in &cases {
        for &scheduling in policies {
            for seed in 0..u64::from(args.seeds) {
                let seed = args.seed.wrapping_add(seed);
                jobs.push(Job {
                    case,
                    scheduling,
                    seed,
                });
            }
        }
    }
    let wanted = args.csv.is_some() || args.html.is_some();
    let first = cases.first().map(|case| case.name.as_str());
    let keep =
        |job: &Job<'_>| wanted && job.seed == args.seed && Some(job.case.name.as_str()) == first;
    let done = suite::run_all(&plan, &jobs, keep, progress(total(&cases, jobs.len())?))?;
    if wanted {
        write_files(args, &jobs, &done)?;
    }
    Ok(match args.json {
        true => json(&jobs, &done),
        false => tables(&cases, &jobs, &done),
    })
}

fn plan(args: &SimulateArgs) -> Result<Plan, Failure> {
    let entries = args.entries.unwrap_or(args.nodes);
    if entries == 0 || entries > args.nodes {
        return Err(Failure::Entries {
            entries,
            nodes: args.nodes,
        });
    }
    let profiles = args.profiles.iter().map(|name| Profile::find(name));
    let profiles = profiles.collect::<Result<Vec<_>, _>>()?;
    let nodes = profiles.iter().cycle().take(args.nodes as usize).cloned();
    // The engine's flags are the profile's; of the rest a simulated node has what a real one has.
    let flags = ["--engine", "sim:a10/llama-7b", "--data-dir", "."].into_iter();
    let node = config::from_flags(flags.chain(args.node.iter().map(String::as_str)))?;
    Ok(Plan {
        nodes: nodes.collect(),
        scheduling: Scheduling::Shoal,
        gossip: GossipModel {
            interval: Duration::from_millis(args.gossip_interval_ms),
            extra: Duration::from_millis(args.view_delay_ms),
            loss: args.loss,
        },
        network: Network {
            latency: Duration::from_micros(args.latency_us),
            bytes_per_second: f64::from(args.kv_mb_per_second) * 1e6,
        },
        entries: entries as usize,
        queue_limit: args.queue_limit,
        context: None,
        llumnix: (args.llumnix_below, args.llumnix_above),
        faults: args.faults.clone(),
        node,
        seed: args.seed,
    })
}

fn cases(args: &SimulateArgs) -> Result<Vec<Case>, Failure> {
    let own = args.workload.spec()?;
    match args.suite {
        None => Ok(vec![Case {
            name: "workload".to_owned(),
            workload: own,
        }]),
        Some(Suite::Paper) => {
            let requests = own.requests.unwrap_or(SUITE_REQUESTS);
            let mut rest = own;
            rest.requests = None;
            if rest != crate::workload::WorkloadSpec::default() {
                return Err(Failure::SuiteAndWorkload);
            }
            Ok(suite::paper(requests)?)
        }
    }
}

/// Requests of all jobs; every case has as many jobs as any other.
fn total(cases: &[Case], jobs: usize) -> Result<u64, WorkloadError> {
    let mut total = 0;
    for case in cases {
        total += Workload::new(&case.workload, 0)?.size_hint().0 as u64;
    }
    Ok(total * (jobs / cases.len().max(1)) as u64)
}

/// Tells how far a long simulation has come.
fn progress(total: u64) -> impl Fn(usize) + Sync {
    let clock = MonotonicClock::start();
    let state = Mutex::new(Progress::default());
    move |over| {
        let now = clock.now().since(Timestamp::ZERO);
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = state.line(now, over as u64, total) {
            eprintln!("{line}");
        }
    }
}

/// Summaries of each case and policy, in the order of the jobs.
fn grouped<'a>(jobs: &'a [Job<'_>], done: &[Done]) -> Vec<(&'a str, Scheduling, Vec<Summary>)> {
    let mut groups: Vec<(&str, Scheduling, Vec<Summary>)> = Vec::new();
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

fn tables(cases: &[Case], jobs: &[Job<'_>], done: &[Done]) -> String {
    let groups = grouped(jobs, done);
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
fn json(jobs: &[Job<'_>], done: &[Done]) -> String {
    let mut cases: Vec<JsonCase<'_>> = Vec::new();
    for (name, scheduling, summaries) in grouped(jobs, done) {
        if cases.last().is_none_or(|case| case.name != name) {
            cases.push(JsonCase {
                name,
                policies: BTreeMap::new(),
            });
        }
        if let Some(case) = cases.last_mut() {
            case.policies
                .insert(scheduling.as_str(), figures(&summaries));
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

fn write_files(args: &SimulateArgs, jobs: &[Job<'_>], done: &[Done]) -> Result<(), Failure> {
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
