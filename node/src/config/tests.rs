//! Helpers for the tests of the parts, and what holds for all settings together.

use clap::ArgMatches;

use super::raw::bare_command;
use super::*;

/// Matches of a command line, whatever environment the tests run in.
pub(super) fn matches(args: &[&str]) -> ArgMatches {
    bare_command()
        .mut_args(|arg| arg.env(None::<&str>))
        .no_binary_name(true)
        .try_get_matches_from(args)
        .unwrap()
}

/// Surroundings with a home, two cores and nothing else.
pub(super) fn surroundings() -> Surroundings {
    Surroundings {
        cores: 2,
        data_home: Some("/home/fish/.local/share".into()),
        ..Surroundings::default()
    }
}

/// The configuration that a command line gives.
pub(super) fn sample(args: &[&str]) -> NodeConfig {
    load(&matches(args), None, &surroundings()).unwrap()
}

#[test]
fn every_setting_has_one_name_in_three_spellings_and_a_full_text() {
    for (described, arg) in describe().iter().zip(bare_command().get_arguments()) {
        let key = &described.key;
        let variable = format!("SHOAL_{}", key.replace('-', "_").to_uppercase());
        assert_eq!(
            arg.get_env().and_then(|name| name.to_str()),
            Some(&*variable)
        );
        assert_eq!(arg.get_id().as_str(), key.replace('-', "_"));
        let Described {
            group,
            default,
            unit,
            meaning,
            cost,
            ..
        } = described;
        for (part, text) in [
            ("group", group),
            ("default", default),
            ("unit", unit),
            ("meaning", meaning),
            ("cost", cost),
        ] {
            assert!(!text.is_empty(), "--{key} lacks its {part}");
            assert!(
                !text.contains(['|', '\n']),
                "--{key}: {part} breaks a table"
            );
        }
    }
}

#[test]
fn the_defaults_stand_on_their_own() {
    let raw = RawNode::defaults().unwrap();
    assert_eq!(raw.http.http_port, 8080);
    assert_eq!(raw.mesh.mesh_port, DEFAULT_MESH_PORT);
}

#[test]
fn a_cluster_key_is_never_printed() {
    let key = KeySource::Text("secret".to_owned());
    assert!(!format!("{key:?}").contains("secret"));
}

/// The tables of `docs/configuration.md`, one for each group.
fn tables() -> String {
    let mut text = String::new();
    let mut group = String::new();
    for setting in describe() {
        if setting.group != group {
            group.clone_from(&setting.group);
            text.push_str(&format!(
                "\n### {group}\n\n| key | default | unit | meaning | cost |\n|---|---|---|---|---|\n"
            ));
        }
        text.push_str(&format!(
            "| `{}` | {} | {} | {} | {} |\n",
            setting.key, setting.default, setting.unit, setting.meaning, setting.cost
        ));
    }
    text.push('\n');
    text
}

#[test]
fn the_docs_show_every_setting_as_help_does() {
    const BEGIN: &str = "<!-- settings: written by the test, see below -->\n";
    const END: &str = "<!-- end of settings -->\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    let docs = std::fs::read_to_string(path).unwrap();
    let (before, rest) = docs.split_once(BEGIN).unwrap();
    let (shown, after) = rest.split_once(END).unwrap();
    if std::env::var_os("SHOAL_UPDATE_DOCS").is_some() {
        std::fs::write(path, [before, BEGIN, &tables(), END, after].concat()).unwrap();
        return;
    }
    assert_eq!(
        shown,
        tables(),
        "docs/configuration.md is behind; SHOAL_UPDATE_DOCS=1 with this test writes it"
    );
}
