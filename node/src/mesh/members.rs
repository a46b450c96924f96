//! Who may speak to us: the nodes that a current record names, and nobody else.

use std::sync::Arc;

use libp2p::PeerId;
use shoal_gossip::{ClusterView, NodeFacts, NodeId};
use tokio::sync::watch;

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

    /// What every node says of itself, by name. Not yet checked: see [`Member::of`].
    pub(crate) fn records(&self) -> Vec<Arc<NodeFacts>> {
        let view = Arc::clone(&self.view.borrow());
        view.rows()
            .iter()
            .map(|row| Arc::clone(&row.facts))
            .collect()
    }

    /// Waits until a view no longer fulfils `stays`. Waits for ever once the state plane has ended: the
    /// last view stands.
    pub(crate) async fn until_not(mut self, stays: impl Fn(&Self) -> bool + Send) {
        while stays(&self) {
            if !self.changed().await {
                std::future::pending::<()>().await;
            }
        }
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
