//! Reading of Prometheus text, as engines answer `/metrics`.
//!
//! One pass over a text of some 100 KB finds the few names that are wanted; nothing is allocated
//! for the other lines. What cannot be read is unknown, never zero.

use std::borrow::Cow;

/// Samples kept of one text. A vLLM shows 14 for each of its data-parallel engines, so this is
/// room for some 290 of them; a text with more tells nothing, since a part of a sum is a wrong sum.
const MAX_KEPT: usize = 4096;

/// The wanted samples of one text.
#[derive(Debug)]
pub(super) struct Samples<'a> {
    kept: Vec<Sample<'a>>,
}

/// One line: a series and its value.
#[derive(Debug)]
pub(super) struct Sample<'a> {
    name: &'a str,
    /// As written between the braces.
    labels: &'a str,
    /// `None` when it is not a finite number of at least zero.
    value: Option<f64>,
}

impl<'a> Samples<'a> {
    /// Keeps the lines whose name is one of `wanted`. Comments, junk and all else are skipped.
    pub(super) fn of(text: &'a str, wanted: &[&str]) -> Self {
        let mut kept = Vec::with_capacity(wanted.len());
        for sample in text.lines().filter_map(|line| Sample::read(line, wanted)) {
            if kept.len() == MAX_KEPT {
                kept.clear();
                break;
            }
            kept.push(sample);
        }
        Self { kept }
    }

    /// The samples of one name, in the order of the text.
    pub(super) fn each(&self, name: &str) -> impl Iterator<Item = &Sample<'a>> {
        self.kept.iter().filter(move |sample| sample.name == name)
    }

    /// Whether the name occurs, with whatever value.
    pub(super) fn has(&self, name: &str) -> bool {
        self.each(name).next().is_some()
    }

    /// Sum over all label sets. `None` when there is none or one has no usable value.
    pub(super) fn sum(&self, name: &str) -> Option<f64> {
        self.fold(name, |sum, value| sum + value)
    }

    /// Largest over all label sets. `None` as for [`Samples::sum`].
    pub(super) fn max(&self, name: &str) -> Option<f64> {
        self.fold(name, f64::max)
    }

    /// A label of the first sample of that name, for series that tell by their labels.
    pub(super) fn label(&self, name: &str, label: &str) -> Option<Cow<'a, str>> {
        self.each(name).next()?.label(label)
    }

    fn fold(&self, name: &str, join: impl Fn(f64, f64) -> f64) -> Option<f64> {
        let mut values = self.each(name).map(|sample| sample.value);
        let first = values.next()??;
        let all = values.try_fold(first, |so_far, value| Some(join(so_far, value?)))?;
        all.is_finite().then_some(all)
    }
}

impl<'a> Sample<'a> {
    /// `None` when the line is not of a wanted name.
    fn read(line: &'a str, wanted: &[&str]) -> Option<Self> {
        let line = line.trim_start();
        let end = line
            .bytes()
            .position(|byte| !(byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':'))
            .unwrap_or(line.len());
        let (name, rest) = line.split_at(end);
        if !wanted.contains(&name) {
            return None;
        }
        let (labels, value) = match rest.bytes().next() {
            // A label set that is cut off leaves neither labels nor a value.
            Some(b'{') => match closing_brace(rest) {
                Some(end) => (&rest[1..end], &rest[end + 1..]),
                None => ("", ""),
            },
            Some(b' ' | b'\t') | None => ("", rest),
            Some(_) => return None,
        };
        Some(Self {
            name,
            labels,
            value: number(value),
        })
    }

    /// The value; `None` when it is no finite number of at least zero.
    pub(super) fn value(&self) -> Option<f64> {
        self.value
    }

    /// A label's value, escapes resolved.
    pub(super) fn label(&self, wanted: &str) -> Option<Cow<'a, str>> {
        let mut rest = self.labels;
        loop {
            let (name, after) = rest.split_once('=')?;
            let name = name.trim_matches([' ', '\t', ',']);
            let quoted = after.trim_start().strip_prefix('"')?;
            let end = closing_quote(quoted)?;
            if name == wanted {
                return Some(unescaped(&quoted[..end]));
            }
            rest = &quoted[end + 1..];
        }
    }
}

/// The first word of what follows a series; a timestamp or an exemplar may follow it.
fn number(text: &str) -> Option<f64> {
    let value: f64 = text.split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some(value)
}

/// Where the braces that `text` begins with close. Braces inside quotes are text.
fn closing_brace(text: &str) -> Option<usize> {
    let mut quoted = false;
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' if quoted => {
                bytes.next();
            }
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(at),
            _ => {}
        }
    }
    None
}

/// Where the quote that was opened before `text` closes.
fn closing_quote(text: &str) -> Option<usize> {
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => {
                bytes.next();
            }
            b'"' => return Some(at),
            _ => {}
        }
    }
    None
}

fn unescaped(text: &str) -> Cow<'_, str> {
    if !text.contains('\\') {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        if char != '\\' {
            plain.push(char);
            continue;
        }
        match chars.next() {
            Some('n') => plain.push('\n'),
            Some(escaped @ ('\\' | '"')) => plain.push(escaped),
            // Not an escape that the format knows: kept as it is.
            Some(other) => plain.extend(['\\', other]),
            None => plain.push('\\'),
        }
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests;
