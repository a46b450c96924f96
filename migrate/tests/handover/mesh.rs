//! Nodes that do what the cores ask for, and nothing of their own: hosts with engines that draw tokens, and homes
//! with an arbiter and a client.
//!
//! Everything that happens is an [`Event`], and what happens is decided by whoever drives the mesh: the model
//! checker tries all, the fault schedules draw. The homes here trust the cores: a home gives its client
//! whatever comes from the holder of the ownership. What must never be is written down in [`World::bad`] when it
//! happens.
//!
//! A connection is a stream that is whole until it breaks: placing a request and opening a stream are one
//! step each. All messages of a hand-over go over the [`Message`]s, of which any may be lost, doubled or late; only
//! a proposal is a question, which a node is asked once, if late.

mod host;
mod moving;
mod words;

use shoal_gossip::Timestamp;
use shoal_migrate::session::{Arbiter, SourceSession, TargetSession};

pub(crate) use words::{
    Body, Effect, Event, JobKey, Message, Move, Mutant, Node, Pending, Request, Rules, Side, id_of,
};

/// All nodes, and all that is not on its way between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) up: Vec<bool>,
    /// Nodes that died since the start, once or more often: others may be told so at any time.
    pub(crate) died: Vec<bool>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) sources: Vec<Source>,
    pub(crate) targets: Vec<Target>,
    pub(crate) homes: Vec<Home>,
    /// KV slots in use at each node. Counted apart from the lists above, so that they can be compared.
    pub(crate) held: Vec<u16>,
    /// Proposals that have arrived, in order.
    pub(crate) proposed: Vec<Move>,
    /// Moves begun, by request.
    pub(crate) moves: Vec<u8>,
    /// The first thing that must never be.
    pub(crate) bad: Option<&'static str>,
}

/// A request in the engine of a node, with all its KV.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Job {
    pub(crate) key: JobKey,
    pub(crate) output: u16,
    pub(crate) running: bool,
    /// First index it sends; zero once its home reads it.
    pub(crate) first: u16,
}

/// A move at its source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    pub(crate) at: Node,
    pub(crate) id: Move,
    pub(crate) session: SourceSession,
    /// The engine was asked to stop the request.
    pub(crate) pausing: bool,
    /// First position of the last stage.
    pub(crate) last_from: u16,
}

/// A move at its target, which holds room for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    pub(crate) id: Move,
    pub(crate) session: TargetSession,
    /// Tokens whose KV is here or being taken in.
    pub(crate) has_kv: u16,
    /// What the engine takes in.
    pub(crate) pending: Option<Pending>,
    /// What has just arrived; only while the session is told of it.
    pub(crate) arriving: Option<Pending>,
    /// Output that came with the last stage.
    pub(crate) output: u16,
    /// Whether the session has not yet freed what it holds.
    pub(crate) holds: bool,
    /// Only for a mutant.
    pub(crate) claims: bool,
}

/// A request at its home.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Home {
    pub(crate) at: Node,
    pub(crate) arbiter: Arbiter,
    /// Output tokens that the client has.
    pub(crate) received: u16,
    pub(crate) state: HomeState,
    pub(crate) stream: Option<Stream>,
    /// A claim was granted, and the stream to the claimant is still to be opened.
    pub(crate) opening: bool,
    /// The holder is lost: the request must be placed anew.
    pub(crate) broken: bool,
    /// Who was given which ownership, from 1 on, and whether by a claim.
    pub(crate) given: Vec<(Node, bool)>,
}

/// How far a home is with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum HomeState {
    /// Its client waits for more.
    Active,
    /// Its client has all.
    Finished,
    /// Its client went away, or the home died with it.
    Over,
}

/// What a home reads from the holder of the ownership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stream {
    pub(crate) next: u16,
    pub(crate) end: u16,
    pub(crate) finished: bool,
    pub(crate) closed: bool,
}

