use shoal_gossip::testing::TokioClock;
use tokio::time::timeout;

use super::*;
use crate::transfer::Receiver;
use crate::transfer::contract::{Rig, Shelf, parcel};
use crate::transfer::memory::MemoryHub;

const FROM: NodeId = NodeId(1);
const TO: NodeId = NodeId(2);

/// Carriers between two nodes, and what arrives.
fn joined() -> (Arc<dyn KvTransfer>, Arc<Shelf>, Box<dyn std::any::Any>) {
    let hub = MemoryHub::new(Arc::new(TokioClock::start()));
    let shelf = Arc::new(Shelf::default());
    let receiver: Receiver = Arc::clone(&shelf) as _;
    let carrier = hub.join(FROM, &receiver);
    let other = hub.join(TO, &receiver);
    (carrier, shelf, Box::new((receiver, other)))
}

/// Sends one parcel for each fault. Returns the outcomes, and the stages that arrived.
async fn send(faults: &[Fault]) -> (Vec<Result<(), TransferError>>, Vec<(u16, Parcel)>) {
    let (inner, shelf, _keep) = joined();
    let faulty = Faulty::scripted(inner, faults.iter().copied());
    let mut outcomes = Vec::new();
    for stage in (0..).take(faults.len()) {
        let transfer = faulty.submit(TO, parcel(stage, 10, 10));
        outcomes.push(transfer.delivered().await.map(drop));
    }
    faulty.tasks.close();
    faulty.tasks.wait().await;
    let taken = shelf.taken().into_iter();
    let taken = taken.map(|(_, parcel)| (parcel.header.stage.0, parcel));
    (outcomes, taken.collect())
}

fn stages(taken: &[(u16, Parcel)]) -> Vec<u16> {
    taken.iter().map(|(stage, _)| *stage).collect()
}

#[tokio::test]
async fn what_is_lost_damaged_or_cannot_set_out_does_not_arrive() {
    let (outcomes, taken) = send(&[Fault::Lose, Fault::Fail, Fault::Damage, Fault::None]).await;
    assert!(matches!(outcomes[0], Err(TransferError::Broken(_))));
    assert!(matches!(
        outcomes[1],
        Err(TransferError::Unreachable { .. })
    ));
    let damaged = TransferError::Rejected(Rejection::Damaged);
    assert_eq!(outcomes[2], Err(damaged));
    assert_eq!(outcomes[3], Ok(()));
    assert_eq!(stages(&taken), [3]);
}

#[tokio::test]
async fn a_lost_answer_leaves_a_parcel_that_arrived_and_a_duplicate_two() {
    let (outcomes, taken) = send(&[Fault::LoseAnswer, Fault::Duplicate]).await;
    assert!(matches!(outcomes[0], Err(TransferError::Broken(_))));
    assert_eq!(outcomes[1], Ok(()));
    assert_eq!(stages(&taken), [0, 1, 1]);
}

#[tokio::test]
async fn an_altered_parcel_differs_in_one_byte() {
    let (outcomes, taken) = send(&[Fault::Alter { at: 13 }]).await;
    assert_eq!(outcomes, [Ok(())]);
    let sent = parcel(0, 10, 10);
    let (_, taken) = &taken[0];
    assert_eq!((taken.header, &taken.body), (sent.header, &sent.body));
    let differ = taken
        .head
        .iter()
        .zip(&sent.head)
        .filter(|(one, two)| one != two);
    assert_eq!(differ.count(), 1);
    assert_eq!(altered(parcel(0, 0, 0), 3), parcel(0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_delay_passes_and_a_stall_does_not() {
    let (inner, shelf, _keep) = joined();
    let delay = Duration::from_secs(5);
    let faulty = Faulty::scripted(inner, [Fault::Stall, Fault::Delay(delay)]);
    let stalled = faulty.submit(TO, parcel(0, 1, 1));
    let hour = Duration::from_secs(3_600);
    assert!(timeout(hour, stalled.delivered()).await.is_err());
    let mut late = Box::pin(faulty.submit(TO, parcel(1, 1, 1)).delivered());
    let early = timeout(delay.mul_f64(0.9), &mut late).await;
    assert!(early.is_err() && shelf.taken().is_empty());
    assert!(late.await.is_ok());
    assert_eq!(shelf.taken().len(), 1);
}

#[test]
fn a_seed_makes_the_same_faults_again_at_about_its_rates() {
    let rates = FaultRates {
        lose: 100,
        alter: 100,
        delay: 100,
        lose_answer: 100,
        ..FaultRates::default()
    };
    let draw = |seed| {
        let mut rng = StdRng::seed_from_u64(seed);
        let faults: Vec<_> = (0..10_000).map(|_| rates.draw(&mut rng)).collect();
        faults
    };
    let faults = draw(1);
    assert_eq!(faults, draw(1));
    assert_ne!(faults, draw(2));
    let count = |which: fn(&Fault) -> bool| faults.iter().filter(|fault| which(fault)).count();
    for (which, expected) in [
        (count(|fault| *fault == Fault::Lose), 1_000),
        (count(|fault| matches!(fault, Fault::Alter { .. })), 1_000),
        (count(|fault| *fault == Fault::LoseAnswer), 1_000),
        (count(|fault| *fault == Fault::None), 6_000),
        (count(|fault| *fault == Fault::Stall), 0),
    ] {
        assert!(which.abs_diff(expected) <= 200, "{which} for {expected}");
    }
}

/// Without faults the decorator changes nothing.
async fn make(receiver: Receiver) -> Rig {
    let rig = crate::transfer::memory::tests::make(receiver).await;
    Rig {
        carrier: Arc::new(Faulty::scripted(rig.carrier, [])),
        ..rig
    }
}

crate::transfer_contract_tests!(make);
