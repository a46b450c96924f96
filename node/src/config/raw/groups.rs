//! The settings by group, in the order of `--help`.

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args};
use serde::{Deserialize, Deserializer, Serialize};

use crate::config::LogFormat;
use crate::dispatch::PolicyName;

/// Where the node lives, what it logs, how it ends.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Process")]
#[serde(rename_all = "kebab-case")]
pub struct RawBasics {
    /// Directory of the node's identity, made if absent; one running node each [default: $XDG_DATA_HOME/shoal or ~/.local/share/shoal].
    ///
    /// Unit: path. Cost: one small file on disk.
    #[arg(long, env = "SHOAL_DATA_DIR", value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Address this node listens on with all its ports; any but loopback needs a cluster key.
    ///
    /// Unit: IP address or `localhost`. Cost: who reaches it can send to every port.
    #[arg(
        long,
        env = "SHOAL_LISTEN",
        value_name = "HOST",
        default_value = "127.0.0.1"
    )]
    pub listen: String,

    /// Host under which other nodes reach this one [default: the address it listens on].
    ///
    /// Unit: address or name, without port. Cost: none; needed when listening on 0.0.0.0 or behind NAT.
    #[arg(long, env = "SHOAL_ADVERTISE", value_name = "HOST")]
    pub advertise: Option<String>,

    /// Time that running requests have to finish after SIGTERM or Ctrl-C.
    ///
    /// Unit: milliseconds. Cost: the process may live that much longer; the default stays below the 30 s after which Kubernetes kills.
    #[arg(
        long,
        env = "SHOAL_SHUTDOWN_DEADLINE_MS",
        value_name = "MS",
        default_value_t = 25_000
    )]
    pub shutdown_deadline_ms: u64,

    /// What is logged, in the syntax of RUST_LOG, which also counts when this is not given.
    ///
    /// Unit: filter, such as `info,shoal_node::dispatch=debug`. Cost: debug writes some lines a request, trace some a datagram.
    #[arg(long, env = "SHOAL_LOG", value_name = "FILTER", default_value = "info")]
    pub log: String,

    /// Form of the log lines on standard error.
    ///
    /// Unit: name. Cost: json lines are longer.
    #[arg(
        long,
        env = "SHOAL_LOG_FORMAT",
        value_name = "FORMAT",
        value_enum,
        default_value_t
    )]
    pub log_format: LogFormat,
}

/// The planes between nodes.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Mesh")]
#[serde(rename_all = "kebab-case")]
pub struct RawMesh {
    /// UDP port of the control plane; streams and gossip take the next one; 0 takes any two.
    ///
    /// Unit: port. Cost: two UDP sockets.
    #[arg(
        long,
        env = "SHOAL_MESH_PORT",
        value_name = "PORT",
        default_value_t = crate::config::DEFAULT_MESH_PORT
    )]
    pub mesh_port: u16,

    /// Nodes to join, as host:mesh-port; a name with several addresses stands for all of them; repeatable [default: none].
    ///
    /// Unit: comma list of host:port, port 7400 if left out. Cost: names are looked up again every few seconds.
    #[arg(
        long,
        env = "SHOAL_SEEDS",
        value_name = "HOST:PORT",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "text_or_list")]
    pub seeds: Vec<String>,

    /// Find nodes on the local network by multicast DNS as well.
    ///
    /// Unit: true or false. Cost: a multicast packet now and then; the node's address is told to everyone on the network.
    #[arg(
        long,
        env = "SHOAL_MDNS",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = false,
        default_missing_value = "true",
        action = ArgAction::Set,
        value_parser = BoolishValueParser::new()
    )]
    pub mdns: bool,

    /// Name of the mesh; nodes of another name are ignored.
    ///
    /// Unit: letters, digits, `-`, `_` and `.`, at most 64. Cost: none; it keeps meshes apart by mistake, the key by force.
    #[arg(
        long,
        env = "SHOAL_CLUSTER",
        value_name = "NAME",
        default_value = "shoal"
    )]
    pub cluster: String,

    /// File with the key that admits to the mesh, as `shoal keygen` writes it; the variable SHOAL_CLUSTER_KEY may hold the key itself [default: none, loopback only].
    ///
    /// Unit: path. Cost: each gossip datagram is sealed and opened with it.
    #[arg(long, env = "SHOAL_CLUSTER_KEY_FILE", value_name = "FILE")]
    pub cluster_key_file: Option<PathBuf>,

    /// Files with older keys that are still accepted, for changing the key of a running mesh; repeatable [default: none].
    ///
    /// Unit: comma list of paths, at most 3. Cost: a datagram under none of the keys is tried with each.
    #[arg(
        long,
        env = "SHOAL_CLUSTER_KEY_ACCEPT_FILE",
        value_name = "FILE",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "text_or_list")]
    pub cluster_key_accept_file: Vec<String>,

    /// Time between two rounds of gossip.
    ///
    /// Unit: milliseconds. Cost: CPU and traffic in inverse proportion, older views in proportion; 250 up to 300 nodes, 500 up to 1,000, then 1000.
    #[arg(
        long,
        env = "SHOAL_GOSSIP_INTERVAL_MS",
        value_name = "MS",
        default_value_t = 250
    )]
    pub gossip_interval_ms: u64,

    /// Suspicion at which a silent node counts as dead (phi accrual).
    ///
    /// Unit: number from 1 to 32. Cost: lower finds deaths sooner and takes slow nodes for dead more often.
    #[arg(long, env = "SHOAL_PHI", value_name = "PHI", default_value_t = 8.0)]
    pub phi: f64,
}

