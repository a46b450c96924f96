//! What is sent: bodies of requests, each with a prompt that no other has.

use serde::Serialize;
use shoal_gossip::Tokens;

use super::LoadOptions;
use crate::workload::Arrival;

/// One token in the vocabularies of Llama, Qwen, Mistral and GPT, and in that of the simulated engine.
const WORD: &str = " one";

/// The first token id that prompts use: ids below are often control tokens (0 to 2 in Llama 2).
const FIRST_ID: u32 = 10;

/// How many ids prompts use: up to 249, which are plain bytes in byte-level vocabularies and in the simulated engine.
const IDS: u32 = 240;

/// Digits in base [`IDS`] that hold the number of a request: 7.9 × 10¹¹ requests.
const INDEX_DIGITS: usize = 5;

/// Digits in base [`IDS`] that hold any seed.
const SEED_DIGITS: usize = 9;

/// What all requests have in common.
#[derive(Debug)]
pub(super) struct Form {
    model: String,
    chat: bool,
    prompt_ids: bool,
    ignore_eos: bool,
    seed: u64,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<Prompt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<[Message; 1]>,
    max_tokens: Tokens,
    temperature: u32,
    /// Its lower 63 bits, which is what servers in Python take.
    seed: u64,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(skip_serializing_if = "Option::is_none")]
    ignore_eos: Option<bool>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: String,
}

impl Form {
    pub(super) fn new(options: &LoadOptions, model: &str) -> Self {
        Self {
            model: model.to_owned(),
            chat: options.chat,
            prompt_ids: options.prompt_ids,
            ignore_eos: options.ignore_eos,
            seed: options.seed,
        }
    }

    pub(super) fn path(&self) -> &'static str {
        match self.chat {
            true => "/v1/chat/completions",
            false => "/v1/completions",
        }
    }

    /// The body of request number `index`, as JSON.
    pub(super) fn body(&self, index: u64, arrival: &Arrival) -> serde_json::Result<Vec<u8>> {
        let (prompt, messages) = match (self.chat, self.prompt_ids) {
            (true, _) => {
                let content = text(index, self.seed, arrival.prompt);
                let role = "user";
                (None, Some([Message { role, content }]))
            }
            (false, true) => {
                let ids = ids(index, self.seed, arrival.prompt);
                (Some(Prompt::Ids(ids)), None)
            }
            (false, false) => {
                let text = text(index, self.seed, arrival.prompt);
                (Some(Prompt::Text(text)), None)
            }
        };
        serde_json::to_vec(&Body {
            model: &self.model,
            prompt,
            messages,
            max_tokens: arrival.output,
            temperature: 0,
            seed: self.seed & (u64::MAX >> 1),
            stream: true,
            stream_options: StreamOptions {
                include_usage: true,
            },
            ignore_eos: self.ignore_eos.then_some(true),
        })
    }
}

/// A prompt of about `tokens`: a head that differs from the first block of every other request, so that no
/// cache of prefixes helps, and words. A character of the head is taken as one token, as Llama 2 has it;
/// vocabularies that join digits make some tokens fewer.
fn text(index: u64, seed: u64, tokens: Tokens) -> String {
    let mut text = format!("{index}-{seed}");
    let words = count(tokens).saturating_sub(text.len());
    text.push_str(&WORD.repeat(words));
    text
}

/// A prompt of exactly `tokens` (at least one) ids: number and seed in base [`IDS`], lowest digit first, and then
/// always the same.
fn ids(index: u64, seed: u64, tokens: Tokens) -> Vec<u32> {
    digits(index)
        .take(INDEX_DIGITS)
        .chain(digits(seed).take(SEED_DIGITS))
        .chain(std::iter::repeat(0))
        .map(|digit| FIRST_ID + digit)
        .take(count(tokens).max(1))
        .collect()
}

fn digits(mut number: u64) -> impl Iterator<Item = u32> {
    std::iter::repeat_with(move || {
        let digit = number % u64::from(IDS);
        number /= u64::from(IDS);
        u32::try_from(digit).unwrap_or_default()
    })
}

fn count(tokens: Tokens) -> usize {
    usize::try_from(tokens.0).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Tokens of a prompt where digits and the dash are one each.
    fn tokens(text: &str) -> usize {
        let words = text.matches(WORD).count();
        words + text.len() - words * WORD.len()
    }

    proptest! {
        #[test]
        fn prompts_are_as_long_as_asked(index in 0..1_000_000_u64, seed: u64, n in 32..5_000_u32) {
            prop_assert_eq!(tokens(&text(index, seed, Tokens(n))), count(Tokens(n)));
            let ids = ids(index, seed, Tokens(n));
            prop_assert_eq!(ids.len(), count(Tokens(n)));
            prop_assert!(ids.iter().all(|id| (FIRST_ID..FIRST_ID + IDS).contains(id)));
        }

        #[test]
        fn the_first_block_tells_requests_and_seeds_apart(
            a in (0..1_000_000_u64, any::<u64>()),
            b in (0..1_000_000_u64, any::<u64>()),
        ) {
            prop_assume!(a != b);
            prop_assert_ne!(ids(a.0, a.1, Tokens(16)), ids(b.0, b.1, Tokens(16)));
            prop_assert_ne!(text(a.0, a.1, Tokens(64)), text(b.0, b.1, Tokens(64)));
        }
    }

    #[test]
    fn even_short_prompts_of_ids_differ() {
        let different: BTreeSet<_> = (0..5_000).map(|index| ids(index, 1, Tokens(2))).collect();
        assert_eq!(different.len(), 5_000);
        assert_eq!(ids(3, 1, Tokens(0)).len(), 1);
    }
}
