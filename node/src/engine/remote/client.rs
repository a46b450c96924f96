//! HTTP to the engine: questions with a deadline, and requests whose answers are read as they come.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, Uri};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use shoal_gossip::RequestId;
use tokio::time::timeout;

use crate::engine::work::HttpAsk;

/// Time to connect: the engine is on this host or next to it.
const CONNECT: Duration = Duration::from_secs(2);

/// Idle connections are closed before the engine closes them, so that no request meets a closing one: the servers of vLLM and
/// llama.cpp wait 5 s.
const IDLE: Duration = Duration::from_secs(3);

/// Idle connections kept: as many as requests usually run at once.
const IDLE_CONNECTIONS: usize = 128;

/// Longest answer to a question, in bytes: the metrics of a vLLM with many adapters take some 200 KB.
const MAX_ANSWER: usize = 4 * 1024 * 1024;

/// Why a request did not reach the engine, or its answer not this node. For the log.
pub(super) type Unreachable = String;

/// Where the engine is, and what it wants to see of whoever asks.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
    /// `host:port`.
    authority: String,
    key: Option<HeaderValue>,
}

impl Client {
    /// A client for the engine at `host:port`. `key` is sent as a bearer token.
    pub(super) fn new(authority: String, key: Option<HeaderValue>) -> Self {
        let mut connector = HttpConnector::new();
        // Each token goes out at once, and so does each request.
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT));
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .build(connector);
        Self {
            pool,
            authority,
            key,
        }
    }

    /// Asks for a page; `None` when the whole of it is not here in time.
    pub(super) async fn get(&self, path: &str, patience: Duration) -> Option<(u16, Bytes)> {
        let mut request = self.request(Method::GET, path, Bytes::new()).ok()?;
        let json = HeaderValue::from_static("application/json, text/plain");
        request.headers_mut().insert(ACCEPT, json);
        self.whole(request, patience).await.ok()
    }

    /// Posts a JSON body, and takes the whole answer.
    ///
    /// # Errors
    /// When it is not here in time.
    pub(super) async fn post(
        &self,
        path: &str,
        body: Bytes,
        patience: Duration,
    ) -> Result<(u16, Bytes), Unreachable> {
        let request = self.request(Method::POST, path, body)?;
        self.whole(request, patience).await
    }

    async fn whole(
        &self,
        request: Request<Full<Bytes>>,
        patience: Duration,
    ) -> Result<(u16, Bytes), Unreachable> {
        let asked = async {
            let response = self.pool.request(request).await;
            let response = response.map_err(|error| reason(&error))?;
            let status = response.status().as_u16();
            let body = read_whole(response.into_body(), MAX_ANSWER).await?;
            Ok((status, body))
        };
        timeout(patience, asked)
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {} ms", patience.as_millis())))
    }

    /// Posts a client's request. The answer's body is read as it comes; dropping the future or the body closes the
    /// connection, which is how an engine learns that nobody wants the rest.
    ///
    /// # Errors
    /// When it cannot be sent, or the connection ends before the answer begins.
    pub(super) async fn send(
        self,
        request: RequestId,
        ask: HttpAsk,
        body: Bytes,
    ) -> Result<Response<Incoming>, Unreachable> {
        let mut http = self.request(Method::POST, &ask.path, body)?;
        let headers = http.headers_mut();
        for (name, value) in &ask.headers {
            if let (Ok(name), Ok(value)) = (
                HeaderName::from_bytes(name.as_bytes()),
                HeaderValue::from_str(value),
            ) {
                headers.insert(name, value);
            }
        }
        // Engines take it for the request's name; a client's own may not be the only one of its kind.
        if let Ok(id) = HeaderValue::from_str(&request.to_string()) {
            headers.insert("x-request-id", id);
        }
        self.pool
            .request(http)
            .await
            .map_err(|error| reason(&error))
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, Unreachable> {
        let uri = Uri::builder()
            .scheme("http")
            .authority(self.authority.as_str())
            .path_and_query(path)
            .build()
            .map_err(|error| error.to_string())?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        if let Some(key) = &self.key {
            request.headers_mut().insert(AUTHORIZATION, key.clone());
        }
        Ok(request)
    }
}

/// All of a body of at most `limit` bytes.
pub(super) async fn read_whole(mut body: Incoming, limit: usize) -> Result<Bytes, Unreachable> {
    let mut read = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| error.to_string())?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if data.len() > limit.saturating_sub(read.len()) {
            return Err(format!("an answer of more than {limit} bytes"));
        }
        read.extend_from_slice(&data);
    }
    Ok(read.freeze())
}

/// What went wrong, down to its cause: the outermost error says no more than that something did.
fn reason(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}
