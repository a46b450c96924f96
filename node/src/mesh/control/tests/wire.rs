//! What a control plane makes of bytes that no node of ours would send.

use std::io;

use futures::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, StreamExt};
use libp2p::request_response::{self, Event, Message, ProtocolSupport};
use libp2p::swarm::SwarmEvent;
use libp2p::{StreamProtocol, Swarm, SwarmBuilder};
use shoal_gossip::LoadSummary;

use super::*;
use crate::mesh::codec::control::CONTROL_PROTOCOL;
use crate::mesh::codec::{decode_envelope, encode};
use crate::mesh::messages::{MAX_CONTROL_BYTES, RefuseReason};

#[derive(Clone, Default)]
struct Raw;

impl request_response::Codec for Raw {
    type Protocol = StreamProtocol;
    type Request = Vec<u8>;
    type Response = Vec<u8>;

    async fn read_request<T>(&mut self, _: &StreamProtocol, stream: &mut T) -> io::Result<Vec<u8>>
    where
        T: AsyncRead + Unpin + Send,
    {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await?;
        Ok(bytes)
    }

    async fn read_response<T>(
        &mut self,
        protocol: &StreamProtocol,
        stream: &mut T,
    ) -> io::Result<Vec<u8>>
    where
        T: AsyncRead + Unpin + Send,
    {
        self.read_request(protocol, stream).await
    }

    async fn write_request<T>(
        &mut self,
        _: &StreamProtocol,
        stream: &mut T,
        bytes: Vec<u8>,
    ) -> io::Result<()>
    where
        T: AsyncWrite + Unpin + Send,
    {
        stream.write_all(&bytes).await
    }

    async fn write_response<T>(
        &mut self,
        protocol: &StreamProtocol,
        stream: &mut T,
        bytes: Vec<u8>,
    ) -> io::Result<()>
    where
        T: AsyncWrite + Unpin + Send,
    {
        self.write_request(protocol, stream, bytes).await
    }
}

/// A peer that speaks libp2p and says what it likes.
struct RawPeer {
    identity: Identity,
    swarm: Swarm<request_response::Behaviour<Raw>>,
    at: SocketAddr,
}

impl RawPeer {
    async fn start(protocol: StreamProtocol) -> Self {
        let identity = Identity::ephemeral();
        let behaviour = request_response::Behaviour::new(
            [(protocol, ProtocolSupport::Full)],
            request_response::Config::default(),
        );
        let mut swarm = SwarmBuilder::with_existing_identity(identity.keypair().clone())
            .with_tokio()
            .with_quic()
            .with_behaviour(|_| behaviour)
            .unwrap()
            .with_swarm_config(|config| config.with_idle_connection_timeout(PATIENCE))
            .build();
        swarm
            .listen_on("/ip4/127.0.0.1/udp/0/quic-v1".parse().unwrap())
            .unwrap();
        let at = loop {
            if let SwarmEvent::NewListenAddr { address, .. } = swarm.select_next_some().await {
                break swarm::socket_address(&address).unwrap();
            }
        };
        Self {
            identity,
            swarm,
            at,
        }
    }

    fn facts(&self) -> shoal_gossip::NodeFacts {
        facts(&self.identity, self.at, self.at)
    }

    /// Sends bytes as a question; the answer's bytes, none if there was no answer.
    async fn ask(&mut self, to: &Peer, bytes: Vec<u8>) -> Option<Vec<u8>> {
        let address = swarm::multiaddr(to.node.local_addr());
        let peer = to.identity.peer_id();
        self.swarm
            .behaviour_mut()
            .send_request_with_addresses(&peer, bytes, vec![address]);
        loop {
            match self.swarm.select_next_some().await {
                SwarmEvent::Behaviour(Event::Message {
                    message: Message::Response { response, .. },
                    ..
                }) => return (!response.is_empty()).then_some(response),
                SwarmEvent::Behaviour(Event::OutboundFailure { .. }) => return None,
                _ => {}
            }
        }
    }

    /// Answers every question with the same bytes.
    async fn answer_all(mut self, bytes: Vec<u8>) {
        loop {
            if let SwarmEvent::Behaviour(Event::Message {
                message: Message::Request { channel, .. },
                ..
            }) = self.swarm.select_next_some().await
            {
                self.swarm
                    .behaviour_mut()
                    .send_response(channel, bytes.clone())
                    .unwrap();
            }
        }
    }
}

fn question(protocol: u16) -> Vec<u8> {
    let envelope = Envelope {
        protocol,
        load: LoadSummary::default(),
        body: Ask::Probe,
    };
    encode(&envelope, MAX_CONTROL_BYTES).unwrap()
}

#[tokio::test]
async fn junk_and_overlong_questions_are_counted_and_harm_nobody() {
    let host = Peer::start(Echo::default()).await;
    let mut raw = RawPeer::start(CONTROL_PROTOCOL).await;
    host.view.send_replace(view(&[host.facts(), raw.facts()]));
    let mut overlong = question(PROTOCOL);
    overlong.resize(MAX_CONTROL_BYTES + 1, 0);
    let mut left_over = question(PROTOCOL);
    left_over.push(0);
    let broken = [overlong, left_over, question(PROTOCOL)[..5].to_vec()];
    let count = broken.len() as u64;
    for bytes in broken {
        assert_eq!(raw.ask(&host, bytes).await, None);
    }
    assert_eq!(host.node.stats().malformed, count);
    assert!(host.handler.heard.lock().unwrap().is_empty());

    let answer = raw.ask(&host, question(PROTOCOL)).await.unwrap();
    let answer = decode_envelope::<Answer>(&answer).unwrap();
    assert_eq!(answer.body, Answer::Load);
}

#[tokio::test]
async fn a_question_in_another_version_is_refused_in_ours() {
    let host = Peer::start(Echo::default()).await;
    let mut raw = RawPeer::start(CONTROL_PROTOCOL).await;
    host.view.send_replace(view(&[host.facts(), raw.facts()]));
    let answer = raw.ask(&host, question(PROTOCOL + 1)).await.unwrap();
    let answer = decode_envelope::<Answer>(&answer).unwrap();
    assert_eq!(answer.body, Answer::Refuse(RefuseReason::Protocol));
}

#[tokio::test]
async fn answers_that_cannot_be_read_are_malformed() {
    let other_version = encode(&(PROTOCOL + 1), MAX_CONTROL_BYTES).unwrap();
    let overlong = vec![0; MAX_CONTROL_BYTES + 1];
    let other_protocol = StreamProtocol::new("/shoal/control/999");
    let cases = [
        (CONTROL_PROTOCOL, other_version),
        (CONTROL_PROTOCOL, overlong),
        (CONTROL_PROTOCOL, vec![1, 0xFF]),
        (other_protocol, Vec::new()),
    ];
    for (protocol, bytes) in cases {
        let asker = Peer::start(Echo::default()).await;
        let raw = RawPeer::start(protocol).await;
        let id = raw.identity.node_id();
        asker.view.send_replace(view(&[asker.facts(), raw.facts()]));
        let answered = tokio::select! {
            answered = asker.node.ask(id, Ask::Probe, PATIENCE) => answered,
            () = raw.answer_all(bytes) => unreachable!(),
        };
        assert!(
            matches!(answered, Err(ControlError::Malformed { .. })),
            "{answered:?}"
        );
        assert!(asker.handler.heard.lock().unwrap().is_empty());
    }
}
