use proptest::prelude::*;
use shoal_gossip::{Epoch, NodeId, RequestId, Tokens};

use super::*;
use crate::{MigrationId, StageIndex};

fn header(kind: ParcelKind, head: usize, body: usize) -> ParcelHeader {
    let migration = MigrationId {
        request: RequestId {
            home: NodeId(1),
            serial: 2,
        },
        epoch: Epoch(3),
        target: NodeId(4),
        attempt: 5,
    };
    let bytes = |length| Bytes::from(vec![0; length]);
    Parcel::new(migration, StageIndex(6), kind, bytes(head), bytes(body)).header
}

fn opening(head: usize, body: usize, parts: u32) -> Opening {
    Opening {
        serial: 7,
        header: header(ParcelKind::Opening, head, body),
        parts,
    }
}

fn random(length: usize, seed: u64) -> Bytes {
    let mut state = seed | 1;
    let bytes = (0..length).map(|_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_be_bytes()[0]
    });
    bytes.collect()
}

fn written(section: Section, bytes: &Bytes) -> Vec<u8> {
    SectionWriter::new(section, bytes.clone())
        .flatten()
        .flatten()
        .collect()
}

/// Feeds `bytes` in pieces of `piece` bytes. Returns what was left over.
fn feed(reader: &mut SectionReader, bytes: &[u8], piece: usize) -> Result<usize, WireError> {
    let mut left = 0;
    for piece in bytes.chunks(piece) {
        left += reader.feed(piece)?.len();
    }
    Ok(left)
}

fn read(message: &[u8]) -> Result<Opening, WireError> {
    let (prefix, rest) = message
        .split_first_chunk()
        .ok_or(WireError::Length("shorter"))?;
    let length = rest_of(*prefix)?;
    let rest = rest.get(..length).ok_or(WireError::Length("shorter"))?;
    decode(*prefix, rest)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_parcel_comes_out_as_it_went_in_however_it_is_cut(
        head in 0usize..3_000,
        body in prop_oneof![
            0usize..1_000,
            Just(CHUNK_BYTES - 1), Just(CHUNK_BYTES), Just(CHUNK_BYTES + 1),
            0usize..5 * CHUNK_BYTES,
        ],
        wanted in 1u32..20,
        piece in prop_oneof![1usize..10, 1_000usize..2_000, 1usize..CHUNK_BYTES * 2],
        seed: u64,
    ) {
        let parts = parts_of(body as u64, wanted);
        let opening = opening(head, body, parts);
        opening.check(u64::MAX).expect("it is in order");
        let (head, body) = (random(head, seed), random(body, !seed));
        let mut sections = Sections::new(&opening, &Buffers::default()).expect("it fits");
        let place = body.as_ptr();
        let mut end = 0;
        for (number, reader) in (0..).zip(&mut sections.parts) {
            let range = part_range(body.len() as u64, parts, number);
            prop_assert_eq!(range.start, end);
            end = range.end;
            let range = usize::try_from(range.start).expect("small")..usize::try_from(range.end).expect("small");
            let bytes = written(Section::Part(number), &body.slice(range));
            prop_assert_eq!(feed(reader, &bytes, piece).expect("it is sound"), 0);
            prop_assert!(reader.is_whole());
            prop_assert_eq!(reader.feed(b"more").expect("nothing is read"), b"more");
        }
        prop_assert_eq!(end, body.len() as u64);
        let bytes = written(Section::Head, &head);
        prop_assert_eq!(feed(&mut sections.head, &bytes, piece).expect("it is sound"), 0);
        let parcel = sections.finish(opening.header).expect("it is whole");
        prop_assert_eq!(parcel.head, head);
        prop_assert_eq!(&parcel.body, &body);
        prop_assert_eq!(body.as_ptr(), place);
    }

    #[test]
    fn a_damaged_byte_is_caught_wherever_it_is(
        length in 1usize..2 * CHUNK_BYTES,
        at: prop::sample::Index,
        flip in 1u8..,
        seed: u64,
    ) {
        let mut bytes = written(Section::Part(0), &random(length, seed));
        *at.get_mut(&mut bytes) ^= flip;
        let mut sections = Sections::new(&opening(0, length, 1), &Buffers::default()).expect("it fits");
        prop_assert_eq!(feed(&mut sections.parts[0], &bytes, 1_400), Err(WireError::Damaged));
    }

    #[test]
    fn a_message_survives_the_way_and_its_damage_does_not(
        at: prop::sample::Index, flip in 1u8.., serial: u64,
    ) {
        let opening = Opening { serial, ..opening(1, 2, 1) };
        let mut bytes = encode(&opening).expect("it is short").to_vec();
        prop_assert_eq!(read(&bytes), Ok(opening));
        *at.get_mut(&mut bytes) ^= flip;
        prop_assert!(read(&bytes).is_err());
    }

    #[test]
    fn junk_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&bytes).is_err());
        let mut sections = Sections::new(&opening(10, 10, 1), &Buffers::default()).expect("it fits");
        prop_assert!(sections.head.feed(&bytes).is_err() || bytes.len() < 14);
    }

    #[test]
    fn an_opening_made_of_junk_never_asks_for_more_than_is_allowed(
        head: u32, body: u64, parts: u32, allowed in 0u64..1 << 40,
    ) {
        let mut opening = opening(0, 0, parts);
        opening.header.head_bytes = head;
        opening.header.body_bytes = body;
        if opening.check(allowed).is_ok() {
            prop_assert!(u64::from(head) + body <= allowed);
            prop_assert!((1..=MAX_PARTS).contains(&parts));
        }
        // Of any numbers, without overflow.
        let range = part_range(body, parts, head);
        prop_assert!(range.start <= range.end && range.end <= body);
    }
}

