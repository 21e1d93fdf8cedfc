//! The client against a provider on a socket, which answers what a test wrote down.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use holdfast_engine::model::{Flavor, ModelAnswer, ModelRequest, ModelTarget};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use super::{
    ApiKey, Backoff, FailureClass, HttpModelClient, ModelClient, ModelError,
    request_tests::{target, user},
};

const SECRET: &str = "sk-very-secret";
const GOOD: &str = r#"{"choices":[{"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}"#;

/// Answers the n-th connection with the n-th text and records requests; no text is left unanswered by
/// closing.
struct Provider {
    base_url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Provider {
    async fn new(answers: Vec<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let base_url = format!("http://{}/v1", listener.local_addr().expect("an address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let record = Arc::clone(&requests);
        tokio::spawn(async move {
            for answer in answers {
                let (mut socket, _) = listener.accept().await.expect("a connection");
                let request = read_request(&mut socket).await;
                record.lock().expect("no panic").push(request);
                for piece in answer.as_bytes().chunks(7) {
                    if socket.write_all(piece).await.is_err() {
                        break;
                    }
                }
                while answer.contains("drip") && socket.write_all(b" ").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(10)).await; // slower than any use
                }
                if answer.contains("hang") {
                    // Held open until the client gives up.
                    let _ = socket.read(&mut [0]).await;
                }
            }
        });
        Self { base_url, requests }
    }

    fn target(&self, flavor: Flavor) -> ModelTarget {
        ModelTarget { base_url: self.base_url.clone(), ..target(flavor) }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().expect("no panic").clone()
    }
}

async fn read_request(socket: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).to_ascii_lowercase();
        if let Some(head) = text.find("\r\n\r\n") {
            let length = text[..head].split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
            let length: usize = length.and_then(|length| length.trim().parse().ok()).unwrap_or_default();
            if bytes.len() >= head + 4 + length {
                return String::from_utf8(bytes).expect("UTF-8");
            }
        }
        let mut buffer = [0; 4096];
        let count = socket.read(&mut buffer).await.expect("bytes");
        assert_ne!(count, 0, "the client closed in the middle of its request");
        bytes.extend_from_slice(&buffer[..count]);
    }
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n{body}", body.len())
}

fn stream(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{body}")
}

/// A client whose pauses take milliseconds.
fn client() -> HttpModelClient {
    // Another test may have installed it already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = HttpModelClient::new().expect("a client");
    client.with_pauses(Duration::from_millis(1), Duration::from_millis(4))
}

struct Outcome {
    result: Result<ModelAnswer, ModelError>,
    backoffs: Vec<Backoff>,
    said: Vec<String>,
}

async fn ask(client: &HttpModelClient, target: &ModelTarget, streamed: bool) -> Outcome {
    let key = ApiKey::new("main", SECRET).expect("a key");
    let request = ModelRequest {
        system: Arc::default(),
        tools: Arc::default(),
        messages: vec![user("the prompt").into()],
    };
    let (backoffs, said) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let result = {
        let deltas = |text: &str| said.lock().expect("no panic").push(text.to_owned());
        let deltas: Option<&(dyn Fn(&str) + Send + Sync)> = if streamed { Some(&deltas) } else { None };
        let on_backoff = |backoff| backoffs.lock().expect("no panic").push(backoff);
        client.complete(target, Some(&key), &request, deltas, &on_backoff).await
    };
    if let Err(error) = &result {
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains(SECRET) && !shown.contains("the prompt"), "{shown}");
    }
    Outcome {
        result,
        backoffs: backoffs.into_inner().expect("no panic"),
        said: said.into_inner().expect("no panic"),
    }
}

async fn ask_one(flavor: Flavor, reply: String, streamed: bool) -> (Outcome, Vec<String>) {
    let provider = Provider::new(vec![reply]).await;
    let outcome = ask(&client(), &provider.target(flavor), streamed).await;
    (outcome, provider.requests())
}

