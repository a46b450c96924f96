//! Writing to the terminal or a pipe.

use std::fmt::Display;
use std::io::{self, Write};
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
