//! `shoal node`: read the configuration, check it, run.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgMatches, Args};

use crate::cli::logging;
use crate::cli::output::{fail, print};
use crate::config::{
    ConfigError, EngineKind, KeySource, NodeConfig, RawNode, ServerKind, Surroundings, inspect,
    load,
};

/// Flags of `shoal node`.
#[derive(Debug, Args)]
pub(super) struct NodeArgs {
    /// File of settings in TOML; its keys are the flags without the dashes in front. Flags and environment go before it.
    #[arg(long, env = "SHOAL_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,

    /// Check the configuration and the files it names, say what would run, and exit.
    #[arg(long)]
    check: bool,

    #[command(flatten)]
    settings: RawNode,
}

/// Runs `shoal node`. `all` are the matches of the whole command line.
pub(super) fn run(
    args: &NodeArgs,
    all: &ArgMatches,
    serve: impl FnOnce(NodeConfig) -> ExitCode,
) -> ExitCode {
    let Some((_, matches)) = all.subcommand() else {
        return fail("no sub-command");
    };
    let config = match load(matches, args.config.as_deref(), &Surroundings::of_process()) {
        Ok(config) => config,
        Err(ConfigError::Flags(error)) => error.exit(),
        Err(error) => return fail(error),
    };
    if args.check {
        return check(&config);
    }
    if let Err(reason) = logging::start(&config.log) {
        return fail(reason);
    }
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    serve(config)
}

fn check(config: &NodeConfig) -> ExitCode {
    let shown = print(&describe(config));
    let problems = inspect(config);
    for problem in &problems {
        eprintln!("problem: {problem}");
    }
    match problems.len() {
        0 => shown,
        1 => fail("one problem keeps this node from running"),
        many => fail(format_args!("{many} problems keep this node from running")),
    }
}

/// What would run, for people; the warnings come last.
fn describe(config: &NodeConfig) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        text.push_str(&format!(
            "{name:<10} {value}
"
        ));
    };
    let scheme = match config.http.tls {
        Some(_) => "https",
        None => "http",
    };
    let keys = match &config.http.api_key_file {
        Some(path) => format!("API keys from {}", path.display()),
        None => "no API key needed".to_owned(),
    };
    line(
        "clients",
        format!("{scheme}://{}, {keys}", config.http.listen),
    );
    let mesh = &config.mesh;
    line(
        "mesh",
        format!(
            "`{}`, control on {}/udp, streams and gossip on {}/udp{}",
            mesh.cluster,
            mesh.control,
            mesh.stream,
            mesh.advertise
                .as_ref()
                .map(|host| format!(", advertised as {host}"))
                .unwrap_or_default()
        ),
    );
    line("seeds", seeds(mesh.seeds.as_slice(), mesh.mdns));
    line(
        "key",
        match &mesh.key {
            KeySource::None => "none".to_owned(),
            KeySource::File(path) => path.display().to_string(),
            KeySource::Text(_) => "from SHOAL_CLUSTER_KEY".to_owned(),
        },
    );
    line("engine", engine(config));
    line("policy", config.dispatch.policy.as_str().to_owned());
    line("data", config.data_dir.display().to_string());
    for warning in &config.warnings {
        line("warning", warning.clone());
    }
    text
}

fn seeds(seeds: &[String], mdns: bool) -> String {
    let named = match seeds {
        [] => "none named".to_owned(),
        some => format!("gossip of {}", some.join(", ")),
    };
    match mdns {
        true => format!("{named}, and mDNS"),
        false => named,
    }
}

fn engine(config: &NodeConfig) -> String {
    let engine = &config.engine;
    let figure = |value: Option<u32>, unit| match value {
        Some(value) => format!("{value} {unit}"),
        None => format!("the profile's {unit}"),
    };
    let kind = match &engine.kind {
        EngineKind::Llama(llama) => format!(
            "llama, {}, {} tokens of KV, {} sequences, {} tokens a step, {} thread(s){}",
            llama.model.display(),
            llama.context,
            llama.max_sequences,
            llama.step_tokens,
            llama.threads,
            match llama.reproducible {
                true => ", reproducible",
                false => "",
            }
        ),
        EngineKind::Http(http) => format!(
            "{} at {}, {}, looked at every {} ms",
            http.kind
                .map_or("a server (its kind is found out)", ServerKind::as_str),
            http.authority,
            match http.context {
                Some(tokens) => format!("{tokens} tokens of KV"),
                None => "as much KV as it says".to_owned(),
            },
            http.poll.as_millis(),
        ),
        EngineKind::Sim(sim) => format!(
            "simulated {} at {} times its speed, {}, {}, {}",
            sim.profile,
            sim.speed,
            figure(sim.context, "tokens of KV"),
            figure(sim.max_sequences, "sequences"),
            figure(sim.step_tokens, "tokens a step"),
        ),
    };
    format!(
        "{kind}; blocks of {}, queue of {}{}",
        engine.block_size,
        engine.queue_limit,
        engine
            .model_id
            .as_ref()
            .map(|id| format!("; served as `{id}`"))
            .unwrap_or_default()
    )
}
