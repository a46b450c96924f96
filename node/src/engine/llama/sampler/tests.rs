//! Which tokens are drawn, how often, and always the same.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const NOTHING: History<'static> = History {
    prompt: &[],
    output: &[],
};

fn params() -> SamplingParams {
    SamplingParams {
        seed: 1,
        ..SamplingParams::default()
    }
}

fn greedy() -> SamplingParams {
    SamplingParams {
        temperature: 0.0,
        ..params()
    }
}

fn draw(logits: &[f32], params: &SamplingParams, index: u32) -> u32 {
    Sampler::default().draw(logits, NOTHING, params, index)
}

/// How often each id comes in `count` draws with one seed.
fn histogram(logits: &[f32], params: &SamplingParams, count: u32) -> Vec<u32> {
    let mut sampler = Sampler::default();
    let mut seen = vec![0; logits.len()];
    for index in 0..count {
        seen[sampler.draw(logits, NOTHING, params, index) as usize] += 1;
    }
    seen
}

/// Ids that come up in 2,000 draws.
fn support(logits: &[f32], params: &SamplingParams) -> Vec<usize> {
    let seen = histogram(logits, params, 2000);
    (0..seen.len()).filter(|&id| seen[id] > 0).collect()
}

/// Logits of given probabilities.
fn logs(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|value| value.ln()).collect()
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_id_of_equals() {
    assert_eq!(draw(&[0.0, 3.0, 1.0, 3.0], &greedy(), 0), 1);
    let negative = SamplingParams {
        temperature: -1.0,
        ..params()
    };
    assert_eq!(draw(&[0.0, 3.0], &negative, 9), 1);
}

#[test]
fn logits_that_are_no_numbers_are_never_drawn() {
    let logits = [f32::NAN, 1.0, f32::NEG_INFINITY, 1.0];
    assert_eq!(draw(&logits, &greedy(), 0), 1);
    assert_eq!(support(&logits, &params()), [1, 3]);
    for broken in [f32::NAN, f32::NEG_INFINITY] {
        assert_eq!(draw(&[broken; 3], &params(), 0), 0);
        assert_eq!(draw(&[broken; 3], &greedy(), 0), 0);
    }
    assert_eq!(support(&[0.0, f32::INFINITY], &params()), [1]);
    assert_eq!(draw(&[], &params(), 0), 0);
}

#[test]
fn draws_come_as_often_as_their_probabilities_say() {
    let probabilities = [0.5, 0.25, 0.125, 0.0625, 0.0625];
    let count = 20_000;
    let seen = histogram(&logs(&probabilities), &params(), count);
    let chi_square: f64 = seen
        .iter()
        .zip(probabilities)
        .map(|(&seen, probability)| {
            let expected = f64::from(probability) * f64::from(count);
            (f64::from(seen) - expected).powi(2) / expected
        })
        .sum();
    // Four degrees of freedom: above 18.5 once in a thousand. The seed is fixed.
    assert!(chi_square < 18.5, "{chi_square} {seen:?}");
}

#[test]
fn temperature_sharpens_and_flattens() {
    let logits = logs(&[0.8, 0.2]);
    let share = |temperature| {
        let params = SamplingParams {
            temperature,
            ..params()
        };
        f64::from(histogram(&logits, &params, 10_000)[1]) / 10_000.0
    };
    // 0.2² / (0.8² + 0.2²) = 0.0588 and √0.2 / (√0.8 + √0.2) = 0.3333.
    assert!((share(0.5) - 0.0588).abs() < 0.01);
    assert!((share(2.0) - 0.3333).abs() < 0.02);
    assert_eq!(share(1e-30), 0.0);
}

