//! From a request as it came to what the mesh is asked: which model, who can run it, what may be passed on.

use axum::http::HeaderMap;
use axum::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, COOKIE, EXPECT,
    FORWARDED, HOST, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use shoal_gossip::{ModelApi, ModelFacts};

use crate::api::error::{ApiError, ErrorKind};
use crate::api::headers;
use crate::engine::work::{Fit, HttpAsk, RequestKind};
use crate::openai::{self, GenerateRequest, Sketch};

/// Headers of a client that are passed on at most, and their bytes together: they travel with each submission.
const MAX_HEADERS: usize = 48;
/// See [`MAX_HEADERS`].
const MAX_HEADER_BYTES: usize = 8 * 1024;

/// Longest path with its query that is passed on.
const MAX_PATH: usize = 1024;

/// What of a request decides who runs it, and how it is answered.
pub(super) struct Asked {
    pub(super) sketch: Sketch,
    pub(super) fit: Fit,
    /// As this node read it; `None` when only an engine beside a node can.
    pub(super) parsed: Option<GenerateRequest>,
}

impl Asked {
    /// Reads a body. A mistake in it is the client's only if no engine reads bodies of its model by itself.
    pub(super) fn read(
        kind: Option<RequestKind>,
        body: &[u8],
        models: &[ModelFacts],
    ) -> Result<Self, ApiError> {
        let parsed = kind.map(|kind| openai::parse(kind, body)).transpose();
        if let Ok(Some(parsed)) = parsed {
            return Ok(Self {
                sketch: Sketch::of(&parsed),
                fit: Fit::Any,
                parsed: Some(parsed),
            });
        }
        let mut sketch = Sketch::read(body)?;
        let mut relayed = models.iter().filter(|model| model.api == ModelApi::Http);
        if sketch.model.is_empty() {
            // Engines with one model do not insist on its name.
            match (relayed.next(), relayed.next()) {
                (Some(only), None) => sketch.model.clone_from(&only.id),
                _ => {
                    parsed?;
                    return Err(
                        ApiError::bad_request("`model` is required".to_owned()).blaming("model")
                    );
                }
            }
        } else if !relayed.any(|model| model.id == sketch.model) {
            parsed?;
            if models.iter().any(|model| model.id == sketch.model) {
                let message = format!(
                    "the engines that serve the model `{}` do not take this path",
                    sketch.model
                );
                return Err(ApiError::new(ErrorKind::UnknownPath, message));
            }
            return Err(ApiError::unknown_model(&sketch.model));
        }
        Ok(Self {
            sketch,
            fit: Fit::Http,
            parsed: None,
        })
    }
}

/// What an engine beside a node gets of a request besides its body.
pub(super) fn http(path: &str, headers: &HeaderMap) -> Result<HttpAsk, ApiError> {
    if path.len() > MAX_PATH {
        let message = format!("the path has more than {MAX_PATH} bytes");
        return Err(ApiError::bad_request(message));
    }
    let mut bytes = 0;
    let mut kept = Vec::new();
    for (name, value) in headers {
        let Ok(value) = value.to_str() else { continue };
        bytes += name.as_str().len() + value.len();
        if is_private(name.as_str()) || kept.len() >= MAX_HEADERS || bytes > MAX_HEADER_BYTES {
            continue;
        }
        kept.push((name.as_str().to_owned(), value.to_owned()));
    }
    Ok(HttpAsk {
        path: path.to_owned(),
        headers: kept,
    })
}

/// Headers that end here: they belong to this connection, or are for this node alone. An engine has keys of its own.
fn is_private(name: &str) -> bool {
    let own = [
        ACCEPT_ENCODING,
        AUTHORIZATION,
        CONNECTION,
        CONTENT_ENCODING,
        CONTENT_LENGTH,
        COOKIE,
        EXPECT,
        FORWARDED,
        HOST,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        headers::REQUEST_ID,
    ];
    own.iter().any(|header| header.as_str() == name)
        || matches!(name, "x-api-key" | "keep-alive" | "proxy-connection")
        || name.starts_with("x-forwarded-")
}

