//! The mesh and its time: nodes, requests and what is going to happen.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shoal_gossip::{LoadSummary, Timestamp, Tokens};

use crate::dispatch::{Placement, World};
use crate::engine::batched::Drawn;
use crate::engine::sim::SimConfig;
use crate::home::HomeSettings;
use crate::host::HostSettings;
use crate::moves::MoveSettings;
use crate::node::settings;
use crate::report::{FleetSample, HerdMeter, Series, stuck_blocks};
use crate::simulate::agenda::Agenda;
use crate::simulate::event::Event;
use crate::simulate::gossip::Words;
use crate::simulate::hand_over::HandOver;
use crate::simulate::node::Node;
use crate::simulate::request::Request;
use crate::simulate::{Plan, Run, Scheduling, SimulateError};
use crate::workload::Arrival;

/// The model that every node serves.
pub(super) const MODEL: &str = "simulated";

/// Virtual time after the last arrival at which whatever still runs is given up.
const PATIENCE: Duration = Duration::from_hours(24);

/// Virtual time between two samples of the state, until there are too many of them.
const SAMPLE_EVERY: Duration = Duration::from_millis(250);

/// Events between two looks of the watcher.
const WATCH_EVERY: u64 = 1_000;

/// Parts of a node's settings that the cores are given.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) host: HostSettings,
    pub(super) home: HomeSettings,
    pub(super) moves: MoveSettings,
    pub(super) look_every: Option<Duration>,
}

/// Counters of a run.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) events: u64,
    pub(super) redirects: u64,
    pub(super) begun: u64,
    pub(super) moved: u64,
    pub(super) replays: u64,
}

pub(super) struct Mesh<'a, A> {
    pub(super) plan: &'a Plan,
    pub(super) settings: Settings,
    pub(super) now: Timestamp,
    pub(super) agenda: Agenda<Event>,
    pub(super) nodes: Vec<Node>,
    pub(super) words: Words,
    pub(super) requests: Vec<Request>,
    pub(super) hand_overs: BTreeMap<u64, HandOver>,
    pub(super) attempts: u64,
    pub(super) counts: Counts,
    pub(super) rng: StdRng,
    series: Series,
    herd: HerdMeter,
    arrivals: A,
    /// No request comes any more.
    drained: bool,
    /// Requests that are not over.
    open: usize,
    last_end: Timestamp,
}

impl<'a, A: Iterator<Item = Arrival>> Mesh<'a, A> {
    pub(super) fn new(plan: &'a Plan, arrivals: A) -> Result<Self, SimulateError> {
        let policy = plan.scheduling.policy().unwrap_or_default();
        let limits = settings::reschedule_limits(&plan.node);
        let mut nodes = Vec::with_capacity(plan.nodes.len());
        let mut facts = Vec::with_capacity(plan.nodes.len());
        for (place, profile) in plan.nodes.iter().enumerate() {
            let config = SimConfig {
                model: Some(MODEL.to_owned()),
                queue_limit: plan.queue_limit,
                context: plan.context,
                ..SimConfig::new(profile.name.clone())
            };
            let node = Node::new(place, profile, &config, (policy, limits), plan.seed)?;
            facts.push(node.facts(&config, profile));
            nodes.push(node);
        }
        let mut mesh = Self {
            plan,
            settings: Settings {
                host: settings::host_settings(&plan.node),
                home: settings::home_settings(&plan.node),
                moves: settings::move_settings(&plan.node),
                look_every: plan.node.moves.interval,
            },
            now: Timestamp::ZERO,
            agenda: Agenda::new(),
            nodes,
            words: Words::new(plan.gossip, plan.seed, facts),
            requests: Vec::new(),
            hand_overs: BTreeMap::new(),
            attempts: 0,
            counts: Counts::default(),
            rng: StdRng::seed_from_u64(plan.seed),
            series: Series::new(
                SAMPLE_EVERY,
                u32::try_from(plan.nodes.len()).unwrap_or(u32::MAX),
            ),
            herd: HerdMeter::default(),
            arrivals,
            drained: false,
            open: 0,
            last_end: Timestamp::ZERO,
        };
        mesh.begin();
        Ok(mesh)
    }

