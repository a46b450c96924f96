//! What the stand-in does wrong, and to whom.

use std::collections::VecDeque;

use bytes::Bytes;

/// One way to misbehave.
///
/// The first group meets one request each, in the order they were asked for. The second group is a
/// manner of the server: it lasts until [`EngineServer::mend`](super::EngineServer::mend).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Resets the connection instead of an answer; the engine never hears of the request.
    DieBeforeHead,
    /// Resets the connection after the head of the answer.
    DieAfterHead,
    /// Resets the connection after this many events.
    DieAfterEvents(usize),
    /// Closes the connection after this many events without the end of the body.
    CutAfterEvents(usize),
    /// Says nothing and does not close; the engine never hears of the request.
    StallBeforeHead,
    /// Says nothing more after this many events, and does not close.
    StallAfterEvents(usize),
    /// Answers this instead; the engine never hears of the request.
    Status {
        /// Status of the answer.
        status: u16,
        /// Headers of the answer; JSON unless a content type is among them.
        headers: Vec<(&'static str, String)>,
        /// Body of the answer.
        body: Bytes,
    },
    /// Says that the answer is of this type.
    ContentType(&'static str),
    /// After this many events half of the next one, and the proper end of the body.
    HalfEvent(usize),
    /// The first event has this many bytes at least; its JSON is padded with blanks.
    LongLine(usize),

    /// Ends lines with CR LF.
    CrLf,
    /// Sends a comment before each event.
    Comments,
    /// Writes bodies in pieces of this many bytes, each for itself.
    SplitAt(usize),
    /// Lives in 1970, and creates answers then or in the far future by turns.
    OddClock,
    /// This many tokens in one event.
    ManyTokensPerEvent(usize),
    /// This many tokens in one event, with the id of the last one only: what llama-server does with the
    /// tokens of one character.
    LostIds(usize),
    /// Asked for the text of ids, writes the name of a control token before each that this divides. Streams do not show it.
    ControlTokens(u32),
    /// Figures of load go by other names.
    MetricsRenamed,
    /// Figures of load are not numbers.
    MetricsNaN,
    /// There are no figures of load: 404.
    MetricsGone,
    /// Figures of load are never answered.
    MetricsHang,
    /// Health checks are answered with this.
    HealthStatus(u16),
}

impl Fault {
    /// A refusal with a JSON body and perhaps a `Retry-After` in seconds.
    pub fn refusal(status: u16, retry_after: Option<u32>) -> Self {
        let body = format!(
            r#"{{"error":{{"message":"refused by the test","type":"Refused","param":null,"code":{status}}}}}"#
        );
        Self::Status {
            status,
            headers: retry_after
                .map(|seconds| ("retry-after", seconds.to_string()))
                .into_iter()
                .collect(),
            body: body.into(),
        }
    }

    fn is_manner(&self) -> bool {
        match self {
            Self::DieBeforeHead
            | Self::DieAfterHead
            | Self::DieAfterEvents(_)
            | Self::CutAfterEvents(_)
            | Self::StallBeforeHead
            | Self::StallAfterEvents(_)
            | Self::Status { .. }
            | Self::ContentType(_)
            | Self::HalfEvent(_)
            | Self::LongLine(_) => false,
            Self::CrLf
            | Self::Comments
            | Self::SplitAt(_)
            | Self::OddClock
            | Self::ManyTokensPerEvent(_)
            | Self::LostIds(_)
            | Self::ControlTokens(_)
            | Self::MetricsRenamed
            | Self::MetricsNaN
            | Self::MetricsGone
            | Self::MetricsHang
            | Self::HealthStatus(_) => true,
        }
    }
}

/// Faults that wait for their request, and manners.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// With the path they wait for; without one any request for work will do.
    waiting: VecDeque<(Option<String>, Fault)>,
    always: Vec<Fault>,
}

impl Faults {
    pub(super) fn add(&mut self, path: Option<&str>, fault: Fault) {
        if fault.is_manner() {
            self.always.push(fault);
        } else {
            self.waiting.push_back((path.map(str::to_owned), fault));
        }
    }

    pub(super) fn always(&mut self, fault: Fault) {
        self.always.push(fault);
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// What a request to `path` meets.
    pub(super) fn meet(&mut self, path: &str, is_work: bool) -> Met {
        let at = self
            .waiting
            .iter()
            .position(|(wanted, _)| wanted.as_ref().map_or(is_work, |wanted| wanted == path));
        let waiting = at.and_then(|at| self.waiting.remove(at));
        let mut met = Met {
            manners: self.always.clone(),
            blow: waiting.map(|(_, fault)| fault),
        };
        if is_work && met.blow.is_none() {
            let always = self.always.iter().find(|fault| !fault.is_manner());
            met.blow = always.cloned();
        }
        met
    }
}

/// What one request meets.
#[derive(Clone, Debug, Default)]
pub(super) struct Met {
    /// Happens to this request.
    pub(super) blow: Option<Fault>,
    manners: Vec<Fault>,
}

impl Met {
    /// Whether the server has this manner.
    pub(super) fn has(&self, manner: &Fault) -> bool {
        self.manners.contains(manner)
    }

    /// The first manner that `pick` takes something from.
    pub(super) fn find<T>(&self, pick: impl Fn(&Fault) -> Option<T>) -> Option<T> {
        self.manners.iter().find_map(pick)
    }
}
