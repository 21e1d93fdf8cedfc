//! All routes, as a list.

use axum::{Router, middleware};
use utoipa::openapi::{
    OpenApi,
    info::{InfoBuilder, LicenseBuilder},
    security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    across, agents, auth, create, edge,
    error::{ApiError, ErrorBody},
    events, health, mail, origin, pending, runs, sessions,
    state::Shared,
    tenants,
};

fn list() -> OpenApiRouter<Shared> {
    OpenApiRouter::with_openapi(frame())
        .routes(routes!(health::document))
        .routes(routes!(health::docs))
        .routes(routes!(health::docs_page))
        .routes(routes!(health::docs_file))
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
        .routes(routes!(agents::list))
        .routes(routes!(agents::read))
        .routes(routes!(create::create, sessions::list))
        .routes(routes!(sessions::read, sessions::remove))
        .routes(routes!(sessions::read_turns))
        .routes(routes!(create::send_message))
        .routes(routes!(runs::resume))
        .routes(routes!(runs::cancel))
        .routes(routes!(runs::cancel_attached))
        .routes(routes!(runs::pause))
        .routes(routes!(mail::send, mail::list))
        .routes(routes!(pending::of_session))
        .routes(routes!(events::stream))
        .routes(routes!(pending::across))
        .routes(routes!(pending::read, pending::complete))
        .routes(routes!(across::stream))
        .routes(routes!(tenants::read, tenants::write))
}

/// The router of a node: every route, and what every request passes.
pub fn router(api: Shared) -> Router {
    let (routes, _) = list().split_for_parts();
    routes
        .fallback(async || ApiError::not_found())
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(middleware::from_fn_with_state(api.clone(), auth::require))
        .layer(middleware::from_fn_with_state(api.clone(), origin::guard))
        .layer(middleware::from_fn_with_state(api.clone(), edge::pass))
        .with_state(api)
}

/// The router of a metrics listener of its own, for whoever watches the node.
pub(crate) fn metrics_router(api: Shared) -> Router {
    Router::new()
        .route("/metrics", axum::routing::get(health::metrics_text))
        .route("/healthz", axum::routing::get(health::healthz))
        .route("/readyz", axum::routing::get(health::readyz))
        .fallback(async || ApiError::not_found())
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .with_state(api)
}

/// The OpenAPI document of the router.
pub fn openapi() -> OpenApi {
    list().into_openapi()
}

fn frame() -> OpenApi {
    let mut document = OpenApi::default();
    document.info = InfoBuilder::new()
        .title("Holdfast")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Durable sessions between people, programs and language-model agents. \
             Errors are `{error, message}` with a stable code.",
        ))
        .license(Some(LicenseBuilder::new().name("Apache-2.0").identifier(Some("Apache-2.0")).build()))
        .build();
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    let mut components = utoipa::openapi::Components::new();
    components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
    let (name, schema) =
        (<ErrorBody as utoipa::ToSchema>::name(), <ErrorBody as utoipa::PartialSchema>::schema());
    components.schemas.insert(name.into_owned(), schema);
    document.components = Some(components);
    document.security = Some(vec![
        SecurityRequirement::default(),
        SecurityRequirement::new::<_, [&str; 0], &str>("bearer", []),
    ]);
    document
}
