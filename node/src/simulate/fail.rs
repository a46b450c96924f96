//! Faults as they happen: what a node that is gone takes with it, who hears of it and when, and what homes do then.

use std::time::Duration;

use shoal_gossip::{Incarnation, Readiness, Timestamp};

use crate::dispatch::Outcome;
use crate::home::{LOOK_EVERY, Next, Replay};
use crate::mesh::stream::IDLE_MS;
use crate::simulate::Scheduling;
use crate::simulate::event::Event;
use crate::simulate::fault::FaultKind;
use crate::simulate::gossip::{Cut, DEAD_AFTER};
use crate::simulate::mesh::Mesh;
use crate::workload::Arrival;

/// Silence after which a host gives up the home of a token stream.
const IDLE: Duration = Duration::from_millis(IDLE_MS as u64);

/// After this many looks at its port a home knows that a process was killed: the first look sends, two more hear a no.
const LOOKS: u32 = 3;

impl<A: Iterator<Item = Arrival>> Mesh<'_, A> {
    /// Nodes that join later are not there at first.
    pub(super) fn begin_faults(&mut self) {
        let mut seen = Vec::new();
        for (place, fault) in self.plan.faults.iter().enumerate() {
            let at = Timestamp::since_start(fault.at);
            self.agenda.enter(at, Event::Fault(place));
            if let Some(node) = fault.what.node().filter(|node| !seen.contains(node)) {
                seen.push(node);
                self.nodes[node].alive = !matches!(fault.what, FaultKind::Join(_));
            }
        }
    }

    pub(super) fn fault(&mut self, place: usize) {
        match self.plan.faults[place].what {
            FaultKind::Kill(node) if self.nodes[node].alive => self.kill(node),
            FaultKind::Join(node) if !self.nodes[node].alive => self.join(node),
            FaultKind::Drain(node) if self.nodes[node].alive => {
                self.nodes[node].batcher.set_readiness(Readiness::Draining);
                self.nodes[node].touch();
            }
            FaultKind::Slow(node, times) => self.nodes[node].slowness = times,
            FaultKind::Cut(nodes) => self.cut(nodes),
            FaultKind::Heal => self.heal(),
            FaultKind::Kill(_) | FaultKind::Join(_) | FaultKind::Drain(_) => {}
        }
    }

    fn kill(&mut self, node: usize) {
        self.nodes[node].die();
        self.end_sides_of(node);
        for request in 0..self.requests.len() {
            let it = &self.requests[request];
            if it.is_over() {
                continue;
            }
            if it.home() == node {
                self.over(request, Some("entry lost"));
                self.later(request, IDLE);
            } else if it.host == Some(node) {
                self.later(request, LOOK_EVERY * LOOKS);
            }
        }
    }

    fn join(&mut self, node: usize) {
        self.nodes[node].live_again();
        let load = self.nodes[node].load();
        self.words.say(node, self.now, load);
    }

    fn cut(&mut self, nodes: usize) {
        self.heal();
        self.words.cuts.push(Cut {
            nodes,
            from: self.now,
            until: None,
        });
        // Who leaves the view, and is not back for the time of grace, is dead. Word of it takes an interval more to most.
        let silence = self.plan.gossip.interval * (DEAD_AFTER + 1) + self.settings.home.grace;
        for request in 0..self.requests.len() {
            let it = &self.requests[request];
            if !it.is_over() && it.host.is_some_and(|host| !self.reaches(host, it.home())) {
                self.later(request, silence.min(IDLE));
            }
        }
    }

    fn heal(&mut self) {
        if let Some(cut) = self.words.cuts.last_mut() {
            cut.until.get_or_insert(self.now);
        }
        // What a host said to its end while it was cut off arrives now.
        for request in 0..self.requests.len() {
            let it = &self.requests[request];
            if let (false, Some(host)) = (it.is_over(), it.host)
                && self.reaches(host, it.home())
                && self.nodes[host].batcher.find(it.id).is_none()
            {
                let all = it.wanted;
                self.received(request, host, all);
                self.over(request, None);
            }
        }
    }

    /// Whoever is left of a request's stream looks at it again when it must have noticed that the other is gone.
    fn later(&mut self, request: usize, after: Duration) {
        let Some(host) = self.requests[request].host else {
            return;
        };
        let life = self.nodes[host].life;
        self.agenda.enter(
            self.now + after,
            Event::Silence {
                request,
                host,
                life,
            },
        );
    }

    /// Nothing has come through between home and host for too long, unless the way was there again before.
    pub(super) fn silence(&mut self, request: usize, host: usize, life: Incarnation) {
        let home = self.requests[request].home();
        let same_life = self.nodes[host].alive && self.nodes[host].life == life;
        if same_life && self.reaches(host, home) && !self.requests[request].is_over() {
            return;
        }
        if same_life {
            // The host aborts what its home does not hear.
            let id = self.requests[request].id;
            if let Some((key, _)) = self.nodes[host].batcher.find(id) {
                self.nodes[host].remove(key);
                self.kick(host);
            }
        }
        if !self.requests[request].is_over() && self.requests[request].host == Some(host) {
            self.host_lost(request, host);
        }
    }

    /// The home places the request again, with all that its client has. The central schedulers know no such thing.
    fn host_lost(&mut self, request: usize, host: usize) {
        let name = self.nodes[host].id;
        let limits = self.settings.home.replay;
        let it = &mut self.requests[request];
        it.host = None;
        if matches!(
            self.plan.scheduling,
            Scheduling::Infaas | Scheduling::Llumnix | Scheduling::Flood
        ) {
            return self.over(request, Some("host lost"));
        }
        let replay = it
            .replay
            .get_or_insert_with(|| Box::new(Replay::new(limits)));
        let next = replay.host_lost(self.now, name);
        self.counts.replays += 1;
        self.go_on(request, next);
    }

    /// Whether a request has lost a host before.
    pub(super) fn is_resumed(&self, request: usize) -> bool {
        self.requests[request].replay.is_some()
    }

    /// Nobody took a request that has lost its host.
    pub(super) fn nobody(&mut self, request: usize) {
        self.requests[request].placement = None;
        if let Some(replay) = &mut self.requests[request].replay {
            let next = replay.nobody(self.now, &mut self.rng);
            self.go_on(request, next);
        }
    }

    /// It has waited.
    pub(super) fn again(&mut self, request: usize) {
        let it = &mut self.requests[request];
        if it.is_over() {
            return;
        }
        if let Some(replay) = &it.replay {
            let next = replay.waited();
            self.go_on(request, next);
        }
    }

    fn go_on(&mut self, request: usize, next: Next) {
        match next {
            Next::Place(excluded) => self.place(request, excluded),
            Next::Wait(wait) => self.agenda.enter(self.now + wait, Event::Again { request }),
            Next::GiveUp => self.over(request, Some("host lost")),
        }
    }

    /// Whether what one node sends now comes to another.
    pub(super) fn reaches(&self, from: usize, to: usize) -> bool {
        self.nodes[to].alive && self.words.connected(from, to, self.now)
    }

    /// What becomes of a message that does not come through: whoever waits for it gives up. Words of a hand-over have
    /// deadlines of their own.
    pub(super) fn undelivered(&mut self, event: Event) {
        match event {
            Event::Offer { request, .. } | Event::Answer { request, .. } => {
                let at = self.now + self.settings.home.offer_deadline;
                self.agenda.enter(at, Event::NoAnswer { request });
            }
            Event::Submit { request, to, .. } | Event::Refused { request, from: to } => {
                let at = self.now + self.settings.home.start_deadline;
                self.agenda.enter(at, Event::NoStart { request, to });
            }
            _ => {}
        }
    }

    /// An offer was not answered in time.
    pub(super) fn no_answer(&mut self, request: usize) {
        self.advance(request, |placement, world| {
            placement.answered(Outcome::Silent, world)
        });
    }

    /// A submission came to nothing.
    pub(super) fn no_start(&mut self, request: usize, to: usize) {
        let id = self.nodes[to].id;
        if self.requests[request].placement.is_some() {
            self.advance(request, |placement, world| {
                placement.submit_failed(id, false, world)
            });
        } else if self.requests[request].host.is_none() {
            self.over(request, Some("host lost"));
        }
    }
}
