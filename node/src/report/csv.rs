//! One line a request, as RFC 4180 has it.

use std::io::{self, Write};
use std::time::Duration;

use super::{Outcome, Record};

/// The columns. Times are in seconds: `arrival_s` since the start of the run, the others since the
/// arrival. `outcome` is `finished` or the kind of failure. What is not known is empty.
pub const HEADER: &str = "arrival_s,prompt_tokens,output_tokens,outcome,ttft_s,tbt_s,e2e_s,longest_gap_s,\
                          entry,host,moves,preemptions,preemption_loss_s";

/// Writes [`HEADER`] and the records. Give it a buffered writer.
///
/// # Errors
/// Those of the writer.
pub fn write(mut out: impl Write, records: &[Record]) -> io::Result<()> {
    write!(out, "{HEADER}\r\n")?;
    for record in records {
        let outcome = match &record.outcome {
            Outcome::Finished => "finished",
            Outcome::Failed(kind) => kind,
        };
        let fields = [
            seconds(record.at),
            record.prompt.to_string(),
            record.output.to_string(),
            quoted(outcome),
            known(record.first.map(seconds)),
            known(record.tbt().map(|tbt| format!("{tbt:.6}"))),
            known(record.end.map(seconds)),
            seconds(record.longest_gap),
            record.entry.to_string(),
            known(record.host.map(|host| host.to_string())),
            record.moves.to_string(),
            record.preemptions.to_string(),
            seconds(record.preemption_loss),
        ];
        write!(out, "{}\r\n", fields.join(","))?;
    }
    out.flush()
}

fn seconds(time: Duration) -> String {
    format!("{:.6}", time.as_secs_f64())
}

fn known(text: Option<String>) -> String {
    text.unwrap_or_default()
}

/// A field as it is, or in quotes where it holds a quote, a comma or a line break.
fn quoted(field: &str) -> String {
    match field.contains(['"', ',', '\r', '\n']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_owned(),
    }
}
