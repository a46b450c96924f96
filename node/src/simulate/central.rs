//! The two schedulers that only a simulator can have: one process that sees every node as it is.

use shoal_gossip::Blocks;
use shoal_migrate::MoveReason;

use crate::dispatch::Freeness;
use crate::engine::moving::JobPhase;
use crate::simulate::Scheduling;
use crate::simulate::event::Event;
use crate::simulate::mesh::Mesh;
use crate::workload::Arrival;

impl<A: Iterator<Item = Arrival>> Mesh<'_, A> {
    /// Places a request at the freest node, by loads that are exact and with everything counted that is on its way; or,
    /// to flood, at the first one.
    pub(super) fn place_centrally(&mut self, request: usize) {
        let to = match self.plan.scheduling {
            Scheduling::Flood => 0,
            _ => self.freest(),
        };
        let demand = self.demand(request, to);
        self.nodes[to].on_its_way += demand;
        let home = self.requests[request].home();
        let submit = Event::Submit {
            request,
            to,
            reservation: None,
        };
        self.send((home, to), submit);
    }

    /// A submission that the central scheduler made is at its node.
    pub(super) fn came(&mut self, request: usize, to: usize) {
        let demand = self.demand(request, to);
        self.nodes[to].on_its_way -= demand;
    }

    fn freest(&mut self) -> usize {
        let mut best = (Freeness::LEAST, 0);
        for place in 0..self.nodes.len() {
            let load = self.nodes[place].load();
            let freeness = Freeness::for_dispatch(&load, self.nodes[place].on_its_way);
            if freeness > best.0 {
                best = (freeness, place);
            }
        }
        best.1
    }

    /// Pairs the least free node with the freest, the second least with the second freest, and so on, as long as the one is below
    /// the lower threshold and the other above the upper; each source gives one request, the one with the least KV
    /// (Llumnix, OSDI'24 §4.4: lower priority first, then shorter).
    pub(super) fn pair(&mut self) {
        let (low, high) = self.plan.llumnix;
        let low = Freeness::of_blocks(i64::from(low));
        let high = Freeness::of_blocks(i64::from(high));
        let mut sources = Vec::new();
        let mut targets = Vec::new();
        for place in 0..self.nodes.len() {
            let freeness = Freeness::for_migration(&self.nodes[place].load());
            let node = &self.nodes[place];
            if freeness < low && node.leaving == 0 {
                sources.push((freeness, place));
            } else if freeness > high && node.arriving == 0 {
                targets.push((std::cmp::Reverse(freeness), place));
            }
        }
        sources.sort_unstable();
        targets.sort_unstable();
        for ((_, from), (_, to)) in sources.into_iter().zip(targets) {
            self.move_one(from, to);
        }
    }

    fn move_one(&mut self, from: usize, to: usize) {
        let room: Blocks = self.nodes[to].load().free();
        let jobs = self.nodes[from].jobs(&self.requests);
        let shortest = jobs
            .iter()
            .filter(|job| job.phase == JobPhase::Decode && job.blocks < room)
            .min_by_key(|job| (job.computed, job.request));
        if let Some(job) = shortest {
            self.begin_hand_over(job, (from, to), MoveReason::Asked);
        }
    }
}
