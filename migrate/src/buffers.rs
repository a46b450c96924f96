//! Memory for KV on its way, used again.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};

/// Buffers that wait for their next use at most: a node takes in and gives out a few stages at a time.
const SPARE: usize = 4;

/// Bytes that may lie there unused. One copy of a whole context of a small model, or a few stages of a large one.
const SPARE_BYTES: usize = 256 << 20;

/// Gives out buffers and takes them back when the last reader of their bytes is done.
///
/// The first write to each page of fresh memory costs a fault, and for megabytes of KV more than the copy itself:
/// 12.5 MB took 17 ms fresh and 3 ms again (`how_long_an_act`, an ignored test). What waits for its next use
/// is bounded in number and bytes; the buffers that came back first go first.
#[derive(Clone, Debug, Default)]
pub struct Buffers {
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Buffers {
    /// An empty buffer with room for so many bytes.
    pub fn take(&self, bytes: usize) -> BytesMut {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = (0..spare.len()).filter(|at| spare[*at].capacity() >= bytes);
        let smallest = fits.min_by_key(|at| spare[*at].capacity());
        match smallest.map(|at| spare.remove(at)) {
            // Without a copy: nobody else has it.
            Some(warm) => BytesMut::from(Bytes::from(warm)),
            None => BytesMut::with_capacity(size_class(bytes)),
        }
    }

    /// Makes what was written readable by any number of readers. The memory comes back when they are done.
    pub fn lend(&self, buffer: BytesMut) -> Bytes {
        Bytes::from_owner(Lent {
            buffer,
            home: self.clone(),
        })
    }

    fn put_back(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(buffer);
        while spare.len() > SPARE || spare.iter().map(Vec::capacity).sum::<usize>() > SPARE_BYTES {
            spare.remove(0);
        }
    }
}

/// The size of a fresh buffer: what is asked for and up to a quarter more, which costs addresses only, so that the
/// next one, of a request that has grown a little, fits too.
fn size_class(bytes: usize) -> usize {
    let power = bytes.checked_ilog2().unwrap_or(0);
    bytes.next_multiple_of(1 << power.saturating_sub(2))
}

/// A buffer that is being read.
struct Lent {
    buffer: BytesMut,
    home: Buffers,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        self.home.put_back(buffer.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare(buffers: &Buffers) -> Vec<usize> {
        let spare = buffers.spare.lock().expect("no panic");
        spare.iter().map(Vec::capacity).collect()
    }

    fn written(buffers: &Buffers, bytes: usize) -> Bytes {
        let mut buffer = buffers.take(bytes);
        buffer.resize(bytes, 7);
        buffers.lend(buffer)
    }

    #[test]
    fn a_fresh_buffer_has_up_to_a_quarter_more() {
        for bytes in [0, 1, 3, 4, 1000, 1024, 1025, 1279, 1281, 12_582_912] {
            let class = size_class(bytes);
            assert!(
                bytes <= class && class <= bytes + bytes / 4,
                "{bytes}: {class}"
            );
        }
        assert_eq!([1000, 1025, 1280].map(size_class), [1024, 1280, 1280]);
    }

    #[test]
    fn a_buffer_comes_back_after_its_last_reader_and_is_used_again() {
        let buffers = Buffers::default();
        let bytes = written(&buffers, 1000);
        let address = bytes.as_ptr();
        let reader = bytes.slice(10..20);
        drop(bytes);
        assert!(spare(&buffers).is_empty(), "somebody still reads");
        assert_eq!(*reader, [7; 10]);
        drop(reader);
        assert_eq!(spare(&buffers), [1024]);
        let again = buffers.take(1010);
        assert!(again.is_empty() && again.capacity() >= 1000);
        assert_eq!(again.as_ptr(), address);
    }

    #[test]
    fn a_buffer_that_was_filled_in_parts_comes_back_whole() {
        let buffers = Buffers::default();
        for _ in 0..3 {
            let mut first = buffers.take(1000);
            let mut second = first.split_off(400);
            first.resize(400, 1);
            second.resize(600, 2);
            first.unsplit(second);
            drop(buffers.lend(first));
            assert_eq!(spare(&buffers), [1024]);
        }
    }

    #[test]
    fn the_smallest_buffer_with_room_is_taken() {
        let buffers = Buffers::default();
        let lent: Vec<_> = [3072, 1024, 2048]
            .map(|bytes| written(&buffers, bytes))
            .into();
        drop(lent);
        assert_eq!(buffers.take(1500).capacity(), 2048);
        assert_eq!(buffers.take(4096).capacity(), 4096);
        assert_eq!(spare(&buffers), [3072, 1024]);
    }

    #[test]
    fn what_waits_is_bounded_in_number_and_bytes() {
        let buffers = Buffers::default();
        let lent: Vec<_> = (1..=6).map(|kilo| written(&buffers, 1024 * kilo)).collect();
        drop(lent);
        assert_eq!(spare(&buffers), [3072, 4096, 5120, 6144]);
        // Address space only: nothing is written to it.
        drop(buffers.lend(BytesMut::with_capacity(SPARE_BYTES - 5000)));
        assert_eq!(spare(&buffers), [SPARE_BYTES - 5000]);
        drop(buffers.lend(BytesMut::with_capacity(SPARE_BYTES + 1)));
        assert!(spare(&buffers).is_empty());
    }
}
