//! llama-server's way: it writes a slot that stands still into a file of a folder that node and engine share, and reads it.
//!
//! Nothing it tells says which slot runs which request. So a slot that was busy before the request was stopped and is idle
//! afterwards is saved, and the ids in its file say whether it was the one.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::blob::{self, Form};
use super::blocking;
use super::socket::CallError;
use crate::engine::remote::client::Client;
use crate::engine::remote::lock;

/// Bytes that the KV of a token may take in a file: what a model of 70 billion parameters with grouped queries takes, three
/// times over. The server does not tell its own; nothing is reserved by this.
pub(super) const MOST_BYTES_PER_TOKEN: u32 = 1 << 20;

/// The layout in the form that travels. What the files hold is told apart by kind, version and weights of the engine.
pub(super) const LAYOUT: u64 = 0x6c6c_616d_6173_6c6f;

/// First word of a file: `ggsq`. The second is the version of its form, which the server checks.
const MAGIC: u32 = 0x6767_7371;

/// Time for a question of the server; saving and restoring a gigabyte included.
const PATIENCE: Duration = Duration::from_secs(4);

/// Time until a stopped request has left its slot: the rest of the step that runs, and one look.
const LEFT_PATIENCE: Duration = Duration::from_secs(2);

/// How the names of files begin.
const FILES: &str = "shoal-";

/// Age of a file that nobody comes back for.
const FORGOTTEN: Duration = Duration::from_secs(30);

/// Time between two looks at the slots meanwhile: less than a step takes.
const LOOK: Duration = Duration::from_millis(5);

/// Slots of a llama-server that writes them into a folder.
#[derive(Debug)]
pub(super) struct Slots {
    folder: PathBuf,
    /// Slots that a request was restored into which has not begun yet.
    taken: Mutex<BTreeSet<u32>>,
}

#[derive(Debug, Deserialize)]
struct Slot {
    id: u32,
    is_processing: bool,
}

impl Slots {
    /// Asks whether the server writes slots.
    ///
    /// # Errors
    /// When it does not.
    pub(super) async fn find(folder: &Path, client: &Client) -> Result<Self, CallError> {
        let swept = folder.to_owned();
        blocking(move || sweep(&swept)).await?;
        // A name that is none: a server that could write says what is wrong with it.
        let (status, body) = act(client, 0, "save", "../none").await?;
        let text = String::from_utf8_lossy(&body);
        if status == 400 && text.contains("filename") {
            return Ok(Self {
                folder: folder.to_owned(),
                taken: Mutex::default(),
            });
        }
        Err(CallError::Failed(format!(
            "start the server with --slot-save-path {}/ (it answers with status {status})",
            folder.display()
        )))
    }

    /// Slots that are at work.
    pub(super) async fn busy(client: &Client) -> Result<BTreeSet<u32>, CallError> {
        let slots = list(client).await?.into_iter();
        Ok(slots
            .filter(|slot| slot.is_processing)
            .map(|slot| slot.id)
            .collect())
    }

    /// Saves the slot of a request that was stopped just now, and reads the file. Its ids begin with `ids`, but for the last of
    /// them, which may have no KV yet; `before` was at work before it was stopped.
    ///
    /// # Errors
    /// When no slot has it any more.
    pub(super) async fn take_out(
        &self,
        client: &Client,
        (before, name): (&BTreeSet<u32>, &str),
        ids: &[u32],
    ) -> Result<Vec<u8>, CallError> {
        let mut left = before.clone();
        let found = async {
            loop {
                let busy = Self::busy(client).await?;
                let stopped: Vec<u32> = left.difference(&busy).copied().collect();
                for slot in stopped {
                    left.remove(&slot);
                    if let Some(bytes) = self.save(client, (slot, name), ids).await? {
                        return Ok(bytes);
                    }
                }
                if left.is_empty() {
                    return Err(CallError::Gone("no slot has it".into()));
                }
                sleep(LOOK).await;
            }
        };
        timeout(LEFT_PATIENCE + PATIENCE, found)
            .await
            .unwrap_or_else(|_| Err(CallError::Gone("its slot did not stop in time".into())))
    }