    /// Enters what happens again and again, each node at a phase of its own.
    fn begin(&mut self) {
        let interval = self.plan.gossip.interval;
        for place in 0..self.nodes.len() {
            let load = self.nodes[place].load();
            self.words.say(place, self.now, load);
            if !interval.is_zero() {
                let phase = interval.mul_f64(self.rng.random::<f64>());
                self.agenda.enter(self.now + phase, Event::Publish(place));
            }
            if let (Scheduling::Shoal, Some(every)) =
                (self.plan.scheduling, self.settings.look_every)
            {
                let phase = every.mul_f64(self.rng.random::<f64>());
                self.agenda.enter(self.now + phase, Event::Look(place));
            }
        }
        if let (Scheduling::Llumnix, Some(every)) = (self.plan.scheduling, self.settings.look_every)
        {
            self.agenda.enter(self.now + every, Event::Pair);
        }
        self.begin_faults();
        self.agenda.enter(self.now, Event::Sample);
        self.next_arrival();
    }

    fn next_arrival(&mut self) {
        match self.arrivals.next() {
            Some(arrival) => {
                let at = Timestamp::since_start(arrival.at).max(self.now);
                self.agenda.enter(at, Event::Arrival(arrival));
            }
            None => self.drained = true,
        }
    }

    pub(super) fn run(mut self, mut watch: impl FnMut(usize)) -> Run {
        let mut last_arrival = self.now;
        while !self.drained || self.open > 0 {
            let Some((at, event)) = self.agenda.next() else {
                break;
            };
            self.now = at;
            self.counts.events += 1;
            if self.counts.events.is_multiple_of(WATCH_EVERY) {
                watch(self.requests.len() - self.open);
            }
            if matches!(event, Event::Arrival(_)) {
                last_arrival = at;
            }
            if self.drained && self.now.since(last_arrival) > PATIENCE {
                break;
            }
            self.handle(event);
        }
        Run {
            records: self.requests.iter().map(Request::record).collect(),
            series: self.series,
            herding: self.herd.finish(),
            span: self.last_end.since(Timestamp::ZERO),
            events: self.counts.events,
            redirects: self.counts.redirects,
            moves: (self.counts.begun, self.counts.moved),
            replays: self.counts.replays,
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival(arrival) => {
                self.arrive(&arrival);
                self.next_arrival();
            }
            Event::Publish(node) => {
                if self.nodes[node].alive {
                    let load = self.nodes[node].load();
                    self.words.say(node, self.now, load);
                }
                let known = self.settings.host.max_view_age;
                let long_ago = self.now.since(Timestamp::since_start(known));
                self.nodes[node]
                    .corrections
                    .forget_before(Timestamp::since_start(long_ago));
                self.agenda
                    .enter(self.now + self.plan.gossip.interval, Event::Publish(node));
            }
            Event::Look(node) => {
                self.look(node);
                if let Some(every) = self.settings.look_every {
                    self.agenda.enter(self.now + every, Event::Look(node));
                }
            }
            Event::Sample => self.sample(),
            Event::Pair => {
                self.pair();
                if let Some(every) = self.settings.look_every {
                    self.agenda.enter(self.now + every, Event::Pair);
                }
            }
            Event::StepEnd(node) => self.end_step(node),
            Event::Wake(node) => {
                self.nodes[node].wakes = None;
                self.kick(node);
            }
            Event::Offer { request, at, hops } => self.offered(request, at, hops),
            Event::Probe { request, by, asked } => self.probe(request, by, asked),
            Event::Probed { request, by, asked } => self.probed(request, by, &asked),
            Event::Answer {
                request,
                answer,
                load,
            } => self.answered(request, &answer, load),
            Event::Submit {
                request,
                to,
                reservation,
            } => self.submitted(request, to, reservation),
            Event::Refused { request, from } => self.refused(request, from),
            Event::HandOver { id, word } => self.hand_over_word(id, word),
            Event::Fault(place) => self.fault(place),
            Event::Arrives { from, to, event } => match self.reaches(from, to) {
                true => self.handle(*event),
                false => self.undelivered(*event),
            },
            Event::NoAnswer { request } => self.no_answer(request),
            Event::NoStart { request, to } => self.no_start(request, to),
            Event::Again { request } => self.again(request),
            Event::Silence {
                request,
                host,
                life,
            } => self.silence(request, host, life),
        }
    }

