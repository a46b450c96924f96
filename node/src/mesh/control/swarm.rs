//! The task that drives the swarm. It only passes things on: questions are answered in tasks of their
//! own, so that nothing here ever waits.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use libp2p::multiaddr::Protocol;
use libp2p::request_response::{
    Event, InboundRequestId, Message, OutboundFailure, OutboundRequestId, ResponseChannel,
};
use libp2p::swarm::SwarmEvent;
use libp2p::{Multiaddr, PeerId, Swarm, mdns, ping};
use shoal_gossip::NodeId;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, trace};

use crate::mesh::codec::control::Received;
use crate::mesh::control::behaviour::{
    Behaviour, BehaviourEvent, EXCHANGE_TIMEOUT, STREAMS_PER_CONNECTION,
};
use crate::mesh::control::{Command, ControlCounters, ControlStartError, Failure, Reply};
use crate::mesh::members::{Member, Members, node_of};
use crate::mesh::messages::{Answer, Ask, Envelope, PROTOCOL, RefuseReason};
use crate::mesh::{Answered, ControlHandler};

/// Questions answered at once. Each may probe two others meanwhile and holds a few hundred bytes;
/// beyond this a peer's question is dropped, which it sees as a failure at once.
const ANSWERING: usize = 1_024;

/// How long the system may take to bind an address.
const LISTEN_PATIENCE: Duration = Duration::from_secs(10);

/// Questions to one peer without an answer. As many as fit a connection; beyond it libp2p would take
/// them only to fail them, and a silent peer would collect them without end.
const ASKED_PER_PEER: usize = STREAMS_PER_CONNECTION;

/// An answer that is ready to go out; none when the handler took longer than any asker waits.
type Answering = Option<(ResponseChannel<Received<Answer>>, Envelope<Answer>)>;

/// Listens and returns the address that was bound.
pub(super) async fn listen(
    swarm: &mut Swarm<Behaviour>,
    address: SocketAddr,
) -> Result<SocketAddr, ControlStartError> {
    let listener = swarm
        .listen_on(multiaddr(address))
        .map_err(|error| ControlStartError::Listen(error.to_string()))?;
    let bound = timeout(LISTEN_PATIENCE, async {
        loop {
            match swarm.select_next_some().await {
                SwarmEvent::NewListenAddr {
                    listener_id,
                    address,
                } if listener_id == listener => {
                    if let Some(bound) = socket_address(&address) {
                        return Ok(bound.port());
                    }
                }
                SwarmEvent::ListenerClosed {
                    listener_id,
                    reason,
                    ..
                } if listener_id == listener => {
                    let reason =
                        reason.map_or_else(|error| error.to_string(), |()| "closed".into());
                    return Err(ControlStartError::Listen(reason));
                }
                _ => {}
            }
        }
    });
    match bound.await {
        Ok(port) => Ok((address.ip(), port?).into()),
        Err(_) => Err(ControlStartError::Listen(
            "the system does not answer".into(),
        )),
    }
}

/// What a driver is made of.
pub(super) struct Parts {
    pub(super) swarm: Swarm<Behaviour>,
    pub(super) members: Members,
    pub(super) handler: Arc<dyn ControlHandler>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) discovered: mpsc::Sender<SocketAddr>,
    pub(super) counters: Arc<ControlCounters>,
}

/// The driver of one swarm.
pub(super) struct Driver {
    parts: Parts,
    /// Questions out there. Bounded by `waiting`; each ends by the exchange timeout at the latest,
    /// also when its asker has given up.
    asked: HashMap<OutboundRequestId, (PeerId, Reply)>,
    /// How many of `asked` each peer has.
    waiting: HashMap<PeerId, usize>,
    /// The guest list as the swarm has it.
    guests: BTreeMap<NodeId, Member>,
    answering: JoinSet<Answering>,
}

impl Driver {
    pub(super) fn new(parts: Parts) -> Self {
        Self {
            parts,
            asked: HashMap::new(),
            waiting: HashMap::new(),
            guests: BTreeMap::new(),
            answering: JoinSet::new(),
        }
    }

