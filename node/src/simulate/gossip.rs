//! What nodes know of each other: loads as gossip has brought them by now.
//!
//! Every node publishes its load once an interval, at its own phase. Each of these words reaches each other node
//! after a delay of its own, drawn from what was measured of chitchat, so that no two nodes see the mesh alike and none
//! sees it as it is. Nothing is stored by reader: what has come through is worked out when a row is looked at.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{LoadSummary, NodeFacts, NodeId, Timestamp};

use crate::dispatch::{Seen, Sight};
use crate::engine::sim::mix;

/// Time from a node's word to its arrival at one other, in thousandths of an interval, at each tenth of the
/// distribution. Measured between 64 nodes at 250 ms: median 174 ms, 99 % within 402 ms, the last node within 441 ms
/// (`docs/simulator.md`); between those points it is drawn straight.
const DELAY_PERMILLE: [u64; 11] = [60, 230, 350, 470, 580, 696, 820, 960, 1130, 1370, 1760];

/// Lost words in a row at most: that many intervals later the next round has long come.
const MOST_LOST: u64 = 32;

/// Intervals without a word after which a node is dead to whoever waits for it: what chitchat's failure detector (phi 8) takes
/// at the intervals that were measured.
pub(super) const DEAD_AFTER: u32 = 7;

/// A time in which the first so many nodes and the others did not hear each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) nodes: usize,
    pub(super) from: Timestamp,
    pub(super) until: Option<Timestamp>,
}

impl Cut {
    fn separates(&self, one: usize, other: usize) -> bool {
        (one < self.nodes) != (other < self.nodes)
    }

    /// Whether a word that was on its way in this time was lost.
    fn lost(&self, said: Timestamp, arrival: Timestamp) -> bool {
        arrival >= self.from && self.until.is_none_or(|until| said < until)
    }
}

/// How words travel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GossipModel {
    /// Time between two words of a node. Zero: everybody sees everything as it is.
    pub interval: Duration,
    /// Time that every word takes in addition.
    pub extra: Duration,
    /// Share of words that are lost on the way; the next round brings them.
    pub loss: f64,
}

#[derive(Clone, Copy, Debug)]
struct Word {
    round: u64,
    at: Timestamp,
    load: LoadSummary,
}

#[derive(Debug)]
struct Speaker {
    facts: Arc<NodeFacts>,
    words: VecDeque<Word>,
}

/// All words that may still be the newest for somebody.
#[derive(Debug)]
pub(super) struct Words {
    model: GossipModel,
    seed: u64,
    kept: usize,
    speakers: Vec<Speaker>,
    /// In order of time; only the last may go on.
    pub(super) cuts: Vec<Cut>,
}

impl Words {
    /// Nobody has spoken yet. Nodes are in the order of their names, which begin at one.
    pub(super) fn new(model: GossipModel, seed: u64, facts: Vec<Arc<NodeFacts>>) -> Self {
        // As old as the newest word that has come through can be, and one more.
        let longest = model.extra + model.interval * 2;
        let rounds = longest.as_nanos().checked_div(model.interval.as_nanos());
        let rounds = usize::try_from(rounds.unwrap_or(0)).unwrap_or(usize::MAX);
        let lost = if model.loss > 0.0 {
            MOST_LOST as usize
        } else {
            0
        };
        let speakers = facts.into_iter().map(|facts| Speaker {
            facts,
            words: VecDeque::new(),
        });
        Self {
            model,
            seed,
            kept: (rounds + lost + 2).min(4096),
            speakers: speakers.collect(),
            cuts: Vec::new(),
        }
    }

    pub(super) fn facts(&self, node: usize) -> &Arc<NodeFacts> {
        &self.speakers[node].facts
    }

    /// A node says its load.
    pub(super) fn say(&mut self, node: usize, now: Timestamp, load: LoadSummary) {
        let words = &mut self.speakers[node].words;
        let round = words.back().map_or(0, |last| last.round + 1);
        if words.len() >= self.kept {
            words.pop_front();
        }
        words.push_back(Word {
            round,
            at: now,
            load,
        });
    }

    /// The mesh as `reader` sees it.
    pub(super) fn as_seen_by(&self, reader: usize, now: Timestamp) -> View<'_> {
        View {
            words: self,
            reader,
            now,
        }
    }

    /// How long a word takes to one reader.
    fn delay(&self, reader: usize, speaker: usize, round: u64) -> Duration {
        if reader == speaker || self.model.interval.is_zero() {
            return Duration::ZERO;
        }
        let mut bits = mix(self.seed ^ mix(reader as u64 ^ mix(speaker as u64 ^ mix(round))));
        let mut lost = 0;
        while lost < MOST_LOST && unit(bits) < self.model.loss {
            bits = mix(bits);
            lost += 1;
        }
        let permille = at_share(mix(bits ^ 1)) + 1000 * lost;
        let nanos = self.model.interval.as_nanos() * u128::from(permille) / 1000;
        self.model.extra + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Whether packets go from one node to the other.
    pub(super) fn connected(&self, one: usize, other: usize, now: Timestamp) -> bool {
        let cuts = self.cuts.iter().filter(|cut| cut.separates(one, other));
        !cuts.into_iter().any(|cut| cut.lost(now, now))
    }

    /// What one node knows of another; nothing when it takes it for dead.
    fn seen(&self, reader: usize, place: usize, now: Timestamp) -> Option<Seen<'_>> {
        let speaker = self.speakers.get(place)?;
        let newest = speaker.words.iter().rev().find_map(|word| {
            let arrived = word.at + self.delay(reader, place, word.round);
            let mut cuts = self.cuts.iter().filter(|cut| cut.separates(reader, place));
            let lost = cuts.any(|cut| cut.lost(word.at, arrived));
            (arrived <= now && !lost).then_some((word.load, arrived))
        });
        let patience = self.model.interval * DEAD_AFTER;
        if newest.is_some_and(|(_, arrived)| !patience.is_zero() && now.since(arrived) > patience) {
            return None;
        }
        Some(Seen {
            facts: &speaker.facts,
            load: newest,
        })
    }
}

