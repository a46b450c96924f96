//! Placing a request: home and host talk as the node's shells do, over the modelled network.

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_gossip::{Blocks, LoadSummary, NodeId, Tokens};

use crate::dispatch::{
    Candidate, GiveUp, Need, Outcome, Placement, Pool, Step, better_elsewhere, should_probe,
};
use crate::engine::batched::SeqSpec;
use crate::engine::work::Fit;
use crate::engine::work::Priority;
use crate::engine::{ReservationId, ReserveAsk};
use crate::host::promised;
use crate::mesh::messages::Answer;
use crate::simulate::Scheduling;
use crate::simulate::event::Event;
use crate::simulate::gossip::place_of;
use crate::simulate::mesh::{MODEL, Mesh};
use crate::workload::Arrival;

impl<A: Iterator<Item = Arrival>> Mesh<'_, A> {
    /// Begins to look for a host that is none of these.
    pub(super) fn place(&mut self, request: usize, excluded: BTreeSet<NodeId>) {
        let need = Need {
            model: MODEL.to_owned(),
            fit: Fit::Any,
            prompt: self.requests[request].prompt,
            generated: Tokens(self.requests[request].drawn),
            excluded,
        };
        self.requests[request].placement = Some(Placement::new(need, self.settings.home.placement));
        self.advance(request, Placement::start);
    }

    /// Performs a step of a placement.
    pub(super) fn step(&mut self, request: usize, step: Step) {
        let home = self.requests[request].home();
        match step {
            Step::Offer { choice, hops } => {
                let Some(at) = place_of(choice.taken.node) else {
                    return;
                };
                self.send((home, at), Event::Offer { request, at, hops });
            }
            Step::Submit { to, reservation } => {
                let Some(to) = place_of(to) else {
                    return;
                };
                let reservation = Some(reservation);
                self.send(
                    (home, to),
                    Event::Submit {
                        request,
                        to,
                        reservation,
                    },
                );
            }
            Step::GiveUp(why) if why != GiveUp::NeverFits && self.is_resumed(request) => {
                self.nobody(request);
            }
            Step::GiveUp(why) => {
                let kind = match why {
                    GiveUp::UnknownModel => "http 404",
                    GiveUp::Overloaded => "http 429",
                    GiveUp::NeverFits => "http 400",
                    GiveUp::Unavailable => "http 503",
                };
                self.over(request, Some(kind));
            }
        }
    }

    /// An offer is here: a host that is nearly full asks two others before it answers.
    pub(super) fn offered(&mut self, request: usize, at: usize, hops: u8) {
        if self.plan.scheduling == Scheduling::Shoal {
            let demand = self.demand(request, at);
            let own = self.nodes[at].load();
            if should_probe(&own, demand, hops, self.settings.host.redirect_below) {
                let asked = self.two_to_probe(request, at);
                if !asked.is_empty() {
                    let there = self.now + self.plan.network.latency;
                    let by = at;
                    return self
                        .agenda
                        .enter(there, Event::Probe { request, by, asked });
                }
            }
        }
        self.answer(request, at);
    }

    fn two_to_probe(&mut self, request: usize, at: usize) -> Vec<Candidate> {
        let mut excluded = match &self.requests[request].placement {
            Some(placement) => placement.need().excluded.clone(),
            None => BTreeSet::new(),
        };
        excluded.insert(self.nodes[at].id);
        let need = Need {
            model: MODEL.to_owned(),
            fit: Fit::Any,
            prompt: self.requests[request].prompt,
            generated: Tokens(self.requests[request].drawn),
            excluded,
        };
        let max_age = self.settings.host.max_view_age;
        self.decide(at, |world| {
            let pool = Pool::new(world.view, world.corrections, &need, world.now, max_age);
            pool.two_to_ask(world.rng).collect()
        })
    }

    /// Those that were asked say their exact loads.
    pub(super) fn probe(&mut self, request: usize, by: usize, mut asked: Vec<Candidate>) {
        let before = asked.len();
        asked.retain_mut(|candidate| {
            let Some(place) = place_of(candidate.node).filter(|place| self.reaches(by, *place))
            else {
                self.nodes[by].corrections.silent(candidate.node, self.now);
                return false;
            };
            candidate.load = self.nodes[place].load();
            candidate.age = Duration::ZERO;
            true
        });
        // Whoever says nothing is waited for.
        let takes = match asked.len() == before {
            true => self.plan.network.latency,
            false => self.settings.host.probe_deadline,
        };
        self.agenda
            .enter(self.now + takes, Event::Probed { request, by, asked });
    }

    /// The answers are here: points to a better node, or answers itself.
    pub(super) fn probed(&mut self, request: usize, by: usize, asked: &[Candidate]) {
        if !self.nodes[by].alive {
            // Its home waits in vain.
            return self.undelivered(Event::Offer {
                request,
                at: by,
                hops: 0,
            });
        }
        let now = self.now;
        for candidate in asked {
            self.nodes[by]
                .corrections
                .hear(candidate.node, candidate.load, now);
        }
        let own = Candidate {
            node: self.nodes[by].id,
            load: self.nodes[by].load(),
            age: Duration::ZERO,
            charged: Blocks::ZERO,
            demand: self.demand(request, by),
            block_size: self.words.facts(by).block_size,
        };
        match better_elsewhere(&own, asked) {
            Some(better) => {
                self.counts.redirects += 1;
                let answer = Answer::Redirect {
                    to: better.node,
                    load: better.load,
                };
                self.reply(request, by, answer);
            }
            None => self.answer(request, by),
        }
    }

    /// Answers from the host's own numbers.
    fn answer(&mut self, request: usize, at: usize) {
        let lease = self.settings.host.lease;
        let ask = ReserveAsk {
            demand: self.demand(request, at),
            lease,
            at_once: false,
            waited: self.now.since(self.requests[request].arrived),
            resumed: self.is_resumed(request),
            home: self.requests[request].id.home,
        };
        let node = &mut self.nodes[at];
        node.touch();
        let answer = promised(node.batcher.reserve(self.now, ask), lease);
        self.reply(request, at, answer);
        // A promise at the front of the queue is admitted with the next plan.
        self.kick(at);
    }

    fn reply(&mut self, request: usize, from: usize, answer: Answer) {
        let load = self.nodes[from].load();
        let home = self.requests[request].home();
        self.send(
            (from, home),
            Event::Answer {
                request,
                answer,
                load,
            },
        );
    }

    pub(super) fn answered(&mut self, request: usize, answer: &Answer, load: LoadSummary) {
        self.advance(request, |placement, world| {
            placement.answered(Outcome::Answered { answer, load }, world)
        });
    }

    /// A submission is here.
    pub(super) fn submitted(&mut self, request: usize, to: usize, reservation: Option<u64>) {
        if self.plan.scheduling.policy().is_none() {
            self.came(request, to);
        }
        let it = &self.requests[request];
        if it.is_over() || it.host.is_some() {
            // Its client is gone, or another node has claimed it meanwhile.
            return;
        }
        let spec = SeqSpec {
            request: it.id,
            epoch: it.next_epoch(),
            prompt_len: it.prompt.0,
            generated_len: it.drawn,
            max_tokens: it.wanted,
            priority: Priority::default(),
            reservation: reservation.map(ReservationId),
        };
        let node = &mut self.nodes[to];
        node.touch();
        match node.batcher.submit(self.now, spec) {
            Ok(key) => {
                node.here.insert(key, request);
                let id = node.id;
                let it = &mut self.requests[request];
                it.arbiter.pass_on(id);
                it.host = Some(to);
                it.placement = None;
                if let Some(replay) = &mut it.replay {
                    replay.placed();
                }
                self.kick(to);
            }
            Err(_) => {
                let home = self.requests[request].home();
                self.send((to, home), Event::Refused { request, from: to });
            }
        }
    }

    pub(super) fn refused(&mut self, request: usize, from: usize) {
        let id = self.nodes[from].id;
        if self.requests[request].placement.is_some() {
            self.advance(request, |placement, world| {
                placement.submit_failed(id, true, world)
            });
        } else {
            self.over(request, Some("http 400"));
        }
    }
}
