//! What a hand-over with KV asks of the engine beside the node.
//!
//! A request leaves in stages while it runs, where the engine gives blocks of running requests away. To stop it with its KV is to
//! abort it while the engine holds what it has: if it goes on here after all, it is asked for anew and finds its KV.
//! A request arrives by stages that throw-away requests bring into the engine's prefix cache, and a last part that the request
//! itself brings in when it is asked for.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, json};
use shoal_gossip::Tokens;
use shoal_migrate::KvRange;
use tracing::debug;

use super::blob::{self, Blob, Form, Kv};
use super::connector::Connector;
use super::slots::{self, Slots};
use super::socket::CallError;
use super::{Along, Laid, Way, blocking};
use crate::engine::moving::{Exported, ExportedKv, MoveError, PausedJob};
use crate::engine::remote::client::read_whole;
use crate::engine::remote::exchange::prompt_ids;
use crate::engine::remote::job::SharedJob;
use crate::engine::remote::{RemoteEngine, Shared};
use crate::engine::work::HttpAsk;

/// Longest answer to a throw-away request.
const MAX_ANSWER: usize = 1 << 20;

impl From<CallError> for MoveError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Gone(_) => Self::Gone,
            CallError::Failed(why) => Self::Broken(why),
        }
    }
}

/// A paused request whose hand-over goes away before its KV is out runs on.
struct Standing<'a>(Option<&'a SharedJob>);

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.0 {
            entry.lock().unpause();
            entry.wake.notify_one();
        }
    }
}

impl RemoteEngine {
    fn way(&self) -> Result<Way, MoveError> {
        let way = self.shared.kv.way();
        way.ok_or_else(|| MoveError::Unfit("its KV stays in its engine".into()))
    }

    fn connector(&self) -> Result<Arc<Connector>, MoveError> {
        match self.way()? {
            Way::Connector(connector) => Ok(connector),
            Way::Slots(_) => Err(MoveError::Unfit("only a stopped slot can be saved".into())),
        }
    }

    /// Whole blocks of a running request, from `from` on.
    pub(in super::super) async fn export_kv(
        &self,
        entry: &SharedJob,
        from: Tokens,
        at_most: Tokens,
    ) -> Result<Exported, MoveError> {
        let connector = self.connector()?;
        let (name, ids) = {
            let job = entry.lock();
            (job.name().ok_or(MoveError::Gone)?, job.all_ids())
        };
        let pin = self.shared.pin_anew(entry, from);
        blocking(move || {
            let known = u32::try_from(ids.len()).unwrap_or(u32::MAX);
            let computed = connector.computed(&name)?.min(known.saturating_sub(1));
            let end = computed.min(from.0.saturating_add(at_most.0));
            let end = end / connector.block * connector.block;
            let kv = match KvRange::new(from, Tokens(end)) {
                Some(range) => {
                    let part = ids.get(from.0 as usize..end as usize).unwrap_or_default();
                    Some(blocks(&connector, (&name, pin.as_deref()), range, part)?)
                }
                None => None,
            };
            Ok(Exported {
                kv,
                computed: Tokens(computed),
            })
        })
        .await
        .map_err(MoveError::from)
    }

    /// Stops a request, and takes out what KV it has from `from` on. Without any it goes on elsewhere all the same: there it is
    /// computed.
    pub(in super::super) async fn pause_with_kv(
        &self,
        entry: &SharedJob,
        from: Tokens,
    ) -> Result<PausedJob, MoveError> {
        let way = self.way()?;
        self.learn_prompt(entry).await?;
        let now = self.shared.clock.now();
        let paused = entry.lock().pause(now)?;
        entry.wake.notify_one();
        let mut standing = Standing(Some(entry));
        let mut known = entry.lock().prompt_ids().to_vec();
        known.extend(&paused.state.output);
        let taken = match way {
            Way::Connector(connector) => self.stop_in_vllm(connector, entry, (from, known)).await,
            Way::Slots(slots) => self.stop_in_slot(&slots, entry, &known).await,
        };
        standing.0 = None;
        let kv = taken.unwrap_or_else(|error| {
            let request = entry.lock().job.request;
            debug!(%request, %error, "it goes without its KV");
            None
        });
        Ok(PausedJob { kv, ..paused })
    }

    /// Has the engine tell the ids of a prompt, where it did not with its answer.
    async fn learn_prompt(&self, entry: &SharedJob) -> Result<(), MoveError> {
        let job = {
            let job = entry.lock();
            if !job.prompt_ids().is_empty() {
                return Ok(());
            }
            job.job.clone()
        };
        let ids = prompt_ids(&self.shared.client, &job).await;
        let ids = ids.map_err(|error| MoveError::Broken(error.to_string()))?;
        entry.lock().learn_prompt(ids);
        Ok(())
    }

