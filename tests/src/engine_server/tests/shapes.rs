//! Shapes against what was recorded of the real servers, tokenizers and figures.

use super::*;

/// Replaces what differs from run to run: digits of names and times.
fn skeleton(text: &str) -> String {
    let mut same = String::new();
    for char in text.chars() {
        let char = if char.is_ascii_digit() { '0' } else { char };
        if char != '0' || !same.ends_with('0') {
            same.push(char);
        }
    }
    same
}

#[tokio::test]
async fn vllm_answers_as_recorded() {
    let server = EngineServer::start(Dialect::Vllm, engine()).await;
    let (client, at) = (Client::default(), server.address());
    let body = with(
        chat(),
        json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let mut events = client.stream(at, "/v1/chat/completions", &body).await;
    assert_eq!(
        events.header("content-type"),
        "text/event-stream; charset=utf-8"
    );
    let role = events.next().await.expect("a role");
    let (head, rest) = role.split_once(r#","object""#).expect("an id");
    assert!(head.starts_with(r#"{"id":"chatcmpl-"#), "{head}");
    assert_eq!(
        skeleton(rest),
        r#":"chat.completion.chunk","created":0,"model":"sim","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}"#
    );
    let first = events.next().await.expect("a token");
    assert!(
        first.ends_with(r#""},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#),
        "{first}"
    );
    let answer = client
        .post(
            at,
            "/v1/completions",
            &with(completion("x"), json!({"ignore_eos": true})),
        )
        .await;
    let text = String::from_utf8(answer.body.to_vec()).expect("text");
    assert!(text.contains(r#""finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-f9ee624f","usage":{"prompt_tokens":1,"total_tokens":25,"completion_tokens":24,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#), "{text}");
}

#[tokio::test]
async fn vllm_refuses_as_recorded() {
    let server = EngineServer::start(Dialect::Vllm, engine()).await;
    let (client, at) = (Client::default(), server.address());
    let long: Vec<u32> = vec![20; 1_024];
    let cases = [
        (
            with(completion("x"), json!({"model": "nope"})),
            404,
            r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: sim.","type":"NotFoundError","param":"model","code":404}}"#,
        ),
        (
            with(completion("x"), json!({"max_tokens": -1})),
            400,
            r#"{"error":{"message":"max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)","type":"BadRequestError","param":"max_tokens","code":400}}"#,
        ),
        (
            with(completion("x"), json!({"max_tokens": 5_000})),
            400,
            r#"{"error":{"message":"max_tokens=5000 cannot be greater than max_model_len=1024. Please request fewer output tokens. (parameter=max_tokens, value=5000)","type":"BadRequestError","param":"max_tokens","code":400}}"#,
        ),
        (
            completion(vec![99_999_999]),
            400,
            r#"{"error":{"message":"Token id 99999999 is out of vocabulary","type":"BadRequestError","param":null,"code":400}}"#,
        ),
        (
            completion(long),
            400,
            r#"{"error":{"message":"This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=1025)","type":"BadRequestError","param":"input_tokens","code":400}}"#,
        ),
    ];
    for (body, status, wanted) in cases {
        let answer = client.post(at, "/v1/completions", &body).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.body[..]),
            (status, wanted.as_bytes())
        );
    }
    empty(&**server.engine()).await;
}

#[tokio::test]
async fn an_output_ends_with_its_reason() {
    let engine = engine();
    let body = with(
        completion(vec![20, 21]),
        json!({"max_tokens": 12, "ignore_eos": true}),
    );
    let (ids, text) = straight(&*engine, RequestKind::Completion, &body).await;
    let word = text
        .split_inclusive(' ')
        .nth(4)
        .expect("words")
        .trim()
        .to_owned();
    let stop = with(
        body.clone(),
        json!({"stop": [word], "return_token_ids": true}),
    );
    let vllm = EngineServer::start(Dialect::Vllm, engine.clone()).await;
    let llama = EngineServer::start(Dialect::LlamaServer, engine.clone()).await;
    let client = Client::default();
    let answer = client
        .post(vllm.address(), "/v1/completions", &stop)
        .await
        .json();
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&json!("stop"), &json!(word))
    );
    let told = choice["text"].as_str().expect("text");
    assert!(text.starts_with(told) && !told.contains(&word), "{told}");
    let given = choice["token_ids"].as_array().expect("ids").len();
    assert!(given < ids.len(), "{given} of {}", ids.len());

    let own = with(stop, json!({"n_predict": 12, "return_tokens": true}));
    let answer = client
        .post(llama.address(), "/completion", &own)
        .await
        .json();
    assert_eq!(
        (&answer["stop_type"], &answer["stopping_word"]),
        (&json!("word"), &json!(word))
    );
    assert_eq!(answer["content"], told);
}

#[tokio::test]
async fn tokenizers_give_the_ids_of_the_engine_and_back() {
    let vllm = EngineServer::start(Dialect::Vllm, engine()).await;
    let llama = EngineServer::start(Dialect::LlamaServer, engine()).await;
    let client = Client::default();
    let body = Bytes::from(chat().to_string());
    let wanted = vllm
        .engine()
        .prepare(RequestKind::Chat, body)
        .await
        .expect("good");
    let wanted = json!(&wanted.prompt[..]);

    let told = client
        .post(vllm.address(), "/tokenize", &chat())
        .await
        .json();
    assert_eq!(
        (&told["tokens"], &told["max_model_len"]),
        (&wanted, &json!(1_024))
    );
    let text = client
        .post(vllm.address(), "/detokenize", &json!({"tokens": wanted}))
        .await
        .json();
    let again = json!({"model": "sim", "prompt": text["prompt"]});
    let told = client
        .post(vllm.address(), "/tokenize", &again)
        .await
        .json();
    assert_eq!(told["tokens"], wanted);

    let text = client
        .post(llama.address(), "/apply-template", &chat())
        .await
        .json();
    let content = json!({"content": text["prompt"], "add_special": true, "parse_special": true});
    let told = client
        .post(llama.address(), "/tokenize", &content)
        .await
        .json();
    assert_eq!(told["tokens"], wanted);
    let told = client
        .post(llama.address(), "/detokenize", &json!({"tokens": wanted}))
        .await
        .json();
    assert_eq!(told["content"], text["prompt"]);
}

#[tokio::test]
async fn figures_are_those_of_the_engine() {
    let engine = engine_at(1.0);
    let vllm = EngineServer::start(Dialect::Vllm, engine.clone()).await;
    let sglang = EngineServer::start(Dialect::Sglang, engine.clone()).await;
    let llama = EngineServer::start(Dialect::LlamaServer, engine.clone()).await;
    let client = Client::default();
    let long = with(
        chat(),
        json!({"max_tokens": 900, "ignore_eos": true, "stream": true}),
    );
    let mut events = client
        .stream(llama.address(), "/v1/chat/completions", &long)
        .await;
    assert!(events.next().await.is_some());
    let loads = client.get(sglang.address(), "/v1/loads").await.json();
    let row = &loads["loads"][0];
    assert_eq!(
        (&row["num_running_reqs"], &row["max_total_num_tokens"]),
        (&json!(1), &json!(2_048))
    );
    assert!(row["num_used_tokens"].as_u64() > Some(0));
    let slots = client.get(llama.address(), "/slots").await.json();
    assert_eq!(slots.as_array().map(Vec::len), Some(4));
    assert!(slots[0]["n_prompt_tokens"].as_u64() > Some(20), "{slots}");
    assert_eq!(slots[1]["is_processing"], false);
    let metrics = client.get(vllm.address(), "/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).expect("text");
    let running = "vllm:num_requests_running{engine=\"0\",model_name=\"sim\"} 1.0\n";
    assert!(text.contains(running), "{text}");
    assert!(text.contains("num_gpu_blocks=\"129\""), "{text}");
    let born = text
        .lines()
        .find(|line| line.starts_with("process_start_time_seconds 1."));
    assert!(born.is_some_and(|line| line.ends_with("e+09")), "{text}");

    vllm.fault(Fault::MetricsNaN);
    let metrics = client.get(vllm.address(), "/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).expect("text");
    assert!(text.contains("model_name=\"sim\"} NaN\n"), "{text}");
    vllm.mend();
    vllm.fault(Fault::MetricsGone);
    assert_eq!(client.get(vllm.address(), "/metrics").await.status, 404);
    vllm.fault(Fault::HealthStatus(503));
    assert_eq!(client.get(vllm.address(), "/health").await.status, 503);
}