    /// Drives until told to stop.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut members = self.parts.members.clone();
        let mut view_lives = true;
        self.update_guests();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                lives = members.changed(), if view_lives => {
                    view_lives = lives;
                    self.update_guests();
                }
                Some(done) = self.answering.join_next() => match done {
                    Ok(Some((channel, answer))) => self.respond(channel, answer),
                    Ok(None) => debug!("a question was not answered in time"),
                    Err(error) => debug!(%error, "a question was not answered"),
                },
                Some(command) = self.parts.commands.recv() => self.ask(command),
                event = self.parts.swarm.select_next_some() => self.on_event(event),
            }
        }
    }

    /// Makes the swarm's guest list the identities that the view names. A node that came back in a new
    /// life loses the connections of its old one: half of all questions would go down the dead one.
    fn update_guests(&mut self) {
        let mut now = BTreeMap::new();
        for facts in self.parts.members.records() {
            // Reading a record costs microseconds, and few records change from view to view.
            let known = self
                .guests
                .get(&facts.node)
                .filter(|guest| Arc::ptr_eq(&guest.facts, &facts));
            if let Some(member) = known.cloned().or_else(|| Member::of(&facts)) {
                now.insert(facts.node, member);
            }
        }
        let gone = std::mem::replace(&mut self.guests, now);
        let allowed = &mut self.parts.swarm.behaviour_mut().allowed;
        for (node, guest) in &gone {
            if !self.guests.contains_key(node) {
                allowed.disallow_peer(guest.peer);
                self.parts.counters.forget(*node);
            }
        }
        let mut came_back = Vec::new();
        for (node, guest) in &self.guests {
            match gone.get(node) {
                None => {
                    allowed.allow_peer(guest.peer);
                }
                Some(before) if before.facts.incarnation < guest.facts.incarnation => {
                    came_back.push(guest.peer);
                }
                Some(_) => {}
            }
        }
        for peer in came_back {
            if self.parts.swarm.disconnect_peer_id(peer).is_ok() {
                debug!(%peer, "its connections are of an earlier life");
            }
        }
    }

    fn ask(&mut self, command: Command) {
        let Command {
            node,
            to,
            at,
            ask,
            reply,
        } = command;
        // Its asker may have given up while it waited here.
        if reply.is_closed() {
            return;
        }
        if !self.guests.contains_key(&node) {
            // The view may be newer than the guest list.
            self.update_guests();
        }
        let waiting = self.waiting.entry(to).or_default();
        if *waiting >= ASKED_PER_PEER {
            answer_to(
                reply,
                Err(Failure::Unreachable("too many questions wait there".into())),
            );
            return;
        }
        *waiting += 1;
        let id = self
            .parts
            .swarm
            .behaviour_mut()
            .exchange
            .send_request_with_addresses(&to, Received::Ours(ask), vec![multiaddr(at)]);
        self.asked.insert(id, (to, reply));
    }

    fn respond(&mut self, channel: ResponseChannel<Received<Answer>>, answer: Envelope<Answer>) {
        let exchange = &mut self.parts.swarm.behaviour_mut().exchange;
        if exchange
            .send_response(channel, Received::Ours(answer))
            .is_ok()
        {
            self.parts.counters.answered.add();
        }
    }

    fn on_event(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(BehaviourEvent::Exchange(event)) => self.on_exchange(event),
            SwarmEvent::Behaviour(BehaviourEvent::Ping(ping::Event {
                peer,
                result: Ok(rtt),
                ..
            })) => self.parts.counters.measured(node_of(&peer), rtt),
            SwarmEvent::Behaviour(BehaviourEvent::Mdns(mdns::Event::Discovered(found))) => {
                for (_, address) in found {
                    if let Some(address) = socket_address(&address)
                        && self.parts.discovered.try_send(address).is_err()
                    {
                        trace!(%address, "neighbour found, and many are known already");
                    }
                }
            }
            SwarmEvent::IncomingConnectionError { error, .. } => {
                self.parts.counters.refused.add();
                trace!(%error, "incoming connection refused");
            }
            SwarmEvent::OutgoingConnectionError { peer_id, error, .. } => {
                debug!(?peer_id, %error, "could not connect");
            }
            other => trace!(?other, "swarm"),
        }
    }

    fn on_exchange(&mut self, event: Event<Received<Ask>, Received<Answer>>) {
        match event {
            Event::Message {
                peer,
                message:
                    Message::Request {
                        request,
                        channel,
                        request_id,
                    },
                ..
            } => self.on_question(peer, request, channel, request_id),
            Event::Message {
                message:
                    Message::Response {
                        request_id,
                        response,
                    },
                ..
            } => self.deliver(request_id, Ok(response)),
            Event::OutboundFailure {
                request_id, error, ..
            } => self.deliver(request_id, Err(failure(&error))),
            Event::InboundFailure { peer, error, .. } => {
                debug!(%peer, %error, "a question could not be answered");
            }
            Event::ResponseSent { .. } => {}
        }
    }

    fn deliver(&mut self, id: OutboundRequestId, answer: Result<Received<Answer>, Failure>) {
        let Some((peer, reply)) = self.asked.remove(&id) else {
            return;
        };
        if let Some(waiting) = self.waiting.get_mut(&peer) {
            *waiting -= 1;
            if *waiting == 0 {
                self.waiting.remove(&peer);
            }
        }
        answer_to(reply, answer);
    }

    fn on_question(
        &mut self,
        peer: PeerId,
        request: Received<Ask>,
        channel: ResponseChannel<Received<Answer>>,
        id: InboundRequestId,
    ) {
        let Some(from) = self.parts.members.admit(&peer) else {
            // It left the view a moment ago. Dropping the channel tells it.
            self.parts.counters.refused.add();
            return;
        };
        let envelope = match request {
            Received::Ours(envelope) => envelope,
            Received::OtherProtocol(version) => {
                debug!(%from, version, "another protocol");
                let answer = Envelope {
                    protocol: PROTOCOL,
                    load: self.parts.handler.load(),
                    body: Answer::Refuse(RefuseReason::Protocol),
                };
                self.respond(channel, answer);
                return;
            }
        };
        self.parts.handler.heard(from, envelope.load);
        if self.answering.len() >= ANSWERING {
            debug!(%from, %id, "too many questions at once");
            self.parts.counters.overrun.add();
            return;
        }
        let handler = Arc::clone(&self.parts.handler);
        self.answering.spawn(async move {
            let answered = timeout(EXCHANGE_TIMEOUT, handler.answer(from, envelope.body)).await;
            let Answered { answer, load } = answered.ok()?;
            let envelope = Envelope {
                protocol: PROTOCOL,
                load,
                body: answer,
            };
            Some((channel, envelope))
        });
    }
}

