use super::*;

fn head() -> AnswerHead {
    AnswerHead {
        status: 200,
        headers: vec![("content-type".into(), "text/event-stream".into())],
        going_on: None,
    }
}

fn ids_reader() -> Reader {
    let prepared = Box::new(Prepared::unread("m"));
    Reader::Ids(Box::new(Ids::new(
        head(),
        (IdSource::TokenIds, prepared),
        7,
    )))
}

fn chunk(inner: &str) -> String {
    format!("data: {{\"id\":\"c\",\"created\":5,\"model\":\"m\",\"choices\":[{inner}]}}\n\n")
}

fn role() -> String {
    "data: {\"id\":\"c\",\"created\":5,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}],\"prompt_token_ids\":[1,2]}\n\n".into()
}

fn token(text: &str, ids: &str) -> String {
    chunk(&format!(
        "{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null,\"token_ids\":{ids}}}"
    ))
}

fn last() -> String {
    chunk(
        "{\"index\":0,\"delta\":{\"content\":\"\"},\"finish_reason\":\"length\",\"token_ids\":[9]}",
    )
}

const DONE: &str = "data: [DONE]\n\n";

fn push(reader: &mut Reader, text: &str) {
    reader.push(Bytes::from(text.to_owned())).unwrap();
}

fn bytes_of(said: &Said) -> String {
    String::from_utf8(said.wire.bytes.to_vec()).unwrap()
}

#[test]
fn the_first_piece_has_tokens_and_says_what_it_takes_to_go_on() {
    let mut reader = ids_reader();
    push(&mut reader, &role());
    assert_eq!(
        reader.take(),
        None,
        "who speaks is said with the first word"
    );
    push(&mut reader, &token("The", "[504]"));
    let said = reader.take().unwrap();
    assert_eq!(
        (said.ids.as_slice(), said.text.as_str()),
        (&[504][..], "The")
    );
    let going_on = said.wire.head.clone().unwrap().going_on.unwrap();
    assert_eq!(&*going_on.prepared.prompt, [1, 2]);
    assert_eq!(going_on.fingerprint, 7);
    assert_eq!(
        (going_on.shape.id.as_str(), going_on.shape.created),
        ("c", 5)
    );
    let expected = role().replace("[1,2]", "null") + &token("The", "null");
    assert_eq!(bytes_of(&said), expected);
}

#[test]
fn the_end_is_one_piece_from_the_reason_on() {
    let mut reader = ids_reader();
    push(
        &mut reader,
        &(role() + &token("a", "[1]") + &token(" b c", "[2,3]") + &last()),
    );
    let said = reader.take().unwrap();
    assert_eq!(said.ids, [1, 2, 3]);
    assert_eq!(reader.take(), None);
    assert!(!reader.is_done());
    let usage = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":4}}\n\n";
    push(&mut reader, &(usage.to_owned() + DONE));
    assert!(reader.is_done());
    let end = reader.end().unwrap();
    assert_eq!(end.reason, FinishReason::Length);
    let expected = last().replace("[9]", "null") + usage + DONE;
    assert_eq!(end.wire.bytes, expected);
}

#[test]
fn an_end_in_the_middle_is_none() {
    let beginnings = [
        role(),
        role() + &token("a", "[1]"),
        role() + &token("a", "[1]") + DONE,
        role() + &token("a", "[1]") + &last(),
        role() + &token("a", "[1]") + &last() + DONE + "data: {",
    ];
    for beginning in beginnings {
        let mut reader = ids_reader();
        push(&mut reader, &beginning);
        reader.take();
        assert!(reader.end().is_err(), "{beginning}");
    }
    for (ends_with, text) in [
        (Ending::Done, "data: {\"x\":1}\n\n"),
        (Ending::Done, "data: [DON"),
        (Ending::Event, "event: x\ndata: {"),
        (Ending::Event, "event: x\ndata: {}\n"),
    ] {
        let mut reader = Reader::Opaque(Box::new(Opaque::new(head(), ends_with)));
        push(&mut reader, text);
        reader.take();
        assert!(reader.end().is_err(), "{text}");
    }
    for (ends_with, text) in [
        (Ending::Done, "data: {\"x\":1}\r\n\r\ndata: [DONE]\r\n\r\n"),
        (Ending::Event, "event: message_stop\ndata: {}\n\n"),
    ] {
        let mut reader = Reader::Opaque(Box::new(Opaque::new(head(), ends_with)));
        push(&mut reader, text);
        let mut told = reader.take().unwrap().wire.bytes.to_vec();
        told.extend_from_slice(&reader.end().unwrap().wire.bytes);
        assert_eq!(String::from_utf8(told).unwrap(), text);
    }
}

