mod wire;

use std::net::SocketAddr;
use std::time::Duration;

use shoal_gossip::DatagramIo;

use super::*;
use crate::identity::Identity;
use crate::mesh::members::FORGIVEN;
use crate::mesh::messages::{Frame, FrameBody};
use crate::mesh::testing::{Counter, PATIENCE, empty_view, facts, submission, submit, until, view};

struct Peer {
    identity: Identity,
    socket: SharedSocket,
    node: Arc<StreamNode>,
    handler: Arc<Counter>,
    view: watch::Sender<Arc<ClusterView>>,
}

impl Peer {
    fn start(handler: Counter) -> Self {
        let identity = Identity::ephemeral();
        let view = empty_view();
        let handler = Arc::new(handler);
        let here = Handle::current();
        let socket = SharedSocket::bind(([127, 0, 0, 1], 0).into(), &here).unwrap();
        let node = StreamNode::start(
            &socket,
            &here,
            identity.keypair(),
            view.subscribe(),
            Serving {
                streams: Arc::clone(&handler) as _,
                bulk: Bulk::nothing(),
            },
        )
        .unwrap();
        Self {
            identity,
            socket,
            node,
            handler,
            view,
        }
    }

    fn facts(&self) -> shoal_gossip::NodeFacts {
        let nowhere: SocketAddr = ([127, 0, 0, 1], 1).into();
        facts(&self.identity, nowhere, self.node.local_addr().unwrap())
    }

    fn id(&self) -> NodeId {
        self.identity.node_id()
    }

    async fn open(&self, at: &Self, tokens: u64) -> Result<FrameReceiver, StreamError> {
        self.node.open(at.id(), submit(self.id(), tokens)).await
    }
}

fn introduce(peers: &[&Peer]) {
    let all: Vec<_> = peers.iter().map(|peer| peer.facts()).collect();
    for peer in peers {
        peer.view.send_replace(view(&all));
    }
}

fn pair() -> (Peer, Peer) {
    let pair = (
        Peer::start(Counter::default()),
        Peer::start(Counter::default()),
    );
    introduce(&[&pair.0, &pair.1]);
    pair
}

async fn next(frames: &mut FrameReceiver) -> Option<Result<Frame, StreamError>> {
    timeout(PATIENCE, frames.next())
        .await
        .expect("a frame or an end")
}

#[tokio::test]
async fn frames_arrive_in_order_and_end_with_the_last() {
    let (home, host) = pair();
    let mut frames = home.open(&host, 500).await.unwrap();
    for index in 0..500 {
        let frame = next(&mut frames).await.unwrap().unwrap();
        assert!(
            matches!(&frame.body, FrameBody::Tokens(batch) if batch.index == index),
            "{frame:?}"
        );
    }
    let last = next(&mut frames).await.unwrap().unwrap();
    assert!(matches!(last.body, FrameBody::Finished(_)), "{last:?}");
    assert!(next(&mut frames).await.is_none());
    home.node.shutdown().await;
    host.node.shutdown().await;
}

