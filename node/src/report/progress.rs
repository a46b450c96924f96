//! A line of progress for whoever waits at the terminal.

use std::time::Duration;

use super::real;

/// A run that ends before this shows no progress.
const QUIET: Duration = Duration::from_secs(2);

/// Decides when a line of progress is due, and writes it. It reads no clock.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pause: Duration,
    shown: Option<Duration>,
}

impl Progress {
    /// With at least this time between two lines.
    pub fn new(pause: Duration) -> Self {
        Self { pause, shown: None }
    }

    /// The line to show `now`, the time since the start of the run, with `done` of `total` done.
    /// `None` if none is due, or there is nothing to do.
    pub fn line(&mut self, now: Duration, done: u64, total: u64) -> Option<String> {
        let rested = self
            .shown
            .is_none_or(|shown| now.saturating_sub(shown) >= self.pause);
        if now < QUIET || !rested || total == 0 {
            return None;
        }
        self.shown = Some(now);
        let done = done.min(total);
        let percent = u128::from(done) * 100 / u128::from(total);
        let rate = real(done) / now.as_secs_f64();
        let left = match done {
            0 => "time left unknown".to_owned(),
            _ => format!("about {:.0} s left", real(total - done) / rate),
        };
        Some(format!(
            "{percent:>3} %  {done} of {total}  {rate:.1}/s  {left}"
        ))
    }
}
