//! QUIC's settings, each with where it comes from.

use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, IdleTimeout, ServerConfig, TransportConfig, VarInt};

use crate::mesh::socket::MAX_MTU;

/// A peer from which nothing comes for this long is lost: its streams fail and their requests are
/// placed again. As long as the state plane takes to call a silent node dead (about 2 s at defaults), and a
/// margin for hosts that stall.
const IDLE: VarInt = VarInt::from_u32(3_000);

/// Keep-alives are sent this often: two of them may be lost before [`IDLE`] ends.
const KEEP_ALIVE: Duration = Duration::from_millis(900);

/// Bytes a host may send ahead on one stream. A token frame is 20 to 100 bytes, so this is still
/// hundreds of tokens; it bounds what a client that does not read holds in memory. Submissions go the
/// other way under the same bound: 64 KiB a round trip is 64 MB/s at 1 ms.
const STREAM_WINDOW: VarInt = VarInt::from_u32(64 * 1024);

/// Bytes in flight on one connection: 128 streams at their bound.
const CONNECTION_WINDOW: VarInt = VarInt::from_u32(8 * 1024 * 1024);

/// Requests of one home at one host at once: more than the largest `--queue-limit` and `--max-sequences`
/// together would ever admit from one home is refused by the host's queue before.
const STREAMS: VarInt = VarInt::from_u32(8_192);

/// One stream for the greeting.
const GREETINGS: VarInt = VarInt::from_u32(1);

fn transport() -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(IdleTimeout::from(IDLE)))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .stream_receive_window(STREAM_WINDOW)
        .receive_window(CONNECTION_WINDOW)
        .send_window(u64::from(CONNECTION_WINDOW))
        .max_concurrent_bidi_streams(STREAMS)
        .max_concurrent_uni_streams(GREETINGS)
        .initial_mtu(1_200)
        .datagram_receive_buffer_size(None);
    let mut discovery = quinn::MtuDiscoveryConfig::default();
    discovery.upper_bound(MAX_MTU);
    transport.mtu_discovery_config(Some(discovery));
    Arc::new(transport)
}

pub(super) fn server_config(tls: QuicServerConfig) -> ServerConfig {
    let mut config = ServerConfig::with_crypto(Arc::new(tls));
    config.transport_config(transport());
    config
}

pub(super) fn client_config(tls: QuicClientConfig) -> ClientConfig {
    let mut config = ClientConfig::new(Arc::new(tls));
    config.transport_config(transport());
    config
}
