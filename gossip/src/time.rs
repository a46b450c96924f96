//! Time as a value: cores are handed a [`Timestamp`] and never look at a clock.

use std::fmt;
use std::ops::Add;
use std::time::Duration;

/// Time since this node started.
///
/// Ours and not `std::time::Instant`: it can be built, printed, compared and kept in a seed file,
/// and it cannot be read from thin air. Two nodes' timestamps are never compared; only ages travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(Duration);

impl Timestamp {
    /// The start of the node.
    pub const ZERO: Self = Self(Duration::ZERO);

    /// `elapsed` after the start.
    pub fn since_start(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// How long after `earlier` this is; zero when `earlier` is in fact later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The time so long before this; the start of the node when it had not started then.
    pub fn before(self, age: Duration) -> Self {
        Self(self.0.saturating_sub(age))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(delay))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}s", self.0.as_secs_f64())
    }
}

/// What a shell asks for the time, so that a test or the simulator can be the one who answers.
pub trait Clock: Send + Sync + fmt::Debug {
    /// The time now. Never goes back.
    fn now(&self) -> Timestamp;
}
