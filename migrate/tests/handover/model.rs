//! Every interleaving of a small mesh.
//!
//! The network loses, doubles and reorders: whatever was ever sent may arrive at any time, any number of times,
//! or never. Time has no length: any deadline may come at any time, and where nothing else can happen it does. An
//! accident is the death of a node, a broken stream, a client that leaves, an engine that fails, a preemption, or a
//! move that is stopped; there is a bound on how many happen in one run.
//!
//! What this cannot show: anything about more requests, moves, tokens or accidents than the bounds allow (the fault
//! schedules have more of each), and anything about the shells of the real node.

mod mutants;

use std::time::Duration;

use shoal_gossip::{Clock, MonotonicClock, Timestamp, Tokens};
use shoal_migrate::{CopyMode, SessionLimits};
use stateright::{Checker, CheckerBuilder, HasDiscoveries, Model, Path, Property};

use crate::mesh::{
    Body, Effect, Event, HomeState, Message, Mutant, Node, Request, Rules, Side, Step, World,
};

/// How much may happen in one run.
#[derive(Clone, Debug)]
struct Bounds {
    /// Home and first host of each request.
    requests: Vec<(u8, u8)>,
    nodes: u8,
    tokens: u16,
    /// Moves of each request.
    moves: u8,
    accidents: u8,
    /// Whether all accidents are deaths of nodes.
    only_deaths: bool,
    /// Whether engines and streams take their time.
    slow: bool,
    /// Nodes that requests move to.
    targets: Vec<u8>,
    /// Claims that a session sends before it gives up.
    claims: u32,
    mode: CopyMode,
}

impl Bounds {
    /// One request, which any node may take over.
    fn one() -> Self {
        Self {
            requests: vec![(2, 0)],
            nodes: 3,
            tokens: 2,
            moves: 1,
            targets: vec![0, 1, 2],
            accidents: 1,
            only_deaths: false,
            slow: false,
            claims: 1,
            mode: CopyMode::Kv,
        }
    }

    /// Two requests, each at the node the other wants to go to. One of these nodes is the home of the other request.
    fn two() -> Self {
        Self {
            requests: vec![(2, 0), (0, 1)],
            tokens: 1,
            targets: vec![0, 1],
            accidents: 0,
            ..Self::one()
        }
    }
}

/// The mesh as the checker sees it.
#[derive(Clone, Debug)]
struct SmallMesh {
    bounds: Bounds,
    rules: Rules,
}

/// All that can differ.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    world: World,
    /// What was ever sent and can still matter, in order.
    sent: Vec<Message>,
    accidents: u8,
}

impl SmallMesh {
    fn new(bounds: Bounds, mutants: &[Mutant]) -> Self {
        let rules = Rules {
            limits: SessionLimits {
                propose_patience: Duration::ZERO,
                stage_patience: Duration::ZERO,
                commit_patience: Duration::ZERO,
                claim_interval: Duration::from_millis(1),
                grace: Duration::from_millis(1) * bounds.claims,
                lease: Duration::ZERO,
                max_stages: 2,
                last_stage_tokens: Tokens(0),
                max_stage_tokens: Tokens(8),
            },
            prompt: 1,
            tokens: bounds.tokens,
            took: Duration::from_secs(1),
            slots: 1,
            quick_engines: !bounds.slow,
            quick_streams: !bounds.slow,
            mutants: mutants.to_vec(),
        };
        Self { bounds, rules }
    }

    fn accidents(&self, world: &World, events: &mut Vec<Event>) {
        events.extend((0..self.bounds.nodes).map(|node| Event::Crash(Node(node))));
        if self.bounds.only_deaths {
            return;
        }
        for request in 0..self.bounds.requests.len() {
            let request = Request(u8::try_from(request).unwrap_or(u8::MAX));
            events.extend([Event::Break(request), Event::Abort(request)]);
        }
        events.extend(world.jobs.iter().map(|job| Event::Preempt(job.key)));
        for source in &world.sources {
            events.push(Event::Stop(Side::Source, source.at, source.id.request));
        }
        for target in &world.targets {
            let (at, request) = (target.id.target, target.id.request);
            events.push(Event::Stop(Side::Target, at, request));
            if target.pending.is_some() {
                events.push(Event::EngineFails(Side::Target, at, request));
            }
        }
    }

    fn moves(&self, world: &World, events: &mut Vec<Event>) {
        for job in &world.jobs {
            let begun = world.moves[usize::from(job.key.request.0)];
            if !job.running || begun >= self.bounds.moves {
                continue;
            }
            let mut others = self.bounds.targets.clone();
            others.retain(|&node| node != job.key.node.0);
            let begun = |to| Event::Begin(job.key, Node(to), self.bounds.mode);
            events.extend(others.into_iter().map(begun));
        }
    }