    async fn stop_in_vllm(
        &self,
        connector: Arc<Connector>,
        entry: &SharedJob,
        (from, known): (Tokens, Vec<u32>),
    ) -> Result<Option<ExportedKv>, CallError> {
        let name = entry.lock().name();
        let name = name.ok_or_else(|| CallError::Gone("it has no name there".into()))?;
        let (asked, holder) = (Arc::clone(&connector), name.clone());
        blocking(move || asked.hold(&holder)).await?;
        entry.lock().stop(Some(name.clone()));
        entry.wake.notify_one();
        let pin = self.shared.pin_anew(entry, from);
        blocking(move || {
            let held = connector.held(&name)?;
            if !held.token_ids.starts_with(&known) {
                return Err(CallError::Failed("its engine has drawn other ids".into()));
            }
            let known = u32::try_from(known.len()).unwrap_or(u32::MAX);
            let end = held.computed.min(known.saturating_sub(1));
            let range = KvRange::new(from, Tokens(end));
            range
                .map(|range| blocks(&connector, (&name, pin.as_deref()), range, &[]))
                .transpose()
        })
        .await
    }

    async fn stop_in_slot(
        &self,
        slots: &Slots,
        entry: &SharedJob,
        known: &[u32],
    ) -> Result<Option<ExportedKv>, CallError> {
        let client = &self.shared.client;
        let before = Slots::busy(client).await?;
        entry.lock().stop(None);
        entry.wake.notify_one();
        let name = self.shared.kv.name();
        let bytes = slots.take_out(client, (&before, &name), known).await?;
        let end = u32::try_from(known.len()).unwrap_or(u32::MAX);
        let range = KvRange::new(Tokens::ZERO, Tokens(end.saturating_sub(1)));
        Ok(range.map(|range| ExportedKv {
            range,
            bytes: bytes.into(),
        }))
    }

    /// Brings a stage into the engine's prefix cache.
    pub(in super::super) async fn import_kv(
        &self,
        entry: &SharedJob,
        kv: ExportedKv,
    ) -> Result<(), MoveError> {
        let connector = self.connector()?;
        let range = kv.range;
        let blob = Blob::read(connector.digest, range, kv.bytes).map_err(MoveError::Unfit)?;
        let (model, http, mut ids) = {
            let mut job = entry.lock();
            let model = job.job.prepared.model.clone();
            let ids = job.arrived(range, &blob.ids).map_err(MoveError::Unfit)?;
            (model, job.job.http.clone(), ids)
        };
        let laid = self.lay_out(connector, range, blob.kv).await?;
        // A request computes one token at least.
        ids.extend(ids.last().copied());
        let mut body = Map::new();
        Along::for_connector(&self.shared.kv.name(), None, Some(&laid)).put_into(&mut body);
        body.insert("model".into(), json!(model));
        body.insert("prompt".into(), json!(ids));
        body.insert("max_tokens".into(), json!(1));
        body.insert("temperature".into(), json!(0));
        let ask = HttpAsk {
            path: "/v1/completions".into(),
            headers: http.headers,
        };
        let request = entry.lock().job.request;
        let body: Bytes = serde_json::Value::Object(body).to_string().into();
        let client = self.shared.client.clone();
        let brought = async {
            let response = client.send(request, ask, body).await?;
            let status = response.status();
            read_whole(response.into_body(), MAX_ANSWER).await?;
            match status.is_success() {
                true => Ok(()),
                false => Err(format!("status {status}")),
            }
        };
        tokio::select! {
            biased;
            () = entry.stop.cancelled() => Err(MoveError::Gone),
            brought = brought => brought.map_err(MoveError::Broken),
        }
    }

    /// Lays out the last part of a request's KV, for when it is asked for.
    pub(in super::super) async fn import_last_kv(
        &self,
        entry: &SharedJob,
        kv: ExportedKv,
    ) -> Result<(), MoveError> {
        let read = |layout| Blob::read(layout, kv.range, kv.bytes).map_err(MoveError::Unfit);
        let laid = match self.way()? {
            Way::Connector(connector) => {
                let blob = read(connector.digest)?;
                self.lay_out(connector, kv.range, blob.kv).await?
            }
            Way::Slots(slots) => {
                let Kv::Bytes(bytes) = read(slots::LAYOUT)?.kv else {
                    return Err(MoveError::Unfit("a slot comes whole".into()));
                };
                let name = self.shared.kv.name();
                let put = slots.put_in(&self.shared.client, &name, bytes).await;
                Laid::Slot(put?)
            }
        };
        entry.lock().laid = Some(laid);
        Ok(())
    }