#[tokio::test]
async fn an_answer_comes_and_the_request_has_its_headers() {
    let (outcome, requests) = ask_one(Flavor::OpenAI, answer("200 OK", "", GOOD), false).await;
    assert_eq!(outcome.result.expect("an answer").text.as_deref(), Some("hi"));
    assert!(requests[0].starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{}", requests[0]);
    assert!(requests[0].contains(&format!("authorization: Bearer {SECRET}\r\n")), "{}", requests[0]);

    let reply = r#"{"content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn"}"#;
    let (outcome, requests) = ask_one(Flavor::Anthropic, answer("200 OK", "", reply), false).await;
    assert_eq!(outcome.result.expect("an answer").text.as_deref(), Some("hi"));
    assert!(requests[0].starts_with("POST /v1/messages HTTP/1.1\r\n"), "{}", requests[0]);
    assert!(requests[0].contains(&format!("x-api-key: {SECRET}\r\n")), "{}", requests[0]);
    assert!(
        requests[0].contains("anthropic-version: 2023-06-01\r\n") && !requests[0].contains("authorization")
    );
}

#[tokio::test]
async fn failures_that_may_pass_are_tried_again_with_the_same_bytes() {
    let failures = ["408 Request Timeout", "429 Too Many Requests", "500 Oops", "503 Busy", "529 Overloaded"];
    let mut answers: Vec<_> = failures.iter().map(|status| answer(status, "", "{}")).collect();
    answers.push(answer("200 OK", "", GOOD));
    let provider = Provider::new(answers).await;
    let outcome = ask(&client(), &provider.target(Flavor::OpenAI), false).await;
    assert_eq!(outcome.result.expect("an answer").text.as_deref(), Some("hi"));
    let attempts: Vec<_> = outcome.backoffs.iter().map(|backoff| backoff.attempt).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5]);
    let requests = provider.requests();
    assert_eq!(requests.len(), 6);
    assert!(requests.iter().all(|request| *request == requests[0]));
}

