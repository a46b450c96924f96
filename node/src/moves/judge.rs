//! What this node takes in as a target: proposals, and the parcels of those it accepted.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::{BlockSize, Blocks, NodeId, Readiness, Tokens};
use shoal_migrate::transfer::{KvReceiver, Parcel, ParcelHeader, ParcelKind, Rejection};
use shoal_migrate::{CopyMode, MoveReason, MoveRefusal, Proposal, ProposalAnswer, SessionLimits};
use tokio::sync::oneshot;

use crate::dispatch::Freeness;
use crate::engine::ReserveAsk;
use crate::engine::moving::MovingEngine;
use crate::mesh::messages::MAX_SUBMIT_BYTES;
use crate::moves::target::TargetEvent;
use crate::moves::{Moves, target};

/// Room a target keeps for tokens that the source draws during the copy: at 20 tokens a second, the three
/// seconds that a large copy over a slow link takes. It grows later like any running request.
const GROWTH: Tokens = Tokens(64);

/// What a stage may take beyond its tokens' KV: the frame of the blob, counts and shapes.
const STAGE_FRAME_BYTES: u64 = 64 * 1024;

/// How long a target may take to prefill a token when ids travel instead of KV: twice the slowest that was measured
/// (a 135M model on one core takes 9 ms).
const PREFILL_PATIENCE: Duration = Duration::from_millis(20);

impl Moves {
    /// Judges another node's proposal to hand a request over to this one.
    pub fn propose(self: &Arc<Self>, from: NodeId, proposal: Proposal) -> ProposalAnswer {
        let moving = self.engine.moving();
        let direct = proposal.direct && moving.is_some_and(MovingEngine::is_direct);
        match self.consider(from, &proposal) {
            Ok(()) => match target::begin(self, from, proposal) {
                Ok(()) => ProposalAnswer::Accepted {
                    lease: self.settings.limits.lease,
                    direct,
                },
                Err(refusal) => ProposalAnswer::Refused(refusal),
            },
            Err(refusal) => ProposalAnswer::Refused(refusal),
        }
    }

    /// Whether this engine can hold what is proposed, and this node wants it.
    fn consider(&self, from: NodeId, proposal: &Proposal) -> Result<(), MoveRefusal> {
        let load = self.loads.summary();
        if load.readiness != Readiness::Ready || self.ways.get().is_none() {
            return Err(MoveRefusal::NotReady);
        }
        let Some(moving) = self.engine.moving() else {
            return Err(MoveRefusal::Unable("requests cannot arrive here".into()));
        };
        let request = proposal.migration.request;
        let wrong = from == self.this || proposal.migration.target != self.this;
        if wrong || moving.job(request).is_some() {
            return Err(MoveRefusal::Duplicate);
        }
        self.compatible(proposal)?;
        let bytes = moving.kv_bytes_per_token();
        if proposal.mode == CopyMode::Kv && bytes == 0 {
            return Err(MoveRefusal::Unable("its engine takes no KV in".into()));
        }
        if proposal.mode == CopyMode::Kv && proposal.kv_bytes_per_token != bytes {
            let why = format!(
                "{} bytes of KV a token instead of {bytes}",
                proposal.kv_bytes_per_token
            );
            return Err(MoveRefusal::Incompatible(why));
        }
        let freeness = Freeness::for_migration(&load);
        if proposal.reason == MoveReason::Rescheduled && freeness <= self.settings.accept_above {
            return Err(MoveRefusal::NoRoom);
        }
        let sessions = self.lock();
        if sessions.arriving.contains_key(&request) || sessions.leaving.contains_key(&request) {
            return Err(MoveRefusal::Duplicate);
        }
        if sessions.arriving.len() >= self.settings.slots_in {
            return Err(MoveRefusal::Busy);
        }
        Ok(())
    }

    fn compatible(&self, proposal: &Proposal) -> Result<(), MoveRefusal> {
        let facts = self.engine.facts();
        let Some(model) = facts.models.iter().find(|model| model.id == proposal.model) else {
            let why = format!("it does not serve the model {}", proposal.model);
            return Err(MoveRefusal::Incompatible(why));
        };
        if model.fingerprint != proposal.fingerprint {
            let why = "weights, engine version, KV type or layout are others".to_owned();
            return Err(MoveRefusal::Incompatible(why));
        }
        if facts.block_size != proposal.block_size {
            let why = format!(
                "blocks of {} tokens instead of {}",
                proposal.block_size.tokens(),
                facts.block_size.tokens()
            );
            return Err(MoveRefusal::Incompatible(why));
        }
        if proposal.longest > model.context || proposal.known > proposal.longest {
            let why = format!("a context of {} tokens", model.context);
            return Err(MoveRefusal::Incompatible(why));
        }
        Ok(())
    }

