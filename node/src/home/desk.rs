//! Where the requests of this home can be found while they run: who claims one, and who asks where it is.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shoal_gossip::{Epoch, NodeId, RequestId, Tokens};
use shoal_migrate::ClaimAnswer;
use shoal_migrate::session::Claim;
use tokio::sync::{mpsc, oneshot, watch};

/// Claims that may wait for one request: the target's and the source's, each twice.
const CLAIMS: usize = 4;

/// Where a running request is, as its home knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// Who runs it.
    pub host: NodeId,
    /// Which ownership that is.
    pub epoch: Epoch,
    /// Prompt length.
    pub prompt: Tokens,
    /// Output received.
    pub output: Tokens,
}

/// A node's claim to run a request, and where the answer goes.
#[derive(Debug)]
pub(super) struct ClaimAsk {
    pub(super) by: NodeId,
    pub(super) claim: Claim,
    pub(super) reply: oneshot::Sender<ClaimAnswer>,
}

#[derive(Debug)]
struct Entry {
    claims: mpsc::Sender<ClaimAsk>,
    whereabouts: watch::Receiver<Whereabouts>,
}

/// The running requests of a home. Bounded by the client plane's bound on requests.
#[derive(Debug, Default)]
pub(super) struct Desk {
    entries: Mutex<BTreeMap<RequestId, Entry>>,
}

impl Desk {
    /// Enters a request until the seat is dropped.
    pub(super) fn enter(self: &Arc<Self>, request: RequestId, whereabouts: Whereabouts) -> Seat {
        let (sender, claims) = mpsc::channel(CLAIMS);
        let (teller, receiver) = watch::channel(whereabouts);
        let entry = Entry {
            claims: sender,
            whereabouts: receiver,
        };
        self.lock().insert(request, entry);
        Seat {
            desk: Arc::clone(self),
            request,
            claims,
            whereabouts: teller,
        }
    }

    /// Passes a claim to the request's follower and waits for its judgement. A request that is not here is over.
    pub(super) async fn claim(&self, by: NodeId, request: RequestId, claim: Claim) -> ClaimAnswer {
        let sender = self.lock().get(&request).map(|entry| entry.claims.clone());
        let Some(sender) = sender else {
            return ClaimAnswer::Lost;
        };
        let (reply, answer) = oneshot::channel();
        if sender.send(ClaimAsk { by, claim, reply }).await.is_err() {
            return ClaimAnswer::Lost;
        }
        answer.await.unwrap_or(ClaimAnswer::Lost)
    }

    /// Where a request is; `None` when it is over or was never here.
    pub(super) fn find(&self, request: RequestId) -> Option<Whereabouts> {
        let entries = self.lock();
        entries
            .get(&request)
            .map(|entry| *entry.whereabouts.borrow())
    }

    /// All of them, by request.
    pub(super) fn all(&self) -> Vec<(RequestId, Whereabouts)> {
        let entries = self.lock();
        entries
            .iter()
            .map(|(request, entry)| (*request, *entry.whereabouts.borrow()))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RequestId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request's place at the desk; held by its follower.
#[derive(Debug)]
pub(super) struct Seat {
    desk: Arc<Desk>,
    request: RequestId,
    pub(super) claims: mpsc::Receiver<ClaimAsk>,
    whereabouts: watch::Sender<Whereabouts>,
}

impl Seat {
    /// Notes where the request is now.
    pub(super) fn note(&self, change: impl FnOnce(&mut Whereabouts)) {
        self.whereabouts.send_modify(change);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.desk.lock().remove(&self.request);
    }
}