#[tokio::test]
async fn six_failures_are_told_with_the_last() {
    let last = answer("503 Service Unavailable", "", r#"{"error":{"message":"no capacity"}}"#);
    let provider = Provider::new(vec![last; 7]).await;
    let outcome = ask(&client(), &provider.target(Flavor::OpenAI), false).await;
    let error = outcome.result.expect_err("gave up");
    assert!(matches!(error, ModelError::GaveUp { attempts: 6, .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.contains("answered 503 Service Unavailable: no capacity"), "{said}");
    assert_eq!((provider.requests().len(), outcome.backoffs.len()), (6, 5));
}

#[tokio::test]
async fn retry_after_is_obeyed() {
    let busy = |after: &str| answer("429 Too Many Requests", &format!("retry-after: {after}\r\n"), "{}");
    let provider = Provider::new(vec![busy("0.05"), answer("200 OK", "", GOOD)]).await;
    let outcome = ask(&client(), &provider.target(Flavor::OpenAI), false).await;
    assert!(outcome.result.is_ok());
    let class = FailureClass::RateLimited;
    assert_eq!(outcome.backoffs, [Backoff { attempt: 1, delay: Duration::from_millis(50), class }]);

    let (outcome, _) = ask_one(Flavor::OpenAI, busy("3600"), false).await;
    let error = outcome.result.expect_err("too long");
    assert!(matches!(error, ModelError::AskedToWait { .. }), "{error:?}");
    assert!(outcome.backoffs.is_empty());
}

#[tokio::test]
async fn refusals_are_final_and_say_what_to_do() {
    let body = format!(r#"{{"error":{{"message":"bad {SECRET} here"}}}}"#);
    let quota = r#"{"error":{"code":"insufficient_quota","message":"pay"}}"#;
    for (status, body, code, expected) in [
        ("400 Bad Request", body.as_str(), "model_refused", "answered 400 Bad Request: bad [key] here"),
        ("401 Unauthorized", &body, "model_key_refused", "API key `main`"),
        ("403 Forbidden", "no", "model_key_refused", "API key `main`"),
        ("404 Not Found", &body, "model_unknown", "no model `m`"),
        ("422 Unprocessable", "<html>x</html>", "model_refused", "answered 422"),
        ("302 Found", "", "model_refused", "redirects are not followed"),
        ("429 Too Many Requests", quota, "model_refused", "pay"),
    ] {
        let (outcome, requests) =
            ask_one(Flavor::OpenAI, answer(status, "location: http://127.0.0.1:1/\r\n", body), false).await;
        let error = outcome.result.expect_err("refused");
        assert_eq!(error.code(), code);
        let said = error.to_string();
        assert!(said.contains(expected) && !said.contains("<html>"), "{said}");
        assert_eq!((requests.len(), outcome.backoffs.len()), (1, 0));
    }
}

#[tokio::test]
async fn a_stream_gives_text_as_it_comes() {
    let body = "data: {\"choices\":[{\"delta\":{\"content\":\"h\"}}]}\r\n\r\n: still here\r\n\
                data: {\"choices\":[{\"delta\":{\"content\":\"é\"},\"finish_reason\":\"stop\"}]}\r\n\r\n";
    for end in ["", "data: [DONE]\n\n"] {
        let (outcome, requests) = ask_one(Flavor::OpenAI, stream(&format!("{body}{end}")), true).await;
        assert_eq!(outcome.result.expect("an answer").text.as_deref(), Some("hé"));
        assert_eq!(outcome.said, ["h", "é"]);
        assert!(requests[0].contains("\"stream\":true"), "{}", requests[0]);
    }
    // A server that doesn't stream although asked.
    let (outcome, _) = ask_one(Flavor::OpenAI, answer("200 OK", "", GOOD), true).await;
    assert_eq!((outcome.result.is_ok(), outcome.said), (true, vec!["hi".to_owned()]));
}

#[tokio::test]
async fn a_broken_stream_is_asked_for_again() {
    let broken = stream("data: {\"choices\":[{\"delta\":{\"content\":\"half\"}}]}\n\n");
    let provider = Provider::new(vec![
        broken,
        answer("200 OK", "", &GOOD[..20]).replace("length: 20", "length: 90"),
        answer("200 OK", "", GOOD),
    ])
    .await;
    let outcome = ask(&client(), &provider.target(Flavor::OpenAI), true).await;
    assert_eq!(outcome.result.expect("an answer").text.as_deref(), Some("hi"));
    assert_eq!(outcome.said, ["half", "hi"]);
    assert_eq!(outcome.backoffs.len(), 2);
}

#[tokio::test]
async fn silence_in_the_middle_is_a_broken_stream() {
    let silent = stream("data: {\"choices\":[{\"delta\":{\"content\":\"hang\"}}]}\n\n");
    let provider = Provider::new(vec![silent, answer("200 OK", "", GOOD)]).await;
    let client = HttpModelClient { idle: Duration::from_millis(100), ..client() };
    let outcome = ask(&client, &provider.target(Flavor::OpenAI), true).await;
    assert_eq!(outcome.result.expect("an answer").text.as_deref(), Some("hi"));
    assert_eq!(outcome.backoffs.len(), 1);
}

#[tokio::test]
async fn who_never_answers_or_drips_is_asked_again_and_given_up_when_the_time_is_over() {
    let silent = "HTTP/1.1 200 OK\r\nx-kind: hang\r\n".to_owned();
    let dripping =
        "HTTP/1.1 200 OK\r\nx-kind: drip\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
            .to_owned();
    let mut short = client();
    short.schedule.attempt = Duration::from_millis(150);
    for slow in [silent, dripping] {
        let provider = Provider::new(vec![slow.clone(), slow.clone(), answer("200 OK", "", GOOD)]).await;
        let outcome = ask(&short, &provider.target(Flavor::OpenAI), false).await;
        assert_eq!(outcome.result.expect("an answer").text.as_deref(), Some("hi"));
        assert_eq!(outcome.backoffs.len(), 2);
        let provider = Provider::new(vec![slow; 9]).await;
        let mut shorter = client();
        shorter.schedule.attempt = Duration::from_millis(150);
        shorter.schedule.total = Duration::from_millis(400);
        let outcome = ask(&shorter, &provider.target(Flavor::OpenAI), false).await;
        let said = outcome.result.expect_err("no answer").to_string();
        assert!(said.contains("took too long"), "{said}");
        assert!((1..=2).contains(&outcome.backoffs.len()), "{:?}", outcome.backoffs);
    }
}

#[tokio::test]
async fn nobody_there_is_told_without_the_url() {
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        listener.local_addr().expect("an address")
    };
    let target =
        ModelTarget { base_url: format!("http://{closed}/v1?code=hidden"), ..target(Flavor::OpenAI) };
    let outcome = ask(&client(), &target, false).await;
    let said = outcome.result.expect_err("nobody").to_string();
    assert!(said.contains(&format!("connecting to {closed}")) && said.contains("refused"), "{said}");
    assert!(!said.contains("hidden"), "{said}");
    assert_eq!(outcome.backoffs.len(), 5);
}

#[tokio::test]
async fn answers_are_bounded() {
    let client = HttpModelClient { max_answer: 50, ..client() };
    for reply in [answer("200 OK", "", GOOD), stream(&format!(": {}\n\n", "x".repeat(60)))] {
        let provider = Provider::new(vec![reply]).await;
        let outcome = ask(&client, &provider.target(Flavor::OpenAI), false).await;
        assert!(matches!(outcome.result, Err(ModelError::TooLarge { limit: 50 })), "{:?}", outcome.result);
        assert!(outcome.backoffs.is_empty());
    }
}
