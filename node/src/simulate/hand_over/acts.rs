//! What engines do for a hand-over between two steps, and the way of the KV.

use std::time::Duration;

use shoal_gossip::{Timestamp, Tokens};
use shoal_migrate::session::{SourceInput, TargetInput};
use shoal_migrate::{CopyMode, StageIndex};

use super::{Act, Word};
use crate::engine::batched::{SeqKey, SeqSpec};
use crate::engine::work::Priority;
use crate::simulate::event::Event;
use crate::simulate::mesh::Mesh;
use crate::workload::Arrival;

impl<A: Iterator<Item = Arrival>> Mesh<'_, A> {
    /// Has an engine do something before its next step.
    pub(super) fn ask(&mut self, node: usize, act: Act) {
        self.nodes[node].acts.push(act);
        self.kick(node);
    }

    /// An engine acts.
    pub(in crate::simulate) fn act(&mut self, node: usize, act: Act) {
        match act {
            Act::Copy {
                id,
                stage,
                from,
                at_most,
            } => self.copy(id, stage, (from, at_most)),
            Act::Pause { id, from } => self.pause(node, id, from),
            Act::Import { id, stage } => self.import(id, stage),
            Act::Complete { id } => self.complete(id),
        }
    }

    fn copy(&mut self, id: u64, stage: StageIndex, (start, at_most): (Tokens, Tokens)) {
        let now = self.now;
        let Some(it) = self.hand_overs.get_mut(&id) else {
            return;
        };
        let ends = (it.from, it.to);
        let Some(standing) = self.nodes[ends.0].batcher.standing(it.key) else {
            return self.say_source(id, SourceInput::Gone);
        };
        let end = standing.computed.min(start + at_most).max(start);
        it.stage_end = end;
        it.stage_began = now;
        let arrives = self.carry(ends, end - start);
        let word = Word::Target(TargetInput::StageArrived { stage, start, end });
        self.deliver(arrives, ends, Event::HandOver { id, word });
    }

    fn pause(&mut self, node: usize, id: u64, from: Tokens) {
        let Some(it) = self.hand_overs.get_mut(&id) else {
            return;
        };
        let standing = self.nodes[node].batcher.standing(it.key);
        let stopped = self.nodes[node].batcher.stop(it.key);
        let (Some(standing), true) = (standing, stopped) else {
            return self.say_source(id, SourceInput::Gone);
        };
        it.output = self.requests[it.request].drawn;
        it.computed = standing.computed;
        it.last_from = from;
        self.nodes[node].touch();
        self.say_source(id, SourceInput::Paused);
    }

    /// An engine's word to the session beside it. It comes as an event: the engine is in the middle of its acts.
    fn say_source(&mut self, id: u64, input: SourceInput) {
        let word = Word::Source(input);
        self.agenda.enter(self.now, Event::HandOver { id, word });
    }

    fn say_target(&mut self, id: u64, input: TargetInput) {
        let word = Word::Target(input);
        self.agenda.enter(self.now, Event::HandOver { id, word });
    }

    pub(super) fn send_last(&mut self, id: u64, stage: StageIndex) {
        let Some(it) = self.hand_overs.get(&id) else {
            return;
        };
        let (ends, output, from) = ((it.from, it.to), it.output, it.last_from);
        let (start, tokens) = match it.mode {
            CopyMode::Kv => (Some(from), it.computed - from),
            CopyMode::Recompute | CopyMode::Waiting => (None, Tokens::ZERO),
        };
        let arrives = self.carry(ends, tokens);
        let start = start.filter(|_| tokens > Tokens::ZERO);
        let word = Word::Target(TargetInput::LastArrived {
            stage,
            start,
            output,
        });
        self.deliver(arrives, ends, Event::HandOver { id, word });
    }

    /// When KV of so many tokens is at the other end. A node sends one piece after the other.
    fn carry(&mut self, (from, to): (usize, usize), tokens: Tokens) -> Timestamp {
        let bytes = self.nodes[from].bytes(tokens).0 as f64;
        let seconds = bytes / self.plan.network.bytes_per_second;
        let takes = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO);
        let sent = self.nodes[from].sends_until.max(self.now) + takes;
        self.nodes[from].sends_until = sent;
        sent + self.latency(from, to)
    }

    /// The sequence at the target, which comes in with its first act.
    fn arrived(&mut self, id: u64) -> Option<SeqKey> {
        let now = self.now;
        let it = self.hand_overs.get_mut(&id)?;
        if it.arrived.is_some() {
            return it.arrived;
        }
        let request = &self.requests[it.request];
        let spec = SeqSpec {
            request: request.id,
            epoch: it.migration.epoch.next(),
            prompt_len: request.prompt.0,
            generated_len: request.drawn.min(request.wanted - 1),
            max_tokens: request.wanted,
            priority: Priority::default(),
            reservation: it.reservation.take(),
        };
        let to = it.to;
        it.arrived = self.nodes[to].batcher.arrive(now, spec, it.mode).ok();
        let arrived = it.arrived;
        self.nodes[to].touch();
        arrived
    }

    fn import(&mut self, id: u64, stage: StageIndex) {
        let Some(key) = self.arrived(id) else {
            let reason = "no room".to_owned();
            return self.say_target(id, TargetInput::ImportFailed { reason });
        };
        let Some(it) = self.hand_overs.get(&id) else {
            return;
        };
        let (from, to, end, began) = (it.from, it.to, it.stage_end, it.stage_began);
        let source = self.nodes[from].batcher.standing(it.key);
        if self.nodes[to].batcher.imported(key, end).is_err() {
            let reason = "no room".to_owned();
            return self.say_target(id, TargetInput::ImportFailed { reason });
        }
        self.nodes[to].touch();
        self.say_target(id, TargetInput::StageImported { stage });
        let ends = (to, from);
        let back = self.latency(to, from);
        let sent = SourceInput::StageSent {
            stage,
            end,
            existing: source.map_or(end, |source| source.computed.max(end)),
            took: self.now.since(began) + back,
        };
        let word = Word::Source(sent);
        self.send(ends, Event::HandOver { id, word });
    }

    fn complete(&mut self, id: u64) {
        let arrived = self.arrived(id);
        let Some(it) = self.hand_overs.get(&id) else {
            return;
        };
        let (from, to, output, computed) = (it.from, it.to, it.output, it.computed);
        let mode = it.mode;
        let done = arrived.is_some_and(|key| {
            let batcher = &mut self.nodes[to].batcher;
            batcher.set_output(key, Tokens(output)).is_ok()
                && (mode != CopyMode::Kv || batcher.imported(key, computed).is_ok())
        });
        self.nodes[to].touch();
        let input = match done {
            true => TargetInput::LastImported,
            false => TargetInput::ImportFailed {
                reason: "no room".to_owned(),
            },
        };
        self.say_target(id, input);
        let word = Word::Source(match done {
            true => SourceInput::LastSent,
            false => SourceInput::LastFailed {
                reason: "no room".to_owned(),
            },
        });
        self.send((to, from), Event::HandOver { id, word });
    }
}
