//! What every carrier must do, whatever it goes over: the suite behind [`KvTransfer`] and [`KvReceiver`].
//!
//! `transfer_contract_tests!(make)` makes one test of each check; `make` joins two nodes, the second of which has the
//! receiver that it is given. What the suite cannot prove: behaviour under loss and over real distances, and
//! that damage on the way is caught, since it cannot reach the bytes; each carrier's own tests do that.
#![expect(clippy::panic, reason = "a contract suite fails by panicking")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use shoal_gossip::{Epoch, NodeId, RequestId, Tokens};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

use crate::transfer::{
    Delivered, KvReceiver, KvTransfer, MAX_HEAD_BYTES, Parcel, ParcelHeader, ParcelKind, Receiver,
    Rejection, Transfer, TransferError,
};
use crate::{KvRange, MigrationId, StageIndex};

/// Any wait of a check; far more than a sound carrier needs.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two nodes and a carrier between them.
pub struct Rig {
    /// The sender's.
    pub carrier: Arc<dyn KvTransfer>,
    /// The sender.
    pub from: NodeId,
    /// The node that has the receiver.
    pub to: NodeId,
    /// Breaks the link for good.
    pub break_link: Box<dyn Fn() + Send + Sync>,
    /// Keeps parcels from arriving whole, once they are admitted, until what it returns is dropped.
    pub hold: Box<dyn Fn() -> Box<dyn Any + Send> + Send + Sync>,
    /// What must live as long as the rig.
    pub keep: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for Rig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rig")
            .field("carrier", &self.carrier)
            .finish_non_exhaustive()
    }
}

/// Makes a test of each check of the carrier contract.
#[macro_export]
macro_rules! transfer_contract_tests {
    ($make:expr) => {
        $crate::transfer_contract_tests! { $make;
            a_parcel_arrives_whole_and_as_it_was
            parcels_of_any_size_arrive
            many_parcels_travel_at_once
            a_big_parcel_arrives
            an_unwanted_parcel_is_refused_and_the_next_is_not
            what_the_receiver_does_not_take_in_goes_back
            a_receiver_that_is_slow_paces_its_sender
            progress_grows_to_the_whole
            a_cancelled_parcel_does_not_arrive
            a_parcel_whose_transfer_is_dropped_does_not_arrive
            nobody_is_an_unknown_node
            a_link_that_breaks_fails_what_is_on_it
            a_link_that_breaks_before_the_answer_leaves_doubt
            a_parcel_that_is_too_long_is_not_sent
        }
    };
    ($make:expr; $($check:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $check() {
                $crate::transfer::contract::$check($make).await;
            }
        )*
    };
}

/// A receiver that keeps what it gets, and does as it is told.
#[derive(Debug)]
pub struct Shelf {
    taken: watch::Sender<Vec<(NodeId, Parcel)>>,
    admitted: watch::Sender<usize>,
    offered: watch::Sender<usize>,
    /// What `admit` says to a stage of this number.
    unwanted: Option<(StageIndex, Rejection)>,
    /// What `deliver` says to a stage of this number.
    refused: Option<(StageIndex, Rejection)>,
    /// One permit for each parcel that may be taken in.
    gate: Semaphore,
}

impl Default for Shelf {
    /// Takes everything.
    fn default() -> Self {
        Self {
            taken: watch::Sender::new(Vec::new()),
            admitted: watch::Sender::new(0),
            offered: watch::Sender::new(0),
            unwanted: None,
            refused: None,
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
        }
    }
}

impl Shelf {
    /// What it got, in order.
    pub fn taken(&self) -> Vec<(NodeId, Parcel)> {
        self.taken.borrow().clone()
    }
}

#[async_trait]
impl KvReceiver for Shelf {
    fn admit(&self, _from: NodeId, header: &ParcelHeader) -> Result<(), Rejection> {
        self.admitted.send_modify(|admitted| *admitted += 1);
        match &self.unwanted {
            Some((stage, rejection)) if *stage == header.stage => Err(rejection.clone()),
            Some(_) | None => Ok(()),
        }
    }

