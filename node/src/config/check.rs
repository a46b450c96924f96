//! From settings as written to a configuration that holds: every relation, in one place.
//!
//! Pure: what the process is surrounded by comes in as a value.

mod engine;
mod mesh;
mod moves;

use std::env;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tracing_subscriber::EnvFilter;

pub(crate) use self::engine::kv_folder_of;
use crate::config::layers::Given;
use crate::config::raw::{RawBasics, RawDispatch, RawHttp, RawMesh};
use crate::config::{
    ConfigError, DispatchSettings, GossipSettings, HttpSettings, LogSettings, MAX_BODY_BYTES,
    NodeConfig, RawNode, ShutdownSettings, TlsFiles,
};
use crate::mesh::messages::MAX_EXCLUDED;

/// Gossip rounds that must fit into the age bound. A load needs about two rounds to arrive, and one
/// lost datagram costs one more; with fewer than four, nodes would drop out of the view at random.
const ROUNDS_IN_VIEW_AGE: u64 = 4;

/// What the process is surrounded by, as far as the configuration depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Cores this process may use; 0 when unknown.
    pub cores: usize,
    /// `XDG_DATA_HOME`, or `HOME/.local/share`; `None` when neither is set.
    pub data_home: Option<PathBuf>,
    /// `SHOAL_CLUSTER_KEY`.
    pub cluster_key: Option<String>,
    /// `RUST_LOG`.
    pub rust_log: Option<String>,
    /// Names of all variables that start with `SHOAL_`.
    pub variables: Vec<String>,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process() -> Self {
        let path = |name| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let text = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let mut variables: Vec<String> = env::vars_os()
            .filter_map(|(name, _)| name.into_string().ok())
            .filter(|name| name.starts_with("SHOAL_"))
            .collect();
        variables.sort();
        Self {
            cores: thread::available_parallelism().map_or(0, usize::from),
            data_home: path("XDG_DATA_HOME")
                .or_else(|| path("HOME").map(|home| home.join(".local/share"))),
            cluster_key: text("SHOAL_CLUSTER_KEY"),
            rust_log: text("RUST_LOG"),
            variables,
        }
    }
}

/// Checks every value and every relation.
pub(super) fn check(
    raw: RawNode,
    given: &Given,
    surroundings: &Surroundings,
) -> Result<NodeConfig, ConfigError> {
    let RawNode {
        basics,
        engine,
        mesh,
        dispatch,
        moves,
        http,
    } = raw;
    let data_dir = data_dir(basics.data_dir.as_deref(), surroundings)?;
    let shutdown = ShutdownSettings {
        deadline: millis(
            "--shutdown-deadline-ms",
            basics.shutdown_deadline_ms,
            0..=3_600_000,
        )?,
    };
    let log = log(&basics, given, surroundings)?;
    let listen = mesh::listen_address(&basics.listen)?;
    let gossip = gossip(&mesh)?;
    let mut warnings = Vec::new();
    let dispatch = self::dispatch(&dispatch, &gossip)?;
    let moves = moves::check(&moves)?;
    let engine = engine::check(engine, &data_dir, given, surroundings)?;
    let mesh = mesh::check(mesh, &basics, listen, surroundings, &mut warnings)?;
    let http = self::http(http, listen)?;
    if http.api_key_file.is_none() && !listen.is_loopback() {
        warnings.push(format!(
            "clients need no API key: everyone who reaches {} may use this mesh; name keys with --api-key-file",
            http.listen
        ));
    }
    Ok(NodeConfig {
        data_dir,
        http,
        mesh,
        gossip,
        engine,
        dispatch,
        moves,
        shutdown,
        log,
        warnings,
    })
}

/// Where a node keeps what is its own, as named or by default.
pub(crate) fn data_dir(
    named: Option<&Path>,
    surroundings: &Surroundings,
) -> Result<PathBuf, ConfigError> {
    if let Some(named) = named {
        return Ok(named.to_owned());
    }
    match &surroundings.data_home {
        Some(home) => Ok(home.join("shoal")),
        None => Err(wrong(
            "--data-dir",
            "there is no home directory to put the identity in",
            "name a directory that survives restarts",
        )),
    }
}

fn log(
    basics: &RawBasics,
    given: &Given,
    surroundings: &Surroundings,
) -> Result<LogSettings, ConfigError> {
    let inherited = surroundings.rust_log.clone().filter(|_| !given.has("log"));
    let filter = inherited.unwrap_or_else(|| basics.log.clone());
    if let Err(error) = EnvFilter::try_new(&filter) {
        return Err(wrong(
            "--log",
            format!("`{filter}` is not a filter: {error}"),
            "give a level (error, warn, info, debug, trace) or pairs such as \
             `info,shoal_node=debug`; it may also come from RUST_LOG",
        ));
    }
    Ok(LogSettings {
        filter,
        format: basics.log_format,
    })
}

