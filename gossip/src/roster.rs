//! From gossiped records to rows: what is believed, which life of a node counts, who must give way.
//!
//! Pure: the shell copies records out of the gossip library and hands them in with the time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use chitchat::{ChitchatId, NodeState};

use crate::summary::{LoadSummary, NodeFacts};
use crate::time::Timestamp;
use crate::types::NodeId;
use crate::view::NodeRow;
use crate::wire::{self, FACTS_KEY, LEFT_KEY, LOAD_KEY};

/// What changed in the record of one live node.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    pub(crate) id: ChitchatId,
    /// `None` when the record is as it was the last time.
    pub(crate) values: Option<Values>,
}

/// The values of a record, copied.
#[derive(Clone, Debug, Default)]
pub(crate) struct Values {
    /// Version of the record.
    version: u64,
    /// Facts and their version; `None` when they are as they were.
    facts: Option<(u64, String)>,
    load: Option<String>,
    left: bool,
}

/// The versions last read from a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    version: u64,
    facts: u64,
}

impl Values {
    /// Copies what is new since `seen`; `None` when nothing is. Runs under the library's lock.
    pub(crate) fn copy(state: &NodeState, seen: Seen) -> Option<Self> {
        let version = state.max_version();
        if version == seen.version {
            return None;
        }
        let facts = state
            .get_versioned(FACTS_KEY)
            .filter(|facts| !facts.is_deleted() && facts.version != seen.facts)
            .map(|facts| (facts.version, facts.value.clone()));
        Some(Self {
            version,
            facts,
            load: state.get(LOAD_KEY).map(str::to_owned),
            left: state.contains_key(LEFT_KEY),
        })
    }
}

/// One life of another node.
#[derive(Clone, Debug, Default)]
struct Life {
    seen: Seen,
    facts: Option<Arc<NodeFacts>>,
    load: Option<(LoadSummary, Timestamp)>,
    left: bool,
}

/// Junk found during one update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rejected {
    pub(crate) rows: u64,
    pub(crate) loads: u64,
}

/// All live records but our own.
#[derive(Debug)]
pub(crate) struct Roster {
    this: NodeId,
    lives: BTreeMap<ChitchatId, Life>,
}

impl Roster {
    pub(crate) fn new(this: NodeId) -> Self {
        Self {
            this,
            lives: BTreeMap::new(),
        }
    }

    /// What was last read from this record.
    pub(crate) fn seen(&self, id: &ChitchatId) -> Seen {
        self.lives.get(id).map(|life| life.seen).unwrap_or_default()
    }

    /// Takes in the records of all other live nodes; who is not among them is dead.
    pub(crate) fn update(&mut self, now: Timestamp, observed: Vec<Observed>) -> Rejected {
        let mut rejected = Rejected::default();
        let live: BTreeSet<&ChitchatId> = observed.iter().map(|record| &record.id).collect();
        self.lives.retain(|id, _| live.contains(id));
        for Observed { id, values } in observed {
            let life = self.lives.entry(id.clone()).or_default();
            if let Some(values) = values {
                life.take(now, &id, values, &mut rejected);
            }
        }
        rejected
    }

    /// Addresses of all other live nodes that have not said goodbye.
    pub(crate) fn addresses(&self) -> BTreeSet<SocketAddr> {
        self.lives
            .iter()
            .filter(|(_, life)| !life.left)
            .map(|(id, _)| id.gossip_advertise_addr)
            .collect()
    }

    /// One row per node: its latest life, if that has not said goodbye.
    pub(crate) fn rows(&self) -> Vec<NodeRow> {
        // The generation and not the incarnation tells which life is later: a node whose clock ran
        // back outbids its own past with it.
        let mut latest: BTreeMap<NodeId, ((u64, &ChitchatId), &Life)> = BTreeMap::new();
        for (id, life) in &self.lives {
            let Some(facts) = &life.facts else { continue };
            if facts.node == self.this {
                continue;
            }
            let rank = (id.generation_id, id);
            let entry = latest.entry(facts.node).or_insert((rank, life));
            if rank > entry.0 {
                *entry = (rank, life);
            }
        }
        latest
            .into_values()
            .filter(|(_, life)| !life.left)
            .filter_map(|(_, life)| {
                Some(NodeRow {
                    facts: life.facts.clone()?,
                    load: life.load,
                })
            })
            .collect()
    }
}

impl Life {
    fn take(&mut self, now: Timestamp, id: &ChitchatId, values: Values, rejected: &mut Rejected) {
        self.seen.version = values.version;
        self.left = values.left;
        if let Some((version, text)) = values.facts {
            self.seen.facts = version;
            self.facts = read_facts(id, &text).map(Arc::new);
            if self.facts.is_none() {
                rejected.rows += 1;
            }
        }
        let (Some(text), Some(facts)) = (values.load, &self.facts) else {
            return;
        };
        match wire::unpack_load(&text) {
            Ok(load) if load.incarnation == facts.incarnation => {
                let newer = self.load.is_none_or(|(old, _)| load.is_newer_than(&old));
                if newer {
                    self.load = Some((load, now));
                }
            }
            Ok(_) | Err(_) => rejected.loads += 1,
        }
    }
}

fn read_facts(id: &ChitchatId, text: &str) -> Option<NodeFacts> {
    let read = id
        .node_id
        .parse()
        .map_err(|error: crate::types::ParseIdError| error.to_string())
        .and_then(|node| wire::unpack_facts(text, node).map_err(|error| error.to_string()));
    match read {
        Ok(facts) => Some(facts),
        Err(error) => {
            tracing::debug!(?id, %error, "record left out of the view");
            None
        }
    }
}

/// Another record under this node's own name, with a later generation than ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rival {
    pub(crate) generation: u64,
    pub(crate) address: SocketAddr,
    pub(crate) live: bool,
}

/// What to do about rivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rivalry {
    /// None that matters. A dead one elsewhere is a past life under a clock that ran ahead; nobody lists it.
    None,
    /// A past life of ours at this address, under a clock that ran ahead: others would believe it
    /// and not us. Start again with a later generation.
    Outbid(u64),
    /// Another process runs with our identity, and started after us.
    Displaced(SocketAddr),
}

/// Judges the records under our name that are later than ours.
pub(crate) fn judge(own: SocketAddr, rivals: &[Rival]) -> Rivalry {
    let displaced = rivals
        .iter()
        .filter(|rival| rival.live && rival.address != own)
        .max_by_key(|rival| rival.generation);
    if let Some(rival) = displaced {
        return Rivalry::Displaced(rival.address);
    }
    rivals
        .iter()
        .filter(|rival| rival.address == own)
        .map(|rival| rival.generation)
        .max()
        .map_or(Rivalry::None, Rivalry::Outbid)
}

/// Whether this node is one too many: as many as the mesh may have started before it.
///
/// Those count who are in the digest, dead ones too, since the digest is what must not outgrow a datagram.
/// Whoever was in keeps its place: only later nodes come in, so the number before it never rises.
pub(crate) fn one_too_many(started_before: usize, limit: usize) -> bool {
    started_before >= limit
}

#[cfg(test)]
mod tests;
