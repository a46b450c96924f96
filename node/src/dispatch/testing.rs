//! A mesh in words, for the tests of this module.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use shoal_gossip::{
    BlockSize, Blocks, ClusterView, Incarnation, LoadSummary, ModelApi, ModelFacts, NodeFacts,
    NodeId, NodeRow, Readiness, Role, Timestamp, Tokens,
};

use crate::dispatch::Need;
use crate::engine::work::Fit;
use crate::mesh::messages::PROTOCOL;

pub(crate) const MAX_AGE: Duration = Duration::from_secs(3);

pub(crate) fn at(millis: u64) -> Timestamp {
    Timestamp::since_start(Duration::from_millis(millis))
}

pub(crate) fn rng() -> StdRng {
    StdRng::seed_from_u64(7)
}

/// A ready node with 100 blocks; `used` of them by `running` requests, `queued` waiting.
pub(crate) fn load(used: u32, running: u32, queued: u32) -> LoadSummary {
    LoadSummary {
        incarnation: Incarnation(1),
        seq: 1,
        readiness: Readiness::Ready,
        total: Blocks(100),
        used: Blocks(used),
        running,
        queued,
        queue_room: 8,
        ..LoadSummary::default()
    }
}

pub(crate) fn facts(node: u64) -> NodeFacts {
    NodeFacts {
        node: NodeId(node),
        incarnation: Incarnation(1),
        peer_id: String::new(),
        protocol: PROTOCOL,
        control: ([127, 0, 0, 1], 1).into(),
        stream: ([127, 0, 0, 1], 2).into(),
        http: String::new(),
        role: Role::Mixed,
        block_size: BlockSize::new(NonZeroU32::new(16).unwrap()),
        models: vec![ModelFacts {
            id: "m".into(),
            context: Tokens(1_000),
            fingerprint: 1,
            created: 0,
            api: ModelApi::Tokens,
        }],
        version: String::new(),
    }
}

pub(crate) fn row(node: u64, load: LoadSummary, received: Timestamp) -> NodeRow {
    NodeRow {
        facts: Arc::new(facts(node)),
        load: Some((load, received)),
    }
}

pub(crate) fn view(rows: Vec<NodeRow>) -> ClusterView {
    ClusterView::new(NodeId(0), Timestamp::ZERO, rows)
}

/// A request for model `m` that needs `blocks` blocks to start.
pub(crate) fn need(blocks: u32) -> Need {
    Need {
        model: "m".into(),
        fit: Fit::Any,
        prompt: Tokens(blocks * 16 - 1),
        generated: Tokens::ZERO,
        excluded: BTreeSet::new(),
    }
}
