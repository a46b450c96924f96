//! What the swarm is made of.

use std::sync::Arc;
use std::time::Duration;

use libp2p::allow_block_list::{self, AllowedPeers};
use libp2p::connection_limits::{self, ConnectionLimits};
use libp2p::core::muxing::StreamMuxerBox;
use libp2p::identity::Keypair;
use libp2p::request_response::{self, ProtocolSupport};
use libp2p::swarm::NetworkBehaviour;
use libp2p::swarm::behaviour::toggle::Toggle;
use libp2p::{Swarm, Transport, identify, mdns, ping, swarm};

use crate::mesh::codec::control::{CONTROL_PROTOCOL, ControlCodec};
use crate::mesh::control::quic::Quic;
use crate::mesh::control::{ControlConfig, ControlCounters, ControlStartError};
use crate::mesh::members::Members;

/// Longest an exchange may take, whatever its asker's deadline: the longest `--offer-timeout-ms`.
pub(super) const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Exchanges on one connection at once. A home offers one request at a time to a host per client, and
/// `--max-requests` clients may do so at once; beyond this they wait for each other.
pub(super) const STREAMS_PER_CONNECTION: usize = 512;

/// Connections in all: two for each node of the largest mesh (both sides may dial at once).
const ESTABLISHED: u32 = 8_000;

/// Connections per peer: one each way, and one that is being replaced.
const ESTABLISHED_PER_PEER: u32 = 3;

/// A connection that carries nothing is closed after this. Redialling costs a handshake (about 2 ms
/// of processor time); keeping one open costs about 180 KB.
const IDLE: Duration = Duration::from_secs(60);

/// Time between round-trip measurements on an open connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);

#[derive(NetworkBehaviour)]
pub(super) struct Behaviour {
    /// Before all others: whoever is not on the list gets no further.
    pub(super) allowed: allow_block_list::Behaviour<AllowedPeers>,
    limits: connection_limits::Behaviour,
    pub(super) exchange: request_response::Behaviour<ControlCodec>,
    identify: identify::Behaviour,
    ping: ping::Behaviour,
    mdns: Toggle<mdns::tokio::Behaviour>,
}

/// Builds the swarm; it does not listen yet.
pub(super) fn swarm(
    config: &ControlConfig,
    keypair: &Keypair,
    members: Members,
    counters: Arc<ControlCounters>,
) -> Result<Swarm<Behaviour>, ControlStartError> {
    let setup = |error: &dyn std::fmt::Display| ControlStartError::Setup(error.to_string());
    let peer = keypair.public().to_peer_id();
    let mdns = if config.mdns {
        let behaviour = mdns::tokio::Behaviour::new(mdns::Config::default(), peer);
        Some(behaviour.map_err(|error| setup(&error))?)
    } else {
        None
    };
    // Handshakes from outside are bounded by the transport's door, before they cost anything.
    let limits = ConnectionLimits::default()
        .with_max_established(Some(ESTABLISHED))
        .with_max_established_per_peer(Some(ESTABLISHED_PER_PEER));
    let exchange = request_response::Config::default()
        .with_request_timeout(EXCHANGE_TIMEOUT)
        .with_max_concurrent_streams(STREAMS_PER_CONNECTION);
    let behaviour = Behaviour {
        allowed: allow_block_list::Behaviour::default(),
        limits: connection_limits::Behaviour::new(limits),
        exchange: request_response::Behaviour::with_codec(
            ControlCodec::new(Arc::clone(&counters)),
            [(CONTROL_PROTOCOL, ProtocolSupport::Full)],
            exchange,
        ),
        // Addresses are gossip's business, and the program's version is in its record.
        identify: identify::Behaviour::new(
            identify::Config::new("shoal/1".into(), keypair.public())
                .with_agent_version("shoal".into())
                .with_hide_listen_addrs(true)
                .with_cache_size(0),
        ),
        ping: ping::Behaviour::new(ping::Config::new().with_interval(PING_INTERVAL)),
        mdns: mdns.into(),
    };
    let transport = Quic::new(keypair, members, counters).map_err(|error| setup(&error))?;
    let transport = transport.map(|(peer, muxer), _| (peer, StreamMuxerBox::new(muxer)));
    Ok(Swarm::new(
        transport.boxed(),
        behaviour,
        peer,
        swarm::Config::with_tokio_executor().with_idle_connection_timeout(IDLE),
    ))
}