#[tokio::test]
async fn a_home_that_does_not_read_stops_its_host_and_dropping_ends_it() {
    let (home, host) = pair();
    let mut frames = home.open(&host, 1_000_000).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
    // The host goes on until every buffer on the way is full, and no further.
    let mut before = u64::MAX;
    until("a standstill", || {
        let now = *host.handler.sent.lock().unwrap();
        std::mem::replace(&mut before, now) == now && now > 10
    })
    .await;
    // 64 KiB of frames of about 110 bytes, and what waits in channels and packets on the way.
    assert!(before < 5_000, "{before} frames were sent ahead");
    let mut ended = host.handler.ended.subscribe();
    drop(frames);
    timeout(PATIENCE, ended.wait_for(|ended| *ended == 1))
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn dropping_ends_a_host_that_has_nothing_to_send() {
    let (home, host) = (
        Peer::start(Counter::default()),
        Peer::start(Counter {
            waits: true,
            ..Counter::default()
        }),
    );
    introduce(&[&home, &host]);
    let mut ended = host.handler.ended.subscribe();
    let frames = home.open(&host, 1).await.unwrap();
    // The host has read the submission once its task runs beside the two standing ones.
    until("the host at work", || host.node.tasks() >= 3).await;
    assert_eq!(*ended.borrow(), 0);
    drop(frames);
    timeout(PATIENCE, ended.wait_for(|ended| *ended == 1))
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_broken_and_not_ended() {
    let (home, host) = (
        Peer::start(Counter::default()),
        Peer::start(Counter {
            breaks_off: true,
            ..Counter::default()
        }),
    );
    introduce(&[&home, &host]);
    let mut frames = home.open(&host, 1).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
    assert!(matches!(
        next(&mut frames).await,
        Some(Err(StreamError::Broken { .. }))
    ));
}

#[tokio::test]
async fn strangers_are_refused_and_so_is_a_host_under_anothers_name() {
    let (stranger, host) = (
        Peer::start(Counter::default()),
        Peer::start(Counter::default()),
    );
    let unknown = stranger.open(&host, 1).await;
    assert!(
        matches!(unknown, Err(StreamError::UnknownNode(_))),
        "{unknown:?}"
    );
    stranger.view.send_replace(view(&[host.facts()]));
    let refused = stranger.open(&host, 1).await;
    assert!(
        matches!(refused, Err(StreamError::Unreachable { .. })),
        "{refused:?}"
    );
    assert_eq!(*host.handler.ended.borrow(), 0);

    let other = Peer::start(Counter::default());
    introduce(&[&stranger, &host, &other]);
    let mut lie = other.facts();
    lie.stream = host.facts().stream;
    stranger.view.send_replace(view(&[stranger.facts(), lie]));
    let refused = stranger.open(&other, 1).await;
    assert!(
        matches!(refused, Err(StreamError::Unreachable { .. })),
        "{refused:?}"
    );
    assert_eq!(*host.handler.ended.borrow(), 0);
}

#[tokio::test]
async fn a_host_that_leaves_the_view_or_closes_breaks_its_streams() {
    let (home, host) = pair();
    let mut frames = home.open(&host, 1_000_000).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
    home.view.send_replace(view(&[home.facts()]));
    let broken = async { while !matches!(next(&mut frames).await, Some(Err(_))) {} };
    timeout(PATIENCE, broken).await.expect("the stream breaks");

    introduce(&[&home, &host]);
    let mut frames = home.open(&host, 1_000_000).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
    host.node.abort();
    let broken = async { while !matches!(next(&mut frames).await, Some(Err(_))) {} };
    timeout(PATIENCE, broken).await.expect("the stream breaks");
}

#[tokio::test]
async fn a_node_that_is_back_in_the_view_soon_keeps_its_streams() {
    let (home, host) = pair();
    let mut frames = home.open(&host, 2_000).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
    for _ in 0..3 {
        // Slow, not dead: both miss each other for less than is forgiven.
        home.view.send_replace(view(&[home.facts()]));
        host.view.send_replace(view(&[host.facts()]));
        tokio::time::sleep(FORGIVEN / 8).await;
        introduce(&[&home, &host]);
    }
    while let Some(frame) = next(&mut frames).await {
        frame.unwrap();
    }
}

#[tokio::test]
async fn many_streams_leave_nothing_behind() {
    let (home, host) = pair();
    for _ in 0..1_000 {
        let mut frames = home.open(&host, 2).await.unwrap();
        while next(&mut frames).await.is_some() {}
    }
    // The plane's own task, and that of the one connection.
    until("only standing tasks", || {
        home.node.tasks() == 2 && host.node.tasks() == 2
    })
    .await;
}

#[tokio::test]
async fn gossip_shares_the_port_with_streams_and_junk_harms_neither() {
    let (home, host) = pair();
    let mut frames = home.open(&host, 2_000).await.unwrap();
    let to = host.node.local_addr().unwrap();
    let junk = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut received = 0u8;
    while let Some(frame) = next(&mut frames).await {
        frame.unwrap();
        if received < 100 {
            let datagram = [1, received, 7, 7];
            home.socket.gossip.send_to(&datagram, to).await.unwrap();
            junk.send_to(&[0x40 | received, 9, 9, 9], to).unwrap();
            let got = timeout(PATIENCE, host.socket.gossip.recv_from()).await;
            let (got, from) = got.expect("gossip in time").unwrap();
            assert_eq!(
                (&got[..], from),
                (&datagram[..], home.node.local_addr().unwrap())
            );
            received += 1;
        }
    }
    assert_eq!(received, 100);
    let not_gossip = home.socket.gossip.send_to(&[0x41], to).await;
    assert!(not_gossip.is_err());
    timeout(Duration::from_secs(10), home.node.shutdown())
        .await
        .unwrap();
}

/// Reads until the stream breaks.
async fn breaks(frames: &mut FrameReceiver) -> StreamError {
    let reading = async {
        loop {
            match frames.next().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => return error,
                None => panic!("the stream ended without an error"),
            }
        }
    };
    timeout(PATIENCE, reading).await.expect("the stream breaks")
}

#[tokio::test]
async fn a_host_that_is_killed_breaks_its_streams() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let home = Peer::start(Counter::default());
    let started = async { Peer::start(Counter::default()) };
    let host = runtime.spawn(started).await.unwrap();
    introduce(&[&home, &host]);
    let mut frames = home.open(&host, u64::MAX).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
    // Everything of the host stops where it is, and no packet says so.
    runtime.shutdown_background();
    let error = breaks(&mut frames).await;
    assert!(matches!(error, StreamError::Broken { .. }), "{error}");
}

