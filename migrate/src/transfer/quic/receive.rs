//! The receiving side.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Buf, Bytes};
use quinn::{Connection, ReadError, RecvStream, SendStream};
use shoal_gossip::NodeId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use tracing::debug;

use crate::Buffers;
use crate::transfer::quic::{MessageError, QuicLimits, read_message};
use crate::transfer::wire::{
    MAX_PARTS, Opening, PartOpening, Reply, SectionReader, Sections, WireError, encode,
};
use crate::transfer::{Parcel, Receiver, Rejection};

/// Pieces that are taken off a stream at once. A piece is what one packet brought.
const PIECES: usize = 32;

/// The budget is counted in pieces of so many bytes.
const ROOM_UNIT: u64 = 1024;

/// Takes in parcels that come over QUIC.
#[derive(Debug)]
pub struct QuicReceiver {
    receiver: Receiver,
    pub(super) limits: QuicLimits,
    /// What is left of [`QuicLimits::receive_bytes`], in units of [`ROOM_UNIT`].
    pub(super) room: Arc<Semaphore>,
    buffers: Buffers,
    tasks: TaskTracker,
}

impl QuicReceiver {
    /// Hands parcels to `receiver`. Its tasks, one per parcel and a few per connection, are counted by `tasks`.
    pub fn new(receiver: Receiver, limits: QuicLimits, tasks: TaskTracker) -> Arc<Self> {
        let room = usize::try_from(limits.receive_bytes / ROOM_UNIT).unwrap_or(usize::MAX);
        Arc::new(Self {
            receiver,
            limits,
            room: Arc::new(Semaphore::new(room.min(Semaphore::MAX_PERMITS))),
            buffers: Buffers::default(),
            tasks,
        })
    }

    /// Takes in what comes over one connection, whose other end is `from`, until it ends. Whatever was whole by then is
    /// still taken in, by a task that outlives this. Safe to drop, which leaves the connection open.
    pub async fn serve(self: &Arc<Self>, connection: Connection, from: NodeId) {
        let peer = Peer {
            shared: Arc::clone(self),
            connection: connection.clone(),
            from,
            waiting: Arc::default(),
        };
        tokio::join!(peer.parcels(), peer.parts());
    }
}

/// Where the other streams of a parcel go.
type Parts = mpsc::Sender<(u32, RecvStream)>;

/// One connection.
#[derive(Clone)]
struct Peer {
    shared: Arc<QuicReceiver>,
    connection: Connection,
    from: NodeId,
    /// Admitted parcels that wait for other streams, by serial. As many as are read at once.
    waiting: Arc<Mutex<BTreeMap<u64, Parts>>>,
}

/// Why a parcel is not taken in.
enum Failure {
    /// The sender or the connection has gone, or is silent: there is nobody to tell.
    Gone(String),
    /// The sender is told.
    Refused(Rejection),
}

impl From<MessageError> for Failure {
    fn from(error: MessageError) -> Self {
        match error {
            MessageError::Gone(reason) => Self::Gone(reason),
            MessageError::Wire(error) => Self::Refused(error.into()),
        }
    }
}

impl From<WireError> for Failure {
    fn from(error: WireError) -> Self {
        Self::Refused(error.into())
    }
}

impl From<ReadError> for Failure {
    fn from(error: ReadError) -> Self {
        Self::Gone(error.to_string())
    }
}

impl Peer {
    /// Takes the first streams of parcels, as many as may be read at once.
    async fn parcels(&self) {
        let places = Arc::new(Semaphore::new(self.shared.limits.parcels_per_peer));
        while let Ok(place) = Arc::clone(&places).acquire_owned().await {
            let Ok((replies, stream)) = self.connection.accept_bi().await else {
                return;
            };
            let peer = self.clone();
            self.shared
                .tasks
                .spawn(async move { peer.parcel(replies, stream, place).await });
        }
    }

    /// Takes the other streams. QUIC's own limit bounds how many there are at once.
    async fn parts(&self) {
        while let Ok(stream) = self.connection.accept_uni().await {
            let peer = self.clone();
            self.shared
                .tasks
                .spawn(async move { peer.part(stream).await });
        }
    }

