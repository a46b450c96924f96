//! The home's side: one connection per host, made when first needed, and one stream per request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use quinn::{Connection, Endpoint, RecvStream};
use shoal_gossip::{Epoch, NodeId, RequestId};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use crate::mesh::codec::{FrameReader, encode_frame};
use crate::mesh::members::{Member, Members};
use crate::mesh::messages::{Frame, FrameBody, MAX_FRAME_BYTES, MAX_SUBMIT_BYTES, Submit};
use crate::mesh::stream::{FRAMES, GREETING, guard, transport};
use crate::mesh::tls::{PeerTls, SERVER_NAME, STREAM_ALPN};
use crate::mesh::{FrameReceiver, StreamError};

/// How long dialling may take, the greeting included. A live host on a slow wide-area path needs
/// three round trips.
const DIAL_PATIENCE: Duration = Duration::from_secs(3);

/// A place for one host's connection. Whoever dials holds its lock, so that others wait for the same
/// connection and make no second one.
type Place = Arc<tokio::sync::Mutex<Option<Connection>>>;

/// Connections to hosts.
#[derive(Debug)]
pub(super) struct Pool {
    endpoint: Endpoint,
    tls: PeerTls,
    tasks: TaskTracker,
    stop: CancellationToken,
    places: Mutex<BTreeMap<NodeId, Place>>,
}

impl Pool {
    pub(super) fn new(
        endpoint: Endpoint,
        tls: PeerTls,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        Self {
            endpoint,
            tls,
            tasks,
            stop,
            places: Mutex::new(BTreeMap::new()),
        }
    }

    /// Submits a request at a host.
    pub(super) async fn open(
        &self,
        members: &Members,
        host: Member,
        submit: Submit,
    ) -> Result<FrameReceiver, StreamError> {
        let node = host.facts.node;
        let (request, epoch) = (submit.request, submit.epoch);
        let connection = self.connection(members, &host).await?;
        let broken = |error: &dyn std::fmt::Display| StreamError::Broken {
            node,
            reason: error.to_string(),
        };
        let bytes = encode_frame(&submit, MAX_SUBMIT_BYTES).map_err(|error| broken(&error))?;
        let (mut send, recv) = connection.open_bi().await.map_err(|error| broken(&error))?;
        send.write_all(&bytes)
            .await
            .map_err(|error| broken(&error))?;
        // Only a stream that the host has stopped cannot be finished; reading will tell.
        drop(send.finish());

        let (inbox, frames) = mpsc::channel(FRAMES);
        let cancel = CancellationToken::new();
        let reader = Reader {
            node,
            request,
            epoch,
            frames: FrameReader::new(recv, MAX_FRAME_BYTES),
            inbox,
        };
        let cancelled = cancel.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                // Dropping the reader stops the stream, and the host with it.
                () = cancelled.cancelled() => {}
                () = reader.run() => {}
            }
        });
        Ok(FrameReceiver::remote(frames, Some(cancel.drop_guard())))
    }

    async fn connection(
        &self,
        members: &Members,
        host: &Member,
    ) -> Result<Connection, StreamError> {
        let node = host.facts.node;
        let place = self.place(members, node);
        let mut place = place.lock().await;
        if let Some(connection) = place.as_ref()
            && connection.close_reason().is_none()
        {
            return Ok(connection.clone());
        }
        let unreachable = |reason: String| StreamError::Unreachable { node, reason };
        let connection = timeout(DIAL_PATIENCE, self.dial(host))
            .await
            .map_err(|_| unreachable("no answer in time".into()))?
            .map_err(unreachable)?;
        debug!(%node, at = %host.facts.stream, "connected");
        self.tasks.spawn(guard(
            connection.clone(),
            node,
            members.clone(),
            self.stop.clone(),
        ));
        *place = Some(connection.clone());
        Ok(connection)
    }

    /// The host's place. Places of nodes that left the view go, which bounds the table by the view.
    fn place(&self, members: &Members, node: NodeId) -> Place {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        if !places.contains_key(&node) {
            places.retain(|node, _| members.find(*node).is_some());
        }
        Arc::clone(places.entry(node).or_default())
    }

    async fn dial(&self, host: &Member) -> Result<Connection, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let tls = self
            .tls
            .client(STREAM_ALPN, host.peer)
            .map_err(|error| text(&error))?;
        let connection = self
            .endpoint
            .connect_with(
                transport::client_config(tls),
                host.facts.stream,
                SERVER_NAME,
            )
            .map_err(|error| text(&error))?
            .await
            .map_err(|error| text(&error))?;
        let mut stream = connection
            .accept_uni()
            .await
            .map_err(|error| text(&error))?;
        let mut greeting = [0; GREETING.len()];
        stream
            .read_exact(&mut greeting)
            .await
            .map_err(|error| text(&error))?;
        if greeting != GREETING {
            return Err("it greets in another protocol".into());
        }
        Ok(connection)
    }
}

/// Reads the frames of one request.
struct Reader {
    node: NodeId,
    request: RequestId,
    epoch: Epoch,
    frames: FrameReader<RecvStream>,
    inbox: mpsc::Sender<Result<Frame, StreamError>>,
}

impl Reader {
    /// Reads to the last frame. Anything but a proper end is an error; nothing is read after it.
    async fn run(mut self) {
        loop {
            let (item, last) = match self.frames.next::<Frame>().await {
                Ok(Some(frame)) if (frame.request, frame.epoch) != (self.request, self.epoch) => {
                    (self.broken("it sent a frame of another request"), true)
                }
                Ok(Some(frame)) => {
                    let last = match frame.body {
                        FrameBody::Finished(_) | FrameBody::Failed(_) => true,
                        FrameBody::Started { .. } | FrameBody::Tokens(_) => false,
                    };
                    (Ok(frame), last)
                }
                Ok(None) => (self.broken("it ended before the request did"), true),
                Err(error) => (self.broken(&error.to_string()), true),
            };
            if self.inbox.send(item).await.is_err() || last {
                return;
            }
        }
    }

    fn broken(&self, reason: &str) -> Result<Frame, StreamError> {
        Err(StreamError::Broken {
            node: self.node,
            reason: reason.to_owned(),
        })
    }
}
