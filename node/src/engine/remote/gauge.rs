//! The load of an engine beside the node: what it told when it was last asked, corrected by what this node sent since.
//!
//! Pure. What an engine does not tell is unknown: then what this node itself sent there is the estimate, and the load says so
//! ([`LoadBasis`]). An engine that is not well takes nothing, whatever it told before.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_gossip::{
    BlockSize, Blocks, Epoch, LoadBasis, LoadSummary, Readiness, RequestId, Timestamp, Tokens,
};

use super::reading::{Reading, Unwell};
use crate::engine::{ReservationId, ReserveAsk, ReserveRefusal};

/// Weight of the newest gap between two tokens in the smoothed step time, as in the embedded engines.
const STEP_TIME_SHARE: u32 = 8;

/// Age up to which figures stand for those that are late: half of what the mesh believes a load by default.
const KEPT_READING: Duration = Duration::from_millis(1_500);

/// Longest that an engine which said "later" is left alone.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Requests that run at once where the engine does not say: as many as its KV holds.
const ASSUMED_SLOTS: u32 = u32::MAX;

/// What an engine is assumed to be as long as it does not say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Assumed {
    /// Tokens in a block.
    pub(super) block_size: BlockSize,
    /// KV tokens; an operator's figure goes before the engine's own.
    pub(super) capacity: Option<Tokens>,
    /// Requests that may wait.
    pub(super) queue_limit: u32,
}

/// KV tokens of an engine that tells none and whose operator does not either: a small GPU's.
const ASSUMED_CAPACITY: Tokens = Tokens(65_536);

/// One request of this node at the engine.
#[derive(Clone, Copy, Debug)]
struct Flight {
    epoch: Epoch,
    prompt: Tokens,
    output: Tokens,
    sent: Timestamp,
    last: Option<Timestamp>,
}

impl Flight {
    fn unread(&self) -> Tokens {
        match self.last {
            None => self.prompt,
            Some(_) => Tokens::ZERO,
        }
    }
}

/// Requests and the KV blocks they hold or will.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    requests: u32,
    blocks: Blocks,
    /// Prompt tokens of those that got no token yet.
    unread: Tokens,
}

impl Sums {
    fn add(&mut self, flight: &Flight, blocks: Blocks) {
        self.requests += 1;
        self.blocks += blocks;
        self.unread += flight.unread();
    }

    fn take(&mut self, flight: &Flight, blocks: Blocks) {
        self.requests = self.requests.saturating_sub(1);
        self.blocks -= blocks;
        self.unread -= flight.unread();
    }
}

#[derive(Clone, Copy, Debug)]
struct Promise {
    demand: Blocks,
    until: Timestamp,
    /// Room was free for it; else it has a place in the queue.
    room: bool,
}

/// How the engine is, as of the last look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not heard of yet, or it loads its model.
    Starting,
    Well,
    /// Since when, and why.
    Unwell(Timestamp, Unwell),
}

/// The gauge of one engine.
#[derive(Debug)]
pub(super) struct Gauge {
    assumed: Assumed,
    slots: Option<u32>,
    capacity: Option<Tokens>,
    state: State,
    reading: Reading,
    /// When the reading was asked for.
    asked: Timestamp,
    flights: BTreeMap<RequestId, Flight>,
    /// Sums over the flights, kept: the load is asked for several times a request.
    own: Sums,
    /// Of those that were sent since the engine was last asked.
    new: Sums,
    /// Blocks and requests that ended since, and were in the reading.
    ended: (Blocks, u32),
    promises: BTreeMap<u64, Promise>,
    next: u64,
    closed_until: Timestamp,
    step: Option<Duration>,
    draining: bool,
}

impl Gauge {
    /// Of an engine that was not heard of yet.
    pub(super) fn new(assumed: Assumed) -> Self {
        Self {
            assumed,
            slots: None,
            capacity: None,
            state: State::Starting,
            reading: Reading::default(),
            asked: Timestamp::ZERO,
            flights: BTreeMap::new(),
            own: Sums::default(),
            new: Sums::default(),
            ended: (Blocks::ZERO, 0),
            promises: BTreeMap::new(),
            next: 0,
            closed_until: Timestamp::ZERO,
            step: None,
            draining: false,
        }
    }

    /// What the engine said of itself when it was identified.
    pub(super) fn identified(&mut self, slots: Option<u32>, capacity: Option<Tokens>) {
        (self.slots, self.capacity) = (slots, capacity);
    }

    /// Takes a poll that was asked for at `asked`.
    pub(super) fn polled(
        &mut self,
        asked: Timestamp,
        now: Timestamp,
        read: Result<Reading, Unwell>,
    ) {
        match read {
            Ok(reading) if reading.asleep => self.state = State::Starting,
            Ok(reading) => {
                self.state = State::Well;
                // Its sizes were told once, and do not change while it runs.
                self.reading = Reading {
                    capacity: reading.capacity.or(self.reading.capacity),
                    block_size: reading.block_size.or(self.reading.block_size),
                    ..reading
                };
                self.asked = asked;
                self.ended = (Blocks::ZERO, 0);
                self.count_again();
            }
            Err(Unwell::Loading) => self.state = State::Starting,
            Err(why) => {
                self.state = match self.state {
                    State::Unwell(since, _) => State::Unwell(since, why),
                    State::Starting | State::Well => State::Unwell(now, why),
                };
            }
        }
    }

