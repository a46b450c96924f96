//! Whether a connection is doing anything.
//!
//! One rule for everything a client can dawdle over: a connection on which no request is at work has
//! so long to bring one, head and all. That covers connections that never say a word, heads that
//! trickle in, the bytes from which the version of HTTP is told, and idle ones kept alive.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use crate::api::body::AtEnd;

/// Counts the requests at work on one connection.
#[derive(Clone)]
pub(super) struct Activity {
    at_work: Arc<watch::Sender<usize>>,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self {
            at_work: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Begins a request, which ends when the guard is dropped.
    pub(super) fn begin(&self) -> AtWork {
        self.at_work.send_modify(|count| *count += 1);
        AtWork {
            at_work: Arc::clone(&self.at_work),
        }
    }

    pub(super) fn watch(&self) -> watch::Receiver<usize> {
        self.at_work.subscribe()
    }
}

/// A request at work.
pub(super) struct AtWork {
    at_work: Arc<watch::Sender<usize>>,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.at_work.send_modify(|count| *count -= 1);
    }
}

impl AtEnd for AtWork {
    fn at_end(self) {}
}

/// Returns once nothing has been at work for `limit`.
pub(super) async fn idle(mut at_work: watch::Receiver<usize>, limit: Duration) {
    loop {
        let count = at_work
            .wait_for(|count| *count == 0)
            .await
            .map(|count| *count);
        let changed = async {
            match count {
                Ok(_) => at_work.changed().await.is_ok(),
                Err(_) => false,
            }
        };
        tokio::select! {
            () = sleep(limit) => return,
            changed = changed => if !changed {
                // The connection itself is gone; whoever waits here is about to be dropped.
                pending::<()>().await;
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_requests_is_idle_after_the_limit() {
        let activity = Activity::new();
        timeout(LIMIT * 2, idle(activity.watch(), LIMIT))
            .await
            .unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_at_work_keeps_a_connection_however_long_it_takes() {
        let activity = Activity::new();
        let guard = activity.begin();
        let idle = idle(activity.watch(), LIMIT);
        tokio::pin!(idle);
        assert!(timeout(LIMIT * 100, &mut idle).await.is_err());
        drop(guard);
        assert!(timeout(LIMIT / 2, &mut idle).await.is_err());
        timeout(LIMIT, &mut idle).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_comes_and_goes_starts_the_wait_anew() {
        let activity = Activity::new();
        let idle = idle(activity.watch(), LIMIT);
        tokio::pin!(idle);
        assert!(timeout(LIMIT / 2, &mut idle).await.is_err());
        drop(activity.begin());
        assert!(timeout(LIMIT * 3 / 4, &mut idle).await.is_err());
        timeout(LIMIT, &mut idle).await.unwrap();
    }
}