    /// Finds the parcel that a stream belongs to. One that belongs to none is stopped by its drop: its parcel
    /// has been given up.
    async fn part(&self, mut stream: RecvStream) {
        let patience = self.shared.limits.patience;
        let opening = timeout(patience, read_message::<PartOpening>(&mut stream)).await;
        if let Ok(Ok(PartOpening { serial, part })) = opening {
            let parcel = self.waiting().get(&serial).cloned();
            if let Some(parcel) = parcel {
                // There is room for all parts that a parcel may have; more are too many.
                drop(parcel.try_send((part, stream)));
            }
        }
    }

    /// One parcel, from its opening to the answer.
    async fn parcel(
        &self,
        mut replies: SendStream,
        stream: RecvStream,
        _place: OwnedSemaphorePermit,
    ) {
        let answer = match self.read(&mut replies, stream).await {
            Ok((parcel, room)) => {
                let taken = self.shared.receiver.deliver(self.from, parcel).await;
                drop(room);
                match taken {
                    Ok(()) => Reply::Taken,
                    Err(rejection) => Reply::Rejected(rejection.shortened()),
                }
            }
            Err(Failure::Refused(rejection)) => {
                debug!(from = %self.from, %rejection, "a parcel is not taken in");
                Reply::Rejected(rejection.shortened())
            }
            Err(Failure::Gone(reason)) => {
                return debug!(from = %self.from, reason, "a parcel did not arrive");
            }
        };
        // A sender that has gone needs no answer.
        drop(reply(&mut replies, &answer).await);
    }

    async fn read(
        &self,
        replies: &mut SendStream,
        mut stream: RecvStream,
    ) -> Result<(Parcel, OwnedSemaphorePermit), Failure> {
        let limits = &self.shared.limits;
        let patience = limits.patience;
        let opening: Opening = within(patience, read_message(&mut stream)).await??;
        opening.check(limits.max_parcel_bytes.min(limits.receive_bytes))?;
        self.shared
            .receiver
            .admit(self.from, &opening.header)
            .map_err(Failure::Refused)?;
        let (_listed, others) = self.list(&opening)?;
        let room = tokio::select! {
            biased;
            // A sender that gives up wants no replies; and whoever waits here reads nothing.
            _ = replies.stopped() => return Err(Failure::Gone("cancelled".to_owned())),
            room = self.room(opening.header.bytes()) => room?,
        };
        if opening.parts > 1 {
            reply(replies, &Reply::Admitted).await?;
        }
        let destination = (&opening, &self.shared.buffers);
        let sections = read_sections(destination, stream, others, patience).await?;
        Ok((sections.finish(opening.header)?, room))
    }

    /// Has the other streams of a parcel come to the receiver that is returned, until the guard is dropped.
    fn list(
        &self,
        opening: &Opening,
    ) -> Result<(Listed, mpsc::Receiver<(u32, RecvStream)>), Failure> {
        let (parts, others) = mpsc::channel(MAX_PARTS as usize);
        let mut waiting = self.waiting();
        if waiting.contains_key(&opening.serial) {
            let again = "a serial that is in use".to_owned();
            return Err(Failure::Refused(Rejection::Wrong(again)));
        }
        waiting.insert(opening.serial, parts);
        let listed = Listed {
            waiting: Arc::clone(&self.waiting),
            serial: opening.serial,
        };
        Ok((listed, others))
    }

