//! One request, from its arrival to its end.

use std::time::Duration;

use shoal_gossip::{Epoch, RequestId, Timestamp, Tokens};
use shoal_migrate::session::Arbiter;

use crate::dispatch::Placement;
use crate::home::Replay;
use crate::report::{Outcome, Record};
use crate::simulate::gossip;
use crate::workload::Arrival;

/// What each token looks at comes first, in two cache lines: with a thousand nodes nothing else of it is near.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Request {
    /// Its serial number is its place among all.
    pub(super) id: RequestId,
    /// Output that its home has.
    pub(super) drawn: u32,
    /// Output at which it ends. Nobody but the engine knows.
    pub(super) wanted: u32,
    /// Node that runs it, by place.
    pub(super) host: Option<usize>,
    ended: Option<Timestamp>,
    first: Option<Timestamp>,
    last: Timestamp,
    longest_gap: Duration,
    lost_kv: Option<Timestamp>,
    pub(super) prompt: Tokens,
    /// The home's core of ownership.
    pub(super) arbiter: Arbiter,
    /// While a host is looked for.
    pub(super) placement: Option<Placement>,
    /// Once it has lost a host.
    pub(super) replay: Option<Box<Replay>>,
    pub(super) arrived: Timestamp,
    failure: Option<&'static str>,
    pub(super) moves: u32,
    preemptions: u32,
    loss: Duration,
}

impl Request {
    /// One that arrives at a home.
    pub(super) fn new(serial: usize, home: usize, arrival: &Arrival) -> Self {
        let arrived = Timestamp::since_start(arrival.at);
        Self {
            id: RequestId {
                home: gossip::name_of(home),
                serial: serial as u64,
            },
            prompt: arrival.prompt,
            wanted: arrival.output.0.max(1),
            arbiter: Arbiter::new(),
            placement: None,
            host: None,
            drawn: 0,
            replay: None,
            arrived,
            first: None,
            last: arrived,
            longest_gap: Duration::ZERO,
            ended: None,
            failure: None,
            moves: 0,
            preemptions: 0,
            lost_kv: None,
            loss: Duration::ZERO,
        }
    }

    /// Its home, by place.
    pub(super) fn home(&self) -> usize {
        gossip::place_of(self.id.home).unwrap_or(0)
    }

    /// The ownership that a new host gets.
    pub(super) fn next_epoch(&self) -> Epoch {
        self.arbiter.epoch().next()
    }

    /// Whether its client has all of it, or an error.
    pub(super) fn is_over(&self) -> bool {
        self.ended.is_some()
    }

    /// The engine drew a token, which reaches the client at `at`.
    pub(super) fn token(&mut self, now: Timestamp, at: Timestamp) {
        self.drawn += 1;
        match self.first {
            None => self.first = Some(at),
            Some(_) => self.longest_gap = self.longest_gap.max(at.since(self.last)),
        }
        self.last = at;
        if let Some(lost) = self.lost_kv.take() {
            self.loss += now.since(lost);
        }
    }

    /// The engine took its KV away.
    pub(super) fn preempted(&mut self, now: Timestamp) {
        self.preemptions += 1;
        self.lost_kv.get_or_insert(now);
    }

    /// All of it is with the client.
    pub(super) fn finish(&mut self) {
        self.ended = Some(self.last);
        self.arbiter.end();
    }

    /// The client got an error.
    pub(super) fn fail(&mut self, at: Timestamp, kind: &'static str) {
        self.ended = Some(at);
        self.failure = Some(kind);
        self.arbiter.end();
    }

    /// What its client saw.
    pub(super) fn record(&self) -> Record {
        let since = |at: Timestamp| at.since(self.arrived);
        Record {
            at: self.arrived.since(Timestamp::ZERO),
            prompt: self.prompt,
            output: Tokens(self.drawn),
            outcome: match (self.failure, self.ended) {
                (None, Some(_)) => Outcome::Finished,
                (Some(kind), _) => Outcome::Failed(kind.to_owned()),
                (None, None) => Outcome::Failed("unfinished".to_owned()),
            },
            first: self.first.map(since),
            end: self.ended.map(since),
            longest_gap: self.longest_gap,
            entry: u32::try_from(self.home()).unwrap_or(u32::MAX),
            host: self.host.and_then(|host| u32::try_from(host).ok()),
            moves: self.moves,
            preemptions: self.preemptions,
            preemption_loss: self.loss,
        }
    }
}
