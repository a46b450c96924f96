//! Loads against servers that behave, and that do not.

mod server;

use serde_json::json;
use shoal_gossip::{MonotonicClock, Tokens};

use self::server::{Answer, Asked, End, Server};
use super::*;
use crate::report::Outcome;

const CHUNK: &str = "data: {\"choices\":[{\"text\":\"fish \"}]}\n\n";
const DONE: &str = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\ndata: [DONE]\n\n";

/// Two chunks of seven tokens.
fn good() -> Answer {
    Answer::with(&format!("{CHUNK}{CHUNK}{DONE}"))
}

fn options(servers: &[&Server]) -> LoadOptions {
    LoadOptions {
        urls: servers.iter().map(|server| server.url.clone()).collect(),
        chat: false,
        model: Some("m".to_owned()),
        prompt_ids: false,
        ignore_eos: true,
        max_in_flight: 64,
        timeout: Duration::from_secs(60),
        api_key: None,
        seed: 3,
    }
}

/// Arrivals that all come at once.
fn burst(count: usize) -> Vec<Arrival> {
    let arrival = Arrival {
        at: Duration::ZERO,
        prompt: Tokens(40),
        output: Tokens(7),
    };
    vec![arrival; count]
}

async fn load(options: LoadOptions, arrivals: Vec<Arrival>) -> Result<LoadResult, LoadError> {
    let clock = Arc::new(MonotonicClock::start());
    let mut heard = 0;
    let progress = |ended| {
        assert_eq!(ended, heard + 1, "progress goes by ones");
        heard = ended;
    };
    let stop = CancellationToken::new();
    let result = run(options, arrivals.into_iter(), clock, progress, stop).await?;
    assert_eq!(heard, result.records.len());
    assert!(!result.stopped);
    Ok(result)
}

fn finished(result: &LoadResult) -> usize {
    let finished = |record: &&Record| record.outcome == Outcome::Finished;
    result.records.iter().filter(finished).count()
}

#[tokio::test]
async fn requests_start_whatever_the_server_does() {
    // Nobody is answered before all have asked.
    let server = Server::start(|_| {
        Some(Answer {
            after: 20,
            ..good()
        })
    })
    .await;
    let mut arrivals = burst(20);
    for (at, arrival) in (0..).zip(&mut arrivals) {
        arrival.at = Duration::from_millis(at);
    }
    let result = load(options(&[&server]), arrivals.clone()).await.unwrap();
    assert_eq!(finished(&result), 20);
    assert_eq!(result.late_starts, 0);
    assert_eq!(result.model, "m");
    assert!(result.reasons.is_empty());
    for (record, arrival) in result.records.iter().zip(arrivals) {
        assert_eq!(record.at, arrival.at, "records are in order of arrival");
        assert_eq!((record.prompt, record.output), (Tokens(40), Tokens(7)));
        assert!(record.first.unwrap() <= record.end.unwrap());
    }
}

#[tokio::test]
async fn a_request_that_waits_for_a_place_is_late_and_its_wait_counts() {
    let server = Server::start(|_| Some(good())).await;
    let mut options = options(&[&server]);
    options.max_in_flight = 1;
    let result = load(options, burst(4)).await.unwrap();
    assert_eq!(finished(&result), 4);
    assert_eq!(result.late_starts, 3);
    assert_eq!(server.most_waiting(), 1);
    for pair in result.records.windows(2) {
        assert!(pair[1].first.unwrap() >= pair[0].end.unwrap(), "{pair:?}");
    }
}

#[tokio::test]
async fn the_bound_is_used_and_kept() {
    // The first two are answered together, so both are at work at once.
    let server = Server::start(|_| Some(Answer { after: 2, ..good() })).await;
    let mut options = options(&[&server]);
    options.max_in_flight = 2;
    let result = load(options, burst(6)).await.unwrap();
    assert_eq!(finished(&result), 6);
    assert_eq!(result.late_starts, 4);
    assert_eq!(server.most_waiting(), 2);
}

#[tokio::test]
async fn endpoints_are_used_in_turn_and_connections_again() {
    let (one, two) = (
        Server::start(|_| Some(good())).await,
        Server::start(|_| Some(good())).await,
    );
    let mut options = options(&[&one, &two]);
    options.max_in_flight = 1;
    let result = load(options, burst(6)).await.unwrap();
    let entries: Vec<_> = result.records.iter().map(|record| record.entry).collect();
    assert_eq!(entries, [0, 1, 0, 1, 0, 1]);
    for server in [one, two] {
        assert_eq!(server.asked().len(), 3);
        assert_eq!(server.connections(), 1);
    }
}

