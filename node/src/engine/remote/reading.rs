//! What an engine beside the node tells about its load, one reading for each poll.
//!
//! Pure: the shell asks the paths of [`polled`] and hands the answers to [`read`]. Every engine
//! tells less than the whole; what is not told stays `None`, for a guess would be taken for a fact
//! by every node of the mesh.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;

use super::kind::ServerKind;
use super::scrape::Samples;

/// What one poll of an engine told. `None` is not told: unknown, never zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// KV tokens that the engine can hold.
    pub(super) capacity: Option<u64>,
    /// Tokens in a KV block.
    pub(super) block_size: Option<u32>,
    /// KV tokens held by requests. Cached prefixes that can be evicted count as free.
    pub(super) used: Option<u64>,
    /// Requests that compute.
    pub(super) running: Option<u32>,
    /// Requests that the engine has taken and that wait.
    pub(super) waiting: Option<u32>,
    /// Prompt tokens not computed yet of the requests that wait.
    pub(super) waiting_tokens: Option<u64>,
    /// Requests that lost their KV since the engine started. vLLM counts one only when it produces
    /// again, so this lags behind.
    pub(super) preemptions: Option<u64>,
    /// When the engine's process started, in ms since 1970: tells two lives of it apart.
    pub(super) started: Option<u64>,
    /// The engine is put to sleep and takes no work.
    pub(super) asleep: bool,
}

/// Why an engine takes no work now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unwell {
    /// It is up and still loads its model.
    #[error("it is loading its model")]
    Loading,
    /// It did not answer.
    #[error("it does not answer")]
    Silent,
    /// It answers, with an error.
    #[error("it answers {path} with status {status}")]
    Failing {
        /// What was asked.
        path: &'static str,
        /// The HTTP status.
        status: u16,
    },
}

/// The answer to one question.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer<'a> {
    /// The HTTP status.
    pub(super) status: u16,
    /// The body as it came, bounded by who read it.
    pub(super) body: &'a [u8],
}

impl<'a> Answer<'a> {
    /// Whether the status tells success.
    pub(super) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    fn text(&self) -> Cow<'a, str> {
        String::from_utf8_lossy(self.body)
    }
}

const HEALTH: &str = "/health";
const METRICS: &str = "/metrics";
const LOADS: &str = "/v1/loads?include=core,memory,queues";
const SLOTS: &str = "/slots";
const MODELS: &str = "/v1/models";

/// What is asked at each poll, in order.
pub(super) fn polled(kind: ServerKind) -> &'static [&'static str] {
    match kind {
        ServerKind::Vllm => &[HEALTH, METRICS],
        ServerKind::Sglang => &[HEALTH, LOADS, METRICS],
        ServerKind::LlamaServer => &[HEALTH, SLOTS, METRICS],
        ServerKind::OpenAi => &[HEALTH, MODELS],
    }
}

