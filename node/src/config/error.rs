//! Why a configuration is refused. Nothing has been started or written in any of the cases.

use std::io;
use std::path::PathBuf;

/// Why a configuration is refused. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file named with `--config` cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not TOML, or a value in it has the wrong type.
    #[error("{}: {message}", path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// Where and why, over several lines.
        message: String,
    },
    /// The file has a key that no setting has.
    #[error("{}: there is no setting `{key}`{}", path.display(), hint(nearest.as_deref()))]
    UnknownKey {
        /// Which file.
        path: PathBuf,
        /// The key as written.
        key: String,
        /// The setting whose name is nearest, if one is near.
        nearest: Option<String>,
    },
    /// The flags or the environment are wrong in themselves.
    #[error(transparent)]
    Flags(#[from] clap::Error),
    /// A value, or a relation between values, does not hold.
    #[error("{key}: {wrong}; {remedy}")]
    Setting {
        /// The setting to change, as a flag.
        key: &'static str,
        /// What is wrong.
        wrong: String,
        /// What to do.
        remedy: String,
    },
}

fn hint(nearest: Option<&str>) -> String {
    match nearest {
        Some(nearest) => format!("; did you mean `{nearest}`?"),
        None => "; `shoal node --help` lists all settings".to_owned(),
    }
}
