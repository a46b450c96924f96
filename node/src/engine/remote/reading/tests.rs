//! The samples of vLLM 0.32.0 and llama-server were recorded and shortened; those of SGLang are
//! written from the fields that 0.5.23 documents.

use super::*;

const VLLM: &str = include_str!("../samples/vllm-metrics.txt");
const VLLM_TWO: &str = include_str!("../samples/vllm-metrics-two-engines.txt");
const LOADS_JSON: &str = include_str!("../samples/sglang-loads.json");
const SGLANG: &str = include_str!("../samples/sglang-metrics.txt");
const SLOTS_BUSY: &str = include_str!("../samples/llama-slots-busy.json");
const SLOTS_IDLE: &str = include_str!("../samples/llama-slots-idle.json");
const LLAMA: &str = include_str!("../samples/llama-metrics.txt");

fn ok(body: &str) -> Option<Answer<'_>> {
    with(200, body)
}

fn with(status: u16, body: &str) -> Option<Answer<'_>> {
    Some(Answer {
        status,
        body: body.as_bytes(),
    })
}

#[track_caller]
fn told(kind: ServerKind, answers: &[Option<Answer<'_>>]) -> Reading {
    read(kind, answers).expect("well")
}

fn vllm_of(metrics: &str) -> Reading {
    told(ServerKind::Vllm, &[ok(""), ok(metrics)])
}

fn sglang_of(loads: &str, metrics: &str) -> Reading {
    told(ServerKind::Sglang, &[ok(""), ok(loads), ok(metrics)])
}

fn llama_of(slots: &str, metrics: &str) -> Reading {
    told(ServerKind::LlamaServer, &[ok("{}"), ok(slots), ok(metrics)])
}

fn vllm_loaded() -> Reading {
    Reading {
        capacity: Some(46_464),
        block_size: Some(128),
        // 0.02203856749311295 of the capacity: 8 of 363 blocks.
        used: Some(1024),
        running: Some(8),
        waiting: Some(0),
        waiting_tokens: None,
        preemptions: Some(0),
        started: Some(1_795_962_912_700),
        asleep: false,
    }
}

#[test]
fn vllm_tells_all_but_waiting_tokens() {
    assert_eq!(vllm_of(VLLM), vllm_loaded());
    assert_eq!(vllm_of(&VLLM.replace('\n', "\r\n")), vllm_loaded());
}

#[test]
fn vllm_usage_has_had_two_names_and_the_newer_wins() {
    let old = VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc");
    assert_eq!(vllm_of(&old), vllm_loaded());
    let both = format!("{VLLM}vllm:gpu_cache_usage_perc{{engine=\"0\"}} 0.9\n");
    assert_eq!(vllm_of(&both), vllm_loaded());
}

#[test]
fn vllm_usage_that_is_no_share_leaves_the_fill_unknown() {
    for bad in ["NaN", "1.01", "-0.1", "22", ""] {
        let metrics = VLLM.replace("0.02203856749311295", bad);
        assert_eq!(
            vllm_of(&metrics),
            Reading {
                used: None,
                ..vllm_loaded()
            },
            "{bad}"
        );
    }
    assert_eq!(
        vllm_of(&VLLM.replace("0.02203856749311295", "1")).used,
        Some(46_464)
    );
}

#[test]
fn vllm_with_two_engines_sums_their_pools_and_weighs_them_equally() {
    let two = vllm_of(VLLM_TWO);
    assert_eq!(
        two,
        Reading {
            capacity: Some(92_928),
            // A mean of 0.27203856749311295.
            used: Some(25_280),
            running: Some(16),
            waiting: Some(3),
            ..vllm_loaded()
        }
    );
    let of_one = format!("{VLLM}vllm:kv_cache_usage_perc{{engine=\"1\"}} 0.5\n");
    let Reading { capacity, used, .. } = vllm_of(&of_one);
    assert_eq!(
        (capacity, used),
        (None, None),
        "the pool of one of two engines"
    );
    let mixed = VLLM_TWO.replacen("block_size=\"128\"", "block_size=\"16\"", 2);
    assert_eq!(vllm_of(&mixed).block_size, None, "two block sizes");
}

#[test]
fn vllm_capacity_falls_back_to_blocks_and_is_never_made_up() {
    #[track_caller]
    fn check(from: &str, to: &str, capacity: Option<u64>) {
        assert!(VLLM.contains(from));
        assert_eq!(
            vllm_of(&VLLM.replace(from, to)).capacity,
            capacity,
            "{from} -> {to}"
        );
    }
    let tokens = "kv_cache_size_tokens=\"46592\"";
    check(tokens, "kv_cache_size_tokens=\"40000\"", Some(40_000 - 128));
    check(tokens, "kv_cache_size_tokens=\"None\"", Some(363 * 128));
    check(tokens, "kv_cache_size_tokens=\"5\"", Some(363 * 128));
    check(tokens, "other=\"1\"", Some(363 * 128));
    check("vllm:cache_config_info", "vllm:cache_config", None);
    let blocks = VLLM.replace(tokens, "a=\"1\"");
    let none = blocks.replace("num_gpu_blocks=\"364\"", "num_gpu_blocks=\"None\"");
    assert_eq!(vllm_of(&none).capacity, None);
    assert_eq!(vllm_of(&none).used, None);
    let huge = blocks.replace(
        "num_gpu_blocks=\"364\"",
        "num_gpu_blocks=\"18446744073709551615\"",
    );
    assert_eq!(vllm_of(&huge).capacity, None);
}

#[test]
fn vllm_sleeps_when_an_engine_is_not_awake() {
    let awake = "sleep_state=\"awake\"} 1.0";
    assert!(VLLM.contains(awake));
    assert!(vllm_of(&VLLM.replace(awake, "sleep_state=\"awake\"} 0.0")).asleep);
    assert!(vllm_of(&VLLM_TWO.replacen(awake, "sleep_state=\"awake\"} 0.0", 1)).asleep);
    assert!(!vllm_of(&VLLM.replace(awake, "sleep_state=\"awake\"} NaN")).asleep);
}

#[test]
fn vllm_without_metrics_is_well_and_unknown() {
    let health = ok("");
    for metrics in [
        None,
        with(404, VLLM),
        with(500, ""),
        ok(""),
        ok("<html>"),
        ok("{}"),
    ] {
        assert_eq!(
            told(ServerKind::Vllm, &[health, metrics]),
            Reading::default(),
            "{metrics:?}"
        );
    }
    assert_eq!(told(ServerKind::Vllm, &[health]), Reading::default());
    let junk = Answer {
        status: 200,
        body: b"vllm:num_requests_running 3\n\xff\xfe\n",
    };
    assert_eq!(
        told(ServerKind::Vllm, &[health, Some(junk)]).running,
        Some(3)
    );
}

#[test]
fn sglang_loads_are_summed_over_ranks() {
    let loads = Reading {
        capacity: Some(40_960),
        used: Some(5120),
        running: Some(9),
        waiting: Some(2),
        waiting_tokens: Some(700),
        ..Reading::default()
    };
    assert_eq!(sglang_of(LOADS_JSON, ""), loads);
    let metrics = Reading {
        block_size: Some(1),
        preemptions: Some(3),
        ..loads
    };
    assert_eq!(sglang_of(LOADS_JSON, SGLANG), metrics, "metrics fill in");
}

#[test]
fn sglang_metrics_stand_in_and_evictable_tokens_are_free() {
    let metrics = Reading {
        capacity: Some(20_480),
        block_size: Some(1),
        used: Some(4096),
        running: Some(5),
        waiting: Some(2),
        preemptions: Some(3),
        ..Reading::default()
    };
    for loads in ["", "null", "{\"loads\":{}}", "{\"loads\":[]}", "<html>"] {
        assert_eq!(sglang_of(loads, SGLANG), metrics, "{loads}");
    }
    assert_eq!(
        told(ServerKind::Sglang, &[ok(""), with(404, ""), ok(SGLANG)]),
        metrics
    );
    // Without the free tokens the used ones are taken; with inconsistent ones nothing is.
    let old = SGLANG
        .replace("kv_available_tokens", "x")
        .replace("page_size{", "x{");
    let config =
        format!("{old}sglang:cache_config_info{{page_size=\"16\",num_pages=\"1280\"}} 1\n");
    let old = sglang_of("", &config);
    assert_eq!((old.used, old.block_size), (Some(4096), Some(16)));
    assert_eq!(
        sglang_of("", &SGLANG.replace("} 12288.0", "} 20000")).used,
        None
    );
    assert_eq!(
        sglang_of("", &SGLANG.replace("} 12288.0", "} NaN")).used,
        Some(4096)
    );
}

#[test]
fn sglang_ranks_of_one_replica_are_counted_once_and_replicas_are_added() {
    let metrics = "sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"0\"} 3\n\
                   sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"1\"} 3\n\
                   sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"2\"} 4\n\
                   sglang:num_running_reqs{dp_rank=\"1\",priority=\"7\"} 4\n";
    assert_eq!(sglang_of("", metrics).running, Some(7));
}

#[test]
fn sglang_rank_that_has_not_published_makes_the_loads_unknown() {
    let first = "\"max_total_num_tokens\": 20480";
    let unpublished = LOADS_JSON.replacen(first, "\"max_total_num_tokens\": 0", 1);
    assert_eq!(sglang_of(&unpublished, ""), Reading::default());
    assert_eq!(sglang_of(&unpublished, SGLANG).used, Some(4096));
}

#[test]
fn sglang_odd_field_costs_only_itself() {
    let odd = LOADS_JSON.replacen(
        "\"num_running_reqs\": 5",
        "\"num_running_reqs\": [\"5\"]",
        1,
    );
    let odd = odd.replacen("\"num_waiting_reqs\": 2", "\"num_waiting_reqs\": 2.0", 1);
    let odd = odd.replacen("\"num_waiting_uncached_tokens\": 700", "\"other\": -1", 1);
    let reading = sglang_of(&odd, "");
    assert_eq!((reading.running, reading.waiting), (None, Some(2)));
    assert_eq!((reading.waiting_tokens, reading.used), (None, Some(5120)));
}

#[test]
fn llama_server_counts_what_busy_slots_hold() {
    let busy = Reading {
        capacity: Some(8192),
        used: Some(42),
        running: Some(3),
        waiting: Some(2),
        ..Reading::default()
    };
    assert_eq!(llama_of(SLOTS_BUSY, LLAMA), busy);
    let idle = Reading {
        used: Some(0),
        running: Some(0),
        waiting: None,
        ..busy
    };
    assert_eq!(llama_of(SLOTS_IDLE, ""), idle);
}

#[test]
fn llama_server_without_slots_tells_only_who_waits() {
    let waiting = Reading {
        waiting: Some(2),
        ..Reading::default()
    };
    for slots in ["", "{}", "[]", "[1]", "{\"error\":{\"code\":501}}"] {
        assert_eq!(llama_of(slots, LLAMA), waiting, "{slots}");
    }
    for slots in [None, with(404, SLOTS_BUSY), with(501, SLOTS_BUSY)] {
        let answers = [ok("{}"), slots, ok(LLAMA)];
        assert_eq!(told(ServerKind::LlamaServer, &answers), waiting);
    }
}

#[test]
fn llama_server_odd_slots_are_unknown_not_zero() {
    let bare = llama_of("[{\"n_ctx\":512,\"is_processing\":true}]", "");
    assert_eq!(
        (bare.capacity, bare.used, bare.running),
        (Some(512), None, Some(1))
    );
    let old = llama_of("[{\"n_ctx\":512,\"state\":1}]", "");
    assert_eq!(
        (old.capacity, old.used, old.running),
        (Some(512), None, None)
    );
    let zero = llama_of("[{\"n_ctx\":0,\"is_processing\":false}]", "");
    assert_eq!(zero.capacity, None);
    let over = llama_of(
        "[{\"n_ctx\":8,\"is_processing\":true,\"n_prompt_tokens\":9}]",
        "",
    );
    assert_eq!((over.capacity, over.used), (Some(8), None));
    let huge = "{\"n_ctx\":18446744073709551615,\"is_processing\":true}";
    assert_eq!(llama_of(&format!("[{huge},{huge}]"), "").capacity, None);
}

#[track_caller]
fn unwell(kind: ServerKind, answers: &[Option<Answer<'_>>], expected: Unwell) {
    assert_eq!(read(kind, answers), Err(expected));
}

#[test]
fn health_decides_whether_an_engine_is_well() {
    let loading = "{\"error\":{\"code\":503,\"message\":\"Loading model\"}}";
    for kind in [
        ServerKind::Vllm,
        ServerKind::Sglang,
        ServerKind::LlamaServer,
    ] {
        unwell(kind, &[None, ok(VLLM), ok(VLLM)], Unwell::Silent);
        unwell(kind, &[], Unwell::Silent);
        for status in [301, 401, 404, 500, 503] {
            let failing = Unwell::Failing {
                path: "/health",
                status,
            };
            unwell(kind, &[with(status, "no"), ok(VLLM)], failing);
        }
    }
    unwell(
        ServerKind::LlamaServer,
        &[with(503, loading)],
        Unwell::Loading,
    );
}

#[test]
fn any_other_server_is_well_by_health_or_by_its_models() {
    let kind = ServerKind::OpenAi;
    let missing = with(404, "");
    for answers in [[ok(""), None], [missing, ok("{}")], [None, ok("{}")]] {
        assert_eq!(told(kind, &answers), Reading::default());
    }
    unwell(kind, &[None, None], Unwell::Silent);
    unwell(kind, &[missing, None], Unwell::Silent);
    let failing = |path, status| Unwell::Failing { path, status };
    unwell(kind, &[with(503, ""), ok("{}")], failing("/health", 503));
    unwell(kind, &[missing, with(500, "")], failing("/v1/models", 500));
}

#[test]
fn health_is_asked_first() {
    for kind in [
        ServerKind::Vllm,
        ServerKind::Sglang,
        ServerKind::LlamaServer,
        ServerKind::OpenAi,
    ] {
        assert_eq!(polled(kind).first(), Some(&"/health"));
    }
}

#[test]
fn reasons_are_readable() {
    let failing = Unwell::Failing {
        path: "/health",
        status: 503,
    };
    assert_eq!(failing.to_string(), "it answers /health with status 503");
}
