//! One stage of a copy, and what else a source asks of its engine and carrier.

use bytes::Bytes;
use serde::Serialize;
use shoal_gossip::Tokens;
use shoal_migrate::session::SourceInput;
use shoal_migrate::transfer::{Parcel, ParcelKind, TransferError};
use shoal_migrate::{CopyMode, KvRange, MigrationId, Proposal, ProposalAnswer, StageIndex};
use tracing::debug;

use super::Done;
use crate::engine::moving::{ExportedKv, LastState, MoveError};
use crate::mesh::messages::{Answer, Ask};
use crate::moves::Moves;

pub(super) async fn ask_target(moves: &Moves, proposal: Proposal) -> Done {
    let (target, offered) = (proposal.migration.target, proposal.direct);
    let answered = moves.ask(target, Ask::Propose(proposal)).await;
    Done::Input(match answered {
        Some(Answer::Proposal(ProposalAnswer::Accepted { direct, .. })) => {
            return Done::Accepted {
                direct: direct && offered,
            };
        }
        Some(Answer::Proposal(ProposalAnswer::Refused(refusal))) => SourceInput::Refused(refusal),
        Some(_) | None => SourceInput::Unanswered,
    })
}

pub(super) async fn pause(moves: &Moves, migration: MigrationId, kv_from: Option<Tokens>) -> Done {
    let Some(moving) = moves.engine.moving() else {
        return Done::Input(SourceInput::Gone);
    };
    match moving
        .pause(migration.request, migration.epoch, kv_from)
        .await
    {
        Ok(job) => Done::Paused(Box::new(job)),
        Err(error) => {
            debug!(%migration, %error, "could not be paused");
            Done::Input(SourceInput::Gone)
        }
    }
}

/// One stage, from the engine to the target's acknowledgement.
pub(super) struct Copy {
    pub(super) migration: MigrationId,
    pub(super) stage: StageIndex,
    pub(super) from: Tokens,
    pub(super) at_most: Tokens,
    pub(super) mode: CopyMode,
    pub(super) opening: bool,
}

impl Copy {
    pub(super) async fn run(self, moves: &Moves) -> Done {
        let began = moves.clock.now();
        match self.copy(moves).await {
            Ok((end, bytes)) => Done::Copied {
                input: SourceInput::StageSent {
                    stage: self.stage,
                    end,
                    existing: self.existing(moves).max(end),
                    took: moves.clock.now().since(began),
                },
                bytes,
            },
            Err(CopyFailure::Gone) => Done::Input(SourceInput::Gone),
            Err(CopyFailure::Failed(reason)) => Done::Input(SourceInput::StageFailed {
                stage: self.stage,
                reason,
            }),
        }
    }

    /// Where the copy ends now, and the bytes it took.
    async fn copy(&self, moves: &Moves) -> Result<(Tokens, u64), CopyFailure> {
        let (request, epoch) = (self.migration.request, self.migration.epoch);
        let moving = moves.engine.moving().ok_or(CopyFailure::Gone)?;
        let mut bytes = 0;
        if self.opening {
            bytes += open(moves, self.migration, self.stage).await?;
        }
        let (range, head, body) = match self.mode {
            CopyMode::Kv => {
                let exported = moving
                    .export(request, epoch, self.from, self.at_most)
                    .await?;
                let (range, body) = parts(exported.kv);
                (range, Bytes::new(), body)
            }
            CopyMode::Recompute | CopyMode::Waiting => {
                let opening = moving.describe(request, epoch)?;
                let known = opening.prepared.prompt.len() + opening.output.len();
                let known = Tokens(u32::try_from(known).unwrap_or(u32::MAX));
                let state = LastState {
                    output: opening.output,
                    ..LastState::default()
                };
                (
                    KvRange::new(self.from, known),
                    encode(&state)?,
                    Bytes::new(),
                )
            }
        };
        let Some(range) = range else {
            return Ok((self.from, bytes));
        };
        let kind = ParcelKind::Stage(range);
        bytes += send(moves, self.migration, self.stage, (kind, head, body)).await?;
        Ok((range.end(), bytes))
    }

    /// Tokens that the target could have by now.
    fn existing(&self, moves: &Moves) -> Tokens {
        let job = moves
            .engine
            .moving()
            .and_then(|moving| moving.job(self.migration.request));
        job.map_or(Tokens::ZERO, |job| match self.mode {
            CopyMode::Kv => job.computed,
            CopyMode::Recompute | CopyMode::Waiting => job.prompt + job.output,
        })
    }
}

enum CopyFailure {
    Gone,
    Failed(String),
}

impl From<String> for CopyFailure {
    fn from(reason: String) -> Self {
        Self::Failed(reason)
    }
}

impl From<MoveError> for CopyFailure {
    fn from(error: MoveError) -> Self {
        match error {
            MoveError::Gone => Self::Gone,
            MoveError::NoRoom | MoveError::Unfit(_) | MoveError::Broken(_) => {
                Self::Failed(error.to_string())
            }
        }
    }
}

/// Sends the request's description. Gives its bytes.
pub(super) async fn open(
    moves: &Moves,
    migration: MigrationId,
    stage: StageIndex,
) -> Result<u64, String> {
    let moving = moves.engine.moving().ok_or("the engine has gone")?;
    let opening = moving
        .describe(migration.request, migration.epoch)
        .map_err(|error| error.to_string())?;
    let head = encode(&opening)?;
    send(
        moves,
        migration,
        stage,
        (ParcelKind::Opening, head, Bytes::new()),
    )
    .await
}

/// Sends a parcel and waits until the target has taken it in. Gives its bytes.
pub(super) async fn send(
    moves: &Moves,
    migration: MigrationId,
    stage: StageIndex,
    (kind, head, body): (ParcelKind, Bytes, Bytes),
) -> Result<u64, String> {
    let ways = moves.ways.get().ok_or("the planes do not run")?;
    let parcel = Parcel::new(migration, stage, kind, head, body);
    let transfer = ways.carrier.submit(migration.target, parcel);
    let delivered = transfer.delivered().await;
    delivered
        .map(|delivered| delivered.bytes)
        .map_err(|error: TransferError| error.to_string())
}

pub(super) fn parts(kv: Option<ExportedKv>) -> (Option<KvRange>, Bytes) {
    match kv {
        Some(kv) => (Some(kv.range), kv.bytes),
        None => (None, Bytes::new()),
    }
}

pub(super) fn encode<T: Serialize>(value: &T) -> Result<Bytes, String> {
    postcard::to_stdvec(value)
        .map(Bytes::from)
        .map_err(|error| error.to_string())
}