    /// Saves a slot and reads its file, if the file's ids are these.
    async fn save(
        &self,
        client: &Client,
        (slot, name): (u32, &str),
        ids: &[u32],
    ) -> Result<Option<Vec<u8>>, CallError> {
        let file = Passing::new(&self.folder, name);
        let (status, body) = act(client, slot, "save", &file.name).await?;
        if status != 200 {
            let why = String::from_utf8_lossy(&body).chars().take(200).collect();
            return Err(CallError::Failed(why));
        }
        let wanted: Vec<u32> = ids.split_last().map_or(&[][..], |(_, but)| but).to_vec();
        blocking(move || {
            let mut opened = fs::File::open(&file.path)
                .map_err(|error| failed(&format!("{}: {error}", file.path.display())))?;
            let length = opened.metadata().map_or(0, |data| data.len());
            let room = usize::try_from(length).unwrap_or(0);
            let mut bytes = blob::head(LAYOUT, Form::Bytes, &[], room);
            let from = bytes.len();
            opened
                .read_to_end(&mut bytes)
                .map_err(|error| failed(&error.to_string()))?;
            let saved = ids_of(bytes.get(from..).unwrap_or_default());
            Ok(saved
                .is_some_and(|saved| saved.starts_with(&wanted))
                .then_some(bytes))
        })
        .await
    }

    /// Restores what a peer's slot held into an idle slot of this server, whose number it gives.
    ///
    /// # Errors
    /// When there is none, or the server does not take it.
    pub(super) async fn put_in(
        &self,
        client: &Client,
        name: &str,
        kv: Bytes,
    ) -> Result<u32, CallError> {
        if ids_of(&kv).is_none() {
            return Err(failed("it is no slot of a llama-server"));
        }
        let idle = list(client).await?.into_iter();
        let mut idle = idle.filter(|slot| !slot.is_processing).map(|slot| slot.id);
        let slot = {
            let mut taken = lock(&self.taken);
            let slot = idle.find(|slot| !taken.contains(slot));
            let slot = slot.ok_or_else(|| failed("no slot is idle"))?;
            taken.insert(slot);
            slot
        };
        let restored = self.restore(client, (slot, name), kv).await;
        if restored.is_err() {
            self.begun(slot);
        }
        restored.map(|()| slot)
    }

    async fn restore(
        &self,
        client: &Client,
        (slot, name): (u32, &str),
        kv: Bytes,
    ) -> Result<(), CallError> {
        let file = Passing::new(&self.folder, name);
        let path = file.path.clone();
        blocking(move || {
            fs::write(&path, &kv).map_err(|error| failed(&format!("{}: {error}", path.display())))
        })
        .await?;
        let (status, body) = act(client, slot, "restore", &file.name).await?;
        if status == 200 {
            return Ok(());
        }
        let why: String = String::from_utf8_lossy(&body).chars().take(200).collect();
        Err(CallError::Failed(why))
    }

    /// What was restored into a slot has begun there, or will not come.
    pub(super) fn begun(&self, slot: u32) {
        lock(&self.taken).remove(&slot);
    }
}

/// A file on its way between node and engine, which goes when this does.
struct Passing {
    name: String,
    path: PathBuf,
}

impl Passing {
    fn new(folder: &Path, name: &str) -> Self {
        let name = format!("{FILES}{name}.bin");
        Self {
            path: folder.join(&name),
            name,
        }
    }
}

impl Drop for Passing {
    fn drop(&mut self) {
        // It may not have been written.
        drop(fs::remove_file(&self.path));
    }
}

