//! `shoal vllm-args`: what to add to the command line of a vLLM whose running requests are to move with their KV.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use crate::cli::output::{fail, print};
use crate::config::{Surroundings, data_dir, kv_folder_of};

/// Flags of `shoal vllm-args`.
#[derive(Debug, Args)]
pub(super) struct VllmArgs {
    /// The --data-dir of the node beside it [default: as for `shoal node`].
    #[arg(long, env = "SHOAL_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// The --engine-kv-dir of the node beside it [default: engine in --data-dir].
    #[arg(long, env = "SHOAL_ENGINE_KV_DIR", value_name = "DIR")]
    engine_kv_dir: Option<PathBuf>,

    /// Lets engines read each other's KV by NIXL, where both have it, instead of sending it through the nodes. Whoever reaches
    /// NIXL's ports can read and write KV: use it where only these engines can.
    #[arg(long)]
    nixl: bool,
}

/// Runs `shoal vllm-args`.
pub(super) fn run(args: &VllmArgs) -> ExitCode {
    let folder = data_dir(args.data_dir.as_deref(), &Surroundings::of_process())
        .map(|data_dir| kv_folder_of(&data_dir, args.engine_kv_dir.as_deref()));
    let folder = match folder.map(std::path::absolute) {
        Ok(Ok(folder)) => folder,
        Ok(Err(error)) => return fail(error),
        Err(error) => return fail(error),
    };
    match arguments(&folder, args.nixl) {
        Ok(text) => print(&text),
        Err(why) => fail(why),
    }
}

/// One line for a shell: nothing in it is split or expanded, so that `$(shoal vllm-args)` works too.
fn arguments(folder: &Path, nixl: bool) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    let text = folder.to_str().filter(|text| text.chars().all(plain));
    let text = text.ok_or_else(|| {
        format!(
            "{} has characters that a shell may split or expand; name another folder with --engine-kv-dir",
            folder.display()
        )
    })?;
    let mut extra = json!({ "dir": text });
    if nixl {
        extra["nixl"] = json!(true);
    }
    let config = json!({
        "kv_connector": "ShoalConnector",
        "kv_connector_module_path": "shoal_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    });
    Ok(format!("--kv-transfer-config {config}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_two_words_of_a_shell() {
        let text = arguments(Path::new("/var/lib/shoal/engine"), false).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        let [flag, config] = words[..] else {
            panic!("{text}");
        };
        assert_eq!(flag, "--kv-transfer-config");
        let config: serde_json::Value = serde_json::from_str(config).unwrap();
        assert_eq!(
            config["kv_connector_extra_config"]["dir"],
            "/var/lib/shoal/engine"
        );
        assert!(!text.contains(['*', '?', '$', '\\', '`', '\'']), "{text}");
        assert!(
            !text.contains("nixl"),
            "only who asks for it gets it: {text}"
        );
        let with = arguments(Path::new("/var/lib/shoal/engine"), true).unwrap();
        assert!(with.contains("\"nixl\":true"), "{with}");
    }

    #[test]
    fn a_folder_that_a_shell_would_split_is_refused() {
        let said = arguments(Path::new("/my data/engine"), false).unwrap_err();
        assert!(said.contains("--engine-kv-dir"), "{said}");
    }
}
