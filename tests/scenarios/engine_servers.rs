//! Engines that are servers beside their nodes: vLLM, SGLang, llama-server and plain OpenAI servers, as a stand-in speaks
//! for them over the simulated engine.

mod contract;
mod deaths;
mod form;
mod kv_moves;
mod load;
mod models;
mod moves;
mod seam;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use shoal_gossip::{MonotonicClock, Tokens};
use shoal_node::config::{EngineKind, HttpEngineSettings, Inexact, NodeConfig};
use shoal_node::engine::Engine;
use shoal_node::engine::sim::{self, SimConfig};
use shoal_tests::cluster::Cluster;
use shoal_tests::engine_server::{Dialect, EngineServer};
use tempfile::TempDir;

/// Nodes beside stand-ins, one each, in one mesh.
struct Beside {
    cluster: Cluster,
    servers: Vec<EngineServer>,
    /// What each node shares with its engine.
    folders: Vec<TempDir>,
}

/// A simulated engine to stand behind a server; `speed` 0 takes no time at all.
fn engine(model: &str, speed: f64) -> Arc<dyn Engine> {
    let config = SimConfig {
        model: Some(model.into()),
        speed,
        kv: Some(Tokens(8192)),
        slots: Some(8),
        mean_output: 10_000,
        ..SimConfig::new("a10/llama-7b")
    };
    sim::start(&config, Arc::new(MonotonicClock::start())).expect("starts")
}

/// Points a node at a server.
fn beside(server: &EngineServer, config: &mut NodeConfig) {
    config.engine.model_id = None;
    config.engine.kind = EngineKind::Http(HttpEngineSettings {
        authority: server.address().to_string(),
        kind: None,
        key_file: None,
        poll: Duration::from_millis(50),
        stall: Duration::from_secs(2),
        context: None,
        kv_folder: None,
        inexact: Inexact::Refuse,
    });
}

impl Beside {
    /// One node for each dialect and model.
    async fn start(engines: &[(Dialect, &str)]) -> Self {
        Self::at_speed(engines, 20.0).await
    }

    async fn at_speed(engines: &[(Dialect, &str)], speed: f64) -> Self {
        let mut servers = Vec::new();
        for (dialect, model) in engines {
            servers.push(EngineServer::start(*dialect, engine(model, speed)).await);
        }
        Self::of(servers).await
    }

    async fn of(servers: Vec<EngineServer>) -> Self {
        Self::of_with(servers, Inexact::Refuse).await
    }

    async fn of_with(servers: Vec<EngineServer>, inexact: Inexact) -> Self {
        let folder = |_: &EngineServer| tempfile::tempdir().expect("a folder");
        let folders: Vec<TempDir> = servers.iter().map(folder).collect();
        let cluster = Cluster::start(servers.len(), |index, config| {
            beside(&servers[index], config);
            if let EngineKind::Http(http) = &mut config.engine.kind {
                http.kv_folder = Some(folders[index].path().to_owned());
                http.inexact = inexact;
            }
        })
        .await;
        Self {
            cluster,
            servers,
            folders,
        }
    }

    async fn post(&self, path: &str, body: &Value) -> shoal_tests::client::Answer {
        let client = self.cluster.client();
        client.post(self.cluster.http(0), path, body).await
    }

    async fn stream(&self, path: &str, body: &Value) -> shoal_tests::client::Events {
        let client = self.cluster.client();
        client.stream(self.cluster.http(0), path, body).await
    }

    /// The row of a node as the first one sees it.
    async fn row(&self, index: usize) -> Result<Value, String> {
        let view = self.cluster.view(self.cluster.http(0)).await?;
        let id = self.cluster.id(index).to_string();
        let row = view.into_iter().find(|row| row["node"] == *id);
        row.ok_or_else(|| "no such row".to_owned())
    }
}

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A greedy chat that streams.
fn chat(model: &str, tokens: u32) -> Value {
    json!({
        "model": model, "messages": [{"role": "user", "content": "tell me a story"}],
        "max_tokens": tokens, "temperature": 0, "stream": true, "ignore_eos": true,
    })
}

/// A greedy completion that streams.
fn completion(model: &str, tokens: u32) -> Value {
    json!({
        "model": model, "prompt": "once upon a time", "max_tokens": tokens, "temperature": 0,
        "stream": true, "ignore_eos": true,
    })
}

/// The same, in one body.
fn whole(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(false);
    body
}
