//! What an engine beside the node can send, for [`crate::fuzz`].

use bytes::Bytes;

use super::chunk::{self, IdSource};
use super::kind::ServerKind;
use super::reading::{self, Answer};
use super::sse::Splitter;

/// Longest event here; short, so that the bound is met.
const LIMIT: usize = 4096;

/// An answer in events, cut in two at a place that its first byte names.
pub fn engine_stream(bytes: &[u8]) {
    let Some((cut, stream)) = bytes.split_first() else {
        return;
    };
    let (first, second) = stream.split_at(usize::from(*cut).min(stream.len()));
    let mut splitter = Splitter::new(LIMIT);
    let mut seen = 0;
    for part in [first, second] {
        splitter.push(Bytes::copy_from_slice(part));
        while let Ok(Some(event)) = splitter.next() {
            assert_eq!(
                event.raw,
                stream[seen..seen + event.raw.len()],
                "other bytes"
            );
            seen += event.raw.len();
            let text = event
                .data
                .as_bytes()
                .and_then(|data| std::str::from_utf8(data).ok());
            for source in [IdSource::Told, IdSource::TokenIds, IdSource::Logprobs] {
                let mut out = Vec::new();
                if let Some(text) = text {
                    drop(chunk::read(text, source, &mut out));
                }
            }
        }
    }
}

/// What an engine says of its load: the same body as the answer to each question.
pub fn engine_load(bytes: &[u8]) {
    for kind in [
        ServerKind::Vllm,
        ServerKind::Sglang,
        ServerKind::LlamaServer,
        ServerKind::OpenAi,
    ] {
        let answer = |status| {
            Some(Answer {
                status,
                body: bytes,
            })
        };
        for status in [200, 503] {
            let answers = vec![answer(status); reading::polled(kind).len()];
            drop(reading::read(kind, &answers));
        }
    }
}
