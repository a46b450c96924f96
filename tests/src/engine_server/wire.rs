//! One connection: it can be reset, as the kernel does with those of a killed process.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Makes connections end in a reset instead of a close, once pulled.
#[derive(Clone, Debug, Default)]
pub(super) struct ResetCord(Arc<AtomicBool>);

impl ResetCord {
    pub(super) fn pull(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_pulled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A connection that is reset when dropped with one of its cords pulled.
#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    own: ResetCord,
    server: ResetCord,
}

impl Wire {
    pub(super) fn new(stream: TcpStream, own: ResetCord, server: ResetCord) -> Self {
        // Only makes the tests slower where it is refused.
        drop(stream.set_nodelay(true));
        Self {
            stream,
            own,
            server,
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.own.is_pulled() || self.server.is_pulled() {
            // Refused only when the peer has reset it before.
            drop(self.stream.set_zero_linger());
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
