//! Writing to the terminal or a pipe.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use shoal_gossip::{Clock, MonotonicClock, Timestamp};

use crate::report::Progress;

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

/// Time between two lines of progress in a file or a pipe, which keep all of them.
const PAUSE: Duration = Duration::from_secs(10);

/// The same on a terminal, where each takes the place of the one before.
const TERMINAL_PAUSE: Duration = Duration::from_millis(200);

/// Tells on standard error how far something long has come.
#[derive(Debug)]
pub(super) struct Teller {
    clock: MonotonicClock,
    progress: Progress,
    total: usize,
    terminal: bool,
    shown: bool,
}

impl Teller {
    /// Of something that has so many parts.
    pub(super) fn new(total: usize) -> Self {
        let terminal = io::stderr().is_terminal();
        Self {
            clock: MonotonicClock::start(),
            progress: Progress::new(if terminal { TERMINAL_PAUSE } else { PAUSE }),
            total,
            terminal,
            shown: false,
        }
    }

    /// So many parts are done.
    pub(super) fn tell(&mut self, done: usize) {
        let now = self.clock.now().since(Timestamp::ZERO);
        let Some(line) = self.progress.line(now, done as u64, self.total as u64) else {
            return;
        };
        self.shown = true;
        if self.terminal {
            eprint!("\r{line}\x1b[K");
        } else {
            eprintln!("{line}");
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        if self.terminal && self.shown {
            eprint!("\r\x1b[K");
        }
    }
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
