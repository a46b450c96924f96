//! Profiles, step times, vocabulary and tokens of the simulated engine.

use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::{NodeId, RequestId};

use super::*;
use crate::engine::batched::{Executor, Sample, Slot, Step, StepItem, TextModel};
use crate::engine::work::SamplingParams;

fn close(time: Duration, expected_ms: f64, tolerance: f64) {
    let ms = time.as_secs_f64() * 1000.0;
    let error = (ms - expected_ms).abs() / expected_ms;
    assert!(error < tolerance, "{ms} ms instead of {expected_ms} ms");
}

fn prefill(profile: &str, tokens: u32) -> Duration {
    let mut load = StepLoad::default();
    load.add(0, tokens, true);
    Profile::find(profile)
        .expect("shipped")
        .step
        .step_time(&load)
}

fn decode(profile: &str, sequences: u32, context: u32) -> Duration {
    let mut load = StepLoad::default();
    for _ in 0..sequences {
        load.add(context - 1, 1, true);
    }
    Profile::find(profile)
        .expect("shipped")
        .step
        .step_time(&load)
}

#[test]
fn the_a10_profile_meets_every_measured_point_of_llumnix_figure_10() {
    let measured = [
        (256, 58.0, 46.8),
        (512, 110.0, 44.39),
        (1024, 220.0, 43.3),
        (2048, 436.0, 42.85),
        (4096, 940.0, 42.9),
        (8192, 1995.0, 43.62),
    ];
    for (length, prefill_ms, decode_ms) in measured {
        close(prefill("a10/llama-7b", length), prefill_ms, 0.03);
        close(
            decode("a10/llama-7b", 8192 / length, length),
            decode_ms,
            0.03,
        );
    }
}

#[test]
fn the_other_profiles_meet_the_points_they_were_fitted_to() {
    close(prefill("a10/llama-2-7b", 2048), 445.8, 0.03);
    close(decode("a10/llama-2-7b", 8, 512), 40.5, 0.1);
    close(prefill("a10/qwen2.5-7b", 2048), 436.6, 0.03);
    close(prefill("a100/llama-2-13b", 1024), 109.1, 0.05);
    close(decode("a100/llama-2-13b", 32, 512), 29.6, 0.1);
    close(prefill("h100/llama-3.1-8b", 2048), 45.1, 0.05);
    close(decode("h100/llama-3.1-8b", 64, 512), 10.7, 0.1);
}

#[test]
fn a_chunked_prompt_costs_the_same_attention_as_a_whole_one() {
    let mut whole = StepLoad::default();
    whole.add(0, 100, true);
    let mut parts = StepLoad::default();
    parts.add(0, 60, false);
    parts.add(60, 40, true);
    assert_eq!(whole.pairs, parts.pairs);
    assert_eq!(whole.tokens, parts.tokens);
    assert_eq!(
        StepModel::default().step_time(&StepLoad::default()),
        Duration::ZERO
    );
}

#[test]
fn every_shipped_profile_makes_sizes_that_fit_together() {
    for name in Profile::shipped().expect("sound") {
        let profile = Profile::find(&name).expect("sound");
        assert_eq!(
            SimConfig::new(&name).batch(&profile).check(),
            Ok(()),
            "{name}"
        );
    }
}

#[test]
fn an_unknown_profile_is_answered_with_the_known_ones() {
    let error = Profile::find("b200/llama")
        .expect_err("not shipped")
        .to_string();
    assert!(
        error.contains("a10/llama-7b") && error.contains("h100/llama-3.1-8b"),
        "{error}"
    );
}

