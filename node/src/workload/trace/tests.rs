//! Traces that load, and the line that is named where one does not.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;

const SMALL: Bounds = Bounds {
    rows: 3,
    line: 60,
    bytes: 200,
};

fn load(text: impl AsRef<[u8]>) -> Result<Vec<Arrival>, (u64, String)> {
    let mut lines = Lines::new(text.as_ref(), SMALL);
    arrivals(&mut lines, u64::MAX, 1.0).map_err(|fault| (lines.number, fault))
}

fn arrival(ms: u64, prompt: u32, output: u32) -> Arrival {
    Arrival {
        at: Duration::from_millis(ms),
        prompt: Tokens(prompt),
        output: Tokens(output),
    }
}

/// The line at fault, and a piece of what is said of it.
fn check(text: impl AsRef<[u8]>, line: u64, says: &str) {
    let (found, fault) = load(text).expect_err(says);
    assert!(fault.contains(says), "{fault}");
    assert_eq!(found, line, "{fault}");
}

#[test]
fn columns_come_in_any_order_and_others_are_ignored() {
    let text = "\u{feff}id, output_tokens ,arrival_s,prompt_tokens\r\n\
                a,7,0.5,100\r\n\
                \r\n\
                ,8, 0.5 ,200\r\n\
                c,9,2,300";
    let rows = load(text).expect("sound");
    let expected = [
        arrival(0, 100, 7),
        arrival(0, 200, 8),
        arrival(1500, 300, 9),
    ];
    assert_eq!(rows, expected);
}

#[test]
fn a_damaged_trace_names_the_line_and_the_way_out() {
    let head = "arrival_s,prompt_tokens,output_tokens\n";
    let with = |rows: &str| format!("{head}{rows}");
    check("", 1, "empty");
    check(head, 2, "no rows");
    check(
        "arrival_s,prompt_tokens\n0,1\n",
        1,
        "output_tokens is missing",
    );
    check(with("0,1,1\n0,1\n"), 3, "2 fields and the header 3");
    check(with("0,1,1,\"a\"\n"), 2, "4 fields and the header 3");
    check(with("-1,1,1\n"), 2, "`-1` is no arrival time");
    check(with("NaN,1,1\n"), 2, "no arrival time");
    check(with("inf,1,1\n"), 2, "no arrival time");
    check(with("1e300,1,1\n"), 2, "no arrival time");
    check(with(",1,1\n"), 2, "no arrival time");
    check(with("0,0,1\n"), 2, "`0` is no prompt_tokens");
    check(with("0,1,0\n"), 2, "`0` is no output_tokens");
    check(with("0,1.5,1\n"), 2, "no prompt_tokens");
    check(with("0,1,4294967296\n"), 2, "no output_tokens");
    check(with("2,1,1\n\n1,1,1\n"), 4, "sort the trace");
    check(b"arrival_s,\xff\n", 1, "not text");
}

#[test]
fn rows_lines_and_bytes_are_bounded() {
    let head = "arrival_s,prompt_tokens,output_tokens\n";
    check(
        format!("{head}{}", "0,1,1\n".repeat(4)),
        5,
        "more than 3 rows",
    );
    check(
        format!("{head}0,1,{}\n", "1".repeat(60)),
        2,
        "above 60 bytes",
    );
    check(
        format!("{head}{}", " \n".repeat(100)),
        83,
        "above 200 bytes",
    );
    assert!(load(format!("{head}{}", "0,1,1\n".repeat(3))).is_ok());
}

#[test]
fn a_trace_is_read_only_as_far_as_it_is_asked_for() {
    let text = "arrival_s,prompt_tokens,output_tokens\n0,1,2\n1,3,4\nnot a row\n";
    let mut lines = Lines::new(text.as_bytes(), SMALL);
    let rows = arrivals(&mut lines, 2, 4.0).expect("two rows");
    assert_eq!(rows, [arrival(0, 1, 2), arrival(250, 3, 4)]);
}

#[test]
fn a_file_is_named_in_its_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("t.csv");
    let missing = read(&path, 1, 1.0).expect_err("no file").to_string();
    assert!(missing.contains("t.csv"), "{missing}");
    fs::write(&path, "arrival_s,prompt_tokens,output_tokens\n1,1,x\n").expect("written");
    let damaged = read(&path, 9, 1.0).expect_err("no number").to_string();
    assert!(
        damaged.contains("t.csv, line 2: `x` is no output_tokens"),
        "{damaged}"
    );
}

fn packed(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).expect("in memory");
    encoder.finish().expect("in memory")
}

#[test]
fn a_packed_trace_reads_like_a_plain_one_and_says_where_it_is_cut_off() {
    let folder = tempfile::tempdir().expect("a folder");
    // The content says what it is, not the name; two packed files in a row are one.
    let path = folder.path().join("t.csv");
    let mut bytes = packed("arrival_s,prompt_tokens,output_tokens\n3,1,2\n");
    bytes.extend(packed("4,3,4\n"));
    fs::write(&path, &bytes).expect("written");
    let rows = read(&path, u64::MAX, 1.0).expect("sound");
    assert_eq!(rows, [arrival(0, 1, 2), arrival(1000, 3, 4)]);
    fs::write(&path, &bytes[..bytes.len() - 4]).expect("written");
    let cut = read(&path, u64::MAX, 1.0).expect_err("cut off").to_string();
    assert!(cut.contains("t.csv, line 4: cannot read"), "{cut}");
}

#[test]
fn a_little_file_cannot_unpack_to_an_endless_line() {
    let bomb = packed(&"1".repeat(1 << 20));
    let mut lines = Lines::new(unpacked(bomb.as_slice()).expect("in memory"), SMALL);
    let fault = arrivals(&mut lines, u64::MAX, 1.0).expect_err("too long");
    assert!(fault.contains("above 60 bytes"), "{fault}");
}

proptest! {
    #[test]
    fn a_written_trace_reads_back_at_its_speed(
        rows in prop::collection::vec((0..10_000u64, 1..u32::MAX, 1..u32::MAX), 1..50), speed in 1..8u32,
    ) {
        let mut text = String::from("prompt_tokens,arrival_s,output_tokens\n");
        let (mut now, mut expected) = (500, Vec::new());
        for (gap, prompt, output) in rows {
            now += if expected.is_empty() { 0 } else { gap * u64::from(speed) };
            writeln!(text, "{prompt},{}.{:03},{output}", now / 1000, now % 1000).expect("to a string");
            expected.push(arrival((now - 500) / u64::from(speed), prompt, output));
        }
        let mut lines = Lines::new(text.as_bytes(), BOUNDS);
        let read = arrivals(&mut lines, u64::MAX, f64::from(speed)).expect("sound");
        prop_assert_eq!(read.len(), expected.len());
        for (read, expected) in read.iter().zip(&expected) {
            prop_assert!(read.at.abs_diff(expected.at) < Duration::from_micros(1));
            prop_assert_eq!((read.prompt, read.output), (expected.prompt, expected.output));
        }
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
        let mut text = b"arrival_s,prompt_tokens,output_tokens\n".to_vec();
        text.extend(bytes);
        let bounded = load(text).map_or(true, |rows| rows.len() <= SMALL.rows);
        prop_assert!(bounded);
    }
}
