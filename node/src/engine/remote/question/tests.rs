use bytes::Bytes;
use serde_json::{Value, json};
use shoal_gossip::{Epoch, NodeId, RequestId, Tokens};

use super::*;
use crate::engine::remote::kv::Laid;

const VLLM: Asked = Asked {
    kind: ServerKind::Vllm,
    has_ids: true,
    high_first: false,
    grammar: false,
    inexact: Inexact::Refuse,
    context: Tokens(1000),
};

const LLAMA: Asked = Asked {
    kind: ServerKind::LlamaServer,
    ..VLLM
};

fn job(kind: RequestKind, body: &str) -> Job {
    Job {
        request: RequestId {
            home: NodeId(1),
            serial: 2,
        },
        epoch: Epoch::FIRST,
        kind: Some(kind),
        http: HttpAsk {
            path: "/v1/chat/completions".into(),
            headers: Vec::new(),
        },
        body: Bytes::from(body.to_owned()),
        prepared: Prepared::unread("m"),
        generated: Vec::new(),
        spoken: Vec::new(),
        reservation: None,
    }
}

fn chat(more: &str) -> Job {
    let body = format!(
        r#"{{"model":"m", "stream":true, "messages":[{{"role":"user","content":"x"}}]{more}}}"#
    );
    job(RequestKind::Chat, &body)
}

