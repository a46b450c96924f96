mod wire;

use std::net::SocketAddr;

use super::*;
use crate::identity::Identity;
use crate::mesh::messages::Answer;
use crate::mesh::testing::{Echo, PATIENCE, empty_view, facts, until, view};

struct Peer {
    identity: Identity,
    node: Arc<ControlNode>,
    handler: Arc<Echo>,
    view: watch::Sender<Arc<ClusterView>>,
}

impl Peer {
    async fn start(handler: Echo) -> Self {
        let identity = Identity::ephemeral();
        let view = empty_view();
        let handler = Arc::new(handler);
        let config = ControlConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            mdns: false,
        };
        let node = ControlNode::start(
            config,
            identity.keypair(),
            view.subscribe(),
            Arc::clone(&handler) as _,
        )
        .await
        .unwrap();
        Self {
            identity,
            node,
            handler,
            view,
        }
    }

    fn facts(&self) -> shoal_gossip::NodeFacts {
        let nowhere: SocketAddr = ([127, 0, 0, 1], 1).into();
        facts(&self.identity, self.node.local_addr(), nowhere)
    }

    fn id(&self) -> NodeId {
        self.identity.node_id()
    }
}

/// Lets these see each other.
fn introduce(peers: &[&Peer]) {
    let all: Vec<_> = peers.iter().map(|peer| peer.facts()).collect();
    for peer in peers {
        peer.view.send_replace(view(&all));
    }
}

#[tokio::test]
async fn a_question_is_answered_and_both_sides_hear_the_others_load() {
    let (one, two) = (
        Peer::start(Echo {
            seq: 11,
            ..Echo::default()
        })
        .await,
        Peer::start(Echo {
            seq: 22,
            ..Echo::default()
        })
        .await,
    );
    introduce(&[&one, &two]);
    let answered = one.node.ask(two.id(), Ask::Probe, PATIENCE).await.unwrap();
    assert_eq!((answered.answer, answered.load.seq), (Answer::Load, 22));
    assert_eq!(*one.handler.heard.lock().unwrap(), [(two.id(), 22)]);
    assert_eq!(*two.handler.heard.lock().unwrap(), [(one.id(), 11)]);
    one.node.shutdown().await;
    two.node.shutdown().await;
}

