//! Errors in OpenAI's shape: `{"error":{"message","type","param","code"}}`.
//!
//! Each has two texts. The client's says what it can do about it and names no address; the log's may
//! say more.

use std::time::Duration;

use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::api::route;
use crate::engine::EngineError;
use crate::frontend::HomeError;

/// When to come back if nobody knows better: a step of a loaded engine frees something within a second.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// What went wrong. Each kind has one status, none of them a success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ErrorKind {
    BadRequest,
    Unauthorized,
    Forbidden,
    UnknownPath,
    UnknownModel,
    UnknownRequest,
    Conflict,
    WrongMethod,
    SlowBody,
    TooLarge,
    Overloaded,
    Unavailable,
    ShuttingDown,
    Lost,
}

impl ErrorKind {
    fn status(self) -> StatusCode {
        match self {
            Self::BadRequest => StatusCode::BAD_REQUEST,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden => StatusCode::FORBIDDEN,
            Self::UnknownPath | Self::UnknownModel | Self::UnknownRequest => StatusCode::NOT_FOUND,
            Self::Conflict => StatusCode::CONFLICT,
            Self::WrongMethod => StatusCode::METHOD_NOT_ALLOWED,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable | Self::ShuttingDown | Self::Lost => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// OpenAI's `type`.
    fn class(self) -> &'static str {
        match self {
            Self::BadRequest
            | Self::Unauthorized
            | Self::Forbidden
            | Self::UnknownPath
            | Self::UnknownModel
            | Self::UnknownRequest
            | Self::Conflict
            | Self::WrongMethod
            | Self::SlowBody
            | Self::TooLarge => "invalid_request_error",
            Self::Overloaded => "rate_limit_error",
            Self::Unavailable | Self::ShuttingDown | Self::Lost => "server_error",
        }
    }

    /// OpenAI's `code`.
    fn code(self) -> Option<&'static str> {
        match self {
            Self::BadRequest => None,
            Self::Unauthorized => Some("invalid_api_key"),
            Self::Forbidden => Some("forbidden"),
            Self::UnknownPath => Some("unknown_path"),
            Self::UnknownModel => Some("model_not_found"),
            Self::UnknownRequest => Some("request_not_found"),
            Self::Conflict => Some("conflict"),
            Self::WrongMethod => Some("method_not_allowed"),
            Self::SlowBody => Some("request_timeout"),
            Self::TooLarge => Some("request_too_large"),
            Self::Overloaded => Some("overloaded"),
            Self::Unavailable => Some("unavailable"),
            Self::ShuttingDown => Some("shutting_down"),
            Self::Lost => Some("request_lost"),
        }
    }
}

/// An answer that is an error.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    kind: ErrorKind,
    /// For the client.
    message: String,
    /// The body field to blame.
    param: Option<String>,
    /// For `Retry-After`.
    retry_after: Option<Duration>,
    /// For the log, when there is more to say.
    detail: Option<String>,
}

/// The log's text of an error, on its way to the one who logs the request.
#[derive(Clone, Debug)]
pub(super) struct Detail(pub(super) String);

#[derive(Serialize)]
struct Shape<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    class: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl ApiError {
    pub(super) fn new(kind: ErrorKind, message: String) -> Self {
        let retry_after = match kind {
            ErrorKind::Overloaded
            | ErrorKind::Unavailable
            | ErrorKind::ShuttingDown
            | ErrorKind::Lost => Some(RETRY_SOON),
            ErrorKind::BadRequest
            | ErrorKind::Unauthorized
            | ErrorKind::Forbidden
            | ErrorKind::UnknownPath
            | ErrorKind::UnknownModel
            | ErrorKind::UnknownRequest
            | ErrorKind::Conflict
            | ErrorKind::WrongMethod
            | ErrorKind::SlowBody
            | ErrorKind::TooLarge => None,
        };
        Self {
            kind,
            message,
            param: None,
            retry_after,
            detail: None,
        }
    }

    pub(super) fn bad_request(message: String) -> Self {
        Self::new(ErrorKind::BadRequest, message)
    }

