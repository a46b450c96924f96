//! The records of all nodes as they came in, and the view made of them. Pure.
//!
//! A record is read once per version. Of several lives of one node the newest counts, at once, even
//! while the failure detector still believes in the older one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::summary::{LoadSummary, NodeFacts};
use crate::time::Timestamp;
use crate::types::NodeId;
use crate::view::{ClusterView, NodeRow};
use crate::wire::{unpack_facts, unpack_load};

/// One live node as the gossip library tells of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record<'a> {
    /// The library's name for it.
    pub(crate) name: &'a str,
    /// Number of its life.
    pub(crate) generation: u64,
    /// Version and text of its facts.
    pub(crate) facts: Option<(u64, &'a str)>,
    /// Version and text of its load.
    pub(crate) load: Option<(u64, &'a str)>,
    /// It said goodbye.
    pub(crate) left: bool,
}

#[derive(Debug, Default)]
struct Entry {
    generation: u64,
    facts: Option<(u64, Option<Arc<NodeFacts>>)>,
    load_version: u64,
    load: Option<(LoadSummary, Timestamp)>,
}

/// What reading the records came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Read {
    /// Facts refused, this time.
    pub(crate) facts_rejected: u64,
    /// Loads refused, this time.
    pub(crate) loads_rejected: u64,
    /// Records that found no room.
    pub(crate) beyond_limit: usize,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Table {
    this: NodeId,
    max_nodes: usize,
    entries: BTreeMap<NodeId, Entry>,
}

impl Table {
    pub(crate) fn new(this: NodeId, max_nodes: usize) -> Self {
        Self {
            this,
            max_nodes,
            entries: BTreeMap::new(),
        }
    }

    /// Takes in the records of all live nodes but this one. Whoever is not among them is gone.
    pub(crate) fn read<'a>(
        &mut self,
        now: Timestamp,
        records: impl Iterator<Item = Record<'a>>,
    ) -> Read {
        let mut read = Read::default();
        let mut present = BTreeSet::new();
        let mut newest: BTreeMap<NodeId, Record<'a>> = BTreeMap::new();
        for record in records {
            let Ok(node) = record.name.parse::<NodeId>() else {
                continue;
            };
            let known = newest.entry(node).or_insert(record);
            if record.generation > known.generation {
                *known = record;
            }
        }
        for (node, record) in newest {
            if record.left || node == self.this {
                continue;
            }
            if present.len() >= self.max_nodes.saturating_sub(1) {
                read.beyond_limit += 1;
                continue;
            }
            present.insert(node);
            self.entries
                .entry(node)
                .or_default()
                .take(node, now, &record, &mut read);
        }
        self.entries.retain(|node, _| present.contains(node));
        read
    }

    /// Nodes whose facts are good, this one left out.
    pub(crate) fn others(&self) -> impl Iterator<Item = &Arc<NodeFacts>> {
        self.entries
            .values()
            .filter_map(|entry| entry.facts.as_ref()?.1.as_ref())
    }

    /// The view, with this node's own row.
    pub(crate) fn view(&self, now: Timestamp, own: NodeRow) -> ClusterView {
        let mut rows = vec![own];
        rows.extend(self.entries.values().filter_map(|entry| {
            Some(NodeRow {
                facts: Arc::clone(entry.facts.as_ref()?.1.as_ref()?),
                load: entry.load,
            })
        }));
        ClusterView::new(self.this, now, rows)
    }
}

