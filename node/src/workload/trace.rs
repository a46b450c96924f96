//! Requests as they were recorded: a CSV file with times and lengths, plain or packed with gzip.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use flate2::bufread::MultiGzDecoder;
use shoal_gossip::Tokens;

use crate::workload::{Arrival, WorkloadError};

/// Column of arrival times: seconds from any start, not falling.
const ARRIVAL: &str = "arrival_s";
/// Column of prompt lengths.
const PROMPT: &str = "prompt_tokens";
/// Column of output lengths.
const OUTPUT: &str = "output_tokens";

/// What is read of a trace at most.
const BOUNDS: Bounds = Bounds {
    // 120 MB as arrivals; a day of the busiest public trace (40 requests a second) is 3.5 million.
    rows: 5_000_000,
    // Block ids of a prompt of a million tokens take 20 KB.
    line: 64 << 10,
    // 200 bytes a row.
    bytes: 1 << 30,
};

/// Latest arrival time, in seconds: 30,000 years. Beyond it a column holds something else.
const MAX_SECONDS: f64 = 1e12;

/// First bytes of a gzip file (RFC 1952, 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// What to do with a trace that is too long.
const SHORTER: &str = "split it, or set `requests` to take its first rows";

#[derive(Clone, Copy, Debug)]
struct Bounds {
    rows: usize,
    line: u64,
    bytes: u64,
}

/// The first rows of a trace, `most` of them at most, played at `speed` times the recorded rate.
///
/// The first row arrives at zero, so that a piece cut out of a long trace does not begin with hours of silence.
/// Further columns are ignored, as are empty lines; the order of the columns is free.
///
/// # Errors
/// If the file or one of its rows is unsound: nothing is skipped silently.
pub(super) fn read(path: &Path, most: u64, speed: f64) -> Result<Vec<Arrival>, WorkloadError> {
    let opened = File::open(path).and_then(|file| unpacked(BufReader::new(file)));
    let reader = opened.map_err(|error| WorkloadError::File {
        path: path.to_owned(),
        error,
    })?;
    let mut lines = Lines::new(reader, BOUNDS);
    arrivals(&mut lines, most, speed).map_err(|fault| WorkloadError::Trace {
        path: path.to_owned(),
        line: lines.number,
        fault,
    })
}

/// The text of a file, unpacked if it is packed. The bounds are those of the text.
fn unpacked<'a>(mut file: impl BufRead + 'a) -> io::Result<Box<dyn BufRead + 'a>> {
    if file.fill_buf()?.starts_with(&GZIP) {
        Ok(Box::new(BufReader::new(MultiGzDecoder::new(file))))
    } else {
        Ok(Box::new(file))
    }
}

fn arrivals(
    lines: &mut Lines<impl BufRead>,
    most: u64,
    speed: f64,
) -> Result<Vec<Arrival>, String> {
    let bounds = lines.bounds;
    let columns = match lines.next()? {
        Some(header) => Columns::find(header)?,
        None => return Err("the trace is empty".to_owned()),
    };
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let mut arrivals = Vec::new();
    let (mut first, mut last) = (None, 0.0);
    while arrivals.len() < most {
        let Some(line) = lines.next()? else { break };
        if arrivals.len() == bounds.rows {
            return Err(format!(
                "the trace has more than {} rows; {SHORTER}",
                bounds.rows
            ));
        }
        let row = columns.row(line)?;
        if row.seconds < last {
            return Err(format!(
                "the row arrives before the row above; sort the trace by {ARRIVAL}"
            ));
        }
        last = row.seconds;
        let seconds = (row.seconds - *first.get_or_insert(row.seconds)) / speed;
        arrivals.push(Arrival {
            at: Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX),
            prompt: row.prompt,
            output: row.output,
        });
    }
    if arrivals.is_empty() {
        return Err("the trace has no rows".to_owned());
    }
    Ok(arrivals)
}

/// Where the needed columns are.
#[derive(Clone, Copy, Debug)]
struct Columns {
    arrival: usize,
    prompt: usize,
    output: usize,
    count: usize,
}

struct Row {
    seconds: f64,
    prompt: Tokens,
    output: Tokens,
}

impl Columns {
    fn find(header: &str) -> Result<Self, String> {
        // Spreadsheets put a byte order mark in front.
        let header = header.trim_start_matches('\u{feff}');
        let find = |name: &str| {
            let place = header.split(',').position(|found| found.trim() == name);
            place.ok_or_else(|| {
                format!("the header must name {ARRIVAL}, {PROMPT} and {OUTPUT}, with commas between; {name} is missing")
            })
        };
        Ok(Self {
            arrival: find(ARRIVAL)?,
            prompt: find(PROMPT)?,
            output: find(OUTPUT)?,
            count: header.split(',').count(),
        })
    }

    fn row(&self, line: &str) -> Result<Row, String> {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        if fields.len() != self.count {
            return Err(format!(
                "the row has {} fields and the header {} (commas within a field are not understood)",
                fields.len(),
                self.count
            ));
        }
        let field = |index: usize| fields.get(index).copied().unwrap_or_default();
        Ok(Row {
            seconds: seconds(field(self.arrival))?,
            prompt: tokens(PROMPT, field(self.prompt))?,
            output: tokens(OUTPUT, field(self.output))?,
        })
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok();
    parsed
        .filter(|seconds| (0.0..=MAX_SECONDS).contains(seconds))
        .ok_or_else(|| format!("`{text}` is no arrival time: seconds from 0 to {MAX_SECONDS:e}"))
}

fn tokens(column: &str, text: &str) -> Result<Tokens, String> {
    let parsed = text.parse().ok().filter(|tokens| *tokens > 0);
    parsed.map(Tokens).ok_or_else(|| {
        format!("`{text}` is no {column}: a whole number from 1 (leave out requests that failed)")
    })
}

/// Lines that are not empty, with their number, within bounds.
struct Lines<R> {
    reader: R,
    bounds: Bounds,
    number: u64,
    bytes: u64,
    line: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    fn new(reader: R, bounds: Bounds) -> Self {
        Self {
            reader,
            bounds,
            number: 0,
            bytes: 0,
            line: Vec::new(),
        }
    }

    fn next(&mut self) -> Result<Option<&str>, String> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut bounded = (&mut self.reader).take(self.bounds.line + 1);
            let read = bounded
                .read_until(b'\n', &mut self.line)
                .map_err(|error| format!("cannot read: {error}"))?;
            if read == 0 {
                return Ok(None);
            }
            self.within_bounds()?;
            if !self.line.trim_ascii().is_empty() {
                break;
            }
        }
        match str::from_utf8(&self.line) {
            Ok(line) => Ok(Some(line)),
            Err(_) => Err("this is not text".to_owned()),
        }
    }

    fn within_bounds(&mut self) -> Result<(), String> {
        let length = u64::try_from(self.line.len()).unwrap_or(u64::MAX);
        self.bytes = self.bytes.saturating_add(length);
        if length > self.bounds.line {
            return Err(format!("the line is above {} bytes", self.bounds.line));
        }
        if self.bytes > self.bounds.bytes {
            return Err(format!(
                "the trace is above {} bytes; {SHORTER}",
                self.bounds.bytes
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