/// Placement of requests.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Dispatch")]
#[serde(rename_all = "kebab-case")]
pub struct RawDispatch {
    /// How the node for a request is chosen.
    ///
    /// Unit: name. Cost: p2c is the one to use; the others are there to compare with, and freest herds on stale views.
    #[arg(
        long,
        env = "SHOAL_POLICY",
        value_name = "POLICY",
        value_enum,
        default_value_t
    )]
    pub policy: PolicyName,

    /// Age at which a node's load counts as unknown and the node is no candidate.
    ///
    /// Unit: milliseconds, at least 4 gossip intervals. Cost: higher places on older numbers, lower leaves nodes out under packet loss.
    #[arg(
        long,
        env = "SHOAL_MAX_VIEW_AGE_MS",
        value_name = "MS",
        default_value_t = 3_000
    )]
    pub max_view_age_ms: u64,

    /// Freeness below which a node that is offered a request asks two nodes whether they are better; 0 asks only when it has
    /// no room.
    ///
    /// Unit: KV blocks a request. Cost: two probes, one round trip of the control plane, in each such offer; lower makes
    /// requests wait longer behind others.
    #[arg(
        long,
        env = "SHOAL_REDIRECT_BELOW",
        value_name = "BLOCKS",
        default_value_t = 1_000_000
    )]
    pub redirect_below: u32,

    /// Time a node has to answer an offer before the next one is tried.
    ///
    /// Unit: milliseconds. Cost: what a silent node adds to the time to first token; lower gives up on slow ones.
    #[arg(
        long,
        env = "SHOAL_OFFER_TIMEOUT_MS",
        value_name = "MS",
        default_value_t = 500
    )]
    pub offer_timeout_ms: u64,

    /// Time for which room is kept for a request that was accepted and has not come.
    ///
    /// Unit: milliseconds, at least twice the offer timeout. Cost: KV that a lost home holds up for that long.
    #[arg(
        long,
        env = "SHOAL_LEASE_MS",
        value_name = "MS",
        default_value_t = 5_000
    )]
    pub lease_ms: u64,

    /// Further nodes that are tried when the first is silent or refuses.
    ///
    /// Unit: nodes, at most 15. Cost: each may add an offer timeout before the client hears 503.
    #[arg(long, env = "SHOAL_MAX_RETRIES", value_name = "N", default_value_t = 3)]
    pub max_retries: u8,

    /// Hosts that one request may lose before its client gets an error.
    ///
    /// Unit: hosts, at most 1000. Cost: a request that ends every engine it meets takes so many with it.
    #[arg(
        long,
        env = "SHOAL_MAX_REPLAYS",
        value_name = "N",
        default_value_t = 16
    )]
    pub max_replays: u16,

    /// Time for which another host is looked for after one was lost under a request.
    ///
    /// Unit: milliseconds. Cost: a client waits so long for an error when no node is left that could go on.
    #[arg(
        long,
        env = "SHOAL_REPLAY_PATIENCE_MS",
        value_name = "MS",
        default_value_t = 60_000
    )]
    pub replay_patience_ms: u64,

    /// Time for which a host that gossip misses may keep its requests: it may only be slow.
    ///
    /// Unit: milliseconds. Cost: requests of a host that lost its power or its network wait that much longer; one that was killed is
    /// known by its closed port.
    #[arg(
        long,
        env = "SHOAL_GRACE_MS",
        value_name = "MS",
        default_value_t = 2_500
    )]
    pub grace_ms: u64,
}