    async fn deliver(&self, from: NodeId, parcel: Parcel) -> Result<(), Rejection> {
        self.offered.send_modify(|offered| *offered += 1);
        if let Ok(permit) = self.gate.acquire().await {
            permit.forget();
        }
        match &self.refused {
            Some((stage, rejection)) if *stage == parcel.header.stage => {
                return Err(rejection.clone());
            }
            Some(_) | None => {}
        }
        self.taken.send_modify(|taken| taken.push((from, parcel)));
        Ok(())
    }
}

/// Bytes that repeat nowhere nearby.
fn pattern(length: usize, salt: u64) -> Bytes {
    let word = |n: u64| {
        (n ^ salt)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
    };
    let words = (0..length.div_ceil(8) as u64).flat_map(|n| word(n).to_le_bytes());
    let mut bytes: Vec<u8> = Vec::with_capacity(length.next_multiple_of(8));
    bytes.extend(words);
    bytes.truncate(length);
    bytes.into()
}

/// A parcel of some lengths, different for each stage.
pub fn parcel(stage: u16, head: usize, body: usize) -> Parcel {
    let kind = match KvRange::new(Tokens(0), Tokens(16)) {
        Some(range) if body > 0 => ParcelKind::Stage(range),
        Some(_) | None => ParcelKind::Opening,
    };
    let migration = MigrationId {
        request: RequestId {
            home: NodeId(3),
            serial: 4,
        },
        epoch: Epoch::FIRST,
        target: NodeId(2),
        attempt: 1,
    };
    let salt = u64::from(stage) << 32;
    Parcel::new(
        migration,
        StageIndex(stage),
        kind,
        pattern(head, salt),
        pattern(body, !salt),
    )
}

async fn within<T>(what: &str, wait: impl Future<Output = T>) -> T {
    match timeout(PATIENCE, wait).await {
        Ok(value) => value,
        Err(_) => panic!("{what} took too long"),
    }
}

async fn reaches(what: &str, count: &watch::Sender<usize>, wanted: usize) {
    let mut seen = count.subscribe();
    let reached = within(what, seen.wait_for(|count| *count >= wanted)).await;
    assert!(reached.is_ok(), "{what}");
}

async fn outcome(transfer: Transfer) -> Result<Delivered, TransferError> {
    within("a transfer", transfer.delivered()).await
}

async fn arrives(rig: &Rig, parcel: Parcel) {
    let bytes = parcel.bytes();
    let delivered = outcome(rig.carrier.submit(rig.to, parcel)).await;
    match delivered {
        Ok(delivered) => assert_eq!(delivered.bytes, bytes),
        Err(error) => panic!("a parcel of {bytes} bytes: {error}"),
    }
}

/// See its name.
pub async fn a_parcel_arrives_whole_and_as_it_was(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let sent = parcel(1, 1_000, 1_000_000);
    arrives(&rig, sent.clone()).await;
    let taken = shelf.taken();
    assert!(taken == [(rig.from, sent)], "it came out different");
}

/// See its name.
pub async fn parcels_of_any_size_arrive(make: impl AsyncFnOnce(Receiver) -> Rig) {
    const CHUNK: usize = crate::transfer::wire::CHUNK_BYTES;
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let sizes = [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 17 * CHUNK + 5];
    let mut stage = 0;
    for head in [0, 1, CHUNK, 3 * CHUNK + 1] {
        for body in sizes {
            let sent = parcel(stage, head, body);
            arrives(&rig, sent.clone()).await;
            let last = shelf.taken().pop();
            assert!(
                last == Some((rig.from, sent)),
                "{head} and {body} bytes came out different"
            );
            stage += 1;
        }
    }
    assert_eq!(shelf.taken().len(), usize::from(stage));
}

/// See its name.
pub async fn many_parcels_travel_at_once(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let sent: Vec<_> = (0..64)
        .map(|stage| parcel(stage, 10, usize::from(stage) * 50_000))
        .collect();
    let under_way: Vec<_> = sent
        .iter()
        .rev()
        .map(|parcel| rig.carrier.submit(rig.to, parcel.clone()))
        .collect();
    for transfer in under_way {
        if let Err(error) = outcome(transfer).await {
            panic!("{error}");
        }
    }
    let mut taken = shelf.taken();
    taken.sort_by_key(|(_, parcel)| parcel.header.stage);
    let expected: Vec<_> = sent.into_iter().map(|parcel| (rig.from, parcel)).collect();
    assert!(taken == expected, "they came out different");
}

