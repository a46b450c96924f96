//! What the way over a home costs: the same request asked at its host, and at another node that has
//! to find that host first. Both nodes run in this process over loopback, with an engine that takes no
//! time, so what is left is the mesh itself. The two ways take turns, so noise hits both alike.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use crate::bench::{clock, cpu_time, micros, quantile};

/// Requests per turn: the processor time of fewer is below the resolution of the system's counter.
const TURN: u32 = 50;

/// One way's figures.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Way {
    /// Median time to the first byte of the body, in microseconds.
    pub first_byte_p50_us: f64,
    /// 99th percentile of the same.
    pub first_byte_p99_us: f64,
    /// Processor time of the whole process per request, client included, in microseconds.
    pub cpu_us: f64,
}

/// Both ways, and what the longer adds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Result {
    /// Requests per way.
    pub requests: u32,
    /// Asked at the host.
    pub direct: Way,
    /// Asked at another node.
    pub over_home: Way,
    /// Added to the median first byte, in microseconds.
    pub added_first_byte_p50_us: f64,
    /// Added to the 99th percentile, in microseconds.
    pub added_first_byte_p99_us: f64,
    /// Added processor time per request, in microseconds.
    pub added_cpu_us: f64,
    /// Processor time over home to direct.
    pub cpu_ratio: f64,
}

#[derive(Default)]
struct Samples {
    first_byte: Vec<Duration>,
    cpu: Duration,
}

impl Samples {
    fn way(&mut self) -> Way {
        let requests = u32::try_from(self.first_byte.len())
            .unwrap_or(u32::MAX)
            .max(1);
        Way {
            first_byte_p50_us: micros(quantile(&mut self.first_byte, 0.5)),
            first_byte_p99_us: micros(quantile(&mut self.first_byte, 0.99)),
            cpu_us: micros(self.cpu / requests),
        }
    }
}

/// Asks `host` and `home` in turns, `turns` each, for a completion that only `host` can run.
///
/// # Errors
/// When a request fails: a bench of failures measures nothing.
pub async fn run(
    host: SocketAddr,
    home: SocketAddr,
    model: &str,
    turns: u32,
) -> std::result::Result<Result, String> {
    let client: Client<HttpConnector, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let body = serde_json::json!({
        "model": model, "prompt": "The shoal turns as one.", "max_tokens": 1,
        "temperature": 0, "stream": true,
    });
    let body = Bytes::from(body.to_string());
    // Connections, pools and caches are warm before anything counts.
    turn(&client, host, &body, &mut Samples::default()).await?;
    turn(&client, home, &body, &mut Samples::default()).await?;
    let (mut direct, mut over_home) = (Samples::default(), Samples::default());
    for _ in 0..turns {
        turn(&client, host, &body, &mut direct).await?;
        turn(&client, home, &body, &mut over_home).await?;
    }
    let (direct, over_home) = (direct.way(), over_home.way());
    Ok(Result {
        requests: turns * TURN,
        direct,
        over_home,
        added_first_byte_p50_us: over_home.first_byte_p50_us - direct.first_byte_p50_us,
        added_first_byte_p99_us: over_home.first_byte_p99_us - direct.first_byte_p99_us,
        added_cpu_us: over_home.cpu_us - direct.cpu_us,
        cpu_ratio: over_home.cpu_us / direct.cpu_us.max(f64::MIN_POSITIVE),
    })
}

/// Waits until `node` can have the model run somewhere.
///
/// # Errors
/// When nobody serves it within ten seconds.
pub async fn until_served(node: SocketAddr, model: &str) -> std::result::Result<(), String> {
    let client: Client<HttpConnector, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let body = Bytes::from(
        serde_json::json!({"model": model, "prompt": "Anybody?", "max_tokens": 1}).to_string(),
    );
    let mut last = String::new();
    for _ in 0..200 {
        match ask(&client, node, &body).await {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Err(last)
}

async fn turn(
    client: &Client<HttpConnector, Full<Bytes>>,
    node: SocketAddr,
    body: &Bytes,
    samples: &mut Samples,
) -> std::result::Result<(), String> {
    let cpu = cpu_time();
    for _ in 0..TURN {
        samples.first_byte.push(ask(client, node, body).await?);
    }
    samples.cpu += cpu_time().saturating_sub(cpu);
    Ok(())
}

async fn ask(
    client: &Client<HttpConnector, Full<Bytes>>,
    node: SocketAddr,
    body: &Bytes,
) -> std::result::Result<Duration, String> {
    let request = Request::post(format!("http://{node}/v1/completions"))
        .header("content-type", "application/json")
        .body(Full::new(body.clone()))
        .map_err(|error| error.to_string())?;
    let started = clock();
    let response = client
        .request(request)
        .await
        .map_err(|error| error.to_string())?;
    let status = response.status();
    let mut body = response.into_body();
    let first = body.frame().await;
    let took = started.elapsed();
    let rest = body
        .collect()
        .await
        .map_err(|error| error.to_string())?
        .to_bytes();
    if !status.is_success() || first.is_none() {
        return Err(format!(
            "{node} answered {status}: {}",
            String::from_utf8_lossy(&rest)
        ));
    }
    Ok(took)
}
