//! What both sessions do alike: ask, tell, claim, and let a request run.

use std::sync::Arc;

use shoal_gossip::{Epoch, NodeId, RequestId};
use shoal_migrate::ClaimAnswer;
use shoal_migrate::session::Claim;
use tracing::debug;

use crate::mesh::messages::{Answer, Ask};
use crate::moves::Moves;
use crate::moves::handout::HandedOut;

impl Moves {
    /// Lets a request run here in a new ownership, and holds its events for its home's stream.
    pub(super) fn resume(
        self: &Arc<Self>,
        (request, epoch): (RequestId, Epoch),
        next: Epoch,
        from: u32,
    ) {
        let Some(moving) = self.engine.moving() else {
            return;
        };
        let prompt_tokens = moving.job(request).map_or(0, |job| job.prompt.0);
        match moving.resume(request, epoch, next, from) {
            Ok(events) => {
                let resumed = HandedOut {
                    events,
                    prompt_tokens,
                };
                let moves = Arc::clone(self);
                let patience = self.settings.limits.grace;
                self.tasks.spawn(async move {
                    let key = (request, next);
                    if !moves.handout.offer(key, resumed, patience).await {
                        debug!(%request, "its home did not come for it; it is dropped");
                    }
                });
            }
            Err(error) => {
                // The home finds nothing here and goes on from its ledger.
                debug!(%request, %error, "could not be resumed");
                self.engine.abort(request, next);
            }
        }
    }

    /// Asks another node, or this one; `None` when there is no answer in time.
    pub(super) async fn ask(&self, to: NodeId, ask: Ask) -> Option<Answer> {
        let ways = self.ways.get()?;
        match ways.links.ask(to, ask, self.settings.ask_deadline).await {
            Ok(answered) => Some(answered.answer),
            Err(error) => {
                debug!(%to, %error, "no answer in a hand-over");
                None
            }
        }
    }

    /// Tells another node something that needs no answer, in a task of the node.
    pub(super) fn tell(self: &Arc<Self>, to: NodeId, ask: Ask) {
        let moves = Arc::clone(self);
        self.tasks
            .spawn(async move { drop(moves.ask(to, ask).await) });
    }

    /// Claims a request at its home; `None` when it does not answer.
    pub(super) async fn claim(&self, request: RequestId, claim: Claim) -> Option<ClaimAnswer> {
        match self.ask(request.home, Ask::Claim { request, claim }).await {
            Some(Answer::Claim(answer)) => Some(answer),
            Some(_) | None => None,
        }
    }
}
