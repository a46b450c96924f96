//! What strangers, captures and damage can do to the seal: nothing.

use proptest::prelude::*;

use super::*;
use crate::keys::ClusterKey;

const NOW: Duration = Duration::from_secs(1_800_000_000);

fn ring(byte: u8) -> KeyRing {
    KeyRing::new(ClusterKey::from_bytes([byte; 32]))
}

fn sealed(ring: &KeyRing, id: u8) -> Framing {
    Framing::Sealed(Box::new(Sealer::new(ring, SenderId([id; 8])).unwrap()))
}

fn pair() -> (Framing, Framing) {
    (sealed(&ring(9), 1), sealed(&ring(9), 2))
}

#[test]
fn a_sealed_message_opens_once_and_reads_the_same() {
    let (mut alice, mut bob) = pair();
    for message in [&b""[..], b"x", &[0; 1_000], &[7; MAX_SEALED_MESSAGE]] {
        let datagram = alice.seal(NOW, message).unwrap();
        assert_eq!(datagram.len(), message.len() + SEAL_OVERHEAD);
        assert_eq!(datagram[0] & 0x40, 0, "QUIC's fixed bit must be clear");
        assert_eq!(bob.open(NOW, &datagram).unwrap(), message);
        assert_eq!(bob.open(NOW, &datagram), Err(OpenError::Replayed));
    }
}

#[test]
fn the_message_is_not_readable_in_the_datagram() {
    let (mut alice, _) = pair();
    let message = [0x5a; 64];
    let datagram = alice.seal(NOW, &message).unwrap();
    assert!(!datagram.windows(4).any(|part| part == [0x5a; 4]));
    assert_ne!(datagram, alice.seal(NOW, &message).unwrap());
}

#[test]
fn another_key_opens_nothing_and_changes_nothing() {
    let mut mallory = sealed(&ring(8), 1);
    let (mut alice, mut bob) = pair();
    let forged = mallory.seal(NOW, b"hello").unwrap();
    assert_eq!(bob.open(NOW, &forged), Err(OpenError::WrongKey));
    let authentic = alice.seal(NOW, b"hello").unwrap();
    assert_eq!(bob.open(NOW, &authentic).unwrap(), b"hello");
    // Mallory speaks under Alice's sender id; the window must not move.
    let forged = mallory.seal(NOW, b"hello").unwrap();
    assert_eq!(bob.open(NOW, &forged), Err(OpenError::WrongKey));
    let next = alice.seal(NOW, b"again").unwrap();
    assert_eq!(bob.open(NOW, &next).unwrap(), b"again");
}

#[test]
fn a_ring_opens_what_the_old_and_the_new_key_sealed() {
    let mut both = ring(2);
    both.accept(ClusterKey::from_bytes([1; 32])).unwrap();
    let mut old = sealed(&ring(1), 1);
    let mut new = sealed(&ring(2), 2);
    let mut rotating = sealed(&both, 3);
    let from_old = old.seal(NOW, b"old").unwrap();
    let from_new = new.seal(NOW, b"new").unwrap();
    assert_eq!(rotating.open(NOW, &from_old).unwrap(), b"old");
    assert_eq!(rotating.open(NOW, &from_new).unwrap(), b"new");
    let from_both = rotating.seal(NOW, b"both").unwrap();
    assert_eq!(new.open(NOW, &from_both).unwrap(), b"both");
    assert_eq!(old.open(NOW, &from_both), Err(OpenError::WrongKey));
}

#[test]
fn every_truncation_is_dropped() {
    let (mut alice, mut bob) = pair();
    let datagram = alice.seal(NOW, b"some message").unwrap();
    for length in 0..datagram.len() {
        let expected = if length < SEAL_OVERHEAD {
            OpenError::Truncated
        } else {
            OpenError::WrongKey
        };
        assert_eq!(
            bob.open(NOW, &datagram[..length]),
            Err(expected),
            "{length}"
        );
    }
    assert_eq!(bob.open(NOW, &datagram).unwrap(), b"some message");
}

#[test]
fn every_flipped_bit_is_noticed() {
    let (mut alice, mut bob) = pair();
    let mut datagram = alice.seal(NOW, b"message").unwrap();
    for bit in 0..datagram.len() * 8 {
        datagram[bit / 8] ^= 1 << (bit % 8);
        assert!(bob.open(NOW, &datagram).is_err(), "bit {bit}");
        datagram[bit / 8] ^= 1 << (bit % 8);
    }
    assert_eq!(bob.open(NOW, &datagram).unwrap(), b"message");
}

