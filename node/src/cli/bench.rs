//! `shoal bench`: measures this program by itself.

use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::bench::{bulk, dispatch, path};
use crate::cli::load::{self, LoadCommand};
use crate::cli::output::{fail, print};
use crate::config::from_flags;
use crate::node::Node;

/// Model of the bench's engine.
const MODEL: &str = "bench";

/// A node on free loopback ports. A step of its engine takes 35 µs: what is left is the mesh.
const FLAGS: [&str; 10] = [
    "--engine",
    "sim:a10/llama-2-7b",
    "--sim-speed",
    "1000",
    "--http-port",
    "0",
    "--mesh-port",
    "0",
    "--gossip-interval-ms",
    "100",
];

/// Flags of `shoal bench`.
#[derive(Debug, Args)]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    what: What,
    /// Print JSON instead of a table.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Throughput and processor time of KV bytes over loopback: copied, over TCP, over TLS, and over the bulk plane at packets of 1,452 and 8,952 bytes (seconds per GiB).
    Bulk {
        /// Bytes for each way, in MiB. They travel as parcels of 64 MiB.
        #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(64..=65_536))]
        size_mib: u32,
        /// Times that the ways take turns.
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
        /// Streams per parcel on the bulk plane.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16))]
        streams: Option<u32>,
    },
    /// One dispatch decision, for every policy, in meshes of 16, 256 and 1,000 nodes (about a second).
    Dispatch,
    /// Requests at their times to any OpenAI-compatible endpoints: TTFT, time between tokens, end to end, errors by kind.
    Load(Box<LoadCommand>),
    /// Time to first byte and processor time of a request asked at its host, and at another node that has to find that host first (a simulated engine that takes no time; seconds).
    Path {
        /// Turns of 50 requests for each of the two ways.
        #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        turns: u32,
    },
}

/// Runs `shoal bench`.
pub(super) fn run(args: &BenchArgs) -> ExitCode {
    let shown = match &args.what {
        What::Dispatch => Ok(show_dispatch(&dispatch::run(), args.json)),
        What::Bulk {
            size_mib,
            rounds,
            streams,
        } => measure_bulk(*size_mib, *rounds, *streams).map(|lines| show_bulk(&lines, args.json)),
        What::Load(command) => load::run(command, args.json).map_err(|error| error.to_string()),
        What::Path { turns } => measure_path(*turns).map(|result| show_path(&result, args.json)),
    };
    match shown {
        Ok(text) => print(&text),
        Err(error) => fail(error),
    }
}

fn show_dispatch(lines: &[dispatch::Line], json: bool) -> String {
    if json {
        return to_json(&lines);
    }
    let mut text = format!(
        "{:>6}  {:<12}  {:>9}  {:>9}\n",
        "NODES", "POLICY", "P50 us", "P99 us"
    );
    for line in lines {
        text.push_str(&format!(
            "{:>6}  {:<12}  {:>9.3}  {:>9.3}\n",
            line.nodes, line.policy, line.p50_us, line.p99_us
        ));
    }
    text
}

fn show_bulk(lines: &[bulk::Line], json: bool) -> String {
    if json {
        return to_json(&lines);
    }
    let mut text = format!(
        "{:<28}  {:>8}  {:>12}  {:>14}\n",
        "WAY", "MB/s", "CPU s per GB", "CPU to TLS/TCP"
    );
    for line in lines {
        text.push_str(&format!(
            "{:<28}  {:>8.0}  {:>12.3}  {:>14.2}\n",
            line.way, line.mb_per_s, line.cpu_s_per_gb, line.cpu_to_tls
        ));
    }
    text.push_str("Processor time of both ends together. Medians of the rounds.\n");
    text
}

fn show_path(result: &path::Result, json: bool) -> String {
    if json {
        return to_json(result);
    }
    let mut text = format!(
        "{:<22}  {:>12}  {:>12}  {:>10}\n",
        "WAY", "TTFB P50 us", "TTFB P99 us", "CPU us"
    );
    for (name, way) in [
        ("asked at the host", result.direct),
        ("over another home", result.over_home),
    ] {
        text.push_str(&format!(
            "{name:<22}  {:>12.0}  {:>12.0}  {:>10.0}\n",
            way.first_byte_p50_us, way.first_byte_p99_us, way.cpu_us
        ));
    }
    text.push_str(&format!(
        "{:<22}  {:>12.0}  {:>12.0}  {:>10.0}\n{} requests each way; processor time {:.2} times that of asking the host\n",
        "added",
        result.added_first_byte_p50_us,
        result.added_first_byte_p99_us,
        result.added_cpu_us,
        result.requests,
        result.cpu_ratio,
    ));
    text
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_else(|error| error.to_string()) + "\n"
}

fn measure_bulk(
    size_mib: u32,
    rounds: u32,
    streams: Option<u32>,
) -> Result<Vec<bulk::Line>, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let bytes = u64::from(size_mib) << 20;
    runtime.block_on(bulk::run(bytes, rounds, streams))
}

fn measure_path(turns: u32) -> Result<path::Result, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let folder = std::env::temp_dir().join(format!("shoal-bench-{}", std::process::id()));
    let measured = runtime.block_on(two_nodes(&folder, turns));
    if let Err(error) = std::fs::remove_dir_all(&folder) {
        eprintln!("{} could not be removed: {error}", folder.display());
    }
    measured
}

/// A host and a home that serves another model, joined over loopback.
async fn two_nodes(folder: &Path, turns: u32) -> Result<path::Result, String> {
    let host = start(folder, "host", MODEL, None).await?;
    let home = start(folder, "home", "other", Some(host.stream_addr())).await?;
    let met = path::until_served(home.http_addr(), MODEL).await;
    let result = match met {
        Ok(()) => path::run(host.http_addr(), home.http_addr(), MODEL, turns).await,
        Err(error) => Err(error),
    };
    home.shutdown().await;
    host.shutdown().await;
    result
}

async fn start(
    folder: &Path,
    name: &str,
    model: &str,
    seed: Option<SocketAddr>,
) -> Result<Node, String> {
    let data_dir = folder.join(name);
    let mut flags = FLAGS.to_vec();
    flags.extend(["--model-id", model, "--data-dir"]);
    let data_dir = data_dir.to_string_lossy();
    flags.push(&data_dir);
    let mut config = from_flags(flags).map_err(|error| error.to_string())?;
    config.mesh.seeds = seed.iter().map(ToString::to_string).collect();
    Node::start(config).await.map_err(|error| error.to_string())
}
