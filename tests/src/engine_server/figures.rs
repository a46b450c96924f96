//! Figures of load: metrics in Prometheus' text form, and the JSON that some servers have instead.

use serde_json::{Map, Value, json};
use shoal_gossip::LoadSummary;

use crate::engine_server::call::{Call, Reply};
use crate::engine_server::fault::Fault;
use crate::engine_server::run::Running;
use crate::engine_server::shared::Shared;

/// Metrics as they are written, line by line.
struct Metrics<'a> {
    call: &'a Call,
    /// Stands before each name of the engine's own.
    prefix: &'static str,
    /// Labels of each metric of the engine's own, or nothing.
    labels: String,
    text: String,
}

impl<'a> Metrics<'a> {
    fn new(call: &'a Call, prefix: &'static str, labels: String) -> Self {
        let prefix = match (call.met.has(&Fault::MetricsRenamed), prefix) {
            (false, prefix) => prefix,
            (true, _) => "other:",
        };
        Self {
            call,
            prefix,
            labels,
            text: String::new(),
        }
    }

    /// A metric of the engine's own.
    fn own(&mut self, name: &str, kind: &str, value: f64) {
        let (name, labels) = (format!("{}{name}", self.prefix), self.labels.clone());
        self.line(&name, kind, &labels, value);
    }

    fn line(&mut self, name: &str, kind: &str, labels: &str, value: f64) {
        let value = match self.call.met.has(&Fault::MetricsNaN) {
            true => "NaN".to_owned(),
            false => number(value),
        };
        self.text.push_str(&format!(
            "# HELP {name} What the name says.\n# TYPE {name} {kind}\n{name}{labels} {value}\n"
        ));
    }
}