    async fn room(&self, bytes: u64) -> Result<OwnedSemaphorePermit, Failure> {
        let units = u32::try_from(bytes.div_ceil(ROOM_UNIT)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.shared.room).acquire_many_owned(units);
        room.await
            .map_err(|_| Failure::Refused(Rejection::TooLarge))
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, Parts>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A parcel's place among those that wait for streams.
struct Listed {
    waiting: Arc<Mutex<BTreeMap<u64, Parts>>>,
    serial: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.remove(&self.serial);
    }
}

async fn reply(replies: &mut SendStream, reply: &Reply) -> Result<(), Failure> {
    let bytes = encode(reply)?;
    let written = replies.write_chunk(bytes).await;
    written.map_err(|error| Failure::Gone(error.to_string()))
}

async fn within<T>(patience: Duration, wait: impl Future<Output = T>) -> Result<T, Failure> {
    let waited = timeout(patience, wait).await;
    waited.map_err(|_| Failure::Gone("no headway".to_owned()))
}

/// Reads all sections. Parts other than the first are read by tasks of their own, which end with this.
async fn read_sections(
    (opening, buffers): (&Opening, &Buffers),
    stream: RecvStream,
    mut others: mpsc::Receiver<(u32, RecvStream)>,
    patience: Duration,
) -> Result<Sections, Failure> {
    let mut sections = Sections::new(opening, buffers)?;
    let (head, parts) = (&mut sections.head, std::mem::take(&mut sections.parts));
    let mut places: Vec<Option<SectionReader>> = parts.into_iter().map(Some).collect();
    let mut done: Vec<Option<SectionReader>> = places.iter().map(|_| None).collect();
    let mut readers = JoinSet::new();
    let first = places.first_mut().and_then(Option::take);
    let reading_first = async {
        let mut inflow = Inflow::new(stream, patience);
        inflow.fill(head).await?;
        let mut first = first.ok_or(WireError::Length("shorter"))?;
        inflow.fill(&mut first).await?;
        inflow.end().await?;
        Ok::<_, Failure>(first)
    };
    let reading_others = async {
        while done.iter().skip(1).any(Option::is_none) {
            let next = tokio::select! {
                // A reader's end is rarer than a stream's arrival, and both are few.
                Some(read) = readers.join_next() => Err(read),
                arrived = within(patience, others.recv()), if places.iter().any(Option::is_some) => Ok(arrived?),
            };
            match next {
                Ok(arrived) => {
                    let (part, stream) = arrived.ok_or_else(|| Failure::Gone(String::new()))?;
                    let place = places.get_mut(part as usize).and_then(Option::take);
                    let place = place.ok_or_else(|| WireError::Junk(format!("part {part}")))?;
                    readers.spawn(read_part(part, stream, place, patience));
                }
                Err(read) => {
                    let failed = |_| Failure::Gone("a reader has failed".to_owned());
                    let (part, place) = read.map_err(failed)??;
                    if let Some(done) = done.get_mut(part as usize) {
                        *done = Some(place);
                    }
                }
            }
        }
        Ok(())
    };
    let (first, ()) = tokio::try_join!(reading_first, reading_others)?;
    let others = done.into_iter().skip(1).flatten();
    sections.parts = std::iter::once(first).chain(others).collect();
    Ok(sections)
}

async fn read_part(
    part: u32,
    stream: RecvStream,
    mut place: SectionReader,
    patience: Duration,
) -> Result<(u32, SectionReader), Failure> {
    let mut inflow = Inflow::new(stream, patience);
    inflow.fill(&mut place).await?;
    inflow.end().await?;
    Ok((part, place))
}

/// What comes off one stream.
struct Inflow {
    stream: RecvStream,
    arrived: VecDeque<Bytes>,
    patience: Duration,
}

impl Inflow {
    fn new(stream: RecvStream, patience: Duration) -> Self {
        Self {
            stream,
            arrived: VecDeque::with_capacity(PIECES),
            patience,
        }
    }

    /// Reads a section to its end.
    async fn fill(&mut self, section: &mut SectionReader) -> Result<(), Failure> {
        while !section.is_whole() {
            let Some(mut piece) = self.next().await? else {
                return Err(WireError::Length("shorter").into());
            };
            let left = section.feed(&piece)?.len();
            if left > 0 {
                piece.advance(piece.len() - left);
                self.arrived.push_front(piece);
            }
        }
        Ok(())
    }

    /// Checks that nothing more comes.
    async fn end(&mut self) -> Result<(), Failure> {
        match self.next().await? {
            None => Ok(()),
            Some(_) => Err(WireError::Length("longer").into()),
        }
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        if self.arrived.is_empty() {
            let mut pieces = [const { Bytes::new() }; PIECES];
            let read = self.stream.read_chunks(&mut pieces);
            let count = within(self.patience, read).await??.unwrap_or(0);
            self.arrived.extend(pieces.into_iter().take(count));
        }
        Ok(self.arrived.pop_front())
    }
}
