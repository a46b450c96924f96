//! The embedded engine's KV on its way: what is bit for bit the same after a move, and how long the engine thread is
//! held.
//!
//! With the real model where it is: `SHOAL_TEST_MODEL` names the file, else it is looked for where
//! `scripts/fetch-model.sh` puts it.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{Clock, MonotonicClock, NodeId, RequestId, Tokens};
use shoal_migrate::KvRange;
use shoal_node::engine::batched::{Executor, KvImport, Sample, Slot, Step, StepItem};
use shoal_node::engine::llama::{LlamaConfig, LlamaParts, load};
use shoal_node::engine::moving::ExportedKv;
use shoal_node::engine::work::SamplingParams;
use shoal_tests::tiny_gguf::{VOCABULARY, write_tiny_gguf};
use tempfile::TempDir;

fn nonzero(value: u32) -> NonZeroU32 {
    NonZeroU32::new(value).expect("not zero")
}

fn real_model() -> Option<PathBuf> {
    let named = std::env::var_os("SHOAL_TEST_MODEL").map(PathBuf::from);
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let fetched = cache.map(|cache| cache.join("shoal/SmolLM2-135M-Instruct.Q4_1.gguf"));
    named.or(fetched).filter(|path| path.is_file())
}

/// Two slots of this many tokens.
fn two_slots(path: PathBuf, tokens: u32, reproducible: bool) -> LlamaParts {
    let config = LlamaConfig {
        context_tokens: nonzero(2 * tokens),
        max_sequences: nonzero(2),
        step_tokens: nonzero(256),
        reproducible,
        ..LlamaConfig::new(path)
    };
    load(&config).expect("loads")
}

fn range(start: u32, end: u32) -> KvRange {
    KvRange::new(Tokens(start), Tokens(end)).expect("not empty")
}

/// Computes `ids` from `position` on in a slot. Draws the next token if asked, with its log-probabilities.
fn compute(
    parts: &mut LlamaParts,
    slot: u32,
    position: usize,
    ids: &[u32],
    draw: bool,
) -> Option<(u32, Vec<(String, f32)>)> {
    let params = Arc::new(SamplingParams {
        temperature: 0.0,
        logprobs: Some(20),
        ..SamplingParams::default()
    });
    let mut drawn = Vec::new();
    let chunks = ids.len().div_ceil(128);
    for (number, chunk) in ids.chunks(128).enumerate() {
        let item = StepItem {
            slot: Slot(slot),
            request: RequestId {
                home: NodeId(1),
                serial: u64::from(slot),
            },
            position: (position + number * 128) as u32,
            tokens: chunk.to_vec(),
            sample: (draw && number + 1 == chunks).then(|| Sample {
                params: Arc::clone(&params),
                index: 0,
                prompt_len: u32::MAX,
            }),
        };
        let step = Step {
            clear: Vec::new(),
            items: vec![item],
        };
        drawn = parts.executor.step(&step).expect("computed");
    }
    let drawn = drawn.pop()?;
    Some((drawn.id, drawn.logprob.expect("asked for").top))
}

fn ids(count: u32, below: u32) -> Vec<u32> {
    (0..count)
        .map(|n| 5 + (n * 37 + n * n % 11) % (below - 5))
        .collect()
}

/// Exports a range of slot 0 in the form that travels.
fn export(parts: &mut LlamaParts, range: KvRange) -> ExportedKv {
    let form = parts.executor.kv_form().expect("moves KV");
    let raw = parts.executor.export(Slot(0), range).expect("exported");
    let bytes = form.cut(raw, range).expect("cut");
    let kv = ExportedKv { range, bytes };
    assert_eq!(form.check(&kv), Ok(()));
    kv
}

/// Puts stages into slot 1, as the engine does.
fn import(parts: &mut LlamaParts, stages: &[ExportedKv], ids: &[u32]) {
    let form = parts.executor.kv_form().expect("moves KV");
    match form.takes() {
        KvImport::Stages => {
            for stage in stages {
                let imported = parts.executor.import(Slot(1), stage.range, &stage.bytes);
                imported.expect("imported");
            }
        }
        KvImport::Whole => {
            let whole = form.join(Slot(1), stages).expect("joined");
            let all = range(0, ids.len() as u32);
            parts
                .executor
                .import(Slot(1), all, &whole)
                .expect("imported");
        }
    }
    parts.executor.adopt(Slot(1), ids).expect("adopted");
}

