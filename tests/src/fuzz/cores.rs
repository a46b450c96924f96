//! Ledger and hand-over sessions, told what the bytes say in any order.

use std::time::Duration;

use shoal_gossip::{Epoch, NodeId, RequestId, Timestamp, Tokens};
use shoal_migrate::session::{
    Claim, SourceAction, SourceInput, SourcePlan, SourceSession, TargetAction, TargetInput,
    TargetPlan, TargetSession,
};
use shoal_migrate::{ClaimAnswer, CopyMode, MigrationId, MoveRefusal, SessionLimits, StageIndex};
use shoal_node::engine::answer::Wire;
use shoal_node::engine::{EngineError, Finish, FinishReason, TokenBatch};
use shoal_node::ledger::{Ledger, Verdict};
use shoal_node::mesh::messages::{Frame, FrameBody};

const REQUEST: RequestId = RequestId {
    home: NodeId(1),
    serial: 2,
};

/// Output at most of the request here.
const MOST: u32 = 40;

/// Takes small numbers off a string of bytes.
struct Dice<'a>(&'a [u8]);

impl Dice<'_> {
    fn next(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(u32::from(*first))
    }

    /// A number below a bound; 0 when the bytes are used up.
    fn below(&mut self, bound: u32) -> u32 {
        self.next().unwrap_or(0) % bound
    }
}

/// Frames, claims and placements in any order: each output index is delivered once and in order, whoever sends it, and
/// nothing after the end.
pub(super) fn ledger(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let mut ledger = Ledger::new(REQUEST, MOST);
    let (mut delivered, mut finished) = (0, false);
    while let Some(what) = dice.next() {
        let before = ledger.epoch();
        match what % 4 {
            0 => {
                ledger.pass_on(NodeId(u64::from(dice.below(4)) + 2));
                assert!(ledger.epoch() > before);
            }
            1 => {
                let claim = Claim {
                    epoch: Epoch(before.0.saturating_add(dice.below(4)).saturating_sub(1)),
                    output: dice.below(MOST + 2),
                };
                let by = NodeId(u64::from(dice.below(4)) + 2);
                if let ClaimAnswer::Granted { from } = ledger.claim(by, claim) {
                    assert!(!finished && from == delivered && claim.output >= delivered);
                    assert_eq!(ledger.epoch(), claim.epoch);
                }
            }
            _ => {
                let frame = frame(&mut dice, before, delivered);
                match ledger.accept(frame) {
                    Verdict::Deliver(batch) => {
                        assert!(!finished && batch.index == delivered);
                        delivered += u32::try_from(batch.ids.len()).unwrap_or(u32::MAX);
                        assert!(delivered <= MOST);
                    }
                    Verdict::Finish(_) => {
                        assert!(!finished);
                        finished = true;
                    }
                    Verdict::Failed(_) | Verdict::Gap { .. } | Verdict::Ignore => {}
                }
            }
        }
        assert!(ledger.epoch() >= before && ledger.count() == delivered);
    }
}

fn frame(dice: &mut Dice<'_>, epoch: Epoch, delivered: u32) -> Frame {
    let near = |dice: &mut Dice<'_>, middle: u32| (middle + dice.below(5)).saturating_sub(2);
    let epoch = Epoch(near(dice, epoch.0));
    let body = match dice.below(8) {
        0 => FrameBody::Finished(Finish {
            reason: FinishReason::Stop,
            output_tokens: near(dice, delivered),
            text: String::new(),
            prompt_tokens: None,
            wire: Wire::default(),
        }),
        1 => FrameBody::Failed(EngineError::QueueFull),
        2 => FrameBody::Started {
            prepared: None,
            prompt_tokens: 3,
        },
        _ => FrameBody::Tokens(TokenBatch {
            index: near(dice, delivered),
            ids: vec![7; dice.below(6) as usize],
            text: "x".into(),
            ..TokenBatch::default()
        }),
    };
    Frame {
        request: REQUEST,
        epoch,
        body,
    }
}

