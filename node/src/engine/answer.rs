//! Answers as an engine beside the node writes them: its head, its bytes, and what another node needs to go on.
//!
//! The bytes of an answer travel with the ids they stand for, so that a home passes on what its engine wrote and still
//! knows where the request is.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::engine::work::Prepared;

/// A piece of an answer. Empty for engines whose answers the home writes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wire {
    /// In the first piece of each answer, and only there: a piece that a client got is never begun anew.
    pub head: Option<Box<AnswerHead>>,
    /// As the engine wrote them.
    pub bytes: Bytes,
}

impl Wire {
    /// Bytes within an answer.
    pub fn of(bytes: Bytes) -> Self {
        Self { head: None, bytes }
    }

    /// Whether there is nothing to pass on.
    pub fn is_empty(&self) -> bool {
        self.head.is_none() && self.bytes.is_empty()
    }
}

/// How an answer begins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AnswerHead {
    /// HTTP status.
    pub status: u16,
    /// Headers that concern the client, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Set when another engine can go on with the stream. Else it stands or falls with its engine once begun.
    pub going_on: Option<GoingOn>,
}

impl AnswerHead {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    /// Whether the answer is a stream of server-sent events.
    pub fn is_stream(&self) -> bool {
        self.header("content-type")
            .is_some_and(|kind| kind.trim_start().starts_with("text/event-stream"))
    }
}

/// What another engine needs to go on with a stream so that the client does not notice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GoingOn {
    /// Prompt ids as the engine made them, and how to sample.
    pub prepared: Prepared,
    /// Names weights, engine kind and version: only an equal one goes on.
    pub fingerprint: u64,
    /// What stays the same in each chunk.
    pub shape: ChunkShape,
}

/// What names the chunks of one stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkShape {
    /// `id`.
    pub id: String,
    /// `created`, Unix seconds.
    pub created: u64,
    /// `model`.
    pub model: String,
    /// `system_fingerprint`, where there is one.
    pub fingerprint: Option<String>,
    /// Chunks tell the ids of their tokens, as the client asked.
    pub ids: bool,
}

/// Text that was sent for some output tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spoken {
    /// Output tokens up to and with this text.
    pub end: u32,
    /// The text.
    pub text: String,
}
