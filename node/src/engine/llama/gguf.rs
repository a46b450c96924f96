//! Reads the head of a GGUF file before llama.cpp does.
//!
//! llama.cpp maps the file and trusts parts of it; a file cut short in a download must give a clear
//! error and not a crash. So the header and the table of tensors are walked here, every length is
//! checked against the file, and the few facts we need on the way are kept.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

/// Metadata entries that a file may have; real ones have below 100.
const MAX_ENTRIES: u64 = 1 << 16;
/// Tensors that a file may have; the largest models we know of have about 2,000.
const MAX_TENSORS: u64 = 1 << 16;
/// Bytes of a text that is kept: chat templates reach some 20 KB.
const MAX_KEPT_TEXT: u64 = 1 << 20;
/// Bytes of a key or tensor name; GGUF allows 65,535 and 64.
const MAX_NAME: u64 = 65_535;
/// Where tensors begin and how they are padded, unless the file says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// What the head of a model file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Gguf {
    /// `general.architecture`, as in `llama`.
    pub(super) architecture: String,
    /// `tokenizer.ggml.model`; absent when the file has no vocabulary.
    pub(super) tokenizer: Option<String>,
    /// `tokenizer.chat_template`, Jinja.
    pub(super) chat_template: Option<String>,
    /// `split.count`: files the model is spread over; 0 and 1 mean one.
    pub(super) parts: u64,
    /// False when a token sees later ones, as in models that make embeddings.
    pub(super) causal: bool,
}

/// Why a file is not a model we can load. Nothing was loaded.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The first four bytes are not `GGUF`.
    #[error("is not a GGUF file")]
    NotGguf,
    /// A version that llama.cpp does not read.
    #[error("has GGUF version {0}; versions 2 and 3 can be read")]
    Version(u32),
    /// The file ends too early, as after an interrupted download.
    #[error("is truncated: needs at least {needed} bytes, has {found}")]
    Truncated {
        /// Bytes that the part read so far asks for.
        needed: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// The header contradicts itself.
    #[error("has a damaged header: {0}")]
    Damaged(String),
}

/// Walks the header and the tensor table of a file.
pub(super) fn read(path: &Path) -> Result<Gguf, GgufError> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    walk(Input {
        reader: BufReader::new(file),
        position: 0,
        length,
    })
}

fn walk(mut input: Input) -> Result<Gguf, GgufError> {
    if &input.array::<4>()? != b"GGUF" {
        return Err(GgufError::NotGguf);
    }
    let version = input.u32()?;
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version(version));
    }
    let tensors = input.u64()?;
    let entries = input.u64()?;
    if tensors == 0 || tensors > MAX_TENSORS || entries > MAX_ENTRIES {
        return Err(GgufError::Damaged(format!(
            "{tensors} tensors and {entries} metadata entries"
        )));
    }
    let (gguf, alignment) = metadata(&mut input, entries)?;
    let mut data = 0;
    for _ in 0..tensors {
        data = data.max(input.tensor_end(alignment)?);
    }
    let needed = input
        .position
        .next_multiple_of(alignment)
        .saturating_add(data);
    if needed > input.length {
        return Err(GgufError::Truncated {
            needed,
            found: input.length,
        });
    }
    Ok(gguf)
}