    /// Bounds of a session that moves so many tokens in this way.
    pub(super) fn limits(&self, mode: CopyMode, known: Tokens) -> SessionLimits {
        let mut limits = self.settings.limits;
        let grain = self.engine.moving().map(MovingEngine::kv_grain);
        match (mode, grain) {
            (CopyMode::Recompute, _) => limits.stage_patience += PREFILL_PATIENCE * known.0,
            // Nothing can be copied while it runs.
            (CopyMode::Kv, Some(None)) => limits.max_stages = 0,
            (CopyMode::Kv, Some(Some(grain))) => limits = in_grains(limits, grain),
            (CopyMode::Kv, None) | (CopyMode::Waiting, _) => {}
        }
        limits
    }

    /// Room for what exists and for what comes during the copy.
    pub(super) fn room_for(&self, proposal: &Proposal) -> ReserveAsk {
        let home = proposal.migration.request.home;
        let what = (proposal.mode, home, proposal.known);
        let block_size = self.engine.facts().block_size;
        let (longest, waited) = (proposal.longest, proposal.waited);
        room_for(what, (longest, waited), block_size, &self.settings.limits)
    }
}

/// Bounds for an engine that exports whole grains while a request runs: what is left at the end may be as much as one. An
/// engine beside a node computes a token for each stage, behind whatever it is at.
fn in_grains(mut limits: SessionLimits, grain: Tokens) -> SessionLimits {
    if grain > Tokens(1) {
        let most = limits.max_stage_tokens.0 / grain.0 * grain.0;
        limits.max_stage_tokens = Tokens(most).max(grain);
        limits.last_stage_tokens = limits.last_stage_tokens.max(grain);
        limits.stage_patience += PREFILL_PATIENCE * limits.max_stage_tokens.0;
    }
    limits
}

/// What a target keeps for a request that is to come: for the tokens that exist, and some that are drawn during the copy, up
/// to its longest. It has waited so long since its client asked.
pub(crate) fn room_for(
    (mode, home, known): (CopyMode, NodeId, Tokens),
    (longest, waited): (Tokens, Duration),
    block_size: BlockSize,
    limits: &SessionLimits,
) -> ReserveAsk {
    let tokens = match mode {
        CopyMode::Waiting => known + Tokens(1),
        CopyMode::Kv | CopyMode::Recompute => (known + GROWTH).min(longest),
    };
    ReserveAsk {
        demand: block_size.blocks_for(tokens).max(Blocks(1)),
        // The engine's own lease is the last resort: the session's is shorter.
        lease: limits.lease + limits.grace,
        at_once: true,
        waited,
        resumed: false,
        home,
    }
}

#[async_trait]
impl KvReceiver for Moves {
    fn admit(&self, from: NodeId, header: &ParcelHeader) -> Result<(), Rejection> {
        self.lock()
            .arriving_by(header.migration, from)
            .ok_or(Rejection::Unknown)?;
        let tokens = match header.kind {
            ParcelKind::Opening | ParcelKind::Last(None) => Tokens::ZERO,
            ParcelKind::Stage(range) | ParcelKind::Last(Some(range)) => range.tokens(),
        };
        let moving = self.engine.moving();
        let bytes = moving.map_or(0, MovingEngine::kv_bytes_per_token);
        // The last of a request's KV comes in whole grains.
        let grain = moving
            .and_then(MovingEngine::kv_grain)
            .map_or(1, |grain| grain.0);
        let tokens = u64::from(tokens.0.next_multiple_of(grain.max(1)));
        let most = tokens * u64::from(bytes) + STAGE_FRAME_BYTES;
        let head = u64::from(header.head_bytes);
        if head > MAX_SUBMIT_BYTES as u64 || header.body_bytes > most {
            return Err(Rejection::TooLarge);
        }
        Ok(())
    }

    async fn deliver(&self, from: NodeId, parcel: Parcel) -> Result<(), Rejection> {
        let inputs = self
            .lock()
            .arriving_by(parcel.header.migration, from)
            .map(|it| it.inputs.clone())
            .ok_or(Rejection::Unknown)?;
        let (reply, taken) = oneshot::channel();
        inputs
            .send(TargetEvent::Parcel(parcel, reply))
            .await
            .map_err(|_| Rejection::Unknown)?;
        taken.await.unwrap_or(Err(Rejection::Unknown))
    }
}
