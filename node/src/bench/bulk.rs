//! What moving KV bytes costs: the same parcels copied in memory, over TCP, over TLS on TCP with the node's own
//! certificates and cipher, and over the bulk plane. Both ends are in this process, over loopback; each way
//! brings every parcel into fresh memory and has it acknowledged before the next. The ways take turns.

mod ways;

use std::time::Duration;

use crate::bench::{clock, quantile};

/// Bytes of a parcel.
const PARCEL_BYTES: usize = 64 << 20;

/// One way's figures.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Line {
    /// Which.
    pub way: String,
    /// Throughput in millions of bytes per second, the median of the rounds.
    pub mb_per_s: f64,
    /// Processor time of the whole process, in seconds per billion bytes; the median of the rounds.
    pub cpu_s_per_gb: f64,
    /// The same, over that of TLS on TCP.
    pub cpu_to_tls: f64,
}

/// What one way took in each round.
#[derive(Default)]
struct Samples {
    wall: Vec<Duration>,
    cpu: Vec<Duration>,
}

/// Moves `bytes`, in whole parcels, over every way, `rounds` times. `streams` is how many streams of the bulk plane one parcel
/// travels on; `None` for its default.
///
/// # Errors
/// When a way cannot be set up or breaks: a bench of failures measures nothing.
pub async fn run(bytes: u64, rounds: u32, streams: Option<u32>) -> Result<Vec<Line>, String> {
    let parcels = u32::try_from(bytes / PARCEL_BYTES as u64).unwrap_or(u32::MAX);
    let parcels = parcels.max(1);
    let mut ways = ways::all(streams).await?;
    let mut samples: Vec<_> = ways.iter().map(|_| Samples::default()).collect();
    // Connections, windows and paths are warm before anything counts.
    for way in &mut ways {
        way.carry(1).await?;
    }
    for _ in 0..rounds {
        for (way, samples) in ways.iter_mut().zip(&mut samples) {
            let (started, cpu) = (clock(), cpu_time());
            way.carry(parcels).await?;
            samples.wall.push(started.elapsed());
            samples.cpu.push(cpu_time().saturating_sub(cpu));
        }
    }
    let moved = f64::from(parcels) * PARCEL_BYTES as f64;
    let lines = ways.iter().zip(&mut samples).map(|(way, samples)| Line {
        way: way.name().to_owned(),
        mb_per_s: moved / 1e6 / quantile(&mut samples.wall, 0.5).as_secs_f64(),
        cpu_s_per_gb: quantile(&mut samples.cpu, 0.5).as_secs_f64() / (moved / 1e9),
        cpu_to_tls: 0.0,
    });
    let mut lines: Vec<_> = lines.collect();
    let tls = lines.iter().find(|line| line.way == ways::TLS);
    let tls = tls.map_or(f64::NAN, |line| line.cpu_s_per_gb);
    for line in &mut lines {
        line.cpu_to_tls = line.cpu_s_per_gb / tls;
    }
    Ok(lines)
}

/// Processor time of this process, user and system, to the microsecond. Zero when the system does not tell.
fn cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the pointer is to memory of the size that the call fills.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) != 0 {
            return Duration::ZERO;
        }
        usage.assume_init()
    };
    let part = |time: libc::timeval| {
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let micros = u64::try_from(time.tv_usec).unwrap_or(0);
        Duration::from_secs(seconds) + Duration::from_micros(micros)
    };
    part(usage.ru_utime) + part(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_way_carries_its_bytes_and_has_a_cost() {
        let lines = run(1, 1, Some(2)).await.expect("all ways work");
        assert_eq!(lines.len(), 5);
        for line in lines {
            assert!(line.mb_per_s > 1.0 && line.cpu_s_per_gb > 0.0, "{line:?}");
            assert!(line.cpu_to_tls > 0.0, "{line:?}");
        }
    }
}