impl World {
    /// `nodes` nodes, and these requests: home and first host of each.
    pub(crate) fn new(nodes: u8, requests: &[(Node, Node)]) -> Self {
        let mut world = Self {
            up: vec![true; usize::from(nodes)],
            died: vec![false; usize::from(nodes)],
            jobs: Vec::new(),
            sources: Vec::new(),
            targets: Vec::new(),
            homes: Vec::new(),
            held: vec![0; usize::from(nodes)],
            proposed: Vec::new(),
            moves: Vec::new(),
            bad: None,
        };
        for &(home, host) in requests {
            world.begin(home, host);
        }
        world
    }

    /// A client comes to `home`, which places its request at `host`.
    pub(crate) fn begin(&mut self, home: Node, host: Node) -> Request {
        let request = Request(u8::try_from(self.homes.len()).unwrap_or(u8::MAX));
        self.homes.push(Home {
            at: home,
            arbiter: Arbiter::new(),
            received: 0,
            state: HomeState::Active,
            stream: None,
            opening: false,
            broken: false,
            given: Vec::new(),
        });
        self.moves.push(0);
        self.place(request, host);
        request
    }

    /// Notes what must never be.
    pub(crate) fn must(&mut self, holds: bool, otherwise: &'static str) {
        if !holds && self.bad.is_none() {
            self.bad = Some(otherwise);
        }
    }

    pub(crate) fn home(&self, request: Request) -> &Home {
        &self.homes[usize::from(request.0)]
    }

    pub(crate) fn home_mut(&mut self, request: Request) -> &mut Home {
        &mut self.homes[usize::from(request.0)]
    }

    pub(crate) fn job(&self, key: JobKey) -> Option<&Job> {
        self.jobs.iter().find(|job| job.key == key)
    }

    pub(crate) fn job_mut(&mut self, key: JobKey) -> Option<&mut Job> {
        self.jobs.iter_mut().find(|job| job.key == key)
    }

    pub(crate) fn source_at(&self, node: Node, request: Request) -> Option<usize> {
        self.sources
            .iter()
            .position(|source| source.at == node && source.id.request == request)
    }

    pub(crate) fn target_at(&self, node: Node, request: Request) -> Option<usize> {
        self.targets
            .iter()
            .position(|target| target.id.target == node && target.id.request == request)
    }

    /// What must hold after every event. `None` when it does.
    pub(crate) fn broken_invariant(&self) -> Option<&'static str> {
        if self.bad.is_some() {
            return self.bad;
        }
        for job in &self.jobs {
            let JobKey {
                node,
                request,
                epoch,
            } = job.key;
            let given = &self.home(request).given;
            let own = given.get(usize::from(epoch) - 1);
            if own.is_none_or(|&(owner, _)| owner != node) {
                return Some("a node has a request in an ownership that was not given to it");
            }
            // It was handed over by a source that had stopped for good.
            let next_was_claimed = given.get(usize::from(epoch)).is_some_and(|next| next.1);
            if job.running && next_was_claimed {
                return Some(
                    "a request runs on at the source although the next ownership was claimed",
                );
            }
        }
        for (node, &held) in (0u8..).zip(&self.held) {
            let node = Node(node);
            let jobs = self.jobs.iter().filter(|job| job.key.node == node).count();
            let arriving = self
                .targets
                .iter()
                .filter(|target| target.id.target == node && target.holds)
                .count();
            if usize::from(held) != jobs + arriving {
                return Some("the blocks in use are not those of the requests that are there");
            }
        }
        None
    }

    /// What must hold when nothing more can happen by itself. `None` when it does.
    pub(crate) fn left_over(&self) -> Option<&'static str> {
        if !self.sources.is_empty() || !self.targets.is_empty() {
            return Some("a session never ends");
        }
        if self
            .homes
            .iter()
            .any(|home| home.state == HomeState::Active)
        {
            return Some("a client waits for ever");
        }
        if !self.jobs.is_empty() || self.held.iter().any(|&held| held > 0) {
            return Some("blocks are held for a request that is over");
        }
        None
    }
}

/// Makes one event happen.
pub(crate) struct Step<'a> {
    pub(crate) world: &'a mut World,
    pub(crate) rules: &'a Rules,
    pub(crate) now: Timestamp,
    pub(crate) effects: &'a mut Vec<Effect>,
}