#[tokio::test]
async fn a_host_in_a_new_life_breaks_the_streams_of_the_old() {
    let (home, host) = pair();
    let mut frames = home.open(&host, u64::MAX).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
    // A view that says the same again changes nothing.
    introduce(&[&home, &host]);
    for _ in 0..1_000 {
        next(&mut frames).await.unwrap().unwrap();
    }
    let mut next_life = host.facts();
    next_life.incarnation.0 += 1;
    home.view.send_replace(view(&[home.facts(), next_life]));
    let error = breaks(&mut frames).await;
    assert!(matches!(error, StreamError::Broken { .. }), "{error}");
    // The next request dials anew.
    let mut frames = home.open(&host, 1).await.unwrap();
    next(&mut frames).await.unwrap().unwrap();
}

#[tokio::test]
async fn clients_that_do_not_read_hold_up_no_other() {
    let (home, host) = pair();
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(home.open(&host, u64::MAX).await.unwrap());
    }
    let mut before = u64::MAX;
    until("a standstill", || {
        let now = *host.handler.sent.lock().unwrap();
        std::mem::replace(&mut before, now) == now && now > 200 * 100
    })
    .await;
    let mut frames = home.open(&host, 2_000).await.unwrap();
    let mut count = 0;
    while let Some(frame) = next(&mut frames).await {
        frame.unwrap();
        count += 1;
    }
    assert_eq!(count, 2_001);
    drop(idle);
    let mut ended = host.handler.ended.subscribe();
    let all = ended.wait_for(|ended| *ended == 201);
    timeout(PATIENCE, all).await.unwrap().unwrap();
}

#[tokio::test]
async fn the_prompt_of_a_long_context_fits_the_first_frame_and_the_submission() {
    let home = Peer::start(Counter::default());
    let host = Peer::start(Counter {
        prompt: 1_000_000,
        ..Counter::default()
    });
    introduce(&[&home, &host]);
    let mut asked = submission(home.id(), 1);
    asked.prepared = Some(crate::mesh::testing::prepared(1_000_000));
    let mut frames = home.node.open(host.id(), asked.into()).await.unwrap();
    let first = next(&mut frames).await.unwrap().unwrap();
    let FrameBody::Started { prepared, .. } = first.body else {
        panic!("{first:?}");
    };
    assert_eq!(prepared.unwrap().prompt.len(), 1_000_000);
}

#[tokio::test]
async fn a_submission_over_the_bound_is_not_sent() {
    let (home, host) = pair();
    let mut asked = submission(home.id(), 1);
    asked.body = vec![0; crate::mesh::messages::MAX_SUBMIT_BYTES + 1].into();
    let refused = home.node.open(host.id(), asked.into()).await;
    assert!(
        matches!(refused, Err(StreamError::Unreachable { .. })),
        "{refused:?}"
    );
}
