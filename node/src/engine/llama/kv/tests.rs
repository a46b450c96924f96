//! Round trips, and everything that is not quite right.

use proptest::prelude::*;
use shoal_gossip::Tokens;

use super::*;

/// Widths of K and V rows differ, as with grouped heads of unequal size.
fn shape(streams: u32) -> KvShape {
    KvShape {
        rows: [(8, 34), (8, 68), (1, 6), (8, 34)]
            .map(|(kind, width)| Rows { kind, width })
            .to_vec(),
        layers: 2,
        rotated: (3, 5),
        streams,
    }
}

fn range(start: u32, end: u32) -> KvRange {
    KvRange::new(Tokens(start), Tokens(end)).expect("not empty")
}

/// What a row at a position holds.
fn row(layer: usize, position: u32, width: u64) -> Vec<u8> {
    (0..width)
        .map(|at| (layer as u64 * 91 + u64::from(position) * 7 + at * 13) as u8)
        .collect()
}

fn buffers() -> Buffers {
    Buffers::default()
}

/// The state of a sequence of `tokens`, whose cells are in the order of `order`.
fn state(shape: &KvShape, sequence: u32, order: &[u32]) -> Vec<u8> {
    let all = range(0, order.len() as u32);
    let put = |layer: usize, out: &mut BytesMut| {
        let width = shape.rows[layer].width;
        let rows = order.iter().flat_map(|at| row(layer, *at, width));
        out.extend(rows);
    };
    let state = shape.write((sequence, shape.streams), all, put, &buffers());
    let mut state = state.to_vec();
    let skipped = if shape.streams > 1 {
        sequence as usize
    } else {
        0
    };
    let first = HEAD + 4 * (skipped + 1);
    for (cell, position) in order.iter().enumerate() {
        let at = first + cell * CELL;
        state[at..at + 4].copy_from_slice(&position.to_le_bytes());
    }
    state
}

fn stage(shape: &KvShape, state: &[u8], range: KvRange) -> ExportedKv {
    let bytes = shape.cut(state, range, &buffers()).expect("cut");
    ExportedKv { range, bytes }
}

/// Cell orders of up to 40 positions.
fn orders() -> impl Strategy<Value = Vec<u32>> {
    (1u32..40).prop_flat_map(|tokens| Just((0..tokens).collect::<Vec<_>>()).prop_shuffle())
}