    /// When an event happens. Deadlines are all the time there is, and they count from the last one.
    fn time_of(world: &World, event: Event) -> Timestamp {
        let deadline = match event {
            Event::Tick(Side::Source, at, request) => world
                .source_at(at, request)
                .and_then(|index| world.sources[index].session.deadline()),
            Event::Tick(Side::Target, at, request) => world
                .target_at(at, request)
                .and_then(|index| world.targets[index].session.deadline()),
            _ => None,
        };
        deadline.unwrap_or(Timestamp::ZERO)
    }
}

fn is_accident(event: Event) -> bool {
    matches!(
        event,
        Event::Crash(_)
            | Event::Break(_)
            | Event::Abort(_)
            | Event::Preempt(_)
            | Event::Stop(..)
            | Event::EngineFails(..)
    )
}

impl State {
    fn add(&mut self, message: Message) {
        if let Err(at) = self.sent.binary_search(&message) {
            self.sent.insert(at, message);
        }
    }

    /// Forgets what nobody will ever take notice of.
    fn forget(&mut self) {
        let world = &self.world;
        self.sent.retain(|message| match *message {
            Message::Move(id, Body::Propose { .. }) => !world.proposed.contains(&id),
            Message::Move(id, body) if body.is_for_target() => {
                let mut targets = world.targets.iter();
                targets.any(|target| target.id == id) || !world.proposed.contains(&id)
            }
            Message::Move(id, _) => world.sources.iter().any(|source| source.id == id),
            Message::Claim {
                by, request, epoch, ..
            } => {
                let home = world.home(request);
                let open = home.state == HomeState::Active && home.epoch() < epoch;
                open || awaits(world, by, request, epoch)
            }
            Message::Answer {
                to, request, epoch, ..
            } => awaits(world, to, request, epoch),
        });
    }
}

/// Whether a session at this node may have claimed this ownership.
fn awaits(world: &World, at: Node, request: Request, epoch: u8) -> bool {
    let source = world.source_at(at, request);
    let target = world.target_at(at, request);
    source.is_some_and(|index| world.sources[index].id.epoch + 1 == epoch)
        || target.is_some_and(|index| world.targets[index].id.epoch + 1 == epoch)
}

impl Model for SmallMesh {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        let requests: Vec<(Node, Node)> = self
            .bounds
            .requests
            .iter()
            .map(|&(home, host)| (Node(home), Node(host)))
            .collect();
        vec![State {
            world: World::new(self.bounds.nodes, &requests),
            sent: Vec::new(),
            accidents: 0,
        }]
    }

    fn actions(&self, state: &State, events: &mut Vec<Event>) {
        // What follows from a broken invariant proves nothing.
        if state.world.bad.is_some() {
            return;
        }
        state.world.bound_to_happen(&self.rules, events);
        events.extend(state.sent.iter().map(|&message| Event::Deliver(message)));
        self.moves(&state.world, events);
        for source in &state.world.sources {
            if state.world.died[usize::from(source.id.target.0)] {
                events.push(Event::Down(Side::Source, source.at, source.id.request));
            }
        }
        for target in &state.world.targets {
            if state.world.died[usize::from(target.id.source.0)] {
                events.push(Event::Down(
                    Side::Target,
                    target.id.target,
                    target.id.request,
                ));
            }
        }
        if state.accidents < self.bounds.accidents {
            self.accidents(&state.world, events);
        }
    }

    fn next_state(&self, state: &State, event: Event) -> Option<State> {
        let mut next = state.clone();
        let mut effects = Vec::new();
        let now = Self::time_of(&state.world, event);
        let mut step = Step {
            world: &mut next.world,
            rules: &self.rules,
            now,
            effects: &mut effects,
        };
        step.happen(event);
        if let Event::Crash(node) = event {
            // A node that stays away is one that gets no message and is chosen for nothing: that is among the runs.
            step.happen(Event::Restart(node));
        }
        for effect in effects {
            if let Effect::Send(message) = effect {
                next.add(message);
            }
        }
        next.forget();
        if next == *state {
            return None;
        }
        next.accidents += u8::from(is_accident(event));
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(NOTHING_BAD, |_, state: &State| state.world.bad.is_none()),
            Property::always(INVARIANTS, |_, state: &State| {
                state.world.broken_invariant().is_none()
            }),
            Property::always(ENDS_WELL, |model: &Self, state: &State| {
                let mut events = Vec::new();
                state.world.bound_to_happen(&model.rules, &mut events);
                !events.is_empty() || state.world.bad.is_some() || state.world.left_over().is_none()
            }),
            Property::sometimes("a target is granted a request", |_, state: &State| {
                claimed(state, |before, owner| before != owner)
            }),
            Property::sometimes("a source is granted it back", |_, state: &State| {
                claimed(state, |before, owner| before == owner)
            }),
        ]
    }
}

