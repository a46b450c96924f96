//! State of a simulated mesh over time, in bounded memory.

use std::time::Duration;

use serde::{Serialize, Serializer};

/// Nodes that are kept in detail. More lines cannot be told apart in a chart.
pub const MAX_SHOWN: usize = 32;

/// Samples at which a series is thinned out: five for each point that a chart draws.
pub const MAX_SAMPLES: usize = 2_000;

/// Samples at equal distances, the first at time zero.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Series {
    /// Time between two samples.
    #[serde(rename = "every_s", serialize_with = "as_seconds")]
    pub every: Duration,
    /// Single nodes, at most [`MAX_SHOWN`], each with as many samples as `fleet`.
    pub nodes: Vec<NodeSeries>,
    /// All nodes together.
    pub fleet: Vec<FleetSample>,
}

/// One node over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeSeries {
    /// Its index.
    pub node: u32,
    /// Share of its KV blocks in use, 0 to 1.
    pub used: Vec<f32>,
    /// Requests that wait in its queue.
    pub queued: Vec<u32>,
}

/// All nodes at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FleetSample {
    /// Mean over nodes of the share of KV blocks in use.
    pub used_mean: f32,
    /// Largest share of KV blocks in use.
    pub used_max: f32,
    /// Requests that wait.
    pub queued: u32,
    /// Requests that run.
    pub running: u32,
    /// Free KV blocks.
    pub free_blocks: u64,
    /// Free KV blocks that are lost to fragmentation: see [`stuck_blocks`].
    pub stuck_blocks: u64,
}

impl Series {
    /// An empty series with a sample each `every`, and in detail the first [`MAX_SHOWN`] of `nodes` nodes.
    pub fn new(every: Duration, nodes: u32) -> Self {
        let nodes = (0..nodes).take(MAX_SHOWN).map(|node| NodeSeries {
            node,
            used: Vec::new(),
            queued: Vec::new(),
        });
        Self {
            every,
            nodes: nodes.collect(),
            fleet: Vec::new(),
        }
    }

    /// When the next sample is to be taken, since the start of the run.
    pub fn due(&self) -> Duration {
        let samples = u32::try_from(self.fleet.len()).unwrap_or(u32::MAX);
        self.every.saturating_mul(samples)
    }

    /// Adds the sample that was due. `node` tells the share of KV blocks in use and the queue of one node.
    ///
    /// With [`MAX_SAMPLES`] samples, every other one is dropped and `every` doubles, so the memory of a
    /// run does not grow with its length. What is left are samples and not means: a short peak may be
    /// among those that are dropped.
    pub fn push(&mut self, fleet: FleetSample, mut node: impl FnMut(u32) -> (f32, u32)) {
        for series in &mut self.nodes {
            let (used, queued) = node(series.node);
            series.used.push(used);
            series.queued.push(queued);
        }
        self.fleet.push(fleet);
        if self.fleet.len() >= MAX_SAMPLES {
            self.every = self.every.saturating_mul(2);
            thin(&mut self.fleet);
            for series in &mut self.nodes {
                thin(&mut series.used);
                thin(&mut series.queued);
            }
        }
    }
}

/// Keeps the first, the third, and so on.
fn thin<T>(samples: &mut Vec<T>) {
    let mut keep = false;
    samples.retain(|_| {
        keep = !keep;
        keep
    });
}

fn as_seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

/// Free KV blocks that are lost to fragmentation: what the heads of line that wait could use if all free
/// blocks of the mesh lay on one node.
///
/// `nodes` gives each node's free blocks and the demand of its head of line, if one waits. A head that
/// fits its own node only waits for the next step, and does not count. The others are taken from the
/// smallest on for as long as the sum of their demands is within the sum of the free blocks; that sum of
/// demands is the answer. The idea is that of Llumnix (OSDI '24), which moves requests to lower it.
pub fn stuck_blocks(nodes: impl IntoIterator<Item = (u64, Option<u64>)>) -> u64 {
    let mut free = 0u64;
    let mut blocked = Vec::new();
    for (here, head) in nodes {
        free = free.saturating_add(here);
        blocked.extend(head.filter(|head| *head > here));
    }
    blocked.sort_unstable();
    blocked
        .iter()
        .scan(0u64, |sum, demand| {
            *sum = sum.saturating_add(*demand);
            Some(*sum)
        })
        .take_while(|sum| *sum <= free)
        .last()
        .unwrap_or(0)
}
