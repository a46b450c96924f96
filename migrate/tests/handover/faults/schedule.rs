//! One run: draws what happens and when, and sees that it happens.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shoal_gossip::{Timestamp, Tokens};
use shoal_migrate::{CopyMode, SessionLimits};

use crate::mesh::{
    Effect, Event, HomeState, Message, Mutant, Node, Request, Rules, Side, Step, World,
};

/// Nodes of a mesh, from and to.
const NODES: Range<u8> = 2..8;
/// Clients that come, from and to.
const REQUESTS: Range<u8> = 4..20;
/// Clients come, and accidents happen, until then. Longer than the longest patience of a session.
const BUSY: Duration = Duration::from_secs(14);
/// A run takes some 4,000 events; one that takes so many more does not end.
const MOST_EVENTS: u32 = 200_000;
/// Events kept for the report of a failure.
const KEPT: usize = 80;

/// What falls due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Due {
    Mesh(Event),
    /// A home places a request anew.
    Replay(Request),
    Client,
    Move,
    Accident,
}

/// How often each thing happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally(BTreeMap<String, u64>);

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        for (what, count) in &other.0 {
            *self.0.entry(what.clone()).or_default() += count;
        }
    }

    fn count(&mut self, what: &str, times: u64) {
        *self.0.entry(what.to_owned()).or_default() += times;
    }

    /// How often something happened.
    pub(crate) fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }
}

/// One run.
#[derive(Debug)]
pub(crate) struct Schedule {
    rng: StdRng,
    nodes: u8,
    rules: Rules,
    world: World,
    now: Timestamp,
    /// What falls due, by time and then in the order it was drawn.
    due: BTreeMap<(Timestamp, u64), Due>,
    drawn: u64,
    /// What is bound to happen and has its time already.
    scheduled: HashSet<Due>,
    /// Links that are cut, and until when.
    cuts: Vec<(Node, Node, Timestamp)>,
    tally: Tally,
    log: VecDeque<String>,
}

fn end_of_trouble() -> Timestamp {
    Timestamp::ZERO + BUSY
}

