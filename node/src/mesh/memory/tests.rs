use super::*;
use crate::mesh::messages::Answer;
use crate::mesh::testing::{Counter, Echo, PATIENCE, submit, until};

struct Peer {
    id: NodeId,
    echo: Arc<Echo>,
    counter: Arc<Counter>,
    planes: Arc<MemoryPlanes>,
}

fn peer(net: &MemoryNet, id: u64, counter: Counter) -> Peer {
    let echo = Arc::new(Echo {
        seq: id,
        ..Echo::default()
    });
    let counter = Arc::new(counter);
    let control: Arc<dyn ControlHandler> = Arc::clone(&echo) as _;
    let streams: Arc<dyn StreamHandler> = Arc::clone(&counter) as _;
    Peer {
        id: NodeId(id),
        planes: net.join(NodeId(id), &control, &streams),
        echo,
        counter,
    }
}

fn pair() -> (MemoryNet, Peer, Peer) {
    let net = MemoryNet::default();
    let (one, two) = (
        peer(&net, 1, Counter::default()),
        peer(&net, 2, Counter::default()),
    );
    (net, one, two)
}

#[tokio::test]
async fn a_question_is_answered_and_both_sides_hear_the_others_load() {
    let (_net, one, two) = pair();
    let answered = one.planes.ask(two.id, Ask::Probe, PATIENCE).await.unwrap();
    assert_eq!((answered.answer, answered.load.seq), (Answer::Load, 2));
    assert_eq!(*one.echo.heard.lock().unwrap(), [(two.id, 2)]);
    assert_eq!(*two.echo.heard.lock().unwrap(), [(one.id, 1)]);
    let nobody = NodeId(9);
    let unknown = one.planes.ask(nobody, Ask::Probe, PATIENCE).await;
    assert_eq!(unknown, Err(ControlError::UnknownNode(nobody)));
}

#[tokio::test(start_paused = true)]
async fn a_cut_or_slow_link_shows_as_it_does_on_a_network() {
    let (net, one, two) = pair();
    net.cut(two.id, one.id);
    let lost_answer = one.planes.ask(two.id, Ask::Probe, PATIENCE).await;
    assert_eq!(lost_answer, Err(ControlError::Silent(two.id)));
    net.cut(one.id, two.id);
    let lost_question = one.planes.ask(two.id, Ask::Probe, PATIENCE).await;
    assert!(matches!(
        lost_question,
        Err(ControlError::Unreachable { .. })
    ));
    net.mend(one.id, two.id);
    net.mend(two.id, one.id);
    net.delay(two.id, one.id, PATIENCE);
    let late = one.planes.ask(two.id, Ask::Probe, PATIENCE / 2).await;
    assert_eq!(late, Err(ControlError::Silent(two.id)));
    one.planes
        .ask(two.id, Ask::Probe, PATIENCE * 2)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_stream_ends_with_its_last_frame_breaks_with_its_link_and_closes_with_its_reader() {
    let (net, one, two) = pair();
    let mut frames = one.planes.open(two.id, submit(one.id, 3)).await.unwrap();
    let mut count = 0;
    while let Some(frame) = frames.next().await {
        frame.unwrap();
        count += 1;
    }
    assert_eq!(count, 4);

    let mut frames = one
        .planes
        .open(two.id, submit(one.id, 1_000))
        .await
        .unwrap();
    frames.next().await.unwrap().unwrap();
    net.cut(two.id, one.id);
    while frames.next().await.unwrap().is_ok() {}
    until("the host's end", || *two.counter.ended.borrow() == 2).await;

    net.mend(two.id, one.id);
    let frames = one
        .planes
        .open(two.id, submit(one.id, 1_000))
        .await
        .unwrap();
    drop(frames);
    until("the host's end", || *two.counter.ended.borrow() == 3).await;
}

#[tokio::test]
async fn a_host_that_breaks_off_leaves_a_broken_stream() {
    let net = MemoryNet::default();
    let home = peer(&net, 1, Counter::default());
    let host = peer(
        &net,
        2,
        Counter {
            breaks_off: true,
            ..Counter::default()
        },
    );
    let mut frames = home.planes.open(host.id, submit(home.id, 1)).await.unwrap();
    frames.next().await.unwrap().unwrap();
    let end = frames.next().await.unwrap();
    assert!(matches!(end, Err(StreamError::Broken { .. })), "{end:?}");
}
