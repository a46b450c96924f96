//! Looking at the files a configuration names, for `shoal node --check`.
//!
//! What is found is true at this moment only; the node itself meets the same troubles with the same
//! files when it starts, and says so then.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use shoal_gossip::{ClusterKey, KeyRing};

use crate::config::{EngineKind, KeySource, NodeConfig};

/// First bytes of every GGUF file.
const GGUF_MAGIC: &[u8; 4] = b"GGUF";

/// Largest file of keys that is read: some hundred API keys. A path to something huge must not fill
/// the memory.
const MAX_KEY_FILE: u64 = 64 * 1024;

/// Everything that keeps this configuration from running here and now, each with what to do. Writes
/// nothing and opens no socket.
pub fn inspect(config: &NodeConfig) -> Vec<String> {
    let mut problems = Vec::new();
    data_dir(&config.data_dir, &mut problems);
    match &config.mesh.key {
        KeySource::None => {}
        KeySource::File(path) => key_file("--cluster-key-file", path, &mut problems),
        KeySource::Text(text) => {
            if let Err(error) = text.parse::<ClusterKey>() {
                problems.push(format!("SHOAL_CLUSTER_KEY: {error}"));
            }
        }
    }
    for path in &config.mesh.accepted_keys {
        key_file("--cluster-key-accept-file", path, &mut problems);
    }
    match &config.engine.kind {
        EngineKind::Llama(llama) => model(&llama.model, &mut problems),
        EngineKind::Http(http) => {
            if let Some(path) = &http.key_file
                && let Err(error) = fs::read_to_string(path)
            {
                problems.push(said("--engine-api-key-file", path, error));
            }
        }
        EngineKind::Sim(_) => {}
    }
    for (flag, path) in [
        ("--api-key-file", &config.http.api_key_file),
        ("--operator-key-file", &config.http.operator_key_file),
    ] {
        if let Some(path) = path {
            api_keys(flag, path, &mut problems);
        }
    }
    if let Some(tls) = &config.http.tls {
        let chain = CertificateDer::pem_file_iter(&tls.cert)
            .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>());
        match chain {
            Ok(chain) if !chain.is_empty() => {}
            Ok(_) => problems.push(said("--tls-cert", &tls.cert, "it holds no certificate")),
            Err(error) => problems.push(said("--tls-cert", &tls.cert, error)),
        }
        if let Err(error) = PrivateKeyDer::from_pem_file(&tls.key) {
            problems.push(said("--tls-key", &tls.key, error));
        }
    }
    problems
}

fn said(flag: &str, path: &Path, what: impl std::fmt::Display) -> String {
    format!("{flag} {}: {what}", path.display())
}

/// The directory, or the nearest one above it that exists, must be one we can make files in.
fn data_dir(path: &Path, problems: &mut Vec<String>) {
    let existing = path.ancestors().find_map(|above| {
        let above = if above.as_os_str().is_empty() {
            Path::new(".")
        } else {
            above
        };
        fs::metadata(above).ok().map(|metadata| (above, metadata))
    });
    match existing {
        Some((above, metadata)) if !metadata.is_dir() => {
            problems.push(said(
                "--data-dir",
                path,
                format_args!("{} is not a directory", above.display()),
            ));
        }
        Some((above, metadata)) if metadata.permissions().readonly() => {
            problems.push(said(
                "--data-dir",
                path,
                format_args!("{} is not writable", above.display()),
            ));
        }
        Some(_) => {}
        None => problems.push(said("--data-dir", path, "no directory above it exists")),
    }
}

fn model(path: &Path, problems: &mut Vec<String>) {
    let magic = open(path).and_then(|mut file| {
        let mut magic = [0; GGUF_MAGIC.len()];
        file.read_exact(&mut magic)?;
        Ok(magic)
    });
    match magic {
        Ok(magic) if magic == *GGUF_MAGIC => {}
        Ok(_) => problems.push(said("--model", path, "not a GGUF file")),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            problems.push(said("--model", path, "not a GGUF file, it is too short"));
        }
        Err(error) => problems.push(said("--model", path, error)),
    }
}

