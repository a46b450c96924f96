//! Home and host against each other over in-process planes, with links that are cut: what the scenarios
//! over real sockets cannot bring about on purpose.

use std::time::Duration;

use futures::FutureExt;
use tokio::time::timeout;

use super::testing::{Mesh, PATIENCE, read};
use super::*;
use crate::engine::TokenBatch;
use crate::engine::answer::{AnswerHead, ChunkShape, GoingOn, Wire};
use crate::frontend::HomeEvent;
use crate::mesh::messages::FrameBody;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_host_points_to_a_free_one_that_it_has_probed() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    // Fill the second node from its own clients, which nobody's view shows.
    let mut held = Vec::new();
    while mesh.members[1].loads.summary().queued == 0 {
        held.push(mesh.ask(1, "m", 3_000).await.unwrap());
    }
    // Those that went to the third are let go again.
    held.retain(|running| running.host == mesh.id(1));
    mesh.empty(2).await;
    for _ in 0..6 {
        let running = mesh.ask(0, "m", 1).await.unwrap();
        assert_eq!(running.host, mesh.id(2));
        assert_eq!(read(running).await.1, [0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_cannot_be_reached_is_passed_over() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    mesh.net.cut(mesh.id(0), mesh.id(1));
    for _ in 0..6 {
        let running = mesh.ask(0, "m", 1).await.unwrap();
        assert_eq!(running.host, mesh.id(2));
    }
    mesh.net.cut(mesh.id(0), mesh.id(2));
    let nobody = mesh.ask(0, "m", 1).await.unwrap_err();
    assert!(
        matches!(nobody, HomeError::Unavailable { .. }),
        "{nobody:?}"
    );
    mesh.net.mend(mesh.id(0), mesh.id(1));
    assert_eq!(mesh.ask(0, "m", 1).await.unwrap().host, mesh.id(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_request_is_offered_again_for_a_moment() {
    let mesh = Mesh::of(&["other", "m"]);
    mesh.net.cut(mesh.id(0), mesh.id(1));
    let mended = async {
        while mesh.members[0].counted("shoal_offers_total{", "none") == 0 {
            sleep(Duration::from_millis(5)).await;
        }
        mesh.net.mend(mesh.id(0), mesh.id(1));
    };
    let (running, ()) = tokio::join!(mesh.ask(0, "m", 1), mended);
    assert_eq!(running.unwrap().host, mesh.id(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_cut_goes_on_elsewhere_and_ends_where_it_was() {
    let mesh = Mesh::of(&["other", "m", "m"]);
    let whole = read(mesh.ask(0, "m", 300).await.unwrap()).await;
    assert_eq!(whole.1, (0..300).collect::<Vec<u32>>());
    let mut running = mesh.ask(0, "m", 300).await.unwrap();
    let first = timeout(PATIENCE, running.events.recv())
        .await
        .unwrap()
        .unwrap();
    let HomeEvent::Tokens(first) = first else {
        panic!("expected tokens, got {first:?}");
    };
    let lost = mesh
        .members
        .iter()
        .position(|member| member.id == running.host)
        .unwrap();
    mesh.net.cut(mesh.id(0), mesh.id(lost));
    let (text, indexes, failed) = read(running).await;
    assert_eq!(failed, None);
    assert_eq!(first.text + &text, whole.0);
    assert_eq!(indexes, (1..300).collect::<Vec<u32>>());
    // The host that was cut off has let go of it as well.
    mesh.empty(lost).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_nowhere_left_to_go_ends_with_an_error_and_keeps_what_was_sent() {
    let mesh = Mesh::of(&["other", "m"]);
    let mut running = mesh.ask(0, "m", 3_000).await.unwrap();
    assert!(
        timeout(PATIENCE, running.events.recv())
            .await
            .unwrap()
            .is_some()
    );
    mesh.net.cut(mesh.id(0), mesh.id(1));
    let (_, indexes, failed) = read(running).await;
    assert!(matches!(failed, Some(HomeError::Lost(_))), "{failed:?}");
    assert!(
        indexes
            .iter()
            .zip(1..)
            .all(|(index, expected)| *index == expected)
    );
    mesh.empty(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_while_placed_leaves_neither_charge_nor_promise() {
    let mesh = Mesh::of(&["other", "m"]);
    mesh.net
        .delay(mesh.id(0), mesh.id(1), Duration::from_millis(50));
    for _ in 0..5 {
        let asked = mesh.ask(0, "m", 10);
        // Given up somewhere between offer and start.
        drop(timeout(Duration::from_millis(60), asked).await);
    }
    mesh.net.delay(mesh.id(0), mesh.id(1), Duration::ZERO);
    let home = &mesh.members[0].home;
    let charged = home
        .knowledge
        .decide(|world| world.corrections.charged(mesh.members[1].id));
    assert_eq!(charged.0, 0);
    // Promises end by lease, jobs by the stream that was dropped.
    mesh.empty(1).await;
}

#[test]
fn a_prompt_whose_ids_its_engine_does_not_tell_keeps_its_estimate() {
    let told = |prompt: &[u32]| {
        let this = NodeId(1);
        let id = RequestId {
            home: this,
            serial: 1,
        };
        let mut request = Request {
            id,
            kind: Some(RequestKind::Chat),
            http: HttpAsk::default(),
            body: Bytes::new(),
            model: "m".into(),
            fit: Fit::Any,
            prepared: None,
            prompt: Tokens(40),
            max_output: Tokens(900),
            priority: Priority(0),
            seed: 1,
            came: Timestamp::ZERO,
            resumed: false,
            ledger: Ledger::new(id, 900),
        };
        let mut prepared = Prepared::unread("m");
        prepared.prompt = prompt.into();
        prepared.params.max_tokens = 100;
        let shape = ChunkShape {
            id: "c".into(),
            created: 1,
            model: "m".into(),
            fingerprint: None,
            ids: false,
        };
        let head = AnswerHead {
            status: 200,
            going_on: Some(GoingOn {
                prepared,
                fingerprint: 9,
                shape,
            }),
            ..AnswerHead::default()
        };
        let batch = TokenBatch {
            ids: vec![7],
            wire: Wire {
                head: Some(Box::new(head)),
                bytes: Bytes::from_static(b"data: {}\n\n"),
            },
            ..TokenBatch::default()
        };
        let frame = Frame {
            request: id,
            epoch: request.ledger.pass_on(this),
            body: FrameBody::Tokens(batch),
        };
        assert!(matches!(request.accept(frame), Verdict::Deliver(_)));
        (request.need(BTreeSet::new()), request.max_output)
    };
    let (need, max_output) = told(&[]);
    assert_eq!((need.prompt, max_output), (Tokens(40), Tokens(100)));
    assert_eq!((need.generated, need.fit), (Tokens(1), Fit::Same(9)));
    assert_eq!(told(&[1, 2, 3]).0.prompt, Tokens(3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_until_somebody_takes_it_again() {
    let mesh = Mesh::of(&["other", "m"]);
    let whole = read(mesh.ask(0, "m", 300).await.unwrap()).await;
    let running = mesh.ask(0, "m", 300).await.unwrap();
    // The only node that serves it cannot be reached for a while: its stream is gone, and nobody takes the request.
    mesh.net.cut(mesh.id(0), mesh.id(1));
    let unanswered = || mesh.members[0].counted("shoal_offers_total{", "none");
    let mended = async {
        while unanswered() < 3 {
            sleep(Duration::from_millis(5)).await;
        }
        mesh.net.mend(mesh.id(0), mesh.id(1));
    };
    let ((), (text, indexes, failed)) =
        tokio::join!(timeout(PATIENCE, mended).map(Result::unwrap), read(running));
    assert_eq!(failed, None);
    assert_eq!((text, indexes), (whole.0, whole.1));
    assert_eq!(mesh.replays(), 1);
}
