//! The KV of one sequence as llama.cpp writes it: read, cut, checked and joined in Rust. Pure.
//!
//! llama.cpp takes damaged payloads as they are and ends the process over some mistakes, so nothing reaches it that
//! was not compared, field by field, with what this model's own context writes:
//!
//! ```text
//! magic u32 · sequence i32 · streams u32
//! each stream: cells u32, and nothing else when that is zero, else
//!   each cell:  position i32 · owners u32 (= 1) · owner i32
//!   transposed u32 (= 0) · layers u32 · rotated K u32 · rotated V u32
//!   each layer: type i32 · bytes of a row u64 · K rows, one per cell
//!   each layer: the same for V
//! ```
//!
//! What travels is the same with one stream, sequence 0 and positions in ascending order, so that it does not depend
//! on how the source keeps its cells.

#[cfg(test)]
mod tests;

use std::sync::{Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use shoal_migrate::{Buffers, KvRange};

use crate::engine::batched::{KvForm, KvImport, Slot};
use crate::engine::moving::ExportedKv;

/// How llama.cpp begins the state of a sequence.
const MAGIC: u32 = 0xaf14_3cd8;

/// Bytes before the first stream.
const HEAD: usize = 12;

/// Bytes that tell of one cell.
const CELL: usize = 12;

/// Bytes between the cells and the first layer.
const BODY_HEAD: usize = 16;

/// Bytes before the rows of a layer.
const ROWS_HEAD: usize = 12;

/// Layers at most, of K and V together; models have 200 or fewer. A bound for a file that lies.
const MOST_LAYERS: u32 = 4096;

/// Buffers kept for the next export: one that is being cut and one that is being filled.
const SPARE: usize = 2;

/// Reads numbers from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], String> {
        let (head, rest) = self
            .0
            .split_at_checked(length)
            .ok_or_else(|| "the KV ends too early".to_owned())?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.take(N)?;
        bytes
            .try_into()
            .map_err(|_| "the KV ends too early".to_owned())
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    fn expect(&mut self, what: &str, expected: u32) -> Result<(), String> {
        let found = self.u32()?;
        if found == expected {
            Ok(())
        } else {
            Err(format!("{what} is {found}, not {expected}"))
        }
    }
}

/// Rows of one layer, of K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    kind: u32,
    /// Bytes of one.
    width: u64,
}

/// What the KV of one model in one configuration looks like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KvShape {
    /// K of all layers, then V of all layers.
    rows: Vec<Rows>,
    layers: u32,
    rotated: (u32, u32),
    /// Parts that the cells are divided into: one in a pool, one for each slot when split.
    streams: u32,
}

/// Where things are in KV of the right shape.
struct View<'a> {
    /// Of each cell.
    positions: Vec<u32>,
    /// All rows of each layer, in the order of the shape.
    rows: Vec<&'a [u8]>,
}

impl KvShape {
    /// Learns the shape from the state of a sequence with one token, in the first stream.
    ///
    /// # Errors
    /// The model keeps its KV in a form that is not known here.
    pub(super) fn learn(state: &[u8]) -> Result<Self, String> {
        let mut reader = Reader(state);
        reader.expect("the magic", MAGIC)?;
        reader.u32()?;
        let streams = reader.u32()?;
        reader.expect("the number of cells", 1)?;
        reader.expect("the position", 0)?;
        reader.expect("the number of owners", 1)?;
        reader.u32()?;
        reader.expect("transposed", 0)?;
        let layers = reader.u32()?;
        if streams == 0 || layers > MOST_LAYERS {
            return Err(format!("{streams} streams and {layers} layers"));
        }
        let rotated = (reader.u32()?, reader.u32()?);
        let mut shape = Self {
            rows: Vec::new(),
            layers,
            rotated,
            streams,
        };
        let after = (streams as usize - 1) * size_of::<u32>();
        // Some models have no V of their own.
        while reader.0.len() > after && shape.rows.len() < 2 * layers as usize {
            let rows = Rows {
                kind: reader.u32()?,
                width: reader.u64()?,
            };
            let width = usize::try_from(rows.width).map_err(|error| error.to_string())?;
            reader.take(width)?;
            shape.rows.push(rows);
        }
        let whole = shape.rows.len() == layers as usize || shape.rows.len() == 2 * layers as usize;
        if !whole || reader.0.len() != after || reader.0.iter().any(|byte| *byte != 0) {
            return Err("more than one cache, or a layout that is not known".to_owned());
        }
        Ok(shape)
    }

