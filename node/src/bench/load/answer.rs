//! What an answer tells, and when: a core that takes bytes and times and reads no clock.

use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;
use shoal_gossip::Tokens;

use super::events::{Event, Events};
use super::request::Failure;

/// The part of an answer that has arrived. Times count from the intended arrival of the request.
#[derive(Debug, Default)]
pub(super) struct Answer {
    events: Events,
    /// Chunks with text.
    deliveries: u32,
    usage: Option<u32>,
    /// When there was a chunk for the first time, even one without text.
    first_chunk: Option<Duration>,
    first: Option<Duration>,
    last: Option<Duration>,
    longest_gap: Duration,
    has_finish_reason: bool,
    end: Option<Duration>,
}

/// A chunk of a stream, of either endpoint.
#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
    error: Option<IgnoredAny>,
    /// Older vLLMs write `error` here.
    object: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    /// What the model thinks, which is output as well. vLLM calls it so, or as below.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u32,
}

impl Choice {
    fn has_text(&self) -> bool {
        let delta = self.delta.as_ref();
        let of_delta =
            |part: fn(&Delta) -> &Option<String>| delta.and_then(|delta| part(delta).as_ref());
        [
            self.text.as_ref(),
            of_delta(|delta| &delta.content),
            of_delta(|delta| &delta.reasoning_content),
            of_delta(|delta| &delta.reasoning),
        ]
        .into_iter()
        .flatten()
        .any(|text| !text.is_empty())
    }
}

impl Answer {
    /// Takes a piece of the body that arrived now.
    pub(super) fn take(&mut self, now: Duration, mut bytes: &[u8]) -> Result<(), Failure> {
        while let Some(event) = self.events.next(&mut bytes)? {
            self.event(now, &event)?;
        }
        Ok(())
    }

    /// The body ended now. It is whole with `[DONE]`, or at least with a reason to finish.
    pub(super) fn close(&mut self, now: Duration) -> Result<(), Failure> {
        if let Some(event) = self.events.finish() {
            self.event(now, &event)?;
        }
        if !self.is_done() && !self.has_finish_reason {
            return Err(Failure::stream("it ended without `[DONE]`"));
        }
        self.end.get_or_insert(now);
        Ok(())
    }

    /// Whether `[DONE]` was read.
    pub(super) fn is_done(&self) -> bool {
        self.end.is_some()
    }

    /// When the first text came. A model that wrote control tokens only shows none: then its first chunk counts.
    pub(super) fn first(&self) -> Option<Duration> {
        let unseen = self.usage.is_some_and(|tokens| tokens > 0);
        self.first.or_else(|| self.first_chunk.filter(|_| unseen))
    }

    /// When it ended, if it did.
    pub(super) fn end(&self) -> Option<Duration> {
        self.end
    }

    /// The longest time between two pieces with text.
    pub(super) fn longest_gap(&self) -> Duration {
        self.longest_gap
    }

    /// Output tokens, as the server counts them. If it does not, chunks with text are counted: fewer, when a
    /// chunk holds several tokens.
    pub(super) fn output(&self) -> Tokens {
        Tokens(self.usage.unwrap_or(self.deliveries))
    }

    fn event(&mut self, now: Duration, event: &Event) -> Result<(), Failure> {
        let data = event.data.trim_ascii();
        // Nothing counts behind the end, and some servers show with empty events that they live.
        if self.is_done() || (data.is_empty() && !event.is_error) {
            return Ok(());
        }
        if data == b"[DONE]" {
            self.end = Some(now);
            return Ok(());
        }
        if event.is_error {
            return Err(Failure::error_event(data));
        }
        let chunk: Chunk = serde_json::from_slice(data)
            .map_err(|error| Failure::stream(format_args!("an event that is no chunk: {error}")))?;
        if chunk.error.is_some() || chunk.object.as_deref() == Some("error") {
            return Err(Failure::error_event(data));
        }
        if let Some(usage) = chunk.usage {
            self.usage = Some(usage.completion_tokens);
        }
        let choices = chunk.choices.unwrap_or_default();
        if choices.is_empty() {
            return Ok(());
        }
        self.first_chunk.get_or_insert(now);
        self.has_finish_reason |= choices.iter().any(|choice| choice.finish_reason.is_some());
        if choices.iter().any(Choice::has_text) {
            self.delivered(now);
        }
        Ok(())
    }

