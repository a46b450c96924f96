//! The node as its client plane sees it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use shoal_gossip::{ClusterView, ModelFacts, NodeId, Readiness, RequestId, Timestamp};
use shoal_migrate::CopyManner;
use tokio_util::sync::CancellationToken;

use crate::frontend::{ClientAsk, DrainAnswer, Frontend, HomeError, RequestRow, Running};
use crate::home::Home;
use crate::knowledge::Knowledge;
use crate::links::Links;
use crate::mesh::messages::{Answer, Ask, MoveAnswer};
use crate::moves::Moves;

/// How long another node may take to say that it stops.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// Joins home and knowledge for the client plane.
#[derive(Debug)]
pub(super) struct Front {
    home: Arc<Home>,
    moves: Arc<Moves>,
    knowledge: Arc<Knowledge>,
    links: Arc<Links>,
    max_view_age: Duration,
    closed: AtomicBool,
    /// Cancelled when somebody wants this node to stop.
    drain: CancellationToken,
    /// The models of the view that was asked for last: every request asks, and a view lives for many.
    models: Mutex<Option<ModelsOf>>,
}

/// The models of one view.
type ModelsOf = (Arc<ClusterView>, Arc<[ModelFacts]>);

impl Front {
    pub(super) fn new(
        home: Arc<Home>,
        moves: Arc<Moves>,
        knowledge: Arc<Knowledge>,
        (links, drain): (Arc<Links>, CancellationToken),
        max_view_age: Duration,
    ) -> Self {
        Self {
            home,
            moves,
            knowledge,
            links,
            drain,
            max_view_age,
            closed: AtomicBool::new(false),
            models: Mutex::default(),
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

    fn models(&self) -> Arc<[ModelFacts]> {
        let view = self.knowledge.view();
        let mut last = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((of, models)) if Arc::ptr_eq(of, &view) => Arc::clone(models),
            _ => {
                let models = models_of(&view);
                *last = Some((view, Arc::clone(&models)));
                models
            }
        }
    }

    fn accepting(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    fn preemptions(&self) -> u64 {
        self.home.preemptions()
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

    fn requests(&self) -> Vec<RequestRow> {
        let this = self.this();
        let hosted = self.moves.jobs().into_iter().map(|job| RequestRow {
            id: job.request,
            host: this,
            epoch: job.epoch,
            prompt: job.prompt,
            output: job.output,
            job: Some(job),
        });
        let mut rows: BTreeMap<RequestId, RequestRow> = hosted.map(|row| (row.id, row)).collect();
        for (id, at) in self.home.running() {
            let job = rows.remove(&id).and_then(|row| row.job);
            // The home says where it is: a copy of it may be arriving here.
            let row = RequestRow {
                id,
                host: at.host,
                epoch: at.epoch,
                prompt: at.prompt,
                output: at.output,
                job: job.filter(|_| at.host == this),
            };
            rows.insert(id, row);
        }
        rows.into_values().collect()
    }

    async fn migrate(&self, request: RequestId, to: NodeId, manner: CopyManner) -> MoveAnswer {
        let at = self.home.whereabouts(request);
        self.moves
            .asked(self.this(), at, (request, to, manner))
            .await
    }

    async fn drain(&self, node: NodeId) -> DrainAnswer {
        if node == self.this() {
            self.drain.cancel();
            return DrainAnswer::Begun;
        }
        if self.view().row(node).is_none() {
            return DrainAnswer::Unknown;
        }
        match self.links.ask(node, Ask::Drain, DRAIN_DEADLINE).await {
            Ok(answered) if answered.answer == Answer::Done => DrainAnswer::Begun,
            Ok(_) | Err(_) => DrainAnswer::Silent,
        }
    }

    async fn start(&self, ask: ClientAsk) -> Result<Running, HomeError> {
        if !self.accepting() {
            return Err(HomeError::ShuttingDown);
        }
        self.home.start(ask).await
    }
}

/// Union of the models of all nodes in a view, by name.
fn models_of(view: &ClusterView) -> Arc<[ModelFacts]> {
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
