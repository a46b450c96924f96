//! A model small enough for tests: a llama with random weights and one token per byte.
//!
//! 4 layers of width 64, 2 heads of 32, some 150 KB. Any text can be encoded; what it answers is
//! noise, but the same noise everywhere. Weights are Q4_1 because llama.cpp computes that type with
//! the same operations for one row as for many, so outputs can be compared across batches. Heads
//! are 32 wide, as q8_0 KV needs.

use std::fs;
use std::io;
use std::path::Path;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Ids in the vocabulary: `<unk>`, `<s>`, `</s>`, the 256 bytes, `<|im_start|>`, `<|im_end|>`, space.
pub const VOCABULARY: u32 = 262;
/// Id of byte 0; the other bytes follow.
pub const FIRST_BYTE: u32 = 3;
/// Control token that begins a message.
pub const MESSAGE_START: u32 = 259;
/// Control token that ends a message, and the output.
pub const MESSAGE_END: u32 = 260;
/// A space in text. (Tokenizers of this kind never use byte 32 for it.)
pub const SPACE: u32 = 261;
/// Tokens the model says it was trained on in one sequence.
pub const CONTEXT: u32 = 4096;

/// ChatML, without the system prompt that real models add.
const TEMPLATE: &str = "{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const WIDTH: u64 = 64;
const HEAD: u64 = 32;
const HIDDEN: u64 = 160;
const LAYERS: u32 = 4;
const ALIGNMENT: usize = 32;
const F32: u32 = 0;
const Q4_1: u32 = 3;

/// Writes the model. Every call writes the same bytes.
///
/// # Errors
/// The file cannot be written.
pub fn write_tiny_gguf(path: &Path) -> io::Result<()> {
    fs::write(path, tiny_gguf())
}

/// The model file as bytes.
pub fn tiny_gguf() -> Vec<u8> {
    let tensors = tensors();
    let (entries, metadata) = metadata();
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend(entries.to_le_bytes());
    out.extend(metadata);
    let mut offset = 0;
    for tensor in &tensors {
        put_text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        for size in &tensor.shape {
            out.extend(size.to_le_bytes());
        }
        out.extend(tensor.kind.to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.data.len().next_multiple_of(ALIGNMENT);
    }
    for tensor in &tensors {
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(&tensor.data);
    }
    out
}

struct Tensor {
    name: String,
    shape: Vec<u64>,
    kind: u32,
    data: Vec<u8>,
}

fn tensors() -> Vec<Tensor> {
    let mut rng = StdRng::seed_from_u64(7);
    let mut matrix = |name: String, columns, rows, spread: f32| Tensor {
        name,
        shape: vec![columns, rows],
        kind: Q4_1,
        data: random_q4_1(&mut rng, columns * rows, spread),
    };
    let vocabulary = u64::from(VOCABULARY);
    let mut all = vec![
        matrix("token_embd.weight".to_owned(), WIDTH, vocabulary, 1.0),
        ones("output_norm.weight".to_owned()),
        matrix("output.weight".to_owned(), WIDTH, vocabulary, 0.6),
    ];
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        all.extend([
            ones(name("attn_norm")),
            ones(name("ffn_norm")),
            matrix(name("attn_q"), WIDTH, WIDTH, 0.35),
            matrix(name("attn_k"), WIDTH, HEAD, 0.35),
            matrix(name("attn_v"), WIDTH, HEAD, 0.19),
            matrix(name("attn_output"), WIDTH, WIDTH, 0.19),
            matrix(name("ffn_gate"), WIDTH, HIDDEN, 0.19),
            matrix(name("ffn_up"), WIDTH, HIDDEN, 0.19),
            matrix(name("ffn_down"), HIDDEN, WIDTH, 0.12),
        ]);
    }
    all
}

fn ones(name: String) -> Tensor {
    Tensor {
        name,
        shape: vec![WIDTH],
        kind: F32,
        data: 1f32.to_le_bytes().repeat(WIDTH as usize),
    }
}