proptest! {
    #[test]
    fn stages_of_a_state_join_to_the_same_state(
        order in orders(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        (from, to) in (0u32..4, 0u32..4),
        (split_source, split_target) in any::<(bool, bool)>(),
    ) {
        let tokens = order.len() as u32;
        let source = shape(if split_source { 4 } else { 1 });
        let target = shape(if split_target { 4 } else { 1 });
        let taken = state(&source, from, &order);
        let mut ends: Vec<u32> = cuts.iter().map(|cut| cut.index(order.len()) as u32).collect();
        ends.extend([0, tokens]);
        ends.sort_unstable();
        ends.dedup();
        let stages: Vec<_> = ends
            .windows(2)
            .map(|pair| stage(&source, &taken, range(pair[0], pair[1])))
            .collect();
        for stage in &stages {
            prop_assert_eq!(target.check(&stage.bytes, stage.range), Ok(()));
            prop_assert_eq!(stage.bytes.len() as u64, target.size(stage.range.tokens().0, 1));
        }
        let ascending: Vec<u32> = (0..tokens).collect();
        prop_assert_eq!(target.join(to, &stages, &buffers()), Ok(state(&target, to, &ascending).into()));
    }

    #[test]
    fn no_truncation_and_no_flipped_bit_of_structure_gets_in(
        order in orders(),
        at in any::<prop::sample::Index>(),
        bit in 0u32..8,
        sequence in 0u32..4,
    ) {
        let shape = shape(4);
        let all = range(0, order.len() as u32);
        let kv = stage(&shape, &state(&shape, sequence, &order), all);
        let cut = &kv.bytes[..at.index(kv.bytes.len())];
        prop_assert!(shape.check(cut, all).is_err());

        let mut flipped = kv.bytes.to_vec();
        let at = at.index(flipped.len());
        flipped[at] ^= 1 << bit;
        let refused = shape.check(&flipped, all).is_err();
        prop_assert_eq!(refused, is_structure(&shape, at, order.len()), "byte {}", at);
    }

    #[test]
    fn junk_is_an_error_and_never_a_panic(
        junk in prop::collection::vec(any::<u8>(), 0..400),
        start in any::<u32>(),
        tokens in 1u32..50,
    ) {
        let junk_range = range(start.min(u32::MAX - 50), start.min(u32::MAX - 50) + tokens);
        let shape = shape(4);
        prop_assert!(shape.check(&junk, junk_range).is_err());
        prop_assert!(shape.cut(&junk, junk_range, &buffers()).is_err());
        prop_assert!(KvShape::learn(&junk).is_err());
        let mut real_head = MAGIC.to_le_bytes().to_vec();
        real_head.extend(junk);
        prop_assert!(shape.check(&real_head, junk_range).is_err());
        prop_assert!(shape.cut(&real_head, junk_range, &buffers()).is_err());
    }
}

/// Whether a byte of what travels is anything but the numbers in the rows.
fn is_structure(shape: &KvShape, at: usize, tokens: usize) -> bool {
    let mut layer = HEAD + 4 + tokens * CELL + BODY_HEAD;
    for rows in &shape.rows {
        let first = layer + ROWS_HEAD;
        let next = first + tokens * rows.width as usize;
        if (first..next).contains(&at) {
            return false;
        }
        layer = next;
    }
    true
}

#[test]
fn the_shape_is_learnt_from_one_token() {
    for streams in [1, 4] {
        assert_eq!(
            KvShape::learn(&state(&shape(streams), 0, &[0])),
            Ok(shape(streams))
        );
    }
    let no_v = KvShape {
        rows: shape(1).rows[..2].to_vec(),
        ..shape(1)
    };
    assert_eq!(KvShape::learn(&state(&no_v, 0, &[0])), Ok(no_v));
    let mut two_caches = state(&shape(1), 0, &[0]);
    two_caches.extend_from_within(8..);
    assert!(KvShape::learn(&two_caches).is_err());
    assert!(KvShape::learn(&state(&shape(1), 0, &[0, 1])).is_err());
}

#[test]
fn only_kv_of_the_same_shape_and_range_gets_in() {
    let own = shape(4);
    let taken = state(&own, 2, &[0, 1, 2, 3, 4]);
    let good = stage(&own, &taken, range(1, 4));
    assert_eq!(own.check(&good.bytes, good.range), Ok(()));
    for other in [range(0, 3), range(1, 3), range(1, 5), range(2, 5)] {
        assert!(own.check(&good.bytes, other).is_err(), "{other:?}");
    }
    let mut wider = shape(4);
    wider.rows[3].width = 36;
    let mut typed = shape(4);
    typed.rows[0].kind = 1;
    let mut turned = shape(4);
    turned.rotated.0 = 4;
    for foreign in [wider, typed, turned] {
        let kv = stage(&foreign, &state(&foreign, 0, &[0, 1, 2, 3]), range(1, 4));
        assert!(own.check(&kv.bytes, kv.range).is_err(), "{foreign:?}");
    }
    assert!(
        own.cut(&taken, range(1, 6), &buffers()).is_err(),
        "beyond what is there"
    );
    assert!(
        own.cut(&state(&own, 2, &[0, 1, 1]), range(0, 2), &buffers())
            .is_err(),
        "twice"
    );
    assert!(own.join(0, &[], &buffers()).is_err());
    assert!(
        own.join(0, std::slice::from_ref(&good), &buffers())
            .is_err(),
        "not from zero"
    );
    let first = stage(&own, &taken, range(0, 1));
    assert!(
        own.join(0, &[first.clone(), first.clone()], &buffers())
            .is_err(),
        "not in order"
    );
    assert!(own.join(0, &[first, good], &buffers()).is_ok());
}
