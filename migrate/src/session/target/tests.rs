//! Every state with every input, as a table; then what the table cannot say.

use std::time::Duration;

use proptest::prelude::*;
use shoal_gossip::{Epoch, NodeId, RequestId};

use super::*;
use crate::SessionLimits;
use TargetAction as Do;
use TargetInput as In;

const TARGET: NodeId = NodeId(7);
const NOW: Timestamp = Timestamp::ZERO;
const FROM: u32 = 11;
const OUTPUT: u32 = 13;

fn plan(mode: CopyMode) -> TargetPlan {
    TargetPlan {
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

fn feed(session: &mut TargetSession, now: Timestamp, input: In) -> Vec<Do> {
    let mut actions = Vec::new();
    session.handle(now, input, &mut actions);
    actions
}

/// A KV move, after these inputs.
fn after(inputs: &[In]) -> TargetSession {
    let mut session = TargetSession::new(plan(CopyMode::Kv), NOW);
    for input in inputs {
        let actions = feed(&mut session, NOW, input.clone());
        assert!(!matches!(actions.last(), Some(Do::End(_))), "{actions:?}");
    }
    session
}

fn arrived(stage: u16, start: u32, end: u32) -> In {
    In::StageArrived {
        stage: StageIndex(stage),
        start: Tokens(start),
        end: Tokens(end),
    }
}

fn last(stage: u16, start: Option<u32>) -> In {
    In::LastArrived {
        stage: StageIndex(stage),
        start: start.map(Tokens),
        output: OUTPUT,
    }
}

fn imported(stage: u16) -> In {
    In::StageImported {
        stage: StageIndex(stage),
    }
}

fn because() -> String {
    "because".to_owned()
}

/// The states by name, each as a session that stands in it. Stage 0 has been taken in in all but the first two.
fn states() -> [(&'static str, TargetSession); 6] {
    let copied = [arrived(0, 0, 100), imported(0)];
    let completing = [&copied[..], &[last(1, Some(100))]].concat();
    [
        ("reserved", after(&[])),
        ("importing", after(&[arrived(0, 0, 100)])),
        ("copied", after(&copied)),
        ("completing", after(&completing)),
        (
            "claiming",
            after(&[&completing[..], &[In::LastImported]].concat()),
        ),
        ("ended", {
            let mut ended = after(&[]);
            feed(&mut ended, NOW, In::Stop);
            ended
        }),
    ]
}

/// The inputs by name. `Tick` comes at the deadline.
fn inputs() -> [(&'static str, In); 18] {
    [
        ("first stage", arrived(0, 0, 100)),
        ("second stage", arrived(1, 100, 101)),
        ("second stage with a gap", arrived(1, 101, 110)),
        ("last as first", last(0, Some(0))),
        ("last as second", last(1, Some(100))),
        ("last with a gap", last(1, Some(101))),
        ("first imported", imported(0)),
        ("second imported", imported(1)),
        ("last imported", In::LastImported),
        ("import failed", In::ImportFailed { reason: because() }),
        ("cancelled", In::Cancelled),
        ("granted", In::Claimed(ClaimAnswer::Granted { from: FROM })),
        ("lost", In::Claimed(ClaimAnswer::Lost)),
        ("claim unanswered", In::ClaimUnanswered),
        ("attached", In::Attached { from: FROM }),
        ("gone", In::Gone),
        ("source down", In::SourceDown),
        ("stop", In::Stop),
    ]
}

const CLAIM: Do = Do::Claim {
    epoch: Epoch(5),
    output: OUTPUT,
};

fn told(reason: &str) -> Do {
    let reason = reason.to_owned();
    Do::TellCancelled { reason }
}

fn rejected(stage: u16, reason: &str) -> Do {
    Do::Reject {
        stage: StageIndex(stage),
        reason: reason.to_owned(),
    }
}

fn error(reason: &str) -> MigrateError {
    MigrateError::Copy {
        target: TARGET,
        reason: reason.to_owned(),
    }
}

/// The move is off, and the source is told.
fn off(cause: MigrateError) -> Vec<Do> {
    vec![
        told(&cause.to_string()),
        Do::Free,
        Do::End(Outcome::Stayed(Cause::Error(cause))),
    ]
}

/// What arrived is refused, and the move is off.
fn refused(stage: u16, reason: &str) -> Vec<Do> {
    let mut actions = vec![rejected(stage, reason)];
    actions.extend(off(error(reason)));
    actions
}

fn over(error: MigrateError) -> Do {
    Do::End(Outcome::Over(Cause::Error(error)))
}

const WRONG: &str = "it does not follow what came before";
const AGAIN: &str = "it has arrived before";
const EARLY: &str = "the one before is not taken in yet";
const HERE: &str = "the last stage is here";

/// What each state does with what arrives; `None` when it is not an arrival.
fn expected_arrival(state: &str, input: &str) -> Option<Vec<Do>> {
    let stage = match input {
        "first stage" | "last as first" => 0,
        "second stage" | "second stage with a gap" | "last as second" | "last with a gap" => 1,
        _ => return None,
    };
    let import = |stage| Do::Import {
        stage: StageIndex(stage),
    };
    let import_last = |stage| Do::ImportLast {
        stage: StageIndex(stage),
    };
    Some(match (state, input) {
        ("reserved", "first stage") => vec![import(0)],
        ("reserved", "last as first") => vec![import_last(0)],
        ("copied", "second stage") => vec![import(1)],
        ("copied", "last as second") => vec![import_last(1)],
        ("importing" | "copied", _) if stage == 0 => vec![rejected(0, AGAIN)],
        ("importing", _) => refused(1, EARLY),
        ("reserved" | "copied", _) => refused(stage, WRONG),
        ("completing" | "claiming", _) => vec![rejected(stage, HERE)],
        _ => Vec::new(),
    })
}

/// What each state does on each input; a pair that is not listed does nothing and changes nothing.
fn expected(state: &str, input: &str) -> Vec<Do> {
    if let Some(actions) = expected_arrival(state, input) {
        return actions;
    }
    let before_claim = ["reserved", "importing", "copied", "completing"].contains(&state);
    match (state, input) {
        ("completing", "last imported") => vec![CLAIM],
        ("claiming", "granted" | "attached") => vec![
            Do::Resume {
                epoch: Epoch(5),
                from: FROM,
            },
            Do::TellCommitted,
            Do::End(Outcome::Moved),
        ],
        ("claiming", "lost") => vec![
            told("the home granted the request elsewhere, or it is over"),
            Do::Free,
            over(MigrateError::Lost),
        ],
        ("claiming", "import failed") => vec![told("because"), Do::Free, over(error("because"))],
        ("ended", "gone") => Vec::new(),
        (_, "gone") => vec![
            told("the home ended the request"),
            Do::Free,
            over(MigrateError::RequestGone),
        ],
        (_, "import failed") if before_claim => off(error("because")),
        (_, "cancelled") if before_claim => {
            vec![Do::Free, Do::End(Outcome::Stayed(Cause::Stopped))]
        }
        (_, "stop") if before_claim => vec![
            told("it was told to stop"),
            Do::Free,
            Do::End(Outcome::Stayed(Cause::Stopped)),
        ],
        ("reserved" | "importing" | "copied", "source down") => {
            vec![Do::Free, over(MigrateError::SourceLost)]
        }
        _ => Vec::new(),
    }
}

/// What each state does when its deadline comes.
fn expected_at_deadline(state: &str) -> Vec<Do> {
    match state {
        "reserved" | "copied" => off(MigrateError::SourceLost),
        "importing" | "completing" => off(error("the engine did not take it in in time")),
        "claiming" => vec![CLAIM],
        _ => Vec::new(),
    }
}

/// Pairs that ask for nothing and yet are news.
const SILENT_STEPS: [(&str, &str); 1] = [("importing", "first imported")];

#[test]
fn every_state_answers_every_input_as_the_table_says() {
    for (state, session) in states() {
        for (input, value) in inputs() {
            let mut next = session.clone();
            let actions = feed(&mut next, NOW, value);
            assert_eq!(actions, expected(state, input), "{state}, {input}");
            let only_rejected = matches!(actions[..], [] | [Do::Reject { .. }]);
            let silent_step = SILENT_STEPS.contains(&(state, input));
            assert_eq!(
                next == session,
                only_rejected && !silent_step,
                "{state}, {input}: {next:?}"
            );
            let ended = matches!(actions.last(), Some(Do::End(_))) || state == "ended";
            assert_eq!(next.deadline().is_none(), ended, "{state}, {input}");
        }
    }
}

#[test]
fn every_state_ends_or_asks_again_at_its_deadline_and_does_nothing_before() {
    for (state, session) in states() {
        let mut next = session.clone();
        assert!(feed(&mut next, NOW, In::Tick).is_empty(), "{state}");
        assert_eq!(next, session, "{state}");
        let deadline = session.deadline().unwrap_or(NOW);
        let actions = feed(&mut next, deadline, In::Tick);
        assert_eq!(actions, expected_at_deadline(state), "{state}");
    }
}

#[test]
fn a_request_runs_only_when_the_home_says_so() {
    for (state, session) in states() {
        for (input, value) in inputs() {
            let actions = feed(&mut session.clone(), NOW, value);
            let resumed = actions
                .iter()
                .any(|action| matches!(action, Do::Resume { .. }));
            let granted = state == "claiming" && ["granted", "attached"].contains(&input);
            assert_eq!(resumed, granted, "{state}, {input}");
        }
    }
}

#[test]
fn all_that_is_held_is_freed_at_every_end_but_the_one_where_the_request_runs() {
    for (state, session) in states() {
        for (input, value) in inputs() {
            let actions = feed(&mut session.clone(), NOW, value);
            let freed = actions.contains(&Do::Free);
            let moved = actions.contains(&Do::End(Outcome::Moved));
            let ended = matches!(actions.last(), Some(Do::End(_)));
            assert_eq!(freed, ended && !moved, "{state}, {input}");
        }
    }
}

#[test]
fn an_empty_or_overlapping_stage_is_refused() {
    for (start, end) in [(100, 100), (99, 120), (100, 90)] {
        let mut session = after(&[arrived(0, 0, 100), imported(0)]);
        assert_eq!(
            feed(&mut session, NOW, arrived(1, start, end)),
            refused(1, WRONG)
        );
    }
}

#[test]
fn a_waiting_request_comes_without_stages_and_a_last_stage_may_come_without_kv() {
    let waiting = || TargetSession::new(plan(CopyMode::Waiting), NOW);
    let stage = StageIndex(0);
    assert_eq!(
        feed(&mut waiting(), NOW, last(0, None)),
        [Do::ImportLast { stage }]
    );
    assert_eq!(
        feed(&mut waiting(), NOW, arrived(0, 0, 100)),
        refused(0, WRONG)
    );
    let mut copied = after(&[arrived(0, 0, 100), imported(0)]);
    let stage = StageIndex(1);
    assert_eq!(
        feed(&mut copied, NOW, last(1, None)),
        [Do::ImportLast { stage }]
    );
}

#[test]
fn each_arrival_keeps_the_reservation_for_another_lease() {
    let mut session = after(&[arrived(0, 0, 100)]);
    let limits = plan(CopyMode::Kv).limits;
    let later = NOW + Duration::from_secs(5);
    feed(&mut session, later, imported(0));
    assert_eq!(session.deadline(), Some(later + limits.lease));
}

#[test]
fn a_home_that_stays_silent_is_asked_every_interval_and_given_up_after_the_grace() {
    let mut session = after(&[last(0, None)]);
    let limits = plan(CopyMode::Kv).limits;
    assert_eq!(feed(&mut session, NOW, In::LastImported), [CLAIM]);
    let mut now = NOW;
    let mut claims = 1;
    loop {
        assert!(feed(&mut session, now, In::ClaimUnanswered).is_empty());
        now = session.deadline().expect("it goes on");
        let actions = feed(&mut session, now, In::Tick);
        if actions != [CLAIM] {
            assert_eq!(actions, [Do::Free, over(MigrateError::HomeSilent)]);
            break;
        }
        claims += 1;
    }
    assert_eq!(now, NOW + limits.grace);
    assert_eq!(
        claims,
        limits.grace.as_millis() / limits.claim_interval.as_millis()
    );
}

/// Deadlines between a begin and an end, at most: one before the claim, and one for each claim.
fn most_ticks() -> usize {
    let limits = SessionLimits::default();
    let claims = limits.grace.as_millis() / limits.claim_interval.as_millis();
    usize::try_from(claims).unwrap_or(usize::MAX) + 1
}

proptest! {
    #[test]
    fn whatever_happens_a_session_ends_once_and_either_runs_the_request_or_frees_all(
        // Most random inputs end a move: it has got so far before they begin.
        progress in 0..5usize,
        steps in prop::collection::vec((0..19usize, 0..2000u64), 0..60),
    ) {
        let mut session = after(&[]);
        let mut now = NOW;
        let mut all = Vec::new();
        let path = [arrived(0, 0, 100), imported(0), last(1, Some(100)), In::LastImported];
        for input in &path[..progress] {
            all.extend(feed(&mut session, now, input.clone()));
        }
        for (pick, millis) in steps {
            now = now + Duration::from_millis(millis);
            let input = inputs().get(pick).map_or(In::Tick, |(_, input)| input.clone());
            all.extend(feed(&mut session, now, input));
        }
        for _ in 0..most_ticks() {
            if let Some(deadline) = session.deadline() {
                now = now.max(deadline);
                all.extend(feed(&mut session, now, In::Tick));
            }
        }
        let ends: Vec<usize> = (0..all.len()).filter(|&at| matches!(all[at], Do::End(_))).collect();
        prop_assert_eq!(&ends, &[all.len() - 1]);
        let count = |wanted: fn(&Do) -> bool| all.iter().filter(|action| wanted(action)).count();
        let freed = count(|action| matches!(action, Do::Free));
        let resumed = count(|action| matches!(action, Do::Resume { .. }));
        prop_assert_eq!(freed + resumed, 1);
        let asked = count(|action| matches!(action, Do::Claim { .. }));
        prop_assert!(resumed == 0 || asked > 0);
        let told = count(|action| matches!(action, Do::TellCommitted));
        prop_assert_eq!(told, resumed);
    }
}
