use bytes::Bytes;
use shoal_gossip::{Epoch, NodeId, RequestId};

use super::*;
use crate::engine::FinishReason;
use crate::engine::answer::{AnswerHead, ChunkShape, Wire};
use crate::engine::moving::{LastState, MoveError};
use crate::engine::work::{HttpAsk, Prepared, RequestKind};

const NOW: Timestamp = Timestamp::ZERO;

fn job(generated: &[u32], spoken: &[(u32, &str)]) -> RemoteJob {
    let spoken = spoken.iter().map(|(end, text)| Spoken {
        end: *end,
        text: (*text).to_owned(),
    });
    let job = Job {
        request: RequestId {
            home: NodeId(1),
            serial: 2,
        },
        epoch: Epoch::FIRST,
        kind: Some(RequestKind::Chat),
        http: HttpAsk::default(),
        body: Bytes::from_static(b"{\"model\":\"m\",\"prompt\":\"12345678\",\"max_tokens\":50}"),
        prepared: Prepared::unread("m"),
        generated: generated.to_vec(),
        spoken: spoken.collect(),
        reservation: None,
    };
    RemoteJob::new(job, Tokens(1000), Timestamp::ZERO)
}

fn said(ids: &[u32], text: &str) -> Said {
    Said {
        ids: ids.to_vec(),
        text: text.to_owned(),
        logprobs: Vec::new(),
        wire: Wire::of(Bytes::copy_from_slice(text.as_bytes())),
    }
}

fn first(ids: &[u32], text: &str, goes_on: bool) -> Said {
    let going_on = goes_on.then(|| GoingOn {
        prepared: Prepared {
            prompt: [1, 2, 3].into(),
            ..Prepared::unread("m")
        },
        fingerprint: 1,
        shape: ChunkShape {
            id: "c".into(),
            created: 1,
            model: "m".into(),
            fingerprint: None,
            ids: false,
        },
    });
    let mut said = said(ids, text);
    said.wire.head = Some(Box::new(AnswerHead {
        going_on,
        ..AnswerHead::default()
    }));
    said
}

fn fresh() -> RemoteJob {
    job(&[], &[])
}

/// Sends all that can be sent; what went out.
fn drain(job: &mut RemoteJob) -> Vec<EngineEvent> {
    let mut out = Vec::new();
    while let Step::Send(to, event) = job.step() {
        assert!(job.sent(&to));
        out.push(event);
    }
    out
}

fn ids_of(events: &[EngineEvent]) -> Vec<u32> {
    let ids = events.iter().flat_map(|event| match event {
        EngineEvent::Tokens(batch) => batch.ids.clone(),
        EngineEvent::Finished(_) | EngineEvent::Failed(_) => Vec::new(),
    });
    ids.collect()
}

#[test]
fn the_engine_is_read_only_when_all_is_on_its_way() {
    let mut job = job(&[], &[]);
    let _events = job.open();
    assert!(matches!(job.step(), Step::Read(_)));
    job.said(first(&[7], "a", true));
    assert!(matches!(job.step(), Step::Send(..)));
    assert_eq!(ids_of(&drain(&mut job)), [7]);
    assert!(matches!(job.step(), Step::Read(_)));
    job.ended(Ok(End {
        reason: FinishReason::Stop,
        text: String::new(),
        wire: Wire::default(),
    }));
    let end = drain(&mut job);
    assert!(matches!(&end[..], [EngineEvent::Finished(finish)] if finish.output_tokens == 1));
    assert!(matches!(job.step(), Step::Over));
}

#[test]
fn a_request_moves_before_it_begins_and_after_only_if_another_can_go_on() {
    let block = BlockSize::new(std::num::NonZeroU32::new(16).unwrap());
    let mut job = job(&[], &[]);
    let status = job.status(block).unwrap();
    assert_eq!(
        (status.phase, status.prompt, status.max_output),
        (JobPhase::Waiting, Tokens(2), Tokens(50))
    );
    job.said(first(&[7], "a", true));
    let status = job.status(block).unwrap();
    assert_eq!(
        (status.phase, status.prompt, status.output),
        (JobPhase::Decode, Tokens(3), Tokens(1))
    );
    assert_eq!(job.describe().unwrap().output, [7]);
    // A piece without ids: nobody knows any more where it is.
    job.said(said(&[], "b"));
    assert_eq!(job.status(block).unwrap().phase, JobPhase::Pinned);
    assert_eq!(job.describe(), Err(MoveError::Gone));
    assert_eq!(job.pause(NOW).unwrap_err(), MoveError::Gone);
    let mut torn = fresh();
    torn.said(first(&[7], "a", false));
    assert_eq!(torn.status(block).unwrap().phase, JobPhase::Pinned);
}

#[test]
fn a_paused_request_gives_what_is_on_its_way_and_no_more() {
    let mut job = job(&[], &[]);
    let _events = job.open();
    job.said(first(&[7], "a", true));
    drain(&mut job);
    job.said(said(&[8, 9], "bc"));
    let paused = job.pause(NOW).unwrap();
    assert_eq!(paused.state.output, [7]);
    let spoken = Spoken {
        end: 1,
        text: "a".into(),
    };
    assert_eq!(paused.state.spoken, [spoken]);
    assert!(matches!(job.step(), Step::Hold(Some(_))));
    job.unpause();
    assert_eq!(ids_of(&drain(&mut job)), [8, 9]);
}

