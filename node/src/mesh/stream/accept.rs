//! The host's side: admit connections, read submissions, write frames. Connections for bulk go to its receiver.
//! Who may begin a handshake is the door's to say: [`crate::mesh::door`].

use std::sync::Arc;

use quinn::{Connection, Endpoint, Incoming, RecvStream, SendStream};
use shoal_gossip::NodeId;
use shoal_migrate::transfer::quic::QuicReceiver;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, trace};

use crate::mesh::StreamHandler;
use crate::mesh::bulk;
use crate::mesh::codec::{CodecError, FrameReader, encode_frame};
use crate::mesh::door::{Doorkeeper, HANDSHAKE_PATIENCE, Place};
use crate::mesh::members::Members;
use crate::mesh::messages::{Frame, MAX_FRAME_BYTES, MAX_SUBMIT_BYTES, Open};
use crate::mesh::stream::{CODE_CLOSING, CODE_NOT_A_MEMBER, FRAMES, GREETING, SUBMIT_PATIENCE};
use crate::mesh::tls::{BULK_ALPN, alpn_of, peer_of};

/// Connections from outside, handshakes included: one from each node of the largest mesh, and as many
/// again that are being replaced. Beyond it they are refused at their first packet.
const CONNECTIONS: usize = 8_000;

/// Kibibytes of submissions that may be read at once, over all peers: ten of the longest, or thousands
/// of the usual. Beyond it they wait their turn, in their sender's memory.
const SUBMIT_KIB: usize = 256 * 1024;

pub(super) struct Acceptor {
    pub(super) endpoint: Endpoint,
    pub(super) members: Members,
    pub(super) handler: Arc<dyn StreamHandler>,
    pub(super) bulk: Arc<QuicReceiver>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
}

impl Acceptor {
    pub(super) async fn run(self) {
        let connections = Arc::new(Semaphore::new(CONNECTIONS));
        // Streams and bulk are dialled from the endpoint that serves them.
        let mut door = Doorkeeper::new(self.members.clone(), |facts| facts.stream);
        let room = Arc::new(Semaphore::new(SUBMIT_KIB));
        loop {
            let incoming = tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                incoming = self.endpoint.accept() => incoming,
            };
            let Some(incoming) = incoming else { return };
            let Ok(connection) = Arc::clone(&connections).try_acquire_owned() else {
                trace!("too many connections; one is refused");
                incoming.refuse();
                continue;
            };
            let Ok((incoming, place)) = door.meet(incoming) else {
                continue;
            };
            let host = Host {
                members: self.members.clone(),
                handler: Arc::clone(&self.handler),
                bulk: Arc::clone(&self.bulk),
                room: Arc::clone(&room),
                stop: self.stop.clone(),
                tasks: self.tasks.clone(),
            };
            self.tasks.spawn(host.welcome(incoming, connection, place));
        }
    }
}

/// What the tasks of one connection need.
#[derive(Clone)]
struct Host {
    members: Members,
    handler: Arc<dyn StreamHandler>,
    bulk: Arc<QuicReceiver>,
    /// Bounds the memory that submissions take while they are read.
    room: Arc<Semaphore>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Host {
    async fn welcome(self, incoming: Incoming, _connection: OwnedSemaphorePermit, place: Place) {
        let admitted = timeout(HANDSHAKE_PATIENCE, self.admit(incoming)).await;
        if let Ok(Ok(_)) = &admitted {
            place.welcome();
        } else {
            drop(place);
        }
        match admitted {
            Ok(Ok((connection, node))) if is_bulk(&connection) => {
                self.serve_bulk(connection, node).await;
            }
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
        if is_bulk(&connection) {
            bulk::widen(&connection);
        }
        let mut greeting = connection.open_uni().await.map_err(|error| text(&error))?;
        greeting
            .write_all(&GREETING)
            .await
            .map_err(|error| text(&error))?;
        Ok((connection, node))
    }

    /// Takes streams until the connection ends, the plane stops or the peer leaves the view.
    async fn serve(self, connection: Connection, node: NodeId) {
        let mut expelled = std::pin::pin!(self.members.clone().until_gone(node, None));
        loop {
            let accepted = tokio::select! {
                biased;
                () = self.stop.cancelled() => {
                    return connection.close(CODE_CLOSING, b"closing");
                }
                () = &mut expelled => {
                    return connection.close(CODE_NOT_A_MEMBER, b"not in the mesh");
                }
                accepted = connection.accept_bi() => accepted,
            };
            match accepted {
                Ok((send, recv)) => {
                    self.tasks.spawn(self.clone().request(node, send, recv));
                }
                Err(error) => {
                    trace!(%node, %error, "connection over");
                    return;
                }
            }
        }
    }

    /// Takes parcels until the connection ends, the plane stops or the peer leaves the view.
    async fn serve_bulk(self, connection: Connection, node: NodeId) {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => connection.close(CODE_CLOSING, b"closing"),
            () = self.members.clone().until_gone(node, None) => {
                connection.close(CODE_NOT_A_MEMBER, b"not in the mesh");
            }
            () = self.bulk.serve(connection.clone(), node) => {}
        }
    }

    /// One request of another home.
    async fn request(self, from: NodeId, send: SendStream, recv: RecvStream) {
        let mut reader = FrameReader::new(recv, MAX_SUBMIT_BYTES);
        let open = match timeout(SUBMIT_PATIENCE, self.read(&mut reader)).await {
            Ok(Ok(open)) => open,
            // Dropping the stream tells the home.
            Ok(Err(error)) => return debug!(%from, %error, "a submission could not be read"),
            Err(_) => return debug!(%from, "a submission took too long"),
        };
        drop(reader);
        let (frames, outbox) = mpsc::channel(FRAMES);
        // The writer drops its end when the home stops the stream, which ends the handler.
        tokio::join!(self.handler.serve(from, open, frames), write(send, outbox));
    }

    async fn read(&self, reader: &mut FrameReader<RecvStream>) -> Result<Open, CodecError> {
        let length = reader.length().await?.ok_or(CodecError::Truncated)?;
        let kib = u32::try_from(length.div_ceil(1024)).unwrap_or(u32::MAX);
        let _room = self.room.acquire_many(kib).await;
        reader.next().await?.ok_or(CodecError::Truncated)
    }
}

fn is_bulk(connection: &Connection) -> bool {
    alpn_of(connection).is_some_and(|alpn| alpn == BULK_ALPN)
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
