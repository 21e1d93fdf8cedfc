//! Standard output: what a command was asked for, for people or as JSON.

use std::{
    borrow::Cow,
    io::{self, Write as _},
};

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::Value;

use crate::failure::Failure;

/// Writes a line for people.
pub(crate) fn line(text: impl AsRef<str>) -> Result<(), Failure> {
    write(&printable(text.as_ref()))
}

/// A text whose characters don't command the terminal: what models, tools and users wrote may hold
/// sequences that move the cursor, rename the window or fill the clipboard. Control characters but for
/// newline and tab are replaced, and the carriage returns of line ends left out.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let commands = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(commands) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.replace("\r\n", "\n").replace(commands, "\u{fffd}"))
}

fn write(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n"));
    written.and_then(|()| out.flush()).map_err(|error| Failure::writing(&error))
}

/// Writes a JSON value on one line.
pub(crate) fn json(value: &Value) -> Result<(), Failure> {
    write(&value.to_string())
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
        // Before widths are measured, so that the columns stay in line.
        table.add_row(row.map(|cell| printable(&cell).into_owned()));
    }
    line(table.trim_fmt())
}

/// Tells a person something on standard error that isn't what the command was asked for.
pub(crate) fn note(text: impl AsRef<str>) {
    // There is nobody left to tell if standard error is closed.
    let _ = writeln!(io::stderr().lock(), "{}", printable(text.as_ref()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_printed_commands_the_terminal() {
        let hostile = "a\u{1b}]52;c;eA==\u{7}b\r\u{9b}31m\u{8}\u{7f}\u{0}c";
        let shown = printable(hostile);
        assert!(!shown.contains(char::is_control), "{shown:?}");
        assert_eq!(shown, "a\u{fffd}]52;c;eA==\u{fffd}b\u{fffd}\u{fffd}31m\u{fffd}\u{fffd}\u{fffd}c");
    }

    #[test]
    fn text_of_any_language_stays_as_it_is() {
        let text = "one\ttwo\n\u{e9} \u{5d0} \u{1f469}\u{200d}\u{1f680}";
        assert!(matches!(printable(text), Cow::Borrowed(same) if same == text));
        assert_eq!(printable("one\r\ntwo\r\n"), "one\ntwo\n", "line ends of another system");
    }
}
