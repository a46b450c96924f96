//! Setting up what `tracing` events become.

use std::env;
use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogSettings};

/// Sends events to standard error from now on. Colour only on a terminal, and never under `NO_COLOR`.
///
/// # Errors
/// The filter cannot be read, or logging was set up before; says which.
pub(super) fn start(settings: &LogSettings) -> Result<(), String> {
    let filter = EnvFilter::try_new(&settings.filter).map_err(|error| error.to_string())?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    let installed = match settings.format {
        LogFormat::Json => builder.json().try_init(),
        LogFormat::Text => {
            let muted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
            builder
                .with_ansi(!muted && io::stderr().is_terminal())
                .try_init()
        }
    };
    installed.map_err(|error| error.to_string())
}
