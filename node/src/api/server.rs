//! Connections: accepting, TLS, HTTP/1.1 and HTTP/2, and the way down.

mod activity;
mod rarely;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use self::activity::{Activity, idle};
use self::rarely::Rarely;
use crate::api::body::Held;
use crate::api::{Api, ApiConfig, Backend, router};
use crate::metrics::Metrics;

/// Bytes that one connection may hold in either direction: the head of a request at most, and what a
/// slow client has not taken yet. Ten times the largest head in practice.
pub const BUFFER: usize = 64 * 1024;

/// Requests on one HTTP/2 connection at once: a proxy that needs more opens another.
const MAX_STREAMS: u32 = 256;

/// Longest list of headers in HTTP/2, uncompressed.
const MAX_HEADER_LIST: u32 = 32 * 1024;

/// HTTP/2 peers that say nothing are asked whether they live, and have as long to answer.
const PING: Duration = Duration::from_secs(20);

/// Pause after an accept that failed, for want of file descriptors as a rule.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time after the stop in which clients that were quicker may still bring their request, to be told that the node stops. A
/// connection that is closed with bytes unread is reset, and its client cannot know what became of its request.
const LAST_CALLS: Duration = Duration::from_millis(250);

/// Time to write the last words of streams that were cut.
const CUT_GRACE: Duration = Duration::from_secs(1);

/// Said to a connection too many, in one write and without waiting.
fn too_many() -> String {
    let body = "{\"error\":{\"message\":\"this node has too many connections\",\
        \"type\":\"server_error\",\"param\":null,\"code\":\"unavailable\"}}";
    let length = body.len();
    format!(
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// The two steps of the way down. Both tokens may be shared with other parts of the node.
#[derive(Clone, Debug)]
pub struct Shutdown {
    /// No new connections but those that came before; open ones end after their present answer, and those that have none
    /// may bring one more request within a moment.
    pub stop: CancellationToken,
    /// Running answers end now: streams with an error frame, others with 503. Cancel it when the time
    /// for streams to finish is over.
    pub cut: CancellationToken,
}

/// Who sent a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(pub(super) IpAddr);

/// Closes the connection a request came in on.
#[derive(Clone, Debug)]
pub(super) struct Closer(CancellationToken);

impl Closer {
    pub(super) fn close(&self) {
        self.0.cancel();
    }
}

/// Serves clients until [`Shutdown::stop`] and the end of the last answer, or until shortly after
/// [`Shutdown::cut`]. Dropping the future drops every connection at once.
pub async fn serve(listener: TcpListener, config: ApiConfig, backend: Backend, shutdown: Shutdown) {
    let api = Arc::new(Api::new(config, backend, shutdown.cut.clone()));
    let tasks = TaskTracker::new();
    let dropped = CancellationToken::new();
    let _drop_guard = dropped.clone().drop_guard();
    let shared = Arc::new(Shared {
        tls: api.config.tls.as_ref().map(|tls| tls.acceptor()),
        places: Arc::new(Semaphore::new(api.config.max_connections)),
        header_timeout: api.config.header_timeout,
        router: router(Arc::clone(&api)),
        builder: builder(OwnedTasks {
            tasks: tasks.clone(),
            dropped,
        }),
        stop: shutdown.stop.clone(),
        metrics: Arc::clone(&api.metrics),
    });
    let mut connections = JoinSet::new();
    let stopped = async {
        shutdown.stop.cancelled().await;
        sleep(LAST_CALLS).await;
    };
    shared.accept(&listener, &mut connections, stopped).await;
    if let Err(error) = shared.accept_waiting(listener, &mut connections) {
        tracing::debug!(%error, "the last connections were not accepted");
    }
    tasks.close();
    api.streams.close();
    let rest = async {
        while let Some(ended) = connections.join_next().await {
            report(ended);
        }
        tasks.wait().await;
        api.streams.wait().await;
    };
    let cut = async {
        shutdown.cut.cancelled().await;
        sleep(CUT_GRACE).await;
    };
    tokio::select! {
        () = rest => {}
        () = cut => tracing::warn!("some clients were cut off at shutdown"),
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked");
    }
}

/// Runs what HTTP/2 wants to run beside its connections: handlers of single requests.
#[derive(Clone)]
struct OwnedTasks {
    tasks: TaskTracker,
    dropped: CancellationToken,
}

impl<F> Executor<F> for OwnedTasks
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, task: F) {
        let dropped = self.dropped.clone();
        self.tasks.spawn(async move {
            dropped.run_until_cancelled_owned(task).await;
        });
    }
}

fn builder(tasks: OwnedTasks) -> Builder<OwnedTasks> {
    let mut builder = Builder::new(tasks);
    builder
        .http1()
        .timer(TokioTimer::new())
        // `idle` does this for both versions, and for the bytes before the version is known.
        .header_read_timeout(None)
        .max_buf_size(BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADER_LIST)
        .max_send_buf_size(BUFFER)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING);
    builder
}