#[test]
fn a_message_that_fits_no_datagram_is_refused_and_costs_no_sequence_number() {
    let (mut alice, mut bob) = pair();
    let length = MAX_SEALED_MESSAGE + 1;
    assert_eq!(
        alice.seal(NOW, &vec![0; length]),
        Err(SealError::Oversized { length })
    );
    let datagram = alice.seal(NOW, b"first").unwrap();
    assert_eq!(datagram[13..21], 1u64.to_be_bytes());
    assert!(bob.open(NOW, &datagram).is_ok());
    assert_eq!(
        bob.open(NOW, &vec![SEALED; MAX_DATAGRAM + 1]),
        Err(OpenError::Oversized)
    );
}

#[test]
fn a_sender_without_sequence_numbers_left_stays_silent() {
    let mut sealer = Sealer::new(&ring(9), SenderId([1; 8])).unwrap();
    sealer.sequence = u64::MAX - 1;
    assert!(sealer.seal(NOW, b"last").is_ok());
    assert_eq!(sealer.seal(NOW, b"none"), Err(SealError::Exhausted));
}

#[test]
fn a_capture_is_stale_after_half_a_minute_either_way() {
    for (apart, fresh) in [(30, true), (31, false)] {
        let apart = Duration::from_secs(apart);
        for then in [NOW - apart, NOW + apart] {
            let (mut alice, mut bob) = pair();
            let datagram = alice.seal(then, b"hello").unwrap();
            let opened = bob.open(NOW, &datagram);
            assert_eq!(opened.is_ok(), fresh, "{apart:?}: {opened:?}");
        }
    }
}

#[test]
fn time_in_the_header_survives_the_wrap_of_32_bits() {
    let (mut alice, mut bob) = pair();
    let before = Duration::from_secs(u64::from(u32::MAX));
    let datagram = alice.seal(before, b"hello").unwrap();
    assert!(bob.open(before + Duration::from_secs(2), &datagram).is_ok());
}

#[test]
fn sealed_and_open_nodes_do_not_hear_each_other() {
    let mut sealed = sealed(&ring(9), 1);
    let mut open = Framing::Open;
    let from_open = open.seal(NOW, b"hello").unwrap();
    let from_sealed = sealed.seal(NOW, b"hello").unwrap();
    assert_eq!(sealed.open(NOW, &from_open), Err(OpenError::NotSealed));
    assert_eq!(open.open(NOW, &from_sealed), Err(OpenError::KeyMissing));
    assert_eq!(open.open(NOW, &from_open).unwrap(), b"hello");
    assert_eq!(from_open[0] & 0x40, 0, "QUIC's fixed bit must be clear");
    assert!(open.seal(NOW, &vec![0; MAX_DATAGRAM]).is_err());
    assert_eq!(open.open(NOW, &[]), Err(OpenError::Truncated));
    assert_eq!(open.open(NOW, b"xyz"), Err(OpenError::UnknownVersion(b'x')));
}

proptest! {
    #[test]
    fn random_bytes_never_open(bytes in prop::collection::vec(any::<u8>(), 0..300), sealed_version: bool) {
        let (_, mut bob) = pair();
        let mut bytes = bytes;
        if sealed_version && !bytes.is_empty() {
            bytes[0] = SEALED;
        }
        prop_assert!(bob.open(NOW, &bytes).is_err());
    }

    #[test]
    fn any_order_of_delivery_opens_each_message_at_most_once(
        order in prop::collection::vec(0usize..40, 0..200),
    ) {
        let (mut alice, mut bob) = pair();
        let datagrams: Vec<_> = (0u8..40).map(|n| alice.seal(NOW, &[n]).unwrap()).collect();
        let mut opened = [false; 40];
        for n in order {
            match bob.open(NOW, &datagrams[n]) {
                Ok(message) => {
                    prop_assert_eq!(message, vec![n as u8]);
                    prop_assert!(!opened[n]);
                    opened[n] = true;
                }
                Err(error) => {
                    prop_assert_eq!(error, OpenError::Replayed);
                    prop_assert!(opened[n]);
                }
            }
        }
    }

    #[test]
    fn the_seal_is_the_inverse_of_the_opening(message in prop::collection::vec(any::<u8>(), 0..2_000)) {
        let (mut alice, mut bob) = pair();
        let datagram = alice.seal(NOW, &message).unwrap();
        prop_assert_eq!(bob.open(NOW, &datagram).unwrap(), message);
    }
}
