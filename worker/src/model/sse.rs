//! Server-sent events, as model providers send them.
//!
//! Follows the WHATWG rules: LF, CR and CRLF end a line, comments and unknown fields are passed over,
//! `data` lines of an event are joined, and an event that its blank line never ended is dropped. A line may
//! arrive in any number of pieces. The caller bounds the bytes.

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Event {
    /// The `event` field; empty when absent.
    pub(super) name: String,
    /// The `data` lines, joined by line feeds.
    pub(super) data: String,
}

/// Takes bytes, gives events.
#[derive(Debug, Default)]
pub(super) struct Parser {
    line: Vec<u8>,
    event: Event,
    has_data: bool,
    after_cr: bool,
    past_first_line: bool,
}

impl Parser {
    /// Takes the next bytes and returns the events that they completed.
    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(&first) = bytes.first() {
            if std::mem::take(&mut self.after_cr) && first == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.line.extend_from_slice(bytes);
                break;
            };
            self.line.extend_from_slice(&bytes[..end]);
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            let line = std::mem::take(&mut self.line);
            events.extend(self.line(&line));
        }
        events
    }

    fn line(&mut self, line: &[u8]) -> Option<Event> {
        let mut line = String::from_utf8_lossy(line);
        if !std::mem::replace(&mut self.past_first_line, true)
            && let Some(rest) = line.strip_prefix('\u{feff}')
        {
            line = rest.to_owned().into();
        }
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            return std::mem::take(&mut self.has_data).then_some(event);
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
            }
            "event" => value.clone_into(&mut self.event.name),
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, data: &str) -> Event {
        Event { name: name.into(), data: data.into() }
    }

    const STREAM: &str = "\u{feff}: hello\r\ndata: {\"a\":\r\ndata:  1}\r\n\r\nid: 7\nunknown\nevent: ping\ndata\n\n\
                          event: lonely\n\ndata: é\r\rdata: unfinished\n";

    #[test]
    fn any_split_gives_the_same_events() {
        let expected = [event("", "{\"a\":\n 1}"), event("ping", ""), event("", "é")];
        for size in 1..=STREAM.len() {
            let mut parser = Parser::default();
            let events: Vec<_> =
                STREAM.as_bytes().chunks(size).flat_map(|piece| parser.push(piece)).collect();
            assert_eq!(events, expected, "pieces of {size}");
        }
    }
}
