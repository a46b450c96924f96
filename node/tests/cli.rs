//! The binary as a person or a script meets it: exit codes, the environment layer, what is printed where.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `shoal` in `home` with nothing in its environment but `variables`.
fn shoal(home: &Path, args: &[&str], variables: &[(&str, &str)]) -> io::Result<Output> {
    Command::new(env!("CARGO_BIN_EXE_shoal"))
        .args(args)
        .env_clear()
        .env("HOME", home)
        .envs(variables.iter().copied())
        .current_dir(home)
        .output()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const CHECK: [&str; 4] = ["node", "--check", "--model", "m.gguf"];

#[test]
fn flags_beat_the_environment_and_the_environment_beats_the_file() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    fs::write(home.join("m.gguf"), b"GGUF").unwrap();
    fs::write(
        home.join("c.toml"),
        "http-port = 1001\nmesh-port = 2001\ncluster = 'file'\nmdns = true\n",
    )
    .unwrap();
    let args = [&CHECK[..], &["--http-port", "1003"]].concat();
    let variables = [
        ("SHOAL_CONFIG", "c.toml"),
        ("SHOAL_HTTP_PORT", "1002"),
        ("SHOAL_MESH_PORT", "2002"),
        ("SHOAL_MDNS", "no"),
        ("SHOAL_SEEDS", "a:1,b"),
    ];
    let output = shoal(home, &args, &variables).unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(text.contains("http://127.0.0.1:1003"), "{text}");
    assert!(text.contains("127.0.0.1:2002/udp"), "{text}");
    assert!(text.contains("`file`"), "{text}");
    assert!(text.contains("a:2, b:7401\n"), "{text}");
    assert!(text.contains("warning    NO CLUSTER KEY"), "{text}");
}

#[test]
fn check_exits_with_one_and_names_every_problem() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    fs::write(home.join("key"), "hello").unwrap();
    let args = [&CHECK[..], &["--cluster-key-file", "key"]].concat();
    let output = shoal(home, &args, &[]).unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("problem: --cluster-key-file key: a cluster key is 64 hex digits"),
        "{text}"
    );
    assert!(
        text.contains("problem: --model m.gguf: No such file"),
        "{text}"
    );
    assert!(text.contains("2 problems"), "{text}");
}

#[test]
fn a_wrong_flag_is_exit_two_and_a_wrong_relation_exit_one() {
    let home = tempfile::tempdir().unwrap();
    for (more, code, said) in [
        (["--http-prot", "1"], 2, "--http-port"),
        (["--http-port", "many"], 2, "--http-port"),
        (["--policy", "best"], 2, "p2c"),
        (["--listen", "10.0.0.1"], 1, "shoal keygen"),
        (["--config", "none.toml"], 1, "none.toml"),
    ] {
        let args = [&CHECK[..], &more].concat();
        let output = shoal(home.path(), &args, &[]).unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn a_wrong_variable_names_itself() {
    let home = tempfile::tempdir().unwrap();
    let output = shoal(
        home.path(),
        &CHECK,
        &[("SHOAL_HTTP_PORT", "tcp://10.0.0.1:80")],
    )
    .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("--http-port"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_new_key_goes_where_it_is_asked_and_is_then_accepted() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    fs::write(home.join("m.gguf"), b"GGUF").unwrap();
    let made = shoal(home, &["keygen", "--out", "k"], &[]).unwrap();
    assert_eq!(made.status.code(), Some(0), "{}", stderr(&made));
    let again = shoal(home, &["keygen", "--out", "k"], &[]).unwrap();
    assert_eq!(again.status.code(), Some(1));
    assert!(
        stderr(&again).contains("left as it is"),
        "{}",
        stderr(&again)
    );
    let args = [
        &CHECK[..],
        &["--cluster-key-file", "k", "--listen", "10.0.0.1"],
    ]
    .concat();
    let checked = shoal(home, &args, &[]).unwrap();
    assert_eq!(checked.status.code(), Some(0), "{}", stderr(&checked));
    let printed = stdout(&shoal(home, &["keygen"], &[]).unwrap());
    let from_text = shoal(home, &CHECK, &[("SHOAL_CLUSTER_KEY", &printed)]).unwrap();
    assert_eq!(from_text.status.code(), Some(0), "{}", stderr(&from_text));
    assert!(
        !stdout(&from_text).contains(printed.trim()),
        "the key is shown"
    );
}

#[test]
fn status_of_nobody_says_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    // Port 1 is reserved and nobody listens there.
    let args = ["status", "--node", "127.0.0.1:1"];
    let output = shoal(home.path(), &args, &[]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("is it running"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn help_gives_default_unit_and_cost() {
    let home = tempfile::tempdir().unwrap();
    let output = shoal(home.path(), &["node", "--help"], &[]).unwrap();
    let text = stdout(&output);
    for part in [
        "--lease-ms",
        "SHOAL_LEASE_MS",
        "[default: 5000]",
        "Unit: milliseconds",
        "Cost:",
    ] {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}

#[test]
fn a_move_by_hand_wants_names_that_exist_and_a_node_that_answers() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let output = shoal(home, &["migrate", "x", "--to", "y"], &[]).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("request id"),
        "{}",
        stderr(&output)
    );
    let id = "11111112-00000000000000ab";
    let output = shoal(home, &["migrate", id], &[]).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--to"), "{}", stderr(&output));
    // Port 1 is never served.
    let args = [
        "migrate",
        id,
        "--to",
        "11111113",
        "--node",
        "http://127.0.0.1:1",
    ];
    let output = shoal(home, &args, &[]).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("is it running"),
        "{}",
        stderr(&output)
    );
}
