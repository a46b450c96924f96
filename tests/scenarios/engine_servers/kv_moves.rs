//! Running requests move between vLLMs with their KV, through the connector inside each, and their clients do not notice.

use serde_json::{Value, json};
use shoal_tests::client::Events;
use shoal_tests::engine_server::{Dialect, EngineServer, KvFigures};
use shoal_tests::wait::until;

use super::moves::{migrate_as, under_way};
use super::{Beside, COMPLETIONS, engine};

/// Of the engines: a stream here takes a second or two.
const SPEED: f64 = 3.0;

/// Nodes beside stand-ins of vLLM; each says whether its KV can be had.
async fn vllms(with_kv: &[bool]) -> Beside {
    let mut servers = Vec::new();
    for _ in with_kv {
        servers.push(EngineServer::start(Dialect::Vllm, engine("m", SPEED)).await);
    }
    let mesh = Beside::of(servers).await;
    for (index, with_kv) in with_kv.iter().enumerate() {
        if *with_kv {
            give_kv(&mesh, index).await;
        }
    }
    mesh
}

/// The connector of a server answers, and its node has noticed: what it sends there has a name.
async fn give_kv(mesh: &Beside, index: usize) {
    mesh.servers[index].give_kv(mesh.folders[index].path());
    until("a node that moves KV", || async {
        let url = mesh.cluster.http(index);
        let metrics = mesh.cluster.client().get(url, "/metrics").await;
        let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
        let told = metrics
            .lines()
            .find(|line| line.starts_with("shoal_engine_kv_bytes"));
        match told {
            Some(line) if !line.ends_with(" 0") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// A stream with a prompt of some blocks.
fn long(tokens: u32) -> Value {
    json!({
        "model": "m", "prompt": "a shoal has no leader and turns as one ".repeat(8), "max_tokens": tokens,
        "temperature": 0, "stream": true, "ignore_eos": true, "stream_options": {"include_usage": true},
    })
}

/// The text of the next events.
async fn read(events: &mut Events, count: usize) -> String {
    let mut text = String::new();
    for _ in 0..count {
        let event = events.next().await.expect("an event");
        let chunk: Value = serde_json::from_str(&event).expect("JSON");
        text.push_str(chunk["choices"][0]["text"].as_str().unwrap_or_default());
    }
    text
}

/// A stream that has begun, its text so far, and the text that it has when nothing happens.
async fn begun(mesh: &Beside, body: &Value) -> (Events, String, String) {
    let (expected, _) = mesh.stream(COMPLETIONS, body).await.text().await;
    nothing_kept(mesh).await;
    mesh.servers
        .iter()
        .for_each(|server| server.kv().forget_cache());
    let mut events = mesh.stream(COMPLETIONS, body).await;
    let first = read(&mut events, 6).await;
    (events, first, expected)
}

/// The figures of a server once it has taken over one more request than before.
async fn taken_over(server: &EngineServer, before: &KvFigures) -> KvFigures {
    until("a request that went on", || async {
        let after = server.kv().figures();
        match after.computed.len() > before.computed.len() {
            true => Ok(after),
            false => Err(after),
        }
    })
    .await
}

/// Nothing of any request runs or is kept anywhere.
async fn nothing_kept(mesh: &Beside) {
    until("engines that hold nothing", || async {
        let figures: Vec<_> = mesh
            .servers
            .iter()
            .map(|server| server.kv().figures())
            .collect();
        match figures
            .iter()
            .all(|figures| figures.live + figures.held + figures.staged == 0)
        {
            true => Ok(()),
            false => Err(figures),
        }
    })
    .await;
}

/// Streams move to and fro, in stages and in one piece: each is the one that did not move, and its target computes one token.
/// `check` sees the answer to each move, and the figures of its target before and after.
async fn move_to_and_fro(mesh: &Beside, check: impl Fn(&Value, &KvFigures, &KvFigures)) {
    for copy in ["staged", "blocking"] {
        let (mut events, mut text, expected) = begun(mesh, &long(160)).await;
        for _ in 0..2 {
            let (id, host) = under_way(mesh).await;
            let before = mesh.servers[1 - host].kv().figures();
            let (status, answer) = migrate_as(mesh, &id, 1 - host, copy).await;
            assert_eq!(status, 200, "{copy}: {answer}");
            text += &read(&mut events, 8).await;
            let after = taken_over(&mesh.servers[1 - host], &before).await;
            check(&answer, &before, &after);
            assert_eq!(after.wrong, 0, "{copy}: {after:?}");
            assert_eq!(
                after.computed.last(),
                Some(&1),
                "{copy}: one token is computed, {after:?}"
            );
        }
        let (rest, reason) = events.text().await;
        assert_eq!(text + &rest, expected, "{copy}");
        assert_eq!(reason.as_deref(), Some("length"));
        nothing_kept(mesh).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_moves_to_and_fro_with_its_kv() {
    let mesh = vllms(&[true, true]).await;
    move_to_and_fro(&mesh, |answer, before, after| {
        assert!(answer["bytes"].as_u64() > Some(1_000), "{answer}");
        assert!(after.imported > before.imported, "{answer} {after:?}");
    })
    .await;
}

/// Nodes beside two stand-ins that can read each other's KV.
async fn neighbours() -> Beside {
    let mut servers = Vec::new();
    for _ in 0..2 {
        servers.push(EngineServer::start(Dialect::Vllm, engine("m", SPEED)).await);
        servers.last().expect("one").kv().be_direct();
    }
    let mesh = Beside::of(servers).await;
    for index in 0..2 {
        give_kv(&mesh, index).await;
    }
    mesh
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_can_read_each_other_s_kv_do() {
    let mesh = neighbours().await;
    move_to_and_fro(&mesh, |answer, before, after| {
        assert!(after.fetched > before.fetched, "{answer} {after:?}");
        assert_eq!(after.unkept, 0, "{after:?}");
    })
    .await;
    until("nothing kept for others", || async {
        let pinned = |server: &EngineServer| server.kv().figures().pinned;
        let pinned: Vec<usize> = mesh.servers.iter().map(pinned).collect();
        match pinned[..] {
            [0, 0] => Ok(()),
            _ => Err(pinned),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_that_cannot_be_read_goes_through_the_nodes() {
    let mesh = neighbours().await;
    for copy in ["staged", "blocking"] {
        let (mut events, mut text, expected) = begun(&mesh, &long(160)).await;
        let (id, host) = under_way(&mesh).await;
        let to = mesh.servers[1 - host].kv();
        let before = to.figures();
        to.fault("fetch", "unfit");
        let (status, answer) = migrate_as(&mesh, &id, 1 - host, copy).await;
        assert_eq!(status, 200, "{copy}: {answer}");
        assert!(answer["bytes"].as_u64() > Some(1_000), "{answer}");
        text += &read(&mut events, 8).await;
        let after = taken_over(&mesh.servers[1 - host], &before).await;
        assert_eq!((after.wrong, after.fetched), (0, before.fetched), "{copy}");
        assert!(after.imported > before.imported, "{copy}: {after:?}");
        to.mend();
        let (rest, _) = events.text().await;
        assert_eq!(text + &rest, expected, "{copy}");
        nothing_kept(&mesh).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_wrong_with_kv_costs_no_token() {
    let mesh = vllms(&[true, true]).await;
    let (expected, _) = mesh.stream(COMPLETIONS, &long(160)).await.text().await;
    for (op, why) in [
        ("info", "bad"),
        ("blocks", "gone"),
        ("export", "busy"),
        ("hold", "gone"),
        ("wait_held", "gone"),
        ("stage", "busy"),
    ] {
        for copy in ["staged", "blocking"] {
            let mut events = mesh.stream(COMPLETIONS, &long(160)).await;
            let text = read(&mut events, 6).await;
            let (id, host) = under_way(&mesh).await;
            mesh.servers
                .iter()
                .for_each(|server| server.kv().fault(op, why));
            let (status, answer) = migrate_as(&mesh, &id, 1 - host, copy).await;
            let (rest, reason) = events.text().await;
            assert_eq!(text + &rest, expected, "{op} {copy}: {status} {answer}");
            assert_eq!(reason.as_deref(), Some("length"), "{op} {copy}");
            for server in &mesh.servers {
                assert_eq!(server.kv().figures().wrong, 0, "{op} {copy}");
                server.kv().mend();
            }
            nothing_kept(&mesh).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_stays_after_all_finds_its_kv() {
    let mesh = vllms(&[true, true]).await;
    let (mut events, text, expected) = begun(&mesh, &long(160)).await;
    let (id, host) = under_way(&mesh).await;
    // Without stages the only part to lay out is the last: the request has stopped by then.
    mesh.servers[1 - host].kv().fault("stage", "busy");
    let (status, answer) = migrate_as(&mesh, &id, 1 - host, "blocking").await;
    assert_eq!(status, 409, "{answer}");
    let (rest, reason) = events.text().await;
    assert_eq!(text + &rest, expected);
    assert_eq!(reason.as_deref(), Some("length"));
    let figures = mesh.servers[host].kv().figures();
    assert!(matches!(figures.computed[..], [1..=17]), "{figures:?}");
    nothing_kept(&mesh).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_takes_no_kv_in_is_given_ids() {
    let mesh = vllms(&[true, false]).await;
    let (mut events, mut text, expected) = begun(&mesh, &long(160)).await;
    for _ in 0..2 {
        let (id, host) = under_way(&mesh).await;
        let (status, answer) = migrate_as(&mesh, &id, 1 - host, "staged").await;
        assert_eq!(status, 200, "{answer}");
        text += &read(&mut events, 4).await;
    }
    let (rest, _) = events.text().await;
    assert_eq!(text + &rest, expected);
    nothing_kept(&mesh).await;
}

/// Moves the only stream and hangs up once its engines were asked so many questions about it, if the move lasts so long.
async fn hang_up(mesh: &Beside, mut events: Events, questions: usize, copy: &str) {
    read(&mut events, 6).await;
    let (id, host) = under_way(mesh).await;
    let asked = || -> usize {
        let of = |server: &EngineServer| server.kv().figures().asked;
        mesh.servers.iter().map(of).sum()
    };
    let before = asked();
    let client = async {
        let enough = until("questions", || async {
            match asked() - before >= questions {
                true => Ok(()),
                false => Err(asked() - before),
            }
        });
        enough.await;
        drop(events);
    };
    let moving = migrate_as(mesh, &id, 1 - host, copy);
    tokio::pin!(client, moving);
    tokio::select! {
        () = &mut client => drop(moving.await),
        _ = &mut moving => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_in_the_middle_of_a_move_leaves_no_kv_anywhere() {
    for mesh in [vllms(&[true, true]).await, neighbours().await] {
        for copy in ["staged", "blocking"] {
            for questions in 1..8 {
                let events = mesh.stream(COMPLETIONS, &long(160)).await;
                hang_up(&mesh, events, questions, copy).await;
                nothing_kept(&mesh).await;
            }
        }
        for server in &mesh.servers {
            assert_eq!(server.kv().figures().wrong, 0);
        }
    }
}