    fn delivered(&mut self, now: Duration) {
        self.deliveries = self.deliveries.saturating_add(1);
        self.first.get_or_insert(now);
        if let Some(last) = self.last.replace(now) {
            self.longest_gap = self.longest_gap.max(now.saturating_sub(last));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Takes events, each at its millisecond, and then the end of the body at 1,000 ms.
    fn read(events: &[(u64, &str)]) -> (Answer, Result<(), Failure>) {
        let mut answer = Answer::default();
        let mut ended = Ok(());
        for (at, data) in events {
            ended =
                ended.and_then(|()| answer.take(ms(*at), format!("data: {data}\n\n").as_bytes()));
        }
        let ended = ended.and_then(|()| answer.close(ms(1_000)));
        (answer, ended)
    }

    const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}"#;

    #[test]
    fn a_completion_is_timed_by_its_text() {
        let (answer, ended) = read(&[
            (
                10,
                r#"{"choices":[{"text":"","finish_reason":null}],"usage":null}"#,
            ),
            (20, r#"{"choices":[{"text":"a b"}],"error":null}"#),
            (90, r#"{"choices":[{"text":"c"}]}"#),
            (92, ""),
            (95, r#"{"choices":[{"text":"d"}]}"#),
            (96, r#"{"choices":[{"text":"","finish_reason":"length"}]}"#),
            (97, USAGE),
            (98, "[DONE]"),
            (300, r#"{"choices":[{"text":"never"}]}"#),
        ]);
        ended.expect("a whole answer");
        assert_eq!(answer.first(), Some(ms(20)));
        assert_eq!(answer.longest_gap(), ms(70));
        assert_eq!(answer.end(), Some(ms(98)));
        assert_eq!(answer.output(), Tokens(9));
    }

    #[test]
    fn a_chat_begins_with_its_content_and_not_with_its_role() {
        let (answer, ended) = read(&[
            (
                10,
                r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            ),
            (30, r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#),
            (40, r#"{"choices":[{"delta":{"content":"yes"}}]}"#),
            (50, r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#),
        ]);
        ended.expect("an answer with a reason to finish");
        assert_eq!(answer.first(), Some(ms(30)));
        assert_eq!(answer.end(), Some(ms(1_000)));
        assert_eq!(answer.output(), Tokens(2), "nobody counted tokens");
    }

    #[test]
    fn tokens_without_text_begin_with_their_first_chunk() {
        let chunk = r#"{"choices":[{"text":""}]}"#;
        let (answer, _) = read(&[(10, chunk), (20, chunk), (30, USAGE), (31, "[DONE]")]);
        assert_eq!(answer.first(), Some(ms(10)));
        let (answer, _) = read(&[(10, chunk), (31, "[DONE]")]);
        assert_eq!(answer.first(), None);
    }

    #[test]
    fn an_answer_that_breaks_off_says_how() {
        let text = (10, r#"{"choices":[{"text":"a"}]}"#);
        for (second, kind, reason) in [
            ("{", "stream", "no chunk"),
            (r#"{"choices":[{"text":"b"}]}"#, "stream", "[DONE]"),
            (
                r#"{"error":{"message":"too full"}}"#,
                "error event",
                "too full",
            ),
            (
                r#"{"object":"error","message":"old"}"#,
                "error event",
                "old",
            ),
        ] {
            let (answer, ended) = read(&[text, (20, second)]);
            let failure = ended.expect_err("a broken answer");
            assert_eq!(failure.kind, kind, "{second}");
            assert!(failure.reason.contains(reason), "{failure}");
            assert_eq!(answer.first(), Some(ms(10)));
            assert_eq!(answer.end(), None);
        }
    }
}
