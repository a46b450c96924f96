//! The samples of vLLM 0.32.0 and llama-server were recorded and shortened; those of SGLang are
//! written from the fields that 0.5.23 documents.

use serde_json::json;

use super::*;

const VLLM_MODELS: &str = include_str!("../samples/vllm-models.json");
const VLLM_VERSION: &str = include_str!("../samples/vllm-version.json");
const VLLM_INFO: &str = include_str!("../samples/vllm-server-info.json");
const SGLANG_MODELS: &str = include_str!("../samples/sglang-models.json");
const SGLANG_INFO: &str = include_str!("../samples/sglang-server-info.json");
const LLAMA_MODELS: &str = include_str!("../samples/llama-models.json");
const LLAMA_PROPS: &str = include_str!("../samples/llama-props.json");
const LLAMA_ROOT: &str = "gguf 134515008 parameters 96576768 bytes Q4_1";

/// Answers of 200 in the order of `ASKED`; an empty one is none.
fn asked<'a>(bodies: &[&'a str]) -> Vec<Option<Answer<'a>>> {
    let answer = |body: &&'a str| Answer {
        status: 200,
        body: body.as_bytes(),
    };
    bodies
        .iter()
        .map(|body| (!body.is_empty()).then(|| answer(body)))
        .collect()
}

#[track_caller]
fn found(bodies: &[&str]) -> Identity {
    identify(None, &asked(bodies)).expect("identified")
}

#[track_caller]
fn kind(bodies: &[&str], expected: ServerKind) {
    assert_eq!(found(bodies).kind, expected);
}

fn listing(models: &Value) -> String {
    json!({ "data": models }).to_string()
}

fn model(id: &str, root: &str, context: Option<u32>, created: u64) -> ServedModel {
    ServedModel {
        id: id.to_owned(),
        root: root.to_owned(),
        context,
        created,
    }
}

#[test]
fn vllm_is_what_its_models_say() {
    let expected = Identity {
        kind: ServerKind::Vllm,
        version: "0.32.0".to_owned(),
        models: vec![model(
            "smollm2",
            "models/smollm2-hf",
            Some(2048),
            1_795_963_173,
        )],
        left_out: 0,
        slots: None,
        capacity: None,
        has_tokens: true,
        high_first: false,
    };
    assert_eq!(found(&[VLLM_MODELS, VLLM_VERSION]), expected);
    let in_development = Identity {
        slots: Some(16),
        capacity: Some(46_592),
        ..expected
    };
    assert_eq!(
        found(&[VLLM_MODELS, VLLM_VERSION, "", VLLM_INFO]),
        in_development
    );
}

#[test]
fn sglang_adds_its_ranks_and_names_its_weights() {
    let expected = Identity {
        kind: ServerKind::Sglang,
        version: "0.5.23".to_owned(),
        models: vec![
            model(
                "qwen",
                "qwen/qwen2.5-0.5b-instruct",
                Some(32_768),
                1_795_965_574,
            ),
            model(
                "sql",
                "qwen/qwen2.5-0.5b-instruct + sql",
                None,
                1_795_965_574,
            ),
        ],
        left_out: 0,
        slots: Some(256),
        capacity: Some(40_960),
        has_tokens: true,
        high_first: true,
    };
    assert_eq!(found(&[SGLANG_MODELS, "", "", SGLANG_INFO]), expected);
    assert_eq!(
        found(&[SGLANG_MODELS, "", "", "", SGLANG_INFO]),
        expected,
        "the older path"
    );
    let bare = found(&[SGLANG_MODELS]);
    assert_eq!((bare.version.as_str(), bare.slots), ("", None));
    assert_eq!(bare.models[1].root, "qwen + sql");
}

