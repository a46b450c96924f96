//! The only reader of the machine's clocks.

use std::time::{Duration, Instant, SystemTime};

use crate::time::{Clock, Timestamp};

/// The machine's monotonic clock, counted from its own creation.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock {
    started: Instant,
}

impl MonotonicClock {
    /// Starts counting now.
    #[expect(
        clippy::disallowed_methods,
        reason = "this type is the one reader of the clock"
    )]
    pub fn start() -> Self {
        Self {
            started: Instant::now(),
        }
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Timestamp {
        Timestamp::since_start(self.started.elapsed())
    }
}

/// Wall time since 1970, for logs, incarnations and the age check of sealed datagrams; zero on a
/// machine whose clock stands before 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "this function is the one reader of wall time"
)]
pub fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
}
