use std::time::Duration;

use proptest::prelude::*;
use tokio::io::AsyncWriteExt;

use shoal_gossip::{Epoch, LoadSummary, NodeId, RequestId};

use super::*;
use crate::engine::TokenBatch;
use crate::engine::answer::Wire;
use crate::engine::work::Fit;
use crate::mesh::messages::{
    Answer, Ask, Frame, FrameBody, MAX_CONTROL_BYTES, MAX_EXCLUDED, MAX_FRAME_BYTES, Offer, Open,
};

fn frame(ids: Vec<u32>, text: String) -> Frame {
    Frame {
        request: RequestId {
            home: NodeId(1),
            serial: 2,
        },
        epoch: Epoch::FIRST,
        body: FrameBody::Tokens(TokenBatch {
            index: 3,
            ids,
            text,
            logprobs: Vec::new(),
            wire: Wire::default(),
        }),
    }
}

#[test]
fn the_longest_offer_fits_a_control_message() {
    let largest = Envelope {
        protocol: PROTOCOL,
        load: LoadSummary::default(),
        body: Ask::Offer(Offer {
            fit: Fit::Any,
            request: RequestId {
                home: NodeId(u64::MAX),
                serial: u64::MAX,
            },
            epoch: Epoch(u32::MAX),
            model: "m".repeat(256),
            prompt: shoal_gossip::Tokens(u32::MAX),
            generated: shoal_gossip::Tokens(u32::MAX),
            max_output: shoal_gossip::Tokens(u32::MAX),
            priority: crate::engine::work::Priority(i32::MIN),
            hops: 2,
            waited: Duration::MAX,
            resumed: true,
            excluded: vec![NodeId(u64::MAX); MAX_EXCLUDED],
        }),
    };
    let bytes = encode(&largest, MAX_CONTROL_BYTES).unwrap();
    assert!(bytes.len() < 1_024, "{}", bytes.len());
    assert_eq!(decode_envelope::<Ask>(&bytes).unwrap(), largest);
}

#[test]
fn another_version_is_told_apart_from_junk_before_anything_else_is_read() {
    let mut bytes = encode(
        &Envelope {
            protocol: PROTOCOL,
            load: LoadSummary::default(),
            body: Ask::Probe,
        },
        MAX_CONTROL_BYTES,
    )
    .unwrap();
    bytes[0] = 99;
    bytes.truncate(1);
    assert!(matches!(
        decode_envelope::<Ask>(&bytes),
        Err(CodecError::OtherProtocol(99))
    ));
    assert!(matches!(
        decode_envelope::<Ask>(&[]),
        Err(CodecError::Junk(_))
    ));
}

#[test]
fn bytes_left_over_are_junk() {
    let mut bytes = encode(&Answer::Done, MAX_CONTROL_BYTES).unwrap();
    bytes.push(0);
    assert!(matches!(decode::<Answer>(&bytes), Err(CodecError::Junk(_))));
}

#[tokio::test]
async fn frames_come_off_a_stream_however_it_is_cut() {
    let first = frame(vec![1, 2], "one".into());
    let second = frame(vec![3], "two".repeat(2_000));
    let mut wire = encode_frame(&first, MAX_FRAME_BYTES).unwrap();
    wire.extend(encode_frame(&second, MAX_FRAME_BYTES).unwrap());
    for cut in [1, 3, 7, 1_000] {
        // A pipe that holds `cut` bytes hands them over in pieces of at most that length.
        let (mut far, near) = tokio::io::duplex(cut);
        let wire = wire.clone();
        let sending = async move { far.write_all(&wire).await.unwrap() };
        let mut reader = FrameReader::new(near, MAX_FRAME_BYTES);
        let reading = async {
            assert_eq!(reader.next::<Frame>().await.unwrap().as_ref(), Some(&first));
            assert_eq!(
                reader.next::<Frame>().await.unwrap().as_ref(),
                Some(&second)
            );
            assert_eq!(reader.next::<Frame>().await.unwrap(), None);
        };
        tokio::join!(sending, reading);
    }
}

#[tokio::test]
async fn a_lying_length_is_refused_or_costs_no_memory() {
    let over = (MAX_FRAME_BYTES as u32 + 1).to_be_bytes();
    let mut reader = FrameReader::new(&over[..], MAX_FRAME_BYTES);
    assert!(matches!(
        reader.next::<Frame>().await,
        Err(CodecError::TooLong { .. })
    ));
    let mut short = (MAX_FRAME_BYTES as u32).to_be_bytes().to_vec();
    short.extend([0; 10]);
    let mut reader = FrameReader::new(&short[..], MAX_FRAME_BYTES);
    assert!(matches!(
        reader.next::<Frame>().await,
        Err(CodecError::Truncated)
    ));
    assert!(
        reader.buffer.capacity() <= 2 * READ_STEP,
        "{}",
        reader.buffer.capacity()
    );
}

proptest! {
    #[test]
    fn a_frame_survives_the_wire(ids in proptest::collection::vec(any::<u32>(), 0..40), text in ".{0,60}") {
        let sent = frame(ids, text);
        let bytes = encode_frame(&sent, MAX_FRAME_BYTES).unwrap();
        prop_assert_eq!(decode::<Frame>(&bytes[LENGTH_BYTES..]).unwrap(), sent);
    }

    #[test]
    fn random_bytes_are_an_error_or_a_message_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        // Whether they happen to be a message does not matter, only that nothing else comes of them.
        drop(decode_envelope::<Ask>(&bytes));
        drop(decode_envelope::<Answer>(&bytes));
        drop(decode::<Open>(&bytes));
        drop(decode::<Frame>(&bytes));
    }

    #[test]
    fn a_damaged_message_is_an_error_or_another_message(at in 0usize..64, flip in 1u8..) {
        let mut bytes = encode(&frame(vec![1, 2, 3], "text".into()), MAX_FRAME_BYTES).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= flip;
        drop(decode::<Frame>(&bytes));
    }
}
