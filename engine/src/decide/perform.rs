//! Calls that no worker runs: those that belong outside, those that the engine carries out, and those that wait.

use serde_json::{Value, json};

use super::{Context, Plan, Spawn, after, on_deadline, status, timeout_seconds};
use crate::{
    agent::Agent,
    builtin::{BuiltinKind, Helper, Request, WaitFor},
    content::{Payload, Query, ToolResult},
    ids::{CallId, MailId, SessionId, Token},
    mail::{MailBody, Sender, Settled},
    policy::Disposition,
    session::{CallState, Event, Illegal, Session, Terms, TrackedCall},
    transcript,
    turn::{Origin, TurnBody},
    waits::Waits,
};

/// The longest task that a child session may be given, in bytes.
const MAX_TASK: usize = 1024 * 1024;

impl Plan<'_> {
    /// Carries out the calls that are ready and for which no worker is needed. None of them is an effect: a token
    /// and a child session exist once the commit does.
    pub(super) fn perform(&mut self, context: &mut Context<'_>) -> Result<(), Illegal> {
        let ready = self.session.calls.iter().filter(|call| call.state == CallState::Ready);
        let ready: Vec<TrackedCall> = ready.cloned().collect();
        for call in ready {
            // One that was carried out before it may have ended it.
            if self.session.call(call.id).is_none_or(|now| now.state != CallState::Ready) {
                continue;
            }
            if let Some(terms) = terms_of(context.agent, &call) {
                let deadline = call.policy.deadline_seconds;
                self.hand_out(&call, deadline, terms, context)?;
                continue;
            }
            if let Disposition::Deny { message } = call.policy.disposition.base() {
                self.fail(call.id, message.clone(), context)?;
                continue;
            }
            if !context.may_act(self.session) {
                continue;
            }
            match context.agent.builtin(&call.name).map(|builtin| builtin.kind.clone()) {
                Some(BuiltinKind::Helper(helper)) => self.call_helper(&call, &helper, context)?,
                Some(BuiltinKind::System(toolbox)) => match Request::parse(&toolbox, &call.arguments) {
                    Ok(request) => self.carry_out(&call, request, context)?,
                    Err(message) => self.fail(call.id, message, context)?,
                },
                None => {}
            }
        }
        Ok(())
    }

    /// Hands a call to the outside.
    fn hand_out(
        &mut self,
        call: &TrackedCall,
        deadline_seconds: Option<u64>,
        terms: Terms,
        context: &mut Context<'_>,
    ) -> Result<(), Illegal> {
        let expires_at = deadline_seconds.and_then(|seconds| after(context.now, seconds));
        let token = Token((context.fresh_token)());
        self.happen(Event::Deferred { call: call.id, token, expires_at, terms, at: context.now })
    }

    fn fail(&mut self, call: CallId, message: String, context: &Context<'_>) -> Result<(), Illegal> {
        self.finish(call, Settled::Failed { message }, context.now)
    }

    fn complete(&mut self, call: CallId, result: Value, context: &Context<'_>) -> Result<(), Illegal> {
        let (result, blob) = Payload::pack(ToolResult::json(result));
        self.blobs.extend(blob);
        self.finish(call, Settled::Completed { result }, context.now)
    }

    fn wait(
        &mut self,
        call: CallId,
        waits: Waits,
        seconds: Option<u64>,
        context: &Context<'_>,
    ) -> Result<(), Illegal> {
        let until = seconds.and_then(|seconds| after(context.now, seconds));
        self.happen(Event::Waits { call, waits, until, at: context.now })
    }

    /// Starts the child session of a call, and waits for its end.
    fn call_helper(
        &mut self,
        call: &TrackedCall,
        helper: &Helper,
        context: &mut Context<'_>,
    ) -> Result<(), Illegal> {
        let task = match task(&call.arguments) {
            Ok(task) => task,
            Err(message) => return self.fail(call.id, message, context),
        };
        if let Err(message) = self.deep_enough(context.agent) {
            return self.fail(call.id, message, context);
        }
        let (query, blob) = Payload::pack(Query { text: task, media: Vec::new() });
        self.blobs.extend(blob);
        let body = MailBody::UserMessage { query };
        let hops = hops(self.session);
        let child = self.spawn(call.id, &helper.slug, Some(call.id), body, hops);
        let waits = Waits::Child { session_id: child, agent: helper.slug.clone() };
        self.wait(call.id, waits, timeout_seconds(context.agent, call), context)
    }

    fn spawn(
        &mut self,
        call: CallId,
        agent: &str,
        answers: Option<CallId>,
        body: MailBody,
        hops: u32,
    ) -> SessionId {
        let id = SessionId(call.0);
        let letter = MailId(call.0);
        self.spawns.push(Spawn { id, agent: agent.to_owned(), call: answers, letter, body, hops });
        id
    }

    /// Whether this session may have children.
    fn deep_enough(&self, agent: &Agent) -> Result<(), String> {
        let (depth, most) = (self.session.stack.len(), agent.conduct.max_recursion_depth);
        if depth < most {
            return Ok(());
        }
        let mut stack = self.session.stack.clone();
        stack.push(agent.slug.clone());
        Err(format!(
            "sessions may call sessions {most} deep and no deeper; this one was called through {}. \
             Do it without another agent.",
            stack.join(" > ")
        ))
    }

    fn carry_out(
        &mut self,
        call: &TrackedCall,
        request: Request,
        context: &mut Context<'_>,
    ) -> Result<(), Illegal> {
        let most = context.agent.conduct.max_wait_seconds;
        match request {
            Request::Status { call: name, include_progress, wait_seconds } => {
                match (status::find(self.session, &name, call.id), wait_seconds) {
                    (Some(asked), Some(seconds)) if !asked.state.is_final() => {
                        let waits = Waits::Status { tool_call_id: asked.id, include_progress };
                        self.wait(call.id, waits, Some(seconds.min(most)), context)
                    }
                    (Some(asked), _) => self.tell_status(call.id, asked.id, include_progress, context),
                    (None, _) => match status::of_past(self.session, &name, call.id) {
                        Some(status) => self.complete(call.id, status, context),
                        None => {
                            self.fail(call.id, format!("no call {name:?} was made in this session"), context)
                        }
                    },
                }
            }
            Request::ListCalls => {
                let list = status::list(self.session, call.id);
                self.complete(call.id, list, context)
            }
            Request::CancelCall { call: name } => self.cancel_call(call.id, &name, context),
            Request::Wait { what, seconds } => {
                let waits = match what {
                    WaitFor::Mail => Waits::Mail,
                    WaitFor::AnyCall => Waits::AnyCall,
                    WaitFor::Calls(names) => match status::find_all(self.session, &names, call.id) {
                        Ok(tool_call_ids) => Waits::Calls { tool_call_ids },
                        Err(message) => return self.fail(call.id, message, context),
                    },
                };
                self.wait(call.id, waits, Some(seconds.min(most)), context)
            }
            Request::SleepUntil(until) => {
                let far = after(context.now, crate::builtin::MAX_SLEEP_SECONDS);
                if far.is_some_and(|far| until > far) {
                    let message = "until is more than 366 days away".to_owned();
                    return self.fail(call.id, message, context);
                }
                let at = context.now;
                self.happen(Event::Waits { call: call.id, waits: Waits::Timer, until: Some(until), at })
            }
            Request::SleepFor(seconds) => self.wait(call.id, Waits::Timer, Some(seconds), context),
            Request::AskHuman { question, deadline_seconds, default } => {
                let on_deadline = default.map(ToolResult::text);
                let terms = Terms { reason: question, on_deadline, approval: false };
                self.hand_out(call, deadline_seconds.or(call.policy.deadline_seconds), terms, context)
            }
            Request::Spawn { agent, message } => self.start_session(call, &agent, message, context),
            // Effects, which a worker carries out.
            Request::SendMessage { .. }
            | Request::ListSessions
            | Request::SearchSessions { .. }
            | Request::ReadSession { .. }
            | Request::SessionStats
            | Request::Watch { .. }
            | Request::Unwatch { .. } => Ok(()),
        }
    }

    /// Starts a session that goes on by itself.
    fn start_session(
        &mut self,
        call: &TrackedCall,
        slug: &str,
        message: String,
        context: &mut Context<'_>,
    ) -> Result<(), Illegal> {
        let known = context.agent.helpers.iter().any(|helper| helper.slug == slug);
        if !known {
            let slugs: Vec<&str> = context.agent.helpers.iter().map(|helper| helper.slug.as_str()).collect();
            let message = format!("there is no agent {slug:?} to start; there are: {}", slugs.join(", "));
            return self.fail(call.id, message, context);
        }
        if let Err(message) = self.deep_enough(context.agent) {
            return self.fail(call.id, message, context);
        }
        let body = MailBody::AgentMessage { text: message, in_reply_to: None, expects_reply: true };
        let hops = hops(self.session);
        if hops > context.agent.conduct.max_mail_hops {
            return self.fail(call.id, too_many_hops(context.agent), context);
        }
        let child = self.spawn(call.id, slug, None, body, hops);
        let result = json!({"session_id": child, "agent": slug, "message": "It answers by mail."});
        self.complete(call.id, result, context)
    }

    fn cancel_call(&mut self, id: CallId, name: &str, context: &Context<'_>) -> Result<(), Illegal> {
        let Some(asked) = status::find(self.session, name, id).cloned() else {
            return match status::of_past(self.session, name, id) {
                Some(past) => {
                    let result = json!({"cancelled": false, "tool_call_id": name,
                        "previous_status": past["status"], "message": "It had ended already."});
                    self.complete(id, result, context)
                }
                None => self.fail(id, format!("no call {name:?} was made in this session"), context),
            };
        };
        let before = asked.word();
        let open = !asked.state.is_final();
        if open {
            let settled = super::fold::by_order(&asked);
            self.finish(asked.id, settled, context.now)?;
        }
        let result = json!({"cancelled": open, "tool_call_id": asked.provider_id, "previous_status": before});
        self.complete(id, result, context)
    }

    fn tell_status(
        &mut self,
        call: CallId,
        asked: CallId,
        include_progress: bool,
        context: &Context<'_>,
    ) -> Result<(), Illegal> {
        let Some(of) = self.session.call(asked) else {
            let told = status::told_before(self.session, asked);
            return self.complete(call, told, context);
        };
        let progress = if include_progress { (context.progress)(asked) } else { Vec::new() };
        let (shown, whole) = status::of(of, progress, context.now);
        let background = of.told.is_some();
        if whole && background {
            self.happen(Event::Read { call: asked })?;
        }
        self.complete(call, shown, context)
    }

    /// Ends the waits that are over: what they wait for has come, or their time has.
    pub(super) fn end_waits(&mut self, context: &mut Context<'_>) -> Result<(), Illegal> {
        // The end of a wait may be what another one waits for.
        while self.end_some_waits(context)? {}
        Ok(())
    }

    /// Ends waits in the order in which the model asked for them. Returns whether there was one to end.
    fn end_some_waits(&mut self, context: &mut Context<'_>) -> Result<bool, Illegal> {
        let waiting: Vec<TrackedCall> = self.session.waiting().cloned().collect();
        let before = waiting.len();
        for call in waiting {
            let over = call.expires_at.is_some_and(|at| at <= context.now);
            let Some(waits) = &call.waits else { continue };
            let mail = waits.ends_with_mail() && has_news(self.session);
            match waits {
                Waits::Child { .. } if over => {
                    let message =
                        format!("the call of {} timed out; its session has been told to stop.", call.name);
                    self.fail(call.id, message, context)?;
                }
                Waits::Timer if over => {
                    let now = transcript::shown_time(context.now);
                    self.complete(call.id, json!({"woken_by": "time", "now": now}), context)?;
                }
                Waits::Child { .. } | Waits::Timer => {}
                Waits::Status { tool_call_id, include_progress } => {
                    let ended = self.session.call(*tool_call_id).is_none_or(|call| call.state.is_final());
                    if ended || mail || over {
                        self.tell_status(call.id, *tool_call_id, *include_progress, context)?;
                    }
                }
                Waits::Mail | Waits::Calls { .. } | Waits::AnyCall => {
                    if let Some(result) = woken_by(self.session, &call, waits, mail, over) {
                        self.complete(call.id, result, context)?;
                    }
                }
            }
        }
        Ok(self.session.waiting().count() < before)
    }
}

