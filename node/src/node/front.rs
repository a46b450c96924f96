//! The node as its client plane sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::{ClusterView, ModelFacts, NodeId, Readiness, Timestamp};

use crate::frontend::{ClientAsk, Frontend, HomeError, Running};
use crate::home::Home;
use crate::knowledge::Knowledge;

/// Joins home and knowledge for the client plane.
#[derive(Debug)]
pub(super) struct Front {
    home: Arc<Home>,
    knowledge: Arc<Knowledge>,
    max_view_age: Duration,
    closed: AtomicBool,
}

impl Front {
    pub(super) fn new(home: Arc<Home>, knowledge: Arc<Knowledge>, max_view_age: Duration) -> Self {
        Self {
            home,
            knowledge,
            max_view_age,
            closed: AtomicBool::new(false),
        }
    }

    /// From now on clients are sent elsewhere.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

#[async_trait]
impl Frontend for Front {
    fn this(&self) -> NodeId {
        self.knowledge.this()
    }

    fn now(&self) -> Timestamp {
        self.knowledge.now()
    }

    fn view(&self) -> Arc<ClusterView> {
        self.knowledge.view()
    }

    fn models(&self) -> Vec<ModelFacts> {
        let view = self.knowledge.view();
        let mut models: BTreeMap<&str, &ModelFacts> = BTreeMap::new();
        for model in view.rows().iter().flat_map(|row| &row.facts.models) {
            let known = models.entry(&model.id).or_insert(model);
            // Of one name on several nodes, the first that was made stands for all.
            if model.created < known.created {
                *known = model;
            }
        }
        models.into_values().cloned().collect()
    }

    fn accepting(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    fn usable_nodes(&self) -> usize {
        let (view, now) = (self.knowledge.view(), self.knowledge.now());
        view.rows()
            .iter()
            .filter(|row| {
                let fresh = row.age(now).is_some_and(|age| age <= self.max_view_age);
                let ready = row
                    .load
                    .is_some_and(|(load, _)| load.readiness == Readiness::Ready);
                fresh && ready
            })
            .count()
    }

    async fn start(&self, ask: ClientAsk) -> Result<Running, HomeError> {
        if !self.accepting() {
            return Err(HomeError::ShuttingDown);
        }
        self.home.start(ask).await
    }
}
