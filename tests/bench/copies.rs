//! Copies of one session's rows, loaded by COPY: as the store wrote them, with other ids.

use std::{io::Cursor, pin::pin};

use anyhow::{Result, ensure};
use futures::{SinkExt as _, StreamExt as _, TryStreamExt as _, stream};
use holdfast_engine::ids::{SessionId, Token};
use uuid::Uuid;

use crate::rig::Rig;

/// Where a session's rows lie, and by which column they are its own; the largest table first.
const TABLES: [(&str, &str); 6] = [
    ("events", "session_id"),
    ("turns", "session_id"),
    ("sessions", "id"),
    ("tool_calls", "session_id"),
    ("continuations", "session_id"),
    ("mail", "session_id"),
];

/// Bytes that are sent at once.
const CHUNK: usize = 64 * 1024;

/// A copy.
pub(crate) struct Copy {
    pub(crate) session: SessionId,
    pub(crate) token: Token,
    pub(crate) owner: String,
}

/// The rows of a session that waits for one call.
pub(crate) struct Template {
    /// Its session, token and owner, as they stand in the rows.
    names: [String; 3],
    /// Rows in COPY's text format, by table.
    rows: Vec<(&'static str, String)>,
}

impl Template {
    /// Reads them. The owner's name must stand for nothing else in them.
    pub(crate) async fn read(rig: &Rig, session: SessionId, token: Token, owner: &str) -> Result<Self> {
        let client = rig.connect().await?;
        let mut rows = Vec::new();
        for (table, column) in TABLES {
            let copy = format!("COPY (SELECT * FROM {table} WHERE {column} = '{session}') TO STDOUT");
            let text: Vec<_> = client.copy_out(&copy).await?.try_collect().await?;
            ensure!(!text.is_empty(), "the template has no rows in {table}");
            rows.push((table, String::from_utf8(text.concat())?));
        }
        Ok(Self { names: [session.to_string(), token.to_string(), owner.to_owned()], rows })
    }

    /// Loads `count` copies that belong to `owners` owners in turn.
    pub(crate) async fn load(&self, rig: &Rig, count: usize, owners: usize) -> Result<Vec<Copy>> {
        let copies: Vec<Copy> = (0..count)
            .map(|n| Copy {
                session: SessionId(Uuid::now_v7()),
                token: Token(Uuid::new_v4()),
                owner: format!("owner{}", n % owners.max(1)),
            })
            .collect();
        let loading = self.rows.iter().map(|(table, rows)| self.load_table(rig, table, rows, &copies));
        stream::iter(loading).buffer_unordered(2).try_collect::<()>().await?;
        Ok(copies)
    }

    async fn load_table(&self, rig: &Rig, table: &str, rows: &str, copies: &[Copy]) -> Result<()> {
        let client = rig.connect().await?;
        let mut sink = pin!(client.copy_in::<_, Cursor<Vec<u8>>>(&format!("COPY {table} FROM STDIN")).await?);
        let [session, token, owner] = &self.names;
        let mut chunk = String::new();
        for copy in copies {
            let rows = rows.replace(session, &copy.session.to_string());
            let rows = rows.replace(token, &copy.token.to_string());
            chunk += &rows.replace(owner, &copy.owner);
            if chunk.len() >= CHUNK {
                sink.send(Cursor::new(std::mem::take(&mut chunk).into_bytes())).await?;
            }
        }
        sink.send(Cursor::new(chunk.into_bytes())).await?;
        sink.finish().await?;
        Ok(())
    }
}