/// Hand-over of running requests.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Hand-over")]
#[serde(rename_all = "kebab-case")]
pub struct RawMoves {
    /// Time between two looks whether requests should move to another node; 0 moves none but those an operator names.
    ///
    /// Unit: milliseconds. Cost: a look at the own load, and below --move-below one at the view.
    #[arg(
        long,
        env = "SHOAL_RESCHEDULE_INTERVAL_MS",
        value_name = "MS",
        default_value_t = 100
    )]
    pub reschedule_interval_ms: u64,

    /// Freeness below which a node moves requests away.
    ///
    /// Unit: KV blocks a request. Cost: higher moves more often, lower leaves less time before requests are preempted.
    #[arg(
        long,
        env = "SHOAL_MOVE_BELOW",
        value_name = "BLOCKS",
        default_value_t = 5
    )]
    pub move_below: u32,

    /// Freeness above which a node takes requests that others move away.
    ///
    /// Unit: KV blocks a request, more than --move-below. Cost: lower finds targets more often, and moves requests to and fro.
    #[arg(
        long,
        env = "SHOAL_MOVE_ABOVE",
        value_name = "BLOCKS",
        default_value_t = 20
    )]
    pub move_above: u32,

    /// Requests that may leave a node at once.
    ///
    /// Unit: requests, at most 256. Cost: a copy of one stage of KV in memory each.
    #[arg(long, env = "SHOAL_MOVES_OUT", value_name = "N", default_value_t = 4)]
    pub moves_out: u32,

    /// Requests that may come in at once.
    ///
    /// Unit: requests, at most 256. Cost: KV blocks reserved for each until it is there, and its KV once more in memory with --reproducible.
    #[arg(long, env = "SHOAL_MOVES_IN", value_name = "N", default_value_t = 4)]
    pub moves_in: u32,

    /// KV that rescheduling may send in a second.
    ///
    /// Unit: mebibytes. Cost: network and processor time taken from what runs.
    #[arg(
        long,
        env = "SHOAL_MOVE_MIB_PER_SECOND",
        value_name = "MIB",
        default_value_t = 512
    )]
    pub move_mib_per_second: u32,
}

/// The client plane.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[command(next_help_heading = "Clients")]
#[serde(rename_all = "kebab-case")]
pub struct RawHttp {
    /// TCP port for clients; 0 takes any.
    ///
    /// Unit: port. Cost: one listening socket.
    #[arg(
        long,
        env = "SHOAL_HTTP_PORT",
        value_name = "PORT",
        default_value_t = 8080
    )]
    pub http_port: u16,

    /// File with one API key a line; clients must send one of them [default: none, everyone is let in].
    ///
    /// Unit: path. Cost: a comparison with each key, a request.
    #[arg(long, env = "SHOAL_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// File with the keys of operators, one a line: who drains nodes or moves requests must send one [default: none, whoever asks from
    /// the node's own host].
    ///
    /// Unit: path. Cost: none; name one where clients reach the node through a proxy on its host.
    #[arg(long, env = "SHOAL_OPERATOR_KEY_FILE", value_name = "FILE")]
    pub operator_key_file: Option<PathBuf>,

    /// Certificate chain in PEM, for HTTPS; goes with --tls-key [default: none, plain HTTP].
    ///
    /// Unit: path. Cost: a handshake for each new connection.
    #[arg(long, env = "SHOAL_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of the certificate in PEM; goes with --tls-cert [default: none, plain HTTP].
    ///
    /// Unit: path. Cost: see --tls-cert.
    #[arg(long, env = "SHOAL_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Longest request body; beyond it 413.
    ///
    /// Unit: bytes, at most 16777216. Cost: memory of this times --max-requests in the worst case.
    #[arg(
        long,
        env = "SHOAL_MAX_BODY_BYTES",
        value_name = "BYTES",
        default_value_t = 4 * 1024 * 1024
    )]
    pub max_body_bytes: u64,

    /// Look like a vLLM server to routers: its names for the few gauges they read, beside the node's own, and `vllm` as the owner
    /// of the models.
    ///
    /// Unit: true or false. Cost: five lines in /metrics.
    #[arg(
        long,
        env = "SHOAL_VLLM_NAMES",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_value_t = true,
        default_missing_value = "true",
        action = ArgAction::Set,
        value_parser = BoolishValueParser::new()
    )]
    pub vllm_names: bool,

    /// Client requests at work at once; beyond it 429.
    ///
    /// Unit: requests. Cost: buffers of a connection and a stream each, besides the body.
    #[arg(
        long,
        env = "SHOAL_MAX_REQUESTS",
        value_name = "N",
        default_value_t = 1_024
    )]
    pub max_requests: u32,

    /// Time a client has to send its request headers.
    ///
    /// Unit: milliseconds. Cost: how long a connection that sends nothing is kept.
    #[arg(
        long,
        env = "SHOAL_HEADER_TIMEOUT_MS",
        value_name = "MS",
        default_value_t = 10_000
    )]
    pub header_timeout_ms: u64,

    /// Time a client may read nothing of an answer that waits for it before its request is aborted.
    ///
    /// Unit: milliseconds. Cost: how long a client that stopped reading keeps its KV.
    #[arg(
        long,
        env = "SHOAL_STALL_TIMEOUT_MS",
        value_name = "MS",
        default_value_t = 30_000
    )]
    pub stall_timeout_ms: u64,
}

/// A list in the file may also be written as the one text that a flag would take.
fn text_or_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a text or a list of texts")]
    enum TextOrList {
        Text(String),
        List(Vec<String>),
    }
    Ok(match TextOrList::deserialize(deserializer)? {
        TextOrList::Text(text) => text.split(',').map(str::to_owned).collect(),
        TextOrList::List(list) => list,
    })
}
