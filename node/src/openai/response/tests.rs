use serde_json::{Value, json};
use shoal_gossip::NodeId;

use super::*;
use crate::engine::answer::Wire;

const REQUEST: RequestId = RequestId {
    home: NodeId(1),
    serial: 0xab,
};

fn envelope(kind: RequestKind) -> Envelope {
    Envelope::new(kind, REQUEST, 1_700_000_000, "m", Some(0xbeef))
}

fn batch(text: &str, logprobs: Vec<TokenLogprob>) -> TokenBatch {
    TokenBatch {
        index: 0,
        ids: vec![1],
        text: text.into(),
        logprobs,
        wire: Wire::default(),
    }
}

fn finish(reason: FinishReason, text: &str) -> Finish {
    Finish {
        reason,
        output_tokens: 2,
        text: text.into(),
        wire: Wire::default(),
        prompt_tokens: None,
    }
}

fn logprob(token: &str, logprob: f32, top: &[(&str, f32)]) -> TokenLogprob {
    TokenLogprob {
        token: token.into(),
        logprob,
        top: top.iter().map(|&(text, p)| (text.into(), p)).collect(),
    }
}

fn streamed(mut writer: ChunkWriter, batches: &[TokenBatch], end: &Finish) -> String {
    let mut out = Vec::new();
    for batch in batches {
        writer.tokens(batch, &mut out);
    }
    writer.finish(end, &mut out);
    String::from_utf8(out).unwrap()
}

#[test]
fn a_chat_stream_is_byte_for_byte_what_openai_sends() {
    let writer = ChunkWriter::new(envelope(RequestKind::Chat), 5, true, false);
    let head = r#"data: {"id":"chatcmpl-11111112-00000000000000ab","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":"#;
    let tail = r#","system_fingerprint":"fp_000000000000beef"}"#;
    let expected = [
        r#"[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null"#,
        r#"[{"index":0,"delta":{"content":"Hé"},"logprobs":null,"finish_reason":null}],"usage":null"#,
        r#"[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null"#,
        r#"[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}"#,
    ]
    .map(|middle| format!("{head}{middle}{tail}\n\n"))
    .concat()
        + "data: [DONE]\n\n";
    assert_eq!(
        streamed(
            writer,
            &[batch("Hé", vec![]), batch("", vec![])],
            &finish(FinishReason::Stop, "")
        ),
        expected
    );
}

#[test]
fn a_completion_stream_has_no_opening_and_no_usage_unless_asked() {
    let writer = ChunkWriter::new(envelope(RequestKind::Completion), 5, false, false);
    let head = r#"data: {"id":"cmpl-11111112-00000000000000ab","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":"#;
    let tail = r#"}],"system_fingerprint":"fp_000000000000beef"}"#;
    let expected = [
        r#""a","logprobs":null,"finish_reason":null"#,
        r#""b","logprobs":null,"finish_reason":"length""#,
    ]
    .map(|middle| format!("{head}{middle}{tail}\n\n"))
    .concat()
        + "data: [DONE]\n\n";
    assert_eq!(
        streamed(
            writer,
            &[batch("a", vec![])],
            &finish(FinishReason::Length, "b")
        ),
        expected
    );
}

#[test]
fn held_back_text_goes_out_with_the_finish() {
    let writer = ChunkWriter::new(envelope(RequestKind::Chat), 5, false, false);
    let out = streamed(writer, &[], &finish(FinishReason::Stop, "tail"));
    assert!(out.contains(r#""role":"assistant""#));
    assert!(out.contains(r#""delta":{"content":"tail"},"logprobs":null,"finish_reason":"stop""#));
}

#[test]
fn whole_answers_have_openais_shape() {
    let mut answer = WholeAnswer::new(envelope(RequestKind::Chat), 5, false);
    answer.push(batch("Hello", vec![]));
    let body: Value =
        serde_json::from_slice(&answer.finish(&finish(FinishReason::Stop, "!"))).unwrap();
    assert_eq!(
        body,
        json!({
            "id": "chatcmpl-11111112-00000000000000ab",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "m",
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": null},
                "logprobs": null,
                "finish_reason": "stop",
            }],
            "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
            "system_fingerprint": "fp_000000000000beef",
        })
    );
    let mut answer = WholeAnswer::new(envelope(RequestKind::Completion), 5, false);
    answer.push(batch("Hello", vec![]));
    let body: Value =
        serde_json::from_slice(&answer.finish(&finish(FinishReason::Length, ""))).unwrap();
    assert_eq!(body["object"], "text_completion");
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "text": "Hello", "logprobs": null, "finish_reason": "length"}])
    );
}

#[test]
fn chat_logprobs_name_token_bytes_and_alternatives() {
    let tokens = [
        logprob("é", -0.5, &[("é", -0.5), ("\u{fffd}", f32::NEG_INFINITY)]),
        logprob("\u{fffd}", f32::NAN, &[]),
    ];
    assert_eq!(
        serde_json::to_value(ChatLogprobs::new(&tokens)).unwrap(),
        json!({
            "content": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [
                    {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                    {"token": "\u{fffd}", "logprob": -9999.0, "bytes": null},
                ]},
                {"token": "\u{fffd}", "logprob": -9999.0, "bytes": null, "top_logprobs": []},
            ],
            "refusal": null,
        })
    );
}

#[test]
fn completion_logprobs_are_parallel_arrays_and_offsets_run_on_through_a_stream() {
    let mut offset = 0;
    let first = [logprob("né", -1.0, &[("x", -0.5), ("x", -2.0)])];
    assert_eq!(
        serde_json::to_string(&CompletionLogprobs::new(&first, &mut offset)).unwrap(),
        r#"{"text_offset":[0],"token_logprobs":[-1.0],"tokens":["né"],"top_logprobs":[{"x":-0.5,"né":-1.0}]}"#
    );
    let next = [logprob("b", -0.25, &[("b", -0.25)])];
    assert_eq!(
        serde_json::to_string(&CompletionLogprobs::new(&next, &mut offset)).unwrap(),
        r#"{"text_offset":[2],"token_logprobs":[-0.25],"tokens":["b"],"top_logprobs":[{"b":-0.25}]}"#
    );
}

#[test]
fn tokens_without_text_still_bring_their_logprobs() {
    let writer = ChunkWriter::new(envelope(RequestKind::Completion), 1, false, true);
    let out = streamed(
        writer,
        &[batch("", vec![logprob("a", -1.0, &[])])],
        &finish(FinishReason::Stop, "a"),
    );
    assert!(
        out.contains(r#""text":"","logprobs":{"text_offset":[0]"#),
        "{out}"
    );
    let mut answer = WholeAnswer::new(envelope(RequestKind::Chat), 1, true);
    answer.push(batch("", vec![logprob("a", -1.0, &[])]));
    let body: Value =
        serde_json::from_slice(&answer.finish(&finish(FinishReason::Stop, "a"))).unwrap();
    assert_eq!(body["choices"][0]["logprobs"]["content"][0]["token"], "a");
}
