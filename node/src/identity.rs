//! Who this node is: an Ed25519 key kept in the data directory, and the lock that keeps a second
//! process from being the same node.
//!
//! Two live nodes with one identity would fight over one record in every view, so the directory is
//! locked before the key is read. The lock is the kernel's (`flock`): it ends with the process, however
//! it ends.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use libp2p::PeerId;
use libp2p::identity::{Keypair, ed25519};
use shoal_gossip::NodeId;

/// Name of the key file inside the data directory: the 32 bytes of the Ed25519 secret, nothing else.
pub const KEY_FILE: &str = "identity.key";

/// Name of the lock file inside the data directory. Empty; only its lock matters.
pub const LOCK_FILE: &str = "lock";

/// Length of an Ed25519 secret (RFC 8032).
const SECRET_BYTES: usize = 32;

/// Why there is no identity. Nothing was changed on disk, except where a variant says so.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The data directory cannot be made or opened.
    #[error(
        "the data directory {path} cannot be used: {source}; give a writable one with --data-dir"
    )]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others than the owner may write into the data directory, and so replace the key.
    #[error(
        "the data directory {path} is writable for others (mode {mode:03o}); run: chmod 700 {path}"
    )]
    OpenDirectory {
        /// Which.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Another process holds the lock.
    #[error(
        "another node uses this data directory ({path}); stop it, or give this one its own --data-dir"
    )]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// The key file cannot be read.
    #[error("the identity key {path} cannot be read: {source}")]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others than the owner may read or write the key file.
    #[error("the identity key {path} is open to others (mode {mode:03o}); run: chmod 600 {path}")]
    OpenKey {
        /// Which.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The key file is not a key.
    #[error(
        "the identity key {path} has {found} bytes instead of {SECRET_BYTES}; restore it, or remove it to become a new node"
    )]
    WrongLength {
        /// Which.
        path: PathBuf,
        /// Its length.
        found: u64,
    },
    /// A new key cannot be stored. A temporary file may be left in the data directory.
    #[error("the identity key {path} cannot be written: {source}")]
    Unwritable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A node's key, its two names, and the lock on the directory they came from.
pub struct Identity {
    keypair: Keypair,
    node: NodeId,
    /// Held as long as the identity is used; `None` for one that lives in memory only.
    _lock: Option<File>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("node", &self.node)
            .field("peer_id", &self.peer_id())
            .finish_non_exhaustive()
    }
}

impl Identity {
    /// Locks `data_dir` and reads its key; makes both if they do not exist.
    ///
    /// # Errors
    /// See [`IdentityError`].
    pub fn open(data_dir: &Path) -> Result<Self, IdentityError> {
        make_directory(data_dir)?;
        let lock = lock_directory(data_dir)?;
        let path = data_dir.join(KEY_FILE);
        let keypair = match read_secret(&path)? {
            Some(secret) => secret,
            None => create_secret(data_dir, &path)?,
        };
        Ok(Self::of(Keypair::from(keypair), Some(lock)))
    }

    /// A fresh identity that is kept nowhere, for tests and the simulator.
    pub fn ephemeral() -> Self {
        Self::of(Keypair::generate_ed25519(), None)
    }

    fn of(keypair: Keypair, lock: Option<File>) -> Self {
        let node = NodeId::of_peer(&keypair.public().to_peer_id().to_bytes());
        Self {
            keypair,
            node,
            _lock: lock,
        }
    }

    /// The key; proves who this node is to control and stream planes.
    pub fn keypair(&self) -> &Keypair {
        &self.keypair
    }

    /// The long name: the public key itself, as libp2p shows it.
    pub fn peer_id(&self) -> PeerId {
        self.keypair.public().to_peer_id()
    }

    /// The short name, derived from the long one.
    pub fn node_id(&self) -> NodeId {
        self.node
    }
}

fn make_directory(path: &Path) -> Result<(), IdentityError> {
    let unusable = |source| IdentityError::Directory {
        path: path.to_owned(),
        source,
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(unusable)?;
    let mode = fs::metadata(path).map_err(unusable)?.mode() & 0o777;
    if mode & 0o022 != 0 {
        return Err(IdentityError::OpenDirectory {
            path: path.to_owned(),
            mode,
        });
    }
    Ok(())
}

fn lock_directory(path: &Path) -> Result<File, IdentityError> {
    let unusable = |source| IdentityError::Directory {
        path: path.to_owned(),
        source,
    };
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path.join(LOCK_FILE))
        .map_err(unusable)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(IdentityError::InUse {
            path: path.to_owned(),
        }),
        Err(TryLockError::Error(source)) => Err(unusable(source)),
    }
}