/// What has come through to one node.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    words: &'a Words,
    reader: usize,
    now: Timestamp,
}

impl Sight for View<'_> {
    fn count(&self) -> usize {
        self.words.speakers.len()
    }

    fn at(&self, place: usize) -> Option<Seen<'_>> {
        self.words.seen(self.reader, place, self.now)
    }

    fn of(&self, node: NodeId) -> Option<Seen<'_>> {
        self.at(place_of(node)?)
    }
}

/// A node's name, from its place.
pub(super) fn name_of(place: usize) -> NodeId {
    NodeId(place as u64 + 1)
}

/// A node's place, from its name.
pub(super) fn place_of(node: NodeId) -> Option<usize> {
    usize::try_from(node.0.checked_sub(1)?).ok()
}

/// The measured distribution, in thousandths of an interval, at a share given by random bits.
fn at_share(bits: u64) -> u64 {
    let tenths = (DELAY_PERMILLE.len() - 1) as u64;
    let scaled = (bits >> 32) * tenths;
    let at = (scaled >> 32) as usize;
    let part = scaled & 0xffff_ffff;
    let (low, high) = (DELAY_PERMILLE[at], DELAY_PERMILLE[at + 1]);
    low + (((high - low) * part) >> 32)
}

/// A number from 0 to 1, from random bits.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::testing;

    fn words(model: GossipModel, nodes: u64) -> Words {
        let facts = (1..=nodes).map(|node| Arc::new(testing::facts(node)));
        Words::new(model, 3, facts.collect())
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp::since_start(Duration::from_millis(ms))
    }

    fn model(interval: u64, extra: u64, loss: f64) -> GossipModel {
        GossipModel {
            interval: Duration::from_millis(interval),
            extra: Duration::from_millis(extra),
            loss,
        }
    }

    /// How old the newest word is that reaches each of many readers, in milliseconds, sorted.
    fn delays(model: GossipModel) -> Vec<u64> {
        let readers = 2_000;
        let words = words(model, readers);
        let mut delays: Vec<u64> = (1..readers as usize)
            .map(|reader| words.delay(reader, 0, 5).as_millis() as u64)
            .collect();
        delays.sort_unstable();
        delays
    }

    #[test]
    fn words_take_as_long_as_was_measured() {
        let delays = delays(model(250, 0, 0.0));
        let share = |percent: usize| delays[delays.len() * percent / 100];
        // 174 and 402 ms between 64 nodes at 250 ms.
        assert!((160..190).contains(&share(50)), "{}", share(50));
        assert!((380..440).contains(&share(99)), "{}", share(99));
        assert!(delays[0] >= 15 && *delays.last().unwrap() <= 440);
    }

    #[test]
    fn a_lost_word_comes_with_a_later_round() {
        let (all, some) = (delays(model(250, 0, 0.0)), delays(model(250, 0, 0.2)));
        let late = |delays: &[u64]| delays.iter().filter(|delay| **delay > 440).count();
        assert_eq!(late(&all), 0);
        let share = late(&some) as f64 / some.len() as f64;
        assert!((0.1..0.2).contains(&share), "{share}");
    }

    #[test]
    fn a_reader_sees_the_newest_word_that_has_come_through_and_itself_at_once() {
        let mut words = words(model(100, 1_000, 0.0), 2);
        for round in 0..40 {
            let load = testing::load(round, 1, 0);
            words.say(0, at(u64::from(round) * 100), load);
        }
        let seen = |words: &Words, reader, now| {
            let view = words.as_seen_by(reader, at(now));
            view.of(NodeId(1))
                .expect("in the view")
                .load
                .map(|(load, _)| load.used.0)
        };
        assert_eq!(seen(&words, 0, 3_900), Some(39));
        assert_eq!(seen(&words, 1, 900), None, "nothing has come through");
        let used = seen(&words, 1, 3_900).expect("something has");
        assert!((27..=29).contains(&used), "{used}");
        let view = words.as_seen_by(1, at(3_900));
        let (load, came) = view.at(0).expect("in the view").load.expect("heard");
        let said = at(u64::from(load.used.0) * 100);
        assert!(came.since(said) >= Duration::from_secs(1) && came <= at(3_900));
        assert!(view.at(2).is_none() && view.of(NodeId(0)).is_none());
    }
}
