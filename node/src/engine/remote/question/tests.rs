use bytes::Bytes;
use serde_json::{Value, json};
use shoal_gossip::{Epoch, NodeId, RequestId, Tokens};

use super::*;

const VLLM: Asked = Asked {
    kind: ServerKind::Vllm,
    has_ids: true,
    high_first: false,
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
    let question = VLLM.raw(&job);
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
    let question = LLAMA.raw(&job);
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
        r#","logprobs":true"#,
        r#","seed":1"#,
        r#","seed":1,"temperature":0.5"#,
        r#","presence_penalty":0.1"#,
        r#","frequency_penalty":-0.1"#,
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
        let question = VLLM.raw(&job);
        assert!(matches!(question.manner, Manner::Opaque), "{more}");
        assert_eq!(question.body, job.body, "{more}");
    }
    for more in [
        r#","seed":1,"temperature":0"#,
        r#","repetition_penalty":1.3"#,
        r#","user":"u","stop":["x"],"max_tokens":7"#,
        r#","stream_options":{"include_usage":true}"#,
        r#","tools":[],"logprobs":false"#,
    ] {
        assert!(
            matches!(VLLM.raw(&chat(more)).manner, Manner::Ids(..)),
            "{more}"
        );
    }
    let told = chat(r#","return_token_ids":true"#);
    let question = VLLM.raw(&told);
    assert!(matches!(question.manner, Manner::Ids(IdSource::Told, _)));
    assert_eq!(question.body, told.body);
    let penalised = chat(r#","presence_penalty":0.1"#);
    assert!(matches!(LLAMA.raw(&penalised).manner, Manner::Ids(..)));
    let old = Asked {
        has_ids: false,
        ..VLLM
    };
    assert!(matches!(old.raw(&chat("")).manner, Manner::Opaque));
}

#[test]
fn a_request_goes_on_in_the_words_of_its_client() {
    let mut job =
        chat(r#","temperature":0.7,"top_k":5,"max_tokens":50,"stop":["END"],"seed":null"#);
    job.prepared.prompt = [1, 2, 3].into();
    job.prepared.params.max_tokens = 50;
    job.generated = vec![4, 5];
    let question = VLLM.go_on(&job, None).unwrap();
    assert_eq!(question.http.path, "/v1/completions");
    let body: Value = serde_json::from_slice(&question.body).unwrap();
    let expected = json!({
        "model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 48, "stream": true,
        "return_token_ids": true, "temperature": 0.7, "top_k": 5,
    });
    assert_eq!(body, expected);
    let question = LLAMA.go_on(&job, Some(1)).unwrap();
    let body: Value = serde_json::from_slice(&question.body).unwrap();
    assert_eq!(
        (&body["n_predict"], &body["stream"]),
        (&json!(1), &json!(false))
    );
    job.generated = vec![0; 50];
    assert!(VLLM.go_on(&job, None).is_err());
}

#[test]
fn priorities_are_turned_round_for_sglang_alone() {
    let asked = Asked {
        kind: ServerKind::Sglang,
        high_first: true,
        ..VLLM
    };
    let ranked = chat(r#", "priority": 3, "x":{"priority":1}"#);
    let body = asked.raw(&ranked).body;
    let expected = String::from_utf8(ranked.body.to_vec()).unwrap();
    assert_eq!(body, expected.replace(": 3", ": -3"));
    let other_way = Asked {
        high_first: false,
        ..asked
    };
    assert_eq!(other_way.raw(&ranked).body, ranked.body);
    let unranked = chat("");
    assert_eq!(asked.raw(&unranked).body, unranked.body);
    let openai = Asked {
        kind: ServerKind::OpenAi,
        ..VLLM
    };
    assert_eq!(openai.raw(&ranked).body, ranked.body);
}
