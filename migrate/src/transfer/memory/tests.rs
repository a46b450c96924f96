use shoal_gossip::testing::TokioClock;

use super::*;
use crate::transfer::contract::{Rig, Shelf, parcel};

const FROM: NodeId = NodeId(1);
const TO: NodeId = NodeId(2);

fn hub() -> MemoryHub {
    MemoryHub::new(Arc::new(TokioClock::start()))
}

pub(crate) async fn make(receiver: Receiver) -> Rig {
    let hub = hub();
    let own: Receiver = Arc::new(Shelf::default());
    let carrier = hub.join(FROM, &own);
    let other = hub.join(TO, &receiver);
    let (cutting, slowing) = (hub.clone(), hub);
    Rig {
        carrier,
        from: FROM,
        to: TO,
        break_link: Box::new(move || {
            cutting.cut(FROM, TO);
            cutting.cut(TO, FROM);
        }),
        hold: Box::new(move || {
            let standstill = LinkSpeed {
                bytes_per_second: Some(1),
                ..LinkSpeed::default()
            };
            slowing.slow(FROM, TO, standstill);
            Box::new(Moving(slowing.clone()))
        }),
        keep: Box::new((own, receiver, other)),
    }
}

/// Ends a standstill.
struct Moving(MemoryHub);

impl Drop for Moving {
    fn drop(&mut self) {
        self.0.slow(FROM, TO, LinkSpeed::default());
    }
}

crate::transfer_contract_tests!(make);

#[tokio::test(start_paused = true)]
async fn a_slow_link_takes_its_time_and_tells_how_far_it_is() {
    let hub = hub();
    let receiver: Receiver = Arc::new(Shelf::default());
    let carrier = hub.join(FROM, &receiver);
    let other = hub.join(TO, &receiver);
    let latency = Duration::from_millis(50);
    hub.slow(
        FROM,
        TO,
        LinkSpeed {
            latency,
            bytes_per_second: Some(STEP_BYTES * 10),
        },
    );
    hub.slow(
        TO,
        FROM,
        LinkSpeed {
            latency,
            bytes_per_second: None,
        },
    );
    let body = usize::try_from(STEP_BYTES).expect("small") * 10;
    let transfer = carrier.submit(TO, parcel(1, 0, body));
    sleep(Duration::from_millis(555)).await;
    assert_eq!(transfer.progress().sent, 5 * STEP_BYTES);
    let delivered = transfer.delivered().await.expect("it arrives");
    assert_eq!(delivered.bytes, 10 * STEP_BYTES);
    let over = delivered.took.saturating_sub(Duration::from_millis(1_100));
    assert!(delivered.took >= Duration::from_millis(1_100) && over < Duration::from_millis(30));
    drop(other);
}

#[tokio::test]
async fn a_receiver_that_has_gone_is_no_node_and_a_mended_link_carries_again() {
    let hub = hub();
    let receiver: Receiver = Arc::new(Shelf::default());
    let carrier = hub.join(FROM, &receiver);
    let other: Receiver = Arc::new(Shelf::default());
    let _other = hub.join(TO, &other);
    hub.cut(FROM, TO);
    let lost = carrier.submit(TO, parcel(1, 1, 1)).delivered().await;
    assert!(matches!(lost, Err(TransferError::Unreachable { .. })));
    hub.mend(FROM, TO);
    let found = carrier.submit(TO, parcel(1, 1, 1)).delivered().await;
    assert!(found.is_ok(), "{found:?}");
    drop(other);
    let gone = carrier.submit(TO, parcel(1, 1, 1)).delivered().await;
    assert_eq!(gone, Err(TransferError::UnknownNode(TO)));
}
