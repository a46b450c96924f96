//! From a demo server's body to one for `/v1/completions`: what is not named here stays byte for byte as it came.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use shoal_gossip::ModelFacts;

use crate::api::error::ApiError;
use crate::frontend::HomeError;
use crate::openai::Sketch;

/// What the mesh is asked where a body is silent, as vLLM's `SamplingParams` has it: the defaults of engines differ.
const DEFAULTS: [(&str, &str); 2] = [("max_tokens", "16"), ("temperature", "1.0")];

/// Models that an error names at most.
const NAMED_MODELS: usize = 20;

/// The fields that decide, each as written, `null` too.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow, default, deserialize_with = "written")]
    model: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    stream: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    stream_options: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    temperature: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    n: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    best_of: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    use_beam_search: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "written")]
    echo: Option<&'a RawValue>,
}

fn written<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

fn is_null(raw: &RawValue) -> bool {
    raw.get() == "null"
}

/// Whether a body is in the form that SGLang's own `/generate` takes.
pub(super) fn is_native(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Native<'a> {
        #[serde(borrow)]
        text: Option<&'a RawValue>,
        #[serde(borrow)]
        input_ids: Option<&'a RawValue>,
        #[serde(borrow)]
        sampling_params: Option<&'a RawValue>,
    }
    let is_object = body.trim_ascii_start().starts_with(b"{");
    is_object
        && serde_json::from_slice(body).is_ok_and(|native: Native<'_>| {
            native.text.is_some() || native.input_ids.is_some() || native.sampling_params.is_some()
        })
}

/// A body as far as it is read here.
pub(super) struct Wish<'a> {
    body: &'a str,
    fields: Fields<'a>,
    pub(super) prompt: String,
    pub(super) stream: bool,
}

impl<'a> Wish<'a> {
    /// Reads a body.
    pub(super) fn read(body: &'a Bytes) -> Result<Self, ApiError> {
        // Whatever is wrong with it as JSON is told as everywhere.
        Sketch::read(body)?;
        let unread = |error| ApiError::bad_request(format!("the body cannot be read: {error}"));
        let fields: Fields<'_> = serde_json::from_slice(body).map_err(unread)?;
        let wrong = |name: &str, must: &str| {
            ApiError::bad_request(format!("`{name}` {must}")).blaming(name)
        };
        let prompt = match fields.prompt.filter(|raw| !is_null(raw)) {
            None => return Err(wrong("prompt", "is required")),
            // The answer repeats it, and of ids nobody here knows the text.
            Some(raw) => {
                serde_json::from_str(raw.get()).map_err(|_| wrong("prompt", "must be a string"))?
            }
        };
        let stream: Option<bool> = match fields.stream {
            None => None,
            Some(raw) => serde_json::from_str(raw.get())
                .map_err(|_| wrong("stream", "must be true or false"))?,
        };
        for (name, raw) in [("n", fields.n), ("best_of", fields.best_of)] {
            if raw.is_some_and(|raw| !is_null(raw) && raw.get() != "1") {
                return Err(wrong(
                    name,
                    "must be 1: one answer per request is supported",
                ));
            }
        }
        for (name, raw) in [
            ("use_beam_search", fields.use_beam_search),
            ("echo", fields.echo),
        ] {
            if raw.is_some_and(|raw| !is_null(raw) && raw.get() != "false") {
                return Err(wrong(name, "is not supported"));
            }
        }
        Ok(Self {
            body: std::str::from_utf8(body).unwrap_or_default(),
            fields,
            prompt,
            stream: stream.unwrap_or(false),
        })
    }

    /// The body of a streamed completion, which `counted` tells how many tokens it had.
    pub(super) fn body(&self, models: &[ModelFacts], counted: bool) -> Result<Bytes, ApiError> {
        let fields = &self.fields;
        let mut changed = Vec::new();
        let mut added = String::new();
        let mut set = |raw: Option<&RawValue>, name: &str, value: &str| match raw
            .and_then(|raw| place(self.body, raw))
        {
            Some(place) => changed.push((place, value.to_owned())),
            None => added.push_str(&format!(",\"{name}\":{value}")),
        };
        if fields.model.is_none_or(is_null) {
            set(fields.model, "model", &quoted(only(models)?));
        }
        set(fields.stream, "stream", "true");
        if counted && fields.stream_options.is_none_or(is_null) {
            set(
                fields.stream_options,
                "stream_options",
                r#"{"include_usage":true}"#,
            );
        }
        for ((name, value), raw) in DEFAULTS
            .into_iter()
            .zip([fields.max_tokens, fields.temperature])
        {
            // A `null` says that there is no bound.
            if raw.is_none() {
                set(None, name, value);
            }
        }
        changed.sort_by_key(|(place, _)| place.start);
        Ok(edited(self.body, &changed, &added).into())
    }
}

