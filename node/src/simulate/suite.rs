//! Sets of runs that are asked for by name, and how many runs share the processors.

mod run;
mod verdict;

use std::time::Duration;

use shoal_gossip::Tokens;

use crate::dispatch::PolicyName;
use crate::engine::sim::{Profile, ProfileError};
use crate::simulate::{Fault, FaultKind, Plan, Scheduling, SimulateError};
use crate::workload::{Arrivals, WorkloadError, WorkloadSpec};

pub use run::{Done, Job, run_all};
pub use verdict::{Group, Verdict};

/// One workload that several ways of scheduling are given.
#[derive(Clone, Debug)]
pub struct Case {
    /// For tables and JSON.
    pub name: String,
    /// What arrives.
    pub workload: WorkloadSpec,
    /// What is different from the plan of the set.
    pub setting: Setting,
}

/// What a case changes of a plan.
#[derive(Clone, Debug, Default)]
pub struct Setting {
    /// Other nodes; all of them are entries.
    pub nodes: Option<Vec<Profile>>,
    /// Longest request, prompt and output together.
    pub context: Option<Tokens>,
    /// Everybody sees everything as it is.
    pub fresh: bool,
    /// What every word about a load takes in addition.
    pub extra: Option<Duration>,
    /// Share of words that are lost.
    pub loss: Option<f64>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
}

impl Setting {
    fn apply(&self, plan: &mut Plan) {
        if let Some(nodes) = &self.nodes {
            plan.nodes.clone_from(nodes);
            plan.entries = nodes.len();
        }
        plan.context = self.context.or(plan.context);
        if self.fresh {
            plan.gossip.interval = Duration::ZERO;
        }
        plan.gossip.extra = self.extra.unwrap_or(plan.gossip.extra);
        plan.gossip.loss = self.loss.unwrap_or(plan.gossip.loss);
        plan.faults.extend_from_slice(&self.faults);
    }
}

/// A set of cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Suite {
    /// The main experiment of Llumnix (OSDI'24): seven workloads at three rates each.
    Paper,
    /// Views from fresh to five seconds old.
    Staleness,
    /// No to every fifth word about a load lost.
    Loss,
    /// Four A10, four A100 and four H100 in one mesh.
    Mixed,
    /// Arrivals in bursts: Gamma with a coefficient of variation of 1 to 8.
    Bursts,
    /// A node is killed and comes back; one drains; one is slow; the mesh is cut in two.
    Faults,
    /// 16 to 1,000 nodes, with a request a node and second for every two seconds.
    Scale,
}

/// Requests of a case by default, as many as the paper's.
const REQUESTS: u64 = 10_000;

/// Requests a second at each of 16 nodes of `a10/llama-7b` that bring the ShareGPT lengths of the paper to its middle rate.
const SHAREGPT: f64 = 7.5;

/// The same for long prompts with long outputs, where KV is what is short.
const LONG: f64 = 2.9;

/// Longest request of the paper's generator, 6,144 tokens each way. The engine of the paper takes what fits into its KV.
const CONTEXT: Tokens = Tokens(12_288);

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

impl Suite {
    /// Its cases, of so many requests each if it is not its own number.
    ///
    /// # Errors
    /// Lengths or a profile that are not shipped.
    pub fn cases(self, requests: Option<u64>) -> Result<Vec<Case>, SuiteError> {
        let requests = requests.unwrap_or(REQUESTS);
        match self {
            Self::Paper => paper(requests),
            Self::Staleness => staleness(requests),
            Self::Loss => loss(requests),
            Self::Mixed => mixed(requests),
            Self::Bursts => bursts(requests),
            Self::Faults => faults(requests),
            Self::Scale => scale(requests),
        }
    }

    /// What it compares by default.
    pub fn schedulings(self) -> Vec<Scheduling> {
        let policy = Scheduling::Policy;
        match self {
            Self::Paper => Scheduling::all().collect(),
            Self::Staleness | Self::Loss => vec![
                Scheduling::Shoal,
                policy(PolicyName::P2c),
                policy(PolicyName::Freest),
                policy(PolicyName::LeastQueue),
            ],
            Self::Mixed | Self::Bursts | Self::Scale => vec![
                Scheduling::Shoal,
                Scheduling::Llumnix,
                policy(PolicyName::LeastQueue),
                policy(PolicyName::RoundRobin),
            ],
            Self::Faults => vec![Scheduling::Shoal, Scheduling::Llumnix],
        }
    }

    /// Seeds it runs by default.
    pub fn seeds(self) -> u32 {
        match self {
            Self::Scale => 1,
            _ => 5,
        }
    }
}

fn case(
    name: impl Into<String>,
    (lengths, rate): (&str, f64),
    requests: u64,
) -> Result<Case, SuiteError> {
    Ok(Case {
        name: name.into(),
        workload: WorkloadSpec {
            lengths: Some(lengths.parse()?),
            rate: Some(rate),
            requests: Some(requests),
            ..WorkloadSpec::default()
        },
        setting: Setting {
            context: Some(CONTEXT),
            ..Setting::default()
        },
    })
}