/// Both sessions of a hand-over, told anything: they end, once, and ask for a bounded number of things at each step.
pub(super) fn sessions(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let mode = [CopyMode::Kv, CopyMode::Recompute, CopyMode::Waiting][dice.below(3) as usize];
    let (migration, limits) = (
        MigrationId {
            request: REQUEST,
            epoch: Epoch(1),
            target: NodeId(3),
            attempt: 1,
        },
        SessionLimits::default(),
    );
    let mut now = Timestamp::ZERO;
    let mut out = Vec::new();
    let plan = SourcePlan {
        migration,
        mode,
        limits,
    };
    let mut source = SourceSession::new(plan, now, &mut out);
    let mut target = TargetSession::new(
        TargetPlan {
            migration,
            mode,
            limits,
        },
        now,
    );
    let (mut source_ends, mut target_ends) = (0, 0);
    while let Some(what) = dice.next() {
        now = now + Duration::from_millis(u64::from(dice.below(200)) * 10);
        let mut actions = Vec::new();
        if what % 2 == 0 {
            source.handle(now, source_input(&mut dice), &mut actions);
            assert!(actions.len() < 8, "{actions:?}");
            let end = |action: &&SourceAction| matches!(action, SourceAction::End(_));
            source_ends += actions.iter().filter(end).count();
            assert_eq!(source_ends > 0, source.deadline().is_none());
        } else {
            let mut actions = Vec::new();
            target.handle(now, target_input(&mut dice), &mut actions);
            assert!(actions.len() < 8, "{actions:?}");
            let end = |action: &&TargetAction| matches!(action, TargetAction::End(_));
            target_ends += actions.iter().filter(end).count();
            assert_eq!(target_ends > 0, target.deadline().is_none());
        }
        assert!(source_ends <= 1 && target_ends <= 1);
    }
    // Left alone, both end by their deadlines.
    for _ in 0..200 {
        let mut actions = Vec::new();
        if let Some(deadline) = source.deadline() {
            source.handle(deadline, SourceInput::Tick, &mut actions);
            source.handle(deadline, SourceInput::ClaimUnanswered, &mut actions);
        }
        let mut actions = Vec::new();
        if let Some(deadline) = target.deadline() {
            target.handle(deadline, TargetInput::Tick, &mut actions);
            target.handle(deadline, TargetInput::ClaimUnanswered, &mut actions);
        }
    }
    assert_eq!((source.deadline(), target.deadline()), (None, None));
}

fn claim_answer(dice: &mut Dice<'_>) -> ClaimAnswer {
    match dice.below(2) {
        0 => ClaimAnswer::Lost,
        _ => ClaimAnswer::Granted {
            from: dice.below(MOST),
        },
    }
}

fn stage(dice: &mut Dice<'_>) -> StageIndex {
    StageIndex(dice.below(6) as u16)
}

fn source_input(dice: &mut Dice<'_>) -> SourceInput {
    let reason = String::new;
    match dice.below(17) {
        0 => SourceInput::Accepted,
        1 => SourceInput::Refused(MoveRefusal::Busy),
        2 => SourceInput::Unanswered,
        3 | 4 => SourceInput::StageSent {
            stage: stage(dice),
            end: Tokens(dice.below(200)),
            existing: Tokens(dice.below(255)),
            took: Duration::from_millis(u64::from(dice.below(200))),
        },
        5 => SourceInput::StageFailed {
            stage: stage(dice),
            reason: reason(),
        },
        6 => SourceInput::Paused,
        7 => SourceInput::LastSent,
        8 => SourceInput::LastFailed { reason: reason() },
        9 => SourceInput::Gone,
        10 => SourceInput::Committed,
        11 => SourceInput::Cancelled { reason: reason() },
        12 => SourceInput::Claimed(claim_answer(dice)),
        13 => SourceInput::ClaimUnanswered,
        14 => SourceInput::Attached {
            from: dice.below(MOST),
        },
        15 => SourceInput::TargetDown,
        _ => SourceInput::Tick,
    }
}

fn target_input(dice: &mut Dice<'_>) -> TargetInput {
    match dice.below(13) {
        0 | 1 => TargetInput::StageArrived {
            stage: stage(dice),
            start: Tokens(dice.below(200)),
            end: Tokens(dice.below(255)),
        },
        2 | 3 => TargetInput::StageImported { stage: stage(dice) },
        4 => TargetInput::LastArrived {
            stage: stage(dice),
            start: Some(Tokens(dice.below(200))),
            output: dice.below(MOST),
        },
        5 => TargetInput::LastImported,
        6 => TargetInput::ImportFailed {
            reason: String::new(),
        },
        7 => TargetInput::Cancelled,
        8 => TargetInput::Claimed(claim_answer(dice)),
        9 => TargetInput::ClaimUnanswered,
        10 => TargetInput::Gone,
        11 => TargetInput::SourceDown,
        _ => TargetInput::Tick,
    }
}
