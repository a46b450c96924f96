//! What can happen in a simulated mesh.

use shoal_gossip::{Incarnation, LoadSummary};

use crate::dispatch::Candidate;
use crate::mesh::messages::Answer;
use crate::simulate::hand_over::Word;
use crate::workload::Arrival;

/// What happens at a moment. Nodes and requests by place.
#[derive(Debug)]
pub(super) enum Event {
    /// The next request arrives.
    Arrival(Arrival),
    /// A node says its load.
    Publish(usize),
    /// A node looks whether something should leave it.
    Look(usize),
    /// The state of all nodes is noted.
    Sample,
    /// The central scheduler pairs nodes.
    Pair,
    /// A step of an engine ends.
    StepEnd(usize),
    /// A promise of an engine ends.
    Wake(usize),
    /// An offer reaches a host.
    Offer {
        request: usize,
        at: usize,
        hops: u8,
    },
    /// Probes reach those that a host asks.
    Probe {
        request: usize,
        by: usize,
        asked: Vec<Candidate>,
    },
    /// Their answers reach the host.
    Probed {
        request: usize,
        by: usize,
        asked: Vec<Candidate>,
    },
    /// A host's answer reaches the home.
    Answer {
        request: usize,
        answer: Answer,
        load: LoadSummary,
    },
    /// A submission reaches a host.
    Submit {
        request: usize,
        to: usize,
        reservation: Option<u64>,
    },
    /// The host's refusal of a submission reaches the home.
    Refused {
        request: usize,
        from: usize,
    },
    /// Something of a hand-over.
    HandOver {
        id: u64,
        word: Word,
    },
    /// A fault of the plan, by place.
    Fault(usize),
    /// Something that one node sent to another arrives, in a mesh with faults.
    Arrives {
        from: usize,
        to: usize,
        event: Box<Self>,
    },
    /// Nobody answered an offer, or took a submission, in time.
    NoAnswer {
        request: usize,
    },
    NoStart {
        request: usize,
        to: usize,
    },
    /// A request that nobody took has waited.
    Again {
        request: usize,
    },
    /// Home and host of a request have not heard each other for long.
    Silence {
        request: usize,
        host: usize,
        life: Incarnation,
    },
}
