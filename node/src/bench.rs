//! Measurements of this program by itself, each a sub-command of `shoal bench`. Ratios are taken side
//! by side in one run, since machines are shared and noisy.

pub mod dispatch;

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
}
