//! The requests that run, moving one by hand, and having a node hand over all that it has.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use shoal_gossip::{NodeId, RequestId};
use shoal_migrate::CopyManner;

use crate::api::error::{ApiError, ErrorKind};
use crate::api::{Api, body, headers};
use crate::engine::moving::JobPhase;
use crate::frontend::{DrainAnswer, RequestRow};
use crate::mesh::messages::{MoveAnswer, MoveReport};

/// What `GET /mesh/requests` lists.
#[derive(Serialize)]
struct RequestsBody {
    this: String,
    requests: Vec<RequestBody>,
}

#[derive(Serialize)]
struct RequestBody {
    id: String,
    home: String,
    host: String,
    epoch: u32,
    prompt_tokens: u32,
    output_tokens: u32,
    /// Null at a home that is not the host: only the host knows.
    phase: Option<JobPhase>,
    /// As `phase`.
    kv_blocks: Option<u32>,
    /// As `phase`.
    kv_tokens: Option<u32>,
}

impl From<RequestRow> for RequestBody {
    fn from(row: RequestRow) -> Self {
        let job = row.job.as_ref();
        Self {
            id: row.id.to_string(),
            home: row.id.home.to_string(),
            host: row.host.to_string(),
            epoch: row.epoch.0,
            prompt_tokens: row.prompt.0,
            output_tokens: row.output.0,
            phase: job.map(|job| job.phase),
            kv_blocks: job.map(|job| job.blocks.0),
            kv_tokens: job.map(|job| job.computed.0),
        }
    }
}

/// The requests that this node is the home or the host of.
pub(super) async fn list(State(api): State<Arc<Api>>) -> impl IntoResponse {
    Json(RequestsBody {
        this: api.frontend.this().to_string(),
        requests: api
            .frontend
            .requests()
            .into_iter()
            .map(RequestBody::from)
            .collect(),
    })
}

/// Body of a wish to move a request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MigrateBody {
    to: String,
    /// To compare with; the default is the one to use.
    #[serde(default)]
    copy: CopyManner,
}

/// A move that was done.
#[derive(Serialize)]
struct MovedBody {
    moved: bool,
    pause_ms: f64,
    total_ms: f64,
    bytes: u64,
    stages: u32,
    tokens: u32,
    direct_tokens: u32,
}

impl From<MoveReport> for MovedBody {
    fn from(report: MoveReport) -> Self {
        Self {
            moved: true,
            pause_ms: report.pause_us as f64 / 1e3,
            total_ms: report.total_us as f64 / 1e3,
            bytes: report.bytes,
            stages: report.stages,
            tokens: report.tokens,
            direct_tokens: report.direct_tokens,
        }
    }
}

/// Moves a request to the node that the body names, and answers when it is there, or stays.
pub(super) async fn migrate(
    State(api): State<Arc<Api>>,
    Path(id): Path<String>,
    wish: Request,
) -> Result<impl IntoResponse, ApiError> {
    let request: RequestId = id.parse().map_err(|error| wrong(&error).blaming("id"))?;
    let body = body_of(wish, &api).await?;
    let body: MigrateBody = serde_json::from_slice(&body).map_err(|error| {
        ApiError::bad_request(format!("the body must be {{\"to\": \"<node>\"}}: {error}"))
    })?;
    let to: NodeId = body
        .to
        .parse()
        .map_err(|error| wrong(&error).blaming("to"))?;
    match api.frontend.migrate(request, to, body.copy).await {
        MoveAnswer::Moved(report) => Ok(Json(MovedBody::from(report))),
        MoveAnswer::Stayed { reason } => {
            let message = format!("the request stays where it is: {reason}");
            Err(ApiError::new(ErrorKind::Conflict, message))
        }
        MoveAnswer::Gone { reason } => Err(ApiError::new(ErrorKind::Conflict, reason)),
        MoveAnswer::Unknown => {
            let message =
                format!("no request {request} runs; GET /mesh/requests lists those of a node");
            Err(ApiError::new(ErrorKind::UnknownRequest, message))
        }
    }
}

/// Body of the wish that a node stops. Empty, or without a name, for the node that is asked.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DrainBody {
    #[serde(default)]
    node: Option<String>,
}

/// A node that stops.
#[derive(Serialize)]
struct DrainingBody {
    node: String,
    draining: bool,
}

/// Has a node hand over what it has, and stop. Answers as soon as that has begun.
pub(super) async fn drain(
    State(api): State<Arc<Api>>,
    wish: Request,
) -> Result<impl IntoResponse, ApiError> {
    let body = body_of(wish, &api).await?;
    let body: DrainBody = match body.trim_ascii() {
        [] => DrainBody::default(),
        text => serde_json::from_slice(text).map_err(|error| {
            let message = format!("the body must be empty or {{\"node\": \"<node>\"}}: {error}");
            ApiError::bad_request(message)
        })?,
    };
    let node: NodeId = match body.node {
        None => api.frontend.this(),
        Some(name) => name
            .parse()
            .map_err(|error| wrong(&error).blaming("node"))?,
    };
    match api.frontend.drain(node).await {
        DrainAnswer::Begun => {
            let draining = DrainingBody {
                node: node.to_string(),
                draining: true,
            };
            Ok((StatusCode::ACCEPTED, Json(draining)))
        }
        DrainAnswer::Unknown => {
            let message = format!("no node {node} is in the mesh; GET /mesh/nodes lists them");
            Err(ApiError::bad_request(message).blaming("node"))
        }
        DrainAnswer::Silent => {
            let message = format!("the node {node} did not answer; ask it directly");
            Err(ApiError::new(ErrorKind::Unavailable, message))
        }
    }
}

/// The body of an operator's wish, bounded in length and time as a client's is.
async fn body_of(wish: Request, api: &Api) -> Result<Bytes, ApiError> {
    headers::check_content(wish.headers())?;
    let (head, body) = wish.into_parts();
    body::read(&head.headers, body, &api.config).await
}

fn wrong(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::bad_request(error.to_string())
}
