//! Server-sent events out of a body that arrives in pieces, cut anywhere.

use super::request::Failure;

/// Longest event that is read. A chunk has some hundred bytes, with log-probabilities some thousand.
pub(super) const MAX_EVENT: usize = 1 << 20;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    /// Whether its name is `error`.
    pub(super) is_error: bool,
    /// The lines of its data.
    pub(super) data: Vec<u8>,
}

/// What has arrived of the next event. Lines end in `\n` or `\r\n`; a lone `\r`, which the format also knows
/// and no server of models writes, ends none.
#[derive(Debug, Default)]
pub(super) struct Events {
    line: Vec<u8>,
    has_data: bool,
    event: Event,
}

impl Events {
    /// Takes bytes from the front until an event is whole; `None` once all are taken.
    pub(super) fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<Event>, Failure> {
        while let Some(length) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = bytes.split_at(length);
            *bytes = rest.strip_prefix(b"\n").unwrap_or(rest);
            self.keep(line)?;
            if let Some(event) = self.end_line() {
                return Ok(Some(event));
            }
        }
        self.keep(std::mem::take(bytes))?;
        Ok(None)
    }

    /// The event that the end of the body ends, since some servers leave out its last empty line.
    pub(super) fn finish(&mut self) -> Option<Event> {
        self.end_line().or_else(|| self.end_event())
    }

    fn keep(&mut self, part: &[u8]) -> Result<(), Failure> {
        if self.line.len() + self.event.data.len() + part.len() > MAX_EVENT {
            return Err(Failure::stream(format_args!(
                "an event above {MAX_EVENT} bytes"
            )));
        }
        self.line.extend_from_slice(part);
        Ok(())
    }

    fn end_line(&mut self) -> Option<Event> {
        let line = std::mem::take(&mut self.line);
        let line = line.strip_suffix(b"\r").unwrap_or(&line);
        if line.is_empty() {
            return self.end_event();
        }
        let length = line.iter().position(|byte| *byte == b':');
        let (field, value) = line.split_at(length.unwrap_or(line.len()));
        let value = value.strip_prefix(b":").unwrap_or(value);
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"data" => {
                if self.has_data {
                    self.event.data.push(b'\n');
                }
                self.has_data = true;
                self.event.data.extend_from_slice(value);
            }
            b"event" => self.event.is_error = value == b"error",
            // Comments, whose field is empty, and fields for browsers that reconnect.
            _ => {}
        }
        None
    }

    fn end_event(&mut self) -> Option<Event> {
        let event = std::mem::take(&mut self.event);
        std::mem::take(&mut self.has_data).then_some(event)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The events of a body in pieces: whether they are errors, and their data.
    fn read(pieces: &[&[u8]]) -> Vec<(bool, String)> {
        let mut events = Events::default();
        let mut found = Vec::new();
        for mut piece in pieces.iter().copied() {
            while let Some(event) = events.next(&mut piece).expect("short events") {
                found.push(event);
            }
        }
        found.extend(events.finish());
        found
            .into_iter()
            .map(|event| (event.is_error, String::from_utf8(event.data).expect("text")))
            .collect()
    }

    const BODY: &str = ": hello\r\n\r\ndata: {\"a\":1}\n\ndata:no space\r\n\r\nid: 7\nevent: error\ndata:  two\ndata: lines 魚\n\n\
        event: error\n\nretry\ndata\n\ndata: [DONE]\n";

    fn expected() -> Vec<(bool, String)> {
        [
            (false, "{\"a\":1}"),
            (false, "no space"),
            (true, " two\nlines 魚"),
            (false, ""),
            (false, "[DONE]"),
        ]
        .map(|(is_error, data)| (is_error, data.to_owned()))
        .to_vec()
    }

    #[test]
    fn events_are_read_as_the_format_says() {
        assert_eq!(read(&[BODY.as_bytes()]), expected());
    }

    #[test]
    fn an_event_survives_a_cut_at_every_byte() {
        let pieces: Vec<_> = BODY.as_bytes().chunks(1).collect();
        assert_eq!(read(&pieces), expected());
    }

    proptest! {
        #[test]
        fn cuts_change_nothing(cuts in proptest::collection::vec(0..BODY.len(), 0..12)) {
            let mut cuts = cuts;
            cuts.extend([0, BODY.len()]);
            cuts.sort_unstable();
            let pieces: Vec<_> = cuts.windows(2).map(|ends| &BODY.as_bytes()[ends[0]..ends[1]]).collect();
            prop_assert_eq!(read(&pieces), expected());
        }

        #[test]
        fn junk_is_read_without_harm(junk: Vec<u8>) {
            let mut events = Events::default();
            let mut bytes = &junk[..];
            while events.next(&mut bytes).expect("short junk").is_some() {}
            prop_assert!(bytes.is_empty());
        }
    }

    #[test]
    fn an_event_without_end_is_refused() {
        let mut events = Events::default();
        let line = vec![b'x'; MAX_EVENT];
        assert_eq!(events.next(&mut &line[..]).expect("at the edge"), None);
        let failure = events.next(&mut &b"x"[..]).expect_err("beyond the edge");
        assert_eq!(failure.kind, "stream");
    }
}
