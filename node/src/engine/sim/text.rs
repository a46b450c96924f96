//! The vocabulary of the simulated engine: all bytes, two control tokens, and some words.

use crate::engine::EngineError;
use crate::engine::batched::TextModel;
use crate::openai::ChatMessage;

/// Ends the output.
pub(super) const END: u32 = 256;

/// Stands before each turn of a conversation.
const TURN: u32 = 257;

/// The first word; the ids below are bytes and control tokens.
pub(super) const FIRST_WORD: u32 = 258;

/// What the simulated engine says. Some words are not ASCII, so that text is cut where it hurts.
const WORDS: [&str; 64] = [
    " lorem",
    " ipsum",
    " dolor",
    " sit",
    " amet",
    " tide",
    " reef",
    " current",
    " shoal",
    " fish",
    " water",
    " deep",
    " light",
    " turn",
    " follow",
    " near",
    " far",
    " many",
    " one",
    " silver",
    " school",
    " drift",
    " wave",
    " swim",
    " quiet",
    " quick",
    " north",
    " south",
    " and",
    " then",
    " with",
    " over",
    " under",
    " between",
    " slowly",
    " together",
    " again",
    " never",
    " always",
    " coral",
    " kelp",
    " harbour",
    " morning",
    " evening",
    " storm",
    " calm",
    " moves",
    " waits",
    " sees",
    " turns",
    " naïve",
    " café",
    " føroyar",
    " 魚群",
    " море",
    " ✓",
    " 🐟",
    " plain",
    " small",
    " large",
    " first",
    " last",
    " here",
    " there",
];

/// The vocabulary of the simulated engine.
///
/// Text becomes its words where they occur and bytes elsewhere, so it can always be read back.
#[derive(Clone, Copy, Debug, Default)]
pub struct SimText;

impl SimText {
    /// Number of words; their ids are the last ones of the vocabulary.
    pub(super) fn words() -> u32 {
        WORDS.len() as u32
    }
}

/// The longest word that `rest` begins with, as (id, length).
fn word_at(rest: &[u8]) -> Option<(u32, usize)> {
    // Every word begins with a space, and most positions do not.
    if rest.first() != Some(&b' ') {
        return None;
    }
    (FIRST_WORD..)
        .zip(WORDS)
        .filter(|(_, word)| rest.starts_with(word.as_bytes()))
        .map(|(id, word)| (id, word.len()))
        .max_by_key(|(_, length)| *length)
}

fn encode(text: &str, ids: &mut Vec<u32>) {
    let mut rest = text.as_bytes();
    while let Some(byte) = rest.first() {
        let (id, length) = word_at(rest).unwrap_or_else(|| (u32::from(*byte), 1));
        ids.push(id);
        rest = &rest[length..];
    }
}

impl TextModel for SimText {
    fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, EngineError> {
        let mut ids = Vec::new();
        for message in messages {
            ids.push(TURN);
            encode(&message.role, &mut ids);
            ids.push(u32::from(b'\n'));
            encode(&message.content, &mut ids);
        }
        ids.push(TURN);
        encode("assistant\n", &mut ids);
        Ok(ids)
    }

    fn encode_text(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        let mut ids = Vec::new();
        encode(text, &mut ids);
        Ok(ids)
    }

    fn piece(&self, id: u32) -> Vec<u8> {
        if let Ok(byte) = u8::try_from(id) {
            return vec![byte];
        }
        let word = id
            .checked_sub(FIRST_WORD)
            .and_then(|index| WORDS.get(index as usize));
        word.map_or_else(Vec::new, |word| word.as_bytes().to_vec())
    }

    fn is_end(&self, id: u32) -> bool {
        id == END
    }

    fn vocabulary(&self) -> u32 {
        FIRST_WORD + Self::words()
    }
}