impl Schedule {
    pub(crate) fn new(seed: u64, mutants: &[Mutant]) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let rules = Rules {
            limits: SessionLimits {
                max_stages: 4,
                last_stage_tokens: Tokens(1),
                max_stage_tokens: Tokens(16),
                ..SessionLimits::default()
            },
            prompt: rng.random_range(1..60),
            tokens: rng.random_range(1..120),
            took: Duration::from_millis(rng.random_range(0..200)),
            slots: rng.random_range(1..4),
            quick_engines: false,
            quick_streams: false,
            mutants: mutants.to_vec(),
        };
        let nodes = rng.random_range(NODES);
        Self {
            rng,
            nodes,
            rules,
            world: World::new(nodes, &[]),
            now: Timestamp::ZERO,
            due: BTreeMap::new(),
            drawn: 0,
            scheduled: HashSet::new(),
            cuts: Vec::new(),
            tally: Tally::default(),
            log: VecDeque::new(),
        }
    }

    /// Runs to the end, or to the first thing that must not be.
    pub(crate) fn run(mut self) -> Result<Tally, String> {
        for _ in 0..self.rng.random_range(REQUESTS) {
            self.draw_due(0..8_000, Due::Client);
        }
        self.draw_due(0..200, Due::Move);
        self.draw_due(0..2_000, Due::Accident);
        let mut events = 0;
        while let Some(due) = self.next() {
            events += 1;
            if events > MOST_EVENTS {
                return Err(self.tell("it does not end"));
            }
            self.happen(due);
            if let Some(broken) = self.world.broken_invariant() {
                return Err(self.tell(broken));
            }
            self.plan();
        }
        if let Some(left) = self.world.left_over() {
            return Err(self.tell(left));
        }
        self.tally.count("events", events.into());
        self.count();
        Ok(self.tally)
    }

    fn tell(&self, broken: &str) -> String {
        let log: Vec<&str> = self.log.iter().map(String::as_str).collect();
        format!("{broken}\n{}\n{:#?}", log.join("\n"), self.world)
    }

    fn count(&mut self) {
        for home in &self.world.homes {
            let end = match home.state {
                HomeState::Finished => "requests finished",
                HomeState::Active | HomeState::Over => "requests over",
            };
            self.tally.count(end, 1);
            for pair in home.given.windows(2) {
                let (before, (owner, claimed)) = (pair[0].0, pair[1]);
                let how = match (claimed, owner == before) {
                    (true, false) => "claimed by a target",
                    (true, true) => "claimed back by a source",
                    (false, _) => "placed anew",
                };
                self.tally.count(how, 1);
            }
        }
    }

    /// What happens next, at which time. Deadlines go by the sessions' own word.
    fn next(&mut self) -> Option<Due> {
        let first = self.due.first_key_value().map(|(&key, &due)| (key, due));
        let deadline = self.next_deadline();
        match (first, deadline) {
            (None, None) => None,
            (Some(((at, drawn), due)), ticks) if ticks.is_none_or(|(tick, _)| at < tick) => {
                self.due.remove(&(at, drawn));
                self.scheduled.remove(&due);
                self.now = at;
                Some(due)
            }
            (_, Some((tick, event))) => {
                self.now = self.now.max(tick);
                Some(Due::Mesh(event))
            }
            (Some(_), None) => None,
        }
    }

    fn next_deadline(&self) -> Option<(Timestamp, Event)> {
        let mut events = Vec::new();
        self.world.bound_to_happen(&self.rules, &mut events);
        events
            .into_iter()
            .filter_map(|event| {
                let Event::Tick(side, at, request) = event else {
                    return None;
                };
                let deadline = match side {
                    Side::Source => {
                        let index = self.world.source_at(at, request)?;
                        self.world.sources[index].session.deadline()
                    }
                    Side::Target => {
                        let index = self.world.target_at(at, request)?;
                        self.world.targets[index].session.deadline()
                    }
                };
                Some((deadline?, event))
            })
            .min_by_key(|&(deadline, _)| deadline)
    }

    /// Gives a time to whatever is bound to happen and has none.
    fn plan(&mut self) {
        let mut events = Vec::new();
        self.world.bound_to_happen(&self.rules, &mut events);
        for event in events {
            let (due, millis) = match event {
                Event::Tick(..) => continue,
                Event::Replay(request, _) => (Due::Replay(request), 1..3_000),
                Event::Draw(_) => (Due::Mesh(event), 5..60),
                Event::Read(_) => (Due::Mesh(event), 0..20),
                Event::Engine(..) => (Due::Mesh(event), 0..80),
                Event::Open(_) => (Due::Mesh(event), 0..100),
                Event::Unwanted(_) => (Due::Mesh(event), 0..4_000),
                _ => (Due::Mesh(event), 0..10),
            };
            if self.scheduled.insert(due) {
                self.draw_due(millis, due);
            }
        }
    }

    fn draw_due(&mut self, millis: Range<u64>, due: Due) {
        let delay = Duration::from_millis(self.rng.random_range(millis));
        self.add_due(delay, due);
    }

    fn add_due(&mut self, delay: Duration, due: Due) {
        self.drawn += 1;
        self.due.insert((self.now + delay, self.drawn), due);
    }

    fn happen(&mut self, due: Due) {
        if self.log.len() == KEPT {
            self.log.pop_front();
        }
        self.log.push_back(format!("{} {due:?}", self.now));
        match due {
            Due::Mesh(event) => self.mesh(event),
            Due::Replay(request) => self.replay(request),
            Due::Client => self.client(),
            Due::Move => self.begin_move(),
            Due::Accident => self.accident(),
        }
    }

    fn mesh(&mut self, event: Event) {
        if self.is_stalled(event) {
            let delay = Duration::from_millis(50);
            self.scheduled.insert(Due::Mesh(event));
            self.add_due(delay, Due::Mesh(event));
            return;
        }
        let mut effects = Vec::new();
        Step {
            world: &mut self.world,
            rules: &self.rules,
            now: self.now,
            effects: &mut effects,
        }
        .happen(event);
        for effect in effects {
            match effect {
                Effect::Send(message) => self.send(message),
                Effect::Ended(side, how, why) => {
                    self.tally.count(format!("{side:?} {how} {why}").trim(), 1);
                }
                Effect::Work(..) => {}
            }
        }
    }

    /// Whether a connection cannot go on now, because the link is cut. It goes on, or breaks by another event.
    fn is_stalled(&self, event: Event) -> bool {
        let (Event::Read(request) | Event::Open(request)) = event else {
            return false;
        };
        let home = self.world.home(request);
        home.holder()
            .is_some_and(|holder| self.is_cut(home.at, holder))
    }

    fn is_cut(&self, one: Node, other: Node) -> bool {
        let link = (one.min(other), one.max(other));
        let mut cuts = self.cuts.iter();
        cuts.any(|&(a, b, until)| (a, b) == link && self.now < until)
    }

    fn send(&mut self, message: Message) {
        // All is drawn before anything is decided, so that a cut link does not shift what comes after.
        let lost = self.rng.random_bool(0.05);
        let doubled = self.rng.random_bool(0.05);
        let (first, second) = (self.delay(), self.delay());
        let (from, to) = match message {
            Message::Move(id, body) if body.is_for_target() => (id.source, id.target),
            Message::Move(id, _) => (id.target, id.source),
            Message::Claim { by, request, .. } => (by, self.world.home(request).at),
            Message::Answer { to, request, .. } => (self.world.home(request).at, to),
        };
        if lost || self.is_cut(from, to) {
            self.tally.count("messages lost", 1);
            return;
        }
        self.add_due(first, Due::Mesh(Event::Deliver(message)));
        if doubled {
            self.tally.count("messages doubled", 1);
            self.add_due(second, Due::Mesh(Event::Deliver(message)));
        }
    }

    /// Mostly short; some messages take as long as a session is patient.
    fn delay(&mut self) -> Duration {
        let kind = self.rng.random_range(0..100u8);
        let most = match kind {
            0..80 => 5,
            80..96 => 300,
            _ => 12_000,
        };
        Duration::from_millis(self.rng.random_range(0..most))
    }

    fn any_node(&mut self) -> Node {
        Node(self.rng.random_range(0..self.nodes))
    }

    fn is_up(&self, node: Node) -> bool {
        self.world.up[usize::from(node.0)]
    }

    fn client(&mut self) {
        let (home, host) = (self.any_node(), self.any_node());
        if self.is_up(home) && self.is_up(host) {
            self.world.begin(home, host);
        }
    }

    fn replay(&mut self, request: Request) {
        let to = self.any_node();
        let home = self.world.home(request).at;
        if self.is_up(to) && !self.is_cut(home, to) {
            self.mesh(Event::Replay(request, to));
        }
    }

    fn begin_move(&mut self) {
        if self.now < end_of_trouble() {
            self.draw_due(1..120, Due::Move);
        }
        let to = self.any_node();
        let waiting = self.rng.random_bool(0.2);
        let pick = self.rng.random_range(0..=u32::MAX);
        // The count of attempts names them: it must not run out.
        let jobs = self.world.jobs.iter().filter(|job| {
            job.running && self.world.moves[usize::from(job.key.request.0)] < u8::MAX - 1
        });
        let keys: Vec<_> = jobs.map(|job| job.key).collect();
        let Some(&key) = keys.get(pick as usize % keys.len().max(1)) else {
            return;
        };
        let mode = if waiting {
            CopyMode::Waiting
        } else {
            CopyMode::Kv
        };
        self.mesh(Event::Begin(key, to, mode));
    }

    fn accident(&mut self) {
        if self.now < end_of_trouble() {
            self.draw_due(1..700, Due::Accident);
        }
        let kind = self.rng.random_range(0..10u8);
        let node = self.any_node();
        let pick = self.rng.random_range(0..=u32::MAX) as usize;
        match kind {
            0 => self.death(node),
            1..=3 => self.parting(node),
            4..=6 => {
                if let Some(event) = self.session_accident(pick) {
                    self.tally.count("other accidents", 1);
                    self.mesh(event);
                }
            }
            _ => {
                if let Some(event) = self.request_accident(kind, pick) {
                    self.tally.count("other accidents", 1);
                    self.mesh(event);
                }
            }
        }
    }

    fn death(&mut self, node: Node) {
        if !self.is_up(node) {
            return;
        }
        self.tally.count("deaths", 1);
        self.mesh(Event::Crash(node));
        self.draw_due(1..4_000, Due::Mesh(Event::Restart(node)));
        // The state plane takes its time to say so, and says so to a part of the others.
        let sources = self.world.sources.iter();
        let told = sources
            .filter(|source| source.id.target == node)
            .map(|source| Event::Down(Side::Source, source.at, source.id.request));
        let targets = self.world.targets.iter();
        let told = told.chain(
            targets
                .filter(|target| target.id.source == node)
                .map(|target| Event::Down(Side::Target, target.id.target, target.id.request)),
        );
        for event in told.collect::<Vec<_>>() {
            self.draw_due(0..4_000, Due::Mesh(event));
        }
    }

    fn parting(&mut self, one: Node) {
        let other = self.any_node();
        let whole = self.rng.random_bool(0.3);
        let lasts = Duration::from_millis(self.rng.random_range(10..11_000));
        let until = self.now + lasts;
        self.tally.count("partings", 1);
        for node in (0..self.nodes).map(Node) {
            if node != one && (whole || node == other) {
                self.cuts.push((one.min(node), one.max(node), until));
            }
        }
    }

    /// Something that befalls a session: a death that was none, an order to stop, an engine that fails.
    fn session_accident(&self, pick: usize) -> Option<Event> {
        let sources = self.world.sources.iter().flat_map(|source| {
            let (at, request) = (source.at, source.id.request);
            [
                Event::Down(Side::Source, at, request),
                Event::Stop(Side::Source, at, request),
            ]
        });
        let targets = self.world.targets.iter().flat_map(|target| {
            let (at, request) = (target.id.target, target.id.request);
            [
                Event::Down(Side::Target, at, request),
                Event::Stop(Side::Target, at, request),
                Event::EngineFails(Side::Target, at, request),
            ]
        });
        let events: Vec<Event> = sources.chain(targets).collect();
        events.get(pick % events.len().max(1)).copied()
    }

    /// Something that befalls a request: a broken stream, a client that leaves, a preemption.
    fn request_accident(&self, kind: u8, pick: usize) -> Option<Event> {
        let requests = self.world.homes.len();
        let number = pick.checked_rem(requests)?;
        let request = Request(u8::try_from(number).ok()?);
        match kind {
            7 => Some(Event::Break(request)),
            8 => (pick & 1 << 20 == 0).then_some(Event::Abort(request)),
            _ => {
                let jobs = &self.world.jobs;
                Some(Event::Preempt(jobs.get(pick.checked_rem(jobs.len())?)?.key))
            }
        }
    }
}