/// Stages copied while the source goes on; then both ends draw the same, to the last bit of their log-probabilities.
fn moves_bit_for_bit(mut source: LlamaParts, mut target: LlamaParts, vocabulary: u32) {
    let mut known = ids(150, vocabulary);
    let mut stages = Vec::new();
    compute(&mut source, 0, 0, &known[..149], false);
    for stage in 0..4 {
        stages.push(export(&mut source, range(stage * 32, (stage + 1) * 32)));
        let position = known.len() - 1;
        let last = known[position];
        let (next, _) = compute(&mut source, 0, position, &[last], true).expect("drawn");
        known.push(next);
    }
    let computed = known.len() - 1;
    stages.push(export(&mut source, range(128, computed as u32)));
    // Something else was in the target's other slot before.
    compute(&mut target, 0, 0, &ids(60, vocabulary), false);
    import(&mut target, &stages, &known[..computed]);
    for _ in 0..30 {
        let position = known.len() - 1;
        let last = [known[position]];
        let here = compute(&mut source, 0, position, &last, true).expect("drawn");
        let there = compute(&mut target, 1, position, &last, true).expect("drawn");
        assert_eq!(here, there, "position {position}");
        known.push(here.0);
    }
}

#[test]
fn kv_moves_bit_for_bit_between_contexts_of_a_tiny_model() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("tiny.gguf");
    write_tiny_gguf(&path).expect("written");
    for reproducible in [true, false] {
        let ends = [(); 2].map(|()| two_slots(path.clone(), 512, reproducible));
        let [source, target] = ends;
        moves_bit_for_bit(source, target, VOCABULARY);
    }
}

#[test]
fn kv_moves_bit_for_bit_between_contexts_of_the_real_model() {
    let Some(path) = real_model() else {
        return;
    };
    let source = two_slots(path.clone(), 512, true);
    moves_bit_for_bit(source, two_slots(path, 512, true), 40_000);
}

fn timed<T>(clock: &dyn Clock, act: impl FnOnce() -> T) -> (T, Duration) {
    let started = clock.now();
    let done = act();
    (done, clock.now().since(started))
}

/// Prints how long each part of an export and an import takes; those of the executor hold the engine thread.
/// Run it alone: `cargo test --workspace --test scenarios how_long_an_act -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement of minutes, on the real model"]
fn how_long_an_act_on_kv_holds_the_engine_thread() {
    let path = real_model().expect("the model is fetched");
    let clock = MonotonicClock::start();
    println!("layout tokens stage bytes | export cut again check | join again import step (ms)");
    for reproducible in [true, false] {
        let mut parts = two_slots(path.clone(), 8192, reproducible);
        let form = parts.executor.kv_form().expect("moves KV");
        let known = ids(8192, 40_000);
        let mut computed = 0;
        for tokens in [128, 1024, 2048, 8000] {
            compute(&mut parts, 0, computed, &known[computed..tokens], false);
            computed = tokens;
            let stages: Vec<_> = (0..tokens as u32)
                .step_by(1024)
                .map(|start| export(&mut parts, range(start, (start + 1024).min(tokens as u32))))
                .collect();
            let last = stages.last().expect("at least one").range;
            let (raw, export) = timed(&clock, || parts.executor.export(Slot(0), last));
            let raw = raw.expect("exported");
            // In fresh memory, and in what that gave back.
            let (fresh, cut) = timed(&clock, || form.cut(raw.clone(), last).expect("cut"));
            drop(fresh);
            let (bytes, cut_again) = timed(&clock, || form.cut(raw, last).expect("cut"));
            let size = bytes.len();
            let kv = ExportedKv { range: last, bytes };
            let (_, check) = timed(&clock, || form.check(&kv));
            let ((join, join_again), import) = match form.takes() {
                KvImport::Whole => {
                    let (fresh, join) = timed(&clock, || form.join(Slot(1), &stages));
                    drop(fresh);
                    let (whole, again) = timed(&clock, || form.join(Slot(1), &stages));
                    let whole = whole.expect("joined");
                    let all = range(0, tokens as u32);
                    let imported = timed(&clock, || parts.executor.import(Slot(1), all, &whole));
                    imported.0.expect("imported");
                    ((join, again), imported.1)
                }
                KvImport::Stages => {
                    let mut longest = Duration::ZERO;
                    for stage in &stages {
                        let (imported, took) = timed(&clock, || {
                            parts.executor.import(Slot(1), stage.range, &stage.bytes)
                        });
                        imported.expect("imported");
                        longest = longest.max(took);
                    }
                    ((Duration::ZERO, Duration::ZERO), longest)
                }
            };
            let (_, step) = timed(&clock, || {
                compute(&mut parts, 0, computed, &known[computed..=computed], true)
            });
            computed += 1;
            let ms = |time: Duration| time.as_secs_f64() * 1000.0;
            println!(
                "{} {tokens} {} {size} | {:.2} {:.2} {:.2} {:.2} | {:.2} {:.2} {:.2} {:.2}",
                if reproducible {
                    "split q8_0"
                } else {
                    "pool f16"
                },
                last.tokens().0,
                ms(export),
                ms(cut),
                ms(cut_again),
                ms(check),
                ms(join),
                ms(join_again),
                ms(import),
                ms(step),
            );
            let clear = Step {
                clear: vec![Slot(1)],
                items: Vec::new(),
            };
            parts.executor.step(&clear).expect("cleared");
        }
    }
}
