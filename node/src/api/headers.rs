//! Header names and what is read from headers.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE, ORIGIN};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use shoal_gossip::{NodeId, unix_time};

use crate::api::error::ApiError;

/// The client's name for its request; echoed, never believed.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The node whose engine took the request.
pub(super) const SHOAL_HOST: HeaderName = HeaderName::from_static("x-shoal-host");

/// Tells nginx and its kin to pass a stream on as it comes.
pub(super) const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Longest request id that is echoed: three UUIDs and some punctuation. It goes into every log line.
const MAX_REQUEST_ID: usize = 128;

/// The request id of a client, if it sent one that can be repeated: printable ASCII without spaces.
pub(super) fn request_id(headers: &HeaderMap) -> Option<HeaderValue> {
    let id = headers.get(REQUEST_ID)?;
    let good =
        (1..=MAX_REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic);
    good.then(|| id.clone())
}

/// Makes request ids for clients that send none: node, start of this life and a count.
pub(super) struct RequestIds {
    prefix: String,
    next: AtomicU64,
}

impl RequestIds {
    pub(super) fn new(node: NodeId) -> Self {
        Self {
            prefix: format!("{node}-{:x}", unix_time().as_millis()),
            next: AtomicU64::new(0),
        }
    }

    pub(super) fn next(&self) -> HeaderValue {
        let count = self.next.fetch_add(1, Ordering::Relaxed);
        // Base58, hex digits and dashes are all header characters.
        HeaderValue::from_str(&format!("{}-{count:x}", self.prefix))
            .unwrap_or_else(|_| HeaderValue::from(count))
    }
}

/// Bodies are JSON as it is. A missing content type is let pass (plain sockets, old scripts), but not from a browser, which names the
/// page's origin; another one is not: a web page of some other site can send a form, plain text or a body of no type here
/// without asking, but not JSON.
pub(super) fn check_content(headers: &HeaderMap) -> Result<(), ApiError> {
    if let Some(kind) = headers.get(CONTENT_TYPE) {
        let kind = kind.to_str().unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim();
        let json = essence.eq_ignore_ascii_case("application/json")
            || essence.to_ascii_lowercase().ends_with("+json");
        if !json {
            return Err(ApiError::bad_request(
                "the content-type must be application/json".to_owned(),
            ));
        }
    } else if headers.contains_key(ORIGIN) {
        return Err(ApiError::bad_request(
            "a web page must name the content-type: application/json".to_owned(),
        ));
    }
    match headers.get(CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => Err(ApiError::bad_request(
            "compressed bodies are not supported: send no content-encoding".to_owned(),
        )),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_is_repeated_only_if_short_and_printable() {
        let with = |id: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(id).unwrap());
            request_id(&headers)
        };
        assert_eq!(with(b"abc-1_2:3").unwrap(), "abc-1_2:3");
        assert!(with(&[b'x'; 128]).is_some());
        for wrong in [&b""[..], &[b'x'; 129], b"a b", b"a\tb", b"caf\xe9"] {
            assert_eq!(with(wrong), None, "{wrong:?}");
        }
        assert_eq!(request_id(&HeaderMap::new()), None);
    }

    #[test]
    fn ids_made_here_differ() {
        let ids = RequestIds::new(NodeId(7));
        let (one, two) = (ids.next(), ids.next());
        assert_ne!(one, two);
        let mut headers = HeaderMap::new();
        headers.insert(REQUEST_ID, one.clone());
        assert_eq!(request_id(&headers), Some(one));
    }

    #[test]
    fn only_plain_json_is_taken() {
        let with = |name: HeaderName, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            check_content(&headers).is_ok()
        };
        for good in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/problem+json",
        ] {
            assert!(with(CONTENT_TYPE, good), "{good}");
        }
        for wrong in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "",
        ] {
            assert!(!with(CONTENT_TYPE, wrong), "{wrong}");
        }
        assert!(check_content(&HeaderMap::new()).is_ok());
        assert!(!with(ORIGIN, "http://elsewhere.example"));
        assert!(with(CONTENT_ENCODING, "identity"));
        assert!(!with(CONTENT_ENCODING, "gzip"));
    }
}
