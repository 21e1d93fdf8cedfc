//! Calls of system toolboxes that reach beyond their session: letters, looks at other sessions, and watches. Each is
//! done under ids that are made of the call's, so that doing it again does nothing twice.

use std::{sync::Arc, time::Duration};

use holdfast_engine::{
    builtin::{Address, Request, Section, SystemToolbox},
    content::ToolResult,
    decide,
    ids::{CallId, MailId},
    mail::Sender,
    session::Session,
    tool::Outcome,
    transcript,
    turn::{Origin, TurnBody},
};
use holdfast_store::{
    StoreError,
    correspond::{self, Correspondence, SendError},
    introspect::{self, IntrospectError, Reader},
    sessions,
    watches::{self, NewWatch, WatchError},
};
use serde::Serialize;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tracing::Span;
use uuid::Uuid;

use crate::{calls::Scope, trace};

/// How long is waited before a call is tried again while the database is away.
const PAUSE: Duration = Duration::from_millis(200);

/// What carries out the calls of a system toolbox on behalf of a session.
pub(crate) struct Desk {
    scope: Arc<Scope>,
    call: CallId,
    toolbox: Arc<SystemToolbox>,
    /// Letters that came to the session and that it may answer, the oldest first.
    letters: Vec<Origin>,
    /// How many sessions will have passed on a letter that answers none of them.
    hops: u32,
}

/// Why a call has no result yet.
enum Refused {
    /// The database is away: it is tried again.
    Away,
    /// What the model is told.
    Told(String),
}

impl Refused {
    fn of(error: &StoreError, text: String) -> Self {
        if error.is_unavailable() { Self::Away } else { Self::Told(text) }
    }
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        Self::of(&error, error.to_string())
    }
}

impl From<SendError> for Refused {
    fn from(error: SendError) -> Self {
        match &error {
            SendError::Store(store) => Self::of(store, error.to_string()),
            _ => Self::Told(format!("{}: {error}", error.code())),
        }
    }
}

impl From<IntrospectError> for Refused {
    fn from(error: IntrospectError) -> Self {
        match &error {
            IntrospectError::Store(store) => Self::of(store, error.to_string()),
            _ => Self::Told(format!("{}: {error}", error.code())),
        }
    }
}

impl From<WatchError> for Refused {
    fn from(error: WatchError) -> Self {
        match &error {
            WatchError::Store(store) => Self::of(store, error.to_string()),
            _ => Self::Told(format!("{}: {error}", error.code())),
        }
    }
}

impl Desk {
    /// A desk for a call of a session as it is now.
    pub(crate) fn new(
        scope: &Arc<Scope>,
        call: CallId,
        toolbox: Arc<SystemToolbox>,
        session: &Session,
    ) -> Self {
        let letters = session.turns.iter().flat_map(|turn| match &turn.body {
            TurnBody::User(user) => user.mail.as_slice(),
            TurnBody::Llm(_) => &[],
        });
        let letters =
            letters.filter(|letter| matches!(letter.from, Sender::Session { .. } | Sender::User { .. }));
        let hops = decide::hops(session);
        Self { scope: Arc::clone(scope), call, toolbox, letters: letters.cloned().collect(), hops }
    }

    /// Does what is asked for, waiting out the database.
    pub(crate) async fn carry_out(&self, arguments: &str, cancel: &CancellationToken) -> Outcome {
        let request = match Request::parse(&self.toolbox, arguments) {
            Ok(request) => request,
            Err(problem) => return Outcome::Failed(problem),
        };
        let doing = async {
            loop {
                match self.try_once(&request).await {
                    Ok(value) => return Outcome::Completed(ToolResult::json(value)),
                    Err(Refused::Told(text)) => return Outcome::Failed(text),
                    Err(Refused::Away) => tokio::time::sleep(PAUSE).await,
                }
            }
        };
        tokio::select! {
            outcome = doing => outcome,
            () = cancel.cancelled() => {
                Outcome::Cancelled("cancelled: the call was ended by order; it may have taken effect.".to_owned())
            }
        }
    }