    fn arrive(&mut self, arrival: &Arrival) {
        let drawn = self.rng.random_range(0..self.plan.entries);
        // Clients leave out entries that do not answer; when none does, they ask in vain.
        let turns = (drawn..self.plan.entries).chain(0..drawn);
        let mut alive = turns.filter(|entry| self.nodes[*entry].alive);
        let home = alive.next().unwrap_or(drawn);
        let serial = self.requests.len();
        self.requests.push(Request::new(serial, home, arrival));
        self.open += 1;
        if !self.nodes[home].alive {
            return self.over(serial, Some("no entry"));
        }
        if self.plan.scheduling.policy().is_some() {
            self.place(serial, BTreeSet::new());
        } else {
            self.place_centrally(serial);
        }
    }

    fn sample(&mut self) {
        let loads: Vec<LoadSummary> = self.nodes.iter_mut().map(Node::load).collect();
        if !self.drained {
            let alive = self.nodes.iter().zip(&loads).filter(|(node, _)| node.alive);
            let in_flight = alive.map(|(_, load)| load.running.saturating_add(load.queued));
            self.herd.sample(&in_flight.collect::<Vec<u32>>());
        }
        let fleet = fleet_sample(&loads);
        self.series.push(fleet, |node| {
            loads
                .get(node as usize)
                .map_or((0.0, 0), |load| (used_share(load), load.queued))
        });
        let due = Timestamp::since_start(self.series.due());
        self.agenda.enter(due.max(self.now), Event::Sample);
    }

    /// Ends a request for its client.
    pub(super) fn over(&mut self, request: usize, failure: Option<&'static str>) {
        let at = self.now;
        let Some(request) = self.requests.get_mut(request).filter(|it| !it.is_over()) else {
            return;
        };
        match failure {
            None => request.finish(),
            Some(kind) => request.fail(at, kind),
        }
        self.open -= 1;
        self.last_end = self.last_end.max(at);
    }

    /// One way between two nodes.
    pub(super) fn latency(&self, from: usize, to: usize) -> Duration {
        if from == to {
            Duration::ZERO
        } else {
            self.plan.network.latency
        }
    }

    /// Has something happen at `to` that `from` sends now.
    pub(super) fn send(&mut self, (from, to): (usize, usize), event: Event) {
        let at = self.now + self.latency(from, to);
        self.deliver(at, (from, to), event);
    }

    /// Has something that `from` sent happen at `to` at a later time, if it comes through.
    pub(super) fn deliver(&mut self, at: Timestamp, (from, to): (usize, usize), event: Event) {
        let event = match self.plan.faults.is_empty() {
            true => event,
            false => Event::Arrives {
                from,
                to,
                event: Box::new(event),
            },
        };
        self.agenda.enter(at, event);
    }

