//! A QUIC connection as the swarm sees it: something that carries streams.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::future::BoxFuture;
use futures::{AsyncRead, AsyncWrite, FutureExt};
use libp2p::core::muxing::{StreamMuxer, StreamMuxerEvent};
use quinn::{Connection, ConnectionError, RecvStream, SendStream, VarInt};

/// A stream on its way.
type Opening = BoxFuture<'static, Result<(SendStream, RecvStream), ConnectionError>>;

/// One connection. It has no task of its own: the endpoint drives it.
pub(super) struct Muxer {
    connection: Connection,
    inbound: Option<Opening>,
    outbound: Option<Opening>,
    closing: Option<BoxFuture<'static, ConnectionError>>,
}

impl Muxer {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            inbound: None,
            outbound: None,
            closing: None,
        }
    }
}

/// Polls a stream that is on its way, and forgets it once it is there.
fn poll_opening(
    slot: &mut Option<Opening>,
    cx: &mut Context<'_>,
    connection: &Connection,
    open: impl FnOnce(Connection) -> Opening,
) -> Poll<Result<Stream, ConnectionError>> {
    let opening = slot.get_or_insert_with(|| open(connection.clone()));
    let opened = ready!(opening.poll_unpin(cx));
    *slot = None;
    Poll::Ready(opened.map(|(send, recv)| Stream { send, recv }))
}

impl StreamMuxer for Muxer {
    type Substream = Stream;
    type Error = ConnectionError;

    fn poll_inbound(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Stream, ConnectionError>> {
        let this = self.get_mut();
        poll_opening(&mut this.inbound, cx, &this.connection, |connection| {
            async move { connection.accept_bi().await }.boxed()
        })
    }

    fn poll_outbound(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Stream, ConnectionError>> {
        let this = self.get_mut();
        poll_opening(&mut this.outbound, cx, &this.connection, |connection| {
            async move { connection.open_bi().await }.boxed()
        })
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        let this = self.get_mut();
        let connection = &this.connection;
        let closing = this.closing.get_or_insert_with(|| {
            connection.close(VarInt::from_u32(0), &[]);
            let connection = connection.clone();
            async move { connection.closed().await }.boxed()
        });
        match ready!(closing.poll_unpin(cx)) {
            ConnectionError::LocallyClosed => Poll::Ready(Ok(())),
            error => Poll::Ready(Err(error)),
        }
    }

    /// Connections do not move, so there is nothing to tell.
    fn poll(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Result<StreamMuxerEvent, ConnectionError>> {
        Poll::Pending
    }
}

/// One stream, both ways.
pub(super) struct Stream {
    send: SendStream,
    recv: RecvStream,
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        self.recv.poll_read(cx, buffer).map_err(Into::into)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.send)
            .poll_write(cx, bytes)
            .map_err(Into::into)
    }

    /// QUIC sends by itself.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Ends what is sent. Once more is no error: a swarm may close a stream again.
    fn poll_close(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        drop(self.send.finish());
        Poll::Ready(Ok(()))
    }
}