    async fn try_once(&self, request: &Request) -> Result<Value, Refused> {
        let scope = &*self.scope;
        let (store, owner) = (&scope.shared.store, scope.owner.as_str());
        let reader =
            Reader { owner, session: scope.session, scope: self.toolbox.session_introspection_scope };
        let limit = Some(i64::from(self.toolbox.session_introspection_max_results));
        let outputs = self.toolbox.session_introspection_include_tool_outputs;
        let reads = matches!(
            request,
            Request::ListSessions
                | Request::SearchSessions { .. }
                | Request::ReadSession { .. }
                | Request::SessionStats
        );
        let _turn = if reads { scope.shared.readings.acquire().await.ok() } else { None };
        match request {
            Request::SendMessage { .. } => {
                let letter = self.letter(request).map_err(Refused::Told)?;
                let sent = correspond::send(store, owner, &letter).await?;
                Ok(json!({
                    "message_id": transcript::letter_name(sent.receipt.id),
                    "to": sent.recipient,
                    "duplicate": sent.receipt.duplicate,
                    "recipient_status": sent.status.word(),
                    "wakes_recipient": sent.wakes,
                }))
            }
            Request::ListSessions => shown(&introspect::list(store, &reader, limit).await?),
            Request::SearchSessions { query } => {
                shown(&introspect::search(store, &reader, query, limit, outputs).await?)
            }
            Request::SessionStats => shown(&introspect::stats(store, &reader).await?),
            Request::ReadSession { session, section } => {
                let include_tool_responses = section.include_tool_responses && outputs;
                let section = Section { include_tool_responses, ..section.clone() };
                shown(&introspect::read(store, &reader, *session, &section).await?)
            }
            Request::Watch { session, events, tool, ttl_seconds } => {
                let new = NewWatch {
                    id: self.call.0,
                    watcher: scope.session,
                    watched: session.clone(),
                    kinds: events.clone(),
                    tool: tool.clone(),
                    ttl: ttl_seconds.map(Duration::from_secs),
                    scope: scope.agent.conduct.mail_scope,
                };
                let watch = watches::start(store, owner, &new).await?;
                Ok(json!({"watch_id": watch.id, "session_id": watch.watched, "events": watch.kinds,
                    "tool": watch.tool, "until": watch.expires_at}))
            }
            Request::Unwatch { session, watch } => self.unwatch(session.as_ref(), *watch).await,
            // The engine carries these out itself.
            _ => Err(Refused::Told("this is not for a worker to do".to_owned())),
        }
    }

    async fn unwatch(&self, session: Option<&Address>, watch: Option<Uuid>) -> Result<Value, Refused> {
        let scope = &*self.scope;
        let (store, owner) = (&scope.shared.store, scope.owner.as_str());
        let all = watches::list(store, owner, scope.session).await?;
        let parent = match session {
            Some(Address::Parent) => sessions::get(store, Some(owner), scope.session).await?.parent_id,
            _ => None,
        };
        let of_session = |watched: Uuid| match session {
            None => true,
            Some(Address::Session(id)) => id.0 == watched,
            Some(Address::Short(end)) => watched.simple().to_string().ends_with(end.as_str()),
            Some(Address::Parent) => parent == Some(watched),
        };
        let mut ended = Vec::new();
        for one in all {
            let named = watch.is_none_or(|watch| watch == one.id) && of_session(one.watched.0);
            if named && watches::stop(store, owner, scope.session, one.id).await? {
                ended.push(one.id);
            }
        }
        Ok(json!({"ended": ended}))
    }

    /// The letter that is asked for.
    fn letter(&self, request: &Request) -> Result<Correspondence, String> {
        let Request::SendMessage { to, text, in_reply_to, expects_reply, interrupt } = request else {
            return Err("nobody to write to".to_owned());
        };
        let named = |name: &String| {
            let known = |letter: &&Origin| {
                transcript::letter_name(letter.id) == *name || letter.id.to_string() == *name
            };
            let found = self.letters.iter().rev().find(known);
            found.ok_or_else(|| format!("in_reply_to: no letter {name:?} came to this session"))
        };
        let answered = in_reply_to.as_ref().map(named).transpose()?;
        let hops = match answered {
            Some(letter) if decide::by_person(letter) => 0,
            Some(letter) => letter.hops.saturating_add(1),
            None => self.hops,
        };
        let to = match (to, answered.map(|letter| &letter.from)) {
            (Some(to), _) => to.clone(),
            (None, Some(Sender::Session { session_id, .. })) => Address::Session(*session_id),
            (None, _) => {
                return Err("to is missing: the letter that is answered isn't a session's".to_owned());
            }
        };
        let agent = &self.scope.agent;
        let conduct = &agent.conduct;
        if hops > conduct.max_mail_hops {
            return Err(format!("too_many_hops: {}", decide::too_many_hops(agent)));
        }
        Ok(Correspondence {
            from: self.scope.session,
            from_agent: agent.slug.clone(),
            to,
            id: MailId(self.call.0),
            text: text.clone(),
            in_reply_to: answered.map(|letter| letter.id),
            expects_reply: *expects_reply,
            interrupt: *interrupt,
            hops,
            scope: conduct.mail_scope,
            interrupt_scope: conduct.interrupt_scope,
            max_hops: conduct.max_mail_hops,
            traceparent: trace::traceparent(&Span::current()).or_else(|| self.scope.traceparent.clone()),
        })
    }
}

fn shown(value: &impl Serialize) -> Result<Value, Refused> {
    serde_json::to_value(value).map_err(|error| Refused::Told(error.to_string()))
}
