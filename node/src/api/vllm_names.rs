//! This node as a vLLM server shows itself in `/metrics`: the few series that routers read.
//!
//! SMG, Dynamo's and llm-d's endpoint pickers choose by running and waiting requests and by KV use; the size of the KV they take
//! from `cache_config_info`. Names and labels are those of vLLM 0.32.

use std::fmt::Write;

use shoal_gossip::NodeRow;

/// The lines for the node of this row; none as long as it knows no model or no load.
pub(super) fn lines(row: &NodeRow, preemptions: u64) -> String {
    let mut out = String::new();
    let (Some(model), Some((load, _))) = (row.facts.models.first(), row.load) else {
        return out;
    };
    let labels = format!("engine=\"0\",model_name=\"{}\"", escaped(&model.id));
    let held = f64::from(load.used.0) + f64::from(load.reserved.0);
    let usage = (held / f64::from(load.total.0.max(1))).min(1.0);
    let cache = format!(
        "block_size=\"{}\",engine=\"0\",num_gpu_blocks=\"{}\"",
        row.facts.block_size.tokens(),
        load.total.0
    );
    let series: [(&str, &str, &str, &str, f64); 5] = [
        (
            "num_requests_running",
            "gauge",
            "Requests that hold KV on this node.",
            &labels,
            f64::from(load.running),
        ),
        (
            "num_requests_waiting",
            "gauge",
            "Requests that wait for KV on this node.",
            &labels,
            f64::from(load.queued),
        ),
        (
            "kv_cache_usage_perc",
            "gauge",
            "Share of the KV blocks that is held or promised, 0 to 1.",
            &labels,
            usage,
        ),
        (
            "num_preemptions_total",
            "counter",
            "Times that a request lost its KV to another.",
            &labels,
            preemptions as f64,
        ),
        (
            "cache_config_info",
            "gauge",
            "KV blocks and their size in tokens.",
            &cache,
            1.0,
        ),
    ];
    for (name, kind, help, labels, value) in series {
        // Into memory: cannot fail.
        let written = writeln!(
            out,
            "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}\nvllm:{name}{{{labels}}} {value}"
        );
        debug_assert!(written.is_ok());
    }
    out
}

fn escaped(label: &str) -> String {
    label
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
