//! The fuzzers' work in short: each target over its corpus, and over mutations of it that a seed draws.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failure here is a failed test"
)]

mod corpus;

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shoal_tests::fuzz::TARGETS;

/// Mutations of each target; `SHOAL_FUZZ=n` makes as many. A few seconds in all.
const MUTATIONS: u64 = 50_000;

/// Longest input that is made.
const LONGEST: usize = 2_048;

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target)
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let entries = fs::read_dir(folder(target)).expect("each target has a corpus");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| fs::read(path).unwrap())
        .collect()
}

/// One to eight changes: bytes set, removed, repeated, put in, or taken from another input.
fn mutated(mut bytes: Vec<u8>, others: &[Vec<u8>], rng: &mut StdRng) -> Vec<u8> {
    for _ in 0..rng.random_range(1..=8) {
        let at = rng.random_range(0..=bytes.len());
        let length = rng.random_range(0..=(bytes.len() - at).min(32));
        match rng.random_range(0..6) {
            0 => bytes.insert(at, rng.random()),
            1 => drop(bytes.drain(at..at + length)),
            2 => {
                let again = bytes[at..at + length].to_vec();
                bytes.splice(at..at, again);
            }
            3 => {
                let other = &others[rng.random_range(0..others.len())];
                let from = rng.random_range(0..=other.len());
                let taken = rng.random_range(0..=(other.len() - from).min(64));
                bytes.splice(at..at + length, other[from..from + taken].iter().copied());
            }
            4 if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
            _ if at < bytes.len() => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF][rng.random_range(0..5)],
            _ => {}
        }
    }
    bytes.truncate(LONGEST);
    bytes
}

#[test]
fn each_target_has_a_binary_for_the_fuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        let source = fs::read_to_string(folder.join("targets").join(format!("{name}.rs")));
        let source = source.unwrap();
        assert!(source.contains(&format!("\"{name}\"")), "{source}");
        assert!(manifest.contains(&format!("path = \"targets/{name}.rs\"")));
    }
    let binaries = fs::read_dir(folder.join("targets")).unwrap().count();
    assert_eq!(binaries, TARGETS.len(), "binaries without a target");
}

#[test]
fn nothing_that_comes_in_breaks_a_decoder_or_a_core() {
    let mutations = std::env::var("SHOAL_FUZZ")
        .ok()
        .and_then(|text| text.parse().ok());
    for (name, target) in TARGETS {
        let corpus = corpus(name);
        assert!(!corpus.is_empty(), "the corpus of {name} is empty");
        corpus.iter().for_each(|bytes| target(bytes));
        for seed in 0..mutations.unwrap_or(MUTATIONS) {
            let mut rng = StdRng::seed_from_u64(seed);
            let bytes = mutated(
                corpus[rng.random_range(0..corpus.len())].clone(),
                &corpus,
                &mut rng,
            );
            let outcome = catch_unwind(|| target(&bytes));
            assert!(outcome.is_ok(), "{name}, seed {seed}: {bytes:?}");
        }
    }
}
