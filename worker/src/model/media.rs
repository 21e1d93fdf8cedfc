//! What becomes of an attachment in a request.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use holdfast_engine::{content::Media, model::Flavor};
use serde_json::{Value, json};

/// Providers refuse it as an image, and it is text.
const SVG: &str = "image/svg+xml";

/// A content part of a chat completions message.
pub(super) fn chat_part(media: &Media, flavor: Flavor) -> Value {
    let mime = mime(media);
    let data_url = || format!("data:{mime};base64,{}", media.base64_data);
    if mime.starts_with("image/") && mime != SVG {
        return json!({ "type": "image_url", "image_url": { "url": data_url() } });
    }
    let full = matches!(flavor, Flavor::OpenAIv1 | Flavor::OpenRouter);
    match (mime.as_str(), audio_format(&mime)) {
        ("application/pdf", _) if full => {
            let name = media.filename.as_deref().unwrap_or("attachment.pdf");
            json!({ "type": "file", "file": { "filename": name, "file_data": data_url() } })
        }
        ("application/pdf", _) if flavor == Flavor::MistralV1 => {
            json!({ "type": "document_url", "document_url": data_url() })
        }
        (_, Some(format)) if full => {
            json!({ "type": "input_audio", "input_audio": { "data": media.base64_data, "format": format } })
        }
        _ => json!({ "type": "text", "text": as_text(media, &mime) }),
    }
}

/// A content block of an Anthropic message or tool result.
pub(super) fn anthropic_block(media: &Media) -> Value {
    let mime = mime(media);
    match mime.as_str() {
        "image/png" | "image/jpeg" | "image/gif" | "image/webp" => json!({
            "type": "image",
            "source": { "type": "base64", "media_type": mime, "data": media.base64_data },
        }),
        "application/pdf" => {
            let mut block = json!({
                "type": "document",
                "source": { "type": "base64", "media_type": mime, "data": media.base64_data },
            });
            if let Some(name) = &media.filename {
                block["title"] = json!(name);
            }
            block
        }
        _ => json!({ "type": "text", "text": as_text(media, &mime) }),
    }
}

/// The MIME type in lower case, without parameters, under its usual name.
fn mime(media: &Media) -> String {
    let plain = media.mime_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if plain == "image/jpg" { "image/jpeg".to_owned() } else { plain }
}

fn audio_format(mime: &str) -> Option<&'static str> {
    match mime {
        "audio/wav" | "audio/x-wav" | "audio/wave" => Some("wav"),
        "audio/mpeg" | "audio/mp3" => Some("mp3"),
        _ => None,
    }
}

/// A text attachment's own text, or a note that there is an attachment which the model can't be shown.
fn as_text(media: &Media, mime: &str) -> String {
    let name = media.filename.as_deref().unwrap_or("without a name");
    let bytes = STANDARD.decode(media.base64_data.as_bytes());
    let readable = mime.starts_with("text/") || matches!(mime, "application/json" | "application/xml" | SVG);
    match bytes.map(|bytes| (bytes.len(), String::from_utf8(bytes))) {
        Ok((_, Ok(text))) if readable => format!("[{mime} attachment: {name}]\n{text}"),
        Ok((size, _)) => {
            format!("[{mime} attachment: {name}, {size} bytes; not shown, the model can't read this type]")
        }
        Err(_) => format!("[{mime} attachment: {name}; not shown, its data is damaged]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn media(mime: &str, data: &[u8], name: Option<&str>) -> Media {
        Media { mime_type: mime.into(), base64_data: STANDARD.encode(data), filename: name.map(Into::into) }
    }

    #[test]
    fn chat_parts_by_flavour() {
        let image = media("image/JPG", b"x", None);
        let url = json!({ "type": "image_url", "image_url": { "url": "data:image/jpeg;base64,eA==" } });
        assert!(Flavor::ALL.into_iter().all(|flavor| chat_part(&image, flavor) == url));
        let pdf = media("application/pdf", b"x", Some("a.pdf"));
        assert_eq!(
            chat_part(&pdf, Flavor::OpenAIv1),
            json!({ "type": "file", "file": { "filename": "a.pdf", "file_data": "data:application/pdf;base64,eA==" } })
        );
        assert_eq!(chat_part(&pdf, Flavor::MistralV1)["type"], "document_url");
        let note = "[application/pdf attachment: a.pdf, 1 bytes; not shown, the model can't read this type]";
        assert_eq!(chat_part(&pdf, Flavor::KimiV1), json!({ "type": "text", "text": note }));
        let sound = media("audio/mpeg", b"x", None);
        assert_eq!(
            chat_part(&sound, Flavor::OpenRouter)["input_audio"],
            json!({ "data": "eA==", "format": "mp3" })
        );
        assert_eq!(chat_part(&sound, Flavor::Ollama)["type"], "text");
    }

    #[test]
    fn text_is_shown_and_damage_is_said() {
        let text = media("text/csv; charset=utf-8", "a,é".as_bytes(), Some("t.csv"));
        let expected = json!({ "type": "text", "text": "[text/csv attachment: t.csv]\na,é" });
        assert_eq!(chat_part(&text, Flavor::OpenAI), expected);
        assert_eq!(anthropic_block(&text), expected);
        let damaged = Media { mime_type: "text/plain".into(), base64_data: "!".into(), filename: None };
        let said = anthropic_block(&damaged)["text"].as_str().map(str::to_owned).expect("text");
        assert!(said.contains("damaged"), "{said}");
    }

    #[test]
    fn anthropic_blocks() {
        let block = anthropic_block(&media("image/png", b"x", None));
        assert_eq!(
            block,
            json!({ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "eA==" } })
        );
        let pdf = anthropic_block(&media("application/pdf", b"x", Some("a.pdf")));
        assert_eq!((&pdf["type"], &pdf["title"]), (&json!("document"), &json!("a.pdf")));
        assert_eq!(anthropic_block(&media("image/bmp", b"x", None))["type"], "text");
    }
}
