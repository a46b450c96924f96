//! Carries the gossip library's messages over sealed datagrams.
//!
//! The library keeps the codec of its messages to itself, so its own UDP socket serves as the codec,
//! over a private pair of loopback sockets (the *tap*):
//!
//! ```text
//!  send: library ── inner.send ──> tap ── seal ──> network
//!  recv: network ── open ──> tap ──> inner.recv ── library
//! ```
//!
//! Two more loopback system calls a message; measured at 56 µs of 209 µs a message, sealing included.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use async_trait::async_trait;
use chitchat::transport::{RecvOutcome, SendOutcome, Socket, Transport, UdpSocket as Codec};
use chitchat::{ChitchatEnvelope, ChitchatMessage, ProtocolVersion};
use futures::FutureExt;
use tokio::net::UdpSocket as Tap;
use tokio::time::timeout;
use tracing::{debug, trace};

use crate::clock::unix_time;
use crate::io::{DatagramIo, MAX_DATAGRAM};
use crate::seal::Framing;
use crate::stats::Counters;

/// Longest wait for a message to come through the tap. Loopback delivers before the sender's system
/// call returns, so this runs out only when the codec refused the message or the kernel dropped it.
const TAP_WAIT: Duration = Duration::from_millis(50);

/// Longest wait for the first message through a new tap.
const TAP_OPENING: Duration = Duration::from_secs(5);

/// Opens sockets over one network socket. The seal outlives the sockets, so that a restart of the
/// gossip task opens no hole for replays.
pub(crate) struct SealedTransport {
    pub(crate) io: Arc<dyn DatagramIo>,
    pub(crate) framing: Arc<Mutex<Framing>>,
    pub(crate) counters: Arc<Counters>,
}

#[async_trait]
impl Transport for SealedTransport {
    /// `listen_addr` is not used: the network socket is bound already.
    async fn open(&self, _listen_addr: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let tap = Tap::bind(loopback).await.context("no loopback socket")?;
        let codec = Codec::open(loopback).await?;
        let mut socket = SealedSocket {
            tap_address: tap.local_addr()?,
            codec_address: codec.local_addr()?,
            tap,
            codec,
            io: Arc::clone(&self.io),
            framing: Arc::clone(&self.framing),
            counters: Arc::clone(&self.counters),
            buffer: vec![0; MAX_DATAGRAM].into_boxed_slice(),
            magic: [0; 2],
            pending: None,
            late: false,
        };
        timeout(TAP_OPENING, socket.try_tap())
            .await
            .context("nothing came through the loopback tap")??;
        Ok(Box::new(socket))
    }
}

struct SealedSocket {
    codec: Codec,
    codec_address: SocketAddr,
    tap: Tap,
    tap_address: SocketAddr,
    io: Arc<dyn DatagramIo>,
    framing: Arc<Mutex<Framing>>,
    counters: Arc<Counters>,
    buffer: Box<[u8]>,
    /// First two bytes of every message of the library, learnt from the first one.
    magic: [u8; 2],
    /// Origin of the message that is in the codec's receive queue. A field, so that a dropped
    /// `recv` does not forget it.
    pending: Option<SocketAddr>,
    /// A message did not come through the tap in time; it may still lie in either queue.
    late: bool,
}

impl SealedSocket {
    /// Sends a message that means nothing through the tap in both directions. Proves that the tap
    /// works, learns the codec's magic number, and leaves both sockets known as ready, so that later
    /// turns need no wake-up.
    async fn try_tap(&mut self) -> anyhow::Result<()> {
        let probe = ChitchatEnvelope {
            version: ProtocolVersion::V1,
            message: ChitchatMessage::BadCluster,
        };
        let message = self.encode(probe).await?;
        let Some(magic) = message.first_chunk() else {
            bail!("the codec's messages are shorter than expected");
        };
        self.magic = *magic;
        self.tap.send_to(&message, self.codec_address).await?;
        self.codec.recv().await?;
        Ok(())
    }

    async fn encode(&mut self, envelope: ChitchatEnvelope) -> anyhow::Result<Vec<u8>> {
        self.forget_late()?;
        self.codec.send(self.tap_address, envelope).await?;
        loop {
            let (length, from) = self.tap.recv_from(&mut self.buffer).await?;
            // Other processes of this host may send here too; only the codec is believed.
            if from == self.codec_address {
                return Ok(self.buffer[..length].to_vec());
            }
        }
    }