/// No step did what must never be: a client's tokens in order, ownership granted to who can go on, blocks freed once.
const NOTHING_BAD: &str = "nothing that must never be happens";
/// What must be true of every state.
const INVARIANTS: &str = "invariants hold";
/// Where nothing more is bound to happen, every client is served and nothing is held.
const ENDS_WELL: &str = "everything ends well";

/// Whether an ownership was claimed by such a node, as the one before was held by another.
fn claimed(state: &State, by: fn(Node, Node) -> bool) -> bool {
    let given = state
        .world
        .homes
        .iter()
        .flat_map(|home| home.given.windows(2));
    given
        .filter(|pair| pair[1].1)
        .any(|pair| by(pair[0].0, pair[1].0))
}

/// Explores all of it, the shortest runs first, and says how much that was. Fails with the shortest run that broke a
/// property.
#[track_caller]
fn check(name: &str, bounds: Bounds) {
    let clock = MonotonicClock::start();
    report(name, clock, &checker_of(bounds).spawn_bfs().join());
}

/// The same, one run after the other: the run that broke a property is not the shortest, but only the states of
/// one run are kept in memory, and a number for each of the others.
#[track_caller]
fn check_large(name: &str, bounds: Bounds) {
    let clock = MonotonicClock::start();
    report(name, clock, &checker_of(bounds).spawn_dfs().join());
}

fn checker_of(bounds: Bounds) -> CheckerBuilder<SmallMesh> {
    SmallMesh::new(bounds, &[])
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
}

#[track_caller]
fn report(name: &str, clock: MonotonicClock, checker: &impl Checker<SmallMesh>) {
    println!(
        "{name}: {} states, {} steps at most, {}",
        checker.unique_state_count(),
        checker.max_depth(),
        clock.now()
    );
    for property in [NOTHING_BAD, INVARIANTS, ENDS_WELL] {
        let broken = checker.discovery(property).map(tell);
        assert!(
            broken.is_none(),
            "{property}: {}",
            broken.unwrap_or_default()
        );
    }
    checker.assert_properties();
}

fn what_is_wrong(world: &World) -> Option<&'static str> {
    world.broken_invariant().or_else(|| world.left_over())
}

/// The run as a list of events, and what was wrong at its end.
fn tell(path: Path<State, Event>) -> String {
    let last = path.last_state().clone();
    let wrong = what_is_wrong(&last.world);
    let events: Vec<String> = path
        .into_actions()
        .into_iter()
        .map(|event| format!("  {event:?}"))
        .collect();
    format!("{wrong:?} after\n{}\n{last:#?}", events.join("\n"))
}

#[test]
fn one_request_and_one_accident_of_any_kind() {
    check("one request, one accident", Bounds::one());
}

#[test]
fn one_request_with_slow_engines_and_streams_and_one_accident_of_any_kind() {
    let bounds = Bounds {
        tokens: 1,
        targets: vec![0, 1],
        claims: 2,
        slow: true,
        ..Bounds::one()
    };
    check("one request, slow engines, one accident", bounds);
}

#[test]
fn one_request_moved_on_and_back() {
    let bounds = Bounds {
        moves: 2,
        targets: vec![0, 1],
        accidents: 0,
        ..Bounds::one()
    };
    check("one request, two moves", bounds);
}

#[test]
fn a_waiting_request_and_one_accident_of_any_kind() {
    let bounds = Bounds {
        mode: CopyMode::Waiting,
        tokens: 1,
        ..Bounds::one()
    };
    check("a waiting request, one accident", bounds);
}

#[test]
fn two_requests_that_change_places() {
    check("two requests that change places", Bounds::two());
}

#[test]
fn two_requests_that_want_the_same_slot() {
    let bounds = Bounds {
        targets: vec![2],
        ..Bounds::two()
    };
    check("two requests that want the same slot", bounds);
}

/// Run by hand after a change to the cores.
#[test]
#[ignore = "takes minutes"]
fn two_requests_and_the_death_of_any_node() {
    let bounds = Bounds {
        accidents: 1,
        only_deaths: true,
        ..Bounds::two()
    };
    check_large("two requests, one death", bounds);
}

/// Run by hand after a change to the cores.
#[test]
#[ignore = "takes minutes"]
fn one_request_with_slow_engines_and_streams_and_any_target() {
    let bounds = Bounds {
        claims: 2,
        slow: true,
        ..Bounds::one()
    };
    check_large(
        "one request, slow engines, any target, one accident",
        bounds,
    );
}

/// Run by hand after a change to the cores.
#[test]
#[ignore = "takes minutes"]
fn one_request_and_two_accidents_of_any_kind() {
    let bounds = Bounds {
        accidents: 2,
        ..Bounds::one()
    };
    check_large("one request, two accidents", bounds);
}

/// Run by hand after a change to the cores.
#[test]
#[ignore = "takes minutes"]
fn one_request_moved_twice_and_one_death() {
    let bounds = Bounds {
        moves: 2,
        only_deaths: true,
        ..Bounds::one()
    };
    check_large("one request, two moves, one death", bounds);
}
