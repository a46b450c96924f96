//! Flags and files that say the same, and what is refused.

use std::fs;

use clap::Parser;

use super::*;
use crate::workload::Workload;

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    workload: WorkloadArgs,
}

fn args(text: &str) -> Result<WorkloadArgs, clap::Error> {
    let words = std::iter::once("test").chain(text.split_whitespace());
    Command::try_parse_from(words).map(|command| command.workload)
}

fn spec(text: &str) -> Result<WorkloadSpec, WorkloadError> {
    args(text).expect("flags").spec()
}

/// What is said of flags or a file that make no workload.
fn refusal(text: &str) -> String {
    match args(text) {
        Ok(args) => args.spec().expect_err(text).to_string(),
        Err(error) => error.to_string(),
    }
}

/// A file in a folder that goes when both are dropped.
fn file(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    fs::write(&path, text).expect("written");
    let path = path.to_str().expect("text").to_owned();
    (folder, path)
}

const FLAGS: &str =
    "--lengths azure-conv --arrivals gamma:2 --rate 8 --requests 50 --max-tokens-total 4096";

#[test]
fn flags_json_and_toml_say_the_same() {
    let by_flags = spec(FLAGS).expect("sound");
    let (_json, json) = file(
        "w.json",
        r#"{"lengths": "azure-conv", "arrivals": "gamma:2", "rate": 8, "requests": 50, "max-tokens-total": 4096}"#,
    );
    let (_toml, toml) = file(
        "w.toml",
        "lengths = 'azure-conv'\narrivals = 'gamma:2'\nrate = 8\nrequests = 50\nmax-tokens-total = 4096\n",
    );
    for path in [json, toml] {
        assert_eq!(
            spec(&format!("--workload {path}")).expect("sound"),
            by_flags
        );
    }
}

#[test]
fn a_spec_reads_back_as_it_was_written() {
    for spec in [spec(FLAGS).expect("sound"), WorkloadSpec::default()] {
        let json = serde_json::to_string(&spec).expect("written");
        assert_eq!(
            serde_json::from_str::<WorkloadSpec>(&json).expect(&json),
            spec
        );
        let toml = toml::to_string(&spec).expect("written");
        assert_eq!(toml::from_str::<WorkloadSpec>(&toml).expect(&toml), spec);
    }
}

#[test]
fn a_flag_wins_over_the_file() {
    let (_folder, path) = file("w.toml", "rate = 8\nrequests = 50\n");
    let spec = spec(&format!("--workload {path} --rate 9.5")).expect("sound");
    assert_eq!((spec.rate, spec.requests), (Some(9.5), Some(50)));
}

#[test]
fn a_trace_in_a_file_is_looked_for_beside_it() {
    let (folder, path) = file("w.json", r#"{"trace": "t.csv", "trace-speed": 2.0}"#);
    let rows = "arrival_s,prompt_tokens,output_tokens\n4,10,20\n6,30,40\n";
    fs::write(folder.path().join("t.csv"), rows).expect("written");
    let spec = spec(&format!("--workload {path} --max-tokens-total 25")).expect("sound");
    let found: Vec<_> = Workload::new(&spec, 0)
        .expect("a trace")
        .map(|arrival| (arrival.at.as_secs_f64(), arrival.prompt.0, arrival.output.0))
        .collect();
    assert_eq!(found, [(0.0, 10, 15), (1.0, 24, 1)]);
}

#[test]
fn a_trace_excludes_what_it_decides_itself() {
    for (flags, key) in [
        ("--lengths sharegpt", "lengths"),
        ("--arrivals poisson", "arrivals"),
        ("--rate 2", "rate"),
    ] {
        let message = refusal(&format!("--trace t.csv {flags}"));
        assert!(
            message.contains(&format!("`trace` or `{key}`")),
            "{message}"
        );
    }
    assert!(refusal("--trace-speed 2").contains("needs a `trace`"));
    assert!(spec("--trace t.csv --trace-speed 2 --requests 5").is_ok());
}

#[test]
fn figures_that_cannot_be_are_refused_by_name() {
    for (flags, key) in [
        ("--rate 0", "`rate`"),
        ("--rate=-1", "`rate`"),
        ("--rate nan", "`rate`"),
        ("--rate inf", "`rate`"),
        ("--trace t.csv --trace-speed 0", "`trace-speed`"),
        ("--requests 0", "`requests`"),
        ("--requests 2000000000", "`requests`"),
        ("--max-tokens-total 1", "`max-tokens-total`"),
        ("--lengths sharegtp", "did you mean `sharegpt`?"),
        ("--arrivals poison", "known are poisson"),
    ] {
        let message = refusal(flags);
        assert!(message.contains(key), "{message}");
    }
    let unsound = WorkloadSpec {
        arrivals: Some(Arrivals::Gamma { cv: 0.0 }),
        ..WorkloadSpec::default()
    };
    assert!(Workload::new(&unsound, 0).is_err());
}

#[test]
fn a_file_that_is_no_workload_says_what_is_wrong() {
    for (name, text, says) in [
        ("w.yaml", "", "must end in .json or .toml"),
        ("w.json", "{", "no workload"),
        ("w.json", r#"{"rates": 2}"#, "unknown field `rates`"),
        ("w.toml", "lengths = 'shareGTP'", "did you mean `sharegpt`?"),
        ("w.toml", "arrivals = 'gamma'", "gamma:CV"),
        ("w.toml", "rate = 0", "`rate` must be"),
    ] {
        let (_folder, path) = file(name, text);
        let message = refusal(&format!("--workload {path}"));
        assert!(message.contains(says), "{message}");
    }
    let (_folder, path) = file("w.json", &" ".repeat(70_000));
    assert!(refusal(&format!("--workload {path}")).contains("above 65536 bytes"));
    assert!(refusal("--workload nowhere.json").contains("cannot read nowhere.json"));
}
