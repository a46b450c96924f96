use proptest::prelude::*;

use super::*;

/// What one event means.
type Meaning = (Option<String>, Option<String>);

/// All events of a stream that comes in these pieces, and what is left of it.
fn split(pieces: &[&[u8]]) -> (Vec<Event>, Vec<u8>) {
    let mut splitter = Splitter::new(1 << 20);
    let mut events = Vec::new();
    for piece in pieces {
        splitter.push(Bytes::copy_from_slice(piece));
        while let Some(event) = splitter.next().expect("short") {
            events.push(event);
        }
    }
    (events, splitter.rest().to_vec())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn data(event: &Event) -> Option<String> {
    event.data.as_bytes().map(text)
}

/// Checks the data of the events of a stream, whole and in single bytes.
#[track_caller]
fn check(stream: &str, expected: &[Option<&str>], rest: &str) {
    let (events, left) = split(&[stream.as_bytes()]);
    let found: Vec<_> = events.iter().map(data).collect();
    assert_eq!(
        found.iter().map(Option::as_deref).collect::<Vec<_>>(),
        expected,
        "{stream:?}"
    );
    assert_eq!(text(&left), rest, "{stream:?}");
    let bytes: Vec<&[u8]> = stream.as_bytes().chunks(1).collect();
    let (events, left) = split(&bytes);
    let found: Vec<_> = events.iter().filter_map(data).collect();
    let with_data: Vec<_> = expected.iter().copied().flatten().collect();
    assert_eq!(found, with_data, "{stream:?} in single bytes");
    assert_eq!(text(&left), rest, "{stream:?} in single bytes");
}

#[test]
fn an_event_within_a_chunk_is_a_slice_of_it() {
    let chunk = Bytes::from_static(b"data: {\"a\":1}\n\ndata: [DONE]\n\nda");
    let mut splitter = Splitter::new(100);
    splitter.push(chunk.clone());
    let first = splitter.next().expect("short").expect("whole");
    assert_eq!(first.raw.as_ptr(), chunk.as_ptr());
    let Data::Line(line) = &first.data else {
        panic!("one line, got {first:?}");
    };
    assert_eq!(line.as_ptr(), chunk[6..].as_ptr());
    assert_eq!(&line[..], b"{\"a\":1}");
    let second = splitter.next().expect("short").expect("whole");
    assert_eq!(&second.raw[..], b"data: [DONE]\n\n");
    assert_eq!(second.raw.as_ptr(), chunk[15..].as_ptr());
    assert_eq!(splitter.next(), Ok(None));
    assert_eq!(splitter.rest(), b"da");
}

#[test]
fn lines_end_in_any_of_three_ways() {
    for end in ["\n", "\r\n", "\r"] {
        let stream =
            format!("data: a{end}data:b{end}{end}: hi{end}{end}id: 7{end}data: c{end}{end}");
        check(&stream, &[Some("a\nb"), None, Some("c")], "");
    }
    check(
        "data: a\rdata: b\ndata: c\r\n\rdata: d\n\r\n",
        &[Some("a\nb\nc"), Some("d")],
        "",
    );
    check("data: a\n\r", &[Some("a")], "");
}

#[test]
fn data_is_what_follows_the_colon_and_one_blank() {
    check(
        "data:a\n\ndata: a\n\ndata:  a \n\n",
        &[Some("a"), Some("a"), Some(" a ")],
        "",
    );
    check(
        "data\n\ndata:\n\ndata: \n\n",
        &[Some(""), Some(""), Some("")],
        "",
    );
    check("data: \ndata\ndata:x\n\n", &[Some("\n\nx")], "");
    check(
        "data :a\n\nDATA: a\n\ndatas: a\n\n data: a\n\n:data: a\n\n",
        &[None; 5],
        "",
    );
    check("data: a:b\u{0}é\n\n", &[Some("a:b\u{0}é")], "");
}

#[test]
fn blank_lines_and_comments_carry_no_data() {
    check("\n\n: ping\n\nretry: 5\n\n", &[None; 4], "");
    check(":a\ndata: b\n:c\n\n", &[Some("b")], "");
}

#[test]
fn a_byte_order_mark_counts_only_at_the_begin() {
    check(
        "\u{feff}data: a\n\ndata: b\n\n",
        &[Some("a"), Some("b")],
        "",
    );
    check("\u{feff}\n\u{feff}data: a\n\n", &[None, None], "");
    check("\u{feff}\u{feff}data: a\n\n", &[None], "");
}

#[test]
fn what_is_not_ended_is_left() {
    check("data: a\n\ndata: b\n", &[Some("a")], "data: b\n");
    check("data: a", &[], "data: a");
    check("", &[], "");
}

#[test]
fn the_kind_of_event_is_told() {
    let (events, _) = split(&[
        b"event: err",
        b"or\nda",
        b"ta: x\n\ndata: y\n\nevent:a\nevent\n\n",
    ]);
    let kinds: Vec<_> = events.iter().map(|event| event.name.as_deref()).collect();
    assert_eq!(kinds, [Some(&b"error"[..]), None, Some(b"")]);
    assert_eq!(data(&events[0]).as_deref(), Some("x"));
}

#[test]
fn an_event_ends_with_the_first_byte_that_can_end_it() {
    let (events, rest) = split(&[b"data: a\r\n\r", b"\ndata: b\r\n\r\n"]);
    let raws: Vec<_> = events.iter().map(|event| &event.raw[..]).collect();
    assert_eq!(raws, [&b"data: a\r\n\r"[..], b"\n", b"data: b\r\n\r\n"]);
    assert_eq!(events[1].data, Data::None);
    assert!(rest.is_empty());
}

#[test]
fn chunks_that_pile_up_are_read_in_order() {
    let mut splitter = Splitter::new(100);
    for piece in [&b"da"[..], b"", b"ta: a\n", b"\ndata: b\n\nd"] {
        splitter.push(Bytes::copy_from_slice(piece));
    }
    let mut next = || splitter.next().expect("short").map(|event| data(&event));
    assert_eq!(next(), Some(Some("a".to_owned())));
    assert_eq!(next(), Some(Some("b".to_owned())));
    assert_eq!(next(), None);
    assert_eq!(splitter.rest(), b"d");
}

#[test]
fn an_event_beyond_the_limit_ends_the_splitting() {
    let too_long = TooLong { limit: 12 };
    for piece in [1, 3, 100] {
        let mut splitter = Splitter::new(12);
        let mut results = Vec::new();
        for chunk in b"data: abcd\n\ndata: abcde\n\ndata: a\n\n".chunks(piece) {
            splitter.push(Bytes::copy_from_slice(chunk));
            while let Some(result) = splitter.next().transpose() {
                let failed = result.is_err();
                results.push(result.map(|event| data(&event)));
                if failed {
                    break;
                }
            }
        }
        assert_eq!(results[0], Ok(Some("abcd".to_owned())), "{piece}");
        assert!(results.len() > 1 && results[1..].iter().all(|result| *result == Err(too_long)));
    }
    assert_eq!(too_long.to_string(), "an event of more than 12 bytes");
}

/// A slow reading of the same rules: the meaning of each event that has data, and where the last
/// event ends.
fn reference(stream: &[u8]) -> (Vec<Meaning>, usize) {
    let text = text(stream);
    let (mut events, mut ended) = (Vec::new(), 0);
    let (mut name, mut lines): (Option<String>, Vec<String>) = (None, Vec::new());
    let mut at = 0;
    while let Some(length) = text[at..].find(['\n', '\r']) {
        let mut line = &text[at..at + length];
        let width = if text[at + length..].starts_with("\r\n") {
            2
        } else {
            1
        };
        if at == 0 {
            line = line.strip_prefix('\u{feff}').unwrap_or(line);
        }
        at += length + width;
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
        match field {
            "data" => lines.push(value),
            "event" => name = Some(value),
            _ => {}
        }
        if line.is_empty() {
            if !lines.is_empty() {
                events.push((name.take(), Some(lines.join("\n"))));
            }
            (name, lines, ended) = (None, Vec::new(), at);
        }
    }
    (events, ended)
}

proptest! {
    #[test]
    fn any_split_gives_the_same_events_and_loses_no_byte(
        stream in "\u{feff}?((data|event|id|dat)?(:| |\u{feff}|é|x){0,3}(\n|\r|\r\n){0,3}){0,40}",
        cuts in proptest::collection::vec(0_usize..400, 0..30),
    ) {
        let bytes = stream.as_bytes();
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<_> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).collect();
        let (events, rest) = split(&pieces);

        let mut raw: Vec<u8> = events.iter().flat_map(|event| event.raw.to_vec()).collect();
        raw.extend_from_slice(&rest);
        prop_assert_eq!(&raw[..], bytes);
        let (expected, ended) = reference(bytes);
        let meanings: Vec<Meaning> = events
            .iter()
            .map(|event| (event.name.as_deref().map(text), data(event)))
            .filter(|(_, data)| data.is_some())
            .collect();
        prop_assert_eq!(meanings, expected);
        prop_assert_eq!(rest.len(), bytes.len() - ended);
    }
}
