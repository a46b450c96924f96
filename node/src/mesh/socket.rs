//! One UDP port for token streams and gossip.
//!
//! QUIC packets have the fixed bit (0x40) of their first byte set; sealed gossip has it clear. The
//! endpoint's driver reads the socket, and [`SharedSocket::quic`] takes the gossip out of what it
//! reads. So the driver must run where gossip runs: on the runtime of the gossip thread, whose
//! [`Handle`] both [`SharedSocket::bind`] and the stream plane take. Gossip arrives only while the
//! endpoint lives; sending works from `bind` on.
//!
//! Traps of the socket, each met here:
//! - quinn forbids IP fragmentation on its sockets, and a gossip message may be longer than a link's
//!   MTU: `fragment` allows it again. QUIC packets keep the "don't fragment" bit as long as they
//!   fit the path's MTU.
//! - quinn sizes its read buffers by `max_udp_payload_size`, so without receive offload a longer
//!   gossip message would be cut: `endpoint_config` makes them long enough.
//! - quinn batches up to ten segments without asking whether they fit 64 KiB (measured: any MTU over
//!   6,550 drops throughput to a hundredth): longer batches are cut in two.
//! - quinn greases the fixed bit when a peer allows it: `endpoint_config` forbids it.
//! - several gossip messages may arrive as one, by receive offload: they are cut apart again.

mod fragment;

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::Bytes;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, EndpointConfig, Runtime, TokioRuntime, UdpPoller};
use shoal_gossip::{DatagramIo, MAX_DATAGRAM};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc};

/// QUIC's fixed bit (RFC 9000, 17.2).
pub const QUIC_BIT: u8 = 0x40;

/// Longest packet of token streams: Ethernet's 1,500 bytes less the headers of IPv6 and UDP. A frame rarely fills one.
pub(crate) const STREAM_MTU: u16 = 1452;

/// Longest packet we send or take, that of bulk where the path has room for it: a jumbo frame's 9,000 bytes less the same
/// headers. Work is per packet: half the processor time per byte of [`STREAM_MTU`] (measured).
pub(crate) const BULK_MTU: u16 = 8952;

/// Socket buffers asked for. The kernel's default of 208 KiB lost thousands of packets of a 1 GiB
/// transfer, 2 MB lost none (measured). The kernel may grant less (`net.core.rmem_max`).
const BUFFER_BYTES: usize = 2 << 20;

/// Gossip datagrams that may wait. At 9 messages an interval and node, a node gets about 36 a second
/// at the default interval; 256 are seven seconds of standstill, and 16 MiB at the very most.
const GOSSIP_WAITING: usize = 256;

/// Reads of a batch (32 datagrams) of nothing but gossip before other tasks of the thread get their turn.
const READS_PER_TURN: usize = 8;

/// One bound UDP port, split in two.
#[derive(Debug)]
pub struct SharedSocket {
    /// For the stream plane's endpoint.
    pub quic: Arc<dyn AsyncUdpSocket>,
    /// For the state plane.
    pub gossip: Arc<GossipSocket>,
}

impl SharedSocket {
    /// Binds `address` (port 0 takes a free one). `gossip_thread` is the runtime that will poll it.
    ///
    /// # Errors
    /// What the system says, usually that the port is in use.
    pub fn bind(address: SocketAddr, gossip_thread: &Handle) -> io::Result<Self> {
        let socket = UdpSocket::bind(address)?;
        let options = socket2::SockRef::from(&socket);
        let receive = options.set_recv_buffer_size(BUFFER_BYTES);
        check_buffer("receive", receive.and_then(|()| options.recv_buffer_size()));
        let send = options.set_send_buffer_size(BUFFER_BYTES);
        check_buffer("send", send.and_then(|()| options.send_buffer_size()));
        let sending = socket.try_clone()?;
        let inner = {
            let _runtime = gossip_thread.enter();
            TokioRuntime.wrap_udp_socket(socket)?
        };
        fragment::allow(&sending)?;

        let (outbox, inbox) = mpsc::channel(GOSSIP_WAITING);
        let dropped = Arc::new(AtomicU64::new(0));
        Ok(Self {
            quic: Arc::new(QuicSocket {
                inner,
                outbox,
                dropped: Arc::clone(&dropped),
            }),
            gossip: Arc::new(GossipSocket {
                socket: sending,
                inbox: Mutex::new(inbox),
                dropped,
            }),
        })
    }

    /// Where it is bound.
    ///
    /// # Errors
    /// What the system says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.quic.local_addr()
    }
}

