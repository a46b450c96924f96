//! Who may speak to us: the nodes that a current record names, and nobody else.

use std::sync::Arc;
use std::time::Duration;

use libp2p::PeerId;
use shoal_gossip::{ClusterView, Incarnation, NodeFacts, NodeId};
use tokio::sync::watch;
use tokio::time::timeout;

/// How long a node that no view names keeps its connections. Gossip calls a node dead whose machine stands still for two seconds;
/// what it streams goes on when it wakes up, and for streams that nobody else can finish that is the only way. New
/// connections need a name in the view from the first moment.
pub(crate) const FORGIVEN: Duration = match cfg!(test) {
    false => Duration::from_secs(10),
    // Unit tests wait for it.
    true => Duration::from_millis(1_500),
};

/// The view, read as a guest list. Cheap to clone; always the newest view.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    view: watch::Receiver<Arc<ClusterView>>,
}

/// One node of the list.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// Its identity.
    pub(crate) peer: PeerId,
    /// What it says of itself.
    pub(crate) facts: Arc<NodeFacts>,
}

impl Member {
    /// Reads a record. `None` for one whose short name is not that of its identity: whoever wrote it
    /// claims to be somebody else.
    pub(crate) fn of(facts: &Arc<NodeFacts>) -> Option<Self> {
        let peer: PeerId = facts.peer_id.parse().ok()?;
        (node_of(&peer) == facts.node).then(|| Self {
            peer,
            facts: Arc::clone(facts),
        })
    }
}

impl Members {
    pub(crate) fn new(view: watch::Receiver<Arc<ClusterView>>) -> Self {
        Self { view }
    }

    /// The node with this short name, if a current record names it.
    pub(crate) fn find(&self, node: NodeId) -> Option<Member> {
        Member::of(&self.view.borrow().row(node)?.facts)
    }

    /// The short name of an identity, if a current record names it.
    pub(crate) fn admit(&self, peer: &PeerId) -> Option<NodeId> {
        let node = node_of(peer);
        (self.find(node)?.peer == *peer).then_some(node)
    }

    /// The newest view.
    pub(crate) fn view(&self) -> Arc<ClusterView> {
        Arc::clone(&self.view.borrow())
    }

    /// What every node says of itself, by name. Not yet checked: see [`Member::of`].
    pub(crate) fn records(&self) -> Vec<Arc<NodeFacts>> {
        self.view()
            .rows()
            .iter()
            .map(|row| Arc::clone(&row.facts))
            .collect()
    }

    /// Waits until no view has named a node for [`FORGIVEN`]: one that is slow is back before that. With `life`, a later life of
    /// it ends the wait at once. Waits for ever once the state plane has ended: the last view stands.
    pub(crate) async fn until_gone(mut self, node: NodeId, life: Option<Incarnation>) {
        loop {
            let named = self.find(node).map(|member| member.facts.incarnation);
            if named.is_some_and(|now| life.is_some_and(|life| now > life)) {
                return;
            }
            let changed = match named {
                Some(_) => Ok(self.changed().await),
                None => timeout(FORGIVEN, self.until_named(node)).await,
            };
            match changed {
                Ok(true) => {}
                Ok(false) => std::future::pending().await,
                Err(_) => return,
            }
        }
    }

    async fn until_named(&mut self, node: NodeId) -> bool {
        while self.find(node).is_none() {
            if !self.changed().await {
                return false;
            }
        }
        true
    }

    /// Waits for a newer view. `false` when none will come: the state plane has ended, and the last
    /// view stands. Safe to drop.
    pub(crate) async fn changed(&mut self) -> bool {
        self.view.changed().await.is_ok()
    }
}

/// The short name that belongs to an identity.
pub(crate) fn node_of(peer: &PeerId) -> NodeId {
    NodeId::of_peer(&peer.to_bytes())
}
