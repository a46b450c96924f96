//! Which sequence numbers of a sender were seen.

/// A sliding window of the last [`ReplayWindow::WIDTH`] sequence numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplayWindow {
    /// Highest number accepted.
    highest: u64,
    /// Bit n: `highest - n` was accepted.
    seen: u128,
}

impl ReplayWindow {
    /// Numbers remembered. A node sends about 9 datagrams per gossip interval to one peer, so
    /// 128 is several intervals of reordering; older ones count as replays.
    pub(crate) const WIDTH: u64 = 128;

    /// A window that has accepted `first`.
    pub(crate) fn starting_at(first: u64) -> Self {
        Self {
            highest: first,
            seen: 1,
        }
    }

    /// Accepts a number once; `false` for one seen before or too old to tell.
    pub(crate) fn accept(&mut self, sequence: u64) -> bool {
        if sequence > self.highest {
            let ahead = sequence - self.highest;
            self.seen = if ahead >= Self::WIDTH {
                1
            } else {
                (self.seen << ahead) | 1
            };
            self.highest = sequence;
            return true;
        }
        let behind = self.highest - sequence;
        if behind >= Self::WIDTH {
            return false;
        }
        let bit = 1u128 << behind;
        let fresh = self.seen & bit == 0;
        self.seen |= bit;
        fresh
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_edge_of_the_window_is_128_numbers() {
        let mut window = ReplayWindow::starting_at(1);
        assert!(window.accept(200));
        assert!(window.accept(73));
        assert!(!window.accept(72));
        assert!(!window.accept(73));
        assert!(window.accept(u64::MAX));
        assert!(!window.accept(200));
    }

    proptest! {
        #[test]
        fn no_number_is_accepted_twice_and_every_new_one_within_reach_is(
            first in 0u64..400,
            numbers in prop::collection::vec(0u64..400, 0..300),
        ) {
            let mut window = ReplayWindow::starting_at(first);
            let mut accepted = BTreeSet::from([first]);
            for number in numbers {
                let highest = accepted.last().copied().unwrap_or_default();
                let within_reach = number + ReplayWindow::WIDTH > highest;
                let expected = within_reach && !accepted.contains(&number);
                prop_assert_eq!(window.accept(number), expected);
                if expected {
                    accepted.insert(number);
                }
            }
        }
    }
}