/// What ended a wait of the model's, if something did.
fn woken_by(session: &Session, call: &TrackedCall, waits: &Waits, mail: bool, over: bool) -> Option<Value> {
    let named = |call: &TrackedCall| json!({"tool_call_id": call.provider_id, "status": call.word()});
    let ended = match waits {
        Waits::Calls { tool_call_ids } => {
            let ended = |id: &&CallId| session.call(**id).is_none_or(|call| call.state.is_final());
            tool_call_ids.iter().find(ended).map(|id| match session.call(*id) {
                Some(call) => named(call),
                None => status::told_before(session, *id),
            })
        }
        Waits::AnyCall => session.calls.iter().find(|other| other.ended_untold()).map(named),
        _ => None,
    };
    if let Some(mut result) = ended {
        result["woken_by"] = json!("call");
        return Some(result);
    }
    if mail {
        return Some(json!({"woken_by": "mail"}));
    }
    let alone = !session.calls.iter().any(|other| other.id != call.id && other.in_background());
    if *waits == Waits::AnyCall && alone {
        return Some(json!({"woken_by": "nothing", "message": "No call runs in the background."}));
    }
    over.then(|| json!({"woken_by": "timeout"}))
}

/// Whether there is something that the model hasn't been told and that a wait of its own ends with.
fn has_news(session: &Session) -> bool {
    session.calls.iter().any(TrackedCall::is_news)
        || session.left.iter().any(|letter| !matches!(letter.body, MailBody::Control { .. }))
}

