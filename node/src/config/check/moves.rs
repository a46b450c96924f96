//! Settings of the hand-over.

use std::time::Duration;

use super::{within, wrong};
use crate::config::{ConfigError, MovesSettings, RawMoves};

pub(super) fn check(raw: &RawMoves) -> Result<MovesSettings, ConfigError> {
    let interval = match raw.reschedule_interval_ms {
        0 => None,
        ms => Some(Duration::from_millis(within(
            "--reschedule-interval-ms",
            ms,
            10..=60_000,
        )?)),
    };
    let below = within("--move-below", raw.move_below, 0..=1_000_000)?;
    let above = within("--move-above", raw.move_above, 1..=2_000_000)?;
    if above <= below {
        return Err(wrong(
            "--move-above",
            format!(
                "{above} is not more than the {below} of --move-below, so requests would move to and fro"
            ),
            format!(
                "give at least {}, better three times --move-below",
                below + 1
            ),
        ));
    }
    let slots = |flag, count| within(flag, count, 1..=256).map(|count| count as usize);
    let mib = within(
        "--move-mib-per-second",
        raw.move_mib_per_second,
        1..=1_000_000,
    )?;
    Ok(MovesSettings {
        interval,
        below,
        above,
        slots_out: slots("--moves-out", raw.moves_out)?,
        slots_in: slots("--moves-in", raw.moves_in)?,
        bytes_per_second: u64::from(mib) * 1024 * 1024,
    })
}
