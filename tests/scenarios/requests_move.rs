//! Running requests move between nodes over the real planes, and their clients do not notice.

use std::time::Duration;

use futures::future::join_all;
use serde_json::{Value, json};
use shoal_node::config::{EngineKind, PolicyName, Travels};
use shoal_tests::client::Events;
use shoal_tests::cluster::{Cluster, MODEL, llama};
use shoal_tests::tiny_gguf::write_tiny_gguf;
use shoal_tests::wait::until;

/// A stream under way.
struct Stream {
    id: String,
    events: Events,
    text: String,
}

impl Stream {
    /// Asks a node, and waits for the first of the output.
    async fn begin(cluster: &Cluster, home: usize, body: &Value) -> Self {
        let mut events = cluster
            .client()
            .stream(cluster.http(home), "/v1/completions", body)
            .await;
        assert_eq!(events.status(), 200);
        let first: Value =
            serde_json::from_str(&events.next().await.expect("an event")).expect("JSON");
        let id = first["id"].as_str().expect("an id");
        Self {
            id: id.strip_prefix("cmpl-").expect("a completion").to_owned(),
            text: first["choices"][0]["text"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            events,
        }
    }

    async fn whole(mut self) -> String {
        let (rest, reason) = self.events.text().await;
        assert_eq!(reason.as_deref(), Some("length"));
        self.text + &rest
    }
}

/// Where the home says that a request is; `None` when it is over.
async fn host(cluster: &Cluster, home: usize, id: &str) -> Option<usize> {
    let answer = cluster
        .client()
        .get(cluster.http(home), "/mesh/requests")
        .await
        .json();
    let rows = answer["requests"].as_array().expect("a list").clone();
    let row = rows.into_iter().find(|row| row["id"] == id)?;
    (0..3).find(|index| row["host"] == cluster.id(*index).to_string())
}

/// Asks a node to have a request moved; status and answer.
async fn migrate(cluster: &Cluster, at: usize, id: &str, to: usize) -> (u16, Value) {
    let path = format!("/mesh/requests/{id}/migrate");
    let body = json!({"to": cluster.id(to).to_string()});
    let answer = cluster.client().post(cluster.http(at), &path, &body).await;
    (answer.status.as_u16(), answer.json())
}

/// Moves a request so many times, asking one node after the other, whoever has it. Gives up when it has ended.
async fn move_around(cluster: &Cluster, home: usize, id: &str, times: usize) -> usize {
    let mut moved = 0;
    for turn in 0.. {
        let Some(from) = host(cluster, home, id).await else {
            return moved;
        };
        let to = (from + 1 + turn % 2) % 3;
        let (status, answer) = migrate(cluster, (home + turn) % 3, id, to).await;
        match status {
            200 => moved += 1,
            // Full slots, a move that goes on, or the end of the request.
            404 | 409 => tokio::task::yield_now().await,
            _ => panic!("{status}: {answer}"),
        }
        if moved == times {
            return moved;
        }
    }
    moved
}

/// A counter summed over all nodes and labels.
async fn counted(cluster: &Cluster, nodes: usize, name: &str) -> u64 {
    let mut sum = 0;
    for index in 0..nodes {
        let text = cluster.client().get(cluster.http(index), "/metrics").await;
        let text = String::from_utf8(text.body.to_vec()).expect("text");
        sum += text
            .lines()
            .filter(|line| line.starts_with(name))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
            .sum::<u64>();
    }
    sum
}

fn slowly(config: &mut shoal_node::config::NodeConfig) {
    if let EngineKind::Sim(sim) = &mut config.engine.kind {
        sim.speed = 20.0;
    }
}

fn story(number: usize, tokens: u32) -> Value {
    json!({
        "model": MODEL, "prompt": format!("story {number} of the sea"), "max_tokens": tokens,
        "ignore_eos": true, "stream": true, "temperature": if number.is_multiple_of(2) { 0.0 } else { 0.8 },
        "seed": number,
    })
}

/// Streams that are moved give what unmoved ones gave, and nothing is left of them.
async fn moved_streams_are_whole(cluster: Cluster, streams: usize, tokens: u32, times: usize) {
    let expected = join_all((0..streams).map(|number| {
        let cluster = &cluster;
        async move {
            let unmoved = Stream::begin(cluster, number % 3, &story(number, tokens)).await;
            unmoved.whole().await
        }
    }))
    .await;
    let moves = join_all((0..streams).map(|number| {
        let (cluster, expected) = (&cluster, &expected);
        async move {
            let home = number % 3;
            let stream = Stream::begin(cluster, home, &story(number, tokens)).await;
            let id = stream.id.clone();
            let (moved, text) =
                tokio::join!(move_around(cluster, home, &id, times), stream.whole());
            assert_eq!(
                text, expected[number],
                "stream {number} after {moved} moves"
            );
            moved
        }
    }))
    .await;
    assert!(moves.iter().all(|moved| *moved == times), "{moves:?}");
    assert_eq!(counted(&cluster, 3, "shoal_replays_total").await, 0);
    assert!(counted(&cluster, 3, "shoal_moves_total").await >= (times * streams) as u64);
    cluster.empty().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simulated_streams_move_three_times_each_and_stay_whole() {
    let cluster = Cluster::start(3, |_, config| slowly(config)).await;
    moved_streams_are_whole(cluster, 9, 2_000, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_the_embedded_engine_move_three_times_each_and_stay_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("tiny.gguf");
    write_tiny_gguf(&model).expect("written");
    let cluster = Cluster::start(3, |_, config| {
        config.engine.kind = llama(&model);
        if let EngineKind::Llama(llama) = &mut config.engine.kind {
            llama.context = 16_384;
        }
    })
    .await;
    // The model is so small that a stream of fewer tokens may end before its third move.
    moved_streams_are_whole(cluster, 6, 1_900, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_engines_without_kv_export_move_by_recompute_and_those_with_by_true_bytes() {
    for kv in [Travels::Nothing, Travels::TrueSize] {
        let cluster = Cluster::start(3, |_, config| {
            slowly(config);
            if let EngineKind::Sim(sim) = &mut config.engine.kind {
                sim.kv = kv;
            }
        })
        .await;
        moved_streams_are_whole(cluster, 3, 2_000, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_differ_refuse_each_other_s_requests_with_the_reason() {
    let cluster = Cluster::start(3, |index, config| {
        slowly(config);
        match index {
            1 => config.engine.block_size = config.engine.block_size.saturating_add(16),
            2 => {
                if let EngineKind::Sim(sim) = &mut config.engine.kind {
                    sim.kv = Travels::TrueSize;
                }
            }
            _ => {}
        }
        // All requests start at their home.
        config.dispatch.policy = PolicyName::RoundRobin;
    })
    .await;
    let stream = Stream::begin(&cluster, 0, &story(0, 600)).await;
    let from = host(&cluster, 0, &stream.id).await.expect("it runs");
    for to in (0..3).filter(|to| *to != from) {
        let (status, answer) = migrate(&cluster, 0, &stream.id, to).await;
        let message = answer["error"]["message"].as_str().expect("a message");
        assert_eq!(status, 409, "{answer}");
        assert!(message.contains("engine differs"), "{message}");
    }
    assert_eq!(host(&cluster, 0, &stream.id).await, Some(from));
    drop(stream);
    cluster.empty().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_moved_survives_the_death_of_its_new_host() {
    let mut cluster = Cluster::start(3, |_, config| slowly(config)).await;
    let body = story(1, 700);
    let expected = Stream::begin(&cluster, 0, &body).await.whole().await;
    let stream = Stream::begin(&cluster, 0, &body).await;
    let from = host(&cluster, 0, &stream.id).await.expect("it runs");
    let to = if from == 2 { 1 } else { 2 };
    let (status, answer) = migrate(&cluster, 0, &stream.id, to).await;
    assert_eq!(status, 200, "{answer}");
    cluster.kill(to);
    assert_eq!(stream.whole().await, expected);
    cluster.empty().await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_runs_short_of_kv_sheds_requests_to_one_that_has_plenty() {
    let small = |config: &mut shoal_node::config::NodeConfig| {
        if let EngineKind::Sim(sim) = &mut config.engine.kind {
            sim.speed = 20.0;
            sim.context = Some(4_096);
        }
        config.moves.interval = Some(Duration::from_millis(20));
    };
    let mut cluster = Cluster::start(1, |_, config| small(config)).await;
    // Alone, it has nobody to turn to: eight requests of 30 blocks each leave it short of its 256 blocks.
    let prompt = "the sea ".repeat(60);
    let body = |number: usize| {
        let mut body = story(number, 900);
        body["prompt"] = json!(format!("{prompt}{number}"));
        body
    };
    let mut streams = Vec::new();
    for number in 0..8 {
        streams.push(Stream::begin(&cluster, 0, &body(number)).await);
    }
    cluster.add(small).await;
    cluster.converged(2).await;
    until("a request that was rescheduled", || async {
        let text = cluster.client().get(cluster.http(0), "/metrics").await;
        let text = String::from_utf8(text.body.to_vec()).expect("text");
        let moved = text.lines().any(|line| {
            line.starts_with("shoal_moves_total")
                && line.contains("reason=\"rescheduled\"")
                && line.contains("outcome=\"moved\"")
        });
        if moved {
            Ok(())
        } else {
            Err(cluster.node(0).load())
        }
    })
    .await;
    let texts = join_all(streams.into_iter().map(Stream::whole)).await;
    for (number, text) in texts.iter().enumerate() {
        let unmoved = Stream::begin(&cluster, 1, &body(number)).await;
        assert_eq!(*text, unmoved.whole().await, "stream {number}");
    }
    assert_eq!(counted(&cluster, 2, "shoal_replays_total").await, 0);
    cluster.empty().await;
    cluster.stop_all().await;
}
