//! Text to ids and back, for all threads.

use std::collections::BTreeSet;

use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::vocab::LlamaVocab;
use shoal_gossip::Tokens;

use crate::engine::EngineError;
use crate::engine::batched::TextModel;
use crate::engine::llama::config::LlamaLayout;
use crate::engine::llama::template::{ChatTemplate, Part};
use crate::openai::ChatMessage;

/// The vocabulary of a loaded model and its chat template.
#[derive(Debug)]
pub struct LlamaText {
    model: &'static LlamaModel,
    pieces: Pieces,
    controls: Controls,
    /// Begins a sequence, if the model wants one.
    start: Option<u32>,
    /// Why the model cannot chat, if it cannot.
    template: Result<ChatTemplate, String>,
    /// Tokens that one sequence can have.
    context: Tokens,
}

impl LlamaText {
    /// Copies the vocabulary out of the model and compiles the template.
    pub(super) fn new(
        model: &'static LlamaModel,
        template: Option<&str>,
        layout: LlamaLayout,
    ) -> Self {
        let vocab = model.vocab();
        let pieces = Pieces::new(&vocab);
        let controls = Controls::new(&vocab, &pieces);
        let template = match template {
            Some(source) => ChatTemplate::new(
                source,
                text_of(&vocab, vocab.bos()),
                text_of(&vocab, vocab.eos()),
            ),
            None => Err("the model has no chat template: ask /v1/completions".to_owned()),
        };
        if let Err(reason) = &template {
            tracing::warn!(target: "shoal::llama", reason, "this model takes no chat requests");
        }
        let start = u32::try_from(vocab.bos().0)
            .ok()
            .filter(|_| vocab.should_add_bos());
        Self {
            model,
            pieces,
            controls,
            start,
            template,
            context: layout.tokens_per_slot,
        }
    }

    /// Refuses text that cannot fit, before a tokenizer spends seconds on it.
    fn check_length(&self, bytes: usize, param: &str) -> Result<(), EngineError> {
        let least = bytes / self.pieces.longest();
        if least as u64 > u64::from(self.context.0) {
            return Err(EngineError::BadRequest {
                message: format!(
                    "the context of this model is {} tokens, the request has at least {least}",
                    self.context
                ),
                param: Some(param.to_owned()),
            });
        }
        Ok(())
    }

    fn tokenize(&self, text: &str, control: bool) -> Vec<u32> {
        // `add_special` stays off: it would also append an end token for models that ask for one.
        let ids = self.model.vocab().tokenize(text.as_bytes(), false, control);
        // llama.cpp gives ids of its vocabulary only, which are not negative.
        ids.iter()
            .filter_map(|id| u32::try_from(id.0).ok())
            .collect()
    }

    /// Puts the start token before ids that do not begin with it.
    fn started(&self, mut ids: Vec<u32>) -> Vec<u32> {
        if let Some(start) = self.start
            && ids.first() != Some(&start)
        {
            ids.insert(0, start);
        }
        ids
    }

    fn control_ids(&self, ids: &[u32]) -> Vec<u32> {
        let is_control = |id: &&u32| self.pieces.get(**id).is_empty();
        ids.iter().filter(is_control).copied().collect()
    }

    /// Ids of rendered parts. Tokenised as one text, as the model was trained, unless a message
    /// would then bring control tokens of its own; if so each message is tokenised by itself, as
    /// plain text.
    fn encode_parts(&self, parts: &[Part]) -> Vec<u32> {
        let apart = || {
            parts
                .iter()
                .flat_map(|part| self.tokenize(&part.text, part.is_template))
                .collect()
        };
        let mut of_users = parts.iter().filter(|part| !part.is_template);
        // Looked up before llama.cpp reads it, whose time grows with the square of their number.
        if of_users.any(|part| self.controls.occur_in(&part.text)) {
            return apart();
        }
        let whole: String = parts.iter().map(|part| part.text.as_str()).collect();
        let ids = self.tokenize(&whole, true);
        let of_template: Vec<u32> = parts
            .iter()
            .filter(|part| part.is_template)
            .flat_map(|part| self.control_ids(&self.tokenize(&part.text, true)))
            .collect();
        // A control token may also have come together where two parts meet.
        if self.control_ids(&ids) == of_template {
            ids
        } else {
            apart()
        }
    }
}