/// Reads one poll. `answers[i]` answers `polled(kind)[i]`; `None` when there was no answer.
///
/// Only health decides whether the engine is well: one that answers nothing else is well and tells
/// nothing.
///
/// # Errors
/// Why the engine takes no work now.
pub(super) fn read(kind: ServerKind, answers: &[Option<Answer<'_>>]) -> Result<Reading, Unwell> {
    let at = |index: usize| answers.get(index).copied().flatten();
    // An error page of `/slots` or `/metrics` is not a reading.
    let told = |index: usize| at(index).filter(Answer::is_success);
    let reading = match kind {
        ServerKind::OpenAi => {
            alive(at(0), at(1))?;
            Reading::default()
        }
        ServerKind::Vllm => {
            healthy(at(0))?;
            told(1).map(vllm).unwrap_or_default()
        }
        ServerKind::Sglang => {
            healthy(at(0))?;
            sglang(told(1), told(2))
        }
        ServerKind::LlamaServer => {
            healthy(at(0))?;
            llama_server(told(1), told(2))
        }
    };
    Ok(Reading {
        // More than there is: the two do not belong together, so the fill is not known.
        used: reading
            .used
            .filter(|&used| reading.capacity.is_none_or(|capacity| used <= capacity)),
        ..reading
    })
}

/// llama-server says in its 503 that it loads; of the others a 503 is all we hear.
fn healthy(health: Option<Answer<'_>>) -> Result<(), Unwell> {
    let health = health.ok_or(Unwell::Silent)?;
    if health.is_success() {
        return Ok(());
    }
    if health.status == 503 && health.text().contains("Loading model") {
        return Err(Unwell::Loading);
    }
    Err(Unwell::Failing {
        path: HEALTH,
        status: health.status,
    })
}

/// Many servers have no `/health`; then the list of models decides.
fn alive(health: Option<Answer<'_>>, models: Option<Answer<'_>>) -> Result<(), Unwell> {
    match health {
        Some(health) if health.status != 404 => return healthy(Some(health)),
        Some(_) | None => {}
    }
    match models {
        Some(models) if models.is_success() => Ok(()),
        Some(models) => Err(Unwell::Failing {
            path: MODELS,
            status: models.status,
        }),
        None => Err(Unwell::Silent),
    }
}

const VLLM_USAGE: &str = "vllm:kv_cache_usage_perc";
/// Its name before 0.10.
const VLLM_OLD_USAGE: &str = "vllm:gpu_cache_usage_perc";
const VLLM_RUNNING: &str = "vllm:num_requests_running";
const VLLM_WAITING: &str = "vllm:num_requests_waiting";
const VLLM_PREEMPTIONS: &str = "vllm:num_preemptions_total";
const VLLM_SLEEP: &str = "vllm:engine_sleep_state";
const VLLM_CONFIG: &str = "vllm:cache_config_info";
const STARTED: &str = "process_start_time_seconds";

fn vllm(metrics: Answer<'_>) -> Reading {
    let text = metrics.text();
    let samples = Samples::of(
        &text,
        &[
            VLLM_USAGE,
            VLLM_OLD_USAGE,
            VLLM_RUNNING,
            VLLM_WAITING,
            VLLM_PREEMPTIONS,
            VLLM_SLEEP,
            VLLM_CONFIG,
            STARTED,
        ],
    );
    let usage = if samples.has(VLLM_USAGE) {
        VLLM_USAGE
    } else {
        VLLM_OLD_USAGE
    };
    let engines = samples.each(usage).count();
    let pools = samples.each(VLLM_CONFIG).count();
    // Figures of some of the engines say nothing about all of them.
    let capacity = vllm_capacity(&samples).filter(|_| engines == 0 || engines == pools);
    let fill = samples
        .each(usage)
        .map(|sample| sample.value().filter(|fill| (0.0..=1.0).contains(fill)))
        .sum::<Option<f64>>()
        .filter(|_| engines > 0)
        .map(|sum| sum / engines as f64);
    Reading {
        capacity,
        block_size: vllm_block_size(&samples),
        used: capacity
            .zip(fill)
            .and_then(|(capacity, fill)| whole(capacity as f64 * fill)),
        running: samples.sum(VLLM_RUNNING).and_then(small),
        waiting: samples.sum(VLLM_WAITING).and_then(small),
        waiting_tokens: None,
        preemptions: samples.sum(VLLM_PREEMPTIONS).and_then(whole),
        started: started(&samples),
        asleep: samples.each(VLLM_SLEEP).any(|sample| {
            sample.label("sleep_state").as_deref() == Some("awake") && sample.value() == Some(0.0)
        }),
    }
}

/// Tokens of all engines' pools. vLLM's own figure where it is given: with hybrid models or context
/// parallelism blocks times their size is not it.
fn vllm_capacity(samples: &Samples<'_>) -> Option<u64> {
    let tokens = samples.each(VLLM_CONFIG).map(|pool| {
        let label = |name| pool.label(name).and_then(|text| positive(&text));
        let blocks = label("num_gpu_blocks").zip(label("block_size"));
        let told = label("kv_cache_size_tokens")
            .filter(|&tokens| label("block_size").is_none_or(|block| tokens >= block))
            .or_else(|| blocks.and_then(|(blocks, size)| blocks.checked_mul(size)));
        // One block is never given out.
        told.map(|tokens| tokens - label("block_size").unwrap_or(0).min(tokens))
    });
    total(tokens)
}

/// The block size, when all engines have the same.
fn vllm_block_size(samples: &Samples<'_>) -> Option<u32> {
    let text = samples.label(VLLM_CONFIG, "block_size")?;
    let same = samples
        .each(VLLM_CONFIG)
        .all(|pool| pool.label("block_size").as_ref() == Some(&text));
    let size = positive(&text).filter(|_| same)?;
    u32::try_from(size).ok()
}

const SGLANG_RUNNING: &str = "sglang:num_running_reqs";
const SGLANG_WAITING: &str = "sglang:num_queue_reqs";
const SGLANG_CAPACITY: &str = "sglang:max_total_num_tokens";
const SGLANG_AVAILABLE: &str = "sglang:kv_available_tokens";
const SGLANG_EVICTABLE: &str = "sglang:kv_evictable_tokens";
const SGLANG_USED: &str = "sglang:num_used_tokens";
const SGLANG_RETRACTED: &str = "sglang:num_retracted_requests_total";
const SGLANG_PAGE: &str = "sglang:page_size";
const SGLANG_CONFIG: &str = "sglang:cache_config_info";

/// `/v1/loads` is of the last iteration; the metrics are renewed only by prefills and every so many
/// decode steps, so they fill in what the former does not tell.
fn sglang(loads: Option<Answer<'_>>, metrics: Option<Answer<'_>>) -> Reading {
    let loads = loads.and_then(sglang_loads).unwrap_or_default();
    let metrics = metrics.map(sglang_metrics).unwrap_or_default();
    // Fill and capacity of one source, so that they belong together.
    let (capacity, used) = if loads.capacity.is_some() && loads.used.is_some() {
        (loads.capacity, loads.used)
    } else {
        (
            metrics.capacity.or(loads.capacity),
            metrics.used.or(loads.used),
        )
    };
    Reading {
        capacity,
        used,
        running: loads.running.or(metrics.running),
        waiting: loads.waiting.or(metrics.waiting),
        waiting_tokens: loads.waiting_tokens,
        ..metrics
    }
}

/// `/v1/loads`, one entry for each data-parallel rank.
#[derive(Deserialize)]
struct SglangLoads {
    loads: Vec<SglangLoad>,
}

/// Numbers as values, so that one odd field does not cost the others.
#[derive(Default, Deserialize)]
#[serde(default)]
struct SglangLoad {
    num_running_reqs: Value,
    num_waiting_reqs: Value,
    num_waiting_uncached_tokens: Value,
    /// Without what can be evicted.
    num_used_tokens: Value,
    max_total_num_tokens: Value,
}

fn sglang_loads(answer: Answer<'_>) -> Option<Reading> {
    let SglangLoads { loads } = serde_json::from_slice(answer.body).ok()?;
    // A rank that has not published yet shows zeros everywhere.
    if loads
        .iter()
        .any(|load| count(&load.max_total_num_tokens) == Some(0))
    {
        return None;
    }
    let sum = |field: fn(&SglangLoad) -> &Value| total(loads.iter().map(|load| count(field(load))));
    let small = |tokens: Option<u64>| tokens.and_then(|tokens| u32::try_from(tokens).ok());
    Some(Reading {
        capacity: sum(|load| &load.max_total_num_tokens),
        used: sum(|load| &load.num_used_tokens),
        running: small(sum(|load| &load.num_running_reqs)),
        waiting: small(sum(|load| &load.num_waiting_reqs)),
        waiting_tokens: sum(|load| &load.num_waiting_uncached_tokens),
        ..Reading::default()
    })
}

fn sglang_metrics(metrics: Answer<'_>) -> Reading {
    let text = metrics.text();
    let samples = Samples::of(
        &text,
        &[
            SGLANG_RUNNING,
            SGLANG_WAITING,
            SGLANG_CAPACITY,
            SGLANG_AVAILABLE,
            SGLANG_EVICTABLE,
            SGLANG_USED,
            SGLANG_RETRACTED,
            SGLANG_PAGE,
            SGLANG_CONFIG,
            STARTED,
        ],
    );
    let sum = |name| ranks(&samples, name).and_then(whole);
    let capacity = sum(SGLANG_CAPACITY).filter(|&tokens| tokens > 0);
    let free = sum(SGLANG_AVAILABLE)
        .zip(sum(SGLANG_EVICTABLE))
        .map(|(available, evictable)| available.saturating_add(evictable));
    let page = samples.max(SGLANG_PAGE).and_then(small).or_else(|| {
        let text = samples.label(SGLANG_CONFIG, "page_size")?;
        u32::try_from(positive(&text)?).ok()
    });
    Reading {
        capacity,
        block_size: page.filter(|&tokens| tokens > 0),
        used: match capacity.zip(free) {
            Some((capacity, free)) => capacity.checked_sub(free),
            None => sum(SGLANG_USED),
        },
        running: ranks(&samples, SGLANG_RUNNING).and_then(small),
        waiting: ranks(&samples, SGLANG_WAITING).and_then(small),
        preemptions: sum(SGLANG_RETRACTED),
        started: started(&samples),
        ..Reading::default()
    }
}

/// Sum over data-parallel ranks. Tensor and pipeline ranks of one of them tell the same number
/// again, and series with a priority are parts of the one without.
fn ranks(samples: &Samples<'_>, name: &str) -> Option<f64> {
    let mut ranks: Vec<(Cow<'_, str>, f64)> = Vec::new();
    for sample in samples.each(name) {
        if sample
            .label("priority")
            .is_some_and(|class| !class.is_empty())
        {
            continue;
        }
        let value = sample.value()?;
        let rank = sample.label("dp_rank").unwrap_or_default();
        match ranks.iter_mut().find(|(known, _)| *known == rank) {
            Some((_, known)) => *known = known.max(value),
            None => ranks.push((rank, value)),
        }
    }
    (!ranks.is_empty()).then(|| ranks.iter().map(|(_, value)| value).sum())
}

const LLAMA_WAITING: &str = "llamacpp:requests_deferred";

/// One slot of llama-server, in the part that counts.
#[derive(Default, Deserialize)]
#[serde(default)]
struct LlamaSlot {
    n_ctx: Value,
    is_processing: Value,
    /// Tokens in the slot's KV: it grows with decoding.
    n_prompt_tokens: Value,
}

/// The slots tell KV and work, the metrics only who waits. With a unified pool each slot claims the
/// whole of it and the sum is too large; the server does not tell which of the two it runs.
fn llama_server(slots: Option<Answer<'_>>, metrics: Option<Answer<'_>>) -> Reading {
    let slots: Vec<LlamaSlot> = slots
        .and_then(|answer| serde_json::from_slice(answer.body).ok())
        .unwrap_or_default();
    let busy: Option<Vec<&LlamaSlot>> = slots
        .iter()
        .map(|slot| Some((slot, slot.is_processing.as_bool()?)))
        .collect::<Option<Vec<_>>>()
        .filter(|slots| !slots.is_empty())
        .map(|slots| {
            slots
                .iter()
                .filter(|(_, busy)| *busy)
                .map(|(slot, _)| *slot)
                .collect()
        });
    Reading {
        capacity: total(slots.iter().map(|slot| count(&slot.n_ctx))).filter(|&tokens| tokens > 0),
        used: busy.as_ref().and_then(|busy| {
            busy.iter().try_fold(0_u64, |sum, slot| {
                sum.checked_add(count(&slot.n_prompt_tokens)?)
            })
        }),
        running: busy.and_then(|busy| u32::try_from(busy.len()).ok()),
        waiting: metrics.and_then(|metrics| {
            let text = metrics.text();
            Samples::of(&text, &[LLAMA_WAITING])
                .sum(LLAMA_WAITING)
                .and_then(small)
        }),
        ..Reading::default()
    }
}

fn started(samples: &Samples<'_>) -> Option<u64> {
    samples
        .max(STARTED)
        .and_then(|seconds| whole(seconds * 1000.0))
}

/// Sum of what all tell. `None` when there are none or one does not tell.
pub(super) fn total(mut counts: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    let first = counts.next()??;
    counts.try_fold(first, |sum, count| sum.checked_add(count?))
}

/// A number of JSON that counts something, written as an integer or not.
pub(super) fn count(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}

/// A label's text as a number above zero. Python writes what is not set as `None`.
fn positive(text: &str) -> Option<u64> {
    text.parse().ok().filter(|&number| number > 0)
}

/// Up to 2^53, where a double still tells neighbours apart.
fn whole(value: f64) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    (0.0..=EXACT).contains(&value).then(|| value.round() as u64)
}

fn small(value: f64) -> Option<u32> {
    whole(value).and_then(|value| u32::try_from(value).ok())
}

#[cfg(test)]
mod tests;
