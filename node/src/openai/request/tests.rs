mod properties;

use super::*;

use crate::engine::work::RequestKind::{Chat, Completion};

fn chat(more: &str) -> Result<GenerateRequest, EngineError> {
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}]{more}}}"#);
    parse(Chat, body.as_bytes())
}

fn completion(more: &str) -> Result<GenerateRequest, EngineError> {
    parse(
        Completion,
        format!(r#"{{"model":"m","prompt":"hi"{more}}}"#).as_bytes(),
    )
}

/// Checks that a body is refused with this `param` and a message that has this in it.
#[track_caller]
fn refused(result: Result<GenerateRequest, EngineError>, param: Option<&str>, part: &str) {
    match result {
        Err(EngineError::BadRequest { message, param: at }) => {
            assert_eq!(at.as_deref(), param, "{message}");
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_plain_conversation_gets_openais_defaults() {
    let request = chat("").unwrap();
    assert_eq!(request.model, "m");
    assert_eq!(
        request.prompt,
        PromptInput::Chat(vec![ChatMessage {
            role: "user".into(),
            content: "hi".into(),
        }])
    );
    assert_eq!(request.params, SamplingParams::default());
    assert_eq!((request.max_tokens, request.seed), (None, None));
    assert_eq!(request.priority, Priority(0));
    assert!(!request.stream && !request.include_usage);
}

#[test]
fn every_field_is_read() {
    let request = completion(
        r#","max_tokens":7,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.05,"seed":-1,
        "presence_penalty":-2,"frequency_penalty":2,"repetition_penalty":1.1,"stop":["a","b"],
        "logprobs":3,"stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,
        "priority":5,"n":1,"best_of":1,"echo":false,"suffix":null,"user":"x","what":{"is":[1]}"#,
    )
    .unwrap();
    assert_eq!(
        request.params,
        SamplingParams {
            temperature: 0.5,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.05,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            repetition_penalty: 1.1,
            stop: vec!["a".into(), "b".into()],
            ignore_eos: true,
            logprobs: Some(3),
            ..SamplingParams::default()
        }
    );
    assert_eq!(request.max_tokens, Some(7));
    assert_eq!(request.seed, Some(u64::MAX));
    assert_eq!(request.priority, Priority(-5));
    assert!(request.stream && request.include_usage);
}

#[test]
fn null_counts_as_absent() {
    let request = chat(
        r#","max_tokens":null,"temperature":null,"stop":null,"stream":null,"stream_options":null,
        "n":null,"tools":null,"response_format":null,"seed":null,"logprobs":null"#,
    )
    .unwrap();
    assert_eq!(request, chat("").unwrap());
}

#[test]
fn a_body_that_is_no_object_is_refused() {
    for (body, part) in [
        (&b""[..], "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"[1,2]", "got an array"),
        (b"\"x\"", "got a string"),
        (b"null", "got null"),
        (b"17", "got a number"),
        (b"nonsense", "not valid JSON"),
        (br#"{"model":"m","prompt":"#, "not valid JSON: EOF"),
        (br#"{"model":"m"}}"#, "trailing characters"),
        (br#"{"model":"m","model":"n"}"#, "duplicate field `model`"),
        (b"{\"model\":\"\xff\"}", "not UTF-8 text (byte 10)"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
    ] {
        refused(parse(Chat, body), None, part);
        refused(parse(Completion, body), None, part);
    }
}

#[test]
fn a_deep_body_is_refused_or_skipped_without_using_up_the_stack() {
    let deep = "[".repeat(200_000) + &"]".repeat(200_000);
    // Skipped, since nobody reads the field.
    assert!(completion(&format!(r#","what":{deep}"#)).is_ok());
    refused(
        completion(&format!(r#","stop":{deep}"#)),
        Some("stop[0]"),
        "got an array",
    );
    refused(
        completion(&format!(r#","logit_bias":{deep}"#)),
        Some("logit_bias"),
        "not supported",
    );
    refused(
        parse(Chat, format!(r#"{{"messages":{deep}}}"#).as_bytes()),
        Some("messages[0]"),
        "must be an object",
    );
}

#[test]
fn the_model_must_be_named() {
    for (model, part) in [
        ("", "required"),
        (r#""model":null,"#, "required"),
        (r#""model":"","#, "1 to 256 bytes, got 0"),
        (r#""model":3,"#, "must be a string, got 3"),
    ] {
        let body = format!(r#"{{{model}"prompt":"hi"}}"#);
        refused(parse(Completion, body.as_bytes()), Some("model"), part);
    }
    let long = format!(r#"{{"model":"{}","prompt":"hi"}}"#, "m".repeat(257));
    refused(parse(Completion, long.as_bytes()), Some("model"), "got 257");
}

#[test]
fn a_wrong_value_of_either_path_names_its_field() {
    for (field, value, part) in [
        ("max_tokens", "0", "an integer from 1 to 4294967295, got 0"),
        ("max_tokens", "-1", "got -1"),
        ("max_tokens", "4294967296", "got 4294967296"),
        ("max_tokens", "99999999999999999999999", "got 9999"),
        ("max_tokens", "1.5", "got 1.5"),
        ("max_tokens", "\"many\"", "got \"many\""),
        ("max_tokens", "true", "got true"),
        ("max_tokens", "[]", "got an array"),
        ("n", "2", "must be 1"),
        ("n", "0", "at least 1"),
        ("best_of", "3", "must be 1"),
        ("temperature", "-0.1", "a number from 0 to 2, got -0.1"),
        ("temperature", "2.1", "got 2.1"),
        ("temperature", "1e999", "got 1e999"),
        ("temperature", "\"hot\"", "got \"hot\""),
        ("top_p", "0", "above 0"),
        ("top_p", "1e-60", "above 0"),
        ("top_p", "1.01", "from 0 to 1"),
        ("top_k", "-2", "from -1"),
        ("top_k", "0.5", "an integer"),
        ("min_p", "-0.1", "from 0 to 1"),
        ("min_p", "2", "from 0 to 1"),
        ("presence_penalty", "2.5", "from -2 to 2"),
        ("frequency_penalty", "-2.5", "from -2 to 2"),
        ("repetition_penalty", "0", "above 0"),
        ("repetition_penalty", "-1", "a positive number"),
        ("repetition_penalty", "1e39", "a positive number"),
        ("stop", "\"\"", "1 to 256 bytes"),
        ("stop", "[\"a\",\"\"]", "1 to 256 bytes"),
        ("stop", "7", "a string or an array of strings, got 7"),
        ("stream", "1", "true or false, got 1"),
        ("stream", "\"yes\"", "true or false"),
        ("ignore_eos", "0", "true or false"),
        (
            "stream_options",
            "{\"include_usage\":true}",
            "needs `stream`",
        ),
        ("stream_options", "[]", "must be an object"),
        ("priority", "2147483648", "from -2147483648"),
        ("priority", "\"high\"", "got \"high\""),
        ("seed", "1.5", "an integer"),
        ("seed", "-9223372036854775809", "an integer"),
        ("tools", "[{}]", "not supported"),
        ("functions", "[{}]", "not supported"),
        ("logit_bias", "{\"5\":1}", "not supported"),
        ("suffix", "\"end\"", "not supported"),
        ("echo", "true", "not supported"),
        ("guided_json", "{\"a\":1}", "not supported"),
    ] {
        let more = format!(r#","{field}":{value}"#);
        refused(chat(&more), Some(field), part);
        refused(completion(&more), Some(field), part);
    }
}

#[test]
fn a_wrong_value_is_quoted_briefly() {
    let more = format!(r#","max_tokens":"{}""#, "é".repeat(100_000));
    let Err(EngineError::BadRequest { message, .. }) = completion(&more) else {
        panic!("accepted");
    };
    assert!(message.len() < 300, "{}", message.len());
}

#[test]
fn what_says_without_is_let_pass() {
    for more in [
        r#","tools":[]"#,
        r#","tools":[ ]"#,
        r#","logit_bias":{}"#,
        r#","suffix":"""#,
        r#","echo":false"#,
        r#","min_tokens":0"#,
        r#","response_format":{"type":"text"}"#,
    ] {
        assert!(completion(more).is_ok(), "{more}");
        assert!(chat(more).is_ok(), "{more}");
    }
}

#[test]
fn a_response_format_other_than_text_is_refused() {
    let name = "response_format";
    refused(
        chat(r#","response_format":{"type":"json_object"}"#),
        Some(name),
        "`json_object` is not supported",
    );
    refused(
        chat(r#","response_format":{}"#),
        Some("response_format.type"),
        "required",
    );
    refused(
        chat(r#","response_format":"text""#),
        Some(name),
        "must be an object",
    );
}

#[test]
fn edge_values_are_taken() {
    let top_k = |more| completion(more).unwrap().params.top_k;
    assert_eq!(top_k(r#","top_k":-1"#), 0);
    assert_eq!(top_k(r#","top_k":0"#), 0);
    assert_eq!(top_k(r#","top_k":5.0"#), 5);
    let seed = |more| completion(more).unwrap().seed;
    assert_eq!(seed(r#","seed":-9223372036854775808"#), Some(1 << 63));
    assert_eq!(seed(r#","seed":18446744073709551615"#), Some(u64::MAX));
    let rank = |more| completion(more).unwrap().priority;
    assert_eq!(rank(r#","priority":-2147483648"#), Priority(i32::MAX));
    assert_eq!(rank(r#","priority":2147483647"#), Priority(-i32::MAX));
    let bound = |more| completion(more).unwrap().max_tokens;
    assert_eq!(bound(r#","max_tokens":4294967295"#), Some(u32::MAX));
    let stops = format!(r#","stop":[{}]"#, vec!["\"x\""; 16].join(","));
    assert_eq!(completion(&stops).unwrap().params.stop.len(), 16);
    assert_eq!(completion(r#","stop":"x""#).unwrap().params.stop, ["x"]);
    assert!(completion(r#","stop":[]"#).unwrap().params.stop.is_empty());
    assert!(completion(r#","temperature":2,"top_p":1,"min_p":1"#).is_ok());
}

#[test]
fn too_many_or_too_long_stop_strings_are_refused() {
    let stops = format!(r#","stop":[{}]"#, vec!["\"x\""; 17].join(","));
    refused(completion(&stops), Some("stop"), "at most 16");
    let stop = format!(r#","stop":"{}""#, "x".repeat(257));
    refused(completion(&stop), Some("stop"), "got 257");
}

#[test]
fn chat_takes_the_newer_name_of_the_output_bound_first() {
    let bound = |more| chat(more).unwrap().max_tokens;
    assert_eq!(bound(r#","max_completion_tokens":9"#), Some(9));
    assert_eq!(
        bound(r#","max_tokens":5,"max_completion_tokens":9"#),
        Some(9)
    );
    refused(
        chat(r#","max_completion_tokens":0"#),
        Some("max_completion_tokens"),
        "got 0",
    );
}

#[test]
fn logprobs_have_another_shape_on_each_path() {
    let of_chat = |more| chat(more).unwrap().params.logprobs;
    assert_eq!(of_chat(r#","logprobs":true"#), Some(0));
    assert_eq!(of_chat(r#","logprobs":true,"top_logprobs":20"#), Some(20));
    assert_eq!(of_chat(r#","logprobs":false,"top_logprobs":0"#), None);
    refused(chat(r#","logprobs":3"#), Some("logprobs"), "true or false");
    refused(
        chat(r#","top_logprobs":3"#),
        Some("top_logprobs"),
        "needs `logprobs`",
    );
    refused(
        chat(r#","logprobs":true,"top_logprobs":21"#),
        Some("top_logprobs"),
        "from 0 to 20",
    );
    let of_completion = |more| completion(more).unwrap().params.logprobs;
    assert_eq!(of_completion(r#","logprobs":0"#), Some(0));
    assert_eq!(of_completion(""), None);
    refused(
        completion(r#","logprobs":21"#),
        Some("logprobs"),
        "from 0 to 20",
    );
    refused(
        completion(r#","logprobs":true"#),
        Some("logprobs"),
        "got true",
    );
}

#[test]
fn usage_in_a_stream_is_off_unless_asked_for() {
    let usage = |more| chat(more).unwrap().include_usage;
    assert!(!usage(r#","stream":true"#));
    assert!(!usage(r#","stream":true,"stream_options":{}"#));
    assert!(!usage(
        r#","stream":true,"stream_options":{"include_usage":null}"#
    ));
    assert!(usage(
        r#","stream":true,"stream_options":{"include_usage":true}"#
    ));
    refused(
        chat(r#","stream":true,"stream_options":{"include_usage":1}"#),
        Some("stream_options.include_usage"),
        "true or false",
    );
}

fn conversation(messages: &str) -> Result<GenerateRequest, EngineError> {
    parse(
        Chat,
        format!(r#"{{"model":"m","messages":{messages}}}"#).as_bytes(),
    )
}

#[test]
fn content_may_be_a_string_parts_or_absent_for_the_assistant() {
    let request = conversation(
        r#"[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":null},{"role":"assistant"},
            {"role":"tool","content":"4","tool_call_id":"x"},
            {"role":"user","content":[],"name":"me"}]"#,
    )
    .unwrap();
    let PromptInput::Chat(messages) = request.prompt else {
        panic!("not a conversation");
    };
    let read: Vec<_> = messages
        .iter()
        .map(|message| (message.role.as_str(), message.content.as_str()))
        .collect();
    assert_eq!(
        read,
        [
            ("developer", "a\nb"),
            ("assistant", ""),
            ("assistant", ""),
            ("tool", "4"),
            ("user", "")
        ]
    );
}

#[test]
fn wrong_messages_are_refused() {
    for (messages, param, part) in [
        ("null", "messages", "required"),
        ("[]", "messages", "at least one"),
        ("\"hi\"", "messages", "an array of messages"),
        ("[7]", "messages[0]", "an object, got 7"),
        ("[{}]", "messages[0].role", "required"),
        (r#"[{"role":"user"}]"#, "messages[0].content", "required"),
        (
            r#"[{"role":"user","content":"a"},{"role":"bot","content":"b"}]"#,
            "messages[1].role",
            "one of system, developer, user, assistant, tool, got \"bot\"",
        ),
        (
            r#"[{"role":5,"content":"a"}]"#,
            "messages[0].role",
            "a string, got 5",
        ),
        (
            r#"[{"role":"user","content":5}]"#,
            "messages[0].content",
            "a string or an array of text parts, got 5",
        ),
        (
            r#"[{"role":"user","content":"\ud800"}]"#,
            "messages[0].content",
            "valid Unicode",
        ),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]"#,
            "messages[0].content[0]",
            "`image_url`, which is not supported",
        ),
        (
            r#"[{"role":"user","content":["a"]}]"#,
            "messages[0].content[0]",
            "an object, got \"a\"",
        ),
        (
            r#"[{"role":"user","content":[{"text":"a"}]}]"#,
            "messages[0].content[0].type",
            "required",
        ),
        (
            r#"[{"role":"user","content":[{"type":"text"}]}]"#,
            "messages[0].content[0].text",
            "required",
        ),
        (
            r#"[{"role":"assistant","tool_calls":[{"id":"x"}]}]"#,
            "messages[0].tool_calls",
            "not supported",
        ),
    ] {
        refused(conversation(messages), Some(param), part);
    }
    refused(
        parse(Chat, br#"{"model":"m","prompt":"x"}"#),
        Some("messages"),
        "required",
    );
}

fn prompt_of(prompt: &str) -> Result<GenerateRequest, EngineError> {
    parse(
        Completion,
        format!(r#"{{"model":"m","prompt":{prompt}}}"#).as_bytes(),
    )
}

#[test]
fn a_prompt_may_be_text_or_ids_bare_or_alone_in_an_array() {
    for (prompt, expected) in [
        ("\"hi\"", PromptInput::Text("hi".into())),
        ("[ \"hi\" ]", PromptInput::Text("hi".into())),
        ("[1, 2]", PromptInput::Tokens(vec![1, 2])),
        ("[ [1,2]]", PromptInput::Tokens(vec![1, 2])),
    ] {
        assert_eq!(prompt_of(prompt).unwrap().prompt, expected, "{prompt}");
    }
}

#[test]
fn a_wrong_prompt_is_refused() {
    for (prompt, param, part) in [
        ("null", "prompt", "required"),
        ("\"\"", "prompt", "not be empty"),
        ("[]", "prompt", "not be empty"),
        ("[[]]", "prompt", "not be empty"),
        ("[\"\"]", "prompt", "not be empty"),
        ("7", "prompt", "got a number"),
        ("{}", "prompt", "got an object"),
        ("[\"a\",\"b\"]", "prompt", "batches are not supported"),
        ("[[1],[2]]", "prompt", "batches are not supported"),
        ("[\"a\",2]", "prompt", "batches are not supported"),
        ("[1,\"a\"]", "prompt", "array of token ids"),
        ("[-1]", "prompt", "token ids from 0 to 4294967295"),
        ("[4294967296]", "prompt", "token ids from 0 to 4294967295"),
        ("[1.5]", "prompt", "array of token ids"),
        ("[[1,[2]]]", "prompt[0]", "array of token ids"),
        ("[null]", "prompt", "array of token ids"),
    ] {
        refused(prompt_of(prompt), Some(param), part);
    }
    refused(
        parse(Completion, br#"{"model":"m","messages":[]}"#),
        Some("prompt"),
        "required",
    );
}
