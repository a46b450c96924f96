//! The view as a table. Reads what is there and shows `-` for what is not, so that a newer or older
//! node can be asked as well.

use serde_json::Value;
use shoal_gossip::{Blocks, LoadSummary, Readiness};

use crate::dispatch::Freeness;

const TITLES: [&str; 10] = [
    "NODE", "STATE", "KV", "RESERVED", "RUNNING", "QUEUED", "FREENESS", "AGE", "HTTP", "MODELS",
];

/// Shown for what the node did not say.
const UNKNOWN: &str = "-";

/// The table, or nothing when `view` is not a view.
pub(super) fn render(view: &Value) -> Option<String> {
    let this = view.get("this")?.as_str()?;
    let nodes = view.get("nodes")?.as_array()?;
    let rows: Vec<_> = nodes.iter().map(|node| row(node, this)).collect();
    let widths: [usize; TITLES.len()] = std::array::from_fn(|column| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .chain([TITLES[column].len()])
            .max()
            .unwrap_or(0)
    });
    let mut text = line(&TITLES.map(str::to_owned), &widths);
    for row in &rows {
        text.push_str(&line(row, &widths));
    }
    let ready = rows.iter().filter(|row| row[1] == "ready").count();
    text.push_str(&format!(
        "{} nodes, {ready} ready; * is the one that was asked\n",
        rows.len()
    ));
    Some(text)
}

fn line(cells: &[String; TITLES.len()], widths: &[usize; TITLES.len()]) -> String {
    let padded: Vec<String> = cells
        .iter()
        .zip(widths)
        .map(|(cell, width)| format!("{cell:<width$}"))
        .collect();
    format!("{}\n", padded.join("  ").trim_end())
}

fn row(node: &Value, this: &str) -> [String; TITLES.len()] {
    let name = text(node.get("node"));
    let load = node.get("load").filter(|load| load.is_object());
    let count = |key| load.and_then(|load| number(load, key));
    let cell = |value: Option<u32>| value.map_or_else(|| UNKNOWN.to_owned(), |n| n.to_string());
    let state = text(load.and_then(|load| load.get("readiness"))).to_lowercase();
    let facts = node.get("facts");
    let fact = |key| facts.and_then(|facts| facts.get(key));
    let kv = match (count("used_blocks"), count("total_blocks")) {
        (Some(used), Some(total)) => format!("{used}/{total}"),
        _ => UNKNOWN.to_owned(),
    };
    [
        match name == this {
            true => format!("{name}*"),
            false => name,
        },
        state.clone(),
        kv,
        cell(count("reserved_blocks")),
        cell(count("running")),
        cell(count("queued")),
        load.and_then(|load| freeness(load, &state))
            .unwrap_or_else(|| UNKNOWN.to_owned()),
        node.get("age_ms")
            .and_then(Value::as_f64)
            .map_or_else(|| UNKNOWN.to_owned(), |age| format!("{age:.0} ms")),
        text(fact("http")),
        models(fact("models")),
    ]
}

/// The node's freeness by the formula that dispatch uses, without what others may have sent since.
fn freeness(load: &Value, state: &str) -> Option<String> {
    if state != "ready" {
        return None;
    }
    let blocks = |key| number(load, key).map(Blocks);
    let summary = LoadSummary {
        readiness: Readiness::Ready,
        total: blocks("total_blocks")?,
        used: blocks("used_blocks")?,
        reserved: blocks("reserved_blocks")?,
        queued_demand: blocks("queued_demand_blocks").unwrap_or_default(),
        running: number(load, "running")?,
        queued: number(load, "queued")?,
        slots_full: load.get("slots_full").and_then(Value::as_bool) == Some(true),
        ..LoadSummary::default()
    };
    Some(Freeness::for_dispatch(&summary, Blocks::ZERO).to_string())
}

fn number(load: &Value, key: &str) -> Option<u32> {
    load.get(key)?.as_u64()?.try_into().ok()
}

/// The ids of a list of models.
fn models(list: Option<&Value>) -> String {
    let names: Vec<String> = list
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|model| text(model.get("id")))
        .collect();
    match names.is_empty() {
        true => UNKNOWN.to_owned(),
        false => names.join(","),
    }
}

/// A text from the network, with everything taken out that could steer a terminal.
fn text(value: Option<&Value>) -> String {
    match value.and_then(Value::as_str) {
        Some(text) if !text.is_empty() => text
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect(),
        _ => UNKNOWN.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_view_becomes_one_line_a_node() {
        let view = json!({
            "this": "aaa",
            "nodes": [
                {
                    "node": "aaa",
                    "age_ms": 12,
                    "facts": {"http": "127.0.0.1:8080", "models": [{"id": "smol"}]},
                    "load": {
                        "readiness": "Ready", "total_blocks": 512, "used_blocks": 12,
                        "reserved_blocks": 100, "running": 4, "queued": 0,
                    },
                },
                {
                    "node": "bbbbbb",
                    "age_ms": 250.4,
                    "facts": {"http": "127.0.0.1:8081", "models": [{"id": "smol"}, {"id": "big"}]},
                    "load": {
                        "readiness": "Draining", "total_blocks": 512, "used_blocks": 0,
                        "reserved_blocks": 0, "running": 0, "queued": 0,
                    },
                },
                {"node": "ccc", "age_ms": null, "load": null},
            ],
        });
        let expected = "\
NODE    STATE     KV      RESERVED  RUNNING  QUEUED  FREENESS  AGE     HTTP            MODELS
aaa*    ready     12/512  100       4        0       100.0     12 ms   127.0.0.1:8080  smol
bbbbbb  draining  0/512   0         0        0       -         250 ms  127.0.0.1:8081  smol,big
ccc     -         -       -         -        -       -         -       -               -
3 nodes, 1 ready; * is the one that was asked
";
        assert_eq!(render(&view).unwrap(), expected);
    }

    #[test]
    fn what_is_no_view_gives_no_table() {
        for junk in [
            json!(null),
            json!([]),
            json!({"nodes": []}),
            json!({"this": 1, "nodes": []}),
        ] {
            assert_eq!(render(&junk), None);
        }
    }

    #[test]
    fn a_hostile_name_cannot_steer_the_terminal() {
        let view = json!({"this": "a", "nodes": [
            {"node": "\u{1b}[2J", "facts": {"models": [{"id": "\n"}]}}, 7,
        ]});
        let table = render(&view).unwrap();
        assert!(!table.contains('\u{1b}'), "{table}");
        assert_eq!(table.lines().count(), 4, "{table}");
    }
}