    /// The engine is well but its figures are late; whether the last ones will do.
    pub(super) fn late(&mut self, now: Timestamp) -> bool {
        let kept = self.reading.used.is_some() && now.since(self.asked) < KEPT_READING;
        if kept {
            self.state = State::Well;
        }
        kept
    }

    /// How the engine is.
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Requests that lost their KV, as the engine counts.
    pub(super) fn preemptions(&self) -> u64 {
        self.reading.preemptions.unwrap_or(0)
    }

    /// From now on it takes nothing.
    pub(super) fn drain(&mut self) {
        self.draining = true;
    }

    /// The engine said that it is full, and perhaps for how long.
    pub(super) fn told_full(&mut self, now: Timestamp, retry_after: Option<Duration>) {
        let pause = retry_after.unwrap_or_default().min(MAX_PAUSE);
        self.closed_until = self.closed_until.max(now + pause);
    }

    /// Tokens in a block.
    pub(super) fn block_size(&self) -> BlockSize {
        let told = self.reading.block_size.and_then(std::num::NonZeroU32::new);
        told.map_or(self.assumed.block_size, BlockSize::new)
    }

    /// KV blocks in all.
    pub(super) fn total(&self) -> Blocks {
        let told = self.reading.capacity.map(tokens).or(self.capacity);
        let capacity = self.assumed.capacity.or(told);
        let block = self.block_size().tokens();
        Blocks(capacity.unwrap_or(ASSUMED_CAPACITY).0 / block).max(Blocks(1))
    }

    fn knows_capacity(&self) -> bool {
        self.assumed.capacity.is_some()
            || self.reading.capacity.is_some()
            || self.capacity.is_some()
    }

    fn blocks(&self, tokens: Tokens) -> Blocks {
        self.block_size().blocks_for(tokens)
    }

    fn of_flight(&self, flight: &Flight) -> Blocks {
        self.blocks(flight.prompt + flight.output + Tokens(1))
    }

    /// The load now.
    pub(super) fn load(&self, now: Timestamp) -> LoadSummary {
        let total = self.total();
        let (used, basis) = self.used();
        let (all, waiting) = self.count();
        // What is beyond the slots, or beyond the KV, waits.
        let slots = self.slots.unwrap_or(ASSUMED_SLOTS);
        let average = Blocks((used.0 / all.max(1)).max(1));
        let beyond = Blocks(used.0.saturating_sub(total.0));
        let queued = waiting
            .max(all.saturating_sub(slots))
            .max(beyond.0.div_ceil(average.0))
            .min(all);
        let promised: Vec<&Promise> = self.promised(now).collect();
        let of = |room: bool| promised.iter().filter(move |promise| promise.room == room);
        let used = used.min(total);
        let reserved: Blocks = sum(of(true).map(|promise| promise.demand));
        let each = Blocks(self.reading.waiting_tokens.map_or(average.0, |told| {
            self.blocks(tokens(told / u64::from(waiting.max(1)))).0
        }));
        // Places in the queue that are promised, behind those taken.
        let places: Blocks = sum(of(false).map(|promise| promise.demand));
        let first = of(false).map(|promise| promise.demand).next();
        let head_of_line = match queued {
            0 => first.unwrap_or(Blocks::ZERO),
            _ => each,
        };
        let behind = u32::try_from(of(false).count()).unwrap_or(u32::MAX);
        let taken =
            (all - queued).saturating_add(u32::try_from(of(true).count()).unwrap_or(u32::MAX));
        LoadSummary {
            readiness: self.readiness(),
            total,
            used,
            reserved: reserved.min(total - used),
            queued_demand: Blocks(each.0.saturating_mul(queued)) + places,
            head_of_line,
            running: all - queued,
            queued: queued.saturating_add(behind),
            queue_room: self
                .assumed
                .queue_limit
                .saturating_sub(queued.saturating_add(behind)),
            prefill_backlog: self.own.unread,
            step_time_us: self.step.map_or(0, |step| {
                u32::try_from(step.as_micros()).unwrap_or(u32::MAX)
            }),
            basis,
            slots_full: self.slots.is_some_and(|slots| taken >= slots),
            ..LoadSummary::default()
        }
    }

    /// Counts all flights anew: a poll may change which are new, and the size of a block.
    fn count_again(&mut self) {
        (self.own, self.new) = (Sums::default(), Sums::default());
        let flights: Vec<Flight> = self.flights.values().copied().collect();
        for flight in &flights {
            self.enter(flight);
        }
    }

    fn enter(&mut self, flight: &Flight) {
        let blocks = self.of_flight(flight);
        self.own.add(flight, blocks);
        if flight.sent >= self.asked {
            self.new.add(flight, blocks);
        }
    }