/// A number as Python's client library writes it.
fn number(value: f64) -> String {
    if value.abs() < 1e9 {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    match text.split_once('e') {
        Some((digits, exponent)) => format!("{digits}e+{exponent:0>2}"),
        None => text,
    }
}

fn share(load: &LoadSummary) -> f64 {
    f64::from(load.used.0) / f64::from(load.total.0.max(1))
}

pub(super) fn vllm(server: &Shared, call: &Call) -> Reply {
    let (load, block) = (server.engine.load(), server.engine.facts().block_size);
    let labels = format!("{{engine=\"0\",model_name=\"{}\"}}", server.model());
    let mut metrics = Metrics::new(call, "vllm:", labels);
    let born = server.born().as_secs_f64();
    metrics.line("process_start_time_seconds", "gauge", "", born);
    metrics.own("num_requests_running", "gauge", load.running.into());
    metrics.own("num_requests_waiting", "gauge", load.queued.into());
    metrics.own("kv_cache_usage_perc", "gauge", share(&load));
    let preemptions = server.engine.preemptions();
    metrics.own("num_preemptions_total", "counter", preemptions as f64);
    // One block more than requests can have: vLLM keeps block 0 for itself and counts it here only.
    let blocks = load.total.0 + 1;
    let labels = format!(
        "{{_block_size_resolved=\"True\",block_size=\"{}\",cache_dtype=\"auto\",\
         enable_prefix_caching=\"True\",engine=\"0\",kv_cache_size_tokens=\"{}\",\
         num_cpu_blocks=\"None\",num_gpu_blocks=\"{blocks}\",num_gpu_blocks_override=\"None\"}}",
        block.tokens(),
        blocks * block.tokens().get(),
    );
    let name = format!("{}cache_config_info", metrics.prefix);
    metrics.line(&name, "gauge", &labels, 1.0);
    Reply::text(
        200,
        "text/plain; version=1.0.0; charset=utf-8",
        metrics.text,
    )
}

/// The load, unless figures are to be no numbers or go by other names.
fn told(call: &Call, figures: Value) -> Value {
    let Value::Object(members) = figures else {
        return figures;
    };
    let renamed = call.met.has(&Fault::MetricsRenamed);
    let lost = call.met.has(&Fault::MetricsNaN);
    let members: Map<String, Value> = members
        .into_iter()
        .map(|(name, value)| {
            let name = if renamed {
                format!("other_{name}")
            } else {
                name
            };
            let value = if lost { Value::Null } else { value };
            (name, value)
        })
        .collect();
    members.into()
}

pub(super) fn sglang_loads(server: &Shared, call: &Call) -> Value {
    let (load, block) = (server.engine.load(), server.engine.facts().block_size);
    let tokens = |blocks| block.tokens_in(blocks).0;
    let running = usize::try_from(load.running).unwrap_or(usize::MAX);
    let waiting: u32 = waiting(server, running)
        .iter()
        .map(|row| row.prompt + row.output)
        .sum();
    let figures = json!({
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.queued,
        "num_waiting_uncached_tokens": waiting,
        "num_used_tokens": tokens(load.used),
        "num_total_tokens": tokens(load.used) + waiting,
        "max_total_num_tokens": tokens(load.total),
        "token_usage": share(&load),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "max_running_requests": 256,
    });
    json!({
        "timestamp": "2026-11-29T14:40:34.000000+00:00",
        "version": "0.5.23",
        "loads": [told(call, figures)],
    })
}

pub(super) fn sglang_metrics(server: &Shared, call: &Call) -> Reply {
    let (load, block) = (server.engine.load(), server.engine.facts().block_size);
    let labels = format!("{{model_name=\"{}\"}}", server.model());
    let mut metrics = Metrics::new(call, "sglang:", labels);
    let tokens = |blocks| f64::from(block.tokens_in(blocks).0);
    metrics.own("num_running_reqs", "gauge", load.running.into());
    metrics.own("num_queue_reqs", "gauge", load.queued.into());
    metrics.own("token_usage", "gauge", share(&load));
    metrics.own("kv_used_tokens", "gauge", tokens(load.used));
    metrics.own("max_total_num_tokens", "gauge", tokens(load.total));
    Reply::text(
        200,
        "text/plain; version=0.0.4; charset=utf-8",
        metrics.text,
    )
}

pub(super) fn llama_metrics(server: &Shared, call: &Call) -> Reply {
    let rows = server.table.all();
    let processing = rows.len().min(server.slots() as usize);
    let mut metrics = Metrics::new(call, "llamacpp:", String::new());
    metrics.own("requests_processing", "gauge", processing as f64);
    metrics.own(
        "requests_deferred",
        "gauge",
        (rows.len() - processing) as f64,
    );
    let mut reply = Reply::text(200, "text/plain; version=0.0.4", metrics.text);
    let born = server.born().as_micros();
    reply
        .headers
        .push(("process-start-time-unix", born.to_string()));
    reply
}

/// The slots: as many as the server says it has, the first requests in them.
pub(super) fn llama_slots(server: &Shared, call: &Call) -> Value {
    let rows = server.table.all();
    let slots = (0..server.slots() as usize).map(|id| {
        let idle = json!({
            "id": id,
            "n_ctx": server.context(),
            "speculative": false,
            "is_processing": rows.get(id).is_some(),
        });
        let Some((task, row)) = rows.get(id) else {
            return told(call, idle);
        };
        let mut busy = idle;
        busy["id_task"] = json!(task);
        busy["n_prompt_tokens"] = json!(row.prompt + row.output);
        busy["n_prompt_tokens_processed"] = json!(row.prompt);
        busy["n_prompt_tokens_cache"] = json!(0);
        busy["next_token"] = json!([{
            "has_next_token": row.output < row.max_tokens,
            "has_new_line": false,
            "n_remain": row.max_tokens.saturating_sub(row.output),
            "n_decoded": row.output,
        }]);
        told(call, busy)
    });
    slots.collect()
}

/// Requests that have no KV yet: those without output after the first `running`.
fn waiting(server: &Shared, running: usize) -> Vec<Running> {
    let mut rows: Vec<Running> = server.table.all().into_iter().map(|(_, row)| row).collect();
    rows.sort_by_key(|row| row.output == 0);
    rows.split_off(running.min(rows.len()))
}