/// Text of a token; empty when there is none.
fn text_of(vocab: &LlamaVocab<'_>, token: LlamaToken) -> String {
    // llama.cpp throws on ids that do not exist, and -1 stands for "none".
    if !(0..vocab.n_tokens()).contains(&token.0) {
        return String::new();
    }
    vocab
        .text(token)
        .map_or_else(String::new, |text| text.to_string_lossy().into_owned())
}

impl TextModel for LlamaText {
    fn encode_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, EngineError> {
        let bytes = messages.iter().map(|message| message.content.len()).sum();
        self.check_length(bytes, "messages")?;
        let template = self
            .template
            .as_ref()
            .map_err(|reason| EngineError::BadRequest {
                message: reason.clone(),
                param: Some("messages".to_owned()),
            })?;
        let parts = template.render(messages)?;
        Ok(self.started(self.encode_parts(&parts)))
    }

    fn encode_text(&self, text: &str) -> Result<Vec<u32>, EngineError> {
        self.check_length(text.len(), "prompt")?;
        Ok(self.started(self.tokenize(text, false)))
    }

    fn piece(&self, id: u32) -> Vec<u8> {
        self.pieces.get(id).to_vec()
    }

    fn is_end(&self, id: u32) -> bool {
        self.pieces.is_end(id)
    }

    fn vocabulary(&self) -> u32 {
        self.pieces.count()
    }
}

/// The texts of control tokens, to find them in what users write.
#[derive(Debug)]
struct Controls {
    texts: BTreeSet<Vec<u8>>,
    /// Bytes that a text begins with.
    first: [bool; 256],
    /// Lengths of texts.
    lengths: BTreeSet<usize>,
}

impl Controls {
    fn new(vocab: &LlamaVocab<'_>, pieces: &Pieces) -> Self {
        let mut controls = Self {
            texts: BTreeSet::new(),
            first: [false; 256],
            lengths: BTreeSet::new(),
        };
        for (id, token) in (0..).zip(vocab.tokens()) {
            if !pieces.get(id).is_empty() {
                continue;
            }
            let text = text_of(vocab, token).into_bytes();
            if let Some(&first) = text.first() {
                controls.first[usize::from(first)] = true;
                controls.lengths.insert(text.len());
                controls.texts.insert(text);
            }
        }
        controls
    }

    fn occur_in(&self, text: &str) -> bool {
        let bytes = text.as_bytes();
        let begins = |place: &usize| self.first[usize::from(bytes[*place])];
        (0..bytes.len()).filter(begins).any(|place| {
            let rest = &bytes[place..];
            self.lengths
                .iter()
                .take_while(|&&length| length <= rest.len())
                .any(|&length| self.texts.contains(&rest[..length]))
        })
    }
}

/// The bytes of every token in one buffer: asked for each generated token, so no call into
/// llama.cpp, and any id may be asked for.
#[derive(Debug)]
struct Pieces {
    bytes: Vec<u8>,
    /// Where each token's bytes end; they begin where the previous token's end.
    ends: Vec<usize>,
    /// Ids that end an output, ascending.
    end_ids: Vec<u32>,
    longest: usize,
}

impl Pieces {
    fn new(vocab: &LlamaVocab<'_>) -> Self {
        let mut pieces = Self {
            bytes: Vec::new(),
            ends: Vec::new(),
            end_ids: Vec::new(),
            // Four bytes of an unknown character may become one token, whatever the pieces.
            longest: 4,
        };
        for (id, token) in (0..).zip(vocab.tokens()) {
            let piece = vocab.token_to_piece(token, false, None);
            pieces.longest = pieces.longest.max(piece.len());
            pieces.bytes.extend_from_slice(&piece);
            pieces.ends.push(pieces.bytes.len());
            if vocab.is_eog(token) {
                pieces.end_ids.push(id);
            }
        }
        pieces
    }

    /// Empty for control tokens and ids that do not exist.
    fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else {
            return &[];
        };
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }

    fn is_end(&self, id: u32) -> bool {
        self.end_ids.binary_search(&id).is_ok()
    }

    fn count(&self) -> u32 {
        u32::try_from(self.ends.len()).unwrap_or(u32::MAX)
    }

    /// Bytes of the longest token, at least four.
    fn longest(&self) -> usize {
        self.longest
    }
}