#[test]
fn chunks_that_change_places_are_caught() {
    let body = random(2 * CHUNK_BYTES, 1);
    let mut bytes = written(Section::Part(0), &body);
    let (one, two) = bytes.split_at_mut(CHUNK_BYTES + SUM_BYTES);
    one.swap_with_slice(two);
    let mut sections =
        Sections::new(&opening(0, body.len(), 1), &Buffers::default()).expect("it fits");
    assert_eq!(
        feed(&mut sections.parts[0], &bytes, 1_000),
        Err(WireError::Damaged)
    );
    let elsewhere = written(Section::Part(1), &body);
    let mut sections =
        Sections::new(&opening(0, body.len(), 1), &Buffers::default()).expect("it fits");
    assert_eq!(
        feed(&mut sections.parts[0], &elsewhere, 1_000),
        Err(WireError::Damaged)
    );
}

#[test]
fn the_parts_of_a_body_are_put_together_without_a_copy() {
    let body = random(5 * CHUNK_BYTES + 3, 1);
    let mut sections =
        Sections::new(&opening(0, body.len(), 3), &Buffers::default()).expect("it fits");
    let place = sections.parts[0].bytes.as_ptr();
    for (number, reader) in (0..).zip(&mut sections.parts) {
        let range = part_range(body.len() as u64, 3, number);
        let range = usize::try_from(range.start).expect("small")
            ..usize::try_from(range.end).expect("small");
        let bytes = written(Section::Part(number), &body.slice(range));
        feed(reader, &bytes, 9_000).expect("it is sound");
    }
    let parcel = sections
        .finish(header(ParcelKind::Opening, 0, body.len()))
        .expect("it is whole");
    assert_eq!(parcel.body, body);
    assert_eq!(parcel.body.as_ptr(), place);
}

#[test]
fn a_parcel_with_something_missing_is_not_finished() {
    let body = random(100, 1);
    let bytes = written(Section::Part(0), &body);
    let mut sections =
        Sections::new(&opening(0, body.len(), 1), &Buffers::default()).expect("it fits");
    // All the bytes, but not all of their sum.
    feed(&mut sections.parts[0], &bytes[..bytes.len() - 1], 9_000).expect("it is sound");
    let unfinished = sections.finish(header(ParcelKind::Opening, 0, body.len()));
    assert_eq!(unfinished, Err(WireError::Length("shorter")));
}

#[test]
fn a_backward_range_is_no_range() {
    let range = KvRange::new(Tokens(3), Tokens(9)).expect("not empty");
    let sound = Opening {
        header: header(ParcelKind::Stage(range), 0, 0),
        ..opening(0, 0, 1)
    };
    sound.check(100).expect("it is in order");
    let mut bytes = postcard::to_stdvec(&sound).expect("it is short");
    let at = bytes
        .windows(2)
        .rposition(|two| two == [3, 9])
        .expect("the range is there");
    bytes[at..at + 2].copy_from_slice(&[9, 3]);
    let backward: Opening = postcard::from_bytes(&bytes).expect("the types are right");
    assert!(matches!(backward.check(100), Err(WireError::Junk(_))));
}

#[test]
fn a_long_reason_is_cut_between_characters() {
    let long = Rejection::Wrong("ü".repeat(10_000)).shortened();
    let Rejection::Wrong(reason) = &long else {
        panic!("{long:?}");
    };
    assert!(reason.len() <= MAX_REASON_BYTES && reason.len() >= MAX_REASON_BYTES - 1);
    encode(&Reply::Rejected(long)).expect("it fits a message");
}
