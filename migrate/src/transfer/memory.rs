//! A carrier inside one process, for tests and the simulator: no sockets, and links that can be cut, slowed
//! and given a bandwidth. Time is tokio's, so a paused clock makes it exact.
//!
//! It keeps the contract of the real carriers (the contract suite runs over it). What it leaves out: the bytes
//! are handed over as they are, so they cannot be damaged; and a cut is noticed at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use shoal_gossip::{Clock, NodeId};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

use crate::transfer::ends::{self, Meter};
use crate::transfer::{
    KvReceiver, KvTransfer, Parcel, Receiver, Transfer, TransferCapabilities, TransferError,
};

/// Bytes of one parcel at most. As over QUIC.
const MAX_PARCEL_BYTES: u64 = 1 << 30;

/// Bytes between two looks at the link, and between two steps of progress.
const STEP_BYTES: u64 = 1 << 20;

/// What a link does to what it carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSpeed {
    /// Time a parcel's first byte takes, and its acknowledgement on the way back.
    pub latency: Duration,
    /// Bytes per second; `None` for no limit. Each parcel has its own.
    pub bytes_per_second: Option<u64>,
}

/// Nodes of this process and the links between them.
#[derive(Clone, Debug)]
pub struct MemoryHub {
    state: Arc<Mutex<State>>,
    /// Counts cuts, so that what is under way looks whether it is hit.
    cuts: watch::Sender<u64>,
    tasks: TaskTracker,
    clock: Arc<dyn Clock>,
}

#[derive(Debug, Default)]
struct State {
    /// Weak, since a receiver usually holds its own node's carrier.
    nodes: BTreeMap<NodeId, Weak<dyn KvReceiver>>,
    cut: BTreeSet<(NodeId, NodeId)>,
    speeds: BTreeMap<(NodeId, NodeId), LinkSpeed>,
}

impl MemoryHub {
    /// An empty hub. `clock` measures how long parcels take.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            state: Arc::default(),
            cuts: watch::Sender::new(0),
            tasks: TaskTracker::new(),
            clock,
        }
    }

    /// A node's carrier. Its receiver is reachable from now on, for as long as it lives. Submitting needs a
    /// tokio runtime.
    pub fn join(&self, node: NodeId, receiver: &Receiver) -> Arc<dyn KvTransfer> {
        self.lock().nodes.insert(node, Arc::downgrade(receiver));
        Arc::new(MemoryTransfer {
            this: node,
            hub: self.clone(),
        })
    }

    /// Cuts the way from `from` to `to`. Parcels on it break at once; those that go the other way break
    /// instead of being acknowledged.
    pub fn cut(&self, from: NodeId, to: NodeId) {
        self.lock().cut.insert((from, to));
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Mends it.
    pub fn mend(&self, from: NodeId, to: NodeId) {
        self.lock().cut.remove(&(from, to));
    }

    /// Slows the way from `from` to `to`, for parcels that set out from now on.
    pub fn slow(&self, from: NodeId, to: NodeId, speed: LinkSpeed) {
        self.lock().speeds.insert((from, to), speed);
    }

    fn receiver(&self, node: NodeId) -> Option<Receiver> {
        self.lock().nodes.get(&node)?.upgrade()
    }

    fn is_cut(&self, from: NodeId, to: NodeId) -> bool {
        self.lock().cut.contains(&(from, to))
    }

    fn speed(&self, from: NodeId, to: NodeId) -> LinkSpeed {
        let speed = self.lock().speeds.get(&(from, to)).copied();
        speed.unwrap_or_default()
    }

    async fn until_cut(&self, from: NodeId, to: NodeId) {
        let mut cuts = self.cuts.subscribe();
        while !self.is_cut(from, to) {
            if cuts.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One node's end.
#[derive(Debug)]
struct MemoryTransfer {
    this: NodeId,
    hub: MemoryHub,
}

impl KvTransfer for MemoryTransfer {
    fn capabilities(&self) -> TransferCapabilities {
        TransferCapabilities {
            name: "memory",
            max_parcel_bytes: MAX_PARCEL_BYTES,
            streams: 1,
            device_memory: false,
        }
    }

    fn submit(&self, to: NodeId, parcel: Parcel) -> Transfer {
        let (transfer, ends) = ends::open(&parcel);
        let (hub, from) = (self.hub.clone(), self.this);
        let meter = ends.meter();
        self.hub.tasks.spawn(async move {
            let clock = Arc::clone(&hub.clock);
            let started = clock.now();
            let took = move || clock.now().since(started);
            ends.run(carry(hub, (from, to), parcel, meter), took).await;
        });
        transfer
    }
}

async fn carry(
    hub: MemoryHub,
    (from, to): (NodeId, NodeId),
    parcel: Parcel,
    meter: Meter,
) -> Result<(), TransferError> {
    parcel.check(MAX_PARCEL_BYTES)?;
    let receiver = hub.receiver(to).ok_or(TransferError::UnknownNode(to))?;
    let cut = || TransferError::Broken("the link is cut".to_owned());
    if hub.is_cut(from, to) {
        return Err(TransferError::Unreachable {
            node: to,
            reason: "the link is cut".to_owned(),
        });
    }
    let speed = hub.speed(from, to);
    let travel = async {
        sleep(speed.latency).await;
        receiver
            .admit(from, &parcel.header)
            .map_err(TransferError::Rejected)?;
        let mut left = parcel.bytes();
        while left > 0 {
            let step = left.min(STEP_BYTES);
            match speed.bytes_per_second {
                Some(rate) => sleep(time_of(step, rate)).await,
                None => tokio::task::yield_now().await,
            }
            meter.add(step);
            left -= step;
        }
        Ok(())
    };
    tokio::select! {
        biased;
        () = hub.until_cut(from, to) => return Err(cut()),
        travelled = travel => travelled?,
    }
    drop(receiver);
    // The receiver may have gone meanwhile.
    let receiver = hub.receiver(to).ok_or_else(cut)?;
    // A task of its own: what is whole gets in, whatever becomes of the sender.
    let taking = hub
        .tasks
        .spawn(async move { receiver.deliver(from, parcel).await });
    tokio::select! {
        biased;
        () = hub.until_cut(to, from) => Err(cut()),
        taken = taking => match taken {
            Ok(taken) => {
                sleep(hub.speed(to, from).latency).await;
                taken.map_err(TransferError::Rejected)
            }
            Err(_) => Err(TransferError::Broken("the receiver has failed".to_owned())),
        },
    }
}

/// How long so many bytes take.
fn time_of(bytes: u64, bytes_per_second: u64) -> Duration {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
pub(super) mod tests;
