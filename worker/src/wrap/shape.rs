//! What becomes of a result on its way out: cut, or with a note.

use holdfast_engine::{
    content::{Part, ToolResult},
    tool::Outcome,
};

use super::{Frame, Reply, Wrapped};
use crate::metrics::{self, Wrap};

impl Wrapped {
    /// Cuts the text of what comes from inside.
    pub(super) async fn truncated(&self, next: usize, frame: Frame, limit: usize) -> Reply {
        let reply = self.inside(next, frame).await;
        let (reply, cut) = truncate(reply, limit);
        if cut {
            metrics::wrapped(Wrap::Truncated);
        }
        reply
    }
}

/// Cuts the text of a reply to `limit` bytes, the note that says so included. Attachments stay. Returns whether
/// anything was cut.
fn truncate(reply: Reply, limit: usize) -> (Reply, bool) {
    let mut cut = false;
    let mut short = |text: String, limit: usize| {
        let length = text.len();
        let text = shortened(text, limit);
        cut |= text.len() != length;
        text
    };
    let reply = match reply {
        Reply::Ended(Outcome::Completed(result)) => {
            let result = match result {
                ToolResult::Text { content } => ToolResult::Text { content: short(content, limit) },
                ToolResult::Json { content } => {
                    let text = content.to_string();
                    if text.len() > limit {
                        ToolResult::Text { content: short(text, limit) }
                    } else {
                        ToolResult::Json { content }
                    }
                }
                ToolResult::Media(media) => ToolResult::Media(media),
                ToolResult::Mixed { parts } => {
                    ToolResult::Mixed { parts: shortened_parts(parts, limit, &mut short) }
                }
            };
            Reply::Ended(Outcome::Completed(result))
        }
        Reply::Ended(Outcome::Failed(text)) => Reply::Ended(Outcome::Failed(short(text, limit))),
        Reply::Ended(Outcome::Cancelled(text)) => Reply::Ended(Outcome::Cancelled(short(text, limit))),
        Reply::Refused(text) => Reply::Refused(short(text, limit)),
        deferred @ Reply::Deferred(_) => deferred,
    };
    (reply, cut)
}

/// The parts share the limit: the one that exceeds it is cut, and texts after it are left out.
fn shortened_parts(
    parts: Vec<Part>,
    limit: usize,
    short: &mut impl FnMut(String, usize) -> String,
) -> Vec<Part> {
    let mut left = limit;
    let mut over = false;
    let mut kept = Vec::with_capacity(parts.len());
    for part in parts {
        match part {
            Part::Text { text } if !over => {
                over = text.len() > left;
                let text = short(text, left);
                left = left.saturating_sub(text.len());
                kept.push(Part::Text { text });
            }
            Part::Text { .. } => {}
            media @ Part::Media(_) => kept.push(media),
        }
    }
    kept
}

/// A text of at most `limit` bytes, with a note of what is missing if the limit leaves room for one.
fn shortened(mut text: String, limit: usize) -> String {
    if text.len() <= limit {
        return text;
    }
    let whole = text.len();
    // As long as any note for this text can be.
    let room = note(whole).len();
    let end = text.floor_char_boundary(limit.saturating_sub(room));
    text.truncate(end);
    if room <= limit {
        text.push_str(&note(whole - end));
    }
    text
}

fn note(missing: usize) -> String {
    format!("\n[result cut: {missing} more bytes are not shown]")
}

/// Adds a text to what a call has come to.
pub(super) fn annotated(reply: Reply, note: &str) -> Reply {
    let joined = |text: String| if text.is_empty() { note.to_owned() } else { format!("{text}\n{note}") };
    let part = || Part::Text { text: note.to_owned() };
    match reply {
        Reply::Ended(Outcome::Completed(result)) => Reply::Ended(Outcome::Completed(match result {
            ToolResult::Text { content } => ToolResult::Text { content: joined(content) },
            ToolResult::Json { content } => {
                ToolResult::Mixed { parts: vec![Part::Text { text: content.to_string() }, part()] }
            }
            ToolResult::Media(media) => ToolResult::Mixed { parts: vec![Part::Media(media), part()] },
            ToolResult::Mixed { mut parts } => {
                parts.push(part());
                ToolResult::Mixed { parts }
            }
        })),
        Reply::Ended(Outcome::Failed(text)) => Reply::Ended(Outcome::Failed(joined(text))),
        Reply::Refused(text) => Reply::Refused(joined(text)),
        other @ (Reply::Ended(Outcome::Cancelled(_)) | Reply::Deferred(_)) => other,
    }
}

