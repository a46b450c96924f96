//! Engines and homes: tokens, streams, ownership.

use shoal_gossip::Epoch;
use shoal_migrate::session::{Claim, SourceInput, TargetInput};

use super::words::from_of;
use super::{
    Effect, Event, HomeState, Job, JobKey, Message, Mutant, Node, Request, Rules, Side, Step,
    Stream, World, id_of,
};

impl World {
    /// The home gives the next ownership to a node of its choice, which draws on from what the client has.
    pub(crate) fn place(&mut self, request: Request, at: Node) {
        let home = self.home_mut(request);
        let epoch = u8::try_from(home.arbiter.pass_on(id_of(at)).0).unwrap_or(u8::MAX);
        home.given.push((at, false));
        let output = home.received;
        home.stream = Some(Stream {
            next: output,
            end: output,
            finished: false,
            closed: false,
        });
        home.opening = false;
        home.broken = false;
        let key = JobKey {
            node: at,
            request,
            epoch,
        };
        self.hold(at);
        self.add_job(key, (output, 0), true);
    }

    /// Takes in a job whose slot is counted already: the output it has, and the first index it sends.
    pub(crate) fn add_job(&mut self, key: JobKey, (output, first): (u16, u16), running: bool) {
        self.must(
            self.job(key).is_none(),
            "a node has a request twice in one ownership",
        );
        self.jobs.push(Job {
            key,
            output,
            running,
            first,
        });
        self.jobs.sort_by_key(|job| job.key);
    }

    pub(crate) fn hold(&mut self, node: Node) {
        self.held[usize::from(node.0)] += 1;
    }

    pub(crate) fn release(&mut self, node: Node) {
        let held = &mut self.held[usize::from(node.0)];
        let rest = held.checked_sub(1);
        *held = rest.unwrap_or(0);
        self.must(rest.is_some(), "blocks are freed twice");
    }

    /// Drops a job and its blocks, if it is there. Its home sees the stream close.
    pub(crate) fn drop_job(&mut self, key: JobKey, finished: bool) {
        let Some(at) = self.jobs.iter().position(|job| job.key == key) else {
            return;
        };
        self.jobs.remove(at);
        self.release(key.node);
        if self.is_read(key)
            && let Some(stream) = &mut self.home_mut(key.request).stream
        {
            stream.finished = finished;
            stream.closed = true;
        }
    }

    /// Whether the home has a stream to this job.
    pub(crate) fn is_read(&self, key: JobKey) -> bool {
        let home = self.home(key.request);
        home.stream.is_some() && home.holder() == Some(key.node) && home.epoch() == key.epoch
    }
}

impl super::Home {
    pub(crate) fn epoch(&self) -> u8 {
        u8::try_from(self.arbiter.epoch().0).unwrap_or(u8::MAX)
    }

    /// The node that has the ownership.
    pub(crate) fn holder(&self) -> Option<Node> {
        self.given.last().map(|given| given.0)
    }

    /// Ends it: no claim is granted any more, and the stream is closed.
    fn end(&mut self, state: HomeState) {
        self.state = state;
        self.arbiter.end();
        self.stream = None;
        self.opening = false;
        self.broken = false;
    }
}

