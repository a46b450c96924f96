//! Writing to the terminal or a pipe.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Prints to standard output. A reader that left early (`shoal status | head`) is no failure.
pub(super) fn print(text: &str) -> ExitCode {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(format_args!("cannot write the output: {error}")),
    }
}

/// Says on standard error why it could not be done.
pub(super) fn fail(reason: impl Display) -> ExitCode {
    eprintln!("shoal: {reason}");
    ExitCode::FAILURE
}

/// A file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {error}")]
pub(super) struct WriteError {
    path: PathBuf,
    error: io::Error,
}

/// Writes a file through a buffer.
///
/// # Errors
/// What the system says, with the file's name.
pub(super) fn write_file(
    path: &Path,
    content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), WriteError> {
    let written = File::create(path).and_then(|file| {
        let mut out = BufWriter::new(file);
        content(&mut out)?;
        out.flush()
    });
    written.map_err(|error| WriteError {
        path: path.to_owned(),
        error,
    })
}
