//! What text a client sees, for any bytes, any cuts and any stop strings.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn stops(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// Pushes all pieces and finishes; gives the emissions and whether a stop ended it.
fn run(stop: &[String], pieces: &[&[u8]]) -> (Vec<String>, bool) {
    let mut state = TextState::new(stop);
    let mut texts: Vec<String> = pieces.iter().map(|piece| state.push(piece).text).collect();
    texts.push(state.finish());
    (texts, state.is_stopped())
}

fn check(stop: &[&str], pieces: &[&[u8]], expected: &[&str]) {
    assert_eq!(run(&stops(stop), pieces).0, expected);
}

/// The definition: the whole text, cut where the stop that is complete first begins.
fn whole_text(stop: &[String], bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let first = (0..=text.len())
        .filter(|&end| text.is_char_boundary(end))
        .find_map(|end| {
            stop.iter()
                .filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()))
                .map(|stop| end - stop.len())
                .min()
        });
    first.map_or_else(|| text.clone(), |start| text[..start].to_owned())
}

#[test]
fn a_character_cut_into_tokens_appears_when_it_is_whole() {
    let face = "😀".as_bytes();
    check(
        &[],
        &[b"a", &face[..1], &face[1..3], &face[3..], b"b"],
        &["a", "", "", "😀", "b", ""],
    );
}

#[test]
fn bytes_that_are_no_text_become_replacement_characters() {
    check(
        &[],
        &[b"\xff", b"a\xc3", b"b", b"\xe2\x82"],
        &["\u{fffd}", "a", "\u{fffd}b", "", "\u{fffd}"],
    );
}

#[test]
fn text_that_may_begin_a_stop_is_held_until_it_is_certain() {
    check(
        &["STOP"],
        &[b"abS", b"T", b"x", b"ST"],
        &["ab", "", "STx", "", "ST"],
    );
}

#[test]
fn a_stop_across_tokens_ends_the_output_before_it() {
    let mut state = TextState::new(&stops(&["\n\nUser:"]));
    assert_eq!(state.push(b"Hi.\n").text, "Hi.");
    assert_eq!(state.push(b"\nUse").text, "");
    assert_eq!(
        state.push(b"r: never seen"),
        Pushed {
            text: String::new(),
            stopped: true
        }
    );
    assert!(state.push(b"more").stopped);
    assert_eq!(state.push(b"more").text, "");
    assert_eq!(state.finish(), "");
}

#[test]
fn the_stop_complete_first_wins_and_of_two_the_longer() {
    check(&["bcd", "c"], &[b"abcd"], &["ab", ""]);
    check(&["c", "bc"], &[b"abcd"], &["a", ""]);
    check(&["", "x"], &[b"ab"], &["ab", ""]);
}

#[test]
fn a_repeated_beginning_of_a_stop_is_not_lost() {
    check(&["aab"], &[b"a", b"a", b"a", b"b"], &["", "", "a", "", ""]);
}

#[test]
fn a_stop_of_replacement_characters_is_found_at_the_end_too() {
    let (texts, stopped) = run(&stops(&["\u{fffd}"]), &[b"a\xe2"]);
    assert_eq!(texts, ["a", ""]);
    assert!(stopped);
}

/// Few letters, so that stops occur, overlap and are cut everywhere.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let unit = prop_oneof![
        4 => prop_oneof![Just("a"), Just("b"), Just("é"), Just("😀")].prop_map(|text| text.as_bytes().to_vec()),
        1 => any::<u8>().prop_map(|byte| vec![byte]),
    ];
    vec(unit, 0..40).prop_map(|units| units.concat())
}

fn some_stops() -> impl Strategy<Value = Vec<String>> {
    vec("[abé😀\u{fffd}]{0,4}", 0..4)
}

proptest! {
    #[test]
    fn emissions_together_are_the_whole_text_cut_at_the_first_stop(
        bytes in bytes(),
        stop in some_stops(),
        cuts in vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let (texts, stopped) = run(&stop, &pieces);
        let expected = whole_text(&stop, &bytes);
        prop_assert_eq!(texts.concat(), expected.clone());
        prop_assert_eq!(stopped, expected != String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn the_same_pieces_always_split_the_same_way(bytes in bytes(), stop in some_stops()) {
        let pieces: Vec<&[u8]> = bytes.chunks(3).collect();
        let mut whole = TextState::new(&stop);
        let mut rebuilt = TextState::new(&stop);
        for (count, piece) in pieces.iter().enumerate() {
            whole.push(piece);
            rebuilt = TextState::new(&stop);
            for piece in &pieces[..=count] {
                rebuilt.push(piece);
            }
            prop_assert_eq!(&whole, &rebuilt);
        }
        prop_assert_eq!(whole.finish(), rebuilt.finish());
    }
}