    fn leave(&mut self, flight: &Flight) {
        let blocks = self.of_flight(flight);
        self.own.take(flight, blocks);
        if flight.sent >= self.asked {
            self.new.take(flight, blocks);
        }
    }

    /// KV blocks in use, which may be more than there are, and how that is known.
    fn used(&self) -> (Blocks, LoadBasis) {
        match self.reading.used.filter(|_| self.knows_capacity()) {
            Some(used) => {
                let used = self.blocks(tokens(used)) - self.ended.0;
                (used + self.new.blocks, LoadBasis::Polled)
            }
            None => (self.own.blocks, LoadBasis::Estimated),
        }
    }

    /// Requests at the engine, and those of them that it says wait.
    fn count(&self) -> (u32, u32) {
        let waiting = self.reading.waiting.unwrap_or(0);
        let all = match self.reading.running {
            Some(running) => running
                .saturating_add(waiting)
                .saturating_sub(self.ended.1)
                .saturating_add(self.new.requests),
            None => self.own.requests,
        };
        (all, waiting)
    }

    fn readiness(&self) -> Readiness {
        match self.state {
            _ if self.draining => Readiness::Draining,
            State::Starting => Readiness::Starting,
            State::Well => Readiness::Ready,
            State::Unwell(..) => Readiness::Failed,
        }
    }

    fn promised(&self, now: Timestamp) -> impl Iterator<Item = &Promise> {
        self.promises
            .values()
            .filter(move |promise| promise.until > now)
    }

    /// Promises room, or a place in the engine's queue.
    pub(super) fn reserve(
        &mut self,
        now: Timestamp,
        ask: ReserveAsk,
    ) -> Result<ReservationId, ReserveRefusal> {
        self.promises.retain(|_, promise| promise.until > now);
        let load = self.load(now);
        if load.readiness != Readiness::Ready {
            return Err(ReserveRefusal::NotReady);
        }
        if ask.demand > load.total && self.knows_capacity() {
            return Err(ReserveRefusal::NeverFits);
        }
        let slots = self.slots.unwrap_or(ASSUMED_SLOTS);
        let busy = load.running + u32::try_from(self.promises.len()).unwrap_or(u32::MAX);
        let room = load.queued == 0 && load.free() >= ask.demand && busy < slots;
        if ask.at_once && !room {
            return Err(ReserveRefusal::NoRoomNow);
        }
        if self.closed_until > now || (!room && load.queue_room == 0) {
            return Err(ReserveRefusal::QueueFull);
        }
        let id = self.next;
        self.next += 1;
        let promise = Promise {
            demand: ask.demand,
            until: now + ask.lease,
            room,
        };
        self.promises.insert(id, promise);
        Ok(ReservationId(id))
    }

    /// Takes a promise back.
    pub(super) fn release(&mut self, reservation: ReservationId) {
        self.promises.remove(&reservation.0);
    }

    /// A request goes to the engine. It uses up its promise; whether there is room without one, `reserve` says.
    pub(super) fn sent(
        &mut self,
        now: Timestamp,
        (request, epoch): (RequestId, Epoch),
        (prompt, output): (Tokens, Tokens),
    ) {
        let flight = Flight {
            epoch,
            prompt,
            output,
            sent: now,
            last: None,
        };
        if let Some(former) = self.flights.insert(request, flight) {
            self.leave(&former);
        }
        self.enter(&flight);
    }

    /// A request stands for another ownership now.
    pub(super) fn owned(&mut self, request: RequestId, epoch: Epoch) {
        if let Some(flight) = self.flights.get_mut(&request) {
            flight.epoch = epoch;
        }
    }

    /// A request got so many tokens.
    pub(super) fn drew(&mut self, now: Timestamp, request: RequestId, count: u32) {
        let Some(before) = self.flights.get(&request).copied() else {
            return;
        };
        let mut flight = before;
        flight.output += Tokens(count);
        if let Some(last) = flight.last.replace(now)
            && count > 0
        {
            let gap = now.since(last) / count;
            self.step = Some(self.step.map_or(gap, |step| {
                (step * (STEP_TIME_SHARE - 1) + gap) / STEP_TIME_SHARE
            }));
        }
        self.leave(&before);
        self.enter(&flight);
        self.flights.insert(request, flight);
    }

    /// A request is no longer at the engine in this ownership.
    pub(super) fn gone(&mut self, request: RequestId, epoch: Epoch) {
        let known = self.flights.get(&request);
        if let Some(flight) = known.filter(|flight| flight.epoch == epoch).copied() {
            self.flights.remove(&request);
            self.leave(&flight);
            if flight.sent < self.asked {
                self.ended.0 += self.of_flight(&flight);
                self.ended.1 += 1;
            }
        }
    }
}

fn tokens(count: u64) -> Tokens {
    Tokens(u32::try_from(count).unwrap_or(u32::MAX))
}

fn sum(blocks: impl Iterator<Item = Blocks>) -> Blocks {
    blocks.fold(Blocks::ZERO, |sum, blocks| sum + blocks)
}

#[cfg(test)]
mod tests;
