//! The host's side: admit connections, read submissions, write frames.

use std::sync::Arc;
use std::time::Duration;

use quinn::{Connection, Endpoint, Incoming, RecvStream, SendStream};
use shoal_gossip::NodeId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, trace};

use crate::mesh::StreamHandler;
use crate::mesh::codec::{CodecError, FrameReader, encode_frame};
use crate::mesh::members::Members;
use crate::mesh::messages::{Frame, MAX_FRAME_BYTES, MAX_SUBMIT_BYTES, Submit};
use crate::mesh::stream::{FRAMES, GREETING, guard};
use crate::mesh::tls::peer_of;

/// Connections from outside, handshakes included: one from each node of the largest mesh, and as many
/// again that are being replaced. Beyond it they are refused at their first packet.
const CONNECTIONS: usize = 8_000;

/// Handshakes at once. Each costs about a millisecond; strangers can make no more work than this.
const HANDSHAKES: usize = 128;

/// How long a handshake may take.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(5);

/// How long a submission may take to arrive: the largest at a slow 1 MB/s.
const SUBMIT_PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Acceptor {
    pub(super) endpoint: Endpoint,
    pub(super) members: Members,
    pub(super) handler: Arc<dyn StreamHandler>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
}

impl Acceptor {
    pub(super) async fn run(self) {
        let connections = Arc::new(Semaphore::new(CONNECTIONS));
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
        loop {
            let incoming = tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                incoming = self.endpoint.accept() => incoming,
            };
            let Some(incoming) = incoming else { return };
            let places = (
                Arc::clone(&connections).try_acquire_owned(),
                Arc::clone(&handshakes).try_acquire_owned(),
            );
            let (Ok(connection), Ok(handshake)) = places else {
                trace!("too many connections; one is refused");
                incoming.refuse();
                continue;
            };
            let host = Host {
                members: self.members.clone(),
                handler: Arc::clone(&self.handler),
                stop: self.stop.clone(),
                tasks: self.tasks.clone(),
            };
            self.tasks
                .spawn(host.welcome(incoming, connection, handshake));
        }
    }
}

/// What the tasks of one connection need.
#[derive(Clone)]
struct Host {
    members: Members,
    handler: Arc<dyn StreamHandler>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Host {
    async fn welcome(
        self,
        incoming: Incoming,
        _place: OwnedSemaphorePermit,
        handshake: OwnedSemaphorePermit,
    ) {
        let admitted = timeout(HANDSHAKE_PATIENCE, self.admit(incoming)).await;
        drop(handshake);
        match admitted {
            Ok(Ok((connection, node))) => self.serve(connection, node).await,
            Ok(Err(reason)) => trace!(reason, "connection refused"),
            Err(_) => trace!("a handshake took too long"),
        }
    }

    async fn admit(&self, incoming: Incoming) -> Result<(Connection, NodeId), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let connecting = incoming.accept().map_err(|error| text(&error))?;
        let connection = connecting.await.map_err(|error| text(&error))?;
        let peer = peer_of(&connection).ok_or("no identity")?;
        let node = self.members.admit(&peer).ok_or("not in the mesh")?;
        let mut greeting = connection.open_uni().await.map_err(|error| text(&error))?;
        greeting
            .write_all(&GREETING)
            .await
            .map_err(|error| text(&error))?;
        Ok((connection, node))
    }

    async fn serve(self, connection: Connection, node: NodeId) {
        self.tasks.spawn(guard(
            connection.clone(),
            node,
            self.members.clone(),
            self.stop.clone(),
        ));
        loop {
            match connection.accept_bi().await {
                Ok((send, recv)) => {
                    let handler = Arc::clone(&self.handler);
                    self.tasks.spawn(async move {
                        if let Err(error) = request(handler, node, send, recv).await {
                            debug!(%node, %error, "a submission could not be read");
                        }
                    });
                }
                Err(error) => {
                    trace!(%node, %error, "connection over");
                    return;
                }
            }
        }
    }
}

/// One request of another home.
async fn request(
    handler: Arc<dyn StreamHandler>,
    from: NodeId,
    send: SendStream,
    recv: RecvStream,
) -> Result<(), CodecError> {
    let mut reader = FrameReader::new(recv, MAX_SUBMIT_BYTES);
    let submit = timeout(SUBMIT_PATIENCE, reader.next::<Submit>())
        .await
        .map_err(|_| CodecError::Truncated)??
        .ok_or(CodecError::Truncated)?;
    let (frames, outbox) = mpsc::channel(FRAMES);
    // The writer drops its end when the home stops the stream, which ends the handler.
    tokio::join!(handler.serve(from, submit, frames), write(send, outbox));
    Ok(())
}

/// Writes frames until the last, or until the home no longer wants them.
async fn write(mut send: SendStream, mut outbox: mpsc::Receiver<Frame>) {
    let stopped = send.stopped();
    let writing = async {
        while let Some(frame) = outbox.recv().await {
            let bytes = match encode_frame(&frame, MAX_FRAME_BYTES) {
                Ok(bytes) => bytes,
                Err(error) => {
                    debug!(request = %frame.request, %error, "a frame cannot be sent");
                    return;
                }
            };
            if send.write_all(&bytes).await.is_err() {
                return;
            }
        }
        // A stream that was stopped meanwhile needs no end.
        drop(send.finish());
    };
    tokio::select! {
        biased;
        _ = stopped => {}
        () = writing => {}
    }
}