#[tokio::test]
async fn a_node_that_no_record_names_is_refused_and_cannot_be_asked() {
    let (stranger, host) = (
        Peer::start(Echo::default()).await,
        Peer::start(Echo::default()).await,
    );
    let unknown = stranger.node.ask(host.id(), Ask::Probe, PATIENCE).await;
    assert_eq!(unknown, Err(ControlError::UnknownNode(host.id())));
    // It learned of the host, and the host never heard of it.
    stranger
        .view
        .send_replace(view(&[stranger.facts(), host.facts()]));
    let refused = stranger.node.ask(host.id(), Ask::Probe, PATIENCE).await;
    assert!(
        matches!(refused, Err(ControlError::Unreachable { .. })),
        "{refused:?}"
    );
    assert!(host.handler.heard.lock().unwrap().is_empty());
    assert!(host.node.stats().refused > 0);
    // Once its record arrives there it is let in.
    introduce(&[&stranger, &host]);
    stranger
        .node
        .ask(host.id(), Ask::Probe, PATIENCE)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_node_under_anothers_address_is_not_taken_for_it() {
    let (asker, real, imposter) = (
        Peer::start(Echo::default()).await,
        Peer::start(Echo::default()).await,
        Peer::start(Echo::default()).await,
    );
    introduce(&[&asker, &real, &imposter]);
    let mut lie = real.facts();
    lie.control = imposter.node.local_addr();
    asker
        .view
        .send_replace(view(&[asker.facts(), lie, imposter.facts()]));
    let answered = asker.node.ask(real.id(), Ask::Probe, PATIENCE).await;
    assert!(
        matches!(answered, Err(ControlError::Unreachable { .. })),
        "{answered:?}"
    );
    assert!(imposter.handler.heard.lock().unwrap().is_empty());
}

#[tokio::test]
async fn leaving_the_view_ends_the_connection() {
    let (one, two) = (
        Peer::start(Echo::default()).await,
        Peer::start(Echo::default()).await,
    );
    introduce(&[&one, &two]);
    one.node.ask(two.id(), Ask::Probe, PATIENCE).await.unwrap();
    two.view.send_replace(view(&[two.facts()]));
    let mut last = None;
    let denied = timeout(PATIENCE, async {
        loop {
            last = Some(one.node.ask(two.id(), Ask::Probe, PATIENCE).await);
            if last.as_ref().is_some_and(Result::is_err) {
                return;
            }
        }
    });
    assert!(denied.await.is_ok(), "{last:?}");
}

#[tokio::test]
async fn silence_ends_at_the_deadline_and_nobody_there_is_unreachable() {
    let (asker, mute) = (
        Peer::start(Echo::default()).await,
        Peer::start(Echo {
            mute: true,
            ..Echo::default()
        })
        .await,
    );
    introduce(&[&asker, &mute]);
    let silent = asker
        .node
        .ask(mute.id(), Ask::Probe, Duration::from_millis(300))
        .await;
    assert_eq!(silent, Err(ControlError::Silent(mute.id())));
    assert_eq!(asker.node.stats().unanswered, 1);
    let gone = mute.id();
    mute.node.shutdown().await;
    let answered = asker.node.ask(gone, Ask::Probe, PATIENCE).await;
    assert!(
        matches!(answered, Err(ControlError::Unreachable { .. })),
        "{answered:?}"
    );
}

#[tokio::test]
async fn junk_on_the_port_changes_nothing() {
    let (one, two) = (
        Peer::start(Echo::default()).await,
        Peer::start(Echo::default()).await,
    );
    introduce(&[&one, &two]);
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    for length in 1..400usize {
        let junk: Vec<u8> = (0..length).map(|at| (at * length * 31) as u8).collect();
        socket.send_to(&junk, two.node.local_addr()).unwrap();
    }
    one.node.ask(two.id(), Ask::Probe, PATIENCE).await.unwrap();
    until("a measured round trip", || one.node.rtt(two.id()).is_some()).await;
}

#[tokio::test]
async fn a_port_in_use_is_an_error_at_the_start() {
    let first = Peer::start(Echo::default()).await;
    let config = ControlConfig {
        listen: first.node.local_addr(),
        mdns: false,
    };
    let other = Identity::ephemeral();
    let again = ControlNode::start(
        config,
        other.keypair(),
        empty_view().subscribe(),
        Arc::new(Echo::default()) as _,
    );
    let error = again.await.unwrap_err();
    assert!(matches!(error, ControlStartError::Listen(_)), "{error}");
}

#[tokio::test]
async fn a_peer_in_a_new_life_is_asked_over_a_new_connection() {
    let (one, two) = (
        Peer::start(Echo::default()).await,
        Peer::start(Echo::default()).await,
    );
    introduce(&[&one, &two]);
    one.node.ask(two.id(), Ask::Probe, PATIENCE).await.unwrap();
    let mut next_life = two.facts();
    next_life.incarnation.0 += 1;
    one.view.send_replace(view(&[one.facts(), next_life]));
    // The connection may be closed while the question is on it; the one after that is on the new one.
    let mut answered = one.node.ask(two.id(), Ask::Probe, PATIENCE).await;
    if answered.is_err() {
        answered = one.node.ask(two.id(), Ask::Probe, PATIENCE).await;
    }
    answered.unwrap();
}

#[test]
fn session_secrets_are_never_written_out() {
    let refused = refuse_key_log(Some(OsStr::new("/somewhere")));
    assert!(matches!(refused, Err(ControlStartError::Setup(_))));
    assert!(refuse_key_log(None).is_ok());
}
