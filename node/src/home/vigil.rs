//! The shell of [`vitals`](super::vitals): looks at the hosts of all requests, and tells the requests of a dead one.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shoal_gossip::NodeId;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::home::vitals::{Death, Sight, Vitals};
use crate::knowledge::Knowledge;
use crate::metrics::Metrics;

/// Time between two looks. Each sends one empty datagram to each host in use.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The hosts that somebody waits for. Bounded by the requests of the home.
#[derive(Debug, Default)]
pub(super) struct Vigil {
    hosts: Mutex<BTreeMap<NodeId, watch::Sender<Option<Death>>>>,
}

/// Tells when a host is dead, for as long as somebody waits for it.
#[derive(Debug)]
pub(super) struct Guard {
    told: watch::Receiver<Option<Death>>,
}

impl Guard {
    /// Waits until the host is dead; usually for ever. Safe to drop.
    pub(super) async fn dead(&mut self) -> Death {
        let told = self.told.wait_for(Option::is_some).await;
        match told.ok().and_then(|death| *death) {
            Some(death) => death,
            None => std::future::pending().await,
        }
    }
}

impl Guard {
    /// Waits no longer: whoever waits on does so for another reason.
    pub(super) fn rest(&mut self) {
        self.told = watch::channel(None).1;
    }
}

impl Vigil {
    /// Watches over a host in the life that it has now.
    pub(super) fn over(&self, host: NodeId) -> Guard {
        let mut hosts = self.lock();
        let teller = hosts.entry(host).or_insert_with(|| watch::channel(None).0);
        Guard {
            told: teller.subscribe(),
        }
    }

    /// Hosts that somebody waits for.
    fn in_use(&self) -> Vec<NodeId> {
        let mut hosts = self.lock();
        hosts.retain(|_, teller| teller.receiver_count() > 0);
        hosts.keys().copied().collect()
    }

    /// Tells all who wait. Who waits from now on waits for the next life.
    fn tell(&self, host: NodeId, death: Death) {
        if let Some(teller) = self.lock().remove(&host) {
            teller.send_replace(Some(death));
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, watch::Sender<Option<Death>>>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks at the hosts of a home's requests until `stop`. A host that gossip misses has `grace` to come back.
pub(super) async fn keep_vigil(
    vigil: Arc<Vigil>,
    knowledge: Arc<Knowledge>,
    metrics: Arc<Metrics>,
    grace: Duration,
    stop: CancellationToken,
) {
    let mut vitals = Vitals::new(grace);
    let mut ports: BTreeMap<NodeId, Port> = BTreeMap::new();
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = looks.tick() => {}
        }
        let this = knowledge.this();
        let used: Vec<NodeId> = vigil
            .in_use()
            .into_iter()
            .filter(|host| *host != this)
            .collect();
        let view = knowledge.view();
        ports.retain(|host, _| used.contains(host));
        let mut seen = BTreeMap::new();
        for host in used {
            let row = view.row(host);
            if let Some(row) = row
                && ports
                    .get(&host)
                    .is_none_or(|port| port.at != row.facts.control)
                && let Some(port) = Port::of(row.facts.control)
            {
                ports.insert(host, port);
            }
            let sight = Sight {
                life: row.map(|row| row.facts.incarnation),
                refused: ports.get(&host).is_some_and(Port::is_closed),
            };
            seen.insert(host, sight);
        }
        for (host, death) in vitals.look(knowledge.now(), &seen) {
            info!(%host, how = death.as_str(), "a host of this node's requests is dead");
            metrics.host_lost(death.as_str());
            if death != Death::NewLife {
                knowledge.silent(host);
            }
            vigil.tell(host, death);
        }
    }
}

/// A host's control port, asked with empty datagrams whether anybody listens. QUIC ignores them; a kernel without a listener
/// answers with ICMP, which a connected socket hears as an error.
#[derive(Debug)]
struct Port {
    at: SocketAddr,
    socket: UdpSocket,
}

impl Port {
    /// `None` when the system gives no socket: then gossip has to do.
    fn of(at: SocketAddr) -> Option<Self> {
        let any = match at {
            SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        };
        let socket = UdpSocket::bind(any).ok()?;
        socket.set_nonblocking(true).ok()?;
        socket.connect(at).ok()?;
        Some(Self { at, socket })
    }

    /// Whether the datagram of the last look was refused; sends the next.
    fn is_closed(&self) -> bool {
        let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::ConnectionRefused;
        let before = self.socket.take_error().ok().flatten().is_some_and(refused);
        // A refusal may come so quickly that only the next call hears of it: either counts for one look.
        let now = self.socket.send(&[]).is_err_and(refused);
        before || now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A condition that comes within a few looks, or never.
    fn comes(condition: impl Fn() -> bool) -> bool {
        (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(2));
            condition()
        })
    }

    #[test]
    fn a_port_is_closed_once_nobody_listens_and_not_before() {
        let listener = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = Port::of(listener.local_addr().unwrap()).unwrap();
        assert!((0..20).all(|_| !port.is_closed()));
        drop(listener);
        assert!(comes(|| port.is_closed()));
    }

    #[tokio::test]
    async fn a_death_is_told_to_all_who_wait_and_to_nobody_later() {
        let vigil = Vigil::default();
        let (host, other) = (NodeId(1), NodeId(2));
        let (mut one, mut two) = (vigil.over(host), vigil.over(host));
        let elsewhere = vigil.over(other);
        vigil.tell(host, Death::PortClosed);
        assert_eq!(one.dead().await, Death::PortClosed);
        assert_eq!(two.dead().await, Death::PortClosed);
        let later = vigil.over(host);
        assert!(later.told.borrow().is_none() && elsewhere.told.borrow().is_none());
        assert_eq!(vigil.in_use(), [host, other]);
        drop(later);
        assert_eq!(vigil.in_use(), [other]);
    }
}