#[test]
fn what_has_more_than_text_goes_through_and_is_not_gone_on_with() {
    let mut reader = ids_reader();
    let call = chunk("{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0}]},\"token_ids\":[4]}");
    push(&mut reader, &(role() + &call));
    let said = reader.take().unwrap();
    assert_eq!(said.ids, [0_u32; 0]);
    assert_eq!(said.wire.head.unwrap().going_on, None);
    push(&mut reader, &token("a", "[1]"));
    assert_eq!(reader.take().unwrap().ids, [0_u32; 0], "nor later");
    push(&mut reader, "data: {\"something\":\"new\"}\n\n");
    assert_eq!(
        reader.take().unwrap().wire.bytes,
        "data: {\"something\":\"new\"}\n\n"
    );
}

#[test]
fn carriage_returns_comments_and_cuts_change_nothing() {
    let text = role() + ": ping\n\n" + &token("a", "[1]") + &token("b", "[2]") + &last() + DONE;
    let text = text.replace('\n', "\r\n");
    for size in [1, 2, 3, 7, 50] {
        let mut reader = ids_reader();
        let (mut ids, mut bytes) = (Vec::new(), Vec::new());
        for piece in text.as_bytes().chunks(size) {
            reader.push(Bytes::copy_from_slice(piece)).unwrap();
            if let Some(said) = reader.take() {
                ids.extend(said.ids);
                bytes.extend_from_slice(&said.wire.bytes);
            }
        }
        bytes.extend_from_slice(&reader.end().unwrap().wire.bytes);
        assert_eq!(ids, [1, 2]);
        let expected = ["[1,2]", "[1]", "[2]", "[9]"]
            .iter()
            .fold(text.clone(), |text, ids| text.replace(ids, "null"));
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            expected,
            "in pieces of {size}"
        );
    }
}

#[test]
fn an_engine_that_says_it_failed_has_failed() {
    let mut reader = ids_reader();
    let error = reader.push(Bytes::from_static(
        b"data: {\"error\":{\"message\":\"EngineDeadError\"}}\n\n",
    ));
    assert!(matches!(error, Err(EngineError::Broken(why)) if why.contains("EngineDeadError")));
}

#[test]
fn an_endless_event_ends_the_reading_and_not_the_memory() {
    let mut reader = ids_reader();
    push(&mut reader, "data: ");
    let line = Bytes::from(vec![b'x'; 1024 * 1024]);
    let pushed = (0..8)
        .map(|_| reader.push(line.clone()))
        .find(Result::is_err);
    assert!(pushed.is_some());
}

#[test]
fn a_body_that_is_no_stream_is_kept_until_it_is_whole_or_long() {
    let mut reader = Reader::Whole(Box::new(Whole::new(head(), true)));
    push(&mut reader, "{\"a\":");
    assert_eq!(reader.take(), None);
    push(&mut reader, "1}");
    let end = reader.end().unwrap();
    assert_eq!(
        (end.wire.bytes.as_ref(), end.wire.head.is_some()),
        (&b"{\"a\":1}"[..], true)
    );
    let mut torn = Reader::Whole(Box::new(Whole::new(head(), true)));
    push(&mut torn, "{\"a\":");
    assert!(torn.end().is_err(), "half of it");
    let mut reader = Reader::Whole(Box::new(Whole::new(head(), true)));
    push(&mut reader, &"x".repeat(MAX_WHOLE + 1));
    let said = reader.take().unwrap();
    assert_eq!(
        (said.wire.bytes.len(), said.wire.head.is_some()),
        (MAX_WHOLE + 1, true)
    );
}

fn go_on(stop: &[&str], told: &str, spoken: Option<&str>) -> GoOn {
    let stop: Vec<String> = stop.iter().map(|stop| (*stop).to_owned()).collect();
    GoOn::new(Before {
        stop: &stop,
        told,
        spoken,
        ..Before::default()
    })
}

fn completion(text: &str, ids: &str, finish: &str) -> Bytes {
    let choice = format!(
        "{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":{finish},\"token_ids\":{ids}}}"
    );
    chunk(&choice).into()
}

