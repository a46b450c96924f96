//! What is going to happen, in order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use shoal_gossip::Timestamp;

/// Events by time; those of the same moment in the order in which they were entered, so that a run is a function of
/// its seed.
#[derive(Debug)]
pub(super) struct Agenda<E> {
    /// When, how many were entered before, and where the event lies: events are large, and a heap moves what it holds.
    heap: BinaryHeap<Reverse<(Timestamp, u64, usize)>>,
    events: Vec<Option<E>>,
    unused: Vec<usize>,
    entered: u64,
}

impl<E> Agenda<E> {
    pub(super) fn new() -> Self {
        Self {
            heap: BinaryHeap::new(),
            events: Vec::new(),
            unused: Vec::new(),
            entered: 0,
        }
    }

    pub(super) fn enter(&mut self, at: Timestamp, event: E) {
        let place = self.unused.pop().unwrap_or(self.events.len());
        match self.events.get_mut(place) {
            Some(free) => *free = Some(event),
            None => self.events.push(Some(event)),
        }
        self.heap.push(Reverse((at, self.entered, place)));
        self.entered += 1;
    }

    /// The next event and its time.
    pub(super) fn next(&mut self) -> Option<(Timestamp, E)> {
        let Reverse((at, _, place)) = self.heap.pop()?;
        let event = self.events.get_mut(place)?.take()?;
        self.unused.push(place);
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
