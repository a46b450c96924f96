//! The seam to the network: whole datagrams in and out.
//!
//! In production the socket is shared with the stream plane's QUIC endpoint, which hands over the
//! datagrams whose first byte has QUIC's fixed bit (0x40) clear.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::net::UdpSocket;

/// Largest UDP payload over IPv4.
pub const MAX_DATAGRAM: usize = 65_507;

/// Sends and receives datagrams. An error from `recv_from` means that the socket is broken for good;
/// transient ones are the implementation's to swallow.
#[async_trait]
pub trait DatagramIo: Send + Sync + fmt::Debug + 'static {
    /// Where it is bound.
    fn local_addr(&self) -> io::Result<SocketAddr>;

    /// Sends one datagram. Never waits for the peer; a full socket buffer may drop it.
    async fn send_to(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()>;

    /// The next datagram. Safe to drop.
    async fn recv_from(&self) -> io::Result<(Bytes, SocketAddr)>;
}

#[async_trait]
impl DatagramIo for UdpSocket {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }

    async fn send_to(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        Self::send_to(self, datagram, to).await.map(|_| ())
    }

    async fn recv_from(&self) -> io::Result<(Bytes, SocketAddr)> {
        loop {
            self.readable().await?;
            let mut buffer = vec![0; MAX_DATAGRAM];
            match self.try_recv_from(&mut buffer) {
                Ok((length, from)) => {
                    buffer.truncate(length);
                    return Ok((Bytes::from(buffer), from));
                }
                // A closed peer port comes back as an error on the next receive; it is not ours.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionRefused
                    ) => {}
                Err(error) => return Err(error),
            }
        }
    }
}
