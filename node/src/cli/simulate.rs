//! `shoal simulate`: a whole mesh in virtual time.

mod tell;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Args;

use crate::cli::output::{Teller, WriteError, fail, print};
use crate::config::{self, ConfigError};
use crate::engine::sim::{Profile, ProfileError};
use crate::simulate::suite::{self, Case, Job, Setting, Suite, SuiteError, Verdict};
use crate::simulate::{Fault, GossipModel, Network, Plan, Scheduling};
use crate::workload::{Workload, WorkloadArgs, WorkloadError, WorkloadSpec};

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

    /// How requests are placed and moved; several are compared on the same workload [default: shoal; a suite has its own].
    ///
    /// shoal · llumnix and infaas (one scheduler that sees all as it is) · a --policy of `shoal node` alone on stale views · flood.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
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

    /// Seeds to run, from --seed on; figures are means with 95 % confidence intervals then [default: 1; 5 for most suites].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=30))]
    seeds: Option<u32>,

    /// A set of cases in place of one workload. `paper` ends with a verdict, and fails if nodes without a leader are worse than
    /// one that sees all.
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
        Ok((text, verdict)) => {
            let printed = print(&text);
            match verdict {
                None => printed,
                Some(verdict) => {
                    eprintln!("{verdict}");
                    if verdict.holds() {
                        printed
                    } else {
                        ExitCode::FAILURE
                    }
                }
            }
        }
        Err(error) => fail(error),
    }
}

fn simulate(args: &SimulateArgs) -> Result<(String, Option<Verdict>), Failure> {
    let plan = plan(args)?;
    let cases = cases(args)?;
    let mut jobs = Vec::new();
    let policies = match (args.policies.as_slice(), args.suite) {
        ([], None) => vec![Scheduling::Shoal],
        ([], Some(suite)) => suite.schedulings(),
        (named, _) => named.to_vec(),
    };
    let seeds = args
        .seeds
        .unwrap_or_else(|| args.suite.map_or(1, Suite::seeds));
    for case in &cases {
        for &scheduling in &policies {
            for seed in 0..u64::from(seeds) {
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
    let teller = Mutex::new(Teller::new(total(&cases, jobs.len())?));
    let watch = |over| {
        let mut teller = teller.lock().unwrap_or_else(PoisonError::into_inner);
        teller.tell(over);
    };
    let done = suite::run_all(&plan, &jobs, keep, watch)?;
    if wanted {
        tell::write_files(args, &jobs, &done)?;
    }
    let groups = tell::grouped(&jobs, &done);
    let verdict = match args.suite {
        Some(Suite::Paper) => Verdict::of(&groups),
        Some(_) | None => None,
    };
    let text = match args.json {
        true => tell::json(&groups),
        false => tell::tables(&cases, &groups),
    };
    Ok((text, verdict))
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
            setting: Setting::default(),
        }]),
        Some(suite) => {
            let mut own = own;
            let requests = own.requests.take();
            if own != WorkloadSpec::default() {
                return Err(Failure::SuiteAndWorkload);
            }
            Ok(suite.cases(requests)?)
        }
    }
}

/// Requests of all jobs; every case has as many jobs as any other.
fn total(cases: &[Case], jobs: usize) -> Result<usize, WorkloadError> {
    let mut total = 0;
    for case in cases {
        total += Workload::new(&case.workload, 0)?.size_hint().0;
    }
    Ok(total * (jobs / cases.len().max(1)))
}