/// On what terms a call is handed to the outside, if its policy says so and nobody has let it run.
fn terms_of(agent: &Agent, call: &TrackedCall) -> Option<Terms> {
    if call.token.is_some() {
        return None;
    }
    let on_deadline = on_deadline(agent, call);
    match call.policy.disposition.base() {
        Disposition::Defer { reason } => Some(Terms { reason: reason.clone(), on_deadline, approval: false }),
        Disposition::Approve { reason, .. } => {
            Some(Terms { reason: reason.clone(), on_deadline, approval: true })
        }
        _ => None,
    }
}

/// What a helper is asked.
fn task(arguments: &str) -> Result<String, String> {
    let read: Result<Value, _> = serde_json::from_str(arguments);
    let value = read.map_err(|error| format!("arguments aren't JSON: {error}"))?;
    match value["what"].as_str() {
        None => Err("what is missing: say what the agent is asked".to_owned()),
        Some("") => Err("what must not be empty".to_owned()),
        Some(task) if task.len() > MAX_TASK => Err(format!("what has more than {MAX_TASK} bytes")),
        Some(task) => Ok(task.to_owned()),
    }
}

/// How many sessions will have passed on a letter that this session writes now: one more than the letter had that
/// it was spoken to with last, none if that was a person's. A task that a session gives its helper is a letter of
/// that session's.
pub fn hops(session: &Session) -> u32 {
    let spoken = session.turns.iter().rev().find_map(|turn| match &turn.body {
        TurnBody::User(user) => {
            let messages = user.mail.iter().filter(|origin| is_message(origin));
            match messages.map(|origin| origin.hops).max() {
                _ if user.mail.iter().any(by_person) => Some(0),
                hops => hops.map(|hops| hops.saturating_add(1)),
            }
        }
        TurnBody::Llm(_) => None,
    });
    spoken.unwrap_or(0)
}

fn is_message(origin: &Origin) -> bool {
    matches!(origin.tag.as_str(), "userMessage" | "agentMessage")
}

/// Whether a letter that the model was told of is a person's, or of a program on behalf of one.
pub fn by_person(origin: &Origin) -> bool {
    origin.tag == "userMessage" && !matches!(origin.from, Sender::Session { .. })
}

/// What a model is told whose letters have been answers to answers for too long.
pub fn too_many_hops(agent: &Agent) -> String {
    let most = agent.conduct.max_mail_hops;
    format!("this exchange has gone on for {most} letters; it goes on when a person writes")
}
