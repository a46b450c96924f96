//! What one dispatch decision costs: the production core on views of several sizes, every policy.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shoal_gossip::{
    BlockSize, Blocks, ClusterView, Incarnation, LoadSummary, ModelApi, ModelFacts, NodeFacts,
    NodeId, NodeRow, Readiness, Role, Timestamp, Tokens,
};

use crate::bench::{clock, micros, quantile};
use crate::dispatch::{
    Corrections, Need, Placement, PlacementLimits, Policy, PolicyName, Step, World,
};
use crate::engine::work::Fit;
use crate::mesh::messages::PROTOCOL;

/// Mesh sizes that are measured.
pub const SIZES: [u32; 3] = [16, 256, 1_000];

/// Decisions per sample: one decision is too short for the clock.
const BATCH: u32 = 64;

/// Samples per size and policy.
const SAMPLES: usize = 200;

/// One line of the result.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Line {
    /// Nodes in the view.
    pub nodes: u32,
    /// Policy.
    pub policy: &'static str,
    /// Median time of one decision in microseconds, from need to chosen node, charge included.
    pub p50_us: f64,
    /// 99th percentile of the mean of a batch of decisions, in microseconds.
    pub p99_us: f64,
}

/// Measures every policy at every size.
pub fn run() -> Vec<Line> {
    let policies = [
        PolicyName::P2c,
        PolicyName::RoundRobin,
        PolicyName::LeastQueue,
        PolicyName::Freest,
        PolicyName::Random,
    ];
    let mut lines = Vec::new();
    for nodes in SIZES {
        let view = view(nodes);
        for policy in policies {
            lines.push(measure(nodes, &view, policy));
        }
    }
    lines
}

fn measure(nodes: u32, view: &ClusterView, name: PolicyName) -> Line {
    let mut corrections = Corrections::default();
    let mut policy = Policy::new(name);
    let mut rng = StdRng::seed_from_u64(1);
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let started = clock();
        for _ in 0..BATCH {
            let mut placement = Placement::new(need(), limits());
            let mut world = World {
                this: NodeId(1),
                now: Timestamp::ZERO,
                view,
                corrections: &mut corrections,
                policy: &mut policy,
                rng: &mut rng,
            };
            let step: Step = black_box(placement.start(&mut world));
            debug_assert!(matches!(step, Step::Offer { .. }));
            placement.abandon(&mut corrections);
        }
        samples.push(started.elapsed() / BATCH);
    }
    Line {
        nodes,
        policy: name.as_str(),
        p50_us: micros(quantile(&mut samples, 0.5)),
        p99_us: micros(quantile(&mut samples, 0.99)),
    }
}

fn limits() -> PlacementLimits {
    PlacementLimits {
        max_view_age: Duration::from_secs(3),
        max_offers: 5,
    }
}

fn need() -> Need {
    Need {
        model: "SmolLM2-135M-Instruct".into(),
        fit: Fit::Any,
        prompt: Tokens(500),
        generated: Tokens::ZERO,
        excluded: BTreeSet::new(),
    }
}

/// A mesh under load: every node ready, KV use and queues drawn at random.
fn view(nodes: u32) -> ClusterView {
    let mut rng = StdRng::seed_from_u64(u64::from(nodes));
    let rows = (0..nodes)
        .map(|_| {
            let node = NodeId(rng.random());
            let running = rng.random_range(0..64);
            NodeRow {
                facts: Arc::new(facts(node)),
                load: Some((
                    LoadSummary {
                        incarnation: Incarnation(1),
                        seq: 1,
                        readiness: Readiness::Ready,
                        total: Blocks(4_096),
                        used: Blocks(running * 48),
                        running,
                        queued: rng.random_range(0..3),
                        queue_room: 100,
                        ..LoadSummary::default()
                    },
                    Timestamp::ZERO,
                )),
            }
        })
        .collect();
    ClusterView::new(NodeId(0), Timestamp::ZERO, rows)
}

fn facts(node: NodeId) -> NodeFacts {
    NodeFacts {
        node,
        incarnation: Incarnation(1),
        peer_id: String::new(),
        protocol: PROTOCOL,
        control: ([127, 0, 0, 1], 7_400).into(),
        stream: ([127, 0, 0, 1], 7_401).into(),
        http: String::new(),
        role: Role::Mixed,
        block_size: BlockSize::DEFAULT,
        models: vec![ModelFacts {
            id: "SmolLM2-135M-Instruct".into(),
            context: Tokens(8_192),
            fingerprint: 1,
            created: 0,
            api: ModelApi::Tokens,
        }],
        version: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_decides_on_the_measured_views() {
        let view = view(16);
        for name in [PolicyName::P2c, PolicyName::Freest] {
            let mut placement = Placement::new(need(), limits());
            let mut corrections = Corrections::default();
            let mut world = World {
                this: NodeId(1),
                now: Timestamp::ZERO,
                view: &view,
                corrections: &mut corrections,
                policy: &mut Policy::new(name),
                rng: &mut StdRng::seed_from_u64(1),
            };
            assert!(matches!(placement.start(&mut world), Step::Offer { .. }));
        }
    }
}
