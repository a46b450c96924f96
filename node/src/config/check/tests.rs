use super::*;
use crate::config::tests::{matches, sample, surroundings};
use crate::config::{EngineKind, LlamaSettings, ServerKind, SimSettings};
use crate::config::{KeySource, load};

const BASE: [&str; 2] = ["--model", "m.gguf"];

fn refused(args: &[&str]) -> String {
    let all: Vec<&str> = BASE.iter().chain(args).copied().collect();
    refused_alone(&all)
}

fn refused_alone(args: &[&str]) -> String {
    load(&matches(args), None, &surroundings())
        .unwrap_err()
        .to_string()
}

fn accepted(args: &[&str]) -> NodeConfig {
    let all: Vec<&str> = BASE.iter().chain(args).copied().collect();
    sample(&all)
}

fn llama_of(config: NodeConfig) -> LlamaSettings {
    match config.engine.kind {
        EngineKind::Llama(llama) => llama,
        other => panic!("not llama: {other:?}"),
    }
}

#[test]
fn the_defaults_are_a_node_on_loopback_that_says_it_has_no_key() {
    let config = accepted(&[]);
    assert_eq!(
        config.data_dir,
        PathBuf::from("/home/fish/.local/share/shoal")
    );
    assert_eq!(config.http.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(config.mesh.control.to_string(), "127.0.0.1:7400");
    assert_eq!(config.mesh.stream.to_string(), "127.0.0.1:7401");
    assert_eq!(config.mesh.key, KeySource::None);
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].starts_with("NO CLUSTER KEY"));
    let llama = llama_of(config);
    assert_eq!(
        (llama.context, llama.max_sequences, llama.threads),
        (8_192, 8, 1)
    );
}

#[test]
fn one_value_out_of_bounds_is_refused_and_the_bound_itself_is_not() {
    for (flag, good, bad) in [
        ("--gossip-interval-ms", "50", "49"),
        ("--phi", "1", "0.99"),
        ("--phi", "32", "NaN"),
        ("--max-body-bytes", "16777216", "16777217"),
        ("--max-requests", "1", "0"),
        ("--queue-limit", "65536", "65537"),
        ("--block-size", "1", "0"),
        ("--max-sequences", "64", "257"),
        ("--max-retries", "15", "16"),
        ("--threads", "512", "0"),
        ("--header-timeout-ms", "100", "99"),
        ("--stall-timeout-ms", "1000", "999"),
        ("--mesh-port", "65534", "65535"),
        ("--context", "256", "255"),
    ] {
        accepted(&[flag, good]);
        let text = refused(&[flag, bad]);
        assert!(text.starts_with(flag), "{text}");
    }
}

#[test]
fn relations_between_settings_are_checked_at_their_edge() {
    accepted(&["--gossip-interval-ms", "750"]);
    assert!(refused(&["--gossip-interval-ms", "751"]).contains("give at least 3004"));
    accepted(&["--offer-timeout-ms", "2500"]);
    assert!(refused(&["--offer-timeout-ms", "2501"]).contains("give at least 5002"));
    accepted(&["--max-sequences", "16", "--step-tokens", "17"]);
    assert!(refused(&["--max-sequences", "16", "--step-tokens", "16"]).contains("--step-tokens"));
    accepted(&["--reproducible", "--context", "2048"]);
    assert!(refused(&["--reproducible", "--context", "2047"]).contains("at least 2048 tokens"));
    assert!(refused(&["--block-size", "512", "--context", "256"]).contains("--block-size"));
    assert!(refused(&["--tls-cert", "c"]).starts_with("--tls-key"));
    assert!(refused(&["--tls-key", "k"]).starts_with("--tls-cert"));
}

#[test]
fn many_sequences_raise_the_step_that_nobody_named() {
    assert_eq!(
        llama_of(accepted(&["--max-sequences", "200"])).step_tokens,
        216
    );
    assert_eq!(llama_of(accepted(&[])).step_tokens, 64);
}

#[test]
fn an_engine_takes_only_its_own_settings() {
    assert!(refused_alone(&[]).contains("scripts/fetch-model.sh"));
    assert!(refused(&["--sim-speed", "2"]).starts_with("--sim-speed"));
    assert!(refused(&["--sim-kv", "true-size"]).starts_with("--sim-kv"));
    assert!(refused(&["--engine", "sim:a10/x"]).starts_with("--model"));
    assert!(refused_alone(&["--engine", "sim:a10/x", "--threads", "2"]).starts_with("--threads"));
    for engine in ["vllm", "sim", "sim:", "llama:x", ""] {
        assert!(refused(&["--engine", engine]).starts_with("--engine"));
    }
    let config = sample(&["--engine", "sim:a10/llama-2-7b", "--sim-speed", "2.5"]);
    assert_eq!(
        config.engine.kind,
        EngineKind::Sim(SimSettings {
            profile: "a10/llama-2-7b".to_owned(),
            speed: 2.5,
            kv: crate::config::Travels::Digest,
            context: None,
            max_sequences: None,
            step_tokens: None,
        })
    );
}

