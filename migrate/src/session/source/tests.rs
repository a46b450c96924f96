//! Every state with every input, as a table; then what the table cannot say.

use proptest::prelude::*;
use shoal_gossip::{Epoch, NodeId, RequestId};

use super::*;
use crate::{MoveRefusal, SessionLimits};
use SourceAction as Do;
use SourceInput as In;

const TARGET: NodeId = NodeId(7);
const NOW: Timestamp = Timestamp::ZERO;
const FROM: u32 = 11;

fn plan(mode: CopyMode) -> SourcePlan {
    SourcePlan {
        migration: MigrationId {
            request: RequestId {
                home: NodeId(1),
                serial: 2,
            },
            epoch: Epoch(4),
            target: TARGET,
            attempt: 1,
        },
        mode,
        limits: SessionLimits::default(),
    }
}

/// Feeds one input and returns what it asked for.
fn feed(session: &mut SourceSession, now: Timestamp, input: In) -> Vec<Do> {
    let mut actions = Vec::new();
    session.handle(now, input, &mut actions);
    actions
}

fn begun(mode: CopyMode) -> SourceSession {
    let mut actions = Vec::new();
    let session = SourceSession::new(plan(mode), NOW, &mut actions);
    assert_eq!(actions, [Do::Propose]);
    session
}

/// A KV move, after these inputs.
fn after(inputs: &[In]) -> SourceSession {
    let mut session = begun(CopyMode::Kv);
    for input in inputs {
        let actions = feed(&mut session, NOW, input.clone());
        assert!(!matches!(actions.last(), Some(Do::End(_))), "{actions:?}");
    }
    session
}

/// Stage 0 is there, and 8 tokens are missing: time to pause.
fn stage_sent(stage: u16) -> In {
    In::StageSent {
        stage: StageIndex(stage),
        end: Tokens(500),
        existing: Tokens(508),
        took: Duration::from_millis(100),
    }
}

fn because() -> String {
    "because".to_owned()
}

