//! From the configuration's words to those of each part; reads the files that it names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shoal_gossip::{ClusterKey, KeyRing, Seed, SeedList, Tokens};
use shoal_migrate::SessionLimits;

use crate::api::{ApiConfig, ApiKeys, Tls};
use crate::config::{KeySource, MeshSettings, NodeConfig};
use crate::dispatch::{Freeness, PlacementLimits};
use crate::home::{HomeSettings, ReplayLimits};
use crate::host::HostSettings;
use crate::moves::MoveSettings;
use crate::node::StartError;
use crate::reschedule::RescheduleLimits;

/// Part of the offer deadline that a host may spend on probing others; the rest is for the way.
const PROBE_SHARE: u32 = 4;

/// How long a host may take from a submission to its first frame: reading and tokenising the longest
/// body takes seconds on a slow machine.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// What clients are told to wait when all nodes are full: a second is many steps.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Connections that clients may hold beyond those with a request at work: idle ones and scrapers.
const SPARE_CONNECTIONS: usize = 1_024;

pub(crate) fn cluster_keys(mesh: &MeshSettings) -> Result<Option<KeyRing>, StartError> {
    let file = |path: &Path| {
        KeyRing::read(path).map_err(|error| {
            StartError::File(format!("the cluster key in {}: {error}", path.display()))
        })
    };
    let mut ring = match &mesh.key {
        KeySource::None => return Ok(None),
        KeySource::File(path) => file(path)?,
        KeySource::Text(text) => {
            let key: ClusterKey = text
                .parse()
                .map_err(|error| StartError::File(format!("SHOAL_CLUSTER_KEY: {error}")))?;
            KeyRing::new(key)
        }
    };
    for path in &mesh.accepted_keys {
        for key in file(path)?.into_keys() {
            ring.accept(key)
                .map_err(|error| StartError::File(format!("{}: {error}", path.display())))?;
        }
    }
    Ok(Some(ring))
}

pub(crate) fn seed_list(mesh: &MeshSettings) -> Result<SeedList, StartError> {
    let seeds: Result<Vec<Seed>, _> = mesh.seeds.iter().map(|seed| seed.parse()).collect();
    seeds
        .and_then(SeedList::new)
        .map_err(|error| StartError::File(format!("--seeds: {error}")))
}

pub(crate) fn api_config(config: &NodeConfig) -> Result<ApiConfig, StartError> {
    let read = |path: &Path, what: &str| {
        std::fs::read(path).map_err(|error| {
            StartError::File(format!(
                "the {what} {} cannot be read: {error}",
                path.display()
            ))
        })
    };
    let http = &config.http;
    let keys = |path: &Option<PathBuf>, what: &str| match path {
        None => Ok(None),
        Some(path) => {
            let text = String::from_utf8_lossy(&read(path, what)?).into_owned();
            let keys = ApiKeys::parse(&text);
            let keys =
                keys.map_err(|error| StartError::File(format!("{}: {error}", path.display())));
            keys.map(Some)
        }
    };
    let tls = match &http.tls {
        None => None,
        Some(files) => {
            let pem = (
                read(&files.cert, "certificate")?,
                read(&files.key, "private key")?,
            );
            let tls = Tls::from_pem(&pem.0, &pem.1);
            Some(tls.map_err(|error| StartError::File(format!("--tls-cert, --tls-key: {error}")))?)
        }
    };
    Ok(ApiConfig {
        keys: keys(&http.api_key_file, "API key file")?,
        operators: keys(&http.operator_key_file, "operator key file")?,
        tls,
        vllm_names: http.vllm_names,
        max_body: http.max_body_bytes,
        max_requests: http.max_requests,
        max_connections: http.max_requests + SPARE_CONNECTIONS,
        header_timeout: http.header_timeout,
        stall_timeout: http.stall_timeout,
        ..ApiConfig::default()
    })
}

pub(crate) fn host_settings(config: &NodeConfig) -> HostSettings {
    let dispatch = &config.dispatch;
    HostSettings {
        lease: dispatch.lease,
        redirect_below: Freeness::of_blocks(i64::from(dispatch.redirect_below)),
        probe_deadline: dispatch.offer_timeout / PROBE_SHARE,
        max_view_age: dispatch.max_view_age,
    }
}

/// How long a peer may take to answer a question of a hand-over: the target holds nothing up while it thinks, and a
/// home answers from memory.
const MOVE_ASK_DEADLINE: Duration = Duration::from_secs(1);

/// How long a request stays where it is after it was chosen to move: many times the copy of a large one.
const MOVE_REST: Duration = Duration::from_secs(5);

/// Output that a request must still be allowed to draw to be moved: some seconds of decoding.
const MOVE_MIN_OUTPUT: Tokens = Tokens(64);

/// What the poorer of the two nodes must gain by a move, as a share of the freeness below which requests move: less is
/// within the noise of one more request.
const MOVE_GAIN_SHARE: u32 = 5;

pub(crate) fn move_settings(config: &NodeConfig) -> MoveSettings {
    let moves = &config.moves;
    MoveSettings {
        limits: SessionLimits::default(),
        slots_out: moves.slots_out,
        slots_in: moves.slots_in,
        ask_deadline: MOVE_ASK_DEADLINE,
        accept_above: Freeness::of_blocks(i64::from(moves.above)),
    }
}

pub(crate) fn reschedule_limits(config: &NodeConfig) -> RescheduleLimits {
    let moves = &config.moves;
    RescheduleLimits {
        low: Freeness::of_blocks(i64::from(moves.below)),
        high: Freeness::of_blocks(i64::from(moves.above)),
        min_gain: Freeness::of_blocks(i64::from((moves.below / MOVE_GAIN_SHARE).max(1))),
        rest: MOVE_REST,
        min_output_left: MOVE_MIN_OUTPUT,
        slots_out: moves.slots_out,
        bytes_per_second: moves.bytes_per_second,
    }
}

pub(crate) fn home_settings(config: &NodeConfig) -> HomeSettings {
    let dispatch = &config.dispatch;
    HomeSettings {
        policy: dispatch.policy,
        placement: PlacementLimits {
            max_view_age: dispatch.max_view_age,
            max_offers: u32::from(dispatch.max_retries) + 1,
        },
        offer_deadline: dispatch.offer_timeout,
        start_deadline: START_DEADLINE,
        replay: ReplayLimits {
            losses: u32::from(dispatch.max_replays),
            patience: dispatch.replay_patience,
        },
        grace: dispatch.grace,
        stall_deadline: config.http.stall_timeout,
        retry_after: RETRY_AFTER,
    }
}