/// What all connections share.
struct Shared {
    tls: Option<TlsAcceptor>,
    places: Arc<Semaphore>,
    header_timeout: Duration,
    router: Router,
    builder: Builder<OwnedTasks>,
    stop: CancellationToken,
    metrics: Arc<Metrics>,
}

/// Takes one of the places for connections, for as long as it lives.
struct Place {
    metrics: Arc<Metrics>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.metrics.connections.decrement(1);
    }
}

impl Shared {
    async fn accept(
        self: &Arc<Self>,
        listener: &TcpListener,
        connections: &mut JoinSet<()>,
        end: impl Future<Output = ()>,
    ) {
        tokio::pin!(end);
        let mut failures = Rarely::new();
        loop {
            tokio::select! {
                biased;
                () = &mut end => return,
                Some(ended) = connections.join_next() => report(ended),
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => self.admit(socket, peer, connections),
                    Err(error) => {
                        if let Some(times) = failures.say() {
                            tracing::warn!(%error, times, "a connection could not be accepted");
                        }
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
    }

    /// Takes what the kernel holds, and closes the listener: what it holds then is reset.
    fn accept_waiting(
        self: &Arc<Self>,
        listener: TcpListener,
        connections: &mut JoinSet<()>,
    ) -> io::Result<()> {
        // Without the runtime, which may not have heard of the newest yet.
        let listener = listener.into_std()?;
        loop {
            let (socket, peer) = match listener.accept() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                accepted => accepted?,
            };
            socket.set_nonblocking(true)?;
            self.admit(TcpStream::from_std(socket)?, peer, connections);
        }
    }

    fn admit(self: &Arc<Self>, socket: TcpStream, peer: SocketAddr, into: &mut JoinSet<()>) {
        let Ok(permit) = Arc::clone(&self.places).try_acquire_owned() else {
            self.metrics.rejected("connections");
            if self.tls.is_none() {
                // A fresh socket has room for this; and if not, closing it says as much.
                if let Err(error) = socket.try_write(too_many().as_bytes()) {
                    tracing::debug!(%peer, %error, "a connection too many was closed unsaid");
                }
            }
            return;
        };
        self.metrics.connections.increment(1);
        let place = Place {
            metrics: Arc::clone(&self.metrics),
            _permit: permit,
        };
        let shared = Arc::clone(self);
        into.spawn(async move {
            let _place = place;
            if let Err(error) = shared.connection(socket, peer.ip()).await {
                tracing::debug!(%peer, error, "a connection ended early");
            }
        });
    }

    async fn connection(&self, socket: TcpStream, peer: IpAddr) -> Result<(), Ended> {
        // Without it, each token of a stream may wait for the acknowledgement of the one before.
        socket.set_nodelay(true)?;
        match &self.tls {
            None => self.http(socket, peer).await,
            Some(tls) => {
                let socket = timeout(self.header_timeout, tls.accept(socket))
                    .await
                    .map_err(|_| "the TLS handshake took too long")??;
                self.http(socket, peer).await
            }
        }
    }

    async fn http<S>(&self, socket: S, peer: IpAddr) -> Result<(), Ended>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let activity = Activity::new();
        let idle = idle(activity.watch(), self.header_timeout);
        let close = CancellationToken::new();
        let closer = Closer(close.clone());
        let service = service_fn(move |request: hyper::Request<Incoming>| {
            let guard = activity.begin();
            let mut request: Request = request.map(Body::new);
            request.extensions_mut().insert(closer.clone());
            request.extensions_mut().insert(Peer(peer));
            let answer = self.router.clone().oneshot(request);
            async move {
                let answer = answer.await?;
                Ok::<_, Infallible>(answer.map(|body| Held::new(body, guard)))
            }
        });
        let connection = self.builder.serve_connection(TokioIo::new(socket), service);
        tokio::pin!(connection, idle);
        tokio::select! {
            biased;
            () = self.stop.cancelled() => {}
            () = close.cancelled() => return Err("the client took nothing for too long".into()),
            () = &mut idle => return Ok(()),
            ended = connection.as_mut() => return ended,
        }
        tokio::select! {
            biased;
            () = close.cancelled() => return Err("the client took nothing for too long".into()),
            () = sleep(LAST_CALLS) => {}
            () = &mut idle => return Ok(()),
            ended = connection.as_mut() => return ended,
        }
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            biased;
            () = close.cancelled() => Err("the client took nothing for too long".into()),
            () = &mut idle => Ok(()),
            ended = connection => ended,
        }
    }
}

/// Why a connection ended; for the log.
type Ended = Box<dyn std::error::Error + Send + Sync>;
