//! What must not be written, and what is written of places that must exist.

use crate::source_rules::Tree;

/// Words that no text file may hold: places of one machine, and hosts of package registries, which the
/// ordinary clients know by themselves. Cut in two so that this file passes.
const NOWHERE: [&str; 9] = [
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("shared/", "research"),
    concat!("shared/", "design"),
    concat!("index.crates", ".io"),
    concat!("static.crates", ".io"),
    concat!("py", "pi.org"),
    concat!("pythonhosted", ".org"),
    concat!("registry.npm", "js.org"),
];

/// Words that Rust sources may not hold: what is left to do is done, or written down as a known gap.
const NOT_IN_RUST: [&str; 3] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("#[al", "low("),
];

/// Endings of the files that are read for forbidden words.
const TEXTS: [&str; 9] = [
    ".rs", ".md", ".toml", ".sh", ".py", ".yml", ".yaml", ".json", ".ci/run",
];

/// Lines with a word that must not be there.
pub fn forbidden_words(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in tree.ending(&TEXTS) {
        let rust = match path.ends_with(".rs") {
            true => &NOT_IN_RUST[..],
            false => &[],
        };
        for (number, line) in text.lines().enumerate() {
            for word in NOWHERE.iter().chain(rust) {
                if line.contains(word) {
                    complaints.push(format!("{path}:{}: `{word}` must not be here", number + 1));
                }
            }
        }
    }
    complaints
}

/// Links in Markdown to files that are not there.
pub fn broken_links(tree: &Tree) -> Vec<String> {
    let places = tree.places();
    let mut complaints = Vec::new();
    for (path, text) in tree.ending(&[".md"]) {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        for link in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')'))
        {
            let target = link.0.split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            if !places.contains(resolve(folder, target).as_str()) {
                complaints.push(format!("{path}: the link to {target} leads nowhere"));
            }
        }
    }
    complaints
}

/// Paths between back-ticks in Markdown that are not there. Decisions are left out: they are history.
pub fn lost_paths(tree: &Tree) -> Vec<String> {
    const FOLDERS: [&str; 6] = [
        "gossip/", "migrate/", "node/", "tests/", "scripts/", "docs/",
    ];
    let places = tree.places();
    let mut complaints = Vec::new();
    for (path, text) in tree.ending(&[".md"]) {
        if path.starts_with("docs/decisions/") {
            continue;
        }
        for quoted in text.split('`').skip(1).step_by(2) {
            let plain = quoted
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-'));
            let known = FOLDERS.iter().any(|folder| quoted.starts_with(folder));
            if plain && known && !places.contains(quoted.trim_end_matches('/')) {
                complaints.push(format!("{path}: there is no `{quoted}`"));
            }
        }
    }
    complaints
}

/// Crates that do not take the lints of the workspace.
pub fn missing_lints(tree: &Tree) -> Vec<String> {
    tree.ending(&["/Cargo.toml"])
        .filter(|(_, text)| !text.contains("[lints]\nworkspace = true"))
        .map(|(path, _)| format!("{path}: takes no lints from the workspace"))
        .collect()
}

/// `target` as seen from `folder`, without `.` and `..`.
fn resolve(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(target.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}
