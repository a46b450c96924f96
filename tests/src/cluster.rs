//! Whole meshes in one process: real nodes over loopback, on free ports, with simulated or real engines.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use shoal_gossip::NodeId;
use shoal_node::config::{
    DispatchSettings, EngineKind, EngineSettings, GossipSettings, HttpSettings, KeySource,
    LlamaSettings, LogFormat, LogSettings, MeshSettings, MovesSettings, NodeConfig, PolicyName,
    ShutdownSettings, SimSettings, Travels,
};
use shoal_node::node::Node;
use tempfile::TempDir;

use crate::client::Client;
use crate::wait::until;

/// The model that simulated nodes serve.
pub const MODEL: &str = "sim";

/// A running mesh.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Option<Node>>,
    client: Client,
    _data: TempDir,
}

/// The configuration of a node on free loopback ports, with a simulated engine that takes no time.
pub fn config(data_dir: &Path) -> NodeConfig {
    let loopback: SocketAddr = ([127, 0, 0, 1], 0).into();
    NodeConfig {
        data_dir: data_dir.to_owned(),
        http: HttpSettings {
            listen: loopback,
            api_key_file: None,
            operator_key_file: None,
            tls: None,
            vllm_names: true,
            max_body_bytes: 1 << 20,
            max_requests: 512,
            header_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(60),
        },
        mesh: MeshSettings {
            control: loopback,
            stream: loopback,
            advertise: None,
            seeds: Vec::new(),
            mdns: false,
            cluster: "test".into(),
            key: KeySource::None,
            accepted_keys: Vec::new(),
        },
        gossip: GossipSettings {
            interval: Duration::from_millis(100),
            // Test machines stall for longer than a phi of 8 forgives at this interval.
            phi: 16.0,
        },
        engine: EngineSettings {
            kind: EngineKind::Sim(SimSettings {
                profile: "a10/llama-2-7b".into(),
                speed: 1_000.0,
                kv: Travels::Digest,
                context: None,
                max_sequences: None,
                step_tokens: None,
            }),
            model_id: Some(MODEL.into()),
            block_size: NonZeroU32::MIN.saturating_add(15),
            queue_limit: 256,
        },
        dispatch: dispatch(),
        moves: MovesSettings {
            // Only what a test asks for moves.
            interval: None,
            below: 10,
            above: 30,
            slots_out: 8,
            slots_in: 8,
            bytes_per_second: 1 << 30,
        },
        shutdown: ShutdownSettings {
            deadline: Duration::from_secs(20),
        },
        log: LogSettings {
            filter: "off".into(),
            format: LogFormat::Text,
        },
        warnings: Vec::new(),
    }
}

fn dispatch() -> DispatchSettings {
    DispatchSettings {
        policy: PolicyName::P2c,
        max_view_age: Duration::from_secs(10),
        redirect_below: 10,
        offer_timeout: Duration::from_secs(5),
        lease: Duration::from_secs(10),
        max_retries: 4,
        max_replays: 16,
        replay_patience: Duration::from_secs(60),
        grace: Duration::from_secs(1),
    }
}

/// Settings of the embedded engine for `model`, reproducible, one thread.
pub fn llama(model: &Path) -> EngineKind {
    EngineKind::Llama(LlamaSettings {
        model: model.to_owned(),
        context: 4_096,
        max_sequences: 8,
        step_tokens: 64,
        threads: 1,
        reproducible: true,
    })
}

impl Cluster {
    /// Starts `count` nodes and waits until each sees all of them ready. `adapt` may change the
    /// configuration of the node with this index.
    pub async fn start(count: usize, adapt: impl Fn(usize, &mut NodeConfig)) -> Self {
        let mut cluster = Self {
            nodes: Vec::new(),
            client: Client::default(),
            _data: TempDir::new().expect("a folder for identities"),
        };
        for index in 0..count {
            cluster.add(|config| adapt(index, config)).await;
        }
        cluster.converged(count).await;
        cluster
    }

    /// Starts one more node, seeded by the first that runs. Returns its index.
    pub async fn add(&mut self, adapt: impl FnOnce(&mut NodeConfig)) -> usize {
        let index = self.nodes.len();
        let mut config = config(&self._data.path().join(index.to_string()));
        config.mesh.seeds = self
            .nodes
            .iter()
            .flatten()
            .take(1)
            .map(|node| node.stream_addr().to_string())
            .collect();
        adapt(&mut config);
        self.nodes
            .push(Some(Node::start(config).await.expect("the node starts")));
        index
    }

    /// A client shared by the whole test.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// A node that runs.
    pub fn node(&self, index: usize) -> &Node {
        self.nodes[index].as_ref().expect("the node runs")
    }

    /// Where clients ask a node.
    pub fn http(&self, index: usize) -> SocketAddr {
        self.node(index).http_addr()
    }

    /// A node's name.
    pub fn id(&self, index: usize) -> NodeId {
        self.node(index).id()
    }

    /// Waits until every running node sees exactly `count` ready nodes.
    pub async fn converged(&self, count: usize) {
        for node in self.nodes.iter().flatten() {
            until("the view", || async {
                let view = self.view(node.http_addr()).await?;
                let ready = view
                    .iter()
                    .filter(|row| row["load"]["readiness"] == "Ready")
                    .count();
                if ready == count && view.len() == count {
                    Ok(())
                } else {
                    Err(format!("{} sees {view:#?}", node.id()))
                }
            })
            .await;
        }
    }

    /// The rows of a node's view as its clients get them.
    pub async fn view(&self, node: SocketAddr) -> Result<Vec<Value>, String> {
        let answer = self.client.try_get(node, "/mesh/nodes").await?;
        Ok(answer.json()["nodes"]
            .as_array()
            .cloned()
            .unwrap_or_default())
    }

    /// Waits until no running node holds or promises any KV block.
    pub async fn empty(&self) {
        for node in self.nodes.iter().flatten() {
            until("an empty engine", || async {
                let load = node.load();
                let idle = load.used.0 == 0
                    && load.reserved.0 == 0
                    && load.running == 0
                    && load.queued == 0;
                if idle { Ok(()) } else { Err(load) }
            })
            .await;
        }
    }

    /// Waits until every running node also *sees* all nodes idle, which is a gossip round later.
    pub async fn seen_empty(&self) {
        self.empty().await;
        for node in self.nodes.iter().flatten() {
            until("idle rows", || async {
                let view = self.view(node.http_addr()).await?;
                let idle = view
                    .iter()
                    .all(|row| row["load"]["running"] == 0 && row["load"]["reserved_blocks"] == 0);
                if idle {
                    Ok(())
                } else {
                    Err(format!("{view:#?}"))
                }
            })
            .await;
        }
    }

    /// Ends a node as SIGKILL would, as far as others can tell: no goodbye, no answer.
    pub fn kill(&mut self, index: usize) {
        if let Some(node) = self.nodes[index].take() {
            node.abandon();
        }
    }

    /// Ends a node in order.
    pub async fn stop(&mut self, index: usize) {
        if let Some(node) = self.nodes[index].take() {
            node.shutdown().await;
        }
    }

    /// Ends all nodes in order.
    pub async fn stop_all(mut self) {
        for index in 0..self.nodes.len() {
            self.stop(index).await;
        }
    }
}