    /// Lends a node's knowledge to a core.
    pub(super) fn decide<T>(&mut self, at: usize, act: impl FnOnce(&mut World<'_>) -> T) -> T {
        if self.plan.gossip.interval.is_zero() {
            for place in 0..self.nodes.len() {
                let load = self.nodes[place].load();
                self.words.say(place, self.now, load);
            }
        }
        let own = self.nodes[at].load();
        let view = self.words.as_seen_by(at, self.now);
        let node = &mut self.nodes[at];
        node.corrections.hear(node.id, own, self.now);
        act(&mut World {
            this: node.id,
            now: self.now,
            view: &view,
            corrections: &mut node.corrections,
            policy: &mut node.policy,
            rng: &mut node.rng,
        })
    }

    /// Advances a request's placement.
    pub(super) fn advance(
        &mut self,
        request: usize,
        act: impl FnOnce(&mut Placement, &mut World<'_>) -> crate::dispatch::Step,
    ) {
        let home = self.requests[request].home();
        let Some(mut placement) = self.requests[request].placement.take() else {
            return;
        };
        if self.requests[request].is_over() {
            return;
        }
        let step = self.decide(home, |world| act(&mut placement, world));
        self.requests[request].placement = Some(placement);
        self.step(request, step);
    }

    /// Lets an engine go on: acts first, then the next step.
    pub(super) fn kick(&mut self, node: usize) {
        if self.nodes[node].is_stepping() || !self.nodes[node].alive {
            return;
        }
        for act in std::mem::take(&mut self.nodes[node].acts) {
            self.act(node, act);
        }
        let (took, preempted) = self.nodes[node].begin_step(self.now);
        for key in preempted {
            if let Some(request) = self.nodes[node].here.get(&key) {
                self.requests[*request].preempted(self.now);
            }
        }
        let Some(took) = took else {
            self.rest(node);
            return;
        };
        self.agenda.enter(self.now + took, Event::StepEnd(node));
    }

    /// An idle engine looks again when a promise ends.
    fn rest(&mut self, node: usize) {
        let idle = &mut self.nodes[node];
        if let Some(deadline) = idle.batcher.deadline()
            && idle.wakes.is_none_or(|wakes| deadline < wakes)
        {
            idle.wakes = Some(deadline);
            self.agenda.enter(deadline.max(self.now), Event::Wake(node));
        }
    }

    fn end_step(&mut self, node: usize) {
        let drawn = self.nodes[node].end_step(self.now);
        // In a large mesh no record is in a cache. Looked at one by one, each would be waited for; this fetches all at once.
        let records = drawn
            .iter()
            .map(|it| self.requests[it.request.serial as usize].drawn);
        std::hint::black_box(records.fold(0, u32::wrapping_add));
        for drawn in drawn {
            self.drawn(node, drawn);
        }
        self.kick(node);
    }

    fn drawn(&mut self, node: usize, drawn: Drawn) {
        let request = drawn.request.serial as usize;
        if drawn.last {
            self.nodes[node].remove(drawn.key);
        }
        let it = &self.requests[request];
        // A copy whose home has given it up goes on until it hears of that.
        if it.host == Some(node) && !it.is_over() && self.reaches(node, it.home()) {
            self.received(request, node, drawn.index + 1);
            if drawn.last {
                self.over(request, None);
            }
        }
    }

    /// Tokens of a host come to the home, up to this one: what was held up on the way comes with it.
    pub(super) fn received(&mut self, request: usize, host: usize, up_to: u32) {
        let reaches = self.now + self.latency(host, self.requests[request].home());
        while self.requests[request].drawn < up_to {
            self.requests[request].token(self.now, reaches);
        }
    }

    /// KV blocks that a request needs to start at a node.
    pub(super) fn demand(&self, request: usize, at: usize) -> shoal_gossip::Blocks {
        let block_size = self.words.facts(at).block_size;
        crate::engine::starting_demand(block_size, self.requests[request].prompt, Tokens::ZERO)
    }
}

fn used_share(load: &LoadSummary) -> f32 {
    // Blocks are far below 2^24, where floats stop being exact.
    load.used.0 as f32 / load.total.0.max(1) as f32
}

fn fleet_sample(loads: &[LoadSummary]) -> FleetSample {
    let shares = loads.iter().map(used_share);
    FleetSample {
        used_mean: shares.clone().sum::<f32>() / loads.len().max(1) as f32,
        used_max: shares.fold(0.0, f32::max),
        queued: loads.iter().map(|load| load.queued).sum(),
        running: loads.iter().map(|load| load.running).sum(),
        free_blocks: loads.iter().map(|load| u64::from(load.free().0)).sum(),
        stuck_blocks: stuck_blocks(loads.iter().map(|load| {
            let head = (load.queued > 0).then(|| u64::from(load.head_of_line.0));
            (u64::from(load.free().0), head)
        })),
    }
}