    pub(super) fn unknown_model(model: &str) -> Self {
        let error = HomeError::UnknownModel(model.to_owned());
        Self {
            param: Some("model".to_owned()),
            ..Self::new(ErrorKind::UnknownModel, error.to_string())
        }
    }

    /// Names the field to blame.
    pub(super) fn blaming(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    fn with_detail(mut self, detail: String) -> Self {
        self.detail = Some(detail);
        self
    }

    /// The log's text, if it has more to say than the client's.
    pub(super) fn detail(&self) -> &str {
        self.detail.as_deref().unwrap_or(&self.message)
    }

    /// What goes into a stream that has already begun: its status is long gone.
    pub(super) fn frame(&self) -> impl Serialize {
        self.shape("stream_error")
    }

    fn shape(&self, class: &'static str) -> Shape<'_> {
        Shape {
            error: Inner {
                message: &self.message,
                class,
                param: self.param.as_deref(),
                code: self.kind.code(),
            },
        }
    }
}

impl From<HomeError> for ApiError {
    fn from(error: HomeError) -> Self {
        let text = error.to_string();
        match error {
            HomeError::BadRequest { message, param } => Self {
                param,
                ..Self::bad_request(message)
            },
            HomeError::UnknownModel(model) => Self::unknown_model(&model),
            HomeError::Overloaded { retry_after } => Self {
                retry_after: Some(retry_after),
                ..Self::new(ErrorKind::Overloaded, text)
            },
            HomeError::Unavailable { retry_after } => Self {
                retry_after: Some(retry_after),
                ..Self::new(ErrorKind::Unavailable, text)
            },
            HomeError::ShuttingDown => Self::new(ErrorKind::ShuttingDown, text),
            // The reason may name hosts and addresses.
            HomeError::Lost(_) => Self::new(
                ErrorKind::Lost,
                "the request was lost and could not go on elsewhere; try again".to_owned(),
            )
            .with_detail(text),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::BadRequest { message, param } => HomeError::BadRequest { message, param },
            EngineError::UnknownModel(model) => HomeError::UnknownModel(model),
            EngineError::QueueFull => HomeError::Overloaded {
                retry_after: RETRY_SOON,
            },
            EngineError::NotReady => HomeError::Unavailable {
                retry_after: RETRY_SOON,
            },
            EngineError::Broken(reason) => HomeError::Lost(reason),
        }
        .into()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let shape = self.shape(self.kind.class());
        let mut response = (self.kind.status(), axum::Json(shape)).into_response();
        if let Some(after) = self.retry_after {
            // Whole seconds, and never "at once".
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            response
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.kind == ErrorKind::Unauthorized {
            response
                .headers_mut()
                .insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        let detail = Detail(self.detail().to_owned());
        response.extensions_mut().insert(detail);
        response
    }
}

/// At most this much of a path is repeated in an error.
const SHOWN_PATH: usize = 100;

fn shown(uri: &Uri) -> &str {
    // A path of a parsed request is ASCII, but a wrong guess here must not end a request.
    let path = uri.path();
    path.get(..SHOWN_PATH).unwrap_or(path)
}

/// Answers requests to paths that do not exist.
pub(super) fn unknown_path(uri: &Uri) -> ApiError {
    let message = format!(
        "there is no {}; requests go to POST /v1/chat/completions or POST /v1/completions, models are \
         at GET /v1/models",
        shown(uri)
    );
    ApiError::new(ErrorKind::UnknownPath, message)
}

/// Answers requests with a method that their path does not take. axum adds `Allow`.
pub(super) async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let path = shown(&uri);
    let takes_post = [
        "/completions",
        "/migrate",
        route::GENERATE,
        route::BENCHMARK,
    ];
    let hint = if takes_post.iter().any(|end| path.ends_with(end)) {
        "use POST with a JSON body"
    } else {
        "use GET"
    };
    let method: String = method.as_str().chars().take(20).collect();
    let message = format!("{path} does not take {method}; {hint}");
    ApiError::new(ErrorKind::WrongMethod, message)
}
