//! Draws the next token. Pure: the same logits, history, parameters and output index give the same
//! token, on every host of the same build.
//!
//! Order of the steps, as in Hugging Face `transformers`: penalties, temperature, top-k, top-p,
//! min-p. The random number is a function of (seed, output index), so that a moved request takes no
//! random state along.

use std::cmp::Ordering;

use crate::engine::work::SamplingParams;

/// Log-probability shown for a token that cannot be drawn: JSON has no infinity, and this is the
/// number that OpenAI's and vLLM's servers show.
const NO_CHANCE: f32 = -9999.0;
/// Alternatives that are given at most, OpenAI's bound.
const MAX_ALTERNATIVES: usize = 20;
/// How many of the likeliest tokens top-p sorts at first. It goes on with four times as many when
/// their sum is not enough, so that a peaked distribution costs no sort of the whole vocabulary.
const FIRST_SORTED: usize = 64;

/// Ids that came before the token to draw.
#[derive(Clone, Copy, Debug)]
pub(super) struct History<'a> {
    /// Of the prompt.
    pub(super) prompt: &'a [u32],
    /// Generated.
    pub(super) output: &'a [u32],
}

/// Natural log-probabilities before penalties and temperature.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Logprobs {
    /// Of the drawn token.
    pub(super) chosen: f32,
    /// (id, log-probability) of the likeliest tokens, best first.
    pub(super) top: Vec<(u32, f32)>,
}

/// A token and its probability relative to the likeliest one's.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    weight: f32,
    id: u32,
}

impl Candidate {
    /// Likeliest first; equals by id, so that the order is total.
    fn by_rank(&self, other: &Self) -> Ordering {
        other
            .weight
            .total_cmp(&self.weight)
            .then(self.id.cmp(&other.id))
    }
}

/// Draws tokens; keeps its working memory between draws.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    penalised: Vec<f32>,
    /// Per id the number of the last draw that saw it in the history.
    seen: Vec<u64>,
    draws: u64,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Draws the token with output index `index`. A logit that is not a number counts as −∞; ties
    /// go to the lowest id; if no logit is finite, id 0 is drawn.
    pub(super) fn draw(
        &mut self,
        logits: &[f32],
        history: History<'_>,
        params: &SamplingParams,
        index: u32,
    ) -> u32 {
        let mut penalised = std::mem::take(&mut self.penalised);
        let logits = if self.penalise(logits, history, params, &mut penalised) {
            penalised.as_slice()
        } else {
            logits
        };
        let (best, max) = argmax(logits);
        let greedy = params.temperature.is_nan() || params.temperature <= 0.0;
        let id = if greedy || params.top_k == 1 || max == f32::NEG_INFINITY {
            best
        } else {
            self.weigh(logits, max, params.temperature);
            self.restrict(params);
            self.pick(params.seed, index)
        };
        self.penalised = penalised;
        id
    }

    /// Writes penalised logits into `out`; false if the parameters ask for no penalty.
    fn penalise(
        &mut self,
        logits: &[f32],
        history: History<'_>,
        params: &SamplingParams,
        out: &mut Vec<f32>,
    ) -> bool {
        let repetition = params.repetition_penalty;
        let repeats = repetition != 1.0 && repetition.is_finite() && repetition > 0.0;
        let (frequency, presence) = (params.frequency_penalty, params.presence_penalty);
        if !repeats && frequency == 0.0 && presence == 0.0 {
            return false;
        }
        out.clear();
        out.extend_from_slice(logits);
        self.seen.resize(logits.len(), 0);
        if repeats {
            self.draws += 1;
            for &id in history.prompt.iter().chain(history.output) {
                let id = id as usize;
                if id < out.len() && self.seen[id] != self.draws {
                    self.seen[id] = self.draws;
                    let logit = out[id];
                    out[id] = if logit > 0.0 {
                        logit / repetition
                    } else {
                        logit * repetition
                    };
                }
            }
        }
        self.draws += 1;
        for &id in history.output {
            let id = id as usize;
            if id < out.len() {
                out[id] -= frequency;
                if self.seen[id] != self.draws {
                    self.seen[id] = self.draws;
                    out[id] -= presence;
                }
            }
        }
        true
    }

    /// Fills the candidates with every token that has a chance. `max` is the largest logit.
    fn weigh(&mut self, logits: &[f32], max: f32, temperature: f32) {
        self.candidates.clear();
        let weighed = (0..).zip(logits).map(|(id, &logit)| Candidate {
            // The likeliest weighs 1 even if its logit is infinite.
            weight: if logit == max {
                1.0
            } else {
                ((logit - max) / temperature).exp()
            },
            id,
        });
        // The comparison drops weights that are not numbers as well.
        self.candidates
            .extend(weighed.filter(|candidate| candidate.weight > 0.0));
    }

    /// Applies top-k, top-p and min-p.
    fn restrict(&mut self, params: &SamplingParams) {
        let candidates = &mut self.candidates;
        let top_k = params.top_k as usize;
        let sorted = top_k > 0 && top_k < candidates.len();
        if sorted {
            candidates.select_nth_unstable_by(top_k - 1, Candidate::by_rank);
            candidates.truncate(top_k);
            candidates.sort_unstable_by(Candidate::by_rank);
        }
        // The share that top-p asks for is one of what top-k left. Both top-p and min-p keep the
        // first of the ranking, so between them the order does not matter.
        let total = sum(candidates);
        let target = f64::from(params.top_p) * total;
        if params.top_p < 1.0 {
            drop_tail(candidates, total - target);
        }
        if params.min_p > 0.0 {
            candidates.retain(|candidate| candidate.weight >= params.min_p.min(1.0));
        }
        if params.top_p < 1.0 {
            keep_top_p(candidates, target, sorted);
        }
    }

    fn pick(&self, seed: u64, index: u32) -> u32 {
        let target = uniform(seed, index) * sum(&self.candidates);
        let mut reached = 0.0;
        self.candidates
            .iter()
            .find(|candidate| {
                reached += f64::from(candidate.weight);
                reached > target
            })
            .or_else(|| self.candidates.last())
            .map_or(0, |candidate| candidate.id)
    }
}

