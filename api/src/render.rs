//! Events as clients read them. They are stored as references; what they refer to is read when they are
//! shown.

use std::{collections::HashMap, sync::Arc};

use holdfast_engine::ids::SessionId;
use holdfast_store::{
    StoreError,
    feed::EventRow,
    sessions::{self, SessionRow},
    shown,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::{error::Answer, state::Api, turns, view::SessionMeta};

/// How many sessions a renderer remembers the rows of.
const REMEMBERED: usize = 1_000;

/// Renders the events of one stream.
#[derive(Debug, Default)]
pub(crate) struct Renderer {
    rows: HashMap<Uuid, SessionRow>,
    /// The turn that was rendered last: consecutive events often share it.
    head: Option<(Uuid, i64, Value)>,
}

/// The body of `session.created` and `session.updated`.
#[derive(Deserialize)]
struct Updated {
    version: i64,
    status: String,
    detail: Option<String>,
    head: Option<i64>,
}

impl Renderer {
    /// A renderer that knows a session.
    pub(crate) fn knowing(row: SessionRow) -> Self {
        Self { rows: HashMap::from([(row.id, row)]), head: None }
    }

    /// Reads anew the sessions that a page of events is about.
    pub(crate) async fn refresh(&mut self, api: &Api, page: &[EventRow]) -> Answer<()> {
        let mut ids: Vec<Uuid> = page.iter().map(|event| event.session_id).collect();
        ids.sort_unstable();
        ids.dedup();
        if self.rows.len() > REMEMBERED {
            self.rows.clear();
        }
        for row in sessions::rows(&api.store, &ids).await? {
            self.rows.insert(row.id, row);
        }
        Ok(())
    }

    /// An event's data. What is gone from the database is missing from it.
    pub(crate) async fn data(&mut self, api: &Api, event: &EventRow) -> Answer<Value> {
        let mut data = match event.kind.as_str() {
            "session.updated" => self.updated(api, event).await?,
            "session.created" => {
                let mut data = self.updated(api, event).await?;
                data.remove("head_turn");
                data
            }
            _ => shown::data(&api.store, event).await?,
        };
        shown::name(&mut data, event);
        Ok(Value::Object(data))
    }

    /// The session as the event left it, with the turn that was its newest.
    async fn updated(&mut self, api: &Api, event: &EventRow) -> Answer<Map<String, Value>> {
        let body: Updated = serde_json::from_str(&event.body).map_err(StoreError::from)?;
        let Some(row) = self.rows.get(&event.session_id) else {
            return Ok(to_map(&json!({
                "version": body.version,
                "status": body.status,
                "status_detail": body.detail,
                "head_turn": null,
            }))?);
        };
        let mut meta = SessionMeta::of(row)?;
        if meta.version != body.version {
            (meta.parked_on, meta.wakes_at) = (None, None);
        }
        meta.version = body.version;
        meta.status = body.status;
        meta.status_detail = body.detail;
        meta.updated_at = event.at;
        let owner: Arc<str> = row.owner.as_str().into();
        let mut data = to_map(&meta)?;
        data.insert("head_turn".to_owned(), self.head(api, &owner, event.session_id, body.head).await?);
        Ok(data)
    }

    async fn head(
        &mut self,
        api: &Api,
        owner: &Arc<str>,
        session: Uuid,
        position: Option<i64>,
    ) -> Answer<Value> {
        let Some(position) = position else { return Ok(Value::Null) };
        if let Some((of, at, turn)) = &self.head
            && (*of, *at) == (session, position)
        {
            return Ok(turn.clone());
        }
        let turn = turns::at(api, owner, SessionId(session), position).await?;
        let turn = serde_json::to_value(turn).map_err(StoreError::from)?;
        self.head = Some((session, position, turn.clone()));
        Ok(turn)
    }
}

fn to_map(value: &impl serde::Serialize) -> Result<Map<String, Value>, StoreError> {
    match serde_json::to_value(value)? {
        Value::Object(map) => Ok(map),
        other => Err(StoreError::Corrupt(format!("an event's data is no object: {other}"))),
    }
}

/// The data of a session's snapshot.
pub(crate) fn snapshot(row: &SessionRow) -> Answer<Value> {
    let mut data = to_map(&SessionMeta::of(row)?)?;
    data.insert("kind".to_owned(), json!("snapshot"));
    data.insert("seq".to_owned(), json!(row.event_seq));
    Ok(Value::Object(data))
}