/// The states by name, each as a session that stands in it.
fn states() -> [(&'static str, SourceSession); 7] {
    let last_failed = In::LastFailed { reason: because() };
    let copied = [In::Accepted, stage_sent(0)];
    let sending = [&copied[..], &[In::Paused]].concat();
    [
        ("proposing", after(&[])),
        ("copying", after(&[In::Accepted])),
        ("pausing", after(&copied)),
        ("sending", after(&sending)),
        ("sent", after(&[&sending[..], &[In::LastSent]].concat())),
        ("claiming", after(&[&sending[..], &[last_failed]].concat())),
        ("ended", {
            let mut ended = begun(CopyMode::Kv);
            feed(&mut ended, NOW, In::Stop);
            ended
        }),
    ]
}

/// The inputs by name. `Tick` comes at the deadline.
fn inputs() -> [(&'static str, In); 21] {
    [
        ("accepted", In::Accepted),
        ("refused", In::Refused(MoveRefusal::NoRoom)),
        ("unanswered", In::Unanswered),
        ("stage sent", stage_sent(0)),
        ("other stage sent", stage_sent(5)),
        (
            "stage failed",
            In::StageFailed {
                stage: StageIndex(0),
                reason: because(),
            },
        ),
        (
            "other stage failed",
            In::StageFailed {
                stage: StageIndex(5),
                reason: because(),
            },
        ),
        ("paused", In::Paused),
        ("last sent", In::LastSent),
        ("last failed", In::LastFailed { reason: because() }),
        ("gone", In::Gone),
        ("committed", In::Committed),
        ("cancelled", In::Cancelled { reason: because() }),
        ("granted", In::Claimed(ClaimAnswer::Granted { from: FROM })),
        ("lost", In::Claimed(ClaimAnswer::Lost)),
        ("claim unanswered", In::ClaimUnanswered),
        ("attached", In::Attached { from: FROM }),
        ("target down", In::TargetDown),
        ("stop", In::Stop),
        ("tick", In::Tick),
        ("tick too early", In::Tick),
    ]
}

const NOTHING: [Do; 0] = [];
const CLAIM: Do = Do::Claim { epoch: Epoch(5) };

fn stayed(error: MigrateError) -> Do {
    Do::End(Outcome::Stayed(Cause::Error(error)))
}

fn over(error: MigrateError) -> Do {
    Do::End(Outcome::Over(Cause::Error(error)))
}

fn stopped() -> Do {
    Do::End(Outcome::Stayed(Cause::Stopped))
}

fn copy_failed() -> MigrateError {
    MigrateError::Copy {
        target: TARGET,
        reason: because(),
    }
}

/// What each state does on each input; a pair that is not listed does nothing and changes nothing.
fn expected(state: &str, input: &str) -> Vec<Do> {
    let silent = || stayed(MigrateError::TargetSilent { target: TARGET });
    let dead = || stayed(MigrateError::TargetDead { target: TARGET });
    let gone = || vec![Do::CancelTarget, over(MigrateError::RequestGone)];
    let resume = || {
        let epoch = Epoch(5);
        vec![
            Do::Resume { epoch, from: FROM },
            Do::CancelTarget,
            stayed(copy_failed()),
        ]
    };
    match (state, input) {
        ("proposing", "accepted") => vec![Do::Copy {
            stage: StageIndex(0),
            from: Tokens(0),
            at_most: Tokens(1024),
        }],
        ("proposing", "refused") => vec![stayed(MigrateError::Refused {
            target: TARGET,
            refusal: MoveRefusal::NoRoom,
        })],
        ("proposing", "unanswered") => vec![Do::CancelTarget, silent()],

        ("copying", "stage sent") => vec![Do::Pause { from: Tokens(500) }],
        ("copying", "stage failed") => vec![Do::CancelTarget, stayed(copy_failed())],

        ("pausing", "paused") => vec![Do::SendLast {
            stage: StageIndex(1),
        }],
        ("pausing", "cancelled") => vec![Do::Unpause, stayed(copy_failed())],
        ("pausing", "target down") => vec![Do::Unpause, dead()],
        ("pausing", "stop") => vec![Do::Unpause, Do::CancelTarget, stopped()],
        ("pausing", "tick") => vec![
            Do::Unpause,
            Do::CancelTarget,
            stayed(MigrateError::Copy {
                target: TARGET,
                reason: "the engine did not stop the request in time".to_owned(),
            }),
        ],

        ("proposing" | "copying", "cancelled") => vec![stayed(copy_failed())],
        ("proposing" | "copying", "target down") => vec![dead()],
        ("proposing" | "copying", "stop") => vec![Do::CancelTarget, stopped()],
        ("proposing" | "copying", "tick") => vec![Do::CancelTarget, silent()],

        ("sending", "last failed") => vec![CLAIM],
        ("sending" | "sent", "cancelled" | "target down" | "tick") => vec![CLAIM],
        ("sending" | "sent" | "claiming", "committed") => {
            vec![Do::Free, Do::End(Outcome::Moved)]
        }

        ("claiming", "granted" | "attached") => resume(),
        ("claiming", "lost") => vec![Do::Free, over(MigrateError::Lost)],
        ("claiming", "tick") => vec![CLAIM],

        ("proposing" | "copying" | "pausing" | "sending" | "sent" | "claiming", "gone") => gone(),
        _ => NOTHING.to_vec(),
    }
}

/// Pairs that ask for nothing and yet are news.
const SILENT_STEPS: [(&str, &str); 1] = [("sending", "last sent")];

#[test]
fn every_state_answers_every_input_as_the_table_says() {
    for (state, session) in states() {
        for (input, value) in inputs() {
            let mut next = session.clone();
            let now = match input {
                "tick" => session.deadline().unwrap_or(NOW),
                _ => NOW,
            };
            let actions = feed(&mut next, now, value);
            assert_eq!(actions, expected(state, input), "{state}, {input}");
            let silent_step = SILENT_STEPS.contains(&(state, input));
            assert_eq!(
                next == session,
                actions.is_empty() && !silent_step,
                "{state}, {input}: {next:?}"
            );
            let ended = matches!(actions.last(), Some(Do::End(_))) || state == "ended";
            assert_eq!(next.deadline().is_none(), ended, "{state}, {input}");
        }
    }
}

#[test]
fn the_request_is_never_unpaused_once_the_last_stage_may_be_on_its_way() {
    for (state, session) in states() {
        if !["sending", "sent", "claiming"].contains(&state) {
            continue;
        }
        for (input, value) in inputs() {
            let mut next = session.clone();
            let now = session.deadline().unwrap_or(NOW);
            let actions = feed(&mut next, now, value);
            assert!(!actions.contains(&Do::Unpause), "{state}, {input}");
            let resumed = actions
                .iter()
                .any(|action| matches!(action, Do::Resume { .. }));
            let granted = state == "claiming" && ["granted", "attached"].contains(&input);
            assert_eq!(resumed, granted, "{state}, {input}");
        }
    }
}

#[test]
fn a_waiting_request_is_paused_at_once_and_sent_without_stages() {
    let mut session = begun(CopyMode::Waiting);
    let actions = feed(&mut session, NOW, In::Accepted);
    assert_eq!(actions, [Do::Pause { from: Tokens(0) }]);
    let actions = feed(&mut session, NOW, In::Paused);
    let stage = StageIndex(0);
    assert_eq!(actions, [Do::SendLast { stage }]);
}

#[test]
fn in_recompute_mode_the_ids_are_the_first_stage() {
    let mut session = begun(CopyMode::Recompute);
    let actions = feed(&mut session, NOW, In::Accepted);
    let first = Do::Copy {
        stage: StageIndex(0),
        from: Tokens(0),
        at_most: Tokens(1024),
    };
    assert_eq!(actions, [first]);
}

/// What follows a copy that stands so: `Some(stage)` for one more stage, `None` for the pause.
#[track_caller]
fn check_next(
    (stage, from): (u16, u32),
    (end, existing): (u32, u32),
    took_ms: u64,
    next_stage: Option<u16>,
) {
    let mut session = begun(CopyMode::Kv);
    session.state = State::Copying(Copying {
        stage: StageIndex(stage),
        from: Tokens(from),
        missing: Some(Tokens(100_000)),
        short: stage,
    });
    let sent = In::StageSent {
        stage: StageIndex(stage),
        end: Tokens(end),
        existing: Tokens(existing),
        took: Duration::from_millis(took_ms),
    };
    let from = Tokens(end);
    let expected = next_stage.map_or(Do::Pause { from }, |stage| Do::Copy {
        stage: StageIndex(stage),
        from,
        at_most: Tokens(1024),
    });
    assert_eq!(feed(&mut session, NOW, sent), [expected]);
}

#[test]
fn copying_goes_on_until_the_rest_is_small_or_no_longer_shrinks() {
    check_next((0, 0), (1000, 1016), 1000, None);
    check_next((0, 0), (1000, 1017), 1000, Some(1));
    // 20 of 1,000 tokens take 1 ms when those took 50 ms, and more than that when they took 51 ms.
    check_next((0, 0), (1000, 1020), 50, None);
    check_next((0, 0), (1000, 1020), 51, Some(1));
    // 40 came while 40 were sent.
    check_next((1, 1000), (1040, 1079), 1000, Some(2));
    check_next((1, 1000), (1040, 1080), 1000, None);
    // The sixteenth stage is the last.
    check_next((14, 1000), (1040, 1060), 1000, Some(15));
    check_next((15, 1000), (1040, 1060), 1000, None);
    // Nothing was exported, since nothing is there.
    check_next((0, 0), (0, 0), 0, None);
}

#[test]
fn a_stage_with_nothing_to_send_takes_no_number() {
    let mut session = after(&[In::Accepted]);
    let nothing = In::StageSent {
        stage: StageIndex(0),
        end: Tokens::ZERO,
        existing: Tokens(8),
        took: Duration::from_millis(1),
    };
    let asked = feed(&mut session, NOW, nothing);
    assert_eq!(asked, [Do::Pause { from: Tokens::ZERO }]);
    let stage = StageIndex(0);
    let asked = feed(&mut session, NOW, In::Paused);
    assert_eq!(
        asked,
        [Do::SendLast { stage }],
        "the target waits for this one"
    );
}

#[test]
fn a_long_request_takes_as_many_full_stages_as_it_needs() {
    let mut session = after(&[In::Accepted]);
    for stage in 0..40u16 {
        let end = Tokens(1024 * (u32::from(stage) + 1));
        let sent = In::StageSent {
            stage: StageIndex(stage),
            end,
            existing: Tokens(60_000 + 10 * u32::from(stage)),
            took: Duration::from_millis(10),
        };
        let next = Do::Copy {
            stage: StageIndex(stage + 1),
            from: end,
            at_most: Tokens(1024),
        };
        assert_eq!(feed(&mut session, NOW, sent), [next]);
    }
}

#[test]
fn a_copy_that_is_slower_than_the_request_grows_is_given_up() {
    let mut session = after(&[In::Accepted]);
    let sent = |stage: u16, existing| In::StageSent {
        stage: StageIndex(stage),
        end: Tokens(1024 * (u32::from(stage) + 1)),
        existing: Tokens(existing),
        took: Duration::from_secs(5),
    };
    let actions = feed(&mut session, NOW, sent(0, 9000));
    assert!(matches!(actions[..], [Do::Copy { .. }]), "{actions:?}");
    let actions = feed(&mut session, NOW, sent(1, 9000 + 1024));
    assert!(
        matches!(
            actions[..],
            [
                Do::CancelTarget,
                Do::End(Outcome::Stayed(Cause::Error(MigrateError::Copy { .. })))
            ]
        ),
        "{actions:?}"
    );
}

#[test]
fn a_home_that_stays_silent_is_asked_every_interval_and_given_up_after_the_grace() {
    let sending = [In::Accepted, stage_sent(0), In::Paused];
    let mut session = after(&sending);
    let limits = plan(CopyMode::Kv).limits;
    let doubt = NOW + limits.stage_patience;
    assert_eq!(session.deadline(), Some(doubt));
    let mut now = doubt;
    let mut claims = 0;
    loop {
        let actions = feed(&mut session, now, In::Tick);
        if actions == [CLAIM] {
            claims += 1;
        } else {
            assert_eq!(actions, [Do::Free, over(MigrateError::HomeSilent)]);
            break;
        }
        assert!(feed(&mut session, now, In::ClaimUnanswered).is_empty());
        now = session.deadline().expect("it goes on");
    }
    assert_eq!(now, doubt + limits.grace);
    assert_eq!(
        claims,
        limits.grace.as_millis() / limits.claim_interval.as_millis()
    );
}

#[test]
fn the_word_of_the_target_is_awaited_from_the_arrival_of_the_last_stage() {
    let mut session = after(&[In::Accepted, stage_sent(0), In::Paused]);
    let limits = plan(CopyMode::Kv).limits;
    let arrived = NOW + Duration::from_secs(3);
    assert!(feed(&mut session, arrived, In::LastSent).is_empty());
    assert_eq!(session.deadline(), Some(arrived + limits.commit_patience));
}

/// Deadlines between a begin and an end, at most: one for each state before the doubt, and one for each claim.
fn most_ticks() -> usize {
    let limits = SessionLimits::default();
    let claims = limits.grace.as_millis() / limits.claim_interval.as_millis();
    usize::try_from(claims).unwrap_or(usize::MAX) + 5
}

proptest! {
    #[test]
    fn whatever_happens_a_session_ends_once_and_leaves_the_request_in_one_place(
        // Most random inputs end a move: it has got so far before they begin.
        progress in 0..5usize,
        steps in prop::collection::vec((0..21usize, 0..3000u64), 0..60),
    ) {
        let mut session = begun(CopyMode::Kv);
        let mut now = NOW;
        let mut all = Vec::new();
        for input in &[In::Accepted, stage_sent(0), In::Paused, In::LastSent][..progress] {
            all.extend(feed(&mut session, now, input.clone()));
        }
        for (pick, millis) in steps {
            now = now + Duration::from_millis(millis);
            all.extend(feed(&mut session, now, inputs()[pick].1.clone()));
        }
        for _ in 0..most_ticks() {
            if let Some(deadline) = session.deadline() {
                now = now.max(deadline);
                all.extend(feed(&mut session, now, In::Tick));
            }
        }
        let ends: Vec<usize> = (0..all.len()).filter(|&at| matches!(all[at], Do::End(_))).collect();
        prop_assert_eq!(&ends, &[all.len() - 1]);
        let position = |wanted: fn(&Do) -> bool| all.iter().position(wanted);
        let handed_over = position(|action| matches!(action, Do::SendLast { .. }));
        let unpaused = position(|action| matches!(action, Do::Unpause));
        prop_assert!(handed_over.is_none() || unpaused.is_none());
        let count = |wanted: fn(&Do) -> bool| all.iter().filter(|action| wanted(action)).count();
        let freed = count(|action| matches!(action, Do::Free));
        let resumed = count(|action| matches!(action, Do::Resume { .. }));
        prop_assert!(freed + resumed <= 1);
        // Freed only where somebody else may have it, and resumed only when the home was asked.
        let asked = count(|action| matches!(action, Do::Claim { .. }));
        let moved = matches!(all.last(), Some(Do::End(Outcome::Moved)));
        prop_assert!(freed == 0 || handed_over.is_some() && (asked > 0 || moved));
        prop_assert!(resumed == 0 || asked > 0);
    }
}
