//! The embedded engine's executor on a tiny model: what llama.cpp computes, and what never reaches
//! it.

mod engine;
mod loading;
mod vocabulary;

use std::num::NonZeroU32;
use std::sync::Arc;

use shoal_gossip::{NodeId, RequestId};
use shoal_node::engine::EngineError;
use shoal_node::engine::batched::{Executor, Sample, Sampled, Slot, Step, StepItem};
use shoal_node::engine::llama::{LlamaConfig, LlamaParts, load};
use shoal_node::engine::work::SamplingParams;
use shoal_tests::tiny_gguf::{FIRST_BYTE, VOCABULARY, write_tiny_gguf};
use tempfile::TempDir;

/// A loaded tiny model. The file may go once it is mapped.
fn tiny(reproducible: bool) -> LlamaParts {
    let folder = TempDir::new().expect("a folder");
    load(&config(&folder, reproducible)).expect("the tiny model loads")
}

/// 4 sequences of 512 tokens, steps of 64.
fn config(folder: &TempDir, reproducible: bool) -> LlamaConfig {
    let path = folder.path().join("tiny.gguf");
    write_tiny_gguf(&path).expect("written");
    let nonzero = |value| NonZeroU32::new(value).expect("not zero");
    LlamaConfig {
        context_tokens: nonzero(2048),
        max_sequences: nonzero(4),
        reproducible,
        ..LlamaConfig::new(path)
    }
}

fn greedy() -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        ..SamplingParams::default()
    }
}

/// A prompt of `length` tokens that differs from every other `salt`'s.
fn prompt(length: usize, salt: u32) -> Vec<u32> {
    let letters = (0u32..).map(|place| FIRST_BYTE + (place * (7 + salt) + salt * 31) % 250);
    std::iter::once(1).chain(letters).take(length).collect()
}

/// One sequence on its way through the executor, as the batch core would take it.
struct Sequence {
    slot: u32,
    params: Arc<SamplingParams>,
    ids: Vec<u32>,
    prompt_len: usize,
    computed: usize,
}

impl Sequence {
    fn new(slot: u32, prompt: Vec<u32>, params: SamplingParams) -> Self {
        Self {
            slot,
            params: Arc::new(params),
            prompt_len: prompt.len(),
            ids: prompt,
            computed: 0,
        }
    }

    fn output(&self) -> &[u32] {
        &self.ids[self.prompt_len..]
    }

    /// The next at most `chunk` tokens; draws when they reach the end of what is known.
    fn item(&self, chunk: usize) -> StepItem {
        let end = self.ids.len().min(self.computed + chunk);
        StepItem {
            slot: Slot(self.slot),
            request: RequestId {
                home: NodeId(1),
                serial: u64::from(self.slot),
            },
            position: self.computed as u32,
            tokens: self.ids[self.computed..end].to_vec(),
            sample: (end == self.ids.len()).then(|| Sample {
                params: Arc::clone(&self.params),
                index: self.output().len() as u32,
                prompt_len: self.prompt_len as u32,
            }),
        }
    }
}

/// Computes one step with all sequences, `chunk` tokens each, and gives what was drawn.
fn advance(parts: &mut LlamaParts, sequences: &mut [&mut Sequence], chunk: usize) -> Vec<Sampled> {
    let step = Step {
        clear: Vec::new(),
        items: sequences
            .iter()
            .map(|sequence| sequence.item(chunk))
            .collect(),
    };
    let drawn = parts.executor.step(&step).expect("computed");
    for (sequence, item) in sequences.iter_mut().zip(&step.items) {
        sequence.computed += item.tokens.len();
        let own = drawn.iter().find(|drawn| drawn.slot == item.slot);
        assert_eq!(own.is_some(), item.sample.is_some());
        sequence.ids.extend(own.map(|drawn| drawn.id));
    }
    drawn
}

/// Runs one sequence alone until it has `count` output tokens.
fn run_alone(parts: &mut LlamaParts, sequence: &mut Sequence, count: usize, chunk: usize) {
    while sequence.output().len() < count {
        advance(parts, &mut [&mut *sequence], chunk);
    }
}

fn clear(parts: &mut LlamaParts, slot: u32) {
    let step = Step {
        clear: vec![Slot(slot)],
        items: Vec::new(),
    };
    assert_eq!(parts.executor.step(&step), Ok(Vec::new()));
}

/// Output of a fresh run in slot 0, which is cleared afterwards.
fn solo(
    parts: &mut LlamaParts,
    prompt: Vec<u32>,
    params: SamplingParams,
    count: usize,
) -> Vec<u32> {
    let mut sequence = Sequence::new(0, prompt, params);
    run_alone(parts, &mut sequence, count, 64);
    clear(parts, 0);
    sequence.output().to_vec()
}

#[test]
fn the_output_is_the_same_alone_and_in_company() {
    let mut parts = tiny(true);
    let prompts: Vec<Vec<u32>> = [30, 3, 57, 120]
        .map(|length| prompt(length, length as u32))
        .into();
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| solo(&mut parts, prompt.clone(), greedy(), 40))
        .collect();
    assert!(alone.windows(2).all(|pair| pair[0] != pair[1]), "{alone:?}");

    let mut sequences: Vec<Sequence> = (0..)
        .zip(&prompts)
        .map(|(slot, prompt)| Sequence::new(slot, prompt.clone(), greedy()))
        .collect();
    // Everyone arrives two steps after the one before and leaves with 40 tokens.
    for step in 0.. {
        let mut present: Vec<&mut Sequence> = sequences
            .iter_mut()
            .filter(|sequence| sequence.slot * 2 <= step && sequence.output().len() < 40)
            .collect();
        if present.is_empty() {
            break;
        }
        advance(&mut parts, &mut present, 16);
    }
    for (sequence, alone) in sequences.iter().zip(&alone) {
        assert_eq!(sequence.output(), alone, "slot {}", sequence.slot);
    }
}

