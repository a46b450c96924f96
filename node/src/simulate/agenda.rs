//! What is going to happen, in order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use shoal_gossip::Timestamp;

/// Events by time; those of the same moment in the order in which they were entered, so that a run is a function of
/// its seed.
#[derive(Debug)]
pub(super) struct Agenda<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    entered: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Timestamp,
    serial: u64,
    event: E,
}

impl<E> Entry<E> {
    fn key(&self) -> (Timestamp, u64) {
        (self.at, self.serial)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl<E> Agenda<E> {
    pub(super) fn new() -> Self {
        Self {
            heap: BinaryHeap::new(),
            entered: 0,
        }
    }

    pub(super) fn enter(&mut self, at: Timestamp, event: E) {
        let serial = self.entered;
        self.entered += 1;
        self.heap.push(Reverse(Entry { at, serial, event }));
    }

    /// The next event and its time.
    pub(super) fn next(&mut self) -> Option<(Timestamp, E)> {
        let Reverse(Entry { at, event, .. }) = self.heap.pop()?;
        Some((at, event))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn events_come_by_time_and_then_as_they_were_entered() {
        let at = |ms| Timestamp::since_start(Duration::from_millis(ms));
        let mut agenda = Agenda::new();
        for (ms, name) in [(5, 'c'), (1, 'a'), (5, 'd'), (2, 'b'), (5, 'e')] {
            agenda.enter(at(ms), name);
        }
        let order: String = std::iter::from_fn(|| agenda.next())
            .map(|(_, name)| name)
            .collect();
        assert_eq!(order, "abcde");
        assert!(agenda.next().is_none());
    }
}