/// Ids, text, and the end of an answer that goes on.
fn read(mut on: GoOn, pieces: &[Bytes]) -> (Vec<u32>, String, End) {
    let (mut ids, mut text) = (Vec::new(), String::new());
    for piece in pieces {
        on.push(piece.clone()).unwrap();
        if let Some(said) = on.take() {
            ids.extend(said.ids);
            text.push_str(&said.text);
        }
    }
    let end = on.end().unwrap();
    text.push_str(&end.text);
    (ids, text, end)
}

#[test]
fn text_goes_on_where_the_client_is() {
    let rest = [
        completion(" Paris", "[5]", "null"),
        completion(".", "[6]", "\"length\""),
    ];
    let (ids, text, end) = read(go_on(&[], "The capital is", Some("The capital is")), &rest);
    assert_eq!((ids.as_slice(), text.as_str()), (&[5, 6][..], " Paris."));
    assert_eq!(end.reason, FinishReason::Length);
    // Text that the first engine held back comes now.
    let (_, text, _) = read(go_on(&[], "The capital is", Some("The capital")), &rest);
    assert_eq!(text, " is Paris.");
    // A character that was not whole comes whole.
    let rest = [completion("\u{1f41f}!", "[5]", "\"stop\"")];
    let (_, text, _) = read(go_on(&[], "A fish: \u{fffd}", Some("A fish: ")), &rest);
    assert_eq!(text, "\u{1f41f}!");
}

#[test]
fn a_stop_string_over_the_seam_ends_the_text_before_it() {
    let rest = [completion("ND and more", "[5]", "null")];
    let (ids, text, end) = read(go_on(&["END"], "to the E", Some("to the ")), &rest);
    assert_eq!((ids.as_slice(), text.as_str()), (&[5][..], ""));
    assert_eq!(end.reason, FinishReason::Stop);
    let rest = [completion("astern", "[5]", "\"length\"")];
    let (_, text, _) = read(go_on(&["END"], "to the E", Some("to the ")), &rest);
    assert_eq!(text, "Eastern");
    let whole = go_on(&["END"], "the END", Some("the "));
    assert!(whole.finish.is_some());
}

fn in_own_form() -> GoOn {
    GoOn::new(Before {
        own_form: true,
        ..Before::default()
    })
}

#[test]
fn log_probabilities_come_with_their_tokens_and_no_more_alternatives_than_asked_for() {
    let mut on = GoOn::new(Before {
        alternatives: 1,
        ..Before::default()
    });
    let choice = |text: &str, ids: &str, logprobs: &str| {
        let choice = format!(
            "{{\"index\":0,\"text\":\"{text}\",\"logprobs\":{logprobs},\"finish_reason\":null,\"token_ids\":{ids}}}"
        );
        Bytes::from(chunk(&choice))
    };
    let told = r#"{"text_offset":[0],"token_logprobs":[-0.5],"tokens":["a"],"top_logprobs":[{"a":-0.5,"b":-1.0}]}"#;
    on.push(choice("a", "[5]", told)).unwrap();
    on.push(choice("a", "[5]", told)).unwrap();
    let said = on.take().unwrap();
    let tops: Vec<usize> = said.logprobs.iter().map(|one| one.top.len()).collect();
    assert_eq!((said.ids, tops), (vec![5, 5], vec![1, 1]));
    // With one missing nobody can say which belongs to which.
    on.push(choice("a", "[5]", told)).unwrap();
    on.push(choice("a", "[5]", "null")).unwrap();
    let said = on.take().unwrap();
    assert_eq!((said.ids.len(), said.logprobs.len()), (2, 0));
}

#[test]
fn the_forms_of_llama_server_are_read_too() {
    let mut on = in_own_form();
    on.push(Bytes::from_static(
        b"data: {\"content\":\" Paris\",\"tokens\":[7042],\"stop\":false}\n\n",
    ))
    .unwrap();
    let said = on.take().unwrap();
    assert_eq!((said.ids, said.text.as_str()), (vec![7042], " Paris"));
    on.push(Bytes::from_static(
        b"data: {\"content\":\"\",\"tokens\":[],\"stop\":true,\"stop_type\":\"limit\"}\n\n",
    ))
    .unwrap();
    assert_eq!(on.end().unwrap().reason, FinishReason::Length);
    let mut on = in_own_form();
    assert!(
        on.push(Bytes::from_static(b"data: {\"error\":1}x\n\n"))
            .is_err()
    );
}
