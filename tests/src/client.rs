//! A small HTTP client that sees what a real one sees: status, headers, events as they come.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// How long any one answer may take before a test fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// A client with its own connections.
#[derive(Clone, Debug)]
pub struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    /// A header as text; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().expect("a text header"))
    }
}

impl Default for Client {
    fn default() -> Self {
        Self {
            pool: Pool::builder(TokioExecutor::new()).build_http(),
        }
    }
}

impl Client {
    /// `GET`.
    pub async fn get(&self, node: SocketAddr, path: &str) -> Answer {
        let request = Request::get(format!("http://{node}{path}"))
            .body(Full::default())
            .expect("a valid request");
        self.whole(request).await.expect("an answer")
    }

    /// `GET` of a node that may be down.
    pub async fn try_get(&self, node: SocketAddr, path: &str) -> Result<Answer, String> {
        let request = Request::get(format!("http://{node}{path}"))
            .body(Full::default())
            .expect("a valid request");
        self.whole(request).await
    }

    /// `POST` of JSON.
    pub async fn post(&self, node: SocketAddr, path: &str, body: &Value) -> Answer {
        self.whole(post(node, path, body)).await.expect("an answer")
    }

    /// `POST` of JSON to a node that may be down.
    pub async fn try_post(
        &self,
        node: SocketAddr,
        path: &str,
        body: &Value,
    ) -> Result<Answer, String> {
        self.whole(post(node, path, body)).await
    }

    /// `POST` of JSON whose answer is a stream of events.
    pub async fn stream(&self, node: SocketAddr, path: &str, body: &Value) -> Events {
        let response = self.send(post(node, path, body)).await.expect("an answer");
        Events {
            response,
            buffered: BytesMut::new(),
        }
    }

    async fn whole(&self, request: Request<Full<Bytes>>) -> Result<Answer, String> {
        let response = self.send(request).await?;
        let (parts, body) = response.into_parts();
        let body = tokio::time::timeout(PATIENCE, body.collect())
            .await
            .map_err(|_| "the body did not end in time".to_owned())?
            .map_err(|error| error.to_string())?
            .to_bytes();
        Ok(Answer {
            status: parts.status,
            headers: parts.headers,
            body,
        })
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, String> {
        tokio::time::timeout(PATIENCE, self.pool.request(request))
            .await
            .map_err(|_| "no answer in time".to_owned())?
            .map_err(|error| error.to_string())
    }
}

fn post(node: SocketAddr, path: &str, body: &Value) -> Request<Full<Bytes>> {
    Request::post(format!("http://{node}{path}"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .expect("a valid request")
}

/// Server-sent events as they come. Dropping it closes the connection, as a client that goes away does.
#[derive(Debug)]
pub struct Events {
    response: Response<Incoming>,
    buffered: BytesMut,
}

impl Events {
    /// Status of the answer.
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// A header as text; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        self.response
            .headers()
            .get(name)
            .map_or("", |value| value.to_str().expect("a text header"))
    }

    /// The `data` of the next event; `None` at the end of the body. Comments are passed over.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(event) = self.take_event() {
                if let Some(data) = event.strip_prefix("data: ") {
                    return Some(data.to_owned());
                }
                continue;
            }
            let frame = tokio::time::timeout(PATIENCE, self.response.body_mut().frame())
                .await
                .expect("an event in time")?;
            if let Some(data) = frame.expect("an unbroken body").data_ref() {
                self.buffered.extend_from_slice(data);
            }
        }
    }

    /// Reads to the end: the text of all chunks, and the finish reason of the last that has one.
    pub async fn text(&mut self) -> (String, Option<String>) {
        let (mut text, mut reason) = (String::new(), None);
        while let Some(data) = self.next().await {
            if data == "[DONE]" {
                break;
            }
            let chunk: Value = serde_json::from_str(&data).expect("a JSON event");
            assert!(chunk.get("error").is_none(), "the stream failed: {chunk}");
            let choice = &chunk["choices"][0];
            text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
            text.push_str(choice["text"].as_str().unwrap_or_default());
            if let Some(given) = choice["finish_reason"].as_str() {
                reason = Some(given.to_owned());
            }
        }
        (text, reason)
    }

    fn take_event(&mut self) -> Option<String> {
        let end = self.buffered.windows(2).position(|pair| pair == b"\n\n")?;
        let event = self.buffered.split_to(end + 2);
        Some(String::from_utf8(event[..end].to_vec()).expect("events are UTF-8"))
    }
}