fn gossip(raw: &RawMesh) -> Result<GossipSettings, ConfigError> {
    Ok(GossipSettings {
        interval: millis("--gossip-interval-ms", raw.gossip_interval_ms, 50..=10_000)?,
        phi: within("--phi", raw.phi, 1.0..=32.0)?,
    })
}

fn dispatch(raw: &RawDispatch, gossip: &GossipSettings) -> Result<DispatchSettings, ConfigError> {
    let settings = DispatchSettings {
        policy: raw.policy,
        max_view_age: millis("--max-view-age-ms", raw.max_view_age_ms, 200..=600_000)?,
        redirect_below: within("--redirect-below", raw.redirect_below, 0..=1_000_000)?,
        offer_timeout: millis("--offer-timeout-ms", raw.offer_timeout_ms, 10..=60_000)?,
        lease: millis("--lease-ms", raw.lease_ms, 20..=600_000)?,
        // An offer names the nodes that were tried, and has room for so many.
        max_retries: within("--max-retries", raw.max_retries, 0..=MAX_EXCLUDED as u8 - 1)?,
        max_replays: within("--max-replays", raw.max_replays, 0..=1_000)?,
        replay_patience: millis(
            "--replay-patience-ms",
            raw.replay_patience_ms,
            0..=3_600_000,
        )?,
        grace: millis("--grace-ms", raw.grace_ms, 0..=60_000)?,
    };
    let rounds = gossip.interval * ROUNDS_IN_VIEW_AGE as u32;
    if settings.max_view_age < rounds {
        return Err(wrong(
            "--max-view-age-ms",
            format!(
                "{} ms is less than {ROUNDS_IN_VIEW_AGE} gossip intervals of {} ms, so live nodes would drop out of the view",
                raw.max_view_age_ms,
                gossip.interval.as_millis()
            ),
            format!("give at least {}", rounds.as_millis()),
        ));
    }
    if settings.lease < settings.offer_timeout * 2 {
        return Err(wrong(
            "--lease-ms",
            format!(
                "{} ms is less than twice the offer timeout of {} ms, so a promise could end before the request comes",
                raw.lease_ms, raw.offer_timeout_ms
            ),
            format!("give at least {}", raw.offer_timeout_ms.saturating_mul(2)),
        ));
    }
    Ok(settings)
}

fn http(raw: RawHttp, listen: std::net::IpAddr) -> Result<HttpSettings, ConfigError> {
    let tls = match (raw.tls_cert, raw.tls_key) {
        (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
        (None, None) => None,
        (Some(_), None) => {
            return Err(wrong(
                "--tls-key",
                "a certificate without its key",
                "name the private key of --tls-cert",
            ));
        }
        (None, Some(_)) => {
            return Err(wrong(
                "--tls-cert",
                "a key without its certificate",
                "name the certificate chain of --tls-key",
            ));
        }
    };
    let max_body = within(
        "--max-body-bytes",
        raw.max_body_bytes,
        1_024..=MAX_BODY_BYTES,
    )?;
    Ok(HttpSettings {
        listen: (listen, raw.http_port).into(),
        api_key_file: raw.api_key_file,
        operator_key_file: raw.operator_key_file,
        tls,
        vllm_names: raw.vllm_names,
        max_body_bytes: usize::try_from(max_body).unwrap_or(usize::MAX),
        max_requests: within("--max-requests", raw.max_requests, 1..=65_536)? as usize,
        header_timeout: millis("--header-timeout-ms", raw.header_timeout_ms, 100..=600_000)?,
        stall_timeout: millis(
            "--stall-timeout-ms",
            raw.stall_timeout_ms,
            1_000..=3_600_000,
        )?,
    })
}

/// Builds the error of one setting.
fn wrong(key: &'static str, wrong: impl Into<String>, remedy: impl Into<String>) -> ConfigError {
    ConfigError::Setting {
        key,
        wrong: wrong.into(),
        remedy: remedy.into(),
    }
}

/// Lets through what lies between two bounds.
fn within<T: PartialOrd + Display + Copy>(
    key: &'static str,
    value: T,
    bounds: std::ops::RangeInclusive<T>,
) -> Result<T, ConfigError> {
    if bounds.contains(&value) {
        return Ok(value);
    }
    Err(wrong(
        key,
        format!("{value} is out of bounds"),
        format!("give a value from {} to {}", bounds.start(), bounds.end()),
    ))
}

fn millis(
    key: &'static str,
    value: u64,
    bounds: std::ops::RangeInclusive<u64>,
) -> Result<Duration, ConfigError> {
    within(key, value, bounds).map(Duration::from_millis)
}

#[cfg(test)]
mod tests;
