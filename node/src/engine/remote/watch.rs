//! Looking at the engine: what it is, and every few hundred milliseconds how it is.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use sha2::{Digest, Sha256};
use shoal_gossip::{ModelApi, ModelFacts, Tokens};
use tokio::time::sleep;
use tracing::{info, warn};

use super::gauge::State;
use super::identity::{ASKED, Identity, ServedModel, identify};
use super::kind::ServerKind;
use super::reading::{Answer, polled, read};
use super::{Known, Shared, lock};
use crate::engine::EngineFacts;

/// Time the engine has to answer how it is. With the time between two looks it makes the second within which one that hangs
/// shows in the load.
const PATIENCE: Duration = Duration::from_millis(700);

/// Time it has to say what it is.
const IDENTITY_PATIENCE: Duration = Duration::from_secs(3);

/// Looks between two questions what it is: models and adapters come and go.
const LOOKS_PER_IDENTITY: u32 = 16;

/// Context of a model whose engine names none: as good as no bound.
const UNKNOWN_CONTEXT: Tokens = Tokens(1 << 20);

/// Looks at the engine until the node ends.
pub(super) async fn watch(shared: Arc<Shared>) {
    let mut looks = 0_u32;
    let mut trouble = String::new();
    let stop = shared.stop.clone();
    loop {
        let look = async {
            if looks.is_multiple_of(LOOKS_PER_IDENTITY) || lock(&shared.known).is_none() {
                identify_it(&shared, &mut trouble).await;
            }
            let before = lock(&shared.gauge).state();
            poll(&shared).await;
            tell(&shared, before);
            let after = lock(&shared.gauge).state();
            // One that came back may be another: the next look asks.
            looks = match (before, after) {
                (State::Well, State::Well) => looks.wrapping_add(1),
                _ => 0,
            };
            tokio::select! {
                () = sleep(shared.config.poll) => {}
                () = shared.look.notified() => {}
            }
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = look => {}
        }
    }
}

async fn ask(shared: &Shared, paths: &[&str], patience: Duration) -> Vec<Option<(u16, Bytes)>> {
    join_all(paths.iter().map(|path| shared.client.get(path, patience))).await
}

fn answers(told: &[Option<(u16, Bytes)>]) -> Vec<Option<Answer<'_>>> {
    told.iter()
        .map(|told| {
            told.as_ref().map(|(status, body)| Answer {
                status: *status,
                body,
            })
        })
        .collect()
}

async fn identify_it(shared: &Shared, trouble: &mut String) {
    let known = lock(&shared.known).map(|known| known.kind);
    let told = join_all(ASKED.iter().map(|path| async move {
        match concerns(known, path) {
            true => shared.client.get(path, IDENTITY_PATIENCE).await,
            false => None,
        }
    }))
    .await;
    match identify(shared.config.kind, &answers(&told)) {
        Ok(identity) => {
            trouble.clear();
            take(shared, &identity);
            shared.kv.look(identity.kind, &shared.client).await;
        }
        Err(error) => {
            let error = error.to_string();
            if *trouble != error {
                warn!(engine = shared.config.authority, "the engine {error}");
                *trouble = error;
            }
        }
    }
}

/// Whether an engine of this kind has the page. A known one is not asked for others: each would be a line in its log.
fn concerns(known: Option<ServerKind>, path: &str) -> bool {
    path == "/v1/models"
        || match known {
            None => true,
            Some(ServerKind::Vllm) => path == "/version",
            Some(ServerKind::LlamaServer) => path == "/props",
            Some(ServerKind::Sglang) => path.contains("server_info"),
            Some(ServerKind::OpenAi) => false,
        }
}