    /// Bytes of one token on the way, those of its cell included.
    fn bytes_per_token(&self) -> u64 {
        self.rows.iter().map(|rows| rows.width).sum::<u64>() + CELL as u64
    }

    /// Bytes around the tokens of one stream.
    fn frame(&self, streams: u32) -> u64 {
        let counts = u64::from(streams) * size_of::<u32>() as u64;
        (HEAD + BODY_HEAD + self.rows.len() * ROWS_HEAD) as u64 + counts
    }

    /// Bytes of this many tokens in one of this many streams.
    fn size(&self, tokens: u32, streams: u32) -> u64 {
        self.frame(streams) + self.bytes_per_token() * u64::from(tokens)
    }

    /// Reads KV of this shape with this many streams, one of which has cells.
    fn view<'a>(&self, kv: &'a [u8], streams: u32) -> Result<View<'a>, String> {
        let mut reader = Reader(kv);
        reader.expect("the magic", MAGIC)?;
        let owner = reader.u32()?;
        reader.expect("the number of streams", streams)?;
        let mut view = None;
        for _ in 0..streams {
            let cells = reader.u32()?;
            if cells == 0 {
                continue;
            }
            if view.is_some() {
                return Err("cells in two streams".to_owned());
            }
            view = Some(self.view_stream(&mut reader, cells, owner)?);
        }
        if !reader.0.is_empty() {
            return Err("bytes after the end".to_owned());
        }
        view.ok_or_else(|| "no cells".to_owned())
    }

    fn view_stream<'a>(
        &self,
        reader: &mut Reader<'a>,
        cells: u32,
        owner: u32,
    ) -> Result<View<'a>, String> {
        let cells = cells as usize;
        let mut heads = Reader(reader.take(cells.saturating_mul(CELL))?);
        let mut positions = Vec::with_capacity(cells);
        for _ in 0..cells {
            positions.push(heads.u32()?);
            heads.expect("the number of owners", 1)?;
            heads.expect("the owner", owner)?;
        }
        reader.expect("transposed", 0)?;
        reader.expect("the number of layers", self.layers)?;
        reader.expect("rotated K", self.rotated.0)?;
        reader.expect("rotated V", self.rotated.1)?;
        let mut rows = Vec::with_capacity(self.rows.len());
        for expected in &self.rows {
            reader.expect("the type", expected.kind)?;
            let width = reader.u64()?;
            if width != expected.width {
                return Err(format!("a row has {width} bytes, not {}", expected.width));
            }
            let width = usize::try_from(width).map_err(|error| error.to_string())?;
            rows.push(reader.take(cells.saturating_mul(width))?);
        }
        Ok(View { positions, rows })
    }

    /// Writes the KV of these positions, whose rows `put` adds layer by layer, as the one stream with cells.
    fn write(
        &self,
        (sequence, streams): (u32, u32),
        range: KvRange,
        put: impl Fn(usize, &mut BytesMut),
        buffers: &Buffers,
    ) -> Bytes {
        let number = |out: &mut BytesMut, value: u32| out.extend_from_slice(&value.to_le_bytes());
        let (start, end) = (range.start().0, range.end().0);
        let size = self.size(range.tokens().0, streams);
        let mut out = buffers.take(usize::try_from(size).unwrap_or(0));
        number(&mut out, MAGIC);
        number(&mut out, sequence);
        number(&mut out, streams);
        for stream in 0..streams {
            // With one stream all sequences are in it.
            if streams > 1 && stream != sequence {
                number(&mut out, 0);
                continue;
            }
            number(&mut out, end - start);
            for position in start..end {
                for value in [position, 1, sequence] {
                    number(&mut out, value);
                }
            }
            for value in [0, self.layers, self.rotated.0, self.rotated.1] {
                number(&mut out, value);
            }
            for (layer, rows) in self.rows.iter().enumerate() {
                number(&mut out, rows.kind);
                out.extend_from_slice(&rows.width.to_le_bytes());
                put(layer, &mut out);
            }
        }
        buffers.lend(out)
    }

    /// Makes what travels for a range, out of the state of a sequence.
    fn cut(&self, state: &[u8], range: KvRange, buffers: &Buffers) -> Result<Bytes, String> {
        let view = self.view(state, self.streams)?;
        let cells = cells_of(&view.positions, range)?;
        let put = |layer: usize, out: &mut BytesMut| {
            let width = self.rows[layer].width as usize;
            for run in &cells {
                out.extend_from_slice(&view.rows[layer][run.start * width..run.end * width]);
            }
        };
        Ok(self.write((0, 1), range, put, buffers))
    }

    /// Checks all that can be checked of what arrived: all but the numbers in the rows.
    fn check(&self, kv: &[u8], range: KvRange) -> Result<(), String> {
        if i32::try_from(range.end().0).is_err() {
            return Err("positions beyond any context".to_owned());
        }
        let expected = self.size(range.tokens().0, 1);
        if kv.len() as u64 != expected {
            let (is, tokens) = (kv.len(), range.tokens());
            return Err(format!("{is} bytes for {tokens}, which take {expected}"));
        }
        Reader(kv.get(4..).unwrap_or(&[])).expect("the sequence", 0)?;
        let view = self.view(kv, 1)?;
        if view
            .positions
            .into_iter()
            .eq(range.start().0..range.end().0)
        {
            Ok(())
        } else {
            Err("other positions than announced".to_owned())
        }
    }

    /// Makes the state of a sequence out of stages that follow each other from zero.
    fn join(
        &self,
        sequence: u32,
        stages: &[ExportedKv],
        buffers: &Buffers,
    ) -> Result<Bytes, String> {
        let mut views = Vec::with_capacity(stages.len());
        let mut whole: Option<KvRange> = None;
        for stage in stages {
            let start = whole.map_or(0, |whole| whole.end().0);
            if stage.range.start().0 != start {
                return Err("stages that do not follow each other".to_owned());
            }
            self.check(&stage.bytes, stage.range)?;
            views.push(self.view(&stage.bytes, 1)?);
            whole = KvRange::new(shoal_gossip::Tokens::ZERO, stage.range.end());
        }
        let whole = whole.ok_or_else(|| "no stages".to_owned())?;
        let put = |layer: usize, out: &mut BytesMut| {
            for view in &views {
                out.extend_from_slice(view.rows[layer]);
            }
        };
        Ok(self.write((sequence, self.streams), whole, put, buffers))
    }
}

