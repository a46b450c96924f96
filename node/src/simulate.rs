//! `shoal simulate`: a whole mesh in virtual time.
//!
//! The cores are those of the node: placement, policies, redirect, rescheduling, the sessions of a hand-over with the
//! home's arbiter, and the batch core of the simulated engine with its latency profiles. What is modelled is what lies
//! between them: the network (latency, bandwidth), gossip (words that come late or not at all) and the time a step takes.
//! A run is a function of its plan, its workload and its seed.
//!
//! ```text
//! workload ─▶ arrivals ─▶ home: Placement ─▶ host: reserve, probe, redirect ─▶ Batcher ─▶ steps ─▶ tokens ─▶ records
//!                            ▲ stale views: gossip                               ▲  Rescheduler ─▶ SourceSession/TargetSession
//! ```

mod agenda;
mod central;
mod event;
mod fail;
mod fault;
mod gossip;
mod hand_over;
mod mesh;
mod node;
mod place;
mod request;
pub mod suite;
#[cfg(test)]
mod tests;

use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use shoal_gossip::Tokens;

pub use fault::{Fault, FaultKind, NoFault};
pub use gossip::GossipModel;

use crate::config::NodeConfig;
use crate::dispatch::PolicyName;
use crate::engine::sim::Profile;
use crate::report::{Herding, Record, Series};
use crate::workload::Arrival;

/// How requests are placed and moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// What a node does by default: power of two choices on stale views, redirect, rescheduling.
    Shoal,
    /// One scheduler that sees all as it is, takes the freest (INFaaS++ in Llumnix, OSDI'24 §6.1), and pairs the fullest
    /// with the freest to move requests (§4.4).
    Llumnix,
    /// The same, and moves nothing.
    Infaas,
    /// Every entry node decides by this policy and its stale view; nothing is redirected or moved.
    Policy(PolicyName),
    /// Everything to one node: how bad it can be.
    Flood,
}

impl Scheduling {
    /// All, in the order of tables.
    pub fn all() -> impl Iterator<Item = Self> {
        let policies = PolicyName::value_variants().iter().copied();
        let central = [Self::Shoal, Self::Llumnix, Self::Infaas];
        let policies = policies.map(Self::Policy);
        central.into_iter().chain(policies).chain([Self::Flood])
    }

    /// As written in flags and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shoal => "shoal",
            Self::Llumnix => "llumnix",
            Self::Infaas => "infaas",
            Self::Policy(policy) => policy.as_str(),
            Self::Flood => "flood",
        }
    }

    /// The policy of the entry nodes, when they decide.
    fn policy(self) -> Option<PolicyName> {
        match self {
            Self::Shoal => Some(PolicyName::P2c),
            Self::Policy(policy) => Some(policy),
            Self::Flood | Self::Infaas | Self::Llumnix => None,
        }
    }
}

/// There is no such scheduling.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no `{asked}`; give one of {known}")]
pub struct NoScheduling {
    asked: String,
    known: String,
}

impl FromStr for Scheduling {
    type Err = NoScheduling;

    fn from_str(text: &str) -> Result<Self, NoScheduling> {
        let found = Self::all().find(|scheduling| scheduling.as_str() == text);
        found.ok_or_else(|| NoScheduling {
            asked: text.to_owned(),
            known: Self::all().map(Self::as_str).collect::<Vec<_>>().join(", "),
        })
    }
}

/// The way between two nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// One way, between processes: a quarter of a millisecond is what control messages take between hosts of one rack
    /// (0.56 ms a round trip measured, `docs/simulator.md`).
    pub latency: Duration,
    /// Bytes of KV that a node sends in a second.
    pub bytes_per_second: f64,
}

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The engine of each node.
    pub nodes: Vec<Profile>,
    /// How requests are placed.
    pub scheduling: Scheduling,
    /// How loads travel.
    pub gossip: GossipModel,
    /// How everything else travels.
    pub network: Network,
    /// Nodes that clients ask, the first ones; each request takes one of them at random.
    pub entries: usize,
    /// Requests that may wait at one node.
    pub queue_limit: u32,
    /// Longest request, prompt and output together; what the profile has by default.
    pub context: Option<Tokens>,
    /// Freeness below which the central `llumnix` moves requests away, and above which it moves them to, in blocks a
    /// request.
    pub llumnix: (u32, u32),
    /// What goes wrong. Nodes are below the number of nodes.
    pub faults: Vec<Fault>,
    /// The settings of every node, as its flags give them.
    pub node: NodeConfig,
    /// What chance does.
    pub seed: u64,
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// All requests, by arrival.
    pub records: Vec<Record>,
    /// Virtual time from the start to the end of the last request.
    pub span: Duration,
    /// State over time.
    pub series: Series,
    /// How evenly requests lay on the nodes that were there, until the last had arrived.
    pub herding: Option<Herding>,
    /// Events handled.
    pub events: u64,
    /// Offers that a host answered by naming another node.
    pub redirects: u64,
    /// Requests that were placed again because their host was lost, each time counted.
    pub replays: u64,
    /// Hand-overs that began, and those that ended with the request at its target.
    pub moves: (u64, u64),
}

/// Why nothing was simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// No node, or no entry.
    #[error("there must be at least one node, and as many entries as there are nodes or fewer")]
    NoNodes,
    /// A fault of a node that is not there.
    #[error("the fault {0} is of a node that is not there: nodes are counted from 0")]
    Fault(String),
    /// A profile that no engine can have.
    #[error("the profile {name} cannot be simulated: {why}")]
    Profile {
        /// Which.
        name: String,
        /// Why.
        why: String,
    },
}

/// Runs a plan to the end of its workload. `watch` is told the requests that are over, every thousand events.
///
/// # Errors
/// See [`SimulateError`]; nothing ran.
pub fn run(
    plan: &Plan,
    arrivals: impl Iterator<Item = Arrival>,
    watch: impl FnMut(usize),
) -> Result<Run, SimulateError> {
    if plan.nodes.is_empty() || plan.entries == 0 || plan.entries > plan.nodes.len() {
        return Err(SimulateError::NoNodes);
    }
    let unknown = |fault: &&Fault| {
        let node = fault.what.node();
        node.is_some_and(|node| node >= plan.nodes.len())
    };
    if let Some(fault) = plan.faults.iter().find(unknown) {
        return Err(SimulateError::Fault(fault.to_string()));
    }
    let mesh = mesh::Mesh::new(plan, arrivals)?;
    Ok(mesh.run(watch))
}
