//! The sending side.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use quinn::{Connection, RecvStream, WriteError};
use shoal_gossip::{Clock, NodeId};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::transfer::ends::{self, Meter};
use crate::transfer::quic::{
    BulkLink, LinkError, Links, MessageError, Outgoing, QuicLimits, read_message,
};
use crate::transfer::wire::{
    Opening, PartOpening, Reply, Section, SectionWriter, encode, part_range, parts_of,
};
use crate::transfer::{KvTransfer, Parcel, Transfer, TransferCapabilities, TransferError};

/// Sends parcels over QUIC.
#[derive(Debug)]
pub struct QuicTransfer {
    shared: Arc<Shared>,
    runtime: Handle,
    tasks: TaskTracker,
}

#[derive(Debug)]
struct Shared {
    links: Links,
    limits: QuicLimits,
    clock: Arc<dyn Clock>,
    serials: AtomicU64,
}

impl QuicTransfer {
    /// A carrier over these connections. Its tasks, one per parcel under way, run on the runtime that this is called
    /// in, and are counted by `tasks`.
    pub fn new(
        links: Arc<dyn super::BulkLinks>,
        limits: QuicLimits,
        clock: Arc<dyn Clock>,
        tasks: TaskTracker,
    ) -> Self {
        let shared = Shared {
            links,
            limits,
            clock,
            serials: AtomicU64::new(0),
        };
        Self {
            shared: Arc::new(shared),
            runtime: Handle::current(),
            tasks,
        }
    }
}

impl KvTransfer for QuicTransfer {
    fn capabilities(&self) -> TransferCapabilities {
        let limits = &self.shared.limits;
        TransferCapabilities {
            name: "quic",
            max_parcel_bytes: limits.max_parcel_bytes,
            streams: limits.parts,
            device_memory: false,
        }
    }

    fn submit(&self, to: NodeId, parcel: Parcel) -> Transfer {
        let (transfer, ends) = ends::open(&parcel);
        let (shared, meter) = (Arc::clone(&self.shared), ends.meter());
        let clock = Arc::clone(&shared.clock);
        let carrying = async move {
            let started = clock.now();
            let took = || clock.now().since(started);
            ends.run(shared.carry(to, parcel, meter), took).await;
        };
        self.tasks.spawn_on(carrying, &self.runtime);
        transfer
    }
}

impl Shared {
    async fn carry(
        self: Arc<Self>,
        to: NodeId,
        parcel: Parcel,
        meter: Meter,
    ) -> Result<(), TransferError> {
        let limits = &self.limits;
        parcel.check(limits.max_parcel_bytes)?;
        let unreachable = |reason: String| TransferError::Unreachable { node: to, reason };
        let link = self.links.connect(to).await.map_err(|error| match error {
            LinkError::Unknown => TransferError::UnknownNode(to),
            LinkError::Unreachable(reason) => unreachable(reason),
        })?;
        let BulkLink { connection, user } = link;
        let (stream, replies) = timeout(limits.patience, connection.open_bi())
            .await
            .map_err(|_| unreachable("it takes no more parcels from us".to_owned()))?
            .map_err(|error| unreachable(error.to_string()))?;
        let body = parcel.header.body_bytes;
        let wanted = body / limits.part_bytes.max(1);
        let wanted = u32::try_from(wanted).unwrap_or(u32::MAX).min(limits.parts);
        let opening = Opening {
            serial: self.serials.fetch_add(1, Ordering::Relaxed),
            header: parcel.header,
            parts: parts_of(body, wanted),
        };
        let (admit, admitted) = watch::channel(false);
        let sender = Sender {
            connection,
            opening,
            parcel,
            meter: meter.clone(),
            admitted,
        };
        let writing = async {
            let written = sender.write(Outgoing(stream)).await;
            // Whatever stopped us, the receiver's answer says why; without one, its silence does. The
            // streams that are done must stay as they are until then.
            let _streams = written;
            std::future::pending::<()>().await;
        };
        let result = tokio::select! {
            biased;
            answer = answer(replies, admit) => answer,
            () = silence(&meter, limits.patience) => {
                Err(TransferError::Broken("no headway".to_owned()))
            }
            () = writing => Err(TransferError::Broken("writing ended".to_owned())),
        };
        drop(user);
        result
    }
}

/// Reads replies up to the last.
async fn answer(mut replies: RecvStream, admit: watch::Sender<bool>) -> Result<(), TransferError> {
    loop {
        match read_message(&mut replies).await {
            Ok(Reply::Admitted) => {
                admit.send_replace(true);
            }
            Ok(Reply::Taken) => return Ok(()),
            Ok(Reply::Rejected(rejection)) => return Err(TransferError::Rejected(rejection)),
            Err(MessageError::Gone(reason)) => return Err(TransferError::Broken(reason)),
            Err(MessageError::Wire(error)) => return Err(TransferError::Broken(error.to_string())),
        }
    }
}

/// Returns when there was no headway for so long.
async fn silence(meter: &Meter, patience: Duration) {
    let mut progress = meter.subscribe();
    while timeout(patience, progress.changed()).await.is_ok() {}
}

/// Writes one parcel.
struct Sender {
    connection: Connection,
    opening: Opening,
    parcel: Parcel,
    meter: Meter,
    admitted: watch::Receiver<bool>,
}

impl Sender {
    /// Writes everything, and returns the streams, which are given up when dropped.
    async fn write(&self, mut first: Outgoing) -> Result<Vec<Outgoing>, WriteError> {
        let first = async {
            let opening = encode(&self.opening).unwrap_or_default();
            first.0.write_chunk(opening).await?;
            self.section(&mut first, Section::Head, self.parcel.head.clone())
                .await?;
            self.part(&mut first, 0).await?;
            Ok(first)
        };
        let others = (1..self.opening.parts).map(|part| self.other(part));
        let (first, mut all) = futures::future::try_join(first, try_join_all(others)).await?;
        all.push(first);
        Ok(all)
    }

    /// Writes a part on a stream of its own.
    async fn other(&self, part: u32) -> Result<Outgoing, WriteError> {
        let mut admitted = self.admitted.clone();
        if admitted.wait_for(|admitted| *admitted).await.is_err() {
            // The last reply was read: nobody polls this any more.
            std::future::pending::<()>().await;
        }
        let mut stream = Outgoing(self.connection.open_uni().await?);
        let serial = self.opening.serial;
        let opening = encode(&PartOpening { serial, part }).unwrap_or_default();
        stream.0.write_chunk(opening).await?;
        self.part(&mut stream, part).await?;
        Ok(stream)
    }

    async fn part(&self, stream: &mut Outgoing, part: u32) -> Result<(), WriteError> {
        let range = part_range(self.parcel.header.body_bytes, self.opening.parts, part);
        let bytes = slice(&self.parcel.body, range);
        self.section(stream, Section::Part(part), bytes).await?;
        // Only a stream that the other side has stopped cannot be finished; its answer will tell.
        drop(stream.0.finish());
        Ok(())
    }

    async fn section(
        &self,
        stream: &mut Outgoing,
        section: Section,
        bytes: Bytes,
    ) -> Result<(), WriteError> {
        for mut chunk in SectionWriter::new(section, bytes) {
            let length = chunk[0].len() as u64;
            stream.0.write_all_chunks(&mut chunk).await?;
            self.meter.add(length);
        }
        Ok(())
    }
}

/// The range of a body that lies in memory, so that its length fits.
fn slice(body: &Bytes, range: Range<u64>) -> Bytes {
    let edge = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(body.len());
    body.slice(edge(range.start)..edge(range.end))
}