/// Where a field is written.
fn place(body: &str, raw: &RawValue) -> Option<Range<usize>> {
    let text = raw.get();
    let start = (text.as_ptr() as usize).checked_sub(body.as_ptr() as usize)?;
    let place = start..start + text.len();
    body.get(place.clone()).map(|_| place)
}

/// An object of some members with other values in some places and more members at its end.
fn edited(body: &str, changed: &[(Range<usize>, String)], added: &str) -> String {
    let mut out = String::with_capacity(body.len() + added.len() + 64);
    let mut from = 0;
    for (place, value) in changed {
        out.push_str(body.get(from..place.start).unwrap_or_default());
        out.push_str(value);
        from = place.end;
    }
    let rest = body.get(from..).unwrap_or_default().trim_ascii_end();
    out.push_str(rest.strip_suffix('}').unwrap_or(rest));
    out.push_str(added);
    out.push('}');
    out
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The model that is meant when none is named.
fn only(models: &[ModelFacts]) -> Result<&str, ApiError> {
    match models {
        [] => Err(HomeError::Unavailable {
            retry_after: Duration::from_secs(1),
        }
        .into()),
        [only] => Ok(&only.id),
        several => {
            let names: Vec<_> = several
                .iter()
                .take(NAMED_MODELS)
                .map(|model| Cow::from(format!("`{}`", model.id)))
                .collect();
            let more = if several.len() > NAMED_MODELS {
                ", …"
            } else {
                ""
            };
            let names = names.join(", ");
            let message = format!("`model` is required: this mesh has {names}{more}");
            Err(ApiError::bad_request(message).blaming("model"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use shoal_gossip::{ModelApi, Tokens};

    use super::*;

    fn models(names: &[&str]) -> Vec<ModelFacts> {
        let model = |id: &&str| ModelFacts {
            id: (*id).to_owned(),
            context: Tokens(100),
            fingerprint: 1,
            created: 1,
            api: ModelApi::Tokens,
        };
        names.iter().map(model).collect()
    }

    fn turned(body: &str, counted: bool) -> String {
        let body = Bytes::from(body.to_owned());
        let wish = Wish::read(&body).ok().unwrap();
        let turned = wish.body(&models(&["m \"1\""]), counted).ok().unwrap();
        String::from_utf8(turned.to_vec()).unwrap()
    }

    #[test]
    fn what_is_not_known_stays_byte_for_byte() {
        assert_eq!(
            turned(
                r#" { "prompt" : "é}" , "ignore_eos":true, "x": [1.50] } "#,
                false
            ),
            r#" { "prompt" : "é}" , "ignore_eos":true, "x": [1.50] ,"model":"m \"1\"","stream":true,"max_tokens":16,"temperature":1.0}"#
        );
    }

    #[test]
    fn no_field_is_there_twice() {
        let body = r#"{"stream":null,"prompt":"p","model":null,"stream_options":null,"max_tokens":null,"temperature":0}"#;
        let value: Value = serde_json::from_str(&turned(body, true)).unwrap();
        let expected = json!({"prompt": "p", "model": "m \"1\"", "stream": true, "max_tokens": null,
            "temperature": 0, "stream_options": {"include_usage": true}});
        assert_eq!(value, expected);
        assert_eq!(turned(body, true).matches("\"model\"").count(), 1);
        assert_eq!(turned(body, true).matches("\"stream\"").count(), 1);
        assert_eq!(turned(body, true).matches("\"stream_options\"").count(), 1);
        let named =
            r#"{"model":"other","prompt":"p","stream":false,"max_tokens":3,"temperature":1}"#;
        assert_eq!(turned(named, false), named.replace("false", "true"));
    }

    #[test]
    fn sglangs_own_form_is_told_by_its_fields() {
        for body in [
            r#"{"text":"x"}"#,
            r#" {"input_ids":[1],"sampling_params":{}}"#,
            r#"{"sampling_params":{"n":1}}"#,
        ] {
            assert!(is_native(body.as_bytes()), "{body}");
        }
        for body in [r#"{"prompt":"x"}"#, r#"{"text":null}"#, r#"["x"]"#, "{", ""] {
            assert!(!is_native(body.as_bytes()), "{body}");
        }
    }
}
