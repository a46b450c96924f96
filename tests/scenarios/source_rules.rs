//! The rules of the source tree hold, and each of them finds what it is for.

use std::process::Command;

use shoal_tests::source_rules::{
    Tree, broken_links, forbidden_words, long_files, long_functions, lost_paths, missing_lints,
    mod_files, wide_functions,
};

type Rule = fn(&Tree) -> Vec<String>;

#[test]
fn the_source_tree_follows_its_rules() {
    let tree = Tree::of_repository();
    assert!(
        tree.files.len() > 20,
        "only {} files found",
        tree.files.len()
    );
    let rules: [Rule; 8] = [
        long_files,
        long_functions,
        wide_functions,
        mod_files,
        forbidden_words,
        broken_links,
        lost_paths,
        missing_lints,
    ];
    let complaints: Vec<String> = rules.iter().flat_map(|rule| rule(&tree)).collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// Tries a rule on one file: how many complaints it has.
#[track_caller]
fn check(rule: Rule, path: &str, text: &str, complaints: usize) {
    let found = rule(&Tree::of_samples(&[(path, text)]));
    assert_eq!(found.len(), complaints, "{found:?}");
}

#[test]
fn sizes_are_limited_at_their_edge() {
    let file = |lines: usize| "// line\n".repeat(lines);
    check(long_files, "node/src/a.rs", &file(500), 0);
    check(long_files, "node/src/a.rs", &file(501), 1);
    let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
    check(long_functions, "node/src/a.rs", &function(70), 0);
    check(long_functions, "node/src/a.rs", &function(71), 1);
    check(
        long_functions,
        "node/src/a.rs",
        &format!("impl A {{ {} }}", function(71)),
        1,
    );
    check(
        wide_functions,
        "node/src/a.rs",
        "fn f(a: A, b: A, c: A, d: A, e: A) {}",
        0,
    );
    check(
        wide_functions,
        "node/src/a.rs",
        "fn f(a: A, b: A, c: A, d: A, e: A, f: A) {}",
        1,
    );
    let method = "impl S { fn f(&self, a: A, b: A, c: A, d: A, e: A) {} }";
    check(wide_functions, "node/src/a.rs", method, 0);
    check(mod_files, "node/src/a/mod.rs", "", 1);
}

#[test]
fn tests_may_be_as_long_as_they_like() {
    let long = format!("fn f() {{\n{}}}\n", "    g();\n".repeat(600));
    check(
        long_files,
        "node/src/a.rs",
        &format!("#[cfg(test)]\nmod tests {{\n{long}}}\n"),
        0,
    );
    check(
        long_functions,
        "node/src/a.rs",
        &format!("#[cfg(test)]\nmod tests {{\n{long}}}\n"),
        0,
    );
    check(
        long_functions,
        "node/src/a.rs",
        &format!("#[tokio::test]\nasync {long}"),
        0,
    );
    let apart = Tree::of_samples(&[
        ("node/src/a.rs", "#[cfg(test)]\nmod deep;\nmod real;\n"),
        ("node/src/a/deep.rs", &long),
        ("node/src/a/real.rs", &long),
        ("node/src/lib.rs", "#[cfg(test)]\nmod top;\n"),
        ("node/src/top.rs", &long),
        ("node/tests/cli.rs", &long),
        ("tests/scenarios/b.rs", &long),
    ]);
    let found = [long_files(&apart), long_functions(&apart)].concat();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found
            .iter()
            .all(|complaint| complaint.starts_with("node/src/a/real.rs"))
    );
}

#[test]
fn words_and_places_are_checked() {
    let left_to_do = concat!("// TO", "DO: later");
    check(forbidden_words, "a.rs", left_to_do, 1);
    check(forbidden_words, "a.md", left_to_do, 0);
    check(forbidden_words, "a.md", concat!("see /wo", "rk/x"), 1);
    let page = "[a](other.md) [b](../README.md#top) [c](https://x.org/y) [d](#here)";
    let tree = Tree::of_samples(&[
        ("docs/page.md", page),
        ("README.md", ""),
        ("docs/other.md", ""),
    ]);
    assert_eq!(broken_links(&tree), [""; 0]);
    check(broken_links, "docs/page.md", page, 2);
    let tree = Tree::of_samples(&[
        (
            "docs/page.md",
            "`node/src/` `node/src/a.rs` `node/src/b.rs` `node/{a,b}.rs` `x/y`",
        ),
        ("node/src/a.rs", ""),
    ]);
    assert_eq!(lost_paths(&tree).len(), 1);
    check(missing_lints, "node/Cargo.toml", "[package]\n", 1);
    check(
        missing_lints,
        "node/Cargo.toml",
        "[lints]\nworkspace = true\n",
        0,
    );
}

#[test]
fn every_script_can_be_read_by_what_runs_it() {
    let tree = Tree::of_repository();
    let root = Tree::root();
    let mut scripts = 0;
    for (path, text) in tree.ending(&[".sh", ".ci/run"]) {
        let output = Command::new("bash")
            .arg("-n")
            .arg(root.join(path))
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            path.ends_with("lib.sh") || text.contains("\nset -euo pipefail\n"),
            "{path} goes on after an error"
        );
        scripts += 1;
    }
    assert!(scripts > 4, "only {scripts} scripts found");
    for (path, _) in tree.ending(&[".py"]) {
        let compile = "import sys; compile(open(sys.argv[1]).read(), sys.argv[1], 'exec')";
        let python = Command::new("python3")
            .args(["-c", compile])
            .arg(root.join(path))
            .output();
        // A machine that only builds has no Python; the scripts that need it install it.
        if let Ok(output) = python {
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
}