/// Hands an answer to its asker, who may have given up.
fn answer_to(reply: Reply, answer: Result<Received<Answer>, Failure>) {
    drop(reply.send(answer));
}

fn failure(error: &OutboundFailure) -> Failure {
    match error {
        OutboundFailure::DialFailure => {
            Failure::Unreachable("it cannot be connected, or it does not know us".into())
        }
        OutboundFailure::ConnectionClosed => {
            Failure::Unreachable("it closed the connection".into())
        }
        OutboundFailure::Timeout => Failure::Silent,
        OutboundFailure::UnsupportedProtocols => Failure::Malformed(error.to_string()),
        OutboundFailure::Io(cause) if cause.kind() == io::ErrorKind::InvalidData => {
            Failure::Malformed(cause.to_string())
        }
        OutboundFailure::Io(cause) => Failure::Unreachable(cause.to_string()),
    }
}

pub(super) fn multiaddr(address: SocketAddr) -> Multiaddr {
    Multiaddr::from(address.ip())
        .with(Protocol::Udp(address.port()))
        .with(Protocol::QuicV1)
}

pub(super) fn socket_address(address: &Multiaddr) -> Option<SocketAddr> {
    Some(peer_address(address)?.0)
}

/// Where an address leads, and to whom, if it says so.
pub(super) fn peer_address(address: &Multiaddr) -> Option<(SocketAddr, Option<PeerId>)> {
    let (mut ip, mut port, mut peer) = (None, None, None);
    for part in address {
        match part {
            Protocol::Ip4(four) => ip = Some(IpAddr::V4(four)),
            Protocol::Ip6(six) => ip = Some(IpAddr::V6(six)),
            Protocol::Udp(udp) => port = Some(udp),
            Protocol::P2p(id) => peer = Some(id),
            _ => {}
        }
    }
    Some(((ip?, port?).into(), peer))
}