fn paper(requests: u64) -> Result<Vec<Case>, SuiteError> {
    let mut cases = Vec::new();
    for (name, lengths, rates) in PAPER {
        for rate in rates {
            cases.push(case(format!("{name} {rate}/s"), (lengths, rate), requests)?);
        }
    }
    Ok(cases)
}

fn staleness(requests: u64) -> Result<Vec<Case>, SuiteError> {
    let mut cases = vec![case("fresh", ("L-L", LONG), requests)?];
    cases[0].setting.fresh = true;
    for extra in [0, 250, 500, 1_000, 2_000, 5_000] {
        let mut later = case(format!("gossip + {extra} ms"), ("L-L", LONG), requests)?;
        later.setting.extra = Some(Duration::from_millis(extra));
        cases.push(later);
    }
    Ok(cases)
}

fn loss(requests: u64) -> Result<Vec<Case>, SuiteError> {
    let mut cases = Vec::new();
    for percent in [0, 1, 5, 10, 20] {
        let mut lossy = case(format!("{percent} % lost"), ("L-L", LONG), requests)?;
        lossy.setting.loss = Some(f64::from(percent) / 100.0);
        cases.push(lossy);
    }
    Ok(cases)
}

fn mixed(requests: u64) -> Result<Vec<Case>, SuiteError> {
    let kinds = ["a10/llama-7b", "a100/llama-2-13b", "h100/llama-3.1-8b"];
    let kinds: Result<Vec<_>, _> = kinds.into_iter().map(Profile::find).collect();
    let nodes: Vec<_> = kinds?.into_iter().cycle().take(12).collect();
    let mut cases = Vec::new();
    for rate in [20.0, 40.0, 60.0] {
        let mut fleet = case(format!("{rate}/s"), ("llumnix-sharegpt", rate), requests)?;
        fleet.setting.nodes = Some(nodes.clone());
        // What the model with the shortest context takes.
        fleet.setting.context = None;
        fleet.workload.max_tokens_total = Some(4_096);
        cases.push(fleet);
    }
    Ok(cases)
}

fn bursts(requests: u64) -> Result<Vec<Case>, SuiteError> {
    let mut cases = Vec::new();
    for variation in [1, 2, 4, 8] {
        // A third below the knee of even arrivals: the paper's rate for its own bursts.
        let mut bursty = case(format!("CV {variation}"), ("S-S", 26.0), requests)?;
        bursty.workload.arrivals = Some(Arrivals::Gamma {
            cv: f64::from(variation),
        });
        cases.push(bursty);
    }
    Ok(cases)
}

fn faults(requests: u64) -> Result<Vec<Case>, SuiteError> {
    let fault = |second, what| Fault {
        at: Duration::from_secs(second),
        what,
    };
    let kinds = [
        ("none", vec![]),
        (
            "kill, back after 60 s",
            vec![
                fault(120, FaultKind::Kill(3)),
                fault(180, FaultKind::Join(3)),
            ],
        ),
        ("drain", vec![fault(120, FaultKind::Drain(3))]),
        (
            "four times as slow",
            vec![fault(120, FaultKind::Slow(3, 4.0))],
        ),
        (
            "cut in halves for 30 s",
            vec![fault(120, FaultKind::Cut(8)), fault(150, FaultKind::Heal)],
        ),
    ];
    let mut cases = Vec::new();
    for (name, faults) in kinds {
        let mut faulty = case(name, ("llumnix-sharegpt", SHAREGPT * 0.9), requests)?;
        faulty.setting.faults = faults;
        cases.push(faulty);
    }
    Ok(cases)
}

fn scale(requests: u64) -> Result<Vec<Case>, SuiteError> {
    let profile = Profile::find("a10/llama-7b")?;
    let mut cases = Vec::new();
    for nodes in [16u32, 64, 256, 1_000] {
        let times = f64::from(nodes) / 16.0;
        // A hundred requests a node.
        let requests = requests * u64::from(nodes) / 100;
        let load = ("llumnix-sharegpt", SHAREGPT * times);
        let mut large = case(format!("{nodes} nodes"), load, requests)?;
        large.setting.nodes = Some(vec![profile.clone(); nodes as usize]);
        cases.push(large);
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
    /// A profile that is not there.
    #[error(transparent)]
    Profile(#[from] ProfileError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_set_has_cases_of_different_names() {
        for suite in Suite::value_variants() {
            let cases = suite.cases(None).expect("shipped");
            let mut names: Vec<_> = cases.iter().map(|case| case.name.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            assert!(names.len() == cases.len() && names.len() >= 3, "{suite:?}");
        }
        assert_eq!(Suite::Paper.cases(Some(9)).expect("shipped").len(), 21);
    }
}
