//! Real planes on loopback with views made by hand, for the tests of this module.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::{
    BlockSize, ClusterView, Epoch, Incarnation, LoadSummary, NodeFacts, NodeId, NodeRow, RequestId,
    Role, Timestamp,
};
use shoal_migrate::{ClaimAnswer, MoveRefusal, ProposalAnswer};
use tokio::sync::{mpsc, watch};

use crate::engine::answer::Wire;
use crate::engine::work::HttpAsk;
use crate::engine::work::{Prepared, Priority, RequestKind, SamplingParams};
use crate::engine::{Finish, FinishReason, TokenBatch};
use crate::identity::Identity;
use crate::mesh::messages::{Answer, Ask, Frame, FrameBody, MoveAnswer, Open, PROTOCOL, Submit};
use crate::mesh::{Answered, ControlHandler, StreamHandler};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `probe` holds.
pub(crate) async fn until(what: &str, mut probe: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !probe() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what} did not come about");
}

pub(crate) fn facts(
    identity: &Identity,
    control: std::net::SocketAddr,
    stream: std::net::SocketAddr,
) -> NodeFacts {
    NodeFacts {
        node: identity.node_id(),
        incarnation: Incarnation(1),
        peer_id: identity.peer_id().to_string(),
        protocol: PROTOCOL,
        control,
        stream,
        http: String::new(),
        role: Role::Mixed,
        block_size: BlockSize::DEFAULT,
        models: Vec::new(),
        version: String::new(),
    }
}

/// A view of these nodes.
pub(crate) fn view(facts: &[NodeFacts]) -> Arc<ClusterView> {
    let rows = facts.iter().map(|facts| NodeRow {
        facts: Arc::new(facts.clone()),
        load: None,
    });
    Arc::new(ClusterView::new(NodeId(0), Timestamp::ZERO, rows.collect()))
}

pub(crate) fn empty_view() -> watch::Sender<Arc<ClusterView>> {
    watch::Sender::new(view(&[]))
}

/// Answers probes with a load that tells who answered, and keeps what it heard.
#[derive(Debug, Default)]
pub(crate) struct Echo {
    pub(crate) seq: u64,
    pub(crate) heard: Mutex<Vec<(NodeId, u64)>>,
    /// Questions that are never answered.
    pub(crate) mute: bool,
}

#[async_trait]
impl ControlHandler for Echo {
    async fn answer(&self, _from: NodeId, ask: Ask) -> Answered {
        if self.mute {
            std::future::pending::<()>().await;
        }
        let answer = match ask {
            Ask::Offer(_) => Answer::Accept {
                reservation: 7,
                lease_ms: 1,
            },
            Ask::Probe => Answer::Load,
            Ask::Abort { .. }
            | Ask::Release { .. }
            | Ask::Committed { .. }
            | Ask::CancelMove { .. }
            | Ask::Drain => Answer::Done,
            Ask::Propose(_) => Answer::Proposal(ProposalAnswer::Refused(MoveRefusal::NotReady)),
            Ask::Claim { .. } => Answer::Claim(ClaimAnswer::Lost),
            Ask::Move { .. } => Answer::Move(MoveAnswer::Unknown),
        };
        Answered {
            answer,
            load: self.load(),
        }
    }

    fn load(&self) -> LoadSummary {
        LoadSummary {
            seq: self.seq,
            ..LoadSummary::default()
        }
    }

    fn heard(&self, from: NodeId, load: LoadSummary) {
        self.heard.lock().unwrap().push((from, load.seq));
    }
}

/// Serves a stream of `seed` tokens, counting how far it got and whether it saw the end.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    pub(crate) sent: Mutex<u64>,
    pub(crate) ended: watch::Sender<u64>,
    /// Ends without a last frame.
    pub(crate) breaks_off: bool,
    /// Sends nothing, and waits for its home to go.
    pub(crate) waits: bool,
    /// Starts with a frame that carries so many prompt ids, if any.
    pub(crate) prompt: u32,
}

#[async_trait]
impl StreamHandler for Counter {
    async fn serve(&self, _from: NodeId, open: Open, frames: mpsc::Sender<Frame>) {
        let Open::Submit(submit) = open else { return };
        let frame = |body| Frame {
            request: submit.request,
            epoch: submit.epoch,
            body,
        };
        let mut index = 0;
        if self.prompt > 0 {
            let started = FrameBody::Started {
                prepared: Some(prepared(self.prompt)),
                prompt_tokens: self.prompt,
            };
            drop(frames.send(frame(started)).await);
        }
        if self.waits {
            frames.closed().await;
        }
        while u64::from(index) < submit.seed {
            let batch = TokenBatch {
                index,
                ids: vec![index],
                text: "x".repeat(100),
                logprobs: Vec::new(),
                wire: Wire::default(),
            };
            if frames.send(frame(FrameBody::Tokens(batch))).await.is_err() {
                break;
            }
            index += 1;
            *self.sent.lock().unwrap() += 1;
        }
        if !self.breaks_off {
            let finish = Finish {
                reason: FinishReason::Stop,
                output_tokens: index,
                text: String::new(),
                wire: Wire::default(),
                prompt_tokens: None,
            };
            drop(frames.send(frame(FrameBody::Finished(finish))).await);
        }
        self.ended.send_modify(|ended| *ended += 1);
    }
}

/// A prompt of so many of the widest ids that vocabularies have.
pub(crate) fn prepared(prompt: u32) -> Prepared {
    Prepared {
        model: "model".into(),
        prompt: vec![(1 << 21) - 1; prompt as usize].into(),
        params: SamplingParams::default(),
        seeded: false,
        priority: Priority(0),
    }
}

/// Opens a stream with [`submission`].
pub(crate) fn submit(home: NodeId, tokens: u64) -> Open {
    submission(home, tokens).into()
}

/// A submission that asks [`Counter`] for so many tokens.
pub(crate) fn submission(home: NodeId, tokens: u64) -> Submit {
    Submit {
        request: RequestId { home, serial: 1 },
        epoch: Epoch::FIRST,
        reservation: None,
        model: String::new(),
        kind: Some(RequestKind::Completion),
        http: HttpAsk::default(),
        spoken: Vec::new(),
        body: bytes::Bytes::new(),
        seed: tokens,
        prepared: None,
        generated: Vec::new(),
    }
}