#[tokio::test]
async fn a_refusal_leaves_the_connection_in_use() {
    let server = Server::start(|_| {
        Some(Answer {
            status: 429,
            ..Answer::with("full")
        })
    })
    .await;
    let mut options = options(&[&server]);
    options.max_in_flight = 1;
    let result = load(options, burst(3)).await.unwrap();
    assert_eq!(finished(&result), 0);
    assert_eq!(server.asked().len(), 3, "refusals are not asked again");
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_kept_connection_that_the_server_closed_is_no_failure() {
    // Once without a word behind an answer, and once under the next request.
    let closed = |_: &Asked| {
        Some(Answer {
            end: End::WholeThenClosed,
            ..good()
        })
    };
    let closed_late = |asked: &Asked| (asked.turn == 0).then(good);
    for (server, asked) in [
        (Server::start(closed).await, 2),
        (Server::start(closed_late).await, 3),
    ] {
        let mut options = options(&[&server]);
        options.max_in_flight = 1;
        let result = load(options, burst(2)).await.unwrap();
        assert_eq!(finished(&result), 2, "{:?}", result.reasons);
        assert_eq!(server.connections(), 2);
        assert_eq!(server.asked().len(), asked);
    }
}

#[tokio::test]
async fn answers_in_pieces_are_read_like_whole_ones() {
    let whole = good();
    let bytes = whole.pieces.concat();
    let split = Answer {
        pieces: bytes.chunks(1).map(<[u8]>::to_vec).collect(),
        ..whole
    };
    // The first chunk and a half come alone, and two tokens come in one.
    let uneven = Answer {
        pieces: bytes.chunks(60).map(<[u8]>::to_vec).collect(),
        ..good()
    };
    for answer in [split, uneven] {
        let server = Server::start(move |_| Some(answer.clone())).await;
        let result = load(options(&[&server]), burst(1)).await.unwrap();
        assert_eq!(finished(&result), 1, "{:?}", result.reasons);
        assert_eq!(result.records[0].output, Tokens(7));
    }
}

/// One request to a server that gives this answer, and what must become of it.
async fn check_failure(answer: Option<Answer>, kind: &str, reason: &str) -> Record {
    let server = Server::start(move |_| answer.clone()).await;
    let mut options = options(&[&server]);
    if kind == "timeout" {
        options.timeout = Duration::from_millis(50);
    }
    let result = load(options, burst(1)).await.unwrap();
    let record = result.records[0].clone();
    assert_eq!(
        record.outcome,
        Outcome::Failed(kind.to_owned()),
        "{:?}",
        result.reasons
    );
    assert_eq!(record.end, None);
    let (known, said) = result.reasons.first_key_value().unwrap();
    assert_eq!(known, kind);
    assert!(said.contains(reason), "{said}");
    assert!(server.asked().len() <= 1, "nothing is asked twice");
    record
}

#[tokio::test]
async fn failures_are_told_apart() {
    let refusal = Answer::with("{\"error\":{\"message\":\"the node is full\",\"code\":null}}");
    check_failure(
        Some(Answer {
            status: 429,
            ..refusal
        }),
        "http 429",
        "the node is full",
    )
    .await;
    let refusal = Answer::with("gone\n");
    check_failure(
        Some(Answer {
            status: 503,
            ..refusal
        }),
        "http 503",
        "gone",
    )
    .await;
    check_failure(None, "connection", "closed").await;
    let whole_but = Answer::with("{\"choices\":[{\"text\":\"not a stream\"}]}");
    check_failure(Some(whole_but), "stream", "[DONE]").await;
}

#[tokio::test]
async fn a_failure_behind_the_first_token_keeps_what_came() {
    let cut = Answer {
        end: End::Cut,
        ..Answer::with(CHUNK)
    };
    let hangs = Answer {
        end: End::Hangs,
        ..Answer::with("")
    };
    let short = Answer::with(CHUNK);
    let error = format!(
        "{CHUNK}data: {{\"error\":{{\"message\":\"the host is lost\"}}}}\n\ndata: [DONE]\n\n"
    );
    let error = Answer::with(&error);
    for (answer, kind, reason) in [
        (cut, "stream", ""),
        (short, "stream", "[DONE]"),
        (error, "error event", "the host is lost"),
    ] {
        let record = check_failure(Some(answer), kind, reason).await;
        assert_eq!(record.output, Tokens(1));
        assert!(record.first.is_some());
    }
    let record = check_failure(
        Some(Answer {
            pieces: vec![],
            ..hangs
        }),
        "timeout",
        "0.05 s",
    )
    .await;
    assert_eq!(record.first, None);
}

#[tokio::test]
async fn an_endpoint_that_is_down_fails_each_request() {
    let server = Server::start(|_| None).await;
    let options = options(&[&server]);
    drop(server);
    let result = load(options, burst(3)).await.unwrap();
    assert_eq!(finished(&result), 0);
    assert_eq!(result.reasons.keys().collect::<Vec<_>>(), ["connection"]);
}

#[tokio::test]
async fn the_stop_drops_what_is_in_flight_and_starts_no_more() {
    let server = Server::start(|_| {
        Some(Answer {
            end: End::Hangs,
            ..Answer::with(CHUNK)
        })
    })
    .await;
    let mut arrivals = burst(4);
    arrivals[3].at = Duration::from_secs(3_600);
    let stop = CancellationToken::new();
    let clock = Arc::new(MonotonicClock::start());
    let load = run(
        options(&[&server]),
        arrivals.into_iter(),
        clock,
        |_| {},
        stop.clone(),
    );
    let stopping = async {
        server.until_asked(3).await;
        stop.cancel();
    };
    let (result, ()) = tokio::join!(load, stopping);
    let result = result.unwrap();
    assert!(result.stopped);
    assert_eq!(result.records.len(), 3);
    for record in &result.records {
        assert_eq!(record.outcome, Outcome::Failed("stopped".to_owned()));
    }
}

#[tokio::test]
async fn what_is_asked_is_what_the_options_say() {
    let server = Server::start(|_| Some(good())).await;
    let mut plain = options(&[&server]);
    plain.api_key = Some("secret".to_owned());
    let ids = LoadOptions {
        prompt_ids: true,
        ignore_eos: false,
        ..options(&[&server])
    };
    let chat = LoadOptions {
        chat: true,
        ..options(&[&server])
    };
    for options in [plain, ids, chat] {
        load(options, burst(1)).await.unwrap();
    }
    let asked = server.asked();
    let common = json!({
        "model": "m", "max_tokens": 7, "temperature": 0, "seed": 3, "stream": true,
        "stream_options": {"include_usage": true}, "ignore_eos": true,
    });
    let text = format!("0-3{}", " one".repeat(37));
    let mut expected = common.clone();
    expected["prompt"] = json!(text);
    assert_eq!(asked[0].body, expected);
    assert!(
        asked[0]
            .head
            .starts_with("POST /v1/completions HTTP/1.1\r\n")
    );
    assert!(asked[0].head.contains("authorization: Bearer secret\r\n"));

    assert_eq!(asked[1].body["prompt"].as_array().unwrap().len(), 40);
    assert_eq!(asked[1].body.get("ignore_eos"), None);
    assert!(!asked[1].head.contains("authorization"));

    let mut expected = common;
    expected["messages"] = json!([{"role": "user", "content": text}]);
    assert_eq!(asked[2].body, expected);
    assert!(
        asked[2]
            .head
            .starts_with("POST /v1/chat/completions HTTP/1.1\r\n")
    );
}

#[tokio::test]
async fn the_model_is_the_first_that_is_listed() {
    let script = |asked: &Asked| match asked.head.starts_with("GET /v1/models ") {
        true => Some(Answer::with(
            "{\"data\":[{\"id\":\"reef\"},{\"id\":\"tide\"}]}",
        )),
        false => Some(good()),
    };
    let server = Server::start(script).await;
    let options = LoadOptions {
        model: None,
        ..options(&[&server])
    };
    let result = load(options, burst(1)).await.unwrap();
    assert_eq!(result.model, "reef");
    assert_eq!(server.asked()[1].body["model"], "reef");
}

#[tokio::test]
async fn without_a_model_there_is_no_load() {
    let none = Server::start(|_| Some(Answer::with("{\"data\":[]}"))).await;
    let nonsense = Server::start(|_| Some(Answer::with("hello"))).await;
    for (server, empty) in [(none, true), (nonsense, false)] {
        let options = LoadOptions {
            model: None,
            ..options(&[&server])
        };
        match load(options, burst(1)).await {
            Err(LoadError::NoModel { url }) => assert!(empty && url == server.url),
            Err(LoadError::Models { url, .. }) => assert!(!empty && url == server.url),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn options_of_no_use_are_refused() {
    let server = Server::start(|_| Some(good())).await;
    let good = options(&[&server]);
    let refused = |options: LoadOptions| async { load(options, burst(1)).await.unwrap_err() };
    let no_url = refused(LoadOptions {
        urls: vec![],
        ..good.clone()
    })
    .await;
    assert!(matches!(no_url, LoadError::NoUrl));
    let bad_key = refused(LoadOptions {
        api_key: Some("a\nb".to_owned()),
        ..good.clone()
    })
    .await;
    assert!(matches!(bad_key, LoadError::BadKey));
    let ids = refused(LoadOptions {
        chat: true,
        prompt_ids: true,
        ..good.clone()
    })
    .await;
    assert!(matches!(ids, LoadError::IdsInChat));
    let no_place = refused(LoadOptions {
        max_in_flight: 0,
        ..good
    })
    .await;
    assert!(matches!(no_place, LoadError::NoPlace));
    assert_eq!(server.asked().len(), 0);
}
