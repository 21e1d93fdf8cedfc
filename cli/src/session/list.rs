//! `holdfast session list`.

use serde_json::Value;

use crate::{
    args::ListArgs,
    client::{Call, Client},
    failure::Failure,
    output,
};

/// Prints a page of sessions.
pub(super) async fn run(client: &Client, args: ListArgs, json: bool) -> Result<(), Failure> {
    let call = Call::get("/v1/sessions")
        .with("agent", args.agent)
        .with("status", args.status)
        .with("parent", args.parent)
        .with("tree", args.tree.then_some(true))
        .with("label", args.label.map(|(name, value)| format!("{name}:{value}")))
        .with("q", args.query)
        .with("limit", args.limit)
        .with("cursor", args.cursor);
    let page = client.send(call).await?;
    if json {
        return output::json(&page);
    }
    let sessions = page["sessions"].as_array().map(Vec::as_slice).unwrap_or_default();
    if sessions.is_empty() {
        return output::line("no sessions");
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let rows = sessions.iter().map(|one| {
        [
            text(&one["session_id"]),
            text(&one["agent"]),
            text(&one["status"]),
            text(&one["status_detail"]),
            text(&one["updated_at"]),
        ]
    });
    output::table(["SESSION", "AGENT", "STATUS", "DETAIL", "UPDATED"], rows)?;
    match page["next_cursor"].as_str() {
        Some(cursor) => output::line(format!("more: --cursor {cursor}")),
        None => Ok(()),
    }
}