impl Step<'_> {
    /// Makes it happen. One that cannot happen now changes nothing.
    pub(crate) fn happen(&mut self, event: Event) {
        match event {
            Event::Deliver(message) => self.deliver(message),
            Event::Draw(key) => self.draw(key),
            Event::Complete(key) => self.complete(key),
            Event::Read(request) => self.read(request),
            Event::Open(request) => self.open(request),
            Event::Replay(request, to) => self.replay(request, to),
            Event::Unwanted(key) => self.unwanted(key),
            Event::Begin(key, to, mode) => self.begin(key, to, mode),
            Event::Tick(side, at, request) => self.tick(side, at, request),
            Event::Engine(side, at, request) => self.engine(side, at, request),
            Event::EngineFails(side, at, request) => self.engine_fails(side, at, request),
            Event::Down(Side::Source, at, request) => {
                self.tell_source(at, request, SourceInput::TargetDown);
            }
            Event::Down(Side::Target, at, request) => {
                self.tell_target(at, request, TargetInput::SourceDown);
            }
            Event::Stop(Side::Source, at, request) => {
                self.tell_source(at, request, SourceInput::Stop);
            }
            Event::Stop(Side::Target, at, request) => {
                self.tell_target(at, request, TargetInput::Stop);
            }
            Event::Preempt(key) => {
                if self.world.job(key).is_some_and(|job| job.running) {
                    self.gone_at_source(key);
                }
            }
            Event::Break(request) => {
                let home = self.world.home_mut(request);
                if home.state == HomeState::Active {
                    home.stream = None;
                    home.opening = false;
                    home.broken = true;
                }
            }
            Event::Abort(request) => self.world.home_mut(request).end(HomeState::Over),
            Event::Crash(node) => self.crash(node),
            Event::Restart(node) => self.world.up[usize::from(node.0)] = true,
        }
    }

    fn draw(&mut self, key: JobKey) {
        let last = self.rules.tokens;
        let Some(job) = self.world.job_mut(key) else {
            return;
        };
        if !job.running || job.output >= last {
            return;
        }
        job.output += 1;
        let output = job.output;
        if self.world.is_read(key)
            && let Some(stream) = &mut self.world.home_mut(key.request).stream
        {
            stream.end = output;
            if self.rules.quick_streams {
                self.read(key.request);
                self.complete(key);
                self.read(key.request);
            }
        }
    }

    fn complete(&mut self, key: JobKey) {
        let complete = |job: &Job| job.running && job.output >= self.rules.tokens;
        if self.world.job(key).is_some_and(complete) && self.world.is_read(key) {
            self.world.drop_job(key, true);
            self.gone_at_source(key);
        }
    }

    fn read(&mut self, request: Request) {
        let home = self.world.home_mut(request);
        let Some(stream) = &mut home.stream else {
            return;
        };
        if stream.next < stream.end {
            let index = stream.next;
            stream.next += 1;
            let expected = home.received;
            home.received += 1;
            let in_order = index == expected;
            self.world.must(
                in_order,
                "a client misses a token, or sees one twice or out of order",
            );
        } else if stream.finished {
            let whole = home.received == self.rules.tokens;
            home.end(HomeState::Finished);
            self.world
                .must(whole, "a client has an end without all of its tokens");
        } else if stream.closed {
            home.stream = None;
            home.broken = true;
        }
    }

    /// Opens the stream to a node whose claim was granted. A session that still waits for the answer learns it so.
    fn open(&mut self, request: Request) {
        let home = self.world.home(request);
        if home.state != HomeState::Active || !home.opening {
            return;
        }
        let (Some(node), epoch, from) = (home.holder(), home.epoch(), home.received) else {
            return;
        };
        let key = JobKey {
            node,
            request,
            epoch,
        };
        if self.world.job(key).is_none() && self.world.up[usize::from(node.0)] {
            let from = from.into();
            if self.source_epoch(node, request) == Some(epoch - 1) {
                self.tell_source(node, request, SourceInput::Attached { from });
            } else if self.target_epoch(node, request) == Some(epoch - 1) {
                self.tell_target(node, request, TargetInput::Attached { from });
            }
        }
        self.world.home_mut(request).opening = false;
        let Some(job) = self.world.job_mut(key) else {
            self.world.home_mut(request).broken = true;
            return;
        };
        let stream = Stream {
            next: job.first,
            end: job.output,
            finished: false,
            closed: false,
        };
        job.first = 0;
        self.world.home_mut(request).stream = Some(stream);
    }

    fn replay(&mut self, request: Request, to: Node) {
        if self.world.is_lost(request) && self.world.up[usize::from(to.0)] {
            self.world.place(request, to);
        }
    }

    /// A host drops what its home no longer wants, and a target what was granted to it and taken back.
    fn unwanted(&mut self, key: JobKey) {
        if !self.world.is_unwanted(key) {
            return;
        }
        self.world.drop_job(key, false);
        self.gone_at_source(key);
        if self.target_epoch(key.node, key.request) == Some(key.epoch - 1) {
            self.tell_target(key.node, key.request, TargetInput::Gone);
        }
    }

    fn crash(&mut self, node: Node) {
        self.world.died[usize::from(node.0)] = true;
        self.world.up[usize::from(node.0)] = false;
        self.world.sources.retain(|source| source.at != node);
        self.world.targets.retain(|target| target.id.target != node);
        let keys: Vec<JobKey> = self.world.jobs.iter().map(|job| job.key).collect();
        for key in keys.into_iter().filter(|key| key.node == node) {
            self.world.drop_job(key, false);
        }
        self.world.held[usize::from(node.0)] = 0;
        for home in &mut self.world.homes {
            if home.at == node && home.state == HomeState::Active {
                home.end(HomeState::Over);
            }
        }
    }

    /// The home judges a claim and answers.
    pub(crate) fn claimed(&mut self, by: Node, request: Request, claim: (u8, u16)) {
        let (epoch, output) = claim;
        let home = self.world.home_mut(request);
        let before = home.epoch();
        let received = home.received;
        let asked = Claim {
            epoch: Epoch(epoch.into()),
            output: if self.rules.has(Mutant::HomeIgnoresOutput) {
                u32::MAX
            } else {
                output.into()
            },
        };
        let answer = home.arbiter.claim(id_of(by), asked, received.into());
        let mut from = from_of(answer);
        if home.epoch() > before {
            home.given.push((by, true));
            home.stream = None;
            home.broken = false;
            home.opening = true;
        }
        let again = epoch == home.epoch() && home.state == HomeState::Active;
        let given = home.given.get(usize::from(epoch).wrapping_sub(1)).copied();
        if again && self.rules.has(Mutant::HomeGrantsTwice) {
            from = Some(received);
        }
        if again && self.rules.has(Mutant::HomeLetsThePlacedBeClaimed) && given == Some((by, false))
        {
            from = Some(received);
        }
        if from.is_some() {
            self.world.must(
                output >= received,
                "an ownership is granted to a node that has less output than the client",
            );
        }
        self.effects.push(Effect::Send(Message::Answer {
            to: by,
            request,
            epoch,
            from,
        }));
    }
}