/// Log-probabilities of a drawn token and of `top` alternatives, by log-softmax over raw logits.
pub(super) fn logprobs(logits: &[f32], chosen: u32, top: usize) -> Logprobs {
    let (_, max) = argmax(logits);
    let total: f64 = logits
        .iter()
        .map(|&logit| (logit - max).exp())
        .filter(|weight| !weight.is_nan())
        .map(f64::from)
        .sum();
    let log_total = total.ln() as f32;
    let logprob = |logit: f32| {
        let value = logit - max - log_total;
        if value.is_nan() {
            NO_CHANCE
        } else {
            value.max(NO_CHANCE)
        }
    };
    let best = likeliest(logits, top.min(MAX_ALTERNATIVES));
    Logprobs {
        chosen: logits
            .get(chosen as usize)
            .map_or(NO_CHANCE, |&logit| logprob(logit)),
        top: best
            .into_iter()
            .map(|(id, logit)| (id, logprob(logit)))
            .collect(),
    }
}

/// The `count` largest logits, best first, equals by id.
fn likeliest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (id, &logit) in (0..).zip(logits) {
        let full = best.len() == count;
        if logit.is_nan() || (full && best.last().is_none_or(|&(_, worst)| logit <= worst)) {
            continue;
        }
        let place = best.partition_point(|&(_, other)| other >= logit);
        best.insert(place, (id, logit));
        best.truncate(count);
    }
    best
}

/// Id and value of the largest logit: the lowest id of equals, (0, −∞) if there is none.
fn argmax(logits: &[f32]) -> (u32, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in (0..).zip(logits) {
        if logit > best.1 {
            best = (id, logit);
        }
    }
    best
}

fn sum(candidates: &[Candidate]) -> f64 {
    candidates
        .iter()
        .map(|candidate| f64::from(candidate.weight))
        .sum()
}

/// Drops candidates so unlikely that all of their kind together weigh less than half of `spare`,
/// which top-p leaves out anyway. Most of a vocabulary goes, and need not be ranked.
fn drop_tail(candidates: &mut Vec<Candidate>, spare: f64) {
    let least = (spare / 2.0 / candidates.len().max(1) as f64) as f32;
    candidates.retain(|candidate| candidate.weight >= least);
}

/// Keeps the likeliest candidates whose weights reach `target`, at least one.
fn keep_top_p(candidates: &mut Vec<Candidate>, target: f64, sorted: bool) {
    let mut reached = 0.0;
    let mut ranked = 0;
    while ranked < candidates.len() {
        let end = if sorted {
            candidates.len()
        } else {
            (ranked * 4).max(FIRST_SORTED).min(candidates.len())
        };
        let rest = &mut candidates[ranked..];
        if !sorted {
            if end - ranked < rest.len() {
                rest.select_nth_unstable_by(end - ranked, Candidate::by_rank);
            }
            rest[..end - ranked].sort_unstable_by(Candidate::by_rank);
        }
        for (place, candidate) in (ranked..end).zip(rest.iter()) {
            reached += f64::from(candidate.weight);
            if reached >= target {
                candidates.truncate(place + 1);
                return;
            }
        }
        ranked = end;
    }
}

/// A number in [0, 1) from a seed and a counter (SplitMix64 over both).
fn uniform(seed: u64, index: u32) -> f64 {
    let bits = mix(mix(seed) ^ u64::from(index)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn mix(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests;
