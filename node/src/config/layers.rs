//! Putting the layers together: defaults < file < environment < flags.

use std::fs;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};
use toml::Table;

use crate::config::check::{Surroundings, check};
use crate::config::raw::bare_command;
use crate::config::{ConfigError, NodeConfig, RawNode};

/// Likeness (Jaro-Winkler, 0 to 1) from which a name is offered as "did you mean"; clap's own bound
/// for flags is 0.7, too, so that the three spellings of a setting are helped alike.
const NEAR: f64 = 0.7;

/// Variables with our prefix that are no settings of a node: handled by the program itself.
const OTHER_VARIABLES: [&str; 4] = [
    "SHOAL_CLUSTER_KEY",
    "SHOAL_CONFIG",
    "SHOAL_NODE",
    "SHOAL_API_KEY",
];

/// Reads the layers and checks every relation.
///
/// `matches` are those of a command that has [`RawNode`]'s arguments; the environment is in them.
///
/// # Errors
/// The first thing that is wrong, with what to do about it.
pub fn load(
    matches: &ArgMatches,
    file: Option<&Path>,
    surroundings: &Surroundings,
) -> Result<NodeConfig, ConfigError> {
    let written = RawNode::from_arg_matches(matches)?;
    let mut given = Given::from_matches(matches);
    let raw = match file {
        None => written,
        Some(path) => {
            let table = read_file(path)?;
            given.extend(table.keys());
            overlay(&written, &table, path, matches)?
        }
    };
    let mut config = check(raw, &given, surroundings)?;
    config.warnings.extend(unknown_variables(surroundings));
    Ok(config)
}

/// A configuration from flags alone, whatever environment the process has: for parts of the program
/// that start nodes themselves.
///
/// # Errors
/// As [`load`].
pub fn from_flags<'a>(flags: impl IntoIterator<Item = &'a str>) -> Result<NodeConfig, ConfigError> {
    let command = bare_command().mut_args(|arg| arg.env(None::<&str>));
    let matches = command.try_get_matches_from(["shoal"].into_iter().chain(flags))?;
    load(&matches, None, &Surroundings::default())
}

/// Which settings somebody gave, as opposed to those that stand at their default.
#[derive(Clone, Debug, Default)]
pub(super) struct Given(Vec<String>);

impl Given {
    fn from_matches(matches: &ArgMatches) -> Self {
        let keys = bare_command()
            .get_arguments()
            .filter(|arg| is_explicit(matches, arg.get_id().as_str()))
            .filter_map(|arg| arg.get_long().map(str::to_owned))
            .collect();
        Self(keys)
    }

    fn extend<'a>(&mut self, keys: impl Iterator<Item = &'a String>) {
        self.0.extend(keys.cloned());
    }

    /// Whether flag, environment or file named this key.
    pub(super) fn has(&self, key: &str) -> bool {
        self.0.iter().any(|given| given == key)
    }
}

fn is_explicit(matches: &ArgMatches, id: &str) -> bool {
    matches!(
        matches.value_source(id),
        Some(ValueSource::CommandLine | ValueSource::EnvVariable)
    )
}

/// Reads `shoal.toml` and refuses keys that no setting has.
fn read_file(path: &Path) -> Result<Table, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| ConfigError::Malformed {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
    let command = bare_command();
    let known: Vec<&str> = command
        .get_arguments()
        .filter_map(clap::Arg::get_long)
        .collect();
    match table.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(ConfigError::UnknownKey {
            path: path.to_owned(),
            key: key.clone(),
            nearest: nearest(key, &known),
        }),
        None => Ok(table),
    }
}

/// Lays the file over the defaults, and what flags and environment gave over both.
fn overlay(
    written: &RawNode,
    file: &Table,
    path: &Path,
    matches: &ArgMatches,
) -> Result<RawNode, ConfigError> {
    let malformed = |message: String| ConfigError::Malformed {
        path: path.to_owned(),
        message,
    };
    let flags = written
        .to_table()
        .map_err(|error| malformed(error.to_string()))?;
    let mut all = flags.clone();
    all.extend(file.clone());
    // Read once before flags go on top: a wrong type in the file is refused even where it is overruled.
    RawNode::from_table(&all).map_err(|error| malformed(error.to_string()))?;
    for (key, value) in flags {
        if is_explicit(matches, &key.replace('-', "_")) {
            all.insert(key, value);
        }
    }
    RawNode::from_table(&all).map_err(|error| malformed(error.to_string()))
}

/// The name most like `wrong`, if any is like it.
fn nearest(wrong: &str, names: &[&str]) -> Option<String> {
    let wrong = wrong.replace('_', "-").to_lowercase();
    names
        .iter()
        .map(|name| (strsim::jaro_winkler(&wrong, name), *name))
        .filter(|(likeness, _)| *likeness > NEAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name.to_owned())
}

/// One line for each `SHOAL_*` variable that means nothing.
///
/// Not refused: Kubernetes sets variables with our prefix by itself as soon as a service is called
/// `shoal-…`, and a node that will not start for that is a riddle at three in the morning.
fn unknown_variables(surroundings: &Surroundings) -> Vec<String> {
    let command = bare_command();
    let known: Vec<String> = command
        .get_arguments()
        .filter_map(|arg| arg.get_env())
        .filter_map(|name| name.to_str())
        .chain(OTHER_VARIABLES)
        .map(str::to_owned)
        .collect();
    let names: Vec<String> = known.iter().map(|name| plain(name)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    surroundings
        .variables
        .iter()
        .filter(|name| !known.contains(name))
        .map(|name| match nearest(&plain(name), &names) {
            Some(near) => format!(
                "the environment variable {name} means nothing here; did you mean SHOAL_{}?",
                near.replace('-', "_").to_uppercase()
            ),
            None => format!("the environment variable {name} means nothing here"),
        })
        .collect()
}

/// A variable's name as a key: the shared prefix would make all names alike.
fn plain(variable: &str) -> String {
    variable
        .trim_start_matches("SHOAL_")
        .replace('_', "-")
        .to_lowercase()
}

#[cfg(test)]
mod tests;
