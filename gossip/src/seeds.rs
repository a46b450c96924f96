//! Where a node looks for the mesh: seed addresses, and whom to contact when.
//!
//! A seed is only a first acquaintance. Any node can be one, a seed that is down is harmless, and a
//! name may stand for many addresses that change (a Kubernetes headless service).

pub(crate) mod resolve;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use crate::time::Timestamp;

/// Seeds one node may be given. A mesh needs two or three; a list of all hosts of a small one is common.
pub const MAX_SEEDS: usize = 64;

/// Addresses kept, of all seeds together. A headless service answers with one per node; a few dozen
/// are plenty to find the rest by gossip.
pub(crate) const MAX_SEED_ADDRESSES: usize = 256;

/// Seeds contacted per gossip interval while alone: as many as the gossip itself contacts.
const CONTACTS_ALONE: usize = 3;

/// In company, one address outside the known mesh is contacted every this many intervals, so that two
/// halves of a mesh find each other again after any time. Costs one small datagram a second.
const INTERVALS_PER_CONTACT: u32 = 4;

/// Lost peers remembered as further seeds: enough to find a half of the largest mesh again.
const MAX_LOST: usize = 64;

/// How long a lost peer is tried. Longer outages are for the seeds: by then its address may be another's.
const LOST_MEMORY: Duration = Duration::from_secs(3_600);

/// A host and port to look for the mesh at. Port: the stream and gossip port of that node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seed {
    host: Host,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Ip(IpAddr),
    Name(String),
}

/// Why a text names no seed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SeedError {
    /// Not `host:port`.
    #[error(
        "seed {text:?} {problem}; write host:port, for example 10.0.0.7:7401, [fd00::7]:7401 or shoal.example:7401"
    )]
    NotASeed {
        /// The text, cut to 64 characters.
        text: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// More than [`MAX_SEEDS`].
    #[error(
        "{found} seeds, at most {MAX_SEEDS} are used: any two or three nodes of the mesh are enough"
    )]
    TooMany {
        /// Seeds found.
        found: usize,
    },
}

impl FromStr for Seed {
    type Err = SeedError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let wrong = |problem| SeedError::NotASeed {
            text: text.chars().take(64).collect(),
            problem,
        };
        if let Ok(address) = text.parse::<SocketAddr>() {
            if address.port() == 0 {
                return Err(wrong("has port 0"));
            }
            if address.ip().is_unspecified() {
                return Err(wrong("names every interface instead of a host"));
            }
            return Ok(Self {
                host: Host::Ip(address.ip()),
                port: address.port(),
            });
        }
        if text.parse::<IpAddr>().is_ok() {
            return Err(wrong("has no port"));
        }
        let (name, port) = text.rsplit_once(':').ok_or_else(|| wrong("has no port"))?;
        let port = port
            .parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| wrong("has a port that is not a number from 1 to 65535"))?;
        if !is_dns_name(name) {
            return Err(wrong(
                "has a host that is neither an address nor a DNS name",
            ));
        }
        Ok(Self {
            host: Host::Name(name.to_owned()),
            port,
        })
    }
}

/// Letters, digits, hyphens, underscores (service names have them) in labels of 1 to 63, 253 in all.
fn is_dns_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
    };
    // A last label of digits only is a mistyped IPv4 address, never a name.
    let numeric = name
        .rsplit('.')
        .next()
        .is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()));
    name.len() <= 253 && !numeric && name.split('.').all(label)
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port)),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Seeds as written, at most [`MAX_SEEDS`]. Parsed from a list with commas; an empty text is no seeds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeedList(Vec<Seed>);

impl SeedList {
    /// A list of these; repetitions are dropped.
    pub fn new(seeds: impl IntoIterator<Item = Seed>) -> Result<Self, SeedError> {
        let mut list: Vec<Seed> = Vec::new();
        for seed in seeds {
            if !list.contains(&seed) {
                list.push(seed);
            }
        }
        if list.len() > MAX_SEEDS {
            return Err(SeedError::TooMany { found: list.len() });
        }
        Ok(Self(list))
    }

    /// The seeds.
    pub fn seeds(&self) -> &[Seed] {
        &self.0
    }
}

