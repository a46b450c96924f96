use std::collections::BTreeSet;
use std::sync::Arc;

use shoal_gossip::{BlockSize, Blocks, Incarnation, NodeFacts, NodeRow, Role};

use super::*;

/// Metrics of which every series has been touched.
fn touched() -> Metrics {
    let metrics = Metrics::new(NodeId(1), "9.9.9");
    metrics.request_answered("/v1/completions", 200, "completed");
    metrics.rejected("too many requests");
    metrics.first_token(Duration::from_millis(3));
    metrics.inter_token(Duration::from_millis(40), 4);
    metrics.request_finished(Duration::from_secs(2));
    metrics.placed(Duration::from_micros(700));
    metrics.dispatch_decision("p2c", "freest of two");
    metrics.offer_answered("accept");
    metrics.offer_received("refuse");
    metrics.retry("silent");
    metrics.replay("host lost");
    metrics.host_lost("silent");
    metrics.moved("asked", "moved", "none");
    metrics.move_figures(&MoveReport {
        pause_us: 900,
        total_us: 40_000,
        bytes: 12,
        stages: 2,
        tokens: 100,
        direct_tokens: 0,
    });
    metrics.arrived("arrived", "none");
    metrics.moves_under_way(1, 2);
    metrics.attached();
    metrics.preemptions(3);
    metrics.kv_bytes_per_token(46_080);
    metrics.moving_counts(MovingCounts {
        direct_bytes: 4096,
        seeds_anew: 1,
        penalties_anew: 2,
    });
    metrics.gossip_datagrams("sent", 7);
    metrics.gossip_dropped("replayed", 3);
    metrics
}

fn row(node: u64, load: Option<(Readiness, u64)>) -> NodeRow {
    NodeRow {
        facts: Arc::new(NodeFacts {
            node: NodeId(node),
            incarnation: Incarnation(1),
            peer_id: "p".into(),
            protocol: 1,
            control: ([127, 0, 0, 1], 1).into(),
            stream: ([127, 0, 0, 1], 2).into(),
            http: "127.0.0.1:3".into(),
            role: Role::Mixed,
            block_size: BlockSize::DEFAULT,
            models: Vec::new(),
            version: "0".into(),
        }),
        load: load.map(|(readiness, heard)| {
            let load = LoadSummary {
                readiness,
                ..LoadSummary::default()
            };
            (load, Timestamp::since_start(Duration::from_secs(heard)))
        }),
    }
}

#[test]
fn every_metric_of_the_table_is_rendered_with_its_help_and_no_other_is() {
    let text = touched().render();
    for doc in Metrics::table() {
        let help = format!("# HELP {} {}\n", doc.name, doc.help);
        assert!(text.contains(&help), "{help:?} is missing in\n{text}");
        let kind = match doc.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram(_) => "histogram",
        };
        assert!(text.contains(&format!("# TYPE {} {kind}\n", doc.name)));
    }
    let rendered: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    assert_eq!(rendered.len(), Metrics::table().len());
}

#[test]
fn names_follow_prometheus_rules() {
    let mut seen = BTreeSet::new();
    for doc in Metrics::table() {
        let name = doc.name;
        assert!(seen.insert(name), "{name} is there twice");
        assert!(name.starts_with("shoal_"), "{name}");
        assert!(
            name.bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
            "{name}"
        );
        let counts = matches!(doc.kind, MetricKind::Counter);
        assert_eq!(name.ends_with("_total"), counts, "{name}");
        if let MetricKind::Histogram(bounds) = doc.kind {
            assert!(name.ends_with("_seconds"), "{name} has no base unit");
            assert!(
                bounds.windows(2).all(|pair| pair[0].0 < pair[1].0),
                "{name}"
            );
        }
        assert!(!doc.labels.contains(&"node"), "{name}");
        assert!(doc.help.ends_with('.'), "{name}");
    }
}

