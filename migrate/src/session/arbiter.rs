//! Who owns a request: the home's side of a claim.

use shoal_gossip::{Epoch, NodeId};

use crate::ClaimAnswer;

/// One node's claim to run a request from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Claim {
    /// The ownership it wants to begin.
    pub epoch: Epoch,
    /// Output tokens it has.
    pub output: u32,
}

/// The home's record of who owns one request.
///
/// An epoch has one owner, for ever: it is given by [`claim`](Self::claim) to the first node that asks for the
/// next one, or by [`pass_on`](Self::pass_on) to the node where the home itself placed the request. What was placed
/// cannot be claimed: a node that also has an older copy of the request would run it twice in one ownership.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Arbiter {
    epoch: Epoch,
    owner: Option<NodeId>,
    claimed: bool,
    over: bool,
}

impl Default for Arbiter {
    fn default() -> Self {
        Self::new()
    }
}

impl Arbiter {
    /// A request that nobody owns yet.
    pub fn new() -> Self {
        Self {
            epoch: Epoch::default(),
            owner: None,
            claimed: false,
            over: false,
        }
    }

    /// The current ownership.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Who holds it.
    pub fn owner(&self) -> Option<NodeId> {
        self.owner
    }

    /// Begins the next ownership at a node the home chose: the first placement, or a replay.
    pub fn pass_on(&mut self, to: NodeId) -> Epoch {
        self.epoch = self.epoch.next();
        self.owner = Some(to);
        self.claimed = false;
        self.epoch
    }

    /// The request has ended; no claim is granted any more.
    pub fn end(&mut self) {
        self.over = true;
    }

    /// Judges a claim. `received` counts the output tokens that the home has. Idempotent: the owner of an
    /// epoch that was claimed is told so again, as often as it asks with all the output that the home has.
    pub fn claim(&mut self, by: NodeId, claim: Claim, received: u32) -> ClaimAnswer {
        // Less output than the client has: it would have to be drawn again, and might be drawn otherwise.
        if self.over || self.epoch == Epoch::default() || claim.output < received {
            return ClaimAnswer::Lost;
        }
        let again = claim.epoch == self.epoch && self.owner == Some(by) && self.claimed;
        let next = claim.epoch > self.epoch && claim.epoch == self.epoch.next();
        if !again && !next {
            return ClaimAnswer::Lost;
        }
        self.epoch = claim.epoch;
        self.owner = Some(by);
        self.claimed = true;
        ClaimAnswer::Granted { from: received }
    }
}

#[cfg(test)]
mod tests;
