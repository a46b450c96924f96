//! A carrier that fails on demand: a decorator around any other, for tests and the simulator.
//!
//! Each parcel is given a [`Fault`] by a script, by a seed, or by a function of its header. What a fault cannot be: damage that
//! the carrier's own checksums have to find; the tests of each carrier do that.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use shoal_gossip::NodeId;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;

use crate::transfer::ends;
use crate::transfer::{
    KvTransfer, Parcel, ParcelHeader, Rejection, Transfer, TransferCapabilities, TransferError,
};

/// What becomes of one parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: it is carried.
    None,
    /// It does not arrive, and its sender is told that the transfer broke.
    Lose,
    /// It does not arrive, and its sender is told nothing, ever.
    Stall,
    /// It never sets out: the target cannot be reached.
    Fail,
    /// Its carrier finds it damaged: it does not arrive, and its sender is told why.
    Damage,
    /// One byte is flipped and the carrier does not notice: in the head when it has one, else in the body. The
    /// receiver has to.
    Alter {
        /// Which byte; counted round.
        at: usize,
    },
    /// It sets out so much later.
    Delay(Duration),
    /// It arrives twice. Its sender hears of one of the two.
    Duplicate,
    /// It arrives, but its sender is told that the transfer broke.
    LoseAnswer,
}

/// How often each fault comes, of 1,000 parcels. What is left of the thousand is carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// [`Fault::Lose`].
    pub lose: u32,
    /// [`Fault::Stall`].
    pub stall: u32,
    /// [`Fault::Fail`].
    pub fail: u32,
    /// [`Fault::Damage`].
    pub damage: u32,
    /// [`Fault::Alter`].
    pub alter: u32,
    /// [`Fault::Delay`] of up to [`MAX_DELAY`].
    pub delay: u32,
    /// [`Fault::Duplicate`].
    pub duplicate: u32,
    /// [`Fault::LoseAnswer`].
    pub lose_answer: u32,
}

/// Longest delay that a seed makes: longer than a proposal may take, shorter than a stage.
pub const MAX_DELAY: Duration = Duration::from_secs(2);

impl FaultRates {
    fn draw(&self, rng: &mut StdRng) -> Fault {
        let delay = MAX_DELAY.mul_f64(rng.random());
        let at = rng.random_range(0..usize::MAX);
        let mut drawn = rng.random_range(0..1_000u32);
        let faults = [
            (self.lose, Fault::Lose),
            (self.stall, Fault::Stall),
            (self.fail, Fault::Fail),
            (self.damage, Fault::Damage),
            (self.alter, Fault::Alter { at }),
            (self.delay, Fault::Delay(delay)),
            (self.duplicate, Fault::Duplicate),
            (self.lose_answer, Fault::LoseAnswer),
        ];
        for (rate, fault) in faults {
            match drawn.checked_sub(rate) {
                Some(left) => drawn = left,
                None => return fault,
            }
        }
        Fault::None
    }
}

type Choose = dyn FnMut(NodeId, &ParcelHeader) -> Fault + Send;

/// The decorator.
#[derive(Clone)]
pub struct Faulty {
    inner: Arc<dyn KvTransfer>,
    choose: Arc<Mutex<Box<Choose>>>,
    /// What became of each parcel, in the order of submission.
    done: Arc<Mutex<Vec<(ParcelHeader, Fault)>>>,
    tasks: TaskTracker,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

impl Faulty {
    /// Faults as `choose` says, which is asked once per parcel, in the order of submission.
    pub fn new(
        inner: Arc<dyn KvTransfer>,
        choose: impl FnMut(NodeId, &ParcelHeader) -> Fault + Send + 'static,
    ) -> Self {
        Self {
            inner,
            choose: Arc::new(Mutex::new(Box::new(choose))),
            done: Arc::default(),
            tasks: TaskTracker::new(),
        }
    }

    /// The first parcel gets the first fault, and so on; parcels beyond the script are carried.
    pub fn scripted(inner: Arc<dyn KvTransfer>, script: impl IntoIterator<Item = Fault>) -> Self {
        let mut script: VecDeque<_> = script.into_iter().collect();
        Self::new(inner, move |_, _| script.pop_front().unwrap_or(Fault::None))
    }

    /// The same seed and the same order of parcels make the same faults.
    pub fn seeded(inner: Arc<dyn KvTransfer>, seed: u64, rates: FaultRates) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        Self::new(inner, move |_, _| rates.draw(&mut rng))
    }

    /// What became of each parcel so far, in the order of submission. For a test's message when it fails.
    pub fn done(&self) -> Vec<(ParcelHeader, Fault)> {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.clone()
    }

    /// A transfer that comes out as `work` does, and is cancelled by its drop.
    fn carry(
        &self,
        parcel: &Parcel,
        work: impl Future<Output = Result<(), TransferError>> + Send + 'static,
    ) -> Transfer {
        let (transfer, ends) = ends::open(parcel);
        self.tasks.spawn(ends.run(work, || Duration::ZERO));
        transfer
    }
}

impl KvTransfer for Faulty {
    fn capabilities(&self) -> TransferCapabilities {
        self.inner.capabilities()
    }

    fn submit(&self, to: NodeId, parcel: Parcel) -> Transfer {
        let fault = {
            let mut choose = self.choose.lock().unwrap_or_else(PoisonError::into_inner);
            choose(to, &parcel.header)
        };
        {
            let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
            done.push((parcel.header, fault));
        }
        let inner = Arc::clone(&self.inner);
        let broken = || TransferError::Broken("a fault".to_owned());
        match fault {
            Fault::None => inner.submit(to, parcel),
            Fault::Lose => self.carry(&parcel, async move { Err(broken()) }),
            Fault::Stall => self.carry(&parcel, std::future::pending()),
            Fault::Fail => self.carry(&parcel, async move {
                Err(TransferError::Unreachable {
                    node: to,
                    reason: "a fault".to_owned(),
                })
            }),
            Fault::Damage => self.carry(&parcel, async {
                Err(TransferError::Rejected(Rejection::Damaged))
            }),
            Fault::Alter { at } => inner.submit(to, altered(parcel, at)),
            Fault::Delay(delay) => self.carry(&parcel.clone(), async move {
                sleep(delay).await;
                inner.submit(to, parcel).delivered().await.map(drop)
            }),
            Fault::Duplicate => {
                let second = inner.submit(to, parcel.clone());
                self.tasks
                    .spawn(async move { drop(second.delivered().await) });
                inner.submit(to, parcel)
            }
            Fault::LoseAnswer => self.carry(&parcel.clone(), async move {
                drop(inner.submit(to, parcel).delivered().await);
                Err(broken())
            }),
        }
    }
}

/// The parcel with one bit of a byte flipped. One without bytes stays as it is.
fn altered(mut parcel: Parcel, at: usize) -> Parcel {
    let part = match parcel.head.is_empty() {
        true => &mut parcel.body,
        false => &mut parcel.head,
    };
    let mut bytes = part.to_vec();
    if let Some(place) = at.checked_rem(bytes.len()) {
        bytes[place] ^= 0x01;
    }
    *part = Bytes::from(bytes);
    parcel
}

#[cfg(test)]
mod tests;
