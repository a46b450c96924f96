//! Turns seeds into addresses, again and again: names may stand for other addresses tomorrow.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::seeds::{Host, MAX_SEED_ADDRESSES, Seed, SeedList};

/// Longest wait for one name. The system's resolver asks up to three servers for 5 s each by
/// default; a seed that needs the second one is found at the next turn.
const LOOKUP_WAIT: Duration = Duration::from_secs(5);

/// Pause between look-ups while alone: a headless service appears seconds after its first node.
const PAUSE_ALONE: Duration = Duration::from_secs(3);

/// Pause between look-ups in company: the usual time to live of cluster DNS is 5 to 60 s, and
/// nobody waits for the answer.
const PAUSE_JOINED: Duration = Duration::from_secs(60);

/// What all seeds stand for now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// Sorted, at most [`MAX_SEED_ADDRESSES`].
    pub(crate) addresses: Vec<SocketAddr>,
    /// Seeds without an address, as they were written.
    pub(crate) unresolved: Vec<String>,
}

/// Resolves until nobody listens. `alone` says whether this node knows no other.
pub(crate) async fn resolve_forever(
    seeds: SeedList,
    mut alone: watch::Receiver<bool>,
    found: watch::Sender<Resolved>,
) {
    let names = seeds
        .seeds()
        .iter()
        .any(|seed| matches!(seed.host, Host::Name(_)));
    loop {
        let resolved = resolve(&seeds).await;
        debug!(addresses = ?resolved.addresses, unresolved = ?resolved.unresolved, "seeds resolved");
        if found.send(resolved).is_err() || !names {
            return;
        }
        let pause = if *alone.borrow_and_update() {
            PAUSE_ALONE
        } else {
            PAUSE_JOINED
        };
        tokio::select! {
            () = found.closed() => return,
            () = sleep(pause) => {}
            became_alone = alone.wait_for(|alone| *alone), if pause == PAUSE_JOINED => {
                if became_alone.is_err() {
                    return;
                }
            }
        }
    }
}

async fn resolve(seeds: &SeedList) -> Resolved {
    let mut resolved = Resolved::default();
    let mut lookups = JoinSet::new();
    for seed in seeds.seeds() {
        match &seed.host {
            Host::Ip(ip) => resolved.addresses.push(SocketAddr::new(*ip, seed.port)),
            Host::Name(_) => {
                lookups.spawn(look_up(seed.clone()));
            }
        }
    }
    while let Some(lookup) = lookups.join_next().await {
        match lookup {
            Ok((_, addresses)) if !addresses.is_empty() => resolved.addresses.extend(addresses),
            Ok((seed, _)) => resolved.unresolved.push(seed.to_string()),
            Err(error) => debug!(%error, "a look-up ended early"),
        }
    }
    resolved.addresses.sort_unstable();
    resolved.addresses.dedup();
    resolved.addresses.truncate(MAX_SEED_ADDRESSES);
    resolved.unresolved.sort_unstable();
    resolved
}

async fn look_up(seed: Seed) -> (Seed, Vec<SocketAddr>) {
    let Host::Name(name) = &seed.host else {
        return (seed, Vec::new());
    };
    let addresses = match timeout(LOOKUP_WAIT, lookup_host((name.as_str(), seed.port))).await {
        Ok(Ok(addresses)) => addresses.take(MAX_SEED_ADDRESSES).collect(),
        Ok(Err(error)) => {
            debug!(%seed, %error, "seed not resolved");
            Vec::new()
        }
        Err(_) => {
            debug!(%seed, "seed not resolved in time");
            Vec::new()
        }
    };
    (seed, addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn names_and_addresses_resolve_and_the_rest_is_named() {
        let seeds = "localhost:7401,10.0.0.7:7401,no-such-host.invalid:7401";
        let resolved = resolve(&seeds.parse().unwrap()).await;
        assert!(resolved.addresses.contains(&([10, 0, 0, 7], 7401).into()));
        assert!(
            resolved.addresses.iter().any(|a| a.ip().is_loopback()),
            "{resolved:?}"
        );
        assert_eq!(resolved.unresolved, ["no-such-host.invalid:7401"]);
    }

    #[tokio::test]
    async fn resolving_ends_when_nobody_listens() {
        let (_alone, alone) = watch::channel(true);
        let (found, listener) = watch::channel(Resolved::default());
        drop(listener);
        let seeds = "no-such-host.invalid:7401".parse().unwrap();
        resolve_forever(seeds, alone, found).await;
    }
}
