//! Flags of the load generator.

use std::time::Duration;

use clap::Args;

use super::node::Address;
use super::{LoadError, LoadOptions};

/// Whom to load, and how.
#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    /// Endpoint, with or without /v1; http only. Several (one --url each) are used in turn.
    #[arg(
        long = "url",
        value_name = "URL",
        default_value = "http://127.0.0.1:8080",
        value_parser = url
    )]
    urls: Vec<String>,

    /// Model; the first that the first endpoint lists if there is none here.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// API key, if the endpoint wants one.
    #[arg(
        long,
        env = "OPENAI_API_KEY",
        value_name = "KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,

    /// Ask /v1/chat/completions and not /v1/completions. The chat template adds some tokens to each prompt.
    #[arg(long)]
    chat: bool,

    /// Send prompts as token ids, of exactly the length asked for, and not as text of about that length.
    #[arg(long, conflicts_with = "chat")]
    prompt_ids: bool,

    /// Leave out `ignore_eos`, which servers other than vLLM, SGLang and shoal may refuse. Outputs may then end early.
    #[arg(long)]
    no_ignore_eos: bool,

    /// Requests at work at once, each with a connection of its own (see `ulimit -n`). Beyond it requests wait; the wait is part of their latency, and they are counted as late.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_in_flight: u32,

    /// Time for one request from its start, in seconds. Beyond it the request has failed.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
}

impl LoadArgs {
    /// What the flags ask for. `seed` is that of the workload.
    pub fn options(&self, seed: u64) -> LoadOptions {
        LoadOptions {
            urls: self.urls.clone(),
            chat: self.chat,
            model: self.model.clone(),
            prompt_ids: self.prompt_ids,
            ignore_eos: !self.no_ignore_eos,
            max_in_flight: usize::try_from(self.max_in_flight).unwrap_or(usize::MAX),
            timeout: Duration::from_secs(self.timeout_s),
            // An empty variable is how shells unset a key.
            api_key: self.api_key.clone().filter(|key| !key.is_empty()),
            seed,
        }
    }
}

fn url(text: &str) -> Result<String, LoadError> {
    text.parse::<Address>()?;
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        load: LoadArgs,
    }

    fn parse(flags: &[&str]) -> Result<LoadOptions, String> {
        Line::try_parse_from([&["load"], flags].concat())
            .map(|line| line.load.options(7))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_a_local_node_is_asked_for_completions() {
        let options = parse(&[]).expect("defaults");
        assert_eq!(options.urls, ["http://127.0.0.1:8080"]);
        assert!(!options.chat && !options.prompt_ids && options.ignore_eos);
        assert_eq!(options.max_in_flight, 4096);
        assert_eq!(options.timeout, Duration::from_secs(600));
        assert_eq!(options.seed, 7);
    }

    #[test]
    fn several_endpoints_replace_the_default() {
        let flags = [
            "--url",
            "http://a:1",
            "--url",
            "http://b:2/v1",
            "--no-ignore-eos",
        ];
        let options = parse(&flags).expect("two endpoints");
        assert_eq!(options.urls, ["http://a:1", "http://b:2/v1"]);
        assert!(!options.ignore_eos);
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_reason() {
        for (flags, reason) in [
            (&["--url", "https://a"][..], "https is not spoken"),
            (&["--url", "ftp://a"], "http://127.0.0.1:8080"),
            (&["--chat", "--prompt-ids"], "cannot be used with"),
            (&["--max-in-flight", "0"], "1..=65536"),
            (&["--timeout-s", "0"], "1..=86400"),
        ] {
            let error = parse(flags).expect_err("a refusal");
            assert!(error.contains(reason), "{flags:?}: {error}");
        }
    }

    #[test]
    fn an_empty_key_is_none() {
        let options = parse(&["--api-key", ""]).expect("an empty key");
        assert_eq!(options.api_key, None);
    }
}
