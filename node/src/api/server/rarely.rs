//! Says again what goes on and on, but not each time.

use std::time::Duration;

use shoal_gossip::{Clock, MonotonicClock, Timestamp};

/// Least time between two lines about the same thing.
const PAUSE: Duration = Duration::from_secs(1);

/// When something was said last, and how often it was not.
#[derive(Debug)]
pub(super) struct Rarely {
    clock: MonotonicClock,
    last: Option<Timestamp>,
    unsaid: u64,
}

impl Rarely {
    pub(super) fn new() -> Self {
        Self {
            clock: MonotonicClock::start(),
            last: None,
            unsaid: 0,
        }
    }

    /// Whether it is to be said now: then with how often it happened since it was said last, this time included.
    pub(super) fn say(&mut self) -> Option<u64> {
        self.say_at(self.clock.now())
    }

    fn say_at(&mut self, now: Timestamp) -> Option<u64> {
        self.unsaid += 1;
        if self.last.is_some_and(|last| now.since(last) < PAUSE) {
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_once_a_second_with_how_often_it_happened() {
        let mut rarely = Rarely::new();
        let at = |ms| Timestamp::since_start(Duration::from_millis(ms));
        for (ms, said) in [
            (0, Some(1)),
            (50, None),
            (999, None),
            (1_000, Some(3)),
            (1_999, None),
            (2_000, Some(2)),
            (9_000, Some(1)),
        ] {
            assert_eq!(rarely.say_at(at(ms)), said, "{ms}");
        }
    }
}