/// Paths of engines that change or end them, or tell of other people's requests. They are for whoever runs the engine, and
/// never reached through the mesh, whatever model a body names.
pub(super) fn is_control(path: &str) -> bool {
    const EXACT: [&str; 42] = [
        "/abort_request",
        "/abort_requests",
        "/add_external_corpus",
        "/clear_hicache_storage_backend",
        "/collective_rpc",
        "/configure_logging",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/freeze_gc",
        "/flush_cache",
        "/get_weights_by_name",
        "/inference/v1/abort_requests",
        "/init_weight_transfer_engine",
        "/init_weights_send_group_for_remote_instance",
        "/init_weights_update_group",
        "/is_scaling_elastic_ep",
        "/load_lora_adapter",
        "/lora-adapters",
        "/models/load",
        "/models/unload",
        "/parse_function_call",
        "/pause",
        "/pause_generation",
        "/pd_role_switch",
        "/props",
        "/release_memory_occupation",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/resume_memory_occupation",
        "/scale_elastic_ep",
        "/server_info",
        "/set_internal_state",
        "/set_trace_level",
        "/shutdown",
        "/sleep",
        "/slow_down",
        "/start_profile",
        "/stop_profile",
        "/unload_lora_adapter",
        "/wake_up",
    ];
    const BEGINNINGS: [&str; 10] = [
        "/admin",
        "/api/models",
        "/dump_expert",
        "/mesh",
        "/slots",
        "/start_expert",
        "/stop_expert",
        "/update_weight",
        "/v1/load_lora",
        "/v1/unload_lora",
    ];
    // An engine may take a path that a careless comparison does not know again.
    let path = path.split('?').next().unwrap_or_default();
    let plain = path.to_ascii_lowercase();
    let plain = plain.trim_end_matches('/');
    plain.contains('%')
        || plain.contains("//")
        || plain.contains("/.")
        || EXACT.contains(&plain)
        || BEGINNINGS.iter().any(|start| plain.starts_with(start))
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};
    use shoal_gossip::Tokens;

    use super::*;

    fn model(id: &str, api: ModelApi) -> ModelFacts {
        ModelFacts {
            id: id.into(),
            context: Tokens(100),
            fingerprint: 1,
            created: 1,
            api,
        }
    }

    #[test]
    fn what_this_node_cannot_read_goes_to_engines_that_can() {
        let models = [
            model("own", ModelApi::Tokens),
            model("theirs", ModelApi::Http),
        ];
        let chat = Some(RequestKind::Chat);
        let read = |kind, body: &str| Asked::read(kind, body.as_bytes(), &models);
        let plain = r#"{"model":"theirs","messages":[{"role":"user","content":"x"}]}"#;
        assert_eq!(read(chat, plain).ok().unwrap().fit, Fit::Any);
        let tools = r#"{"model":"theirs","messages":[{"role":"user","content":"x"}],"tools":[{}]}"#;
        let asked = read(chat, tools).ok().unwrap();
        assert_eq!((asked.fit, asked.parsed.is_none()), (Fit::Http, true));
        let nameless = read(None, r#"{"input":"x"}"#).ok().unwrap();
        assert_eq!(nameless.sketch.model, "theirs");
        assert!(read(chat, &tools.replace("theirs", "own")).is_err());
        assert!(read(chat, &tools.replace("theirs", "nobody's")).is_err());
        assert!(read(None, r#"{"model":"own"}"#).is_err());
        assert!(read(None, r#"{"model":"nobody's"}"#).is_err());
    }

    #[test]
    fn credentials_and_the_connection_stay_here() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer k"),
            ("x-api-key", "k"),
            ("cookie", "c"),
            ("connection", "close"),
            ("x-forwarded-for", "10.0.0.1"),
            ("traceparent", "00-1"),
            ("x-session-id", "s"),
        ] {
            headers.insert(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        let kept = http("/v1/x?y=1", &headers).ok().unwrap();
        let mut names: Vec<_> = kept.headers.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["traceparent", "x-session-id"]);
        assert!(http(&"/x".repeat(600), &headers).is_err());
    }

    #[test]
    fn nobody_controls_an_engine_through_the_mesh() {
        for path in [
            "/sleep",
            "/SLEEP/",
            "/sleep?level=1",
            "/slots/0?action=erase",
            "/%73leep",
            "//sleep",
            "/x/../sleep",
            "/v1/load_lora_adapter",
            "/update_weights_from_disk",
        ] {
            assert!(is_control(path), "{path}");
        }
        for path in ["/v1/embeddings", "/tokenize", "/rerank", "/v1/anything/new"] {
            assert!(!is_control(path), "{path}");
        }
    }
}