#[test]
fn the_output_does_not_depend_on_how_the_prompt_is_cut() {
    let mut parts = tiny(true);
    let whole = solo(&mut parts, prompt(130, 5), greedy(), 30);
    for chunk in [1, 7, 33] {
        let mut cut = Sequence::new(2, prompt(130, 5), greedy());
        run_alone(&mut parts, &mut cut, 30, chunk);
        assert_eq!(cut.output(), whole, "chunks of {chunk}");
        clear(&mut parts, 2);
    }
}

#[test]
fn a_sequence_recomputed_elsewhere_goes_on_the_same() {
    let mut parts = tiny(true);
    let params = SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        repetition_penalty: 1.1,
        seed: 11,
        ..SamplingParams::default()
    };
    let unbroken = solo(&mut parts, prompt(50, 2), params.clone(), 60);
    let mut sequence = Sequence::new(3, prompt(50, 2), params);
    run_alone(&mut parts, &mut sequence, 25, 64);
    clear(&mut parts, 3);
    (sequence.slot, sequence.computed) = (1, 0);
    run_alone(&mut parts, &mut sequence, 60, 10);
    assert_eq!(sequence.output(), unbroken);
}

#[test]
fn a_shared_pool_serves_many_and_refuses_what_it_cannot_hold() {
    let mut parts = tiny(false);
    let mut sequences: Vec<Sequence> = (0..4)
        .map(|slot| Sequence::new(slot, prompt(600, slot), greedy()))
        .collect();
    // 4 × 500 tokens of 2048 fit; one slot may hold more than a quarter.
    for _ in 0..50 {
        let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
        advance(&mut parts, &mut all, 10);
    }
    let step = |sequence: &Sequence| Step {
        clear: Vec::new(),
        items: vec![sequence.item(49)],
    };
    let refused = parts.executor.step(&step(&sequences[0]));
    assert_eq!(
        refused,
        Err(EngineError::Broken(
            "all slots would hold 2049 tokens of at most 2048".to_owned()
        ))
    );
    clear(&mut parts, 3);
    assert_eq!(parts.executor.step(&step(&sequences[0])), Ok(Vec::new()));
}

#[test]
fn a_wrong_step_is_refused_and_harms_nobody() {
    let mut parts = tiny(true);
    let expected = solo(&mut parts, prompt(20, 1), greedy(), 10);
    let mut sequence = Sequence::new(0, prompt(20, 1), greedy());
    run_alone(&mut parts, &mut sequence, 5, 64);
    let mut wrong = |change: fn(&mut StepItem)| {
        let mut item = sequence.item(64);
        change(&mut item);
        let step = Step {
            clear: Vec::new(),
            items: vec![item],
        };
        assert!(matches!(
            parts.executor.step(&step),
            Err(EngineError::Broken(_))
        ));
    };
    wrong(|item| item.position += 1);
    wrong(|item| item.position = 0);
    wrong(|item| item.tokens = vec![VOCABULARY]);
    wrong(|item| item.tokens = vec![u32::MAX]);
    wrong(|item| item.tokens = Vec::new());
    wrong(|item| item.tokens = vec![1; 65]);
    wrong(|item| item.slot = Slot(4));
    run_alone(&mut parts, &mut sequence, 10, 64);
    assert_eq!(sequence.output(), expected);
}

#[test]
fn a_slot_is_full_at_its_last_token_and_not_before() {
    let mut parts = tiny(true);
    let mut sequence = Sequence::new(1, prompt(512, 1), greedy());
    while sequence.computed < 512 {
        advance(&mut parts, &mut [&mut sequence], 64);
    }
    let step = Step {
        clear: Vec::new(),
        items: vec![sequence.item(1)],
    };
    let text = parts.executor.step(&step).expect_err("full").to_string();
    assert!(
        text.contains("slot 1 would hold 513 tokens of at most 512"),
        "{text}"
    );
}

#[test]
fn a_seed_repeats_its_output_and_another_gives_another() {
    let mut parts = tiny(true);
    let mut run = |seed, temperature| {
        let params = SamplingParams {
            temperature,
            seed,
            ..SamplingParams::default()
        };
        solo(&mut parts, prompt(12, 9), params, 20)
    };
    assert_eq!(run(4, 1.0), run(4, 1.0));
    assert_ne!(run(4, 1.0), run(5, 1.0));
    assert_eq!(run(4, 0.0), run(5, 0.0));
}

#[test]
fn a_frequency_penalty_stops_a_token_from_coming_back() {
    let mut parts = tiny(true);
    let params = SamplingParams {
        frequency_penalty: 1000.0,
        ..greedy()
    };
    let mut output = solo(&mut parts, prompt(12, 3), params, 100);
    output.sort_unstable();
    output.dedup();
    assert_eq!(output.len(), 100);
}

#[test]
fn logprobs_rank_the_vocabulary() {
    let mut parts = tiny(true);
    let params = SamplingParams {
        logprobs: Some(20),
        ..greedy()
    };
    let mut sequence = Sequence::new(0, prompt(12, 3), params);
    let drawn = advance(&mut parts, &mut [&mut sequence], 64);
    let logprob = drawn[0].logprob.as_ref().expect("asked for");
    assert_eq!(logprob.top.len(), 20);
    assert_eq!(logprob.top[0].1, logprob.logprob);
    assert!(logprob.top.windows(2).all(|pair| pair[0].1 >= pair[1].1));
    let total: f32 = logprob.top.iter().map(|(_, value)| value.exp()).sum();
    assert!(total > 0.0 && total <= 1.0001, "{total}");
}