#[test]
fn a_node_without_a_key_stays_on_loopback() {
    let key = ["--cluster-key-file", "k"];
    for host in ["127.0.0.1", "127.0.0.9", "localhost", "::1", "[::1]"] {
        assert_eq!(accepted(&["--listen", host]).mesh.key, KeySource::None);
    }
    for host in ["10.0.0.1", "fd00::1"] {
        assert!(refused(&["--listen", host]).contains("needs a cluster key"));
        let config = accepted(&["--listen", host, key[0], key[1]]);
        assert_eq!(config.mesh.key, KeySource::File("k".into()));
        assert!(config.warnings[0].contains("no API key"));
    }
    for host in ["example.org", "10.0.0.1:80", "", "http://10.0.0.1"] {
        assert!(refused(&["--listen", host]).starts_with("--listen"));
    }
}

#[test]
fn the_key_comes_from_one_place() {
    let surroundings = Surroundings {
        cluster_key: Some("text".to_owned()),
        ..surroundings()
    };
    let from_text = load(&matches(&BASE), None, &surroundings).unwrap();
    assert_eq!(from_text.mesh.key, KeySource::Text("text".to_owned()));
    let both = ["--model", "m", "--cluster-key-file", "k"];
    let text = load(&matches(&both), None, &surroundings).unwrap_err();
    assert!(text.to_string().contains("twice"));
    assert!(refused(&["--cluster-key-accept-file", "old"]).contains("without a new one"));
    let four = [
        "--cluster-key-file",
        "k",
        "--cluster-key-accept-file",
        "1,2,3,4",
    ];
    assert!(refused(&four).starts_with("--cluster-key-accept-file"));
    accepted(&[
        "--cluster-key-file",
        "k",
        "--cluster-key-accept-file",
        "1,2,3",
    ]);
}

#[test]
fn a_wildcard_needs_an_address_to_advertise() {
    let any = ["--listen", "0.0.0.0", "--cluster-key-file", "k"];
    let with = |host| accepted(&[any[0], any[1], any[2], any[3], "--advertise", host]);
    assert!(refused(&any).starts_with("--advertise"));
    assert_eq!(
        with("node-1.shoal").mesh.advertise.as_deref(),
        Some("node-1.shoal")
    );
    assert_eq!(with("fd00::1").mesh.advertise.as_deref(), Some("fd00::1"));
    for host in ["0.0.0.0", "::", "http://a", "a:80", "[fd00::1]", ""] {
        assert!(
            refused(&["--advertise", host]).starts_with("--advertise"),
            "{host}"
        );
    }
    assert!(accepted(&["--advertise", "10.0.0.1"]).warnings[1].contains("alone"));
}

#[test]
fn seeds_are_checked_and_point_to_the_gossip_port() {
    let seeds = |text| accepted(&["--seeds", text]).mesh.seeds;
    assert_eq!(seeds("a"), ["a:7401"]);
    assert_eq!(
        seeds("10.0.0.1:9000, a_b.c-d:1"),
        ["10.0.0.1:9001", "a_b.c-d:2"]
    );
    assert_eq!(
        seeds("[fd00::1]:7400,[fd00::2]"),
        ["[fd00::1]:7401", "[fd00::2]:7401"]
    );
    assert_eq!(seeds("a:1,a:1,,"), ["a:2"]);
    for bad in [
        "fd00::1",
        "a:0",
        "a:65535",
        "a:65536",
        "a:b",
        "http://a:1",
        "[a]:1",
        "[::1]7",
        ":1",
        "a b:1",
        "é:1",
    ] {
        assert!(refused(&["--seeds", bad]).starts_with("--seeds"), "{bad}");
    }
    let many: Vec<String> = (1..=65).map(|n| format!("h{n}")).collect();
    assert!(refused(&["--seeds", &many.join(",")]).starts_with("--seeds"));
    assert_eq!(seeds(&many[..64].join(",")).len(), 64);
}

#[test]
fn names_are_short_and_plain() {
    accepted(&["--cluster", &"a".repeat(64)]);
    for bad in ["", "a b", "ä", &"a".repeat(65)] {
        assert!(refused(&["--cluster", bad]).starts_with("--cluster"));
    }
    accepted(&["--model-id", &"m".repeat(256)]);
    for bad in ["", "a b", "a\nb", &"m".repeat(257)] {
        assert!(refused(&["--model-id", bad]).starts_with("--model-id"));
    }
}

#[test]
fn a_node_without_a_home_must_be_told_where_to_live() {
    let nowhere = Surroundings::default();
    let text = load(&matches(&BASE), None, &nowhere).unwrap_err();
    assert!(text.to_string().starts_with("--data-dir"));
    let told = ["--model", "m", "--data-dir", "/d"];
    let config = load(&matches(&told), None, &nowhere).unwrap();
    assert_eq!(config.data_dir, PathBuf::from("/d"));
    assert_eq!(llama_of(config).threads, 1);
}