#[test]
fn llama_server_tells_slots_and_a_file() {
    let name = "gguf/SmolLM2-135M-Instruct.Q4_1.gguf";
    let expected = Identity {
        kind: ServerKind::LlamaServer,
        version: "b0-unknown".to_owned(),
        models: vec![model(name, LLAMA_ROOT, Some(2048), 1_795_965_574)],
        left_out: 0,
        slots: Some(4),
        capacity: Some(8192),
        has_tokens: true,
        high_first: false,
    };
    assert_eq!(found(&[LLAMA_MODELS, "", LLAMA_PROPS]), expected);
    let alone = found(&[LLAMA_MODELS]);
    assert_eq!((alone.slots, alone.capacity), (None, None));
    assert_eq!(alone.models[0].context, Some(2048));
}

#[test]
fn every_alias_is_a_model_of_its_own() {
    let entry = json!([
        {"id": "a", "aliases": ["a", "b", 3, ""], "owned_by": "llamacpp",
         "meta": {"n_params": 7, "size": 9}},
        {"id": "b"}, {"id": "c"},
    ]);
    let identity = found(&[&listing(&entry)]);
    let pairs: Vec<_> = identity
        .models
        .iter()
        .map(|m| (m.id.as_str(), m.root.as_str()))
        .collect();
    let root = "gguf 7 parameters 9 bytes ?";
    assert_eq!(pairs, [("a", root), ("b", root), ("c", "c")]);
    assert_eq!(identity.left_out, 2, "a number and an empty alias");
}

#[test]
fn adapters_are_told_by_the_weights_of_their_base() {
    let entry = json!([
        {"id": "fast", "owned_by": "vllm", "root": "org/base"},
        {"id": "sql", "root": "/adapters/sql", "parent": "fast"},
        {"id": "law", "root": "/adapters/law", "parent": "gone"},
    ]);
    let identity = found(&[&listing(&entry)]);
    let roots: Vec<_> = identity
        .models
        .iter()
        .map(|model| model.root.as_str())
        .collect();
    assert_eq!(roots, ["org/base", "org/base + sql", "gone + law"]);
}

#[test]
fn kinds_are_told_by_evidence() {
    let plain = listing(&json!([{"id": "m"}]));
    let sized = listing(&json!([{"id": "m", "owned_by": "us", "max_model_len": 2048}]));
    kind(&[&plain], ServerKind::OpenAi);
    kind(&[&sized], ServerKind::OpenAi);
    kind(&[&sized, VLLM_VERSION], ServerKind::Vllm);
    kind(&[&plain, VLLM_VERSION], ServerKind::OpenAi);
    kind(
        &[&sized, "{\"version\":\"v2.20.1 (abc)\"}"],
        ServerKind::OpenAi,
    );
    kind(&[&plain, "", "", VLLM_INFO], ServerKind::Vllm);
    kind(&[&plain, "", LLAMA_PROPS], ServerKind::LlamaServer);
    kind(&[&plain, "", "", SGLANG_INFO], ServerKind::Sglang);
    kind(
        &[LLAMA_MODELS, VLLM_VERSION, "", SGLANG_INFO],
        ServerKind::LlamaServer,
    );
    kind(&[&plain, "<html>", "[]", "7", "\"x\""], ServerKind::OpenAi);
    let wanted = identify(
        Some(ServerKind::Vllm),
        &asked(&[LLAMA_MODELS, VLLM_VERSION]),
    );
    assert_eq!(wanted.map(|identity| identity.kind), Ok(ServerKind::Vllm));
}

#[test]
fn answers_that_failed_are_no_evidence() {
    let mut answers = asked(&[VLLM_MODELS, VLLM_VERSION]);
    if let Some(version) = &mut answers[1] {
        version.status = 500;
    }
    let identity = identify(None, &answers).expect("identified");
    assert_eq!(
        (identity.version.as_str(), identity.has_tokens),
        ("", false)
    );
}

#[test]
fn token_ids_come_with_a_version() {
    #[track_caller]
    fn check(version: &str, has_tokens: bool) {
        let body = json!({ "version": version }).to_string();
        assert_eq!(
            found(&[VLLM_MODELS, &body]).has_tokens,
            has_tokens,
            "{version}"
        );
    }
    for version in [
        "0.10.2",
        "0.10.2rc3.dev100+g1234",
        "0.11",
        "0.32.0",
        "1.0.0",
        "0.11rc1",
    ] {
        check(version, true);
    }
    for version in [
        "0.10.1.1",
        "0.10",
        "0.9.9",
        "0.1.dev1+gabc",
        "dev",
        "v0.32.0",
        "",
        "1",
    ] {
        check(version, false);
    }
    let other = found(&[&listing(&json!([{"id": "m"}]))]);
    assert!(!other.has_tokens);
}