/// Says so when the system gives less than [`BUFFER_BYTES`]. Linux tells twice what it gives.
fn check_buffer(what: &str, told: io::Result<usize>) {
    match told {
        Ok(told) if told / 2 >= BUFFER_BYTES => {}
        Ok(told) => tracing::info!(
            what,
            granted = told / 2,
            asked = BUFFER_BYTES,
            "the socket buffer is small, and hand-overs will be slow: raise net.core.rmem_max and wmem_max"
        ),
        Err(error) => tracing::debug!(what, %error, "the socket buffer keeps its size"),
    }
}

/// The endpoint settings that sharing needs.
///
/// # Errors
/// Never for the values used; the library's check is passed on.
pub(crate) fn endpoint_config(
    socket: &dyn AsyncUdpSocket,
) -> Result<EndpointConfig, quinn::ConfigError> {
    let mut config = EndpointConfig::default();
    config.grease_quic_bit(false);
    // quinn reads into buffers of payload size × segments; together they must hold a whole datagram.
    let segments = socket.max_receive_segments().clamp(1, MAX_DATAGRAM);
    let needed = u16::try_from(MAX_DATAGRAM.div_ceil(segments)).unwrap_or(u16::MAX);
    config.max_udp_payload_size(needed.max(BULK_MTU))?;
    Ok(config)
}

/// QUIC's side: a socket that keeps gossip to itself.
struct QuicSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    outbox: mpsc::Sender<(Bytes, SocketAddr)>,
    dropped: Arc<AtomicU64>,
}

impl fmt::Debug for QuicSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuicSocket")
            .field("address", &self.inner.local_addr().ok())
            .finish_non_exhaustive()
    }
}

impl QuicSocket {
    /// Hands the gossip in `buffer` over and closes the gaps. Returns how many bytes of QUIC are left.
    fn take_gossip(&self, buffer: &mut [u8], meta: &RecvMeta) -> usize {
        let length = meta.len.min(buffer.len());
        let stride = meta.stride.max(1);
        let (mut read, mut kept) = (0, 0);
        while read < length {
            let end = (read + stride).min(length);
            if buffer[read] & QUIC_BIT == 0 {
                self.hand_over(Bytes::copy_from_slice(&buffer[read..end]), meta.addr);
            } else {
                if kept != read {
                    buffer.copy_within(read..end, kept);
                }
                kept += end - read;
            }
            read = end;
        }
        kept
    }

    /// Gossip that finds no room is lost, as datagrams are; the next round repeats it.
    fn hand_over(&self, datagram: Bytes, from: SocketAddr) {
        if self.outbox.try_send((datagram, from)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl AsyncUdpSocket for QuicSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let Some(segment) = transmit
            .segment_size
            .filter(|_| transmit.contents.len() > MAX_DATAGRAM)
        else {
            return self.inner.try_send(transmit);
        };
        let most = (MAX_DATAGRAM / segment.max(1)).max(1) * segment;
        for contents in transmit.contents.chunks(most.max(1)) {
            // When the second half finds no room, quinn sends both again: duplicates harm nothing.
            self.inner.try_send(&Transmit {
                contents,
                ..*transmit
            })?;
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        for _ in 0..READS_PER_TURN {
            let count = ready!(self.inner.poll_recv(context, buffers, metas))?;
            let mut left = 0;
            for (buffer, meta) in buffers.iter_mut().zip(metas.iter_mut()).take(count) {
                meta.len = self.take_gossip(buffer, meta);
                left += meta.len;
            }
            if left > 0 {
                return Poll::Ready(Ok(count));
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

/// The state plane's side of the port.
#[derive(Debug)]
pub struct GossipSocket {
    socket: UdpSocket,
    inbox: Mutex<mpsc::Receiver<(Bytes, SocketAddr)>>,
    dropped: Arc<AtomicU64>,
}

impl GossipSocket {
    /// Datagrams that arrived and found no room, since the start.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl DatagramIo for GossipSocket {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Sends one datagram, whose first byte must have [`QUIC_BIT`] clear: the receiver would take it
    /// for QUIC otherwise.
    async fn send_to(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        if datagram.first().is_none_or(|first| first & QUIC_BIT != 0) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a gossip datagram: QUIC's fixed bit is set",
            ));
        }
        match self.socket.send_to(datagram, to) {
            Ok(_) => Ok(()),
            // A full buffer drops it, as any hop on the way might.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn recv_from(&self) -> io::Result<(Bytes, SocketAddr)> {
        self.inbox
            .lock()
            .await
            .recv()
            .await
            .ok_or_else(|| io::Error::new(io::ErrorKind::BrokenPipe, "the stream plane has ended"))
    }
}

#[cfg(test)]
mod tests;