#[test]
fn top_k_top_p_and_min_p_keep_the_likeliest() {
    let logits = logs(&[0.1, 0.4, 0.2, 0.3]);
    let check = |params: SamplingParams, expected: &[usize]| {
        assert_eq!(support(&logits, &params), expected, "{params:?}");
    };
    let with_k = |top_k| SamplingParams { top_k, ..params() };
    check(with_k(0), &[0, 1, 2, 3]);
    check(with_k(2), &[1, 3]);
    check(with_k(9), &[0, 1, 2, 3]);
    let with_p = |top_p| SamplingParams { top_p, ..params() };
    check(with_p(0.0), &[1]);
    check(with_p(0.39), &[1]);
    check(with_p(0.69), &[1, 3]);
    check(with_p(0.75), &[1, 2, 3]);
    let with_min_p = |min_p| SamplingParams { min_p, ..params() };
    check(with_min_p(0.7), &[1, 3]);
    check(with_min_p(0.3), &[1, 2, 3]);
    check(with_min_p(7.0), &[1]);
    // Of the two that top-k leaves, the first has 4/7 of the probability.
    let both = |top_p| SamplingParams {
        top_k: 2,
        top_p,
        ..params()
    };
    check(both(0.57), &[1]);
    check(both(0.58), &[1, 3]);
}

#[test]
fn penalties_change_the_logits_of_what_came_before() {
    let logits = [2.0, 1.9, -1.0];
    let check = |params: SamplingParams, prompt: &[u32], output: &[u32], expected| {
        let history = History { prompt, output };
        assert_eq!(
            Sampler::default().draw(&logits, history, &params, 0),
            expected,
            "{params:?}"
        );
    };
    let presence = SamplingParams {
        presence_penalty: 0.2,
        ..greedy()
    };
    check(presence.clone(), &[0], &[], 0);
    check(presence.clone(), &[], &[0], 1);
    check(presence, &[], &[0, 0, 0, 1], 0);
    let frequency = SamplingParams {
        frequency_penalty: 0.2,
        ..greedy()
    };
    check(frequency.clone(), &[0, 0], &[], 0);
    check(frequency, &[], &[0, 0, 1], 1);
    let repetition = SamplingParams {
        repetition_penalty: 1.5,
        ..greedy()
    };
    check(repetition.clone(), &[0], &[], 1);
    check(repetition.clone(), &[], &[0, 0], 1);
    check(repetition, &[0], &[1, 7_000], 0);
    // Negative logits are multiplied, so they fall as well: -1 × 4 < -3.
    let history = History {
        prompt: &[0],
        output: &[],
    };
    let params = SamplingParams {
        repetition_penalty: 4.0,
        ..greedy()
    };
    assert_eq!(
        Sampler::default().draw(&[-1.0, -3.0], history, &params, 0),
        1
    );
}

#[test]
fn a_sampler_remembers_nothing_between_draws() {
    let logits = [2.0, 1.9, 1.8];
    let penalty = SamplingParams {
        presence_penalty: 0.15,
        repetition_penalty: 1.01,
        ..greedy()
    };
    let mut sampler = Sampler::default();
    for _ in 0..3 {
        let history = History {
            prompt: &[],
            output: &[0],
        };
        assert_eq!(sampler.draw(&logits, history, &penalty, 0), 1);
        assert_eq!(sampler.draw(&logits, NOTHING, &penalty, 0), 0);
    }
}

#[test]
fn logprobs_are_the_log_softmax_of_the_raw_logits() {
    let shown = logprobs(&logs(&[0.1, 0.4, 0.2, 0.3]), 2, 3);
    let close = |value: f32, probability: f32| (value - probability.ln()).abs() < 1e-5;
    assert!(close(shown.chosen, 0.2));
    let ids: Vec<u32> = shown.top.iter().map(|&(id, _)| id).collect();
    assert_eq!(ids, [1, 3, 2]);
    assert!(close(shown.top[0].1, 0.4) && close(shown.top[2].1, 0.2));
    let equal = logprobs(&[1.0; 30], 7, 99);
    let ids: Vec<u32> = equal.top.iter().map(|&(id, _)| id).collect();
    assert_eq!(ids, (0..20).collect::<Vec<u32>>());
    assert_eq!(logprobs(&[1.0, 2.0], 0, 0).top, []);
}

