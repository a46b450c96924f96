//! The carrier's ends of a [`Transfer`].

use std::future::Future;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::transfer::{Delivered, Parcel, Progress, Transfer, TransferError};

/// What a carrier's task keeps of one transfer.
#[derive(Debug)]
pub(super) struct Ends {
    outcome: oneshot::Sender<Result<Delivered, TransferError>>,
    progress: Meter,
    cancelled: CancellationToken,
}

/// Tells how far a parcel is.
#[derive(Clone, Debug)]
pub(super) struct Meter(watch::Sender<Progress>);

impl Meter {
    /// So many bytes more have been handed to the network.
    pub(super) fn add(&self, bytes: u64) {
        self.0
            .send_modify(|progress| progress.sent = progress.total.min(progress.sent + bytes));
    }

    /// Hears of it.
    pub(super) fn subscribe(&self) -> watch::Receiver<Progress> {
        self.0.subscribe()
    }
}

/// A transfer of `parcel`, and the ends of it.
pub(super) fn open(parcel: &Parcel) -> (Transfer, Ends) {
    let (outcome, told) = oneshot::channel();
    let (progress, shown) = watch::channel(Progress {
        sent: 0,
        total: parcel.bytes(),
    });
    let cancelled = CancellationToken::new();
    let guard = cancelled.clone().drop_guard();
    let ends = Ends {
        outcome,
        progress: Meter(progress),
        cancelled,
    };
    (Transfer::new(told, shown, guard), ends)
}

impl Ends {
    pub(super) fn meter(&self) -> Meter {
        self.progress.clone()
    }

    /// Runs `work` to its end, or until the transfer is cancelled, and tells what came of it. `took` is asked
    /// once, at the end.
    pub(super) async fn run(
        self,
        work: impl Future<Output = Result<(), TransferError>>,
        took: impl FnOnce() -> Duration,
    ) {
        let result = tokio::select! {
            biased;
            () = self.cancelled.cancelled() => Err(TransferError::Cancelled),
            result = work => result,
        };
        let bytes = self.progress.0.borrow().total;
        let told = result.map(|()| Delivered {
            bytes,
            took: took(),
        });
        // Whoever dropped the transfer does not want to know.
        drop(self.outcome.send(told));
    }
}