fn key_file(flag: &str, path: &Path, problems: &mut Vec<String>) {
    if let Err(error) = KeyRing::read(path) {
        problems.push(said(flag, path, error));
    }
}

fn api_keys(flag: &str, path: &Path, problems: &mut Vec<String>) {
    match small_text(path) {
        Ok(text) if text.lines().any(|line| !line.trim().is_empty()) => {}
        Ok(_) => problems.push(said(
            flag,
            path,
            "it names no key, so nobody could get in; put one key on each line",
        )),
        Err(error) => problems.push(said(flag, path, error)),
    }
}

/// Opens a regular file; opening a directory works on Unix and only reading it fails, with a worse text.
fn open(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        return Err(io::Error::other("it is a directory"));
    }
    Ok(file)
}

fn small_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.take(MAX_KEY_FILE).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::sample;

    const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";

    fn check(change: impl FnOnce(&mut NodeConfig, &Path), expected: Option<&str>) {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model.gguf");
        fs::write(&model, b"GGUF and more").unwrap();
        let mut config = sample(&["--data-dir", "data", "--model", "model.gguf"]);
        config.data_dir = dir.path().join("data");
        if let EngineKind::Llama(llama) = &mut config.engine.kind {
            llama.model = model;
        }
        change(&mut config, dir.path());
        let problems = inspect(&config);
        match expected {
            None => assert_eq!(problems, [""; 0]),
            Some(expected) => {
                assert_eq!(problems.len(), 1, "{problems:?}");
                assert!(problems[0].contains(expected), "{problems:?}");
            }
        }
    }

    fn write(dir: &Path, name: &str, text: &str) -> std::path::PathBuf {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn good_files_raise_nothing() {
        check(
            |config, dir| {
                config.mesh.key = KeySource::File(write(dir, "key", &format!("# new\n{KEY}\n\n")));
                config.http.api_key_file = Some(write(dir, "api", "sk-1\n\nsk-2\n"));
            },
            None,
        );
        check(
            |config, _| config.mesh.key = KeySource::Text(KEY.to_owned()),
            None,
        );
    }

    #[test]
    fn bad_files_are_named_with_the_flag_that_named_them() {
        let model = |config: &mut NodeConfig, path| {
            if let EngineKind::Llama(llama) = &mut config.engine.kind {
                llama.model = path;
            }
        };
        check(
            |config, dir| model(config, dir.join("none")),
            Some("--model"),
        );
        check(
            |config, dir| model(config, dir.to_owned()),
            Some("directory"),
        );
        check(
            |config, dir| model(config, write(dir, "m", "GG")),
            Some("too short"),
        );
        check(
            |config, dir| model(config, write(dir, "m", "PK\u{3}\u{4}")),
            Some("not a GGUF file"),
        );
        check(
            |config, dir| config.mesh.key = KeySource::File(write(dir, "key", "hello")),
            Some("--cluster-key-file"),
        );
        check(
            |config, dir| config.mesh.accepted_keys = vec![dir.join("none")],
            Some("--cluster-key-accept-file"),
        );
        check(
            |config, _| config.mesh.key = KeySource::Text("0".to_owned()),
            Some("SHOAL_CLUSTER_KEY"),
        );
        check(
            |config, dir| config.http.api_key_file = Some(write(dir, "api", "\n \n")),
            Some("names no key"),
        );
        check(
            |config, dir| config.data_dir = write(dir, "file", "").join("data"),
            Some("not a directory"),
        );
    }

    #[test]
    fn a_certificate_without_pem_in_it_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let empty = write(dir.path(), "empty.pem", "");
        check(
            |config, dir| {
                let key = write(
                    dir,
                    "key.pem",
                    "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n",
                );
                config.http.tls = Some(crate::config::TlsFiles { cert: empty, key });
            },
            Some("--tls-cert"),
        );
    }
}
