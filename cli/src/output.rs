//! Standard output: what a command was asked for, for people or as JSON.

use std::io::{self, Write as _};

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::Value;

use crate::failure::Failure;

/// Writes a line.
pub(crate) fn line(text: impl AsRef<str>) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_ref().as_bytes()).and_then(|()| out.write_all(b"\n"));
    written.and_then(|()| out.flush()).map_err(|error| Failure::writing(&error))
}

/// Writes a JSON value on one line.
pub(crate) fn json(value: &Value) -> Result<(), Failure> {
    line(value.to_string())
}

/// Writes a table; nothing but its header if it has no rows.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> Result<(), Failure> {
    let mut table = Table::new();
    // Ids and tokens are copied from it, so nothing is wrapped.
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    line(table.trim_fmt())
}

/// Tells a person something on standard error that isn't what the command was asked for.
pub(crate) fn note(text: impl AsRef<str>) {
    // There is nobody left to tell if standard error is closed.
    let _ = writeln!(io::stderr().lock(), "{}", text.as_ref());
}