#[test]
fn rust_log_counts_where_no_filter_is_given() {
    let surroundings = Surroundings {
        rust_log: Some("trace".to_owned()),
        ..surroundings()
    };
    let inherited = load(&matches(&BASE), None, &surroundings).unwrap();
    assert_eq!(inherited.log.filter, "trace");
    let given = ["--model", "m", "--log", "info"];
    let named = load(&matches(&given), None, &surroundings).unwrap();
    assert_eq!(named.log.filter, "info");
    assert_eq!(accepted(&[]).log.filter, "info");
    assert!(refused(&["--log", "shoal=loud"]).starts_with("--log"));
}

#[test]
fn requests_move_by_default_and_never_to_and_fro() {
    let moves = accepted(&[]).moves;
    assert_eq!(moves.interval, Some(Duration::from_millis(100)));
    assert_eq!((moves.below, moves.above), (5, 20));
    assert_eq!(
        accepted(&["--reschedule-interval-ms", "0"]).moves.interval,
        None
    );
    assert!(refused(&["--reschedule-interval-ms", "9"]).starts_with("--reschedule-interval-ms"));
    accepted(&["--move-below", "29", "--move-above", "30"]);
    let equal = refused(&["--move-below", "30", "--move-above", "30"]);
    assert!(
        equal.starts_with("--move-above") && equal.contains("31"),
        "{equal}"
    );
    assert!(refused(&["--moves-out", "0"]).starts_with("--moves-out"));
    assert!(refused(&["--moves-in", "257"]).starts_with("--moves-in"));
    assert!(refused(&["--move-mib-per-second", "0"]).starts_with("--move-mib-per-second"));
}

fn beside(args: &[&str]) -> Result<NodeConfig, String> {
    load(&matches(args), None, &surroundings()).map_err(|error| error.to_string())
}

#[test]
fn a_server_is_found_by_its_address() {
    for (address, authority) in [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://gpu-1:8000/", "gpu-1:8000"),
        ("http://[::1]:30000", "[::1]:30000"),
        ("http://localhost", "localhost:80"),
    ] {
        let config = beside(&["--engine", address, "--engine-kind", "vllm"]).unwrap();
        let EngineKind::Http(http) = config.engine.kind else {
            panic!("{address}");
        };
        assert_eq!(http.authority, authority);
        assert_eq!(http.kind, Some(ServerKind::Vllm));
    }
    for wrong in [
        "https://127.0.0.1:8000",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000/?x=1",
        "http://user:pass@127.0.0.1:8000",
        "http://",
        "http:8000",
    ] {
        let said = beside(&["--engine", wrong]).unwrap_err();
        assert!(
            said.contains("--engine") && said.contains("http://127.0.0.1"),
            "{said}"
        );
    }
}

#[test]
fn kv_of_a_server_moves_if_asked_through_a_folder_of_the_data_directory() {
    let folder = |more: &[&str]| -> Result<_, String> {
        let server = ["--engine", "http://127.0.0.1:8000", "--data-dir", "/d"];
        let config = beside(&[&server[..], more].concat())?;
        match config.engine.kind {
            EngineKind::Http(http) => Ok(http.kv_folder),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(folder(&[]), Ok(None));
    assert_eq!(folder(&["--engine-kv", "off"]), Ok(None));
    let own = folder(&["--engine-kv", "auto"]);
    assert_eq!(own, Ok(Some(PathBuf::from("/d/engine"))));
    let named = folder(&["--engine-kv", "auto", "--engine-kv-dir", "/s"]);
    assert_eq!(named, Ok(Some(PathBuf::from("/s"))));
    let unused = folder(&["--engine-kv-dir", "/s"]).unwrap_err();
    assert!(unused.contains("--engine-kv auto"), "{unused}");
}

#[test]
fn settings_of_another_engine_are_refused() {
    let server = ["--engine", "http://127.0.0.1:8000"];
    for (flag, value) in [
        ("--model", "m.gguf"),
        ("--model-id", "m"),
        ("--threads", "2"),
        ("--max-sequences", "2"),
        ("--step-tokens", "100"),
        ("--sim-speed", "2"),
    ] {
        let said = beside(&[server[0], server[1], flag, value]).unwrap_err();
        assert!(said.contains(flag), "{said}");
    }
    for (flag, value) in [
        ("--engine-kind", "vllm"),
        ("--engine-api-key-file", "f"),
        ("--engine-poll-ms", "100"),
        ("--engine-stall-ms", "5000"),
        ("--engine-kv", "auto"),
        ("--engine-kv-dir", "/tmp"),
    ] {
        assert!(refused(&[flag, value]).contains(flag));
    }
    assert!(beside(&[server[0], server[1], "--engine-poll-ms", "1"]).is_err());
    assert!(beside(&[server[0], server[1], "--engine-stall-ms", "1"]).is_err());
    assert!(beside(&[server[0], server[1], "--context", "9000"]).is_ok());
}
