//! One request in the engine behind the stand-in.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use shoal_gossip::{Epoch, NodeId, RequestId};
use shoal_node::engine::batched::TextModel as _;
use shoal_node::engine::sim::SimText;
use shoal_node::engine::text::TextState;
use shoal_node::engine::work::{HttpAsk, Job, Prepared, RequestKind, SamplingParams};
use shoal_node::engine::{
    Engine, EngineError, EngineEvent, FinishReason, TokenBatch, TokenLogprob,
};
use tokio::sync::mpsc;

use super::kv::Ticket;

/// The name under which requests of stand-ins run.
const HOME: NodeId = NodeId(0x57A2_D121);

/// How an output ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The end token.
    Eos,
    /// A stop string, this one.
    Word(String),
    /// The bound on the output.
    Length,
    /// Somebody asked the engine to end it.
    Abort,
}

impl End {
    /// OpenAI's `finish_reason`.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Eos | Self::Word(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// What one event of an answer tells.
#[derive(Clone, Debug, Default)]
pub(super) struct Piece {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    pub(super) logprobs: Vec<TokenLogprob>,
    /// Output tokens up to and with these.
    pub(super) output: u32,
    pub(super) end: Option<End>,
}

impl Piece {
    /// Adds the piece that follows.
    pub(super) fn append(&mut self, next: Self) {
        self.ids.extend(next.ids);
        self.text.push_str(&next.text);
        self.logprobs.extend(next.logprobs);
        self.output = next.output;
        self.end = next.end;
    }
}

/// How tokens become events.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grouping {
    /// Tokens in one event.
    pub(super) tokens: usize,
    /// Ids of all but the last one of an event are left out.
    pub(super) lose_ids: bool,
}

/// A request that is being run.
#[derive(Clone, Debug)]
pub(super) struct Running {
    /// The name its client knows it by.
    pub(super) name: String,
    pub(super) prompt: u32,
    /// Output tokens so far.
    pub(super) output: u32,
    pub(super) max_tokens: u32,
    request: RequestId,
}

/// The requests of one stand-in, in the order they came.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    rows: Arc<Mutex<BTreeMap<u64, Running>>>,
}

impl Table {
    pub(super) fn all(&self) -> Vec<(u64, Running)> {
        let rows = self.lock();
        rows.iter().map(|(key, row)| (*key, row.clone())).collect()
    }

    /// Ends a request in the engine.
    pub(super) fn abort(&self, engine: &dyn Engine, wanted: impl Fn(&Running) -> bool) {
        for (_, row) in self.all().into_iter().filter(|(_, row)| wanted(row)) {
            engine.abort(row.request, Epoch::FIRST);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Running>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in the engine. Dropping it aborts the request.
#[derive(Debug)]
pub(super) struct Run {
    events: mpsc::Receiver<EngineEvent>,
    params: SamplingParams,
    grouping: Grouping,
    /// Tells where a stop string ends the output, as the engine does.
    text: TextState,
    /// Bytes of the output, stop string and all.
    raw: Vec<u8>,
    output: u32,
    last: Option<u32>,
    over: bool,
    table: Table,
    serial: u64,
    /// Its KV, if a node named it.
    pub(super) ticket: Option<Ticket>,
}

impl Run {
    /// Hands a request to the engine.
    pub(super) fn start(
        engine: &dyn Engine,
        table: &Table,
        (serial, name): (u64, String),
        (kind, prepared): (RequestKind, Prepared),
        grouping: Grouping,
    ) -> Result<Self, EngineError> {
        let request = RequestId { home: HOME, serial };
        let params = prepared.params.clone();
        let row = Running {
            name,
            prompt: u32::try_from(prepared.prompt.len()).unwrap_or(u32::MAX),
            output: 0,
            max_tokens: params.max_tokens,
            request,
        };
        let events = engine.submit(Job {
            request,
            epoch: Epoch::FIRST,
            kind: Some(kind),
            http: HttpAsk::default(),
            body: Bytes::new(),
            prepared,
            generated: Vec::new(),
            spoken: Vec::new(),
            reservation: None,
        })?;
        table.lock().insert(serial, row);
        Ok(Self {
            events,
            text: TextState::new(&params.stop),
            params,
            grouping,
            raw: Vec::new(),
            output: 0,
            last: None,
            over: false,
            table: table.clone(),
            serial,
            ticket: None,
        })
    }

    /// What the next event tells; `None` after the end.
    pub(super) async fn next(&mut self) -> Option<Result<Piece, EngineError>> {
        if self.over {
            return None;
        }
        let mut piece = Piece::default();
        loop {
            match self.events.recv().await {
                Some(EngineEvent::Tokens(batch)) => {
                    self.take(&mut piece, batch);
                    let full = piece.ids.len() >= self.grouping.tokens;
                    if !full || self.is_complete() {
                        // The end comes in one event with the last token.
                        continue;
                    }
                }
                Some(EngineEvent::Finished(finish)) => {
                    piece.text.push_str(&finish.text);
                    piece.end = Some(self.end(finish.reason));
                }
                Some(EngineEvent::Failed(error)) => {
                    self.over = true;
                    return Some(Err(error));
                }
                None => piece.end = Some(End::Abort),
            }
            self.over = piece.end.is_some();
            if self.over
                && let Some(ticket) = &mut self.ticket
            {
                ticket.over();
            }
            piece.output = self.output;
            self.lose_ids(&mut piece);
            return Some(Ok(piece));
        }
    }

    /// Reads to the end.
    pub(super) async fn whole(&mut self) -> Result<Piece, EngineError> {
        let mut whole = Piece::default();
        while let Some(piece) = self.next().await {
            whole.append(piece?);
        }
        Ok(whole)
    }

    fn take(&mut self, piece: &mut Piece, batch: TokenBatch) {
        self.output += u32::try_from(batch.ids.len()).unwrap_or(u32::MAX);
        self.last = batch.ids.last().copied();
        if let Some(ticket) = &self.ticket {
            ticket.drew(&batch.ids);
        }
        for id in &batch.ids {
            let bytes = SimText.piece(*id);
            self.text.push(&bytes);
            self.raw.extend(bytes);
        }
        if let Some(row) = self.table.lock().get_mut(&self.serial) {
            row.output = self.output;
        }
        piece.ids.extend(batch.ids);
        piece.text.push_str(&batch.text);
        piece.logprobs.extend(batch.logprobs);
    }

    fn lose_ids(&self, piece: &mut Piece) {
        if self.grouping.lose_ids {
            let lost = piece.ids.len().saturating_sub(1);
            piece.ids.drain(..lost);
            piece.logprobs.drain(..lost.min(piece.logprobs.len()));
        }
    }

    fn ended_itself(&self) -> bool {
        !self.params.ignore_eos && self.last.is_some_and(|id| SimText.is_end(id))
    }

    fn is_complete(&self) -> bool {
        self.output >= self.params.max_tokens || self.ended_itself() || self.text.is_stopped()
    }

    fn end(&self, reason: FinishReason) -> End {
        match reason {
            FinishReason::Length => End::Length,
            FinishReason::Stop if self.text.is_stopped() => End::Word(self.stop_word()),
            FinishReason::Stop => End::Eos,
        }
    }

    /// The stop string that was complete first; the longest of several.
    fn stop_word(&self) -> String {
        let text = String::from_utf8_lossy(&self.raw);
        let found = self.params.stop.iter().filter_map(|word| {
            let start = text.find(word.as_str())?;
            Some((start + word.len(), start, word))
        });
        found
            .min()
            .map_or_else(String::new, |(_, _, word)| word.clone())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.table.lock().remove(&self.serial);
    }
}