impl FromStr for SeedList {
    type Err = SeedError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let seeds: Result<Vec<Seed>, _> = text.split(',').map(str::parse).collect();
        Self::new(seeds?)
    }
}

/// Whether this node has found the mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SeedState {
    /// It knows no other live node, and keeps trying. Normal for the first node of a mesh.
    Alone {
        /// Since when.
        since: Timestamp,
        /// Contacts tried since then. Zero when there is nobody to try.
        tried: u64,
        /// Seeds whose names could not be resolved the last time.
        unresolved: Vec<String>,
    },
    /// It knows other live nodes.
    Joined {
        /// How many.
        peers: usize,
    },
}

/// Decides whom to contact outside the gossip's own rounds.
#[derive(Debug)]
pub(crate) struct SeedBook {
    /// Never contacted: it is this node.
    own: SocketAddr,
    addresses: Vec<SocketAddr>,
    unresolved: Vec<String>,
    live: BTreeSet<SocketAddr>,
    lost: BTreeMap<SocketAddr, Timestamp>,
    alone_since: Timestamp,
    tried: u64,
    turn: usize,
    until_contact: u32,
}

impl SeedBook {
    pub(crate) fn new(own: SocketAddr, now: Timestamp) -> Self {
        Self {
            own,
            addresses: Vec::new(),
            unresolved: Vec::new(),
            live: BTreeSet::new(),
            lost: BTreeMap::new(),
            alone_since: now,
            tried: 0,
            turn: 0,
            until_contact: INTERVALS_PER_CONTACT,
        }
    }

    /// Takes note of what the seeds' names stand for now.
    pub(crate) fn resolved(&mut self, addresses: &[SocketAddr], unresolved: &[String]) {
        self.addresses = addresses.to_vec();
        self.unresolved = unresolved.to_vec();
    }

    /// A neighbour was found by other means: greeted for as long as a lost peer.
    pub(crate) fn met(&mut self, now: Timestamp, address: SocketAddr) {
        if self.lost.len() < MAX_LOST && !self.live.contains(&address) {
            self.lost.insert(address, now);
        }
    }

    /// Takes note of the addresses of all other live nodes.
    pub(crate) fn live(&mut self, now: Timestamp, live: BTreeSet<SocketAddr>) {
        if live.is_empty() && !self.live.is_empty() {
            self.alone_since = now;
            self.tried = 0;
        }
        let gone: Vec<_> = self.live.difference(&live).copied().collect();
        for address in gone {
            self.lost.insert(address, now);
        }
        self.lost
            .retain(|address, lost| !live.contains(address) && now.since(*lost) < LOST_MEMORY);
        while self.lost.len() > MAX_LOST {
            let oldest = self
                .lost
                .iter()
                .min_by_key(|(address, lost)| (**lost, **address));
            let Some((&oldest, _)) = oldest else { break };
            self.lost.remove(&oldest);
        }
        self.live = live;
    }

    /// Called once per gossip interval: whom to contact now.
    pub(crate) fn contacts(&mut self) -> Vec<SocketAddr> {
        let alone = self.live.is_empty();
        let wanted = if alone {
            CONTACTS_ALONE
        } else {
            self.until_contact = self.until_contact.saturating_sub(1);
            if self.until_contact > 0 {
                return Vec::new();
            }
            self.until_contact = INTERVALS_PER_CONTACT;
            1
        };
        let mut strangers: Vec<SocketAddr> = self
            .addresses
            .iter()
            .chain(self.lost.keys())
            .filter(|address| **address != self.own && !self.live.contains(address))
            .copied()
            .collect();
        strangers.sort_unstable();
        strangers.dedup();
        if strangers.is_empty() {
            return Vec::new();
        }
        let first = self.turn % strangers.len();
        strangers.rotate_left(first);
        strangers.truncate(wanted);
        self.turn = self.turn.wrapping_add(strangers.len());
        if alone {
            self.tried = self.tried.saturating_add(strangers.len() as u64);
        }
        strangers
    }

    pub(crate) fn state(&self) -> SeedState {
        if self.live.is_empty() {
            SeedState::Alone {
                since: self.alone_since,
                tried: self.tried,
                unresolved: self.unresolved.clone(),
            }
        } else {
            SeedState::Joined {
                peers: self.live.len(),
            }
        }
    }
}

#[cfg(test)]
mod tests;
