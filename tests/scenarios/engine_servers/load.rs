//! What is known of an engine's load, and what is not.

use serde_json::Value;
use shoal_tests::engine_server::{Dialect, Fault};
use shoal_tests::wait::until;

use super::{Beside, CHAT, chat};

async fn becomes(mesh: &Beside, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    until(what, || async {
        let row = mesh.row(0).await?;
        if wanted(&row["load"]) {
            Ok(row["load"].clone())
        } else {
            Err(row.to_string())
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_view_follows_the_engines_own_numbers() {
    for (dialect, basis) in [
        (Dialect::Vllm, "polled"),
        (Dialect::Sglang, "polled"),
        (Dialect::LlamaServer, "polled"),
        (Dialect::OpenAi, "estimated"),
    ] {
        let mesh = Beside::at_speed(&[(dialect, "m")], 1.0).await;
        becomes(&mesh, "an idle row", |load| {
            load["basis"] == basis && load["used_blocks"] == 0
        })
        .await;
        // Work that did not come through the mesh shows as well, where the engine tells.
        let direct = mesh.cluster.client();
        let mut foreign = direct
            .stream(mesh.servers[0].address(), CHAT, &chat("m", 1_000))
            .await;
        foreign.next().await.expect("an event");
        if basis == "polled" {
            becomes(&mesh, "foreign work", |load| {
                load["used_blocks"] != 0 && load["running"] == 1
            })
            .await;
        }
        let mut own = mesh.stream(CHAT, &chat("m", 1_000)).await;
        own.next().await.expect("an event");
        let expected = if basis == "polled" { 2 } else { 1 };
        becomes(&mesh, "own work", |load| load["running"] == expected).await;
        drop((own, foreign));
        becomes(&mesh, "an idle row again", |load| {
            load["used_blocks"] == 0 && load["running"] == 0
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn figures_that_are_renamed_no_numbers_or_gone_are_unknown_and_not_idle() {
    for fault in [
        Fault::MetricsRenamed,
        Fault::MetricsNaN,
        Fault::MetricsGone,
        Fault::MetricsHang,
    ] {
        let mesh = Beside::at_speed(&[(Dialect::Vllm, "m")], 1.0).await;
        mesh.servers[0].fault(fault.clone());
        becomes(&mesh, "an estimate", |load| load["basis"] == "estimated").await;
        let mut own = mesh.stream(CHAT, &chat("m", 1_000)).await;
        own.next().await.expect("an event");
        becomes(&mesh, "own work", |load| {
            load["running"] == 1 && load["used_blocks"] != 0 && load["basis"] == "estimated"
        })
        .await;
        mesh.servers[0].mend();
        becomes(&mesh, "numbers again", |load| load["basis"] == "polled").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_not_well_gets_nothing_new() {
    let mesh = Beside::start(&[(Dialect::Vllm, "m"), (Dialect::Vllm, "m")]).await;
    for status in [503, 500, 404] {
        mesh.servers[0].fault(Fault::HealthStatus(status));
        becomes(&mesh, "it shows", |load| load["readiness"] == "Failed").await;
        let before = mesh.servers[0].seen_at(CHAT).len();
        for _ in 0..8 {
            let (_, reason) = mesh.stream(CHAT, &chat("m", 2)).await.text().await;
            assert_eq!(reason.as_deref(), Some("length"));
        }
        assert_eq!(mesh.servers[0].seen_at(CHAT).len(), before);
        mesh.servers[0].mend();
        becomes(&mesh, "it is well", |load| load["readiness"] == "Ready").await;
    }
}