#[cfg(test)]
mod tests {
    use holdfast_engine::content::Media;
    use serde_json::json;

    use super::*;

    fn completed(result: ToolResult) -> Reply {
        Reply::Ended(Outcome::Completed(result))
    }

    fn text_of(reply: &Reply) -> String {
        match reply {
            Reply::Ended(Outcome::Completed(result)) => result.as_text(),
            Reply::Ended(Outcome::Failed(text) | Outcome::Cancelled(text))
            | Reply::Refused(text)
            | Reply::Deferred(text) => text.clone(),
        }
    }

    fn media() -> Media {
        Media { mime_type: "image/png".into(), base64_data: "AAAA".repeat(1000), filename: None }
    }

    #[test]
    fn what_is_cut_fits_and_says_so() {
        for limit in [256, 257, 258, 1000] {
            let (reply, cut) = truncate(completed(ToolResult::text("é€x".repeat(1000))), limit);
            let text = text_of(&reply);
            assert!(cut && text.len() <= limit && text.len() > limit - 4, "{limit}: {}", text.len());
            let (head, note) = text.split_once("\n[result cut: ").expect("a note");
            assert_eq!(note, format!("{} more bytes are not shown]", 6000 - head.len()));
            let fits = completed(ToolResult::text("x".repeat(limit)));
            assert_eq!(truncate(fits.clone(), limit), (fits, false));
        }
        let json = json!({"list": vec![7; 500]});
        let (reply, cut) = truncate(completed(ToolResult::Json { content: json.clone() }), 300);
        assert!(
            cut && matches!(&reply, Reply::Ended(Outcome::Completed(ToolResult::Text { .. }))),
            "{reply:?}"
        );
        assert_eq!(
            truncate(completed(ToolResult::Json { content: json.clone() }), 2000).0,
            completed(ToolResult::Json { content: json })
        );
        for make in [
            |text| Reply::Ended(Outcome::Failed(text)),
            |text| Reply::Ended(Outcome::Cancelled(text)),
            Reply::Refused,
        ] {
            assert_eq!(text_of(&truncate(make("y".repeat(999)), 256).0).len(), 256);
        }
        let deferred = Reply::Deferred("z".repeat(999));
        assert_eq!(truncate(deferred.clone(), 256), (deferred, false));
    }

    #[test]
    fn parts_share_the_limit_and_attachments_stay() {
        let text = |length: usize| Part::Text { text: "t".repeat(length) };
        let parts = vec![text(200), Part::Media(media()), text(500), text(5), Part::Media(media())];
        let (reply, cut) = truncate(completed(ToolResult::Mixed { parts }), 300);
        let Reply::Ended(Outcome::Completed(ToolResult::Mixed { parts })) = reply else {
            panic!("{reply:?}")
        };
        assert!(
            cut && matches!(
                parts[..],
                [Part::Text { .. }, Part::Media(_), Part::Text { .. }, Part::Media(_)]
            ),
            "{parts:?}"
        );
        let texts: usize =
            parts.iter().map(|part| if let Part::Text { text } = part { text.len() } else { 0 }).sum();
        assert_eq!(texts, 300);
        let tight = vec![text(295), text(500)];
        let (reply, _) = truncate(completed(ToolResult::Mixed { parts: tight }), 300);
        assert_eq!(text_of(&reply).len(), 296, "no room for a note: {reply:?}");
    }

    #[test]
    fn a_note_joins_what_is_there() {
        let says = |reply: Reply| text_of(&annotated(reply, "seen"));
        assert_eq!(says(completed(ToolResult::text("a"))), "a\nseen");
        assert_eq!(says(completed(ToolResult::text(""))), "seen");
        assert_eq!(says(completed(ToolResult::Json { content: json!({"a": 1}) })), "{\"a\":1}\nseen");
        assert_eq!(says(completed(ToolResult::Media(media()))), "[image/png attachment]\nseen");
        assert_eq!(says(Reply::Ended(Outcome::Failed("f".into()))), "f\nseen");
        assert_eq!(says(Reply::Refused("r".into())), "r\nseen");
        assert_eq!(says(Reply::Deferred("d".into())), "d");
    }
}
