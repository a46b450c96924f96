//! Settings as written: one definition that is flags, environment, file keys, `--help` and
//! `docs/configuration.md`.
//!
//! The first paragraph of a field's comment says what it means, the second its unit and what a
//! larger or smaller value costs; [`describe`] takes them apart for the docs.

mod engine;
mod groups;

use clap::{Args, CommandFactory, FromArgMatches};
use serde::de::DeserializeOwned;
use toml::Table;

pub use engine::{EngineKv, RawEngine};
pub use groups::{RawBasics, RawDispatch, RawHttp, RawMesh, RawMoves};

/// All settings as written. Nothing is checked but the type of each value.
#[derive(Clone, Debug, Args)]
pub struct RawNode {
    /// See [`RawBasics`].
    #[command(flatten)]
    pub basics: RawBasics,
    /// See [`RawEngine`].
    #[command(flatten)]
    pub engine: RawEngine,
    /// See [`RawMesh`].
    #[command(flatten)]
    pub mesh: RawMesh,
    /// See [`RawDispatch`].
    #[command(flatten)]
    pub dispatch: RawDispatch,
    /// See [`RawMoves`].
    #[command(flatten)]
    pub moves: RawMoves,
    /// See [`RawHttp`].
    #[command(flatten)]
    pub http: RawHttp,
}

impl RawNode {
    /// The settings as a table with the keys of `shoal.toml`.
    pub(super) fn to_table(&self) -> Result<Table, toml::ser::Error> {
        let Self {
            basics,
            engine,
            mesh,
            dispatch,
            moves,
            http,
        } = self;
        let mut table = Table::try_from(basics)?;
        table.extend(Table::try_from(engine)?);
        table.extend(Table::try_from(mesh)?);
        table.extend(Table::try_from(dispatch)?);
        table.extend(Table::try_from(moves)?);
        table.extend(Table::try_from(http)?);
        Ok(table)
    }

    /// The settings in a table. Keys that no setting has are left alone: the caller has refused them.
    pub(super) fn from_table(table: &Table) -> Result<Self, toml::de::Error> {
        fn part<T: DeserializeOwned>(table: &Table) -> Result<T, toml::de::Error> {
            table.clone().try_into()
        }
        Ok(Self {
            basics: part(table)?,
            engine: part(table)?,
            mesh: part(table)?,
            dispatch: part(table)?,
            moves: part(table)?,
            http: part(table)?,
        })
    }

    /// The defaults, whatever environment the process has.
    ///
    /// # Errors
    /// Never in practice: the definition above is complete in itself, which a test holds.
    pub fn defaults() -> Result<Self, clap::Error> {
        let command = bare_command().mut_args(|arg| arg.env(None::<&str>));
        let matches = command.try_get_matches_from(["shoal"])?;
        Self::from_arg_matches(&matches)
    }
}

/// Only the settings, as a command of their own.
#[derive(Debug, clap::Parser)]
struct Bare {
    #[command(flatten)]
    _settings: RawNode,
}

/// The settings as a command: where their names, defaults and texts are found.
pub(super) fn bare_command() -> clap::Command {
    Bare::command()
        .disable_help_flag(true)
        .disable_version_flag(true)
}

/// One setting as the docs show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Heading it stands under in `--help`.
    pub group: String,
    /// Key in `shoal.toml`; the flag is `--key`, the variable `SHOAL_KEY` in capitals.
    pub key: String,
    /// What happens when it is not given.
    pub default: String,
    /// Unit of the value.
    pub unit: String,
    /// What it means.
    pub meaning: String,
    /// What a value costs.
    pub cost: String,
}

/// Every setting, in the order of `--help`. Empty texts stand for parts that a comment lacks.
pub fn describe() -> Vec<Described> {
    bare_command()
        .get_arguments()
        .map(|arg| {
            let text = arg
                .get_long_help()
                .or_else(|| arg.get_help())
                .map(ToString::to_string)
                .unwrap_or_default();
            let (meaning, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
            let (meaning, stated) = match meaning.split_once(" [default: ") {
                Some((meaning, stated)) => (meaning, stated.trim_end_matches(['.', ']'])),
                None => (meaning.trim_end_matches('.'), ""),
            };
            let (unit, cost) = rest.split_once(" Cost: ").unwrap_or((rest, ""));
            let typed: Vec<_> = arg
                .get_default_values()
                .iter()
                .map(|value| value.to_string_lossy())
                .collect();
            Described {
                group: arg.get_help_heading().unwrap_or_default().to_owned(),
                key: arg.get_long().unwrap_or_default().to_owned(),
                default: if typed.is_empty() {
                    stated.to_owned()
                } else {
                    typed.join(",")
                },
                unit: unit
                    .trim_start_matches("Unit: ")
                    .trim_end_matches('.')
                    .to_owned(),
                meaning: meaning.to_owned(),
                cost: cost.trim_end_matches('.').to_owned(),
            }
        })
        .collect()
}