/// Reads the metadata; gives the facts kept and the alignment of the tensors.
fn metadata(input: &mut Input, entries: u64) -> Result<(Gguf, u64), GgufError> {
    let mut gguf = Gguf {
        causal: true,
        ..Gguf::default()
    };
    let mut alignment = DEFAULT_ALIGNMENT;
    for _ in 0..entries {
        let key = input.name()?;
        let value = if key == "tokenizer.ggml.tokens" {
            input.distinct_texts()?;
            Value::Other
        } else {
            input.value()?
        };
        match (key.as_str(), value) {
            ("general.alignment", Value::Number(value)) => alignment = value,
            ("general.architecture", Value::Text(text)) => gguf.architecture = text,
            ("tokenizer.ggml.model", Value::Text(text)) => gguf.tokenizer = Some(text),
            ("tokenizer.chat_template", Value::Text(text)) => gguf.chat_template = Some(text),
            ("split.count", Value::Number(value)) => gguf.parts = value,
            (key, Value::Number(0)) if key.ends_with(".attention.causal") => gguf.causal = false,
            // llama.cpp ends the process over these.
            (key, Value::Float(value))
                if key.ends_with("_epsilon") && (value.is_nan() || value < 0.0) =>
            {
                return Err(GgufError::Damaged(format!("{key} is {value}")));
            }
            _ => {}
        }
    }
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(GgufError::Damaged(format!("alignment {alignment}")));
    }
    Ok((gguf, alignment))
}

/// A metadata value as far as we look at it.
enum Value {
    /// An integer or a truth value; negative ones wrap and match nothing.
    Number(u64),
    Float(f32),
    Text(String),
    /// Arrays, long texts and numbers we have no use for: walked over.
    Other,
}

/// A file that knows where it is and how much there is.
struct Input {
    reader: BufReader<File>,
    position: u64,
    length: u64,
}

