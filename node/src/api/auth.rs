//! API keys: `Authorization: Bearer KEY` or `x-api-key: KEY`.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, ORIGIN};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::api::error::{ApiError, ErrorKind};
use crate::api::server::Peer;
use crate::api::{Api, route};

/// The keys that let clients in. Only their digests are kept.
#[derive(Clone)]
pub struct ApiKeys {
    digests: Arc<[[u8; 32]]>,
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.digests.len())
    }
}

/// Why a text is no list of keys. No key is repeated in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiKeysError {
    /// There is no key in it; to let everyone in, name no file.
    #[error("no key in it: expected one per line")]
    Empty,
    /// A key that no client could send.
    #[error("line {0}: a key is printable ASCII without spaces")]
    Unsendable(usize),
}

impl ApiKeys {
    /// Reads keys: one per line. Empty lines and lines that begin with `#` are skipped, and space
    /// around a key is ignored.
    ///
    /// # Errors
    /// The text has no keys, or one that cannot be sent in a header.
    pub fn parse(text: &str) -> Result<Self, ApiKeysError> {
        let mut digests = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let key = line.trim();
            if key.is_empty() || key.starts_with('#') {
                continue;
            }
            if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(ApiKeysError::Unsendable(index + 1));
            }
            digests.push(Sha256::digest(key).into());
        }
        if digests.is_empty() {
            return Err(ApiKeysError::Empty);
        }
        Ok(Self {
            digests: digests.into(),
        })
    }

    /// Whether `key` is one of the keys. Takes the same time for every wrong key: digests of equal
    /// length are compared whole, and all of them.
    pub fn admits(&self, key: &[u8]) -> bool {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let mut found = Choice::from(0);
        for known in self.digests.iter() {
            found |= known.ct_eq(&digest);
        }
        found.into()
    }
}

/// The key a client sent. A bearer token goes first: that is what OpenAI's clients send.
fn key_of(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(AUTHORIZATION) {
        let value = value.as_bytes();
        let (scheme, key) = value.split_at_checked(7)?;
        return scheme
            .eq_ignore_ascii_case(b"bearer ")
            .then(|| key.trim_ascii());
    }
    headers.get("x-api-key").map(|value| value.as_bytes())
}

/// Lets requests pass that need no key or have one.
pub(super) async fn require_key(
    State(api): State<Arc<Api>>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    if route::is_for_operators(path) && request.headers().contains_key(ORIGIN) {
        let message =
            "this changes the mesh, and is for operators' tools: a web page may not ask for it";
        return ApiError::new(ErrorKind::Forbidden, message.to_owned()).into_response();
    }
    let (clients, operators) = (api.config.keys.as_ref(), api.config.operators.as_ref());
    let keys = if !route::is_for_operators(path) {
        [clients, clients.and(operators)]
    } else if operators.is_some() {
        [operators, None]
    } else if is_local(&request) {
        [clients, None]
    } else {
        let message = "this changes the mesh: ask from the node's own host, or with a key of --operator-key-file";
        return ApiError::new(ErrorKind::Forbidden, message.to_owned()).into_response();
    };
    if route::is_open(path) || keys.iter().all(Option::is_none) {
        return next.run(request).await;
    }
    let message = match key_of(request.headers()) {
        Some(key) if keys.iter().flatten().any(|keys| keys.admits(key)) => {
            return next.run(request).await;
        }
        Some(_) => "the API key is wrong",
        None => "an API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
    };
    ApiError::new(ErrorKind::Unauthorized, message.to_owned()).into_response()
}

/// Whether a request comes from this host.
fn is_local(request: &Request) -> bool {
    let peer = request.extensions().get::<Peer>();
    peer.is_some_and(|Peer(peer)| peer.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_has_one_key_a_line() {
        let keys = ApiKeys::parse("# ours\n sk-1 \r\n\nsk-2").unwrap();
        assert!(keys.admits(b"sk-1") && keys.admits(b"sk-2"));
        for wrong in [&b""[..], b"sk-", b"sk-11", b"# ours", b"sk-1\n"] {
            assert!(!keys.admits(wrong), "{wrong:?}");
        }
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
    }

    #[test]
    fn a_list_without_keys_or_with_an_unsendable_one_is_refused() {
        assert_eq!(ApiKeys::parse("").unwrap_err(), ApiKeysError::Empty);
        assert_eq!(ApiKeys::parse("#x\n \n").unwrap_err(), ApiKeysError::Empty);
        assert_eq!(
            ApiKeys::parse("ok\ntwo words").unwrap_err(),
            ApiKeysError::Unsendable(2)
        );
        assert_eq!(
            ApiKeys::parse("clé").unwrap_err(),
            ApiKeysError::Unsendable(1)
        );
    }

    #[test]
    fn a_key_may_come_in_two_headers() {
        let of = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, axum::http::HeaderValue::from_static(value));
            key_of(&headers).map(<[u8]>::to_vec)
        };
        assert_eq!(of("authorization", "Bearer k"), Some(b"k".to_vec()));
        assert_eq!(of("authorization", "bearer  k "), Some(b"k".to_vec()));
        assert_eq!(of("authorization", "Basic a2s6"), None);
        assert_eq!(of("authorization", "k"), None);
        assert_eq!(of("x-api-key", "k"), Some(b"k".to_vec()));
        assert_eq!(key_of(&HeaderMap::new()), None);
    }
}
