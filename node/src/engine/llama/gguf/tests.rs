//! Heads of files, whole and damaged.

use std::io::Write;

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;

fn read_bytes(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(bytes).expect("written");
    read(file.path())
}

fn text(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.as_bytes());
    out
}

/// A metadata entry: key, type, value.
fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [text(key), kind.to_le_bytes().to_vec(), value.to_vec()].concat()
}

/// An entry of the tensor table.
fn tensor(shape: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = text("weight");
    out.extend((shape.len() as u32).to_le_bytes());
    shape.iter().for_each(|size| out.extend(size.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// A file with these entries and tensors and `data` bytes behind them.
fn file(entries: &[Vec<u8>], tensors: &[Vec<u8>], data: usize) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((entries.len() as u64).to_le_bytes());
    out.extend(entries.concat());
    out.extend(tensors.concat());
    let start = out.len().next_multiple_of(32);
    out.resize(start + data, 0);
    out
}

/// Every kind of metadata, and two Q4_1 matrices of 2 × 64 weights (80 bytes each).
fn sample() -> Vec<u8> {
    let words = [
        8u32.to_le_bytes().to_vec(),
        2u64.to_le_bytes().to_vec(),
        text("a"),
        text("bc"),
    ];
    let numbers = [
        5u32.to_le_bytes().to_vec(),
        3u64.to_le_bytes().to_vec(),
        vec![0; 12],
    ];
    file(
        &[
            entry("general.architecture", 8, &text("llama")),
            entry("general.name", 8, &text("Some Name")),
            entry("tokenizer.ggml.model", 8, &text("gpt2")),
            entry("tokenizer.chat_template", 8, &text("{{ x }}")),
            entry("split.count", 2, &1u16.to_le_bytes()),
            entry("llama.attention.causal", 7, &[0]),
            entry("words", 9, &words.concat()),
            entry("numbers", 9, &numbers.concat()),
            entry("float", 6, &1f32.to_le_bytes()),
            entry("double", 12, &1f64.to_le_bytes()),
        ],
        &[tensor(&[64, 2], 3, 0), tensor(&[64, 2], 3, 96)],
        96 + 80,
    )
}

#[test]
fn the_facts_of_a_whole_file_are_kept() {
    let expected = Gguf {
        architecture: "llama".to_owned(),
        tokenizer: Some("gpt2".to_owned()),
        chat_template: Some("{{ x }}".to_owned()),
        parts: 1,
        causal: false,
    };
    assert_eq!(read_bytes(&sample()).expect("whole"), expected);
}

#[test]
fn every_shorter_file_is_truncated() {
    let whole = sample();
    for length in 0..whole.len() {
        match read_bytes(&whole[..length]) {
            Err(GgufError::Truncated { needed, found }) => {
                assert_eq!(found, length as u64);
                assert!(needed > found && needed <= whole.len() as u64);
            }
            other => panic!("{length}: {other:?}"),
        }
    }
}

fn check(bytes: &[u8], expected: &str) {
    let error = read_bytes(bytes).expect_err("refused").to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_table_that_contradicts_itself_is_damaged() {
    let one = |tensor: Vec<u8>| file(&[], &[tensor], 4096);
    assert!(read_bytes(&one(tensor(&[64, 2], 3, 0))).is_ok());
    check(&one(tensor(&[63, 2], 3, 0)), "rows of 63 in blocks of 32");
    check(&one(tensor(&[64, 2], 3, 8)), "a misplaced beginning");
    check(&one(tensor(&[64], 28, 0)), "type 28");
    check(&one(tensor(&[64], 4, 0)), "type 4");
    check(&one(tensor(&[], 0, 0)), "0 dimensions");
    check(&one(tensor(&[1; 5], 0, 0)), "5 dimensions");
    check(
        &one(tensor(&[1 << 40, 1 << 40], 0, 0)),
        "an impossible size",
    );
    check(&one(tensor(&[64, u64::MAX, 2], 0, 0)), "an impossible size");
    check(&file(&[], &[], 64), "0 tensors");
    check(
        &file(&[entry("x", 13, &[])], &[tensor(&[64], 0, 0)], 256),
        "type 13",
    );
    let nested = [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat();
    check(
        &file(&[entry("x", 9, &nested)], &[tensor(&[64], 0, 0)], 256),
        "type 9",
    );
    let crooked = entry("general.alignment", 4, &24u32.to_le_bytes());
    check(
        &file(&[crooked], &[tensor(&[64], 0, 0)], 256),
        "alignment 24",
    );
}

#[test]
fn values_that_llama_cpp_would_abort_on_are_damaged() {
    let with = |entry: Vec<u8>| file(&[entry], &[tensor(&[64], 0, 0)], 256);
    let words = |words: &[&str]| {
        let count = words.len() as u64;
        let mut value = [8u32.to_le_bytes().to_vec(), count.to_le_bytes().to_vec()].concat();
        words.iter().for_each(|word| value.extend(text(word)));
        with(entry("tokenizer.ggml.tokens", 9, &value))
    };
    assert!(read_bytes(&words(&["a", "b", "", ""])).is_ok());
    check(&words(&["a", "b", "a"]), "token \"a\" appears twice");
    let number = with(entry("tokenizer.ggml.tokens", 4, &[0; 24]));
    check(&number, "tokens that are no texts");
    for epsilon in [-1.0, f32::NAN] {
        let entry = entry(
            "llama.attention.layer_norm_rms_epsilon",
            6,
            &epsilon.to_le_bytes(),
        );
        check(&with(entry), "epsilon is");
    }
}

#[test]
fn lengths_that_lie_end_at_the_end_of_the_file() {
    let long = [8u32.to_le_bytes().to_vec(), u64::MAX.to_le_bytes().to_vec()].concat();
    check(
        &file(&[entry("x", 9, &long)], &[tensor(&[64], 0, 0)], 256),
        "truncated",
    );
    let numbers = [5u32.to_le_bytes().to_vec(), u64::MAX.to_le_bytes().to_vec()].concat();
    check(
        &file(&[entry("x", 9, &numbers)], &[tensor(&[64], 0, 0)], 256),
        "truncated",
    );
    let text = u64::MAX.to_le_bytes();
    check(
        &file(&[entry("x", 8, &text)], &[tensor(&[64], 0, 0)], 256),
        "truncated",
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_make_the_reader_panic(places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = sample();
        for (place, value) in places {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        // Either answer is right, as what was hit may not matter.
        if let Err(error) = read_bytes(&bytes) {
            prop_assert!(!matches!(error, GgufError::Io(_)), "{error}");
        }
    }
}
