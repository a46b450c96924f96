use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::config::EngineKind;
use crate::config::tests::{matches, surroundings};
use crate::dispatch::PolicyName;

const MODEL: [&str; 2] = ["--model", "m.gguf"];

fn file(text: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shoal.toml");
    fs::write(&path, text).unwrap();
    (dir, path)
}

fn with_file(args: &[&str], text: &str) -> Result<NodeConfig, ConfigError> {
    let (_dir, path) = file(text);
    load(&matches(args), Some(&path), &surroundings())
}

fn refusal(text: &str) -> String {
    with_file(&MODEL, text).unwrap_err().to_string()
}

#[test]
fn a_flag_beats_the_file_and_the_file_beats_the_default() {
    let text = "http-port = 81\nmesh-port = 71\npolicy = 'random'\nmodel = 'file.gguf'\nphi = 9\n";
    let config = with_file(&["--http-port", "82", "--model", "flag.gguf"], text).unwrap();
    assert_eq!(config.http.listen.port(), 82);
    assert_eq!(config.mesh.control.port(), 71);
    assert_eq!(config.mesh.stream.port(), 72);
    assert_eq!(config.dispatch.policy, PolicyName::Random);
    assert_eq!(config.gossip.phi, 9.0);
    assert_eq!(config.engine.queue_limit, 64);
    let EngineKind::Llama(llama) = config.engine.kind else {
        panic!("not llama: {:?}", config.engine);
    };
    assert_eq!(llama.model, PathBuf::from("flag.gguf"));
}

#[test]
fn a_flag_that_repeats_the_default_still_beats_the_file() {
    let config = with_file(
        &[
            "--http-port",
            "8080",
            "--reproducible=false",
            "--model",
            "m",
        ],
        "http-port = 81\nreproducible = true\n",
    )
    .unwrap();
    assert_eq!(config.http.listen.port(), 8080);
    let EngineKind::Llama(llama) = config.engine.kind else {
        panic!("not llama: {:?}", config.engine);
    };
    assert!(!llama.reproducible);
}

#[test]
fn seeds_in_the_file_are_a_list_or_the_text_a_flag_would_take() {
    for text in ["seeds = ['a:1', 'b:2']", "seeds = 'a:1,b:2'"] {
        assert_eq!(with_file(&MODEL, text).unwrap().mesh.seeds, ["a:2", "b:3"]);
    }
    let flags = with_file(
        &["--seeds", "c:3", "--seeds", "d:4,e:5", "--model", "m"],
        "seeds = 'a'",
    );
    assert_eq!(flags.unwrap().mesh.seeds, ["c:4", "d:5", "e:6"]);
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_name() {
    let text = refusal("http_port = 1");
    assert!(
        text.contains("no setting `http_port`; did you mean `http-port`?"),
        "{text}"
    );
    let text = refusal("mesh-prot = 1");
    assert!(text.contains("did you mean `mesh-port`?"), "{text}");
    let text = refusal("zzz = 1");
    assert!(
        text.contains("no setting `zzz`; `shoal node --help`"),
        "{text}"
    );
    let text = refusal("[http]\nport = 1");
    assert!(text.contains("no setting `http`"), "{text}");
}

#[test]
fn a_wrong_type_in_the_file_is_refused_even_where_a_flag_overrules_it() {
    let error = with_file(&["--http-port", "1", "--model", "m"], "http-port = 'many'");
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("shoal.toml") && text.contains("http-port"),
        "{text}"
    );
    assert!(refusal("http-port = 70000").contains("http-port"));
    assert!(refusal("policy = 'best'").contains("p2c"));
    assert!(refusal("reproducible = 'yes'").contains("reproducible"));
}

#[test]
fn a_file_that_is_no_toml_or_not_there_is_named() {
    assert!(refusal("http-port: 1").contains("shoal.toml"));
    let missing = load(
        &matches(&MODEL),
        Some(Path::new("none.toml")),
        &surroundings(),
    );
    assert!(missing.unwrap_err().to_string().contains("none.toml"));
}

#[test]
fn a_variable_that_means_nothing_is_warned_of_and_never_refused() {
    let surroundings = Surroundings {
        variables: [
            "SHOAL_CLUSTER_KEY",
            "SHOAL_HTTP_PORT",
            "SHOAL_HTTPPORT",
            "SHOAL_SERVICE_HOST",
        ]
        .map(str::to_owned)
        .to_vec(),
        ..surroundings()
    };
    let config = load(&matches(&MODEL), None, &surroundings).unwrap();
    let about = |name: &str| {
        config
            .warnings
            .iter()
            .find(|warning| warning.contains(&format!("variable {name} ")))
    };
    assert!(about("SHOAL_CLUSTER_KEY").is_none());
    assert!(about("SHOAL_HTTP_PORT").is_none());
    assert!(
        about("SHOAL_HTTPPORT")
            .unwrap()
            .contains("did you mean SHOAL_HTTP_PORT?")
    );
    assert!(about("SHOAL_SERVICE_HOST").is_some());
}
