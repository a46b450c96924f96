//! Measurements of this program by itself, each a sub-command of `shoal bench`. Ratios are taken side
//! by side in one run, since machines are shared and noisy.

pub mod bulk;
pub mod dispatch;
pub mod load;
pub mod path;

use std::time::{Duration, Instant};

/// Reads the machine's clock; the benches are the one place where time is the result.
#[expect(clippy::disallowed_methods, reason = "a bench measures time")]
fn clock() -> Instant {
    Instant::now()
}

/// The value below which a share of the samples lies, by nearest rank. Zero without samples.
fn quantile(samples: &mut [Duration], share: f64) -> Duration {
    samples.sort_unstable();
    let Some(last) = samples.len().checked_sub(1) else {
        return Duration::ZERO;
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a rank within the slice"
    )]
    let rank = (last as f64 * share.clamp(0.0, 1.0)).round() as usize;
    samples[rank.min(last)]
}

/// Processor time this process has used, user and system, at the system's resolution of 10 ms.
/// Zero where `/proc` does not tell.
fn cpu_time() -> Duration {
    /// Ticks per second of `/proc`'s counters: fixed at 100 for user space on Linux.
    const TICKS: u64 = 100;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field is the name in brackets and may hold spaces; utime and stime are the 12th and
    // 13th after it.
    let ticks: u64 = stat
        .rsplit(')')
        .next()
        .into_iter()
        .flat_map(str::split_whitespace)
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    Duration::from_millis(ticks * 1_000 / TICKS)
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_sample_by_rank() {
        let mut samples: Vec<_> = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!(quantile(&mut samples, 0.0), Duration::from_millis(1));
        assert_eq!(quantile(&mut samples, 0.5), Duration::from_millis(51));
        assert_eq!(quantile(&mut samples, 1.0), Duration::from_millis(100));
        assert_eq!(quantile(&mut [], 0.5), Duration::ZERO);
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = cpu_time();
        let mut sum = 0u64;
        while cpu_time() <= before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(cpu_time() > before);
    }
}
