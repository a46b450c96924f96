//! Connections to hosts, one per host and use, made when first needed.
//!
//! Each connection belongs to one task: it dials, tells all who wait how it went, and then keeps the
//! connection until the host leaves the view or comes back in a new life, the connection breaks, or
//! nobody has used it for a while. Who asks while it dials waits for the same outcome, good or bad, so a host
//! that does not answer costs everybody one dial's patience, not one after the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use quinn::{ClientConfig, Connection, Endpoint, TransportConfig};
use shoal_gossip::NodeId;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use crate::mesh::members::{Member, Members};
use crate::mesh::stream::{CODE_CLOSING, CODE_NOT_A_MEMBER, CODE_UNUSED, GREETING};
use crate::mesh::tls::{PeerTls, SERVER_NAME};

/// How long dialling may take, the greeting included, and how long a free stream is waited for. A live
/// host on a slow wide-area path needs three round trips.
pub(super) const DIAL_PATIENCE: Duration = Duration::from_secs(3);

/// A connection that carried no stream at two looks in a row is closed. Keeping it costs about 180 KB
/// on each side and, in keep-alives, about a percent of a core per hundred; dialling again costs 2 ms.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// A live connection.
#[derive(Clone, Debug)]
pub(in crate::mesh) struct Link {
    pub(in crate::mesh) connection: Connection,
    /// Held by everybody who uses it; one more is the pool's own.
    pub(in crate::mesh) user: Arc<()>,
}

/// How a dial went; `None` while it goes on.
type Outcome = Option<Result<Link, String>>;

/// One host's place in the pool.
#[derive(Clone, Debug)]
struct Place {
    outcome: watch::Receiver<Outcome>,
    host: Member,
}

impl Place {
    /// Whether it leads, or may come to lead, to this life of the host.
    fn serves(&self, host: &Member) -> bool {
        let same = self.host.facts.incarnation == host.facts.incarnation
            && self.host.facts.stream == host.facts.stream;
        same && match &*self.outcome.borrow() {
            None => true,
            Some(Ok(link)) => link.connection.close_reason().is_none(),
            Some(Err(_)) => false,
        }
    }
}

/// What connections are for.
#[derive(Clone, Debug)]
pub(super) struct Use {
    /// Which plane serves them.
    pub(super) alpn: &'static [u8],
    /// Their settings on this side.
    pub(super) transport: Arc<TransportConfig>,
}

/// What dialling needs.
#[derive(Clone, Debug)]
pub(super) struct Dialler {
    pub(super) endpoint: Endpoint,
    pub(super) tls: PeerTls,
    pub(super) members: Members,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// Connections to hosts.
#[derive(Debug)]
pub(in crate::mesh) struct Pool {
    pub(super) dialler: Dialler,
    connections: Use,
    /// Bounded by the view: a place goes when its connection ends, and no connection outlives its row.
    places: Mutex<BTreeMap<NodeId, Place>>,
}

impl Pool {
    pub(super) fn new(dialler: Dialler, connections: Use) -> Arc<Self> {
        Arc::new(Self {
            dialler,
            connections,
            places: Mutex::new(BTreeMap::new()),
        })
    }

    /// A node that may be connected to, if a current record names it.
    pub(in crate::mesh) fn find(&self, node: NodeId) -> Option<Member> {
        self.dialler.members.find(node)
    }

    /// The connection to a host, dialled if there is none; within [`DIAL_PATIENCE`]. Safe to drop.
    pub(in crate::mesh) async fn link(self: &Arc<Self>, host: Member) -> Result<Link, String> {
        let mut outcome = {
            let mut places = self.lock();
            let node = host.facts.node;
            match places.get(&node).filter(|place| place.serves(&host)) {
                Some(place) => {
                    // Taken under the lock, so that it is not closed as unused meanwhile.
                    if let Some(Ok(link)) = &*place.outcome.borrow() {
                        return Ok(link.clone());
                    }
                    place.outcome.clone()
                }
                None => {
                    let (teller, outcome) = watch::channel(None);
                    places.insert(
                        node,
                        Place {
                            outcome: outcome.clone(),
                            host: host.clone(),
                        },
                    );
                    let pool = Arc::clone(self);
                    self.dialler.tasks.spawn(pool.attend(host, teller));
                    outcome
                }
            }
        };
        let closing = || "this node is shutting down".to_owned();
        let outcome = outcome.wait_for(Option::is_some).await;
        let outcome = outcome.map_err(|_| closing())?.clone();
        outcome.unwrap_or_else(|| Err(closing()))
    }

