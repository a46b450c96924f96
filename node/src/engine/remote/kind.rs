//! The kinds of inference server that a node may stand beside.

/// An inference server, told by what it reports about itself.
///
/// The names are those of the command line and of reports.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum ServerKind {
    /// vLLM: load from `/metrics`.
    Vllm,
    /// SGLang: load from `/v1/loads`, else from `/metrics`.
    Sglang,
    /// llama.cpp's `llama-server`: load from `/slots`.
    LlamaServer,
    /// Any other server with `/v1/models` and `/v1/chat/completions`. Tells no load.
    #[serde(rename = "openai")]
    #[value(name = "openai")]
    OpenAi,
}

impl ServerKind {
    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaServer => "llama-server",
            Self::OpenAi => "openai",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn one_name_on_the_command_line_in_json_and_in_text() {
        for kind in ServerKind::value_variants() {
            let name = kind.as_str();
            assert_eq!(ServerKind::from_str(name, false).as_ref(), Ok(kind));
            let json = serde_json::to_string(kind).expect("serializes");
            assert_eq!(json, format!("\"{name}\""));
            assert_eq!(
                serde_json::from_str::<ServerKind>(&json).expect("reads"),
                *kind
            );
        }
    }
}