#[test]
fn nothing_goes_out_that_was_asked_for_before_a_pause() {
    let mut job = job(&[], &[]);
    let _events = job.open();
    job.said(first(&[7], "a", true));
    let Step::Send(to, _) = job.step() else {
        panic!("a piece waits")
    };
    job.pause(NOW).unwrap();
    assert!(!job.sent(&to));
    let _others = job.resume(Epoch(2), 0).unwrap();
    assert!(!job.sent(&to), "that receiver is not its receiver any more");
    assert_eq!(ids_of(&drain(&mut job)), [7]);
}

#[test]
fn output_is_told_again_from_where_the_home_lacks_it() {
    let told = || {
        let mut job = fresh();
        let events = job.open();
        job.said(first(&[1, 2], "ab", true));
        job.said(said(&[3], "c"));
        job.said(said(&[4, 5], "de"));
        drain(&mut job);
        job.pause(NOW).unwrap();
        (job, events)
    };
    for (from, expected) in [
        (0, &[1, 2, 3, 4, 5][..]),
        (2, &[3, 4, 5]),
        (3, &[4, 5]),
        (5, &[]),
    ] {
        let (mut job, _events) = told();
        let _others = job.resume(Epoch(2), from).unwrap();
        let again = drain(&mut job);
        assert_eq!(ids_of(&again), expected);
        assert!(again.len() <= 1, "as one piece");
    }
    let (mut job, _events) = told();
    assert!(job.resume(Epoch(2), 6).is_err(), "more than there is");
    assert!(job.resume(Epoch(2), 1).is_err(), "a part of a piece");
    assert!(job.resume(Epoch(0), 5).is_err(), "an older ownership");
}

#[test]
fn what_arrives_runs_when_it_is_complete() {
    let mut job = job(&[1, 2], &[]);
    job.arriving = true;
    assert!(job.resume(Epoch(2), 0).is_err());
    let spoken = |end, text: &str| Spoken {
        end,
        text: text.into(),
    };
    job.completed(LastState {
        output: vec![1, 2, 3],
        spoken: vec![spoken(2, "ab"), spoken(3, "c")],
        ..LastState::default()
    });
    let _events = job.resume(Epoch(2), 2).unwrap();
    let out = drain(&mut job);
    let expected = TokenBatch {
        index: 2,
        ids: vec![3],
        text: "c".into(),
        ..TokenBatch::default()
    };
    assert_eq!(out, [EngineEvent::Tokens(expected)]);
    assert!(matches!(job.step(), Step::Read(_)));
}

#[test]
fn what_is_kept_is_bounded() {
    let mut job = job(&[], &[]);
    let _events = job.open();
    job.said(first(&[0], "x", true));
    for id in 1..3000 {
        drain(&mut job);
        job.said(said(&[id], "x"));
    }
    drain(&mut job);
    assert_eq!(job.kept.len(), KEPT);
    job.pause(NOW).unwrap();
    assert!(job.resume(Epoch(2), 10).is_err());
    let _events = job.resume(Epoch(2), 2990).unwrap();
    assert_eq!(ids_of(&drain(&mut job)).len(), 10);
}

fn logprob(id: u32) -> TokenLogprob {
    TokenLogprob {
        token: format!("t{id}"),
        logprob: -1.0,
        top: Vec::new(),
    }
}

#[test]
fn log_probabilities_go_along_as_far_as_the_home_may_lack_them() {
    let mut here = job(&[], &[]);
    here.job.prepared.params.logprobs = Some(0);
    let mut events = here.open();
    for id in [7, 8, 9] {
        let mut piece = match id {
            7 => first(&[id], "x", true),
            _ => said(&[id], "x"),
        };
        piece.logprobs = vec![logprob(id)];
        here.said(piece);
    }
    for _ in 0..2 {
        let Step::Send(to, event) = here.step() else {
            panic!("nothing to send");
        };
        assert!(here.sent(&to));
        to.try_send(event).unwrap();
    }
    let EngineEvent::Tokens(batch) = events.try_recv().unwrap() else {
        panic!("no tokens");
    };
    assert_eq!(batch.logprobs, [logprob(7)]);
    let state = here.pause(NOW).unwrap().state;
    assert_eq!((state.output.len(), state.logprobs.len()), (2, 2));

    // The home lost the second on the way: it is told again, with what belongs to it.
    let mut there = job(&[], &[]);
    there.job.prepared.params.logprobs = Some(0);
    there.arriving = true;
    there.completed(state.clone());
    drop(there.resume(Epoch(2), 1).unwrap());
    let Step::Send(_, EngineEvent::Tokens(again)) = there.step() else {
        panic!("nothing to tell again");
    };
    assert_eq!((again.ids, again.logprobs), (vec![8], vec![logprob(8)]));

    // What is not there is not told without.
    let mut without = job(&[], &[]);
    without.job.prepared.params.logprobs = Some(0);
    without.arriving = true;
    without.completed(LastState {
        logprobs: Vec::new(),
        ..state
    });
    assert!(without.resume(Epoch(2), 1).is_err());
    assert!(without.resume(Epoch(2), 2).is_ok());
}
