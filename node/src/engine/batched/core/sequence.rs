//! One request inside the batch core, in counts only.

use std::cmp::Reverse;

use shoal_gossip::{BlockSize, Blocks, Epoch, RequestId, Timestamp, Tokens};

use super::PlanItem;
use crate::engine::ReservationId;
use crate::engine::batched::Slot;
use crate::engine::work::Priority;

/// Name of a sequence inside one [`Batcher`](super::Batcher); never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqKey(pub u64);

/// What a sequence is, when it is handed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqSpec {
    /// Whose it is.
    pub request: RequestId,
    /// Which ownership of it.
    pub epoch: Epoch,
    /// Prompt tokens, at least one.
    pub prompt_len: u32,
    /// Output tokens that exist already; they are prefilled after the prompt.
    pub generated_len: u32,
    /// Output tokens in all, those that exist included; above `generated_len`.
    pub max_tokens: u32,
    /// Rank.
    pub priority: Priority,
    /// The promise it uses up.
    pub reservation: Option<ReservationId>,
}

/// Order among sequences: rank, then the time at which the client asked, then arrival here. Smaller is served first and
/// preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) rank: Reverse<Priority>,
    came: Timestamp,
    ticket: u64,
}

impl Place {
    pub(super) fn new(priority: Priority, came: Timestamp, ticket: u64) -> Self {
        Self {
            rank: Reverse(priority),
            came,
            ticket,
        }
    }

    /// All but the rank: when the client asked, and the order of arrival here.
    pub(super) fn arrival(self) -> (Timestamp, u64) {
        (self.came, self.ticket)
    }
}

/// Where a sequence stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// In the queue; holds nothing.
    Waiting,
    /// Room is set aside; the next plan starts it.
    Aside(Blocks),
    /// Holds blocks and a slot.
    Running { slot: Slot, held: Blocks },
}

/// What a hand-over makes of a sequence until it ends. One that is held is never preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Leaves: gets no step and holds up nobody in the queue.
    Stopped,
    /// Comes in: gets no step, its KV is imported, or it has yet to start.
    Arriving,
    /// Comes in: is prefilled up to its last token but one, and draws nothing.
    Recomputing,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    pub(super) request: RequestId,
    pub(super) epoch: Epoch,
    pub(super) prompt_len: u32,
    pub(super) generated: u32,
    pub(super) max_tokens: u32,
    pub(super) place: Place,
    pub(super) phase: Phase,
    /// Tokens whose KV exists.
    pub(super) computed: u32,
    pub(super) paused: bool,
    pub(super) hold: Option<Hold>,
    /// It ran before and was preempted; such a one waits on top of the queue bound.
    pub(super) preempted: bool,
}

impl Sequence {
    pub(super) fn new(spec: &SeqSpec, (came, ticket): (Timestamp, u64)) -> Self {
        Self {
            request: spec.request,
            epoch: spec.epoch,
            prompt_len: spec.prompt_len,
            generated: spec.generated_len,
            max_tokens: spec.max_tokens,
            place: Place::new(spec.priority, came, ticket),
            phase: Phase::Waiting,
            computed: 0,
            paused: false,
            hold: None,
            preempted: false,
        }
    }

    /// Tokens that exist: prompt and output.
    pub(super) fn known(&self) -> u32 {
        self.prompt_len.saturating_add(self.generated)
    }

    /// Tokens that may be computed now. The last one gives the next, so one that draws nothing leaves it.
    fn computable(&self) -> u32 {
        match self.hold {
            Some(Hold::Recomputing) => self.known().saturating_sub(1),
            Some(Hold::Stopped | Hold::Arriving) | None => self.known(),
        }
    }

    /// Tokens without KV that may be computed. One when the sequence decodes.
    pub(super) fn uncomputed(&self) -> u32 {
        self.computable().saturating_sub(self.computed)
    }

    /// Tokens that it has to prefill. One that decodes always has one token to compute; that is no backlog.
    pub(super) fn backlog(&self) -> Tokens {
        match (self.steps(), self.phase, self.uncomputed()) {
            (false, _, _) | (true, Phase::Running { .. }, 1) => Tokens::ZERO,
            (true, Phase::Running { .. } | Phase::Aside(_) | Phase::Waiting, left) => Tokens(left),
        }
    }

    /// Takes the block that its next token needs. What it took; `None` if it runs and there are too few.
    pub(super) fn grow(&mut self, block_size: BlockSize, free: Blocks) -> Option<Blocks> {
        let known = Tokens(self.known());
        let Phase::Running { held, .. } = &mut self.phase else {
            return Some(Blocks::ZERO);
        };
        let missing = block_size.blocks_for(known) - *held;
        (missing <= free).then(|| {
            *held += missing;
            missing
        })
    }

    /// Its part of a step that has room for so many tokens; `None` when it has none.
    pub(super) fn item(&self, key: SeqKey, budget: u32, grid: Option<u32>) -> Option<PlanItem> {
        let Phase::Running { slot, .. } = self.phase else {
            return None;
        };
        let tokens = self.chunk(budget, grid);
        let draws = self.hold.is_none() && tokens == self.uncomputed();
        (tokens > 0).then(|| PlanItem {
            key,
            slot,
            position: self.computed,
            tokens,
            sample: draws.then_some(self.generated),
        })
    }

    /// Tokens that it would compute in the next step, if there is room for all: one when it decodes, none when it does not
    /// run or may not.
    pub(super) fn wants(&self) -> u32 {
        let runs = matches!(self.phase, Phase::Running { .. });
        if runs && !self.paused && self.steps() && !self.is_complete() {
            self.uncomputed()
        } else {
            0
        }
    }

    /// May take steps, as far as hand-overs go.
    pub(super) fn steps(&self) -> bool {
        match self.hold {
            Some(Hold::Stopped | Hold::Arriving) => false,
            Some(Hold::Recomputing) | None => true,
        }
    }

    /// Has all its output; waits to be removed.
    pub(super) fn is_complete(&self) -> bool {
        self.generated >= self.max_tokens
    }

    /// Blocks it needs to start.
    pub(super) fn demand(&self, block_size: BlockSize) -> Blocks {
        crate::engine::starting_demand(block_size, Tokens(self.prompt_len), Tokens(self.generated))
    }

    /// Tokens of its next item, given what the step has left; zero when none fits.
    pub(super) fn chunk(&self, budget: u32, grid: Option<u32>) -> u32 {
        let Some(grid) = grid else {
            return self.uncomputed().min(budget);
        };
        // Exactly one grid cell, or nothing: two cells at once or a part of one would make the cut
        // depend on the load. The end of the prompt is a cut too, as it was when the prompt ran first.
        let cell_end = (self.computed / grid)
            .saturating_add(1)
            .saturating_mul(grid);
        let mut end = cell_end.min(self.computable());
        if self.computed < self.prompt_len {
            end = end.min(self.prompt_len);
        }
        let cell = end.saturating_sub(self.computed);
        if cell <= budget { cell } else { 0 }
    }
}

/// Where a promise stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Promise {
    /// Blocks and a slot are set aside.
    Aside,
    /// A place in the queue.
    Queued,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Reservation {
    pub(super) place: Place,
    pub(super) demand: Blocks,
    pub(super) expires: Timestamp,
    pub(super) promise: Promise,
}
