//! Latency profiles: facts about a GPU and a model, shipped or read from a file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;

use serde::Deserialize;
use shoal_gossip::Tokens;

use crate::engine::sim::StepModel;

/// The shipped profiles, each with its source.
const SHIPPED: &str = include_str!("profiles.json");

/// Largest profile file. Ten times the largest that we know of (71 KB for 15 profiles with points).
const MAX_FILE: u64 = 1 << 20;

/// Context of a profile that names none, if its KV holds as much.
const DEFAULT_CONTEXT: u32 = 8192;

/// Tokens a step of a profile that names none: vLLM's default with chunked prefill.
const DEFAULT_STEP_TOKENS: u32 = 2048;

/// What is known of one GPU (or group of them) with one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Its name in its file.
    pub name: String,
    /// The model, as clients name it by default.
    pub model: String,
    /// Time of a step.
    pub step: StepModel,
    /// Tokens of KV that fit beside the weights.
    pub kv: Tokens,
    /// Bytes of KV of one token, over all GPUs; zero if the file does not say.
    pub kv_bytes_per_token: u64,
    /// Longest sequence.
    pub context: Tokens,
    /// Tokens computed in one step at most.
    pub step_tokens: u32,
}

/// Why there is no such profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// No shipped profile has the name.
    #[error(
        "there is no latency profile `{name}`; shipped are {known}, and a path that ends in .json is read as a file"
    )]
    Unknown {
        /// As asked for.
        name: String,
        /// Names of the shipped ones.
        known: String,
    },
    /// The file cannot be read.
    #[error("cannot read the latency profiles in {path}: {error}")]
    File {
        /// As asked for.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("the latency profiles in {path} are damaged: {error}")]
    Damaged {
        /// As asked for.
        path: String,
        /// Where and why.
        error: serde_json::Error,
    },
    /// The file is larger than any such file.
    #[error("{path} is above {MAX_FILE} bytes, so it holds something else than latency profiles")]
    TooLarge {
        /// As asked for.
        path: String,
    },
    /// The file has several profiles, or not the one that was asked for.
    #[error("name one of the profiles in {path} as {path}#NAME, with NAME out of: {known}")]
    Choose {
        /// As asked for.
        path: String,
        /// Names in the file.
        known: String,
    },
    /// A figure of the profile cannot be.
    #[error("the latency profile `{name}` has a figure that is negative, zero or not a number")]
    Unsound {
        /// The profile.
        name: String,
    },
}

#[derive(Deserialize)]
struct RawFile {
    pairs: BTreeMap<String, RawPair>,
}

#[derive(Deserialize)]
struct RawPair {
    model: String,
    kv_capacity: RawCapacity,
    fits: RawFits,
    context: Option<u32>,
    step_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct RawCapacity {
    tokens: u32,
    #[serde(default)]
    kv_bytes_per_token_total: u64,
}

#[derive(Deserialize)]
struct RawFits {
    max_form: StepModel,
}

impl Profile {
    /// The profile of this name, or in this file: `PATH.json`, `PATH.json#NAME` if it has several.
    ///
    /// # Errors
    /// See [`ProfileError`].
    pub fn find(text: &str) -> Result<Self, ProfileError> {
        let (path, name) = match text.split_once('#') {
            Some((path, name)) => (path, Some(name)),
            None => (text, None),
        };
        if !path.ends_with(".json") {
            let shipped = read(SHIPPED, "this program")?;
            let known = names(&shipped);
            let chosen = pick(shipped, Some(text)).ok_or_else(|| ProfileError::Unknown {
                name: text.to_owned(),
                known,
            })?;
            return Self::try_from(chosen);
        }
        let pairs = read(&read_file(path)?, path)?;
        let known = names(&pairs);
        let chosen = pick(pairs, name).ok_or_else(|| ProfileError::Choose {
            path: path.to_owned(),
            known,
        })?;
        Self::try_from(chosen)
    }

    /// Names of the shipped profiles, for help texts.
    ///
    /// # Errors
    /// Never, unless the program was built from damaged data.
    pub fn shipped() -> Result<Vec<String>, ProfileError> {
        Ok(read(SHIPPED, "this program")?.into_keys().collect())
    }
}

impl TryFrom<(String, RawPair)> for Profile {
    type Error = ProfileError;

    fn try_from((name, pair): (String, RawPair)) -> Result<Self, Self::Error> {
        let kv = pair.kv_capacity.tokens;
        let context = pair.context.unwrap_or_else(|| DEFAULT_CONTEXT.min(kv));
        let step_tokens = pair.step_tokens.unwrap_or(DEFAULT_STEP_TOKENS);
        if !pair.fits.max_form.is_sound() || kv == 0 || context == 0 || step_tokens == 0 {
            return Err(ProfileError::Unsound { name });
        }
        Ok(Self {
            name,
            model: pair.model,
            step: pair.fits.max_form,
            kv: Tokens(kv),
            kv_bytes_per_token: pair.kv_capacity.kv_bytes_per_token_total,
            context: Tokens(context),
            step_tokens,
        })
    }
}

fn read_file(path: &str) -> Result<String, ProfileError> {
    let failed = |error| ProfileError::File {
        path: path.to_owned(),
        error,
    };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_FILE + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_FILE {
        return Err(ProfileError::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(text)
}

fn read(text: &str, path: &str) -> Result<BTreeMap<String, RawPair>, ProfileError> {
    let file: RawFile = serde_json::from_str(text).map_err(|error| ProfileError::Damaged {
        path: path.to_owned(),
        error,
    })?;
    Ok(file.pairs)
}

fn names(pairs: &BTreeMap<String, RawPair>) -> String {
    pairs.keys().cloned().collect::<Vec<_>>().join(", ")
}

fn pick(mut pairs: BTreeMap<String, RawPair>, name: Option<&str>) -> Option<(String, RawPair)> {
    match name {
        Some(name) => pairs.remove_entry(name),
        None if pairs.len() == 1 => pairs.pop_first(),
        None => None,
    }
}
