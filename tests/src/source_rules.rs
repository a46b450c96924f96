//! The rules of the source tree that no lint checks: sizes, forbidden words, links, scripts.
//!
//! Each rule takes the [`Tree`] and returns its complaints, one line each; `scenarios/source_rules.rs`
//! asserts that there are none, and tries each rule on a sample that breaks it.

mod sizes;
mod words;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use sizes::{long_files, long_functions, mod_files, wide_functions};
pub use words::{broken_links, forbidden_words, lost_paths, missing_lints};

/// The text files of the repository, by path from its root.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    /// Path, with `/` between its parts, and content.
    pub files: Vec<(String, String)>,
}

impl Tree {
    /// The files git knows and those it would add; without git, all but build output.
    ///
    /// # Panics
    /// When the tree cannot be read.
    pub fn of_repository() -> Self {
        let root = Self::root();
        let mut paths = from_git(&root).unwrap_or_else(|| from_disk(&root));
        paths.sort();
        let files = paths
            .into_iter()
            .filter_map(|path| Some((fs::read_to_string(root.join(&path)).ok()?, path)))
            .map(|(text, path)| (path, text))
            .collect();
        Self { files }
    }

    /// A tree of made-up files.
    pub fn of_samples(files: &[(&str, &str)]) -> Self {
        Self {
            files: files
                .iter()
                .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
                .collect(),
        }
    }

    /// The root of the repository.
    pub fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .map(Path::to_path_buf)
            .unwrap_or_default()
    }

    /// The files with one of these endings.
    pub fn ending<'a>(&'a self, endings: &'a [&str]) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files
            .iter()
            .filter(|(path, _)| endings.iter().any(|ending| path.ends_with(ending)))
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Every path of a file and of a folder that holds one.
    fn places(&self) -> BTreeSet<&str> {
        let mut places = BTreeSet::new();
        for (path, _) in &self.files {
            places.insert(path.as_str());
            places.extend(path.match_indices('/').map(|(at, _)| &path[..at]));
        }
        places
    }
}

fn from_git(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git")
        .arg("-C")
        .arg(root)
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let list = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<String> = list
        .split('\0')
        .filter(|path| !path.is_empty())
        .map(str::to_owned)
        .collect();
    // An unpacked archive inside somebody else's repository is none of ours.
    paths
        .iter()
        .any(|path| path == "Cargo.toml")
        .then_some(paths)
}

fn from_disk(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let built = ["target", ".git", ".cache", "__pycache__"];
            if built.iter().any(|built| name == *built) {
                continue;
            }
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    if let Ok(path) = entry.path().strip_prefix(root) {
                        found.push(path.to_string_lossy().into_owned());
                    }
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
    found
}
