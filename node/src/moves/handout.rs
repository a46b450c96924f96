//! Where a resumed request and the stream of its home meet, whichever comes first.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shoal_gossip::{Epoch, RequestId};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

use crate::engine::EngineEvent;

/// A request that goes on here, for its home's stream.
#[derive(Debug)]
pub struct HandedOut {
    /// What it draws, from the index on that the home asked for.
    pub events: mpsc::Receiver<EngineEvent>,
    /// Prompt length.
    pub prompt_tokens: u32,
}

type Key = (RequestId, Epoch);

/// Resumed requests that wait for their home. One per session at most, and each for the grace period only.
#[derive(Debug, Default)]
pub(super) struct Handout {
    waiting: Mutex<BTreeMap<Key, HandedOut>>,
    changed: Notify,
}

impl Handout {
    /// Puts a resumed request out, and waits until its home has taken it. One that is not taken in time is
    /// dropped, which ends it in the engine. False then.
    pub(super) async fn offer(&self, key: Key, resumed: HandedOut, patience: Duration) -> bool {
        self.lock().insert(key, resumed);
        self.changed.notify_waiters();
        let taken = async {
            loop {
                let changed = self.changed.notified();
                if !self.lock().contains_key(&key) {
                    return;
                }
                changed.await;
            }
        };
        timeout(patience, taken).await.is_ok() || self.lock().remove(&key).is_none()
    }

    /// Takes a resumed request, waiting for it at most so long.
    pub(super) async fn take(&self, key: Key, patience: Duration) -> Option<HandedOut> {
        let found = async {
            loop {
                // Made before looking, so that what is put out in between is not missed.
                let changed = self.changed.notified();
                let found = self.lock().remove(&key);
                if let Some(found) = found {
                    self.changed.notify_waiters();
                    return found;
                }
                changed.await;
            }
        };
        timeout(patience, found).await.ok()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, HandedOut>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