    /// The task of one connection, from dialling to its end.
    async fn attend(self: Arc<Self>, host: Member, teller: watch::Sender<Outcome>) {
        let dialler = &self.dialler;
        let dialled = tokio::select! {
            biased;
            () = dialler.stop.cancelled() => Err("this node is shutting down".into()),
            dialled = timeout(DIAL_PATIENCE, dialler.dial(&host, &self.connections)) => {
                dialled.unwrap_or_else(|_| Err("no answer in time".into()))
            }
        };
        match dialled {
            Ok(connection) => {
                debug!(node = %host.facts.node, at = %host.facts.stream, "connected");
                let user = Arc::new(());
                let users = Arc::downgrade(&user);
                let link = Link {
                    connection: connection.clone(),
                    user,
                };
                teller.send_replace(Some(Ok(link)));
                self.keep(&host, connection, users, &teller).await;
            }
            Err(reason) => {
                debug!(node = %host.facts.node, at = %host.facts.stream, reason, "cannot connect");
                teller.send_replace(Some(Err(reason)));
            }
        }
        self.remove(&mut self.lock(), host.facts.node, &teller);
    }

    /// Waits for the end of a connection, and brings it about when the time has come.
    async fn keep(
        &self,
        host: &Member,
        connection: Connection,
        users: Weak<()>,
        teller: &watch::Sender<Outcome>,
    ) {
        let (node, life) = (host.facts.node, host.facts.incarnation);
        // A newer life behind the same address has never heard of this connection, and would leave
        // its streams hanging until they time out.
        let members = self.dialler.members.clone();
        let mut replaced = std::pin::pin!(members.until_gone(node, Some(life)));
        let mut looks = interval(LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_unused = false;
        loop {
            tokio::select! {
                biased;
                () = self.dialler.stop.cancelled() => {
                    return connection.close(CODE_CLOSING, b"closing");
                }
                _ = connection.closed() => return,
                () = &mut replaced => {
                    return connection.close(CODE_NOT_A_MEMBER, b"not in the mesh");
                }
                _ = looks.tick() => {
                    let mut places = self.lock();
                    let unused = users.strong_count() <= 1;
                    if unused && was_unused {
                        self.remove(&mut places, node, teller);
                        return connection.close(CODE_UNUSED, b"unused");
                    }
                    was_unused = unused;
                }
            }
        }
    }

    /// Gives up a place, unless another connection has it by now.
    fn remove(
        &self,
        places: &mut MutexGuard<'_, BTreeMap<NodeId, Place>>,
        node: NodeId,
        teller: &watch::Sender<Outcome>,
    ) {
        let own = teller.subscribe();
        if places
            .get(&node)
            .is_some_and(|place| place.outcome.same_channel(&own))
        {
            places.remove(&node);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dialler {
    /// Connects, and waits until the host has greeted: before that a refused dialler looks connected.
    async fn dial(&self, host: &Member, connections: &Use) -> Result<Connection, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let tls = self
            .tls
            .client(connections.alpn, host.peer)
            .map_err(|error| text(&error))?;
        let mut config = ClientConfig::new(Arc::new(tls));
        config.transport_config(Arc::clone(&connections.transport));
        let connection = self
            .endpoint
            .connect_with(config, host.facts.stream, SERVER_NAME)
            .map_err(|error| text(&error))?
            .await
            .map_err(|error| text(&error))?;
        let mut stream = connection
            .accept_uni()
            .await
            .map_err(|error| text(&error))?;
        let mut greeting = [0; GREETING.len()];
        stream
            .read_exact(&mut greeting)
            .await
            .map_err(|error| text(&error))?;
        if greeting != GREETING {
            let version = u16::from_be_bytes(greeting);
            return Err(format!("its protocol is {version}"));
        }
        Ok(connection)
    }
}
