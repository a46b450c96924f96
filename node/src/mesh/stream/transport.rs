//! QUIC's settings, each with where it comes from.

use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::QuicServerConfig;
use quinn::{IdleTimeout, ServerConfig, TransportConfig, VarInt};

use crate::mesh::bulk;
use crate::mesh::door::bound_incoming;
use crate::mesh::socket::STREAM_MTU;

/// A peer from which nothing comes for this long is lost, and its streams fail. As long as a node that gossip misses keeps
/// its connections ([`FORGIVEN`](crate::mesh::members::FORGIVEN)): requests that can go on elsewhere do so long before, when the
/// home's vigil says that their host is dead.
const IDLE: VarInt = VarInt::from_u32(IDLE_MS);

/// [`IDLE`] in milliseconds.
pub(crate) const IDLE_MS: u32 = 10_000;

/// The home sends keep-alives this often, so that several of them may be lost before [`IDLE`] ends. The
/// host need not: its acknowledgements keep both sides awake, and an idle connection costs half.
pub(in crate::mesh) const KEEP_ALIVE: Duration = Duration::from_millis(2_500);

/// Bytes that may be sent ahead on one stream. A token frame is 20 to 100 bytes, so this is still
/// hundreds of tokens; with 20 alternatives it is about 1.3 KB, and 200 of those a second over 100 ms
/// need 26 KB. It bounds what a client that does not read holds in memory. Submissions go the other
/// way under the wider [`bulk::STREAM_WINDOW`], since a host has one setting for all that comes in; its
/// [`SUBMIT_WINDOW`] bounds them all the same.
const STREAM_WINDOW: u32 = 64 * 1024;

/// Requests of one home at one host at once. A host's queue refuses long before; this only bounds what
/// a peer can open without asking.
const STREAMS: u32 = 4_096;

/// Bytes of frames that one host may have under way to a home: all streams at their bound. Any less, and
/// enough clients that do not read would stop those that do. It is reached only if that many of the
/// home's own clients stand still.
const FRAMES_WINDOW: u32 = STREAMS * STREAM_WINDOW;

/// Bytes of submissions that one home may have under way to a host, which reads them at once.
const SUBMIT_WINDOW: u32 = 8 * 1024 * 1024;

/// Bytes a sender keeps until they are acknowledged: 80 ms of a 100 MB/s path.
const UNACKNOWLEDGED: u64 = 8 * 1024 * 1024;

/// What all connections have in common. `mtu` is the longest packet that is tried.
pub(in crate::mesh) fn transport(mtu: u16) -> TransportConfig {
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(IdleTimeout::from(IDLE)))
        .send_window(UNACKNOWLEDGED)
        .initial_mtu(1_200)
        .datagram_receive_buffer_size(None);
    let mut discovery = quinn::MtuDiscoveryConfig::default();
    discovery.upper_bound(mtu);
    transport.mtu_discovery_config(Some(discovery));
    transport
}

/// The host's side, of token streams and of bulk, which cannot be told apart before the handshake is done:
/// streams come in, none go out but the greeting. [`bulk::widen`] does the rest for bulk.
pub(super) fn server_config(tls: QuicServerConfig) -> ServerConfig {
    let mut transport = transport(STREAM_MTU);
    transport
        .stream_receive_window(bulk::STREAM_WINDOW.into())
        .receive_window(SUBMIT_WINDOW.into())
        .max_concurrent_bidi_streams(STREAMS.into())
        .max_concurrent_uni_streams(0u32.into());
    let mut config = ServerConfig::with_crypto(Arc::new(tls));
    config
        .transport_config(Arc::new(transport))
        // Nodes have fixed addresses; one that moves comes back in a new life.
        .migration(false);
    bound_incoming(&mut config);
    config
}

/// The home's side of token streams: it opens them, and takes nothing but the greeting.
pub(super) fn client_transport() -> TransportConfig {
    let mut transport = transport(STREAM_MTU);
    transport
        .keep_alive_interval(Some(KEEP_ALIVE))
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window(FRAMES_WINDOW.into())
        .max_concurrent_bidi_streams(0u32.into())
        .max_concurrent_uni_streams(1u32.into());
    transport
}