/// The cells of the positions of a range, in order, as runs of neighbours.
fn cells_of(positions: &[u32], range: KvRange) -> Result<Vec<std::ops::Range<usize>>, String> {
    let mut wanted: Vec<_> = positions
        .iter()
        .zip(0usize..)
        .filter(|(position, _)| (range.start().0..range.end().0).contains(*position))
        .collect();
    wanted.sort_unstable();
    let found = wanted.iter().map(|(position, _)| **position);
    if !found.eq(range.start().0..range.end().0) {
        return Err("positions that are missing or there twice".to_owned());
    }
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (_, cell) in wanted {
        match runs.last_mut() {
            Some(run) if run.end == cell => run.end += 1,
            Some(_) | None => runs.push(cell..cell + 1),
        }
    }
    Ok(runs)
}

/// The form in which the KV of one loaded model travels, and the buffers that its exports are written to.
#[derive(Debug)]
pub(super) struct LlamaKv {
    shape: KvShape,
    /// A fresh buffer costs more in page faults than the export itself (measured: 30 ms against 10 ms for 47 MB).
    spare: Mutex<Vec<Vec<u8>>>,
    /// For what travels and what has arrived.
    buffers: Buffers,
}

impl LlamaKv {
    pub(super) fn new(shape: KvShape) -> Self {
        Self {
            shape,
            spare: Mutex::new(Vec::new()),
            buffers: Buffers::default(),
        }
    }

    /// A buffer to export to, with whatever is in it.
    pub(super) fn buffer(&self) -> Vec<u8> {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.pop().unwrap_or_default()
    }

    fn keep(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < SPARE {
            spare.push(buffer);
        }
    }
}

impl KvForm for LlamaKv {
    fn bytes_per_token(&self) -> u32 {
        u32::try_from(self.shape.bytes_per_token()).unwrap_or(u32::MAX)
    }

    fn takes(&self) -> KvImport {
        if self.shape.streams == 1 {
            KvImport::Stages
        } else {
            KvImport::Whole
        }
    }

    fn cut(&self, exported: Vec<u8>, range: KvRange) -> Result<Bytes, String> {
        let cut = self.shape.cut(&exported, range, &self.buffers);
        self.keep(exported);
        cut
    }

    fn check(&self, kv: &ExportedKv) -> Result<(), String> {
        self.shape.check(&kv.bytes, kv.range)
    }

    fn join(&self, slot: Slot, stages: &[ExportedKv]) -> Result<Bytes, String> {
        self.shape.join(slot.0, stages, &self.buffers)
    }
}