#[test]
fn ids_are_asked_for_at_the_end_of_a_body_that_is_else_as_it_came() {
    let job = chat(r#", "temperature":0 "#);
    let question = VLLM.raw(&job, &Along::default());
    let before = std::str::from_utf8(&job.body).unwrap();
    let before = before.strip_suffix(" }").unwrap();
    assert_eq!(
        question.body,
        format!(r#"{before},"return_token_ids":true}}"#)
    );
    let Manner::Ids(IdSource::TokenIds, prepared) = question.manner else {
        panic!("{:?}", question.manner);
    };
    assert_eq!(prepared.params.max_tokens, 1000);
    let question = LLAMA.raw(&job, &Along::default());
    assert!(
        question
            .body
            .ends_with(br#","logprobs":true,"top_logprobs":1}"#)
    );
}

#[test]
fn what_could_not_be_gone_on_with_goes_through_untouched() {
    for more in [
        r#","tools":[{"type":"function"}]"#,
        r#","n":2"#,
        r#","response_format":{"type":"json_object"}"#,
        r#","seed":1"#,
        r#","seed":1,"temperature":0.5"#,
        r#","presence_penalty":0.1"#,
        r#","return_token_ids":false"#,
        r#","some_new_field":null"#,
        r#","stream_options":{"include_usage":true,"continuous_usage_stats":true}"#,
        r#","stream":false"#,
    ] {
        let mut job = chat(more);
        if more.contains("\"stream\":false") {
            job.body = Bytes::from(
                job.body
                    .escape_ascii()
                    .to_string()
                    .replacen("true", "false", 1),
            );
        }
        let question = VLLM.raw(&job, &Along::default());
        assert!(matches!(question.manner, Manner::Opaque), "{more}");
        assert_eq!(question.body, job.body, "{more}");
    }
    for more in [
        r#","seed":1,"temperature":0"#,
        r#","repetition_penalty":1.3"#,
        r#","user":"u","stop":["x"],"max_tokens":7"#,
        r#","stream_options":{"include_usage":true}"#,
        r#","tools":[],"logprobs":false"#,
        r#","logprobs":true,"top_logprobs":3"#,
    ] {
        assert!(
            matches!(
                VLLM.raw(&chat(more), &Along::default()).manner,
                Manner::Ids(..)
            ),
            "{more}"
        );
    }
    let told = chat(r#","return_token_ids":true"#);
    let question = VLLM.raw(&told, &Along::default());
    assert!(matches!(question.manner, Manner::Ids(IdSource::Told, _)));
    assert_eq!(question.body, told.body);
    let penalised = chat(r#","presence_penalty":0.1"#);
    assert!(matches!(
        LLAMA.raw(&penalised, &Along::default()).manner,
        Manner::Ids(..)
    ));
    let old = Asked {
        has_ids: false,
        ..VLLM
    };
    assert!(matches!(
        old.raw(&chat(""), &Along::default()).manner,
        Manner::Opaque
    ));
}

#[test]
fn a_request_goes_on_in_the_words_of_its_client() {
    let mut job =
        chat(r#","temperature":0.7,"top_k":5,"max_tokens":50,"stop":["END"],"seed":null"#);
    job.prepared.prompt = [1, 2, 3].into();
    job.prepared.params.max_tokens = 50;
    job.generated = vec![4, 5];
    let question = VLLM.go_on(&job, None, &Along::default()).unwrap();
    assert_eq!(question.http.path, "/v1/completions");
    let body: Value = serde_json::from_slice(&question.body).unwrap();
    let expected = json!({
        "model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 48, "stream": true,
        "return_token_ids": true, "temperature": 0.7, "top_k": 5,
    });
    assert_eq!(body, expected);
    let question = LLAMA.go_on(&job, Some(1), &Along::default()).unwrap();
    let body: Value = serde_json::from_slice(&question.body).unwrap();
    assert_eq!(
        (&body["n_predict"], &body["stream"]),
        (&json!(1), &json!(false))
    );
    job.generated = vec![0; 50];
    assert!(VLLM.go_on(&job, None, &Along::default()).is_err());
}

#[test]
fn priorities_are_turned_round_for_sglang_alone() {
    let asked = Asked {
        kind: ServerKind::Sglang,
        high_first: true,
        ..VLLM
    };
    let ranked = chat(r#", "priority": 3, "x":{"priority":1}"#);
    let body = asked.raw(&ranked, &Along::default()).body;
    let expected = String::from_utf8(ranked.body.to_vec()).unwrap();
    assert_eq!(body, expected.replace(": 3", ": -3"));
    let other_way = Asked {
        high_first: false,
        ..asked
    };
    assert_eq!(other_way.raw(&ranked, &Along::default()).body, ranked.body);
    let unranked = chat("");
    assert_eq!(asked.raw(&unranked, &Along::default()).body, unranked.body);
    let openai = Asked {
        kind: ServerKind::OpenAi,
        ..VLLM
    };
    assert_eq!(openai.raw(&ranked, &Along::default()).body, ranked.body);
}

#[test]
fn its_kv_gets_a_name_that_only_vllm_sees() {
    let along = Along::for_connector("n-1", None, None);
    let question = VLLM.raw(&chat(""), &along);
    let body: Value = serde_json::from_slice(&question.body).unwrap();
    assert_eq!(body["kv_transfer_params"]["shoal"], json!({ "id": "n-1" }));
    assert_eq!(body["return_token_ids"], true);
    // One that only this engine can finish goes as it came.
    let opaque = chat(r#","n":2"#);
    assert_eq!(VLLM.raw(&opaque, &along).body, opaque.body);
    let mut job = chat("");
    job.prepared.prompt = [1, 2, 3].into();
    job.prepared.params.max_tokens = 9;
    job.generated = vec![4];
    let laid = Laid::Blocks {
        key: "k".into(),
        first: 2,
        blocks: 1,
        tokens: 40,
    };
    let along = Along::for_connector("n-2", Some(3), Some(&laid));
    let question = VLLM.go_on(&job, None, &along).unwrap();
    let body: Value = serde_json::from_slice(&question.body).unwrap();
    let import = json!({ "key": "k", "first": 2, "blocks": 1, "tokens": 40 });
    let told = json!({ "id": "n-2", "prompt": 3, "import": import });
    assert_eq!(body["kv_transfer_params"]["shoal"], told);
}

#[test]
fn a_grammar_goes_on_where_it_can_be_told_what_was_drawn() {
    let shape =
        r#","response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{}}}"#;
    let mut job = chat(shape);
    let told = Asked {
        grammar: true,
        ..VLLM
    };
    let raw = |asked: Asked| asked.raw(&job, &Along::default());
    assert!(matches!(raw(VLLM).manner, Manner::Opaque));
    let question = raw(told);
    assert!(matches!(question.manner, Manner::Ids(..)));
    assert!(question.body.starts_with(&job.body[..job.body.len() - 1]));
    job.prepared.prompt = [1, 2].into();
    job.prepared.params.max_tokens = 9;
    job.generated = vec![3];
    let body = told.go_on(&job, None, &Along::default()).unwrap().body;
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["response_format"]["type"], "json_schema");
    assert!(VLLM.go_on(&job, None, &Along::default()).is_err());
    assert!(!VLLM.can_take(&job));
    assert!(VLLM.can_take(&chat(r#","response_format":{"type":"text"}"#)));
    let other = chat(r#","structured_outputs":{"choice":["a"]}"#);
    assert!(matches!(
        told.raw(&other, &Along::default()).manner,
        Manner::Ids(..)
    ));
    assert!(matches!(
        VLLM.raw(&other, &Along::default()).manner,
        Manner::Opaque
    ));
}

#[test]
fn vllm_is_told_what_a_frequency_penalty_has_taken_already() {
    let mut job = chat(r#","frequency_penalty":0.5"#);
    let question = VLLM.raw(&job, &Along::default());
    let Manner::Ids(_, prepared) = question.manner else {
        panic!("it can go on");
    };
    job.prepared = *prepared;
    job.prepared.prompt = [7, 8].into();
    job.prepared.params.max_tokens = 9;
    job.generated = vec![5, 9, 5];
    let body = |asked: Asked| {
        let body = asked.go_on(&job, None, &Along::default()).unwrap().body;
        serde_json::from_slice::<Value>(&body).unwrap()
    };
    assert_eq!(body(VLLM)["logit_bias"], json!({ "5": -1.0, "9": -0.5 }));
    assert!(body(LLAMA)["logit_bias"].is_null());
    for scaled in [
        r#","presence_penalty":0.5"#,
        r#","frequency_penalty":0.5,"presence_penalty":0.5"#,
        r#","frequency_penalty":0.5,"repetition_penalty":1.1"#,
    ] {
        let question = VLLM.raw(&chat(scaled), &Along::default());
        assert!(matches!(question.manner, Manner::Opaque), "{scaled}");
    }
}

#[test]
fn what_would_draw_other_tokens_goes_on_only_with_leave() {
    let lenient = Asked {
        inexact: Inexact::Allow,
        ..VLLM
    };
    let seed = Lost {
        seed: true,
        penalty: false,
    };
    let penalty = Lost {
        seed: false,
        penalty: true,
    };
    for (more, lost) in [
        (r#","seed":1,"temperature":0.5"#, seed),
        (r#","presence_penalty":0.1"#, penalty),
        (
            r#","frequency_penalty":0.1,"repetition_penalty":1.1"#,
            penalty,
        ),
    ] {
        let mut job = chat(more);
        let raw = |asked: Asked| asked.raw(&job, &Along::default()).manner;
        assert!(matches!(raw(VLLM), Manner::Opaque), "{more}");
        let Manner::Ids(_, prepared) = raw(lenient) else {
            panic!("{more} cannot go on");
        };
        assert_eq!(VLLM.lost(&prepared.params, prepared.seeded), lost, "{more}");
        job.prepared = Prepared {
            prompt: [1, 2].into(),
            ..*prepared
        };
        job.prepared.params.max_tokens = 9;
        job.generated = vec![3];
        // Both ends must have leave.
        assert!(!VLLM.can_take(&job), "{more}");
        assert!(VLLM.go_on(&job, None, &Along::default()).is_err(), "{more}");
        assert!(
            lenient.go_on(&job, None, &Along::default()).is_ok(),
            "{more}"
        );
    }
}

#[test]
fn log_probabilities_are_asked_for_where_it_goes_on() {
    let mut job = chat("");
    job.prepared.prompt = [1, 2].into();
    job.prepared.params.max_tokens = 9;
    job.prepared.params.logprobs = Some(2);
    job.generated = vec![3];
    let body = VLLM.go_on(&job, None, &Along::default()).unwrap().body;
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["logprobs"], 2);
    let asks = chat(r#","logprobs":true,"top_logprobs":2"#);
    assert!(matches!(
        LLAMA.raw(&asks, &Along::default()).manner,
        Manner::Opaque
    ));
}