#[test]
fn series_carry_node_labels_and_values() {
    let text = touched().render();
    let node = format!("node=\"{}\"", NodeId(1));
    for line in [
        format!(
            "shoal_requests_total{{{node},path=\"/v1/completions\",status=\"200\",outcome=\"completed\"}} 1"
        ),
        format!("shoal_build_info{{{node},version=\"9.9.9\"}} 1"),
        format!("shoal_inter_token_seconds_count{{{node}}} 4"),
        format!("shoal_inter_token_seconds_bucket{{{node},le=\"0.01\"}} 4"),
        format!("shoal_time_to_first_token_seconds_bucket{{{node},le=\"0.0025\"}} 0"),
        format!("shoal_gossip_dropped_total{{{node},reason=\"replayed\"}} 3"),
        format!("shoal_offers_total{{{node},side=\"home\",answer=\"accept\"}} 1"),
    ] {
        assert!(text.contains(&line), "{line} is missing in\n{text}");
    }
}

#[test]
fn two_nodes_in_one_process_do_not_mix() {
    let (one, other) = (touched(), Metrics::new(NodeId(2), "1"));
    one.output_tokens.increment(5);
    assert!(one.render().contains("shoal_output_tokens_total"));
    let other = other.render();
    let node = NodeId(2);
    assert!(other.contains(&format!("shoal_output_tokens_total{{node=\"{node}\"}} 0")));
    assert!(!other.contains(&NodeId(1).to_string()));
}

#[test]
fn load_and_view_are_shown() {
    let metrics = Metrics::new(NodeId(1), "1");
    let mut own = row(1, None);
    let load = LoadSummary {
        readiness: Readiness::Ready,
        total: Blocks(100),
        used: Blocks(30),
        reserved: Blocks(10),
        queued: 4,
        step_time_us: 12_500,
        ..LoadSummary::default()
    };
    own.load = Some((load, Timestamp::since_start(Duration::from_secs(9))));
    let rows = vec![
        own,
        row(2, Some((Readiness::Draining, 4))),
        row(3, Some((Readiness::Ready, 8))),
        row(4, None),
    ];
    let now = Timestamp::since_start(Duration::from_secs(10));
    metrics.show_view(&ClusterView::new(NodeId(1), now, rows), now);
    let text = metrics.render();
    let node = format!("node=\"{}\"", NodeId(1));
    for line in [
        format!("shoal_ready{{{node}}} 1"),
        format!("shoal_kv_blocks{{{node},state=\"free\"}} 60"),
        format!("shoal_kv_capacity_blocks{{{node}}} 100"),
        format!("shoal_engine_queued{{{node}}} 4"),
        format!("shoal_engine_step_seconds{{{node}}} 0.0125"),
        format!("shoal_view_nodes{{{node},readiness=\"ready\"}} 2"),
        format!("shoal_view_nodes{{{node},readiness=\"unknown\"}} 1"),
        format!("shoal_view_age_max_seconds{{{node}}} 6"),
        format!("shoal_view_age_median_seconds{{{node}}} 2"),
    ] {
        assert!(text.contains(&line), "{line} is missing in\n{text}");
    }
}

#[test]
fn an_empty_view_has_no_age() {
    let metrics = Metrics::new(NodeId(1), "1");
    let now = Timestamp::ZERO;
    metrics.show_view(&ClusterView::new(NodeId(1), now, Vec::new()), now);
    let node = NodeId(1);
    assert!(
        metrics
            .render()
            .contains(&format!("shoal_view_age_max_seconds{{node=\"{node}\"}} 0"))
    );
}

/// The tables of `docs/metrics.md`, as the program has them.
fn documented() -> String {
    let mut text = String::from("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
    for row in Metrics::table() {
        let kind = match row.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram(_) => "histogram",
        };
        let labels = row.labels.join("`, `");
        let labels = if labels.is_empty() {
            String::new()
        } else {
            format!("`{labels}`")
        };
        text.push_str(&format!(
            "| `{}` | {kind} | {labels} | {} |\n",
            row.name, row.help
        ));
    }
    text
}

#[test]
fn the_document_lists_every_metric() {
    const BEGIN: &str = "<!-- metrics: begin -->\n";
    const END: &str = "<!-- metrics: end -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let document = std::fs::read_to_string(path).unwrap();
    let (before, rest) = document.split_once(BEGIN).unwrap();
    let (table, after) = rest.split_once(END).unwrap();
    if std::env::var_os("SHOAL_UPDATE_DOCS").is_some() {
        std::fs::write(path, format!("{before}{BEGIN}{}{END}{after}", documented())).unwrap();
        return;
    }
    assert_eq!(
        table,
        documented(),
        "docs/metrics.md is behind; SHOAL_UPDATE_DOCS=1 with this test writes it"
    );
}
