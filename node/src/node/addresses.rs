//! The addresses under which others reach a node.

use std::net::{IpAddr, SocketAddr};

use tokio::net::lookup_host;

use crate::node::StartError;

/// Host and address that others use for this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Advertised {
    /// As shown to people and clients: a name if one was configured.
    host: String,
    /// As dialled by nodes.
    ip: IpAddr,
}

impl Advertised {
    /// Resolves the configured host; without one, others use the address this node listens on.
    pub(super) async fn find(
        configured: Option<&str>,
        listening: IpAddr,
    ) -> Result<Self, StartError> {
        let Some(host) = configured else {
            return Ok(Self {
                host: listening.to_string(),
                ip: listening,
            });
        };
        let wrong = |reason: String| StartError::Advertise {
            host: host.to_owned(),
            reason,
        };
        if let Ok(ip) = host.parse() {
            return Ok(Self {
                host: host.to_owned(),
                ip,
            });
        }
        let found = lookup_host((host, 0))
            .await
            .map_err(|error| wrong(format!("the name cannot be resolved: {error}")))?;
        // Of several, the first of the family that this node listens on can be reached.
        let ip = found
            .map(|address| address.ip())
            .find(|ip| ip.is_ipv4() == listening.is_ipv4())
            .ok_or_else(|| wrong("the name has no address of the family listened on".into()))?;
        Ok(Self {
            host: host.to_owned(),
            ip,
        })
    }

    /// Where others dial what is bound to `bound` here.
    pub(super) fn address(&self, bound: SocketAddr) -> SocketAddr {
        (self.ip, bound.port()).into()
    }

    /// The same for clients, with the name.
    pub(super) fn client_address(&self, bound: SocketAddr) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, bound.port())
        } else {
            format!("{}:{}", self.host, bound.port())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_listening_address_stands_in_for_a_name_and_ports_are_those_bound() {
        let bound: SocketAddr = ([127, 0, 0, 1], 7_401).into();
        let own = Advertised::find(None, bound.ip()).await.unwrap();
        assert_eq!(own.address(bound), bound);
        assert_eq!(own.client_address(bound), "127.0.0.1:7401");
        let six = Advertised::find(Some("::1"), bound.ip()).await.unwrap();
        assert_eq!(six.client_address(bound), "[::1]:7401");
    }

    #[tokio::test]
    async fn a_name_without_an_address_is_an_error_that_names_the_flag() {
        let listening = IpAddr::from([127, 0, 0, 1]);
        let error = Advertised::find(Some("no.such.host.invalid"), listening)
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("--advertise no.such.host.invalid"),
            "{error}"
        );
    }
}
