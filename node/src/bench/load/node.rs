//! One endpoint and the connections to it. Each carries one request at a time and is kept for the next, so that
//! setting up connections is not what is measured.

use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::LoadError;
use super::request::Failure;

/// Connections kept while nobody needs them. A burst may use more, and then closes the rest.
const MAX_IDLE: usize = 256;

/// Longest list of models that is read: a thousand of 1 KiB each.
const MAX_MODELS: usize = 1 << 20;

/// The way to send on a connection.
pub(super) type Connection = http1::SendRequest<Full<Bytes>>;

/// Where an endpoint is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    url: String,
    host: String,
    port: u16,
    authority: HeaderValue,
    /// What stands before `/v1`.
    prefix: String,
}

impl FromStr for Address {
    type Err = LoadError;

    fn from_str(text: &str) -> Result<Self, LoadError> {
        let bad = || LoadError::BadUrl(text.to_owned());
        let full = match text.contains("://") {
            true => text.to_owned(),
            false => format!("http://{text}"),
        };
        let uri: Uri = full.parse().map_err(|_| bad())?;
        let authority = uri.authority().ok_or_else(bad)?.as_str();
        let plain = uri.scheme_str() == Some("http") && uri.query().is_none();
        // Names and passwords in addresses would have to become headers; keys have a flag.
        if !plain || authority.contains('@') {
            return Err(bad());
        }
        let host = uri.host().ok_or_else(bad)?.trim_matches(['[', ']']);
        if host.is_empty() {
            return Err(bad());
        }
        let path = uri.path().trim_end_matches('/');
        Ok(Self {
            url: text.to_owned(),
            host: host.to_owned(),
            port: uri.port_u16().unwrap_or(80),
            authority: HeaderValue::from_str(authority).map_err(|_| bad())?,
            prefix: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
        })
    }
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// An endpoint.
#[derive(Debug)]
pub(super) struct Node {
    address: Address,
    authorization: Option<HeaderValue>,
    /// The last one kept is the next one used, so that few stay in use. At most [`MAX_IDLE`].
    idle: Mutex<Vec<Connection>>,
    tasks: TaskTracker,
    closed: CancellationToken,
}

impl Node {
    /// Without connections yet. Those to come are driven by `tasks`, until `closed`.
    pub(super) fn new(
        address: Address,
        api_key: Option<&str>,
        tasks: TaskTracker,
        closed: CancellationToken,
    ) -> Result<Self, LoadError> {
        let header = |key| HeaderValue::try_from(format!("Bearer {key}"));
        let authorization = api_key.map(header).transpose();
        let mut authorization = authorization.map_err(|_| LoadError::BadKey)?;
        if let Some(key) = &mut authorization {
            key.set_sensitive(true);
        }
        Ok(Self {
            address,
            authorization,
            idle: Mutex::default(),
            tasks,
            closed,
        })
    }

    /// As it was named.
    pub(super) fn url(&self) -> &str {
        &self.address.url
    }

    /// The models it lists.
    pub(super) async fn models(&self) -> Result<Vec<String>, Failure> {
        let request = self.request(Method::GET, "/v1/models", Bytes::new())?;
        let (response, connection) = self.send(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_MODELS)
            .collect()
            .await;
        let body = body.map_err(|error| Failure::connection(error.as_ref()))?;
        self.keep(connection);
        let body = body.to_bytes();
        if !status.is_success() {
            return Err(Failure::status(status, &body));
        }
        let models: Models = serde_json::from_slice(&body).map_err(Failure::stream)?;
        Ok(models.data.into_iter().map(|model| model.id).collect())
    }

    /// Posts JSON. The connection is to be kept once the body has ended.
    pub(super) async fn post(
        &self,
        path: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Connection), Failure> {
        self.send(self.request(Method::POST, path, body)?).await
    }

    /// Keeps a connection for the next request. One that is still busy is given the time for it then.
    pub(super) fn keep(&self, connection: Connection) {
        let mut idle = self.idle();
        if idle.len() < MAX_IDLE && !connection.is_closed() {
            idle.push(connection);
        }
    }

    /// Sends on a kept connection or a fresh one. A kept one may turn out to be closed by the server; if that
    /// happens before any answer, it is as if it had never been there.
    async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<Incoming>, Connection), Failure> {
        if let Some(mut kept) = self.take_kept().await {
            match kept.send_request(request.clone()).await {
                Ok(response) => return Ok((response, kept)),
                // Something did arrive, and it was no HTTP.
                Err(error) if error.is_parse() => return Err(Failure::connection(&error)),
                Err(_) => {}
            }
        }
        let mut fresh = self.connect().await?;
        match fresh.send_request(request).await {
            Ok(response) => Ok((response, fresh)),
            Err(error) => Err(Failure::connection(&error)),
        }
    }

    async fn take_kept(&self) -> Option<Connection> {
        loop {
            let mut kept = self.idle().pop()?;
            if kept.ready().await.is_ok() {
                return Some(kept);
            }
        }
    }

    async fn connect(&self) -> Result<Connection, Failure> {
        let Address { host, port, .. } = &self.address;
        let tcp = TcpStream::connect((host.as_str(), *port))
            .await
            .map_err(|error| Failure::connection(&error))?;
        tcp.set_nodelay(true)
            .map_err(|error| Failure::connection(&error))?;
        let (sender, connection) = http1::handshake(TokioIo::new(tcp))
            .await
            .map_err(|error| Failure::connection(&error))?;
        let closed = self.closed.clone();
        self.tasks.spawn(async move {
            // How it ends is told to the request on it.
            closed.run_until_cancelled(connection).await
        });
        Ok(sender)
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.address.prefix))
            .header(HOST, &self.address.authority)
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.authorization {
            request = request.header(AUTHORIZATION, key);
        }
        request
            .body(Full::new(body))
            .map_err(|error| Failure::connection(&error))
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_or_without_what_can_be_guessed() {
        for (text, host, port, prefix) in [
            ("http://127.0.0.1:8080", "127.0.0.1", 8080, ""),
            ("localhost:8000", "localhost", 8000, ""),
            ("http://gpu", "gpu", 80, ""),
            ("http://gpu:1/v1", "gpu", 1, ""),
            ("http://gpu:1/", "gpu", 1, ""),
            ("http://gpu:1/llm/v1/", "gpu", 1, "/llm"),
            ("http://[::1]:9", "::1", 9, ""),
        ] {
            let address: Address = text.parse().expect(text);
            assert_eq!(
                (address.host.as_str(), address.port, address.prefix.as_str()),
                (host, port, prefix),
                "{text}"
            );
        }
    }

    #[test]
    fn addresses_that_cannot_be_used_are_refused() {
        for text in [
            "",
            "https://gpu",
            "http://",
            "http://me:secret@gpu",
            "http://gpu/?a=b",
            "http://a b",
        ] {
            let refused = text.parse::<Address>();
            assert!(matches!(refused, Err(LoadError::BadUrl(_))), "{text}");
        }
    }
}