    fn lock_framing(&self) -> MutexGuard<'_, Framing> {
        self.framing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next authentic message from the network.
    async fn next_message(&mut self) -> anyhow::Result<(Vec<u8>, SocketAddr)> {
        loop {
            let (datagram, from) = self.io.recv_from().await?;
            self.counters.datagrams_in.add(1);
            self.counters.bytes_in.add(datagram.len() as u64);
            let opened = self.lock_framing().open(unix_time(), &datagram);
            match opened {
                Ok(message) if message.starts_with(&self.magic) => return Ok((message, from)),
                Ok(_) => self.counters.dropped_malformed.add(1),
                Err(error) => {
                    trace!(%from, %error, "datagram dropped");
                    self.counters.dropped(error);
                }
            }
        }
    }

    /// What the codec makes of the message in its queue; `None` when it refused it.
    async fn decode(&mut self) -> anyhow::Result<Option<RecvOutcome>> {
        match timeout(TAP_WAIT, self.receive_from_tap()).await {
            Ok(outcome) => outcome.map(Some),
            Err(_) => {
                self.late = true;
                Ok(None)
            }
        }
    }

    async fn receive_from_tap(&mut self) -> anyhow::Result<RecvOutcome> {
        loop {
            let outcome = self.codec.recv().await?;
            if outcome.from_addr == self.tap_address {
                return Ok(outcome);
            }
        }
    }

    /// Empties both queues of a message that came too late, so that it is not taken for the next
    /// one. Only after one was late: looking into an empty queue costs the next message a wake-up.
    fn forget_late(&mut self) -> anyhow::Result<()> {
        if !self.late {
            return Ok(());
        }
        while self.tap.try_recv_from(&mut self.buffer).is_ok() {}
        while self
            .receive_from_tap()
            .now_or_never()
            .transpose()?
            .is_some()
        {}
        self.late = false;
        Ok(())
    }
}

#[async_trait]
impl Socket for SealedSocket {
    fn local_addr(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.io.local_addr()?)
    }

    /// Never fails for good: what cannot be sent is counted and lost, as a network loses it.
    async fn send(
        &mut self,
        to: SocketAddr,
        envelope: ChitchatEnvelope,
    ) -> anyhow::Result<SendOutcome> {
        let unsent = SendOutcome { num_bytes_sent: 0 };
        let message = match timeout(TAP_WAIT, self.encode(envelope)).await {
            Ok(Ok(message)) => message,
            // The codec's socket refuses exactly what is longer than a datagram.
            Ok(Err(error)) => {
                debug!(%to, %error, "message does not fit a datagram");
                self.counters.unsent_oversized.add(1);
                return Ok(unsent);
            }
            Err(_) => {
                self.late = true;
                self.counters.unsent_refused.add(1);
                return Ok(unsent);
            }
        };
        let sealed = self.lock_framing().seal(unix_time(), &message);
        let datagram = match sealed {
            Ok(datagram) => datagram,
            Err(error) => {
                debug!(%to, %error, "message not sealed");
                self.counters.unsent(error);
                return Ok(unsent);
            }
        };
        if let Err(error) = self.io.send_to(&datagram, to).await {
            trace!(%to, %error, "datagram not sent");
            self.counters.unsent_refused.add(1);
            return Ok(unsent);
        }
        self.counters.datagrams_out.add(1);
        self.counters.bytes_out.add(datagram.len() as u64);
        Ok(SendOutcome {
            num_bytes_sent: datagram.len(),
        })
    }

    /// Cancel-safe: a message that was taken from the network stays in the tap, its origin in `pending`.
    async fn recv(&mut self) -> anyhow::Result<RecvOutcome> {
        loop {
            if let Some(from) = self.pending {
                let decoded = self.decode().await?;
                self.pending = None;
                match decoded {
                    Some(outcome) => {
                        return Ok(RecvOutcome {
                            from_addr: from,
                            ..outcome
                        });
                    }
                    None => self.counters.dropped_malformed.add(1),
                }
            }
            let (message, from) = self.next_message().await?;
            self.forget_late()?;
            self.tap.send_to(&message, self.codec_address).await?;
            self.pending = Some(from);
        }
    }
}

#[cfg(test)]
mod tests;
