//! Addresses, keys and seeds.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use crate::config::check::{Surroundings, within, wrong};
use crate::config::raw::{RawBasics, RawMesh};
use crate::config::{ConfigError, DEFAULT_MESH_PORT, KeySource, MeshSettings};

/// Seeds that may be named. Each is looked up again every few seconds; more than this help nobody.
const MAX_SEEDS: usize = 64;

/// Old keys that may be accepted beside the new one. A forged datagram is tried with each, so four in
/// all bound what it costs; a change of keys needs one.
const MAX_ACCEPTED_KEYS: usize = 3;

/// The address to listen on. Names other than `localhost` are refused: which of a name's addresses
/// was meant must not depend on a resolver.
pub(super) fn listen_address(host: &str) -> Result<IpAddr, ConfigError> {
    if host == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let bare = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(host);
    bare.parse().map_err(|_| {
        wrong(
            "--listen",
            format!("`{host}` is not an IP address"),
            "give one of this machine, 127.0.0.1 for this machine only, or 0.0.0.0 for all; \
             names and ports belong to --advertise, --http-port and --mesh-port",
        )
    })
}

/// Checks what the planes between nodes need.
pub(super) fn check(
    raw: RawMesh,
    basics: &RawBasics,
    listen: IpAddr,
    surroundings: &Surroundings,
    warnings: &mut Vec<String>,
) -> Result<MeshSettings, ConfigError> {
    let stream_port = match raw.mesh_port {
        0 => 0,
        u16::MAX => {
            return Err(wrong(
                "--mesh-port",
                "streams and gossip take the next port, and there is none after 65535",
                "give a port from 1024 to 65534",
            ));
        }
        port => port + 1,
    };
    let key = key_source(raw.cluster_key_file, listen, surroundings)?;
    if key == KeySource::None {
        warnings.push(
            "NO CLUSTER KEY: every process on this machine may join this mesh and read its \
             requests; make a key with `shoal keygen` before you leave loopback"
                .to_owned(),
        );
    }
    let accepted_keys = accepted_keys(raw.cluster_key_accept_file, &key)?;
    let seeds = seeds(&raw.seeds)?;
    Ok(MeshSettings {
        control: (listen, raw.mesh_port).into(),
        stream: (listen, stream_port).into(),
        advertise: advertise(basics.advertise.as_deref(), listen, warnings)?,
        seeds,
        mdns: raw.mdns,
        cluster: cluster(raw.cluster)?,
        key,
        accepted_keys,
    })
}

fn key_source(
    file: Option<PathBuf>,
    listen: IpAddr,
    surroundings: &Surroundings,
) -> Result<KeySource, ConfigError> {
    match (file, &surroundings.cluster_key) {
        (Some(_), Some(_)) => Err(wrong(
            "--cluster-key-file",
            "the key is named twice, by file and by SHOAL_CLUSTER_KEY",
            "keep one of them",
        )),
        (Some(file), None) => Ok(KeySource::File(file)),
        (None, Some(text)) => Ok(KeySource::Text(text.clone())),
        (None, None) if listen.is_loopback() => Ok(KeySource::None),
        (None, None) => Err(wrong(
            "--cluster-key-file",
            format!("a node that listens on {listen} needs a cluster key, or anyone could join"),
            "make one with `shoal keygen --out cluster.key` and give the same to every node, \
             or listen on 127.0.0.1",
        )),
    }
}

fn accepted_keys(files: Vec<String>, key: &KeySource) -> Result<Vec<PathBuf>, ConfigError> {
    let files: Vec<PathBuf> = files
        .into_iter()
        .filter(|file| !file.is_empty())
        .map(PathBuf::from)
        .collect();
    if !files.is_empty() && *key == KeySource::None {
        return Err(wrong(
            "--cluster-key-accept-file",
            "old keys without a new one",
            "name the new key with --cluster-key-file",
        ));
    }
    within(
        "--cluster-key-accept-file",
        files.len(),
        0..=MAX_ACCEPTED_KEYS,
    )?;
    Ok(files)
}

fn advertise(
    host: Option<&str>,
    listen: IpAddr,
    warnings: &mut Vec<String>,
) -> Result<Option<String>, ConfigError> {
    let Some(host) = host else {
        if listen.is_unspecified() {
            return Err(wrong(
                "--advertise",
                format!("others cannot reach a node at {listen}"),
                "name the address or name they shall use, or listen on one address",
            ));
        }
        return Ok(None);
    };
    let address = host.parse::<IpAddr>().ok();
    if address.is_some_and(|address| address.is_unspecified()) {
        return Err(wrong(
            "--advertise",
            format!("others cannot reach a node at {host}"),
            "name the address or name they shall use",
        ));
    }
    if address.is_none() && !is_host_name(host) {
        return Err(wrong(
            "--advertise",
            format!("`{host}` is neither an address nor a host name"),
            "give it without scheme, port or brackets",
        ));
    }
    if listen.is_loopback() && address.is_some_and(|address| !address.is_loopback()) {
        warnings.push(format!(
            "this node tells others to reach it at {host} and listens on {listen} only: \
             it will be alone unless something forwards the ports"
        ));
    }
    Ok(Some(host.to_owned()))
}

/// The seeds with the port of their gossip: one above the mesh port.
fn seeds(written: &[String]) -> Result<Vec<String>, ConfigError> {
    let mut seeds = written
        .iter()
        .map(|seed| seed.trim())
        .filter(|seed| !seed.is_empty())
        .map(seed)
        .collect::<Result<Vec<_>, _>>()?;
    seeds.sort();
    seeds.dedup();
    within("--seeds", seeds.len(), 0..=MAX_SEEDS)?;
    Ok(seeds)
}

fn seed(text: &str) -> Result<String, ConfigError> {
    let bad = || {
        wrong(
            "--seeds",
            format!("`{text}` is not a seed"),
            "give host:port with the mesh port of that node, such as 10.0.0.1:7400 or \
             [fd00::1]:7400",
        )
    };
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
            host.parse::<Ipv6Addr>().map_err(|_| bad())?;
            let port = match rest {
                "" => None,
                rest => Some(rest.strip_prefix(':').ok_or_else(bad)?),
            };
            (format!("[{host}]"), port)
        }
        None => {
            let (host, port) = match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            };
            if !is_host_name(host) {
                return Err(bad());
            }
            (host.to_owned(), port)
        }
    };
    let port = match port {
        None => DEFAULT_MESH_PORT,
        Some(digits) => digits.parse::<u16>().map_err(|_| bad())?,
    };
    match port {
        0 | u16::MAX => Err(bad()),
        port => Ok(format!("{host}:{}", port + 1)),
    }
}

/// Letters, digits, dots, dashes and underscores: IPv4 addresses and DNS names, also the unofficial
/// ones with underscores that container networks hand out.
fn is_host_name(host: &str) -> bool {
    (1..=253).contains(&host.len())
        && host
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
        && !host.starts_with(['.', '-'])
}

fn cluster(name: String) -> Result<String, ConfigError> {
    let fits = (1..=64).contains(&name.len());
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if !fits || !name.chars().all(plain) {
        return Err(wrong(
            "--cluster",
            format!("`{name}` is not a name for a mesh"),
            "use 1 to 64 letters, digits, dots, dashes and underscores",
        ));
    }
    Ok(name)
}
