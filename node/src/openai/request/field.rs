//! Reads one field of a body by type. Every error names the field, what it must be and what it was.

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;

use crate::engine::EngineError;

/// Characters of a wrong value that an error quotes. A body may be megabytes; an error may not.
const QUOTED: usize = 40;

/// The client's mistake.
pub(super) fn bad(param: Option<&str>, message: String) -> EngineError {
    EngineError::BadRequest {
        message,
        param: param.map(str::to_owned),
    }
}

fn mismatch(raw: &RawValue, name: &str, expected: &str) -> EngineError {
    let text = raw.get();
    let got = match kind_of(text) {
        // Short and telling.
        "a number" | "a string" | "a boolean" => {
            let mut quoted: String = text.chars().take(QUOTED).collect();
            if quoted.len() < text.len() {
                quoted.push('…');
            }
            quoted
        }
        kind => kind.to_owned(),
    };
    bad(
        Some(name),
        format!("`{name}` must be {expected}, got {got}"),
    )
}

/// What kind of JSON value a text begins.
pub(super) fn kind_of(text: &str) -> &'static str {
    match text.trim_ascii_start().as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        Some(_) => "a number",
        None => "nothing",
    }
}

/// Whether a value says "without": null, false, zero, or anything empty.
pub(super) fn is_off(raw: &RawValue) -> bool {
    let text = raw.get();
    let inside = |open, close| {
        text.strip_prefix(open)
            .and_then(|rest| rest.strip_suffix(close))
            .is_some_and(|inside: &str| inside.trim_ascii().is_empty())
    };
    matches!(text, "null" | "false" | "0" | "\"\"") || inside('[', ']') || inside('{', '}')
}

/// True or false.
pub(super) fn boolean(raw: &RawValue, name: &str) -> Result<bool, EngineError> {
    serde_json::from_str(raw.get()).map_err(|_| mismatch(raw, name, "true or false"))
}

/// A string.
pub(super) fn text(raw: &RawValue, name: &str) -> Result<String, EngineError> {
    if kind_of(raw.get()) != "a string" {
        return Err(mismatch(raw, name, "a string"));
    }
    // Only an escape can be wrong in what has passed as JSON: half of a surrogate pair.
    serde_json::from_str(raw.get())
        .map_err(|_| mismatch(raw, name, "a string of valid Unicode characters"))
}

/// An integer within bounds. `5.0` is one, as in Python's servers.
pub(super) fn integer(
    raw: &RawValue,
    name: &str,
    low: i128,
    high: i128,
) -> Result<i128, EngineError> {
    let expected = || match (low, high) {
        (_, i128::MAX) => format!("an integer of at least {low}"),
        _ => format!("an integer from {low} to {high}"),
    };
    let value = serde_json::from_str::<Number>(raw.get())
        .ok()
        .and_then(|number| whole(&number));
    match value {
        Some(value) if (low..=high).contains(&value) => Ok(value),
        _ => Err(mismatch(raw, name, &expected())),
    }
}

fn whole(number: &Number) -> Option<i128> {
    if let Some(value) = number.as_i128() {
        return Some(value);
    }
    let value = number.as_f64()?;
    // Beyond 2^53 a float no longer says which integer was meant.
    let exact = value.fract() == 0.0 && value.abs() <= 9_007_199_254_740_992.0;
    exact.then_some(value as i128)
}

/// A finite number within bounds.
pub(super) fn decimal(raw: &RawValue, name: &str, low: f32, high: f32) -> Result<f32, EngineError> {
    let value = serde_json::from_str::<f64>(raw.get()).map(|value| value as f32);
    match value {
        Ok(value) if (low..=high).contains(&value) => Ok(value),
        _ if high == f32::MAX => Err(mismatch(raw, name, "a positive number")),
        _ => Err(mismatch(
            raw,
            name,
            &format!("a number from {low} to {high}"),
        )),
    }
}

/// The fields of small objects inside a body, each as written.
#[derive(Deserialize)]
pub(super) struct Object<'a> {
    #[serde(borrow, rename = "type")]
    pub(super) kind: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) text: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) role: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) content: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) tool_calls: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) include_usage: Option<&'a RawValue>,
}

impl Object<'_> {
    /// Its `type`.
    pub(super) fn kind(&self, name: &str) -> Result<String, EngineError> {
        let name = format!("{name}.type");
        match self.kind {
            Some(kind) => text(kind, &name),
            None => Err(bad(Some(&name), format!("`{name}` is required"))),
        }
    }
}

/// An object.
pub(super) fn object<'a>(raw: &'a RawValue, name: &str) -> Result<Object<'a>, EngineError> {
    if kind_of(raw.get()) != "an object" {
        return Err(mismatch(raw, name, "an object"));
    }
    serde_json::from_str(raw.get())
        .map_err(|error| bad(Some(name), format!("`{name}` cannot be read: {error}")))
}

/// Hands each element of an array to `each` as it is met, so that an array of a million wrong
/// elements costs no more than its first.
pub(super) fn list<'a>(
    raw: &'a RawValue,
    name: &str,
    expected: &str,
    each: impl FnMut(usize, &'a RawValue) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    if kind_of(raw.get()) != "an array" {
        return Err(mismatch(raw, name, expected));
    }
    let mut failure = None;
    let walk = Walk {
        each,
        failure: &mut failure,
    };
    let mut input = serde_json::Deserializer::from_str(raw.get());
    match (walk.deserialize(&mut input), failure) {
        (_, Some(failure)) => Err(failure),
        (Ok(()), None) => Ok(()),
        (Err(error), None) => Err(bad(Some(name), format!("`{name}` cannot be read: {error}"))),
    }
}

struct Walk<'f, F> {
    each: F,
    failure: &'f mut Option<EngineError>,
}

impl<'de, F> DeserializeSeed<'de> for Walk<'_, F>
where
    F: FnMut(usize, &'de RawValue) -> Result<(), EngineError>,
{
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        input.deserialize_seq(self)
    }
}

impl<'de, F> Visitor<'de> for Walk<'_, F>
where
    F: FnMut(usize, &'de RawValue) -> Result<(), EngineError>,
{
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        let mut index = 0;
        while let Some(item) = items.next_element::<&'de RawValue>()? {
            if let Err(failure) = (self.each)(index, item) {
                *self.failure = Some(failure);
                return Err(A::Error::custom("stopped at a wrong element"));
            }
            index += 1;
        }
        Ok(())
    }
}