fn take(shared: &Shared, identity: &Identity) {
    let goes_on =
        identity.has_tokens && matches!(identity.kind, ServerKind::Vllm | ServerKind::LlamaServer);
    let capacity = identity
        .capacity
        .map(|tokens| Tokens(u32::try_from(tokens).unwrap_or(u32::MAX)));
    lock(&shared.gauge).identified(identity.slots, capacity);
    let before = shared.facts();
    let known = |id: &str| before.models.iter().find(|model| model.id == id);
    let models: Vec<ModelFacts> = identity
        .models
        .iter()
        .map(|model| ModelFacts {
            id: model.id.clone(),
            context: model.context.map_or(UNKNOWN_CONTEXT, Tokens),
            fingerprint: fingerprint(identity, model),
            // llama-server says the time of the question.
            created: known(&model.id).map_or(model.created, |known| known.created),
            api: ModelApi::Http,
        })
        .collect();
    let first = lock(&shared.known).replace(Known {
        kind: identity.kind,
        has_ids: identity.has_tokens,
        high_first: identity.high_first,
    });
    let changed = change_facts(shared, |facts| {
        facts.models = models;
        facts.capabilities.resumes = goes_on;
    });
    if changed || first.is_none() {
        let names: Vec<&str> = identity
            .models
            .iter()
            .map(|model| model.id.as_str())
            .collect();
        info!(
            engine = shared.config.authority,
            kind = identity.kind.as_str(),
            version = identity.version,
            ?names,
            left_out = identity.left_out,
            "the engine is known"
        );
    }
}

/// Two engines go on with each other's requests when kind, version, weights and name are the same.
fn fingerprint(identity: &Identity, model: &ServedModel) -> u64 {
    let mut hash = Sha256::new();
    for part in [
        identity.kind.as_str(),
        &identity.version,
        &model.root,
        &model.id,
    ] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let digest = hash.finalize();
    digest
        .iter()
        .take(8)
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// Changes the facts; whether they are others now.
fn change_facts(shared: &Shared, change: impl FnOnce(&mut EngineFacts)) -> bool {
    let mut known = lock(&shared.facts);
    let mut facts = EngineFacts::clone(&known);
    change(&mut facts);
    let changed = facts != **known;
    if changed {
        *known = Arc::new(facts);
        drop(known);
        shared.changed.send_replace(());
    }
    changed
}

async fn poll(shared: &Shared) {
    let Some(Known { kind, .. }) = *lock(&shared.known) else {
        return;
    };
    let asked = shared.clock.now();
    let paths = polled(kind);
    let told = match kind {
        // Its health check computes a token; its load is as good a sign of life.
        ServerKind::Sglang => {
            let mut told = vec![None];
            told.extend(ask(shared, paths.get(1..).unwrap_or_default(), PATIENCE).await);
            let alive = told
                .iter()
                .flatten()
                .any(|(status, _)| (200..300).contains(status));
            let health = match alive {
                true => Some((200, Bytes::new())),
                false => ask(shared, paths.get(..1).unwrap_or_default(), PATIENCE)
                    .await
                    .pop()
                    .flatten(),
            };
            told.splice(..1, [health]);
            told
        }
        ServerKind::Vllm | ServerKind::LlamaServer | ServerKind::OpenAi => {
            ask(shared, paths, PATIENCE).await
        }
    };
    let reading = read(kind, &answers(&told));
    let now = shared.clock.now();
    // A busy engine may be late with its figures.
    let late = reading.is_ok() && told.iter().skip(1).all(Option::is_none);
    if late && kind != ServerKind::OpenAi && lock(&shared.gauge).late(now) {
        return;
    }
    let (total, block_size) = shared.gauge(|gauge| {
        gauge.polled(asked, now, reading);
        (gauge.total(), gauge.block_size())
    });
    change_facts(shared, |facts| {
        (facts.total, facts.block_size) = (total, block_size);
    });
}

/// Says it once when the engine is well, or is not any more.
fn tell(shared: &Shared, before: State) {
    let after = lock(&shared.gauge).state();
    let engine = &shared.config.authority;
    match (before, after) {
        (State::Well | State::Starting, State::Unwell(_, why)) => {
            warn!(
                engine,
                "the engine is not well, and gets nothing new: {why}"
            );
        }
        (State::Starting | State::Unwell(..), State::Well) => info!(engine, "the engine is well"),
        (State::Unwell(..), State::Starting) => info!(engine, "the engine is starting"),
        (State::Well, State::Starting) => warn!(engine, "the engine loads its model, or sleeps"),
        (State::Well, State::Well)
        | (State::Starting, State::Starting)
        | (State::Unwell(..), State::Unwell(..)) => {}
    }
}