/// See its name.
pub async fn a_big_parcel_arrives(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let sent = parcel(1, 0, 64 << 20);
    arrives(&rig, sent.clone()).await;
    assert!(shelf.taken() == [(rig.from, sent)], "it came out different");
}

/// See its name.
pub async fn an_unwanted_parcel_is_refused_and_the_next_is_not(
    make: impl AsyncFnOnce(Receiver) -> Rig,
) {
    let shelf = Arc::new(Shelf {
        unwanted: Some((StageIndex(7), Rejection::Unknown)),
        ..Shelf::default()
    });
    let rig = make(Arc::clone(&shelf) as _).await;
    for body in [0, 1_000, 64 << 20] {
        let refused = outcome(rig.carrier.submit(rig.to, parcel(7, 10, body))).await;
        assert_eq!(refused, Err(TransferError::Rejected(Rejection::Unknown)));
        arrives(&rig, parcel(8, 10, 10)).await;
    }
    assert_eq!(*shelf.offered.borrow(), 3, "an unwanted parcel was offered");
}

/// See its name.
pub async fn what_the_receiver_does_not_take_in_goes_back(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let rejection = Rejection::Wrong("a gap after token 5".to_owned());
    let shelf = Arc::new(Shelf {
        refused: Some((StageIndex(7), rejection.clone())),
        ..Shelf::default()
    });
    let rig = make(Arc::clone(&shelf) as _).await;
    let refused = outcome(rig.carrier.submit(rig.to, parcel(7, 10, 1_000_000))).await;
    assert_eq!(refused, Err(TransferError::Rejected(rejection)));
    arrives(&rig, parcel(8, 10, 1_000_000)).await;
    assert_eq!(shelf.taken().len(), 1);
}

/// See its name.
pub async fn a_receiver_that_is_slow_paces_its_sender(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf {
        gate: Semaphore::new(0),
        ..Shelf::default()
    });
    let rig = make(Arc::clone(&shelf) as _).await;
    let mut slow = Box::pin(
        rig.carrier
            .submit(rig.to, parcel(1, 10, 1_000_000))
            .delivered(),
    );
    reaches("a parcel offered", &shelf.offered, 1).await;
    let early = timeout(Duration::from_millis(50), &mut slow).await;
    assert!(early.is_err(), "delivered before it was taken in");
    // Another is not held up by it.
    let other = rig.carrier.submit(rig.to, parcel(2, 10, 1_000_000));
    reaches("another parcel offered", &shelf.offered, 2).await;
    shelf.gate.add_permits(2);
    let both = (within("the slow one", slow).await, outcome(other).await);
    assert!(matches!(both, (Ok(_), Ok(_))), "{both:?}");
}

/// See its name.
pub async fn progress_grows_to_the_whole(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf {
        gate: Semaphore::new(0),
        ..Shelf::default()
    });
    let rig = make(Arc::clone(&shelf) as _).await;
    let sent = parcel(1, 1_000, 32 << 20);
    let total = sent.bytes();
    let transfer = rig.carrier.submit(rig.to, sent);
    let mut before = transfer.progress();
    assert_eq!(before.total, total);
    let grows = async {
        while *shelf.offered.borrow() == 0 {
            let now = transfer.progress();
            assert!(
                now.sent >= before.sent && now.sent <= total,
                "{before:?} {now:?}"
            );
            before = now;
            tokio::task::yield_now().await;
        }
    };
    within("the parcel offered", grows).await;
    assert_eq!(transfer.progress().sent, total);
    shelf.gate.add_permits(1);
    assert!(outcome(transfer).await.is_ok());
}

/// See its name.
pub async fn a_cancelled_parcel_does_not_arrive(make: impl AsyncFnOnce(Receiver) -> Rig) {
    gives_up(make, Transfer::cancel).await;
}