#[test]
fn names_are_bounded_and_the_others_counted() {
    let models: Vec<_> = (0..40).map(|n| json!({ "id": format!("m{n}") })).collect();
    let identity = found(&[&listing(&json!(models))]);
    assert_eq!((identity.models.len(), identity.left_out), (MAX_MODELS, 8));
    let longest = "é".repeat(MAX_NAME_BYTES / 2);
    let too_long = format!("{longest}x");
    let odd = json!([{"id": too_long}, {"id": ""}, {"id": 7}, {}, null, "m", {"id": longest}]);
    let identity = found(&[&listing(&odd)]);
    assert_eq!((identity.models.len(), identity.left_out), (1, 6));
    assert_eq!(identity.models[0].id, longest);
    let root = json!([{"id": "m", "owned_by": "vllm", "root": "é".repeat(5000)}]);
    let version = json!({ "version": "1.0".repeat(100) }).to_string();
    let identity = found(&[&listing(&root), &version]);
    assert_eq!(identity.models[0].root.len(), MAX_ROOT_BYTES);
    assert_eq!(identity.version.len(), MAX_VERSION_BYTES);
}

#[test]
fn bare_array_is_a_list_too() {
    let identity = found(&["[{\"id\":\"m\",\"context_length\":4096,\"created\":7}]"]);
    assert_eq!(identity.models, [model("m", "m", Some(4096), 7)]);
}

#[track_caller]
fn refused(status: u16, body: &str, expected: Unidentified) {
    let answer = Answer {
        status,
        body: body.as_bytes(),
    };
    assert_eq!(identify(None, &[Some(answer)]), Err(expected.clone()));
    assert_eq!(
        identify(Some(ServerKind::OpenAi), &[Some(answer)]),
        Err(expected)
    );
}

#[test]
fn errors_say_what_to_do() {
    assert_eq!(identify(None, &[]), Err(Unidentified::Silent));
    assert_eq!(identify(None, &[None]), Err(Unidentified::Silent));
    refused(401, "", Unidentified::Refused { status: 401 });
    refused(404, "{\"detail\":\"Not Found\"}", Unidentified::NoList);
    refused(503, "", Unidentified::Failing { status: 503 });
    refused(200, " \n<!DOCTYPE html>", Unidentified::Html);
    for body in [
        "",
        "ok",
        "{}",
        "7",
        "null",
        "{\"data\":{}}",
        "{\"data\":null}",
        "[",
        "\u{feff}[]",
    ] {
        refused(200, body, Unidentified::NotAList);
    }
    refused(200, &"[".repeat(10_000), Unidentified::NotAList);
    refused(200, "{\"data\":[]}", Unidentified::NoModel);
    refused(
        200,
        "{\"data\":[{}, {\"id\":\"\"}]}",
        Unidentified::NoUsableName { left_out: 2 },
    );
    let text = Unidentified::NoUsableName { left_out: 2 }.to_string();
    assert!(
        text.starts_with("names 2 models but none of 1 to 256 bytes"),
        "{text}"
    );
}

#[test]
fn numbers_that_make_no_sense_are_unknown() {
    let props = json!({
        "build_info": 7, "total_slots": -1, "default_generation_settings": {"n_ctx": 1e300},
    });
    let entry = json!([{"id": "m", "owned_by": "llamacpp", "created": "x", "meta": {"n_ctx": 0}}]);
    let identity = found(&[&listing(&entry), "", &props.to_string()]);
    assert_eq!((identity.slots, identity.capacity), (None, None));
    assert_eq!(identity.models, [model("m", "m", None, 0)]);
    assert_eq!(identity.version, "");
}
