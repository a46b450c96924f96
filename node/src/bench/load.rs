//! A load generator for OpenAI-compatible endpoints: `shoal bench load`.
//!
//! ```text
//!   arrivals ─> run: paces, bounds those in flight ─> one task per request ─> Record
//!                                                       ├─ ask     what is sent
//!                                                       ├─ node    kept connections to one endpoint
//!                                                       └─ answer  what came back, and when
//! ```
//!
//! * Open loop: a request starts when its arrival says, whatever became of those before it.
//! * All times count from the intended arrival, so nothing that makes a request wait is hidden (no
//!   coordinated omission). One that waits for a place below the bound is counted as late besides.
//! * Nothing is asked twice: a 429 is an outcome. The one exception is a kept connection that the server
//!   had closed before it answered anything.
//!
//! Known limits: http only. Timers are a millisecond coarse, and that millisecond counts too;
//! [`LoadResult::worst_start_delay`] tells whether the generator itself kept up. Prompts of text have about the
//! tokens asked for. Which node finished a request is not known: the header of an answer tells where it began.

mod answer;
mod args;
mod ask;
mod events;
mod node;
mod request;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_gossip::Clock;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::ask::Form;
use self::node::Node;
use self::request::{Ended, Sender, Watch};
use crate::report::Record;
use crate::workload::Arrival;

pub use self::args::LoadArgs;

/// Time in which an endpoint has to name its models: it has nothing to compute.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);

/// What is asked of whom.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The endpoints, used in turn: `http://HOST:PORT`, with or without `/v1`.
    pub urls: Vec<String>,
    /// Ask `/v1/chat/completions` and not `/v1/completions`.
    pub chat: bool,
    /// The model; without one the first that the first endpoint lists.
    pub model: Option<String>,
    /// Send prompts as token ids and not as text. Not with `chat`.
    pub prompt_ids: bool,
    /// Ask for output up to its full length (`ignore_eos` of vLLM, SGLang and this program).
    pub ignore_eos: bool,
    /// Requests at work at once; at least one.
    pub max_in_flight: usize,
    /// Time for one request from its start.
    pub timeout: Duration,
    /// Sent as `Authorization: Bearer`.
    pub api_key: Option<String>,
    /// Seed of the prompts, and of sampling. Another one makes prompts that no cache has seen.
    pub seed: u64,
}

/// What a load met with.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadResult {
    /// The model that was asked.
    pub model: String,
    /// The requests that were started, in order of arrival.
    pub records: Vec<Record>,
    /// How many of them started late since `max_in_flight` others were at work.
    pub late_starts: usize,
    /// The longest that any other started after its intended arrival: above some milliseconds this machine is
    /// too slow for the load, and the latencies are partly its own.
    pub worst_start_delay: Duration,
    /// The first reason given for each kind of failure in `records`.
    pub reasons: BTreeMap<String, String>,
    /// Whether it was stopped before its end.
    pub stopped: bool,
}

/// Why there is no load, or no result of it.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Nobody to ask.
    #[error("name at least one endpoint with --url")]
    NoUrl,
    /// The address cannot be used.
    #[error(
        "`{0}` is not the address of an endpoint; give one like http://127.0.0.1:8080 (https is not spoken)"
    )]
    BadUrl(String),
    /// The key does not fit into a header.
    #[error("the API key has characters that no header can carry; is there a line break in it?")]
    BadKey,
    /// Chats consist of text.
    #[error("--prompt-ids needs /v1/completions; leave out --chat")]
    IdsInChat,
    /// Nothing could ever start.
    #[error("--max-in-flight must be at least 1")]
    NoPlace,
    /// The endpoint does not tell its models.
    #[error("{url} does not list its models ({reason}); is it up, or else name one with --model")]
    Models {
        /// The endpoint.
        url: String,
        /// Why.
        reason: String,
    },
    /// The endpoint has none.
    #[error("{url} lists no model; wait until it serves one, or name one with --model")]
    NoModel {
        /// The endpoint.
        url: String,
    },
    /// A request ended in a panic. The records so far are lost.
    #[error("a request ended in a defect of this program: {0}")]
    Defect(JoinError),
}

/// Sends `arrivals`, which come in order of time, and waits for the last answer. `progress` hears the number of
/// requests that have ended. On `stop` nothing new starts and those in flight are dropped, as failed with `stopped`.
///
/// # Errors
/// When the options are of no use, no model is known, or a request ends in a panic.
pub async fn run(
    options: LoadOptions,
    arrivals: impl Iterator<Item = Arrival> + Send,
    clock: Arc<dyn Clock>,
    progress: impl FnMut(usize),
    stop: CancellationToken,
) -> Result<LoadResult, LoadError> {
    let connections = TaskTracker::new();
    let closed = CancellationToken::new();
    let closing = closed.clone().drop_guard();
    let nodes = nodes(&options, &connections, &closed)?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => first_model(&nodes).await?,
    };
    let sender = Arc::new(Sender {
        form: Form::new(&options, &model),
        timeout: options.timeout,
        watch: Watch::start(clock),
        stop,
    });
    let mut load = Load {
        sender,
        max_in_flight: options.max_in_flight,
        tasks: JoinSet::new(),
        ended: Vec::new(),
        progress,
    };
    let starts = load.start_all(arrivals, &nodes).await?;
    while let Some(ended) = load.tasks.join_next().await {
        load.take(ended)?;
    }
    drop(closing);
    connections.close();
    connections.wait().await;
    let stopped = load.sender.stop.is_cancelled();
    Ok(result(model, load.ended, &starts, stopped))
}