    /// Lays out KV for a request that is to come.
    async fn lay_out(
        &self,
        connector: Arc<Connector>,
        range: KvRange,
        kv: Kv,
    ) -> Result<Laid, MoveError> {
        let first = range.start().0 / connector.block;
        let blocks = range.end().0.div_ceil(connector.block) - first;
        let whole = range.start().0.is_multiple_of(connector.block);
        let (have, need) = match &kv {
            Kv::Bytes(bytes) => (
                bytes.len() as u64,
                u64::from(blocks) * connector.block_bytes,
            ),
            Kv::Elsewhere(from) => (from.ids.len() as u64, u64::from(blocks)),
        };
        if !whole || have != need {
            let why = format!("{have} bytes or blocks instead of {need} for {blocks} blocks");
            return Err(MoveError::Unfit(why));
        }
        let key = self.shared.kv.name();
        let named = key.clone();
        match kv {
            Kv::Bytes(bytes) => blocking(move || connector.stage(&named, blocks, &bytes)).await?,
            Kv::Elsewhere(from) => {
                let fetched = u64::from(blocks) * connector.block_bytes;
                let read = blocking(move || connector.fetch(&named, &from)).await;
                let now = self.shared.clock.now();
                read.inspect_err(|why| self.shared.kv.could_not_reach(now, why))?;
                self.shared.kv.fetched(fetched);
            }
        }
        Ok(Laid::Blocks {
            key,
            first,
            blocks,
            tokens: range.end().0,
        })
    }
}

impl Shared {
    /// The name under which blocks of a request, from `from` on, are kept for the target's engine to read; `None` when they go
    /// through the nodes. Those before `from` have been read. With none before, what was kept is of a move that failed: it may
    /// be in the middle of being read, so it stays kept for its time.
    fn pin_anew(self: &Arc<Self>, entry: &SharedJob, from: Tokens) -> Option<String> {
        let (before, now) = {
            let mut job = entry.lock();
            let now = job.direct.then(|| self.kv.name());
            (std::mem::replace(&mut job.pinned, now.clone()), now)
        };
        let read = before.filter(|_| from > Tokens::ZERO);
        if let (Some(Way::Connector(connector)), Some(key)) = (self.kv.way(), read) {
            self.ask_by_the_way(move || connector.unpin(&key));
        }
        now
    }

    /// Tells the engine something that it finds out by itself in the end.
    fn ask_by_the_way(
        self: &Arc<Self>,
        ask: impl FnOnce() -> Result<(), CallError> + Send + 'static,
    ) {
        let told = async move { drop(blocking(ask).await) };
        self.tasks.spawn_on(told, &self.runtime);
    }

    /// Lets the engine have back what it kept of a request, and what was laid out for it and not used.
    pub(in super::super) fn let_go(self: &Arc<Self>, held: Option<String>, laid: Option<Laid>) {
        let Some(way) = self.kv.way() else {
            return;
        };
        match (way, laid) {
            (Way::Slots(slots), Some(Laid::Slot(slot))) => slots.begun(slot),
            (Way::Connector(connector), laid) if held.is_some() || laid.is_some() => {
                self.ask_by_the_way(move || {
                    if let Some(Laid::Blocks { key, .. }) = laid {
                        connector.unstage(&key)?;
                    }
                    held.map_or(Ok(()), |name| connector.release(&name))
                });
            }
            (Way::Connector(_) | Way::Slots(_), _) => {}
        }
    }
}

/// Blocks of a request from the start of a range on, which must be that of a block. With a `pin` they stay where they are, and
/// the other engine is told where that is.
fn blocks(
    connector: &Connector,
    (name, pin): (&str, Option<&str>),
    range: KvRange,
    ids: &[u32],
) -> Result<ExportedKv, CallError> {
    let first = range.start().0 / connector.block;
    let count = range.end().0.div_ceil(connector.block) - first;
    let bytes = match pin {
        Some(pin) => {
            let mut bytes = blob::head(connector.digest, Form::Elsewhere, ids, 0);
            connector.point_out((name, pin), (first, count), &mut bytes)?;
            bytes
        }
        None => {
            let room = u64::from(count) * connector.block_bytes;
            let room = usize::try_from(room).unwrap_or(0);
            let mut bytes = blob::head(connector.digest, Form::Bytes, ids, room);
            connector.export(name, (first, count), &mut bytes)?;
            bytes
        }
    };
    Ok(ExportedKv {
        range,
        bytes: bytes.into(),
    })
}
