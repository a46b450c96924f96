//! The home's record of one request: what was received, from which ownership, and what that means
//! for the next frame. Pure; holds invariants 1 and 2 of `docs/architecture.md`.

use shoal_gossip::{Epoch, NodeId, RequestId};
use shoal_migrate::ClaimAnswer;
use shoal_migrate::session::{Arbiter, Claim};

use crate::engine::answer::{GoingOn, Spoken};
use crate::engine::work::Fit;
use crate::engine::{EngineError, Finish, TokenBatch};
use crate::mesh::messages::{Frame, FrameBody};

/// What a frame means.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Give these tokens, or this piece of an answer, to the client: the next indexes, never seen before.
    Deliver(TokenBatch),
    /// The request is complete.
    Finish(Finish),
    /// Nothing for the client: a start, an old ownership, or an index that is known already.
    Ignore,
    /// The host says that it cannot do it.
    Failed(EngineError),
    /// Frames are missing or contradict the record. The request must be replayed from here.
    Gap {
        /// The output index that was expected.
        expected: u32,
        /// The output index that came.
        got: u32,
    },
}

/// One request as its home knows it.
#[derive(Clone, Debug)]
pub struct Ledger {
    request: RequestId,
    arbiter: Arbiter,
    received: Vec<u32>,
    limit: usize,
    answer: Answer,
    finished: bool,
}

/// Who writes the answer.
#[derive(Clone, Debug)]
enum Answer {
    /// The home, from ids and text.
    Written,
    /// An engine beside a node. Once a client has a part of it, it goes on as it began, or not at all.
    Relayed {
        /// What another engine needs; `None` when none can.
        going_on: Option<Box<GoingOn>>,
        /// All text so far.
        spoken: String,
    },
}

impl Ledger {
    /// A request that nobody owns yet. `max_tokens` bounds what the record can grow to.
    pub fn new(request: RequestId, max_tokens: u32) -> Self {
        Self {
            request,
            arbiter: Arbiter::new(),
            received: Vec::new(),
            limit: max_tokens as usize,
            answer: Answer::Written,
            finished: false,
        }
    }

    /// The current ownership.
    pub fn epoch(&self) -> Epoch {
        self.arbiter.epoch()
    }

    /// Output ids received so far.
    pub fn received(&self) -> &[u32] {
        &self.received
    }

    /// Begins the next ownership at a node that the home chose: the first, or a replay. Frames of the old one
    /// are void from now on.
    pub fn pass_on(&mut self, to: NodeId) -> Epoch {
        self.arbiter.pass_on(to)
    }

    /// Judges a node's claim to run the request from now on. If it is granted, frames of the old ownership are void.
    pub fn claim(&mut self, by: NodeId, claim: Claim) -> ClaimAnswer {
        let received = self.count();
        self.arbiter.claim(by, claim, received)
    }

    /// What another engine needs to go on with an answer that was begun.
    pub fn going_on(&self) -> Option<&GoingOn> {
        match &self.answer {
            Answer::Written => None,
            Answer::Relayed { going_on, .. } => going_on.as_deref(),
        }
    }

    /// Whether a client has a part of an answer that only its engine can finish.
    pub fn is_torn(&self) -> bool {
        matches!(&self.answer, Answer::Relayed { going_on: None, .. })
    }

    /// Which nodes can go on with an answer that was begun; `None` when none was.
    pub fn fit(&self) -> Option<Fit> {
        self.going_on().map(|on| Fit::Same(on.fingerprint))
    }

    /// The text that the client got for the ids it got, where an engine wrote it.
    pub fn spoken(&self) -> Vec<Spoken> {
        match &self.answer {
            Answer::Relayed { spoken, .. } if !self.received.is_empty() => vec![Spoken {
                end: self.count(),
                text: spoken.clone(),
            }],
            Answer::Relayed { .. } | Answer::Written => Vec::new(),
        }
    }

    /// How many output tokens were received.
    pub fn count(&self) -> u32 {
        u32::try_from(self.received.len()).unwrap_or(u32::MAX)
    }

    /// Judges the next frame. Late, duplicate and foreign frames change nothing.
    pub fn accept(&mut self, frame: Frame) -> Verdict {
        if frame.request != self.request || frame.epoch != self.epoch() || self.finished {
            return Verdict::Ignore;
        }
        match frame.body {
            FrameBody::Started { .. } => Verdict::Ignore,
            FrameBody::Tokens(batch) => self.append(batch),
            FrameBody::Finished(finish) => {
                let got = finish.output_tokens;
                if got as usize != self.received.len() {
                    return self.gap(got);
                }
                self.finished = true;
                self.arbiter.end();
                Verdict::Finish(finish)
            }
            FrameBody::Failed(error) => Verdict::Failed(error),
        }
    }