fn nodes(
    options: &LoadOptions,
    connections: &TaskTracker,
    closed: &CancellationToken,
) -> Result<Vec<Arc<Node>>, LoadError> {
    if options.urls.is_empty() {
        return Err(LoadError::NoUrl);
    }
    if options.chat && options.prompt_ids {
        return Err(LoadError::IdsInChat);
    }
    if options.max_in_flight == 0 {
        return Err(LoadError::NoPlace);
    }
    let key = options.api_key.as_deref();
    let node = |url: &String| {
        let node = Node::new(url.parse()?, key, connections.clone(), closed.clone())?;
        Ok(Arc::new(node))
    };
    options.urls.iter().map(node).collect()
}

async fn first_model(nodes: &[Arc<Node>]) -> Result<String, LoadError> {
    let node = nodes.first().ok_or(LoadError::NoUrl)?;
    let url = node.url().to_owned();
    match tokio::time::timeout(MODELS_TIMEOUT, node.models()).await {
        Ok(Ok(models)) => models.into_iter().next().ok_or(LoadError::NoModel { url }),
        Ok(Err(failure)) => Err(LoadError::Models {
            url,
            reason: failure.to_string(),
        }),
        Err(_) => Err(LoadError::Models {
            url,
            reason: format!("no answer in {} s", MODELS_TIMEOUT.as_secs()),
        }),
    }
}

fn result(model: String, mut ended: Vec<Ended>, starts: &Starts, stopped: bool) -> LoadResult {
    ended.sort_unstable_by_key(|ended| ended.index);
    let mut reasons = BTreeMap::new();
    let mut records = Vec::with_capacity(ended.len());
    for request in ended {
        if let Some(failure) = request.failure {
            reasons.entry(failure.kind).or_insert(failure.reason);
        }
        records.push(request.record);
    }
    LoadResult {
        model,
        records,
        late_starts: starts.late,
        worst_start_delay: starts.worst_delay,
        reasons,
        stopped,
    }
}

/// How well requests started in time.
#[derive(Debug, Default)]
struct Starts {
    late: usize,
    worst_delay: Duration,
}

/// A load under way. The requests at work are the tasks, so their number needs no count of its own.
struct Load<F> {
    sender: Arc<Sender>,
    max_in_flight: usize,
    tasks: JoinSet<Ended>,
    /// Bounded by the workload, which is finite.
    ended: Vec<Ended>,
    progress: F,
}

impl<F: FnMut(usize)> Load<F> {
    /// Starts the requests, each at its time, until there are no more or it is stopped.
    async fn start_all(
        &mut self,
        arrivals: impl Iterator<Item = Arrival>,
        nodes: &[Arc<Node>],
    ) -> Result<Starts, LoadError> {
        let mut starts = Starts::default();
        // Arrivals before this time came while another waited for a place, so they waited as well.
        let mut held_until = Duration::ZERO;
        let turns = (0u32..).zip(nodes).cycle();
        for ((index, arrival), (entry, node)) in (0u64..).zip(arrivals).zip(turns) {
            self.until(arrival.at).await?;
            let waited = self.until_there_is_a_place().await?;
            if self.sender.stop.is_cancelled() {
                break;
            }
            let now = self.sender.watch.elapsed();
            if waited {
                held_until = now;
            }
            if waited || arrival.at < held_until {
                starts.late += 1;
            } else {
                starts.worst_delay = starts.worst_delay.max(now.saturating_sub(arrival.at));
            }
            let sender = self.sender.clone();
            let node = node.clone();
            self.tasks
                .spawn(async move { sender.request(index, arrival, entry, &node).await });
        }
        Ok(starts)
    }

    /// Waits until the time, or the stop.
    async fn until(&mut self, at: Duration) -> Result<(), LoadError> {
        loop {
            let left = at.saturating_sub(self.sender.watch.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            tokio::select! {
                biased;
                () = self.sender.stop.cancelled() => return Ok(()),
                () = tokio::time::sleep(left) => {}
                Some(ended) = self.tasks.join_next() => self.take(ended)?,
            }
        }
    }

    /// Waits until fewer than the bound are at work, or the stop. Whether it had to wait.
    async fn until_there_is_a_place(&mut self) -> Result<bool, LoadError> {
        while let Some(ended) = self.tasks.try_join_next() {
            self.take(ended)?;
        }
        let mut waited = false;
        while self.tasks.len() >= self.max_in_flight {
            waited = true;
            tokio::select! {
                biased;
                () = self.sender.stop.cancelled() => break,
                Some(ended) = self.tasks.join_next() => self.take(ended)?,
            }
        }
        Ok(waited)
    }

    fn take(&mut self, ended: Result<Ended, JoinError>) -> Result<(), LoadError> {
        self.ended.push(ended.map_err(LoadError::Defect)?);
        (self.progress)(self.ended.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
