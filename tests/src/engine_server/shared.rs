//! What all requests of one stand-in share, and the way of a request through it.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response, header};
use shoal_gossip::Tokens;
use shoal_node::engine::Engine;

use crate::engine_server::call::{Call, Content, Reply};
use crate::engine_server::fault::{Fault, Faults, Met};
use crate::engine_server::feed::Feed;
use crate::engine_server::kv::Kv;
use crate::engine_server::run::Table;
use crate::engine_server::seen::{Ending, Log, Note, Seen};
use crate::engine_server::wire::ResetCord;
use crate::engine_server::{Dialect, llama, openai, sglang, vllm};

/// Numbers of requests, all over the process: several stand-ins may share an engine.
static SERIALS: AtomicU64 = AtomicU64::new(1);

/// Paths whose requests are no work.
const HELPERS: [&str; 4] = [
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/abort_request",
];

/// Paths that tell figures of load.
const FIGURES: [&str; 3] = ["/metrics", "/slots", "/v1/loads"];

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) dialect: Dialect,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) table: Table,
    pub(super) kv: Kv,
    pub(super) log: Log,
    faults: Mutex<Faults>,
    models: Mutex<Vec<String>>,
    slots: AtomicU32,
    /// When the present life began, since 1970.
    born: Mutex<Duration>,
}

impl Shared {
    pub(super) fn new(dialect: Dialect, engine: Arc<dyn Engine>) -> Self {
        let models = engine.facts().models.iter().map(|m| m.id.clone()).collect();
        Self {
            dialect,
            engine,
            table: Table::default(),
            kv: Kv::default(),
            log: Log::default(),
            faults: Mutex::default(),
            models: Mutex::new(models),
            slots: AtomicU32::new(4),
            born: Mutex::default(),
        }
    }

    pub(super) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names of the model, the first one its own.
    pub(super) fn models(&self) -> Vec<String> {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models.clone()
    }

    pub(super) fn set_models(&self, names: &[&str]) {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        *self.models.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// The model's own name as clients know it.
    pub(super) fn model(&self) -> String {
        self.models().into_iter().next().unwrap_or_default()
    }

    /// What the engine calls it.
    pub(super) fn engine_model(&self) -> String {
        self.engine.facts().models[0].id.clone()
    }

    pub(super) fn context(&self) -> u32 {
        let Tokens(context) = self.engine.facts().models[0].context;
        context
    }

    /// Sequences that llama-server says it runs at once.
    pub(super) fn slots(&self) -> u32 {
        self.slots.load(Ordering::SeqCst)
    }

    pub(super) fn set_slots(&self, slots: u32) {
        self.slots.store(slots, Ordering::SeqCst);
    }

    pub(super) fn born(&self) -> Duration {
        *self.born.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a life at `now`, or just after the last one if the clock stands still.
    pub(super) fn begin_life(&self, now: Duration) {
        let mut born = self.born.lock().unwrap_or_else(PoisonError::into_inner);
        *born = now.max(*born + Duration::from_millis(10));
    }

    /// Answers a request, or breaks its connection.
    pub(super) async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        own: ResetCord,
        server: ResetCord,
    ) -> io::Result<Response<Feed>> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let path = parts.uri.path().to_owned();
        let is_work = parts.method != "GET" && !HELPERS.contains(&path.as_str());
        let seen = Seen {
            method: parts.method.clone(),
            path: path.clone(),
            query: parts.uri.query().unwrap_or_default().to_owned(),
            headers: parts.headers.clone(),
            body: body.clone(),
            ending: Ending::Open,
        };
        let note = self.log.write(seen, server);
        let met = self.faults().meet(&path, is_work);
        let call = Call {
            method: parts.method,
            path,
            headers: parts.headers,
            body,
            serial: SERIALS.fetch_add(1, Ordering::SeqCst),
            met,
        };
        let reply = match &call.met.blow {
            Some(Fault::DieBeforeHead) => {
                note.ends(Ending::Broken);
                own.pull();
                return Err(io::Error::other("a fault"));
            }
            Some(Fault::StallBeforeHead) => std::future::pending().await,
            Some(Fault::Status {
                status,
                headers,
                body,
            }) => refusal(*status, headers, body),
            _ => self.reply(&call).await,
        };
        Ok(respond(reply, call.met, note, own))
    }

    async fn reply(&self, call: &Call) -> Reply {
        if call.path == "/v1/custom" {
            let content_type = call.header("content-type").unwrap_or("text/plain");
            return Reply::text(200, content_type, call.body.clone());
        }
        let health = call.met.find(|fault| match fault {
            Fault::HealthStatus(status) => Some(*status),
            _ => None,
        });
        if let Some(status) = health.filter(|_| call.path == "/health") {
            return Reply::text(status, "text/plain", "");
        }
        if FIGURES.contains(&call.path.as_str()) {
            if call.met.has(&Fault::MetricsHang) {
                return std::future::pending().await;
            }
            if call.met.has(&Fault::MetricsGone) {
                return Reply::text(404, "application/json", r#"{"detail":"Not Found"}"#);
            }
        }
        match self.dialect {
            Dialect::Vllm => vllm::reply(self, call).await,
            Dialect::Sglang => sglang::reply(self, call).await,
            Dialect::LlamaServer => llama::reply(self, call).await,
            Dialect::OpenAi => openai::reply(self, call).await,
        }
    }
}

fn refusal(status: u16, headers: &[(&'static str, String)], body: &Bytes) -> Reply {
    let mut reply = Reply::text(status, "application/json", body.clone());
    if headers.iter().any(|(name, _)| *name == "content-type") {
        reply.headers.clear();
    }
    reply.headers.extend_from_slice(headers);
    reply
}

/// Puts a reply on its way, with what the request met.
fn respond(reply: Reply, met: Met, note: Note, cord: ResetCord) -> Response<Feed> {
    let mut headers = HeaderMap::new();
    for (name, value) in reply.headers {
        headers.insert(name, value.parse().expect("a header's value"));
    }
    if let Some(Fault::ContentType(kind)) = met.blow {
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    }
    if met.has(&Fault::OddClock) {
        let date = header::HeaderValue::from_static("Thu, 01 Jan 1970 00:00:07 GMT");
        headers.insert(header::DATE, date);
    }
    let body = match reply.content {
        Content::Whole(body) => {
            let length = match met.blow {
                Some(Fault::HalfEvent(0)) => body.len() / 2,
                _ => body.len(),
            };
            headers.insert(header::CONTENT_LENGTH, length.into());
            Feed::new(
                met,
                note,
                cord,
                |mut sink| async move { sink.whole(body).await },
            )
        }
        Content::Stream(write) => Feed::new(met, note, cord, write),
    };
    let mut response = Response::new(body);
    *response.status_mut() = reply.status.try_into().expect("a status");
    *response.headers_mut() = headers;
    response
}
