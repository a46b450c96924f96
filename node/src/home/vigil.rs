//! The shell of [`vitals`](super::vitals): looks at the hosts of all requests, and tells the requests of a dead one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shoal_gossip::{NodeId, Timestamp};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::home::vitals::{Death, Finding, Vitals};
use crate::knowledge::Knowledge;
use crate::links::Links;
use crate::mesh::messages::Ask;
use crate::metrics::Metrics;

/// Time between two looks. Each sends one empty datagram to each host in use.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A host that has said nothing to this node for so long is asked whether it is there: a long prefill is silent too.
const ASK_AFTER: Duration = Duration::from_secs(1);

/// How long it may take to answer that.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// The hosts that somebody waits for. Bounded by the requests of the home.
#[derive(Debug, Default)]
pub(super) struct Vigil {
    hosts: Mutex<BTreeMap<NodeId, Watched>>,
}

#[derive(Debug)]
struct Watched {
    teller: watch::Sender<Option<Death>>,
    heard: Heard,
}

/// When something last came from a host, in milliseconds since the start of this node.
#[derive(Clone, Debug)]
struct Heard(Arc<AtomicU64>);

impl Heard {
    fn at(now: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(millis(now))))
    }

    fn note(&self, now: Timestamp) {
        self.0.fetch_max(millis(now), Ordering::Relaxed);
    }

    fn since(&self, now: Timestamp) -> Duration {
        let heard = self.0.load(Ordering::Relaxed);
        Duration::from_millis(millis(now).saturating_sub(heard))
    }
}

fn millis(now: Timestamp) -> u64 {
    u64::try_from(now.since(Timestamp::ZERO).as_millis()).unwrap_or(u64::MAX)
}

/// Tells when a host is dead, for as long as somebody waits for it.
#[derive(Debug)]
pub(super) struct Guard {
    told: watch::Receiver<Option<Death>>,
    heard: Heard,
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
    /// Something has come from the host.
    pub(super) fn heard(&self, now: Timestamp) {
        self.heard.note(now);
    }

    /// Waits no longer: whoever waits on does so for another reason.
    pub(super) fn rest(&mut self) {
        self.told = watch::channel(None).1;
    }
}

impl Vigil {
    /// Watches over a host in the life that it has now.
    pub(super) fn over(&self, host: NodeId, now: Timestamp) -> Guard {
        let mut hosts = self.lock();
        let watched = hosts.entry(host).or_insert_with(|| Watched {
            teller: watch::channel(None).0,
            heard: Heard::at(now),
        });
        Guard {
            told: watched.teller.subscribe(),
            heard: watched.heard.clone(),
        }
    }

    /// Hosts that somebody waits for, and when each was heard.
    fn in_use(&self) -> Vec<(NodeId, Heard)> {
        let mut hosts = self.lock();
        hosts.retain(|_, watched| watched.teller.receiver_count() > 0);
        let each = hosts.iter();
        each.map(|(host, watched)| (*host, watched.heard.clone()))
            .collect()
    }

    /// Tells all who wait. Who waits from now on waits for the next life.
    fn tell(&self, host: NodeId, death: Death) {
        if let Some(watched) = self.lock().remove(&host) {
            watched.teller.send_replace(Some(death));
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Watched>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What looking takes.
#[derive(Debug)]
pub(super) struct Watchman {
    pub(super) vigil: Arc<Vigil>,
    pub(super) knowledge: Arc<Knowledge>,
    pub(super) links: Arc<Links>,
    pub(super) metrics: Arc<Metrics>,
    /// How long a host that gossip misses has to come back.
    pub(super) grace: Duration,
}

impl Watchman {
    /// Looks at the hosts of a home's requests until `stop`.
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut vitals = Vitals::new(self.grace);
        let mut ports: BTreeMap<NodeId, Port> = BTreeMap::new();
        let (mut asked, mut questions) = (BTreeSet::new(), JoinSet::new());
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = looks.tick() => {}
            }
            let mut used = self.vigil.in_use();
            used.retain(|(host, _)| *host != self.knowledge.this());
            while let Some(done) = questions.try_join_next() {
                if let Ok(host) = done {
                    asked.remove(&host);
                }
            }
            let seen = self.look(&used, &mut ports);
            for (host, heard) in used {
                if heard.since(self.knowledge.now()) >= ASK_AFTER && asked.insert(host) {
                    questions.spawn(self.ask(host, heard));
                }
            }
            for (host, death) in vitals.look(self.knowledge.now(), &seen) {
                self.tell(host, death);
            }
        }
    }

    /// What there is to see of each host.
    fn look(
        &self,
        used: &[(NodeId, Heard)],
        ports: &mut BTreeMap<NodeId, Port>,
    ) -> BTreeMap<NodeId, Finding> {
        let (view, now) = (self.knowledge.view(), self.knowledge.now());
        ports.retain(|host, _| used.iter().any(|(used, _)| used == host));
        let mut seen = BTreeMap::new();
        for (host, heard) in used {
            let row = view.row(*host);
            if let Some(row) = row
                && ports
                    .get(host)
                    .is_none_or(|port| port.at != row.facts.control)
                && let Some(port) = Port::of(row.facts.control)
            {
                ports.insert(*host, port);
            }
            let finding = Finding {
                life: row.map(|row| row.facts.incarnation),
                refused: ports.get(host).is_some_and(Port::is_closed),
                unheard: heard.since(now),
            };
            seen.insert(*host, finding);
        }
        seen
    }

    /// Asks a silent host whether it is there; its answer is all that counts.
    fn ask(&self, host: NodeId, heard: Heard) -> impl Future<Output = NodeId> + use<> {
        let (links, knowledge) = (Arc::clone(&self.links), Arc::clone(&self.knowledge));
        async move {
            if links.ask(host, Ask::Probe, ANSWER_WITHIN).await.is_ok() {
                heard.note(knowledge.now());
            }
            host
        }
    }

    fn tell(&self, host: NodeId, death: Death) {
        info!(%host, how = death.as_str(), "a host of this node's requests is dead");
        self.metrics.host_lost(death.as_str());
        if death != Death::NewLife {
            self.knowledge.silent(host);
        }
        self.vigil.tell(host, death);
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
        let over = |host| vigil.over(host, Timestamp::ZERO);
        let (mut one, mut two) = (over(host), over(host));
        let elsewhere = over(other);
        vigil.tell(host, Death::PortClosed);
        assert_eq!(one.dead().await, Death::PortClosed);
        assert_eq!(two.dead().await, Death::PortClosed);
        let later = over(host);
        assert!(later.told.borrow().is_none() && elsewhere.told.borrow().is_none());
        let used = || {
            vigil
                .in_use()
                .into_iter()
                .map(|(host, _)| host)
                .collect::<Vec<_>>()
        };
        assert_eq!(used(), [host, other]);
        drop(later);
        assert_eq!(used(), [other]);
    }
}