/// Blocks of 32 weights as (scale, minimum) in f16 and 4 bits each: uniform on 16 steps around
/// zero with the given standard deviation.
fn random_q4_1(rng: &mut StdRng, weights: u64, spread: f32) -> Vec<u8> {
    // Sixteen equal steps have a deviation of 4.61 steps.
    let step = spread / 4.61;
    let mut out = Vec::new();
    for _ in 0..weights / 32 {
        out.extend(f16_bits(step).to_le_bytes());
        out.extend(f16_bits(-7.5 * step).to_le_bytes());
        out.extend(rng.random::<[u8; 16]>());
    }
    out
}

/// The nearest f16 towards zero; for values in its normal range.
fn f16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    // The exponent is moved from a bias of 127 to one of 15, the fraction cut from 23 bits to 10.
    let magnitude = ((bits & 0x7fff_ffff) >> 13) - ((127 - 15) << 10);
    (sign | magnitude) as u16
}

/// Number of entries, and the entries.
fn metadata() -> (u64, Vec<u8>) {
    let mut out = Metadata::default();
    out.text("general.architecture", "llama");
    out.text("general.name", "tiny-random");
    out.number("general.file_type", Q4_1);
    out.number("llama.context_length", CONTEXT);
    out.number("llama.embedding_length", WIDTH as u32);
    out.number("llama.block_count", LAYERS);
    out.number("llama.feed_forward_length", HIDDEN as u32);
    out.number("llama.attention.head_count", (WIDTH / HEAD) as u32);
    out.number("llama.attention.head_count_kv", 1);
    out.number("llama.rope.dimension_count", HEAD as u32);
    out.number("llama.vocab_size", VOCABULARY);
    out.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
    out.float("llama.rope.freq_base", 10_000.0);
    out.text("tokenizer.ggml.model", "llama");
    let (texts, kinds): (Vec<String>, Vec<u32>) = vocabulary().into_iter().unzip();
    out.array("tokenizer.ggml.tokens", 8, texts.len(), |out| {
        texts.iter().for_each(|text| put_text(out, text));
    });
    out.array("tokenizer.ggml.scores", 6, texts.len(), |out| {
        out.resize(out.len() + 4 * texts.len(), 0);
    });
    out.array("tokenizer.ggml.token_type", 5, kinds.len(), |out| {
        kinds.iter().for_each(|kind| out.extend(kind.to_le_bytes()));
    });
    out.number("tokenizer.ggml.unknown_token_id", 0);
    out.number("tokenizer.ggml.bos_token_id", 1);
    out.number("tokenizer.ggml.eos_token_id", 2);
    out.truth("tokenizer.ggml.add_bos_token", true);
    out.truth("tokenizer.ggml.add_space_prefix", false);
    out.text("tokenizer.chat_template", TEMPLATE);
    (out.entries, out.bytes)
}

/// (text, kind) of every id; kinds are 1 normal, 2 unknown, 3 control, 6 byte.
fn vocabulary() -> Vec<(String, u32)> {
    let control = |text: &str| (text.to_owned(), 3);
    let mut all = vec![("<unk>".to_owned(), 2), control("<s>"), control("</s>")];
    all.extend((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 6)));
    all.extend([control("<|im_start|>"), control("<|im_end|>")]);
    all.push(("\u{2581}".to_owned(), 1));
    all
}

/// Key-value entries as they are written.
#[derive(Default)]
struct Metadata {
    entries: u64,
    bytes: Vec<u8>,
}

impl Metadata {
    fn key(&mut self, key: &str, kind: u32) {
        self.entries += 1;
        put_text(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
    }

    fn number(&mut self, key: &str, value: u32) {
        self.key(key, 4);
        self.bytes.extend(value.to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.key(key, 6);
        self.bytes.extend(value.to_le_bytes());
    }

    fn truth(&mut self, key: &str, value: bool) {
        self.key(key, 7);
        self.bytes.push(u8::from(value));
    }

    fn text(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        put_text(&mut self.bytes, value);
    }

    fn array(&mut self, key: &str, kind: u32, count: usize, put: impl FnOnce(&mut Vec<u8>)) {
        self.key(key, 9);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend((count as u64).to_le_bytes());
        put(&mut self.bytes);
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