impl Input {
    /// Accounts for `bytes` that are about to be read or skipped.
    fn advance(&mut self, bytes: u64) -> Result<(), GgufError> {
        let needed = self.position.saturating_add(bytes);
        if needed > self.length {
            return Err(GgufError::Truncated {
                needed,
                found: self.length,
            });
        }
        self.position = needed;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        self.advance(N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn skip(&mut self, bytes: u64) -> Result<(), GgufError> {
        self.advance(bytes)?;
        // Below the length of a file, so it fits.
        self.reader
            .seek_relative(i64::try_from(bytes).unwrap_or(i64::MAX))?;
        Ok(())
    }

    fn bytes(&mut self, length: u64) -> Result<Vec<u8>, GgufError> {
        self.advance(length)?;
        let mut bytes = Vec::new();
        self.reader.by_ref().take(length).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn text(&mut self, length: u64) -> Result<String, GgufError> {
        let bytes = self.bytes(length)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn name(&mut self) -> Result<String, GgufError> {
        let length = self.u64()?;
        if length > MAX_NAME {
            return Err(GgufError::Damaged(format!("a name of {length} bytes")));
        }
        self.text(length)
    }

    fn value(&mut self) -> Result<Value, GgufError> {
        let kind = self.u32()?;
        match kind {
            0 | 1 | 7 => Ok(Value::Number(u64::from(self.array::<1>()?[0]))),
            2 | 3 => Ok(Value::Number(u64::from(u16::from_le_bytes(self.array()?)))),
            4 | 5 => Ok(Value::Number(u64::from(self.u32()?))),
            6 => Ok(Value::Float(f32::from_le_bytes(self.array()?))),
            10 | 11 => Ok(Value::Number(self.u64()?)),
            8 => {
                let length = self.u64()?;
                if length <= MAX_KEPT_TEXT {
                    return Ok(Value::Text(self.text(length)?));
                }
                self.skip(length)?;
                Ok(Value::Other)
            }
            9 => {
                self.skip_array()?;
                Ok(Value::Other)
            }
            scalar => {
                self.skip(scalar_size(scalar)?)?;
                Ok(Value::Other)
            }
        }
    }

    fn skip_array(&mut self) -> Result<(), GgufError> {
        let kind = self.u32()?;
        let count = self.u64()?;
        if kind != 8 {
            return self.skip(count.saturating_mul(scalar_size(kind)?));
        }
        // Each text takes at least its length, so a false count soon meets the end of the file.
        for _ in 0..count {
            let length = self.u64()?;
            self.skip(length)?;
        }
        Ok(())
    }

    /// Walks over an array of texts. llama.cpp ends the process when a vocabulary names two tokens
    /// alike; empty ones it renames.
    fn distinct_texts(&mut self) -> Result<(), GgufError> {
        let (array, kind) = (self.u32()?, self.u32()?);
        let count = self.u64()?;
        if (array, kind) != (9, 8) {
            return Err(GgufError::Damaged("tokens that are no texts".to_owned()));
        }
        let mut seen = HashSet::new();
        for _ in 0..count {
            let length = self.u64()?;
            let text = self.bytes(length)?;
            if let Some(text) = seen.replace(text).filter(|text| !text.is_empty()) {
                let text = String::from_utf8_lossy(&text).into_owned();
                return Err(GgufError::Damaged(format!("token {text:?} appears twice")));
            }
        }
        Ok(())
    }

    /// Reads one entry of the tensor table; gives where the tensor's data ends in the data part.
    fn tensor_end(&mut self, alignment: u64) -> Result<u64, GgufError> {
        let name = self.name()?;
        let damaged = |what: &str| GgufError::Damaged(format!("tensor {name:?} has {what}"));
        let dimensions = self.u32()?;
        if !(1..=4).contains(&dimensions) {
            return Err(damaged(&format!("{dimensions} dimensions")));
        }
        let row = self.u64()?;
        let mut rows: u64 = 1;
        for _ in 1..dimensions {
            let factor = self.u64()?;
            rows = rows
                .checked_mul(factor)
                .ok_or_else(|| damaged("an impossible size"))?;
        }
        let kind = self.u32()?;
        let offset = self.u64()?;
        let (block, bytes) = block_of(kind).ok_or_else(|| damaged(&format!("type {kind}")))?;
        if row % block != 0 {
            return Err(damaged(&format!("rows of {row} in blocks of {block}")));
        }
        if offset % alignment != 0 {
            return Err(damaged("a misplaced beginning"));
        }
        (row / block)
            .checked_mul(bytes)
            .and_then(|row_bytes| row_bytes.checked_mul(rows))
            .and_then(|size| size.checked_add(offset))
            .ok_or_else(|| damaged("an impossible size"))
    }
}

/// Bytes of one metadata value of a type that is not text and not an array.
fn scalar_size(kind: u32) -> Result<u64, GgufError> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        _ => Err(GgufError::Damaged(format!("a value of type {kind}"))),
    }
}

/// (Weights, bytes) of one block of a tensor type, from the table in ggml.c of llama-cpp-sys-2
/// 0.1.160. F64 is left out: llama.cpp crashes when it computes with it.
fn block_of(kind: u32) -> Option<(u64, u64)> {
    Some(match kind {
        0 => (1, 4),          // F32
        1 | 30 => (1, 2),     // F16, BF16
        2 => (32, 18),        // Q4_0
        3 => (32, 20),        // Q4_1
        6 => (32, 22),        // Q5_0
        7 => (32, 24),        // Q5_1
        8 => (32, 34),        // Q8_0
        9 => (32, 36),        // Q8_1
        10 => (256, 84),      // Q2_K
        11 => (256, 110),     // Q3_K
        12 => (256, 144),     // Q4_K
        13 => (256, 176),     // Q5_K
        14 => (256, 210),     // Q6_K
        15 => (256, 292),     // Q8_K
        16 | 35 => (256, 66), // IQ2_XXS, TQ2_0
        17 => (256, 74),      // IQ2_XS
        18 => (256, 98),      // IQ3_XXS
        19 => (256, 50),      // IQ1_S
        20 => (32, 18),       // IQ4_NL
        21 => (256, 110),     // IQ3_S
        22 => (256, 82),      // IQ2_S
        23 => (256, 136),     // IQ4_XS
        24 => (1, 1),         // I8
        25 => (1, 2),         // I16
        26 => (1, 4),         // I32
        27 => (1, 8),         // I64
        29 => (256, 56),      // IQ1_M
        34 => (256, 54),      // TQ1_0
        39 => (32, 17),       // MXFP4
        40 => (64, 36),       // NVFP4
        41 => (128, 18),      // Q1_0
        42 => (64, 18),       // Q2_0
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
