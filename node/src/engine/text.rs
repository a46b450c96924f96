//! From token pieces to text that clients may see: whole UTF-8 characters, stop strings cut out.
//!
//! Pure and shared by all engines. The state is a function of the pieces pushed so far, so a host
//! that takes over a request rebuilds it by pushing the pieces of the ids it was given.

/// Turns the pieces of one output into text, a piece at a time.
///
/// Bytes become text as by [`String::from_utf8_lossy`] over the whole output, however they are cut
/// into pieces. Text that may be the beginning of a stop string is held back until it is certain.
/// The stop string that is complete first ends the output; of several complete at the same byte the
/// longest counts. Holds less than one character and one stop string beyond the last piece.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextState {
    stop: Vec<String>,
    /// Bytes of a character that is not whole yet, at most three.
    partial: Vec<u8>,
    /// Whole characters that were not given out.
    held: String,
    stopped: bool,
}

/// What one piece made certain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Text to send on; may be empty.
    pub text: String,
    /// A stop string is complete: the output ends before it and later pieces are ignored.
    pub stopped: bool,
}

impl TextState {
    /// The state before the first piece. Empty stop strings are ignored.
    pub fn new(stop: &[String]) -> Self {
        Self {
            stop: stop
                .iter()
                .filter(|text| !text.is_empty())
                .cloned()
                .collect(),
            ..Self::default()
        }
    }

    /// Takes the bytes of one token.
    pub fn push(&mut self, piece: &[u8]) -> Pushed {
        if self.stopped {
            return Pushed {
                text: String::new(),
                stopped: true,
            };
        }
        self.decode(piece);
        self.release()
    }

    /// Gives out what is still held when the output ends for another reason than a stop string.
    /// A character that never became whole shows as U+FFFD. Empty after a stop.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        if !self.partial.is_empty() {
            self.partial.clear();
            self.held.push(char::REPLACEMENT_CHARACTER);
        }
        let mut text = self.release().text;
        // After a stop nothing is held, so this adds only what was waiting for more.
        text.push_str(&std::mem::take(&mut self.held));
        text
    }

    /// Whether a stop string ended the output.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    fn decode(&mut self, piece: &[u8]) {
        self.partial.extend_from_slice(piece);
        let bytes = std::mem::take(&mut self.partial);
        let mut rest = bytes.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.held.push_str(text);
                    return;
                }
                Err(error) => {
                    let (whole, tail) = rest.split_at(error.valid_up_to());
                    self.held.push_str(&String::from_utf8_lossy(whole));
                    let Some(invalid) = error.error_len() else {
                        self.partial = tail.to_vec();
                        return;
                    };
                    self.held.push(char::REPLACEMENT_CHARACTER);
                    rest = &tail[invalid..];
                }
            }
        }
    }

    /// Moves out of `held` what no stop string can claim any more.
    fn release(&mut self) -> Pushed {
        if let Some(start) = self.first_stop() {
            self.held.truncate(start);
            self.stopped = true;
            return Pushed {
                text: std::mem::take(&mut self.held),
                stopped: true,
            };
        }
        let kept = self.held.split_off(self.held.len() - self.claimed());
        Pushed {
            text: std::mem::replace(&mut self.held, kept),
            stopped: false,
        }
    }

    /// Where the stop string that is complete first begins.
    fn first_stop(&self) -> Option<usize> {
        self.stop
            .iter()
            .filter_map(|stop| {
                let start = self.held.find(stop.as_str())?;
                Some((start + stop.len(), start))
            })
            .min()
            .map(|(_, start)| start)
    }

    /// Length of the longest end of `held` that a stop string begins with.
    fn claimed(&self) -> usize {
        let held = self.held.as_bytes();
        self.stop
            .iter()
            .filter_map(|stop| {
                let stop = stop.as_bytes();
                // A stop string is valid UTF-8, so a match never begins inside a character.
                (1..stop.len().min(held.len() + 1))
                    .rev()
                    .find(|&len| held.ends_with(&stop[..len]))
            })
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests;
