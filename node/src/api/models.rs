//! `GET /v1/models`: the models of all live nodes.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use shoal_gossip::ModelFacts;

use crate::api::Api;
use crate::api::error::ApiError;
use crate::openai::MAX_MODEL_NAME;

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// vLLM's name for it; clients that budget their prompts read it.
    max_model_len: u32,
}

impl<'a> Model<'a> {
    fn new(facts: &'a ModelFacts, vllm_names: bool) -> Self {
        Self {
            id: &facts.id,
            object: "model",
            created: facts.created,
            // Some routers tell by it what they talk to.
            owned_by: if vllm_names { "vllm" } else { "shoal" },
            max_model_len: facts.context.0,
        }
    }
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Model<'a>>,
}

/// All of them.
pub(super) async fn list(State(api): State<Arc<Api>>) -> Response {
    let models = api.frontend.models();
    let names = api.config.vllm_names;
    let list = List {
        object: "list",
        data: models
            .iter()
            .map(|model| Model::new(model, names))
            .collect(),
    };
    Json(list).into_response()
}

/// One of them. Names may have slashes in them.
pub(super) async fn one(
    State(api): State<Arc<Api>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Ok(Path(id)) = id else {
        return Err(ApiError::bad_request(
            "the model's name in the path is not UTF-8".to_owned(),
        ));
    };
    let models = api.frontend.models();
    match models.iter().find(|model| model.id == id) {
        Some(model) => Ok(Json(Model::new(model, api.config.vllm_names)).into_response()),
        None => {
            let shown: String = id.chars().take(MAX_MODEL_NAME).collect();
            Err(ApiError::unknown_model(&shown))
        }
    }
}
