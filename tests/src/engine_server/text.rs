//! The tokenizer that the stand-in shows: the simulated engine's, with names for its control tokens.
//!
//! Real engines read the names of control tokens in a text prompt as control, and write them when
//! asked for the text of ids. So text of a rendered conversation becomes the same ids again.

use shoal_node::engine::batched::TextModel as _;
use shoal_node::engine::sim::SimText;
use shoal_node::openai::PromptInput;

/// Written for the token that begins a turn.
const TURN: &str = "<|turn|>";

/// Written for the token that ends an output.
const END: &str = "<|end|>";

/// The token that begins a turn.
fn turn() -> u32 {
    let empty = SimText.encode_chat(&[]).expect("no message is refused");
    empty[0]
}

/// The token that ends an output.
pub(super) fn end() -> u32 {
    (0..SimText.vocabulary())
        .find(|id| SimText.is_end(*id))
        .expect("an end token")
}

/// Ids of a text in which the names of control tokens are control if `control` says so.
pub(super) fn encode(text: &str, control: bool) -> Vec<u32> {
    let named = [(TURN, turn()), (END, end())];
    let first = |rest: &str| {
        let found = |(name, id): (&'static str, u32)| Some((rest.find(name)?, name.len(), id));
        named.into_iter().filter_map(found).min()
    };
    let mut ids = Vec::new();
    let mut rest = text;
    while let Some((at, length, id)) = first(rest).filter(|_| control) {
        ids.extend(plain(&rest[..at]));
        ids.push(id);
        rest = &rest[at + length..];
    }
    ids.extend(plain(rest));
    ids
}

fn plain(text: &str) -> Vec<u32> {
    SimText.encode_text(text).expect("all text has ids")
}

/// Bytes of one token, control tokens by name.
pub(super) fn piece(id: u32) -> Vec<u8> {
    if id == turn() {
        TURN.into()
    } else if id == end() {
        END.into()
    } else {
        SimText.piece(id)
    }
}

/// Text of ids, control tokens by name.
pub(super) fn decode(ids: &[u32]) -> String {
    decode_with(ids, None)
}

/// The same, with one more name before each id that `control` divides.
pub(super) fn decode_with(ids: &[u32], control: Option<u32>) -> String {
    let named = |id: u32| control.is_some_and(|control| id.is_multiple_of(control));
    let mut bytes = Vec::new();
    for id in ids {
        if named(*id) {
            bytes.extend(b"<|control|>");
        }
        bytes.extend(piece(*id));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The id whose text this is; the end token for a text without one of its own.
pub(super) fn id_of(text: &str) -> u32 {
    match plain(text)[..] {
        [id] => id,
        _ => end(),
    }
}

/// Ids of whatever a request gave as its prompt.
pub(super) fn prompt_ids(prompt: &PromptInput) -> Vec<u32> {
    match prompt {
        PromptInput::Chat(messages) => SimText
            .encode_chat(messages)
            .expect("the simulated engine renders all messages"),
        PromptInput::Text(text) => encode(text, true),
        PromptInput::Tokens(ids) => ids.clone(),
    }
}
