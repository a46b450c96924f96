//! Real planes on loopback with views made by hand, for the tests of this module.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use quinn::{ClientConfig, Endpoint};
use shoal_gossip::{
    BlockSize, ClusterView, Epoch, Incarnation, LoadSummary, NodeFacts, NodeId, NodeRow, RequestId,
    Role, Timestamp,
};
use shoal_migrate::{ClaimAnswer, MoveRefusal, ProposalAnswer};
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, watch};

use crate::engine::answer::Wire;
use crate::engine::work::HttpAsk;
use crate::engine::work::{Prepared, Priority, RequestKind, SamplingParams};
use crate::engine::{Finish, FinishReason, TokenBatch};
use crate::identity::Identity;
use crate::mesh::messages::{Answer, Ask, Frame, FrameBody, MoveAnswer, Open, PROTOCOL, Submit};
use crate::mesh::tls::PeerTls;
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

/// First packets of so many connections that go no further: nobody answers where they are sent.
pub(crate) async fn first_packets(count: usize, alpn: &[u8]) -> Vec<Vec<u8>> {
    let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (caller, nobody) = (Identity::ephemeral(), Identity::ephemeral());
    let tls = PeerTls::new(caller.keypair()).unwrap();
    let tls = tls.client(alpn, nobody.peer_id()).unwrap();
    let config = ClientConfig::new(Arc::new(tls));
    let endpoint = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    let mut packets: Vec<Vec<u8>> = Vec::new();
    for _ in 0..count {
        let to = silent.local_addr().unwrap();
        let _connecting = endpoint.connect_with(config.clone(), to, "any").unwrap();
        loop {
            let mut packet = vec![0; 2_048];
            let length = silent.recv(&mut packet).await.unwrap();
            packet.truncate(length);
            // What comes under ids that were there before is the rest of an earlier connection.
            if !packets.iter().any(|other| ids(other) == ids(&packet)) {
                packets.push(packet);
                break;
            }
        }
    }
    packets
}

/// Sends a first packet; whether it is asked to come again with a proof of its address, as it should be if nothing is to be
/// kept of it.
pub(crate) async fn is_asked_to_prove(from: &UdpSocket, packet: &[u8], to: SocketAddr) -> bool {
    from.send_to(packet, to).await.unwrap();
    let answer = async {
        let mut answer = [0; 2_048];
        loop {
            let length = from.recv(&mut answer).await.unwrap();
            // Answers to earlier packets may be repeated meanwhile.
            if length > 6 && answer[0] & 0x80 != 0 && ids(&answer).0 == ids(packet).1 {
                // The type of a long header (RFC 9000, 17.2.5): a retry.
                return answer[0] >> 4 & 3 == 3;
            }
        }
    };
    tokio::time::timeout(PATIENCE, answer).await.unwrap()
}

/// Receiver's and sender's connection id of a packet with a long header (RFC 9000, 17.2).
fn ids(packet: &[u8]) -> (&[u8], &[u8]) {
    let (length, rest) = packet[5..].split_first().unwrap();
    let (to, rest) = rest.split_at((*length).into());
    let (length, rest) = rest.split_first().unwrap();
    (to, &rest[..(*length).into()])
}

pub(crate) fn facts(identity: &Identity, control: SocketAddr, stream: SocketAddr) -> NodeFacts {
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
