//! What the stand-in remembers of the requests it got.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use hyper::{HeaderMap, Method};
use serde_json::Value;

use crate::engine_server::wire::ResetCord;

/// How far a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is being answered.
    Open,
    /// It was answered to the end.
    Whole,
    /// The client closed the connection before the end.
    ClientLeft,
    /// The stand-in broke the answer, by a fault or a kill.
    Broken,
}

/// A request that the stand-in got.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its method.
    pub method: Method,
    /// Its path, without the query.
    pub path: String,
    /// Its query; empty without one.
    pub query: String,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// How far it came.
    pub ending: Ending,
}

impl Seen {
    /// The body as JSON; null when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// A header as text; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }
}

/// All requests since the start or the last look, in the order they came.
#[derive(Clone, Debug, Default)]
pub(super) struct Log(Arc<Mutex<Vec<Seen>>>);

impl Log {
    pub(super) fn all(&self) -> Vec<Seen> {
        self.lock().clone()
    }

    /// Writes a request down; the note says how it ends.
    pub(super) fn write(&self, seen: Seen, server: ResetCord) -> Note {
        let mut all = self.lock();
        all.push(seen);
        Note {
            log: self.clone(),
            index: all.len() - 1,
            server,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Goes with a request through its answer. Dropped without a word, the client has left, or the
/// server was killed.
#[derive(Debug)]
pub(super) struct Note {
    log: Log,
    index: usize,
    server: ResetCord,
}

impl Note {
    /// Says how the request ends; only the first word counts.
    pub(super) fn ends(&self, ending: Ending) {
        let mut all = self.log.lock();
        let entry = &mut all[self.index];
        if entry.ending == Ending::Open {
            entry.ending = ending;
        }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        let ending = match self.server.is_pulled() {
            true => Ending::Broken,
            false => Ending::ClientLeft,
        };
        self.ends(ending);
    }
}