#[test]
fn a_profile_is_read_from_a_file_and_a_damaged_one_is_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("own.json");
    let name = path.to_str().expect("UTF-8").to_owned();
    let pair = |a: &str| {
        format!(
            r#"{{"model":"m","kv_capacity":{{"tokens":4096}},"fits":{{"max_form":{{"a_ms":{a},"w_ms":1,
            "b_ms_per_token":0,"c_ms_per_seq":0,"d_ms_per_kv_token":0,"e_ms_per_prefill_token_sq":0}}}},"more":1}}"#
        )
    };
    let write = |text: String| std::fs::write(&path, text).expect("written");
    write(format!(r#"{{"pairs":{{"x":{}}}}}"#, pair("2")));
    let profile = Profile::find(&name).expect("one profile");
    assert_eq!((profile.kv, profile.context), (Tokens(4096), Tokens(4096)));
    assert_eq!(profile.step.base_ms, 2.0);
    write(format!(
        r#"{{"pairs":{{"x":{},"y":{}}}}}"#,
        pair("2"),
        pair("-3")
    ));
    assert!(matches!(
        Profile::find(&name),
        Err(ProfileError::Choose { .. })
    ));
    assert_eq!(Profile::find(&format!("{name}#x")).expect("named"), profile);
    assert!(matches!(
        Profile::find(&format!("{name}#y")),
        Err(ProfileError::Unsound { .. })
    ));
    write("{".to_owned());
    assert!(matches!(
        Profile::find(&name),
        Err(ProfileError::Damaged { .. })
    ));
    write(" ".repeat((1 << 20) + 1));
    assert!(matches!(
        Profile::find(&name),
        Err(ProfileError::TooLarge { .. })
    ));
    assert!(matches!(
        Profile::find("no/such.json"),
        Err(ProfileError::File { .. })
    ));
}

#[test]
fn text_becomes_words_where_it_can_and_reads_back_the_same() {
    for text in [
        "",
        " lorem ipsum",
        "Fish, 🐟 and 魚群 turn\nslowly!",
        "  turns turning",
    ] {
        let ids = SimText.encode_text(text).expect("any text");
        assert!(ids.iter().all(|id| *id < SimText.vocabulary()));
        let bytes: Vec<u8> = ids.iter().flat_map(|id| SimText.piece(*id)).collect();
        assert_eq!(String::from_utf8(bytes).as_deref(), Ok(text));
    }
    assert_eq!(
        SimText.encode_text(" lorem ipsum").map(|ids| ids.len()),
        Ok(2)
    );
    assert_eq!(SimText.encode_text(" turns").map(|ids| ids.len()), Ok(1));
}

struct Run {
    executor: SimExecutor,
    params: SamplingParams,
}

impl Run {
    fn new(temperature: f32, seed: u64, mean_output: u32) -> Self {
        Self {
            executor: SimExecutor::new(StepModel::default(), 0.0, mean_output),
            params: SamplingParams {
                temperature,
                seed,
                ..SamplingParams::default()
            },
        }
    }

    /// Prefills `ids` in a fresh slot and generates up to `count` tokens.
    fn go_on(&mut self, ids: &[u32], first_index: u32, count: u32) -> Vec<u32> {
        let mut output = Vec::new();
        let (mut next, mut position) = (ids.to_vec(), 0);
        let mut clear = vec![Slot(0)];
        for index in first_index..first_index + count {
            let tokens = std::mem::take(&mut next);
            let length = tokens.len() as u32;
            let item = StepItem {
                slot: Slot(0),
                request: RequestId {
                    home: NodeId(0),
                    serial: 0,
                },
                position,
                tokens,
                sample: Some(Sample {
                    params: Arc::new(self.params.clone()),
                    index,
                    prompt_len: 3,
                }),
            };
            let step = Step {
                clear: std::mem::take(&mut clear),
                items: vec![item],
            };
            let drawn = self.executor.step(&step).expect("no gap")[0].id;
            output.push(drawn);
            if SimText.is_end(drawn) {
                return output;
            }
            next = vec![drawn];
            position += length;
        }
        output
    }
}

#[test]
fn tokens_depend_on_what_came_before_and_a_resumed_run_goes_on_the_same() {
    let whole = Run::new(0.0, 0, 0).go_on(&[1, 2, 3], 0, 40);
    assert_eq!(Run::new(0.0, 7, 0).go_on(&[1, 2, 3], 0, 40), whole);
    let known: Vec<u32> = [1, 2, 3].iter().chain(&whole[..15]).copied().collect();
    assert_eq!(Run::new(0.0, 0, 0).go_on(&known, 15, 25), whole[15..]);
    assert_ne!(Run::new(0.0, 0, 0).go_on(&[1, 2, 4], 0, 40), whole);
    let seeded = Run::new(0.8, 1, 0).go_on(&[1, 2, 3], 0, 40);
    assert_eq!(Run::new(0.8, 1, 0).go_on(&[1, 2, 3], 0, 40), seeded);
    assert_ne!(Run::new(0.8, 2, 0).go_on(&[1, 2, 3], 0, 40), seeded);
}

#[test]
fn outputs_end_by_themselves_after_the_wanted_length_on_average() {
    let mut run = Run::new(0.0, 0, 50);
    let total: usize = (0..300).map(|n| run.go_on(&[1, 2, n], 0, 1000).len()).sum();
    assert!((35..65).contains(&(total / 300)), "{}", total / 300);
    run.params.ignore_eos = true;
    assert_eq!(run.go_on(&[1, 2, 3], 0, 1000).len(), 1000);
}

#[test]
fn a_step_that_leaves_a_gap_breaks_the_engine() {
    let mut executor = SimExecutor::new(StepModel::default(), 0.0, 0);
    let step = Step {
        clear: vec![],
        items: vec![StepItem {
            slot: Slot(3),
            request: RequestId {
                home: NodeId(0),
                serial: 0,
            },
            position: 5,
            tokens: vec![1],
            sample: None,
        }],
    };
    assert!(matches!(executor.step(&step), Err(EngineError::Broken(_))));
}