/// See its name.
pub async fn a_parcel_whose_transfer_is_dropped_does_not_arrive(
    make: impl AsyncFnOnce(Receiver) -> Rig,
) {
    gives_up(make, |transfer| drop(transfer.delivered())).await;
}

async fn gives_up(make: impl AsyncFnOnce(Receiver) -> Rig, give_up: impl Fn(Transfer)) {
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let held = (rig.hold)();
    let transfer = rig.carrier.submit(rig.to, parcel(1, 10, 64 << 20));
    reaches("the parcel admitted", &shelf.admitted, 1).await;
    give_up(transfer);
    drop(held);
    // What is submitted later arrives; what was cancelled has not, nor does it hold anything up.
    arrives(&rig, parcel(2, 10, 64 << 20)).await;
    let taken = shelf.taken();
    assert_eq!(taken.len(), 1, "the cancelled parcel arrived");
    assert_eq!(taken[0].1.header.stage, StageIndex(2));
}

/// See its name.
pub async fn nobody_is_an_unknown_node(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let nobody = NodeId(0xdead);
    let unknown = outcome(rig.carrier.submit(nobody, parcel(1, 1, 1))).await;
    assert_eq!(unknown, Err(TransferError::UnknownNode(nobody)));
}

/// See its name.
pub async fn a_link_that_breaks_fails_what_is_on_it(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let held = (rig.hold)();
    let transfer = rig.carrier.submit(rig.to, parcel(1, 10, 64 << 20));
    reaches("the parcel admitted", &shelf.admitted, 1).await;
    (rig.break_link)();
    let broken = outcome(transfer).await;
    assert!(
        matches!(broken, Err(TransferError::Broken(_))),
        "{broken:?}"
    );
    drop(held);
    let lost = outcome(rig.carrier.submit(rig.to, parcel(2, 1, 1))).await;
    assert!(
        matches!(lost, Err(TransferError::Unreachable { .. })),
        "{lost:?}"
    );
    assert_eq!(*shelf.offered.borrow(), 0);
}

/// See its name.
pub async fn a_link_that_breaks_before_the_answer_leaves_doubt(
    make: impl AsyncFnOnce(Receiver) -> Rig,
) {
    let shelf = Arc::new(Shelf {
        gate: Semaphore::new(0),
        ..Shelf::default()
    });
    let rig = make(Arc::clone(&shelf) as _).await;
    let transfer = rig.carrier.submit(rig.to, parcel(1, 10, 1_000));
    reaches("the parcel offered", &shelf.offered, 1).await;
    (rig.break_link)();
    let broken = outcome(transfer).await;
    assert!(
        matches!(broken, Err(TransferError::Broken(_))),
        "{broken:?}"
    );
    // It was whole: the receiver takes it in all the same.
    shelf.gate.add_permits(1);
    let mut taken = shelf.taken.subscribe();
    let kept = within("taking in", taken.wait_for(|taken| taken.len() == 1)).await;
    assert!(kept.is_ok());
}

/// See its name.
pub async fn a_parcel_that_is_too_long_is_not_sent(make: impl AsyncFnOnce(Receiver) -> Rig) {
    let shelf = Arc::new(Shelf::default());
    let rig = make(Arc::clone(&shelf) as _).await;
    let max = rig.carrier.capabilities().max_parcel_bytes;
    let bytes = usize::try_from(max).map_or(usize::MAX, |max| max + 1);
    // Zeroes that nobody reads take no memory.
    let zeroes = |length: usize| Bytes::from(vec![0; length]);
    let header = parcel(1, 0, 0).header;
    let too_long = [
        (Bytes::new(), zeroes(bytes)),
        (zeroes(MAX_HEAD_BYTES as usize + 1), Bytes::new()),
    ];
    for (head, body) in too_long {
        let sent = Parcel::new(header.migration, header.stage, header.kind, head, body);
        let refused = outcome(rig.carrier.submit(rig.to, sent)).await;
        assert!(
            matches!(refused, Err(TransferError::TooLong { .. })),
            "{refused:?}"
        );
    }
    assert_eq!(*shelf.admitted.borrow(), 0);
}