/// Removes files that nobody came back for: a server that was busy writes one when its node has long given up.
///
/// # Errors
/// When there is no such folder.
fn sweep(folder: &Path) -> Result<(), CallError> {
    let entries = fs::read_dir(folder);
    let entries = entries.map_err(|error| failed(&format!("{}: {error}", folder.display())))?;
    let now = shoal_gossip::unix_time();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with(FILES));
        let written = entry.metadata().and_then(|data| data.modified()).ok();
        let written = written.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        if ours && written.is_some_and(|written| now.saturating_sub(written) > FORGOTTEN) {
            // Another look may have been quicker.
            drop(fs::remove_file(entry.path()));
        }
    }
    Ok(())
}

fn failed(why: &str) -> CallError {
    CallError::Failed(why.to_owned())
}

async fn list(client: &Client) -> Result<Vec<Slot>, CallError> {
    let told = client.get("/slots", PATIENCE).await;
    let (_, body) = told.ok_or_else(|| failed("it does not tell its slots"))?;
    serde_json::from_slice(&body).map_err(|error| failed(&format!("/slots: {error}")))
}

async fn act(
    client: &Client,
    slot: u32,
    action: &str,
    name: &str,
) -> Result<(u16, Bytes), CallError> {
    let path = format!("/slots/{slot}?action={action}");
    let body = json!({ "filename": name }).to_string();
    let answered = client.post(&path, body.into(), PATIENCE).await;
    answered.map_err(CallError::Failed)
}

/// The ids at the beginning of a slot's file; `None` when it is none. llama.cpp's own files have them plain behind their count;
/// its server puts a mark, a version and their count before them, and the count of what else may stand among them behind.
fn ids_of(file: &[u8]) -> Option<Vec<u32>> {
    let mut words = file
        .chunks_exact(4)
        .map(|word| word.try_into().map_or(0, u32::from_le_bytes));
    let (magic, _version) = (words.next()?, words.next()?);
    let count = words.next()? as usize;
    if magic != MAGIC || count > file.len() / 4 {
        return None;
    }
    let section: Vec<u32> = words.take(count).collect();
    match section[..] {
        _ if section.len() < count => None,
        [u32::MAX, 1, count, ref rest @ ..] => rest.get(..count as usize).map(<[u32]>::to_vec),
        _ => Some(section),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_slots_file_begins_with_its_ids() {
        let mut good = file(&[MAGIC, 4, 2, 11, 12]);
        good.extend(b"state");
        assert_eq!(ids_of(&good), Some(vec![11, 12]));
        assert_eq!(ids_of(&file(&[MAGIC, 4, 0])), Some(Vec::new()));
        let mut served = file(&[MAGIC, 4, 6, u32::MAX, 1, 2, 11, 12, 0]);
        served.extend(b"state");
        assert_eq!(ids_of(&served), Some(vec![11, 12]));
        let short = file(&[MAGIC, 4, 5, u32::MAX, 1, 3, 11, 12]);
        assert_eq!(ids_of(&short), None);
        for bad in [
            file(&[]),
            file(&[MAGIC, 4]),
            file(&[MAGIC + 1, 4, 0]),
            file(&[MAGIC, 4, 3, 1, 2]),
            file(&[MAGIC, 4, u32::MAX, 1]),
        ] {
            assert_eq!(ids_of(&bad), None);
        }
    }

    #[test]
    fn files_that_nobody_comes_back_for_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, age: Duration| {
            let file = fs::File::create(folder.path().join(name)).unwrap();
            let then = SystemTime::UNIX_EPOCH + (shoal_gossip::unix_time() - age);
            file.set_modified(then).unwrap();
        };
        make("shoal-1.bin", FORGOTTEN * 2);
        make("shoal-2.bin", Duration::ZERO);
        make("another", FORGOTTEN * 2);
        sweep(folder.path()).unwrap();
        let left = fs::read_dir(folder.path()).unwrap();
        let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["another", "shoal-2.bin"]);
        assert!(sweep(Path::new("/nonexistent")).is_err());
    }
}
