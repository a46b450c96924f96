//! `shoal keygen`: make a cluster key.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use shoal_gossip::ClusterKey;

use crate::cli::output::{fail, print};

/// Flags of `shoal keygen`.
#[derive(Debug, Args)]
pub(super) struct KeygenArgs {
    /// File to write the key to, readable by its owner only; never overwritten. Without it the key is printed.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Runs `shoal keygen`.
pub(super) fn run(args: &KeygenArgs) -> ExitCode {
    let key = match ClusterKey::generate() {
        Ok(key) => format!("{}\n", key.to_text()),
        Err(error) => return fail(format_args!("{error}; nothing was written")),
    };
    match &args.out {
        None => print(&key),
        Some(path) => match write(path, &key) {
            Ok(()) => print(&format!(
                "wrote a new cluster key to {}; give the same file to every node with --cluster-key-file\n",
                path.display()
            )),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => fail(format_args!(
                "{} exists and is left as it is: nodes that use it would lose the mesh; name another file",
                path.display()
            )),
            Err(error) => fail(format_args!("cannot write {}: {error}", path.display())),
        },
    }
}

/// Makes the file, readable by its owner only, or fails if there is one.
fn write(path: &Path, key: &str) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(key.as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn two_keys_differ_and_are_64_hex_digits() {
        let key = || ClusterKey::generate().unwrap().to_text();
        let (one, two) = (key(), key());
        assert_ne!(one, two);
        assert_eq!(one.len(), 64);
        assert!(one.trim().bytes().all(|c| c.is_ascii_hexdigit()), "{one}");
    }

    #[test]
    fn a_key_file_is_private_and_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        write(&path, "one\n").unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let again = write(&path, "two\n").unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\n");
    }
}