/// The stored key; `None` when there is no file.
fn read_secret(path: &Path) -> Result<Option<ed25519::Keypair>, IdentityError> {
    let unreadable = |source| IdentityError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    let metadata = file.metadata().map_err(unreadable)?;
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::OpenKey {
            path: path.to_owned(),
            mode,
        });
    }
    let wrong_length = || IdentityError::WrongLength {
        path: path.to_owned(),
        found: metadata.len(),
    };
    if metadata.len() != SECRET_BYTES as u64 {
        return Err(wrong_length());
    }
    let mut secret = [0; SECRET_BYTES];
    file.read_exact(&mut secret).map_err(unreadable)?;
    // The conversion wipes `secret`; it fails on a wrong length only.
    let secret = ed25519::SecretKey::try_from_bytes(&mut secret).map_err(|_| wrong_length())?;
    Ok(Some(ed25519::Keypair::from(secret)))
}

/// Makes a key and stores it whole or not at all: a crash leaves a temporary file and no key, never
/// half a key. The caller holds the lock, so nobody else writes here.
fn create_secret(directory: &Path, path: &Path) -> Result<ed25519::Keypair, IdentityError> {
    let keypair = ed25519::Keypair::generate();
    let store = || -> io::Result<()> {
        let temporary = directory.join(format!("{KEY_FILE}.new"));
        match fs::remove_file(&temporary) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let mut file = OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(keypair.secret().as_ref())?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(directory)?.sync_all()
    };
    store().map_err(|source| IdentityError::Unwritable {
        path: path.to_owned(),
        source,
    })?;
    Ok(keypair)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_new_directory_gets_a_key_and_keeps_it() {
        let home = tempfile::tempdir().unwrap();
        let data = home.path().join("a/b");
        let first = Identity::open(&data).unwrap();
        let (peer, node) = (first.peer_id(), first.node_id());
        assert_eq!(mode_of(&data), 0o700);
        assert_eq!(mode_of(&data.join(KEY_FILE)), 0o600);
        assert_eq!(node, NodeId::of_peer(&peer.to_bytes()));
        drop(first);

        let second = Identity::open(&data).unwrap();
        assert_eq!((second.peer_id(), second.node_id()), (peer, node));
        assert!(!data.join("identity.key.new").exists());
    }

    #[test]
    fn a_second_node_on_one_directory_is_refused_until_the_first_ends() {
        let home = tempfile::tempdir().unwrap();
        let first = Identity::open(home.path()).unwrap();
        let error = Identity::open(home.path()).unwrap_err();
        assert!(matches!(error, IdentityError::InUse { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("another node uses this data dir")
        );
        drop(first);
        Identity::open(home.path()).unwrap();
    }

    #[test]
    fn a_key_that_others_can_read_is_refused_with_the_remedy() {
        let home = tempfile::tempdir().unwrap();
        drop(Identity::open(home.path()).unwrap());
        let key = home.path().join(KEY_FILE);
        fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
        let text = Identity::open(home.path()).unwrap_err().to_string();
        assert!(
            text.contains("mode 640") && text.contains("chmod 600"),
            "{text}"
        );
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused_with_the_remedy() {
        let home = tempfile::tempdir().unwrap();
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let text = Identity::open(home.path()).unwrap_err().to_string();
        assert!(text.contains("chmod 700"), "{text}");
    }

    #[test]
    fn a_truncated_key_is_refused_and_left_alone() {
        let home = tempfile::tempdir().unwrap();
        drop(Identity::open(home.path()).unwrap());
        let key = home.path().join(KEY_FILE);
        let whole = fs::read(&key).unwrap();
        fs::write(&key, &whole[..31]).unwrap();
        let text = Identity::open(home.path()).unwrap_err().to_string();
        assert!(text.contains("31 bytes instead of 32"), "{text}");
        assert_eq!(fs::read(&key).unwrap(), whole[..31]);
    }

    #[test]
    fn a_key_that_is_a_directory_is_unreadable_and_not_replaced() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join(KEY_FILE)).unwrap();
        fs::set_permissions(
            home.path().join(KEY_FILE),
            fs::Permissions::from_mode(0o700),
        )
        .unwrap();
        assert!(Identity::open(home.path()).is_err());
        assert!(home.path().join(KEY_FILE).is_dir());
    }

    #[test]
    fn what_a_crash_left_of_an_unfinished_key_is_swept_away() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("identity.key.new"), b"half").unwrap();
        Identity::open(home.path()).unwrap();
        assert!(!home.path().join("identity.key.new").exists());
    }

    #[test]
    fn debug_output_holds_no_secret() {
        let identity = Identity::ephemeral();
        let text = format!("{identity:?}");
        assert!(text.contains(&identity.node_id().to_string()));
        assert!(!text.contains("secret"), "{text}");
    }
}
