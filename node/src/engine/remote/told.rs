//! The text of the ids that a request goes on from, as its client has it or is owed it.
//!
//! What a client is owed is what its engine held back for the sake of stop strings. Only the engine can make text of ids, and it
//! writes the names of control tokens too, which it leaves out of streams; nothing says which tokens those are. So where the text
//! of all ids is not what the client has, that of the last few decides.

use crate::engine::answer::Spoken;

/// Last tokens whose text is asked for, if that of all ids does not match: fewer and fewer, since there may be a control token
/// among them. Text is held back for a character or a stop string, which is some tokens at most.
pub(super) const TAILS: [usize; 3] = [32, 8, 2];

/// The last pieces of what a client has.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tail {
    /// The first of the ids after the text before.
    pub(super) from: usize,
    before: String,
    after: String,
}

/// Characters that an engine holds back at most: a stop string but for its last character. vLLM holds back so many always.
pub(super) fn held_back(stop: &[String]) -> usize {
    let longest = stop.iter().map(|stop| stop.chars().count()).max();
    longest.unwrap_or(0).saturating_sub(1)
}

/// What the client has, and what it is owed of the text of all ids. What follows that are names of control tokens.
pub(super) fn with_owed(spoken: String, told: &str, held_back: usize) -> String {
    let told = told.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let owed = told.strip_prefix(spoken.as_str()).unwrap_or_default();
    let owed: String = owed.chars().take(held_back).collect();
    spoken + &owed
}

/// Whether the client, which has `spoken`, has the beginning of this text; or all of it, and what the first engine made of the
/// bytes of a character that is not whole.
pub(super) fn agree(told: &str, spoken: &str) -> bool {
    let told = told.trim_end_matches(char::REPLACEMENT_CHARACTER);
    told.starts_with(spoken) || spoken.starts_with(told)
}

/// All that the client has.
pub(super) fn all(spoken: &[Spoken]) -> String {
    spoken.iter().map(|piece| piece.text.as_str()).collect()
}

impl Tail {
    /// The pieces with the last `back` of `ids` tokens, and perhaps some before, as pieces are whole.
    pub(super) fn of(spoken: &[Spoken], ids: usize, back: usize) -> Self {
        let most = ids.saturating_sub(back);
        let kept = spoken.iter().take_while(|piece| piece.end as usize <= most);
        let (before, after) = spoken.split_at(kept.count());
        Self {
            from: before.last().map_or(0, |piece| piece.end as usize),
            before: all(before),
            after: all(after),
        }
    }

    /// The text of all ids without control tokens, if `told`, the text of those from [`Self::from`] on, shows it.
    pub(super) fn completed(&self, told: &str) -> Option<String> {
        // Some tokenizers leave out the space before the first word of a text.
        let spaced = format!(" {told}");
        [told, &spaced]
            .into_iter()
            .find(|told| agree(told, &self.after))
            .map(|told| format!("{}{told}", self.before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(texts: &[&str]) -> Vec<Spoken> {
        let piece = |(at, text): (usize, &&str)| Spoken {
            end: u32::try_from(at + 1).unwrap(),
            text: (**text).to_owned(),
        };
        texts.iter().enumerate().map(piece).collect()
    }

    #[test]
    fn the_tail_shows_what_is_owed_where_a_control_token_came_before() {
        // The third token is one; of the last the client lacks a part.
        let spoken = pieces(&["one", " two", "", " three", " fo"]);
        assert!(!agree("one two<|x|> three four", &all(&spoken)));
        let tail = Tail::of(&spoken, 5, 2);
        assert_eq!((tail.from, tail.after.as_str()), (3, " three fo"));
        let told = tail.completed(" three four").unwrap();
        assert_eq!(told, "one two three four");
        // A tokenizer that leaves the space out.
        assert_eq!(tail.completed("three four").unwrap(), told);
        assert_eq!(tail.completed("<|x|> three four"), None);
    }

    #[test]
    fn no_more_is_owed_than_an_engine_holds_back() {
        let stop = ["END".to_owned(), "\u{1f41f}".to_owned()];
        assert_eq!((held_back(&stop), held_back(&[])), (2, 0));
        let has = || "to the".to_owned();
        assert_eq!(with_owed(has(), "to the E", 2), "to the E");
        assert_eq!(with_owed(has(), "to the E<|end|>", 2), "to the E");
        assert_eq!(with_owed(has(), "to the<|end|>", 0), "to the");
        assert_eq!(with_owed(has(), "to", 2), "to the", "it has more");
    }

    #[test]
    fn a_tail_may_be_all_or_nothing() {
        let spoken = pieces(&["a", "b"]);
        assert_eq!(Tail::of(&spoken, 2, 32).from, 0);
        assert_eq!(Tail::of(&spoken, 2, 0).from, 2);
        assert_eq!(Tail::of(&[], 0, 2).completed("x").unwrap(), "x");
    }

    #[test]
    fn a_character_that_is_not_whole_is_no_difference() {
        assert!(agree("fish \u{fffd}", "fish "));
        assert!(agree("fish \u{fffd}", "fish \u{fffd}"));
        assert!(!agree("fish <|x|>", "fish and"));
    }
}