impl World {
    /// What is bound to happen if nothing else does.
    pub(crate) fn bound_to_happen(&self, rules: &Rules, events: &mut Vec<Event>) {
        for job in &self.jobs {
            let whole = job.output >= rules.tokens;
            if job.running && !whole {
                events.push(Event::Draw(job.key));
            }
            if job.running && whole && self.is_read(job.key) {
                events.push(Event::Complete(job.key));
            }
            if self.is_unwanted(job.key) {
                events.push(Event::Unwanted(job.key));
            }
        }
        for (number, home) in (0u8..).zip(&self.homes) {
            let request = Request(number);
            if let Some(stream) = home.stream
                && (stream.next < stream.end || stream.finished || stream.closed)
            {
                events.push(Event::Read(request));
            }
            if home.opening {
                events.push(Event::Open(request));
            }
            if self.is_lost(request) {
                let nodes = (0u8..).zip(&self.up).filter(|(_, up)| **up);
                events.extend(nodes.map(|(node, _)| Event::Replay(request, Node(node))));
            }
        }
        for source in &self.sources {
            let (side, at, request) = (Side::Source, source.at, source.id.request);
            if !rules.has(Mutant::SourceWaitsForEver) {
                events.push(Event::Tick(side, at, request));
            }
            if source.pausing {
                events.push(Event::Engine(side, at, request));
            }
        }
        for target in &self.targets {
            let (side, at, request) = (Side::Target, target.id.target, target.id.request);
            if !(rules.has(Mutant::TargetAsksOnce) && target.claims) {
                events.push(Event::Tick(side, at, request));
            }
            if target.pending.is_some() {
                events.push(Event::Engine(side, at, request));
            }
            let key = JobKey {
                node: at,
                request,
                epoch: target.id.epoch + 1,
            };
            let given = self.home(request).given.get(usize::from(target.id.epoch));
            if given.is_some_and(|&(to, _)| to == at) && self.is_unwanted(key) {
                events.push(Event::Unwanted(key));
            }
        }
    }

    /// Whether the holder of the request is lost to its home.
    fn is_lost(&self, request: Request) -> bool {
        let home = self.home(request);
        let closed = home
            .stream
            .is_some_and(|stream| stream.closed && !stream.finished);
        home.state == HomeState::Active && (home.broken || closed)
    }

    /// Whether the home of what a node has in this ownership is over, or was given to another.
    pub(crate) fn is_unwanted(&self, key: JobKey) -> bool {
        let home = self.home(key.request);
        home.state != HomeState::Active || home.epoch() > key.epoch
    }
}
