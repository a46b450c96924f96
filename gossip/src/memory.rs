//! A network inside one process, for tests: datagrams with cuts and loss, no sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::mpsc;

use crate::io::{DatagramIo, MAX_DATAGRAM};

/// Datagrams one socket holds for its reader, as a socket buffer would; more are lost.
const QUEUE: usize = 1_024;

/// Addresses, the links between them, and what is lost on the way.
#[derive(Clone)]
pub struct MemoryNet {
    state: Arc<Mutex<State>>,
}

struct State {
    sockets: BTreeMap<SocketAddr, mpsc::Sender<(Bytes, SocketAddr)>>,
    cut: BTreeSet<(SocketAddr, SocketAddr)>,
    loss: f64,
    rng: StdRng,
}

impl fmt::Debug for MemoryNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("MemoryNet")
            .field("sockets", &state.sockets.len())
            .field("cut", &state.cut)
            .field("loss", &state.loss)
            .finish_non_exhaustive()
    }
}

impl MemoryNet {
    /// A network that loses nothing; `seed` decides what is lost once [`set_loss`](Self::set_loss) says so.
    pub fn new(seed: u64) -> Self {
        Self {
            state: Arc::new(Mutex::new(State {
                sockets: BTreeMap::new(),
                cut: BTreeSet::new(),
                loss: 0.0,
                rng: StdRng::seed_from_u64(seed),
            })),
        }
    }

    /// A socket at `address`, until it is dropped. Port 0 takes the first free one from 10,000.
    pub fn bind(&self, address: SocketAddr) -> io::Result<Arc<MemoryIo>> {
        let mut state = self.lock();
        let mut address = address;
        if address.port() == 0 {
            let free = (10_000..u16::MAX)
                .find(|port| {
                    !state
                        .sockets
                        .contains_key(&SocketAddr::new(address.ip(), *port))
                })
                .ok_or(io::ErrorKind::AddrNotAvailable)?;
            address.set_port(free);
        }
        if state.sockets.contains_key(&address) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        state.sockets.insert(address, sender);
        Ok(Arc::new(MemoryIo {
            net: self.clone(),
            address,
            receiver: tokio::sync::Mutex::new(receiver),
        }))
    }

    /// Cuts or mends the way from `from` to `to`; the way back is another one.
    pub fn set_cut(&self, from: SocketAddr, to: SocketAddr, cut: bool) {
        let mut state = self.lock();
        if cut {
            state.cut.insert((from, to));
        } else {
            state.cut.remove(&(from, to));
        }
    }

    /// Loses this share of all datagrams, 0 to 1.
    pub fn set_loss(&self, share: f64) {
        self.lock().loss = share.clamp(0.0, 1.0);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry(&self, from: SocketAddr, datagram: &[u8], to: SocketAddr) {
        let mut state = self.lock();
        // Drawn before anything is decided, so that a cut does not shift every later draw.
        let share = state.loss;
        let lost = state.rng.random_bool(share);
        if lost || state.cut.contains(&(from, to)) {
            return;
        }
        if let Some(socket) = state.sockets.get(&to)
            && socket
                .try_send((Bytes::copy_from_slice(datagram), from))
                .is_err()
        {
            tracing::trace!(%to, "queue full, datagram lost");
        }
    }
}

/// One socket of a [`MemoryNet`].
pub struct MemoryIo {
    net: MemoryNet,
    address: SocketAddr,
    receiver: tokio::sync::Mutex<mpsc::Receiver<(Bytes, SocketAddr)>>,
}

impl fmt::Debug for MemoryIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemoryIo").field(&self.address).finish()
    }
}

impl Drop for MemoryIo {
    fn drop(&mut self) {
        self.net.lock().sockets.remove(&self.address);
    }
}

#[async_trait]
impl DatagramIo for MemoryIo {
    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }

    async fn send_to(&self, datagram: &[u8], to: SocketAddr) -> io::Result<()> {
        if datagram.len() > MAX_DATAGRAM {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.net.carry(self.address, datagram, to);
        Ok(())
    }

    async fn recv_from(&self) -> io::Result<(Bytes, SocketAddr)> {
        self.receiver
            .lock()
            .await
            .recv()
            .await
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::net::UdpSocket;

    use super::*;
    use crate::testing::datagram_contract;

    fn local() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, 0).into()
    }

    #[tokio::test]
    async fn udp_sockets_keep_the_contract() {
        let one = Arc::new(UdpSocket::bind(local()).await.unwrap());
        let two = Arc::new(UdpSocket::bind(local()).await.unwrap());
        datagram_contract(one, two).await;
    }

    #[tokio::test]
    async fn memory_sockets_keep_the_contract() {
        let net = MemoryNet::new(1);
        datagram_contract(net.bind(local()).unwrap(), net.bind(local()).unwrap()).await;
    }

    #[tokio::test]
    async fn a_cut_goes_one_way_and_an_address_is_free_after_its_socket() {
        let net = MemoryNet::new(1);
        let one = net.bind(local()).unwrap();
        let two = net.bind(local()).unwrap();
        let (at_one, at_two) = (one.address, two.address);
        net.set_cut(at_one, at_two, true);
        one.send_to(b"lost", at_two).await.unwrap();
        two.send_to(b"back", at_one).await.unwrap();
        assert_eq!(one.recv_from().await.unwrap().0, "back");
        net.set_cut(at_one, at_two, false);
        one.send_to(b"mended", at_two).await.unwrap();
        assert_eq!(two.recv_from().await.unwrap().0, "mended");

        assert!(net.bind(at_two).is_err());
        drop(two);
        assert!(net.bind(at_two).is_ok());
    }

    #[tokio::test]
    async fn the_seed_decides_what_is_lost() {
        let arrived = |seed| async move {
            let net = MemoryNet::new(seed);
            net.set_loss(0.5);
            let one = net.bind(local()).unwrap();
            let two = net.bind(local()).unwrap();
            for n in 0..100 {
                one.send_to(&[n], two.address).await.unwrap();
            }
            net.set_loss(0.0);
            one.send_to(b"end", two.address).await.unwrap();
            let mut arrived = Vec::new();
            loop {
                let (datagram, _) = two.recv_from().await.unwrap();
                if datagram == "end" {
                    return arrived;
                }
                arrived.push(datagram);
            }
        };
        let first = arrived(3).await;
        assert!((20..80).contains(&first.len()), "{}", first.len());
        assert_eq!(first, arrived(3).await);
        assert_ne!(first, arrived(4).await);
    }
}
