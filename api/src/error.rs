//! The one error of the HTTP surface: a status, a stable code, a sentence for a person.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use holdfast_store::StoreError;
use serde::Serialize;
use utoipa::ToSchema;

use crate::limits;

/// What a refused request is answered with.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    /// A stable code.
    #[schema(value_type = String, example = "unknown_session")]
    error: &'static str,
    /// A sentence for a person.
    message: String,
    /// With `token_already_completed`: whether it was completed with the same result.
    #[serde(skip_serializing_if = "Option::is_none")]
    same_result: Option<bool>,
}

/// Why a request is refused.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: &'static str,
    message: String,
    same_result: Option<bool>,
    retry_after: Option<u32>,
}

/// What handlers return.
pub(crate) type Answer<T> = Result<T, ApiError>;

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), same_result: None, retry_after: None }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    pub(crate) fn unauthorized() -> Self {
        let message = "a valid token is needed: send Authorization: Bearer <token>";
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message)
    }

    pub(crate) fn forbidden_origin(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden_origin", message)
    }

    pub(crate) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path")
    }

    pub(crate) fn unknown_session() -> Self {
        Self::new(StatusCode::NOT_FOUND, "unknown_session", "there is no such session")
    }

    pub(crate) fn unknown_token() -> Self {
        Self::new(StatusCode::NOT_FOUND, "unknown_token", "there is no such continuation token")
    }

    pub(crate) fn unknown_agent(slug: &str) -> Self {
        // What a path or a body names may be anything.
        let mut shown: String = slug.chars().take(limits::SLUG).collect();
        if shown.len() < slug.len() {
            shown.push('…');
        }
        let message = match shown.as_str() {
            "" => "there is no such agent".to_owned(),
            shown => format!("there is no agent named {shown:?}"),
        };
        Self::new(StatusCode::NOT_FOUND, "unknown_agent", message)
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "this path doesn't answer this method; the Allow header lists those that it does";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    pub(crate) fn payload_too_large(limit: usize) -> Self {
        let message = format!("the body is larger than the {limit} bytes that are accepted");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", message)
    }

    pub(crate) fn unsupported_media_type() -> Self {
        let message = "the body has to be JSON: send Content-Type: application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    pub(crate) fn unsupported_encoding() -> Self {
        let message = "the body has to be sent as it is, without Content-Encoding";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    pub(crate) fn internal() -> Self {
        let message = "something went wrong here; the log has it under this answer's request id";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message);
        Self { retry_after: Some(1), ..error }
    }

    /// Whether trying again later may work.
    pub(crate) fn is_unavailable(&self) -> bool {
        self.status == StatusCode::SERVICE_UNAVAILABLE
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let conflict = |code, message: &str| Self::new(StatusCode::CONFLICT, code, message);
        match error {
            StoreError::Unavailable(_) => {
                // The store has said what is wrong, once.
                tracing::debug!(%error, "a request met no database");
                Self::unavailable("the database is away; try again")
            }
            StoreError::Rival => Self::unavailable("too many changes at once; try again"),
            StoreError::UnknownSession => Self::unknown_session(),
            StoreError::UnknownAgent(slug) => Self::unknown_agent(&slug),
            StoreError::UnknownToken => Self::unknown_token(),
            StoreError::TokenCompleted { same_result } => {
                let error = conflict("token_already_completed", "the call was completed before");
                Self { same_result: Some(same_result), ..error }
            }
            StoreError::TokenCancelled => {
                conflict("token_cancelled", "the call was cancelled before a result came")
            }
            StoreError::TokenExpired => {
                Self::new(StatusCode::GONE, "token_expired", "the call's deadline has passed")
            }
            StoreError::NothingToApprove => conflict(
                "nothing_to_approve",
                "the call waits for its result, not for a word that it may run",
            ),
            StoreError::RunInProgress => conflict("run_in_progress", "a run of the session goes on"),
            StoreError::NoActiveRun => conflict("no_active_run", "no run of the session is active"),
            StoreError::Backlog { limit } => {
                let message =
                    format!("too many runs wait: {limit} of this owner's are queued; try again later");
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited", message);
                Self { retry_after: Some(limits::BACKLOG_RETRY_AFTER), ..error }
            }
            StoreError::MailboxFull { limit } => {
                let message = format!("the session's mailbox is full: it holds {limit} unread messages");
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "mailbox_full", message);
                Self { retry_after: Some(1), ..error }
            }
            StoreError::IdempotencyMismatch => {
                let message = "the Idempotency-Key was used before with another method, path or body";
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_mismatch", message)
            }
            StoreError::Corrupt(_) | StoreError::Database { .. } => {
                tracing::error!(kind = "http.failed", %error, "a request failed");
                Self::internal()
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, code, message, same_result, retry_after } = self;
        let mut response = (status, Json(ErrorBody { error: code, message, same_result })).into_response();
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