#[test]
fn logprobs_are_finite_whatever_the_logits() {
    let odd = [f32::NAN, f32::NEG_INFINITY, 0.0, f32::INFINITY];
    for logits in [odd.as_slice(), &odd[..2], &odd[..1], &odd[2..3], &[]] {
        for chosen in 0..5 {
            let shown = logprobs(logits, chosen, 20);
            assert!(shown.chosen.is_finite(), "{logits:?} {chosen}");
            assert!(
                shown.top.iter().all(|(_, value)| value.is_finite()),
                "{logits:?}"
            );
        }
    }
}

/// The definition: rank all, keep k, keep those that reach the share, keep those above the minimum.
fn restricted(weights: &[f32], params: &SamplingParams) -> Vec<u32> {
    let mut ranked: Vec<Candidate> = (0..)
        .zip(weights)
        .map(|(id, &weight)| Candidate { weight, id })
        .collect();
    ranked.sort_by(Candidate::by_rank);
    if params.top_k > 0 {
        ranked.truncate(params.top_k as usize);
    }
    let target = f64::from(params.top_p) * sum(&ranked);
    let mut before = 0.0;
    if params.top_p < 1.0 {
        ranked.retain(|candidate| {
            let kept = before < target || before == 0.0;
            before += f64::from(candidate.weight);
            kept
        });
    }
    ranked.retain(|candidate| candidate.weight >= params.min_p);
    ranked.iter().map(|candidate| candidate.id).collect()
}

fn some_params() -> impl Strategy<Value = SamplingParams> {
    (
        0.05f32..3.0,
        0.0f32..1.1,
        0u32..40,
        0.0f32..0.3,
        any::<u64>(),
    )
        .prop_map(|(temperature, top_p, top_k, min_p, seed)| SamplingParams {
            temperature,
            top_p,
            top_k,
            min_p,
            seed,
            ..SamplingParams::default()
        })
}

proptest! {
    #[test]
    fn the_same_draw_gives_the_same_token(
        logits in vec(-20f32..20.0, 1..400),
        params in some_params(),
        index in any::<u32>(),
        noise in vec(-5f32..5.0, 1..400),
    ) {
        let first = draw(&logits, &params, index);
        let mut used = Sampler::default();
        used.draw(&noise, NOTHING, &params, 3);
        prop_assert_eq!(used.draw(&logits, NOTHING, &params, index), first);
        prop_assert!((first as usize) < logits.len());
    }

    #[test]
    fn top_k_of_one_is_greedy(logits in vec(-20f32..20.0, 1..400), params in some_params(), index in any::<u32>()) {
        let one = SamplingParams { top_k: 1, ..params };
        prop_assert_eq!(draw(&logits, &one, index), draw(&logits, &greedy(), index));
    }

    #[test]
    fn the_tokens_kept_are_those_of_the_definition(
        mut weights in vec((0f32..8.0).prop_map(|depth| (-depth).exp()), 1..900),
        params in some_params(),
    ) {
        weights[0] = 1.0;
        let candidates = (0..).zip(&weights).map(|(id, &weight)| Candidate { weight, id }).collect();
        let mut sampler = Sampler { candidates, ..Sampler::default() };
        sampler.restrict(&params);
        sampler.candidates.sort_by(Candidate::by_rank);
        let kept: Vec<u32> = sampler.candidates.iter().map(|candidate| candidate.id).collect();
        // Sums in another order may differ in the last bit and so by one token.
        let expected = restricted(&weights, &params);
        prop_assert!(kept.len().abs_diff(expected.len()) <= 1, "{} {}", kept.len(), expected.len());
        let common = kept.len().min(expected.len());
        prop_assert_eq!(&kept[..common], &expected[..common]);
    }
}
