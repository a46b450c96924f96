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

use super::blob::{self, Blob};
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
    fn way(&self) -> Result<Arc<Way>, MoveError> {
        let way = self.shared.kv.way();
        way.ok_or_else(|| MoveError::Unfit("its KV stays in its engine".into()))
    }

    /// Whole blocks of a running request, from `from` on.
    pub(in super::super) async fn export_kv(
        &self,
        entry: &SharedJob,
        from: Tokens,
        at_most: Tokens,
    ) -> Result<Exported, MoveError> {
        let way = self.way()?;
        let (name, ids) = {
            let job = entry.lock();
            (job.name().ok_or(MoveError::Gone)?, job.all_ids())
        };
        blocking(move || {
            let Way::Connector(connector) = &*way else {
                return Err(CallError::Failed("only a stopped slot can be saved".into()));
            };
            let known = u32::try_from(ids.len()).unwrap_or(u32::MAX);
            let computed = connector.computed(&name)?.min(known.saturating_sub(1));
            let end = computed.min(from.0.saturating_add(at_most.0));
            let end = end / connector.block * connector.block;
            let kv = match KvRange::new(from, Tokens(end)) {
                Some(range) => {
                    let part = ids.get(from.0 as usize..end as usize).unwrap_or_default();
                    Some(blocks(connector, &name, range, part)?)
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
        let mut known = entry.lock().prompt_ids();
        known.extend(&paused.state.output);
        let taken = match &*way {
            Way::Connector(_) => self.stop_in_vllm(&way, entry, (from, known)).await,
            Way::Slots(slots) => self.stop_in_slot(slots, entry, &known).await,
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
        way: &Arc<Way>,
        entry: &SharedJob,
        (from, known): (Tokens, Vec<u32>),
    ) -> Result<Option<ExportedKv>, CallError> {
        let name = entry.lock().name();
        let name = name.ok_or_else(|| CallError::Gone("it has no name there".into()))?;
        let (asked, holder) = (Arc::clone(way), name.clone());
        blocking(move || connector_of(&asked)?.hold(&holder)).await?;
        entry.lock().stop(Some(name.clone()));
        entry.wake.notify_one();
        let asked = Arc::clone(way);
        blocking(move || {
            let connector = connector_of(&asked)?;
            let held = connector.held(&name)?;
            if !held.token_ids.starts_with(&known) {
                return Err(CallError::Failed("its engine has drawn other ids".into()));
            }
            let known = u32::try_from(known.len()).unwrap_or(u32::MAX);
            let end = held.computed.min(known.saturating_sub(1));
            let range = KvRange::new(from, Tokens(end));
            range
                .map(|range| blocks(connector, &name, range, &[]))
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
        let way = self.way()?;
        let connector = connector_of(&way)?;
        let range = kv.range;
        let blob = Blob::read(connector.digest, range, kv.bytes).map_err(MoveError::Unfit)?;
        let (model, http, mut ids) = {
            let mut job = entry.lock();
            let model = job.job.prepared.model.clone();
            let ids = job.arrived(range, &blob.ids).map_err(MoveError::Unfit)?;
            (model, job.job.http.clone(), ids)
        };
        let laid = self.lay_out(&way, range, blob.kv).await?;
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
        let way = self.way()?;
        let laid = match &*way {
            Way::Connector(connector) => {
                let blob =
                    Blob::read(connector.digest, kv.range, kv.bytes).map_err(MoveError::Unfit)?;
                self.lay_out(&way, kv.range, blob.kv).await?
            }
            Way::Slots(slots) => {
                let blob =
                    Blob::read(slots::LAYOUT, kv.range, kv.bytes).map_err(MoveError::Unfit)?;
                let name = self.shared.kv.name();
                let put = slots.put_in(&self.shared.client, &name, blob.kv).await;
                Laid::Slot(put?)
            }
        };
        entry.lock().laid = Some(laid);
        Ok(())
    }

    async fn lay_out(&self, way: &Arc<Way>, range: KvRange, kv: Bytes) -> Result<Laid, MoveError> {
        let connector = connector_of(way)?;
        let first = range.start().0 / connector.block;
        let blocks = range.end().0.div_ceil(connector.block) - first;
        let whole = range.start().0.is_multiple_of(connector.block);
        if !whole || kv.len() as u64 != u64::from(blocks) * connector.block_bytes {
            let why = format!("{} bytes for {blocks} blocks", kv.len());
            return Err(MoveError::Unfit(why));
        }
        let key = self.shared.kv.name();
        let (asked, stage_key) = (Arc::clone(way), key.clone());
        blocking(move || connector_of(&asked)?.stage(&stage_key, blocks, &kv)).await?;
        Ok(Laid::Blocks {
            key,
            first,
            blocks,
            tokens: range.end().0,
        })
    }
}

impl Shared {
    /// Lets the engine have back what it kept of a request, and what was laid out for it and not used.
    pub(in super::super) fn let_go(self: &Arc<Self>, held: Option<String>, laid: Option<Laid>) {
        let Some(way) = self.kv.way() else {
            return;
        };
        match (&*way, laid) {
            (Way::Slots(slots), Some(Laid::Slot(slot))) => slots.begun(slot),
            (Way::Connector(_), laid) if held.is_some() || laid.is_some() => {
                let let_go = async move {
                    let done = blocking(move || {
                        let connector = connector_of(&way)?;
                        if let Some(Laid::Blocks { key, .. }) = laid {
                            connector.unstage(&key)?;
                        }
                        held.map_or(Ok(()), |name| connector.release(&name))
                    });
                    // It lets go by itself in the end.
                    drop(done.await);
                };
                self.tasks.spawn_on(let_go, &self.runtime);
            }
            (Way::Connector(_) | Way::Slots(_), _) => {}
        }
    }
}

fn connector_of(way: &Way) -> Result<&Connector, CallError> {
    match way {
        Way::Connector(connector) => Ok(connector),
        Way::Slots(_) => Err(CallError::Failed("it takes whole slots alone".into())),
    }
}

/// Blocks of a request from the start of a range on, which must be that of a block.
fn blocks(
    connector: &Connector,
    name: &str,
    range: KvRange,
    ids: &[u32],
) -> Result<ExportedKv, CallError> {
    let first = range.start().0 / connector.block;
    let count = range.end().0.div_ceil(connector.block) - first;
    let room = u64::from(count) * connector.block_bytes;
    let room = usize::try_from(room).unwrap_or(0);
    let mut bytes = blob::head(connector.digest, ids, room);
    connector.export(name, (first, count), &mut bytes)?;
    Ok(ExportedKv {
        range,
        bytes: bytes.into(),
    })
}