impl Entry {
    fn take(&mut self, node: NodeId, now: Timestamp, record: &Record<'_>, read: &mut Read) {
        if record.generation != self.generation {
            *self = Self {
                generation: record.generation,
                ..Self::default()
            };
        }
        if let Some((version, text)) = record.facts
            && self
                .facts
                .as_ref()
                .is_none_or(|(known, _)| *known != version)
        {
            let facts = unpack_facts(text, node).ok().map(Arc::new);
            read.facts_rejected += u64::from(facts.is_none());
            self.facts = Some((version, facts));
        }
        if let Some((version, text)) = record.load
            && version != self.load_version
        {
            self.load_version = version;
            match unpack_load(text) {
                Ok(load) => {
                    let newer = self
                        .load
                        .is_none_or(|(known, _)| load.is_newer_than(&known));
                    if newer {
                        self.load = Some((load, now));
                    }
                }
                Err(_) => read.loads_rejected += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::facts;
    use crate::types::Incarnation;
    use crate::wire::{pack_facts, pack_load};

    fn at(millis: u64) -> Timestamp {
        Timestamp::since_start(Duration::from_millis(millis))
    }

    fn load(incarnation: u64, seq: u64) -> LoadSummary {
        LoadSummary {
            incarnation: Incarnation(incarnation),
            seq,
            ..LoadSummary::default()
        }
    }

    struct Told {
        name: String,
        facts: String,
        load: String,
    }

    fn told(identity: u16, incarnation: u64, seq: u64) -> Told {
        let facts = facts(identity, incarnation);
        Told {
            name: facts.node.to_string(),
            facts: pack_facts(&facts).unwrap(),
            load: pack_load(&load(incarnation, seq)).unwrap(),
        }
    }

    impl Told {
        fn record(&self, generation: u64, version: u64) -> Record<'_> {
            Record {
                name: &self.name,
                generation,
                facts: Some((1, &self.facts)),
                load: Some((version, &self.load)),
                left: false,
            }
        }
    }

    fn table() -> Table {
        Table::new(facts(0, 1).node, 4)
    }

    fn rows(table: &Table) -> Vec<NodeRow> {
        let own = NodeRow {
            facts: Arc::new(facts(0, 1)),
            load: None,
        };
        let view = table.view(at(9_999), own);
        view.rows()
            .iter()
            .filter(|row| row.node() != view.this)
            .cloned()
            .collect()
    }

    #[test]
    fn the_age_counts_from_the_arrival_of_a_newer_load_only() {
        let mut table = table();
        let first = told(1, 1, 5);
        table.read(at(10), [first.record(1, 1)].into_iter());
        table.read(at(20), [first.record(1, 1)].into_iter());
        assert_eq!(
            rows(&table)[0].load.map(|(_, received)| received),
            Some(at(10))
        );
        // A new version of the value that holds no newer load changes nothing either.
        table.read(at(30), [first.record(1, 2)].into_iter());
        assert_eq!(
            rows(&table)[0].load.map(|(_, received)| received),
            Some(at(10))
        );
        table.read(at(40), [told(1, 1, 6).record(1, 3)].into_iter());
        assert_eq!(
            rows(&table)[0].load.map(|(_, received)| received),
            Some(at(40))
        );
    }

    #[test]
    fn a_new_life_replaces_the_old_one_though_both_seem_alive() {
        let mut table = table();
        let (old, new) = (told(1, 1, 900), told(1, 2, 1));
        table.read(at(0), [old.record(1, 1)].into_iter());
        table.read(at(1), [new.record(2, 1), old.record(1, 2)].into_iter());
        let rows = rows(&table);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].facts.incarnation, Incarnation(2));
        assert_eq!(rows[0].load.map(|(load, _)| load.seq), Some(1));
    }

    #[test]
    fn whoever_says_goodbye_or_is_no_longer_told_of_is_gone() {
        let mut table = table();
        let one = told(1, 1, 1);
        table.read(at(0), [one.record(1, 1)].into_iter());
        let mut goodbye = one.record(1, 1);
        goodbye.left = true;
        table.read(at(1), [goodbye].into_iter());
        assert_eq!(rows(&table), []);
        table.read(at(2), [one.record(1, 1)].into_iter());
        table.read(at(3), std::iter::empty());
        assert_eq!(rows(&table), []);
    }

    #[test]
    fn junk_is_counted_once_per_version_and_makes_no_row() {
        let mut table = table();
        let one = told(1, 1, 1);
        let junk = Record {
            facts: Some((1, "zz")),
            load: Some((1, "01ff")),
            ..one.record(1, 1)
        };
        let rejected = |read: Read| (read.facts_rejected, read.loads_rejected);
        assert_eq!(rejected(table.read(at(0), [junk].into_iter())), (1, 1));
        assert_eq!(rejected(table.read(at(1), [junk].into_iter())), (0, 0));
        assert_eq!(rows(&table), []);
        // Somebody else's facts under this name are junk as well.
        let other = told(2, 1, 1);
        let lie = Record {
            facts: Some((2, &other.facts)),
            ..one.record(1, 1)
        };
        assert_eq!(table.read(at(2), [lie].into_iter()).facts_rejected, 1);
        let nameless = Record {
            name: "not a node",
            ..one.record(1, 1)
        };
        table.read(at(3), [nameless].into_iter());
        assert_eq!(rows(&table), []);
    }

    #[test]
    fn nodes_beyond_the_limit_are_left_out_and_told() {
        let mut table = table();
        let all: Vec<Told> = (1..=6).map(|identity| told(identity, 1, 1)).collect();
        let read = table.read(at(0), all.iter().map(|told| told.record(1, 1)));
        // Three others beside this node, of four in all.
        assert_eq!(read.beyond_limit, 3);
        assert_eq!(rows(&table).len(), 3);
    }
}
