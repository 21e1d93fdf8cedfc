//! The agents that nodes have loaded.

use axum::{Json, extract::State};
use holdfast_store::{
    StoreError,
    agents::{self, AgentRow},
};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    auth::Who,
    describe::ReadErrors,
    error::{Answer, ErrorBody},
    extract::{AgentPath, Asked, Nothing},
    state::Shared,
};

/// An agent.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AgentView {
    slug: String,
    /// Hash of what it was made from.
    revision: String,
    /// `file` or `database`.
    source: String,
    /// `announce`, `model`, `system_prompt`, `tools` and what else its node says of it.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    descriptor: Map<String, Value>,
}

impl AgentView {
    fn of(row: AgentRow) -> Result<Self, StoreError> {
        let mut descriptor: Map<String, Value> = serde_json::from_str(&row.descriptor)?;
        for own in ["slug", "revision", "source"] {
            descriptor.remove(own);
        }
        Ok(Self { slug: row.slug, revision: row.revision, source: row.source, descriptor })
    }
}

/// Lists the agents.
#[utoipa::path(get, path = "/v1/agents", tag = "agents",
    responses((status = 200, description = "All agents, by slug.", body = Vec<AgentView>), ReadErrors))]
pub(crate) async fn list(
    State(api): State<Shared>,
    _who: Who,
    Asked(Nothing {}): Asked<Nothing>,
) -> Answer<Json<Vec<AgentView>>> {
    let rows = agents::list(&api.store).await?;
    Ok(Json(rows.into_iter().map(AgentView::of).collect::<Result<_, _>>()?))
}

/// One agent.
#[utoipa::path(get, path = "/v1/agents/{slug}", tag = "agents",
    params(("slug" = String, Path, description = "The agent.")),
    responses(
        (status = 200, description = "The agent.", body = AgentView),
        (status = 404, description = "`unknown_agent`.", body = ErrorBody),
        ReadErrors))]
pub(crate) async fn read(
    State(api): State<Shared>,
    _who: Who,
    AgentPath(slug): AgentPath,
    Asked(Nothing {}): Asked<Nothing>,
) -> Answer<Json<AgentView>> {
    Ok(Json(AgentView::of(agents::get(&api.store, &slug).await?)?))
}