    fn append(&mut self, batch: TokenBatch) -> Verdict {
        let expected = self.received.len();
        let first = batch.index as usize;
        let end = first.saturating_add(batch.ids.len());
        if batch.ids.is_empty() && !batch.wire.is_empty() && first == expected {
            // Bytes without ids: from here on nobody knows where the request is.
            self.answer = Answer::Relayed {
                going_on: None,
                spoken: String::new(),
            };
            return Verdict::Deliver(batch);
        }
        if end <= expected {
            return Verdict::Ignore;
        }
        // Text and log-probabilities belong to the whole batch: one that is half known cannot be cut.
        if first != expected || end > self.limit {
            return self.gap(batch.index);
        }
        self.received.extend_from_slice(&batch.ids);
        if let Some(head) = &batch.wire.head {
            self.answer = Answer::Relayed {
                going_on: head.going_on.clone().map(Box::new),
                spoken: String::new(),
            };
        }
        if let Answer::Relayed { spoken, .. } = &mut self.answer {
            spoken.push_str(&batch.text);
        }
        Verdict::Deliver(batch)
    }

    fn gap(&self, got: u32) -> Verdict {
        Verdict::Gap {
            expected: self.count(),
            got,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    use crate::engine::FinishReason;
    use crate::engine::answer::{AnswerHead, ChunkShape, Wire};
    use crate::engine::work::Prepared;

    const REQUEST: RequestId = RequestId {
        home: NodeId(1),
        serial: 2,
    };

    const HOST: NodeId = NodeId(3);
    const TARGET: NodeId = NodeId(4);

    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(REQUEST, 10);
        assert_eq!(ledger.pass_on(HOST), Epoch::FIRST);
        ledger
    }

    fn frame(epoch: u32, body: FrameBody) -> Frame {
        Frame {
            request: REQUEST,
            epoch: Epoch(epoch),
            body,
        }
    }

    fn tokens(epoch: u32, index: u32, ids: &[u32]) -> Frame {
        frame(
            epoch,
            FrameBody::Tokens(TokenBatch {
                index,
                ids: ids.to_vec(),
                text: format!("{ids:?}"),
                logprobs: Vec::new(),
                wire: Wire::default(),
            }),
        )
    }

    fn finished(epoch: u32, output_tokens: u32) -> Frame {
        frame(
            epoch,
            FrameBody::Finished(Finish {
                reason: FinishReason::Stop,
                output_tokens,
                text: String::new(),
                wire: Wire::default(),
                prompt_tokens: None,
            }),
        )
    }

    #[test]
    fn the_next_index_is_delivered_once_and_a_known_one_is_dropped() {
        let mut ledger = ledger();
        assert!(matches!(
            ledger.accept(tokens(1, 0, &[7])),
            Verdict::Deliver(_)
        ));
        assert_eq!(ledger.accept(tokens(1, 0, &[7])), Verdict::Ignore);
        assert!(matches!(
            ledger.accept(tokens(1, 1, &[8, 9])),
            Verdict::Deliver(_)
        ));
        assert_eq!(ledger.received(), [7, 8, 9]);
    }

    #[test]
    fn a_missing_index_is_a_gap_and_so_is_a_batch_that_is_half_known() {
        let mut ledger = ledger();
        ledger.accept(tokens(1, 0, &[7]));
        let gap = |got| Verdict::Gap { expected: 1, got };
        assert_eq!(ledger.accept(tokens(1, 2, &[9])), gap(2));
        assert_eq!(ledger.accept(tokens(1, 0, &[7, 8])), gap(0));
        assert_eq!(ledger.received(), [7]);
    }

    #[test]
    fn more_output_than_was_asked_for_is_a_gap_and_not_memory() {
        let mut ledger = ledger();
        let flood = tokens(1, 0, &[1; 11]);
        assert!(matches!(ledger.accept(flood), Verdict::Gap { .. }));
        assert!(matches!(
            ledger.accept(tokens(1, u32::MAX, &[1])),
            Verdict::Gap { .. }
        ));
    }

    #[test]
    fn frames_of_an_older_or_unknown_ownership_change_nothing() {
        let mut ledger = ledger();
        ledger.accept(tokens(1, 0, &[7]));
        assert_eq!(ledger.pass_on(HOST), Epoch(2));
        assert_eq!(ledger.accept(tokens(1, 1, &[8])), Verdict::Ignore);
        assert_eq!(ledger.accept(finished(1, 1)), Verdict::Ignore);
        assert_eq!(ledger.accept(tokens(3, 1, &[8])), Verdict::Ignore);
        assert!(matches!(
            ledger.accept(tokens(2, 1, &[8])),
            Verdict::Deliver(_)
        ));
    }

    #[test]
    fn a_granted_claim_voids_the_frames_of_the_old_host_and_says_what_is_missing() {
        let mut ledger = ledger();
        ledger.accept(tokens(1, 0, &[7, 8]));
        let claim = Claim {
            epoch: Epoch(2),
            output: 3,
        };
        let granted = ClaimAnswer::Granted { from: 2 };
        assert_eq!(ledger.claim(TARGET, claim), granted);
        assert_eq!(ledger.accept(tokens(1, 2, &[9])), Verdict::Ignore);
        assert_eq!(ledger.claim(HOST, claim), ClaimAnswer::Lost);
        assert_eq!(ledger.claim(TARGET, claim), granted);
        assert!(matches!(
            ledger.accept(tokens(2, 2, &[9])),
            Verdict::Deliver(_)
        ));
    }

    #[test]
    fn nothing_is_granted_once_the_request_is_complete() {
        let mut ledger = ledger();
        ledger.accept(tokens(1, 0, &[7]));
        ledger.accept(finished(1, 1));
        let claim = Claim {
            epoch: Epoch(2),
            output: 1,
        };
        assert_eq!(ledger.claim(TARGET, claim), ClaimAnswer::Lost);
    }

    #[test]
    fn a_frame_of_another_request_changes_nothing() {
        let mut ledger = ledger();
        let mut foreign = tokens(1, 0, &[7]);
        foreign.request.serial = 99;
        assert_eq!(ledger.accept(foreign), Verdict::Ignore);
    }

    #[test]
    fn an_end_that_does_not_match_what_was_received_is_a_gap() {
        let mut ledger = ledger();
        ledger.accept(tokens(1, 0, &[7]));
        assert_eq!(
            ledger.accept(finished(1, 2)),
            Verdict::Gap {
                expected: 1,
                got: 2
            }
        );
        assert!(matches!(ledger.accept(finished(1, 1)), Verdict::Finish(_)));
        assert_eq!(ledger.accept(finished(1, 1)), Verdict::Ignore);
        assert_eq!(ledger.accept(tokens(1, 1, &[8])), Verdict::Ignore);
    }

    #[test]
    fn a_failure_of_the_current_host_is_told_and_of_a_former_one_is_not() {
        let mut ledger = ledger();
        let failed = |epoch| frame(epoch, FrameBody::Failed(EngineError::QueueFull));
        assert_eq!(
            ledger.accept(failed(1)),
            Verdict::Failed(EngineError::QueueFull)
        );
        ledger.pass_on(HOST);
        assert_eq!(ledger.accept(failed(1)), Verdict::Ignore);
    }

    fn head(goes_on: bool) -> Box<AnswerHead> {
        let going_on = goes_on.then(|| GoingOn {
            prepared: Prepared::unread("m"),
            fingerprint: 9,
            shape: ChunkShape {
                id: "c".into(),
                created: 1,
                model: "m".into(),
                fingerprint: None,
                ids: false,
            },
        });
        Box::new(AnswerHead {
            status: 200,
            going_on,
            ..AnswerHead::default()
        })
    }

    fn relayed(index: u32, ids: &[u32], head: Option<Box<AnswerHead>>) -> Frame {
        let batch = TokenBatch {
            index,
            ids: ids.to_vec(),
            text: "x".repeat(ids.len()),
            wire: Wire {
                head,
                bytes: Bytes::from_static(b"data: {}\n\n"),
            },
            ..TokenBatch::default()
        };
        frame(1, FrameBody::Tokens(batch))
    }

    #[test]
    fn an_answer_of_an_engine_keeps_what_it_takes_to_go_on() {
        let mut ledger = ledger();
        assert_eq!((ledger.fit(), ledger.is_torn()), (None, false));
        ledger.accept(relayed(0, &[7], Some(head(true))));
        ledger.accept(relayed(1, &[8, 9], None));
        assert_eq!(
            (ledger.fit(), ledger.is_torn()),
            (Some(Fit::Same(9)), false)
        );
        let spoken = Spoken {
            end: 3,
            text: "xxx".into(),
        };
        assert_eq!(ledger.spoken(), [spoken]);
    }

    #[test]
    fn an_answer_whose_ids_nobody_knows_is_its_engines_alone() {
        let mut one = ledger();
        one.accept(relayed(0, &[7], Some(head(false))));
        assert!(one.is_torn());
        let mut two = ledger();
        two.accept(relayed(0, &[7], Some(head(true))));
        assert!(!two.is_torn());
        // Bytes without ids: delivered, and from here on nobody can say where it is.
        assert!(matches!(
            two.accept(relayed(1, &[], None)),
            Verdict::Deliver(_)
        ));
        assert!(two.is_torn());
        assert!(matches!(two.accept(relayed(0, &[], None)), Verdict::Ignore));
    }
}
