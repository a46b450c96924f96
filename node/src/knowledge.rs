//! What this node knows of the mesh, behind one lock: the view, what was heard since, the policy and
//! its chance. Lent to the pure cores for the time of one decision (microseconds).

use std::sync::{Arc, Mutex, PoisonError};

use rand::rngs::StdRng;
use shoal_gossip::{Clock, ClusterView, LoadSummary, NodeId, Timestamp};
use tokio::sync::watch;

use crate::dispatch::{Corrections, Policy, PolicyName, World};
use crate::load::LoadSource;

/// Knowledge of the mesh.
#[derive(Debug)]
pub struct Knowledge {
    this: NodeId,
    clock: Arc<dyn Clock>,
    own: Arc<LoadSource>,
    view: watch::Receiver<Arc<ClusterView>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    corrections: Corrections,
    policy: Policy,
    rng: StdRng,
    seen: Timestamp,
}

impl Knowledge {
    /// Of the node whose load `own` makes. `rng` decides all its draws.
    pub fn new(
        clock: Arc<dyn Clock>,
        own: Arc<LoadSource>,
        view: watch::Receiver<Arc<ClusterView>>,
        policy: PolicyName,
        rng: StdRng,
    ) -> Self {
        let this = view.borrow().this;
        Self {
            this,
            clock,
            own,
            view,
            state: Mutex::new(State {
                corrections: Corrections::default(),
                policy: Policy::new(policy),
                rng,
                seen: Timestamp::ZERO,
            }),
        }
    }

    /// This node.
    pub fn this(&self) -> NodeId {
        self.this
    }

    /// The time of ages.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The view as published; immutable.
    pub fn view(&self) -> Arc<ClusterView> {
        self.view.borrow().clone()
    }

    /// Every view from now on, as it is published.
    pub fn views(&self) -> watch::Receiver<Arc<ClusterView>> {
        let mut views = self.view.clone();
        views.mark_unchanged();
        views
    }

    /// Lends everything to a core. This node's own row is as fresh as can be: it must serve its
    /// clients even when no gossip goes round at all.
    pub fn decide<T>(&self, act: impl FnOnce(&mut World<'_>) -> T) -> T {
        let view = self.view();
        let now = self.now();
        let own = self.own.summary();
        let mut state = self.lock();
        let State {
            corrections,
            policy,
            rng,
            seen,
        } = &mut *state;
        if view.taken_at > *seen {
            *seen = view.taken_at;
            corrections.forget_absent(&view);
        }
        corrections.hear(self.this, own, now);
        act(&mut World {
            this: self.this,
            now,
            view: &*view,
            corrections,
            policy,
            rng,
        })
    }

    /// Takes note of a load that came with a message. Those of nodes that are in no view are ignored,
    /// which bounds what is kept.
    pub fn hear(&self, from: NodeId, load: LoadSummary) {
        if self.view.borrow().row(from).is_some() {
            let now = self.now();
            self.lock().corrections.hear(from, load, now);
        }
    }

    /// Takes note of a node that did not answer in time.
    pub fn silent(&self, node: NodeId) {
        if self.view.borrow().row(node).is_some() {
            let now = self.now();
            self.lock().corrections.silent(node, now);
        }
    }

    /// Changes the corrections alone, for a request that ends in the middle of an offer.
    pub fn correct(&self, act: impl FnOnce(&mut Corrections)) {
        act(&mut self.lock().corrections);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
