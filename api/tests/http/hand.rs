//! A worker's hand: drives runs through the store's own functions, with the model's answers given.

use std::{collections::VecDeque, time::Duration};

use chrono::Utc;
use holdfast_engine::{
    agent::{Agent, AgentConfig},
    content::{Blob, Payload, ToolResult},
    decide::{self, Context, Next, Run},
    ids::{SessionId, WorkerId},
    mail::{Envelope, Settled},
    model::{Flavor, ModelAnswer, RequestedCall},
    session::{Event, Session},
};
use holdfast_store::{
    Store,
    claim::{self, Lease},
    commit::{self, Commit, Outcome, RunAfter},
    load,
};
use tokio::time::Instant;
use uuid::Uuid;

use crate::support::{AGENT, PATIENCE};

/// The agent: tools named `ask_*` are deferred, `ask_soon_*` with a deadline of a second, others run here.
pub(crate) fn agent() -> Agent {
    let text = format!(
        r#"{{"slug": "{AGENT}", "flavor": "OpenAI", "modelUrl": "http://127.0.0.1:9/v1", "modelName": "m",
        "systemPrompt": ["Help.", "Be kind."], "toolCallPolicyConfig": {{"default": {{"tag": "runSync"}}, "rules": [
            {{"tool": "ask_soon_*", "disposition": {{"tag": "defer", "reason": "soon"}}, "deadlineSeconds": 1}},
            {{"tool": "ask_*", "disposition": {{"tag": "defer", "reason": "somebody decides"}}}}]}}}}"#
    );
    let config = AgentConfig::parse(&text).expect("an agent");
    config.prepare("r1".to_owned(), Vec::new()).expect("a valid agent")
}

/// An answer that ends its round.
pub(crate) fn says(text: &str) -> ModelAnswer {
    ModelAnswer {
        text: Some(text.to_owned()),
        thinking: None,
        calls: Vec::new(),
        usage: None,
        flavor: Flavor::OpenAI,
        raw: None,
        stop_reason: Some("stop".to_owned()),
    }
}

/// An answer that asks for calls, as `(provider's id, tool, arguments)`.
pub(crate) fn calls(wanted: &[(&str, &str, &str)]) -> ModelAnswer {
    let call = |(id, name, arguments): &(&str, &str, &str)| RequestedCall {
        provider_id: (*id).to_owned(),
        name: (*name).to_owned(),
        arguments: (*arguments).to_owned(),
    };
    ModelAnswer { text: None, calls: wanted.iter().map(call).collect(), ..says("") }
}

/// A run in hand.
pub(crate) struct Held {
    store: Store,
    agent: Agent,
    lease: Lease,
    session: Session,
    inbox: Vec<Envelope>,
    run: Run,
    happened: Vec<Event>,
    blobs: Vec<Blob>,
}

/// Claims one run, as soon as one is due.
pub(crate) async fn claim(store: &Store) -> Held {
    let roster = [format!("{AGENT}@r1")];
    let claiming = async {
        loop {
            let rotation = claim::Rotation::default();
            let leases = claim::claim(
                store,
                WorkerId(Uuid::now_v7()),
                1,
                Duration::from_secs(300),
                &roster,
                true,
                &rotation,
            );
            if let Some(lease) = leases.await.expect("a claim").pop() {
                return lease;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let lease = tokio::time::timeout(PATIENCE, claiming).await.expect("a run that is due");
    let loaded = load::load(store, lease.session).await.expect("a session");
    Held {
        store: store.clone(),
        agent: agent(),
        run: Run { mode: lease.mode, steps: 0, asking: false },
        lease,
        session: loaded.session,
        inbox: loaded.inbox,
        happened: Vec::new(),
        blobs: Vec::new(),
    }
}

/// Claims one run and drives it to its end.
pub(crate) async fn drive(store: &Store, answers: Vec<ModelAnswer>) {
    claim(store).await.drive(answers).await;
}

impl Held {
    /// Drives the run to its end; calls that run here answer `done`.
    pub(crate) async fn drive(mut self, answers: Vec<ModelAnswer>) {
        let mut answers = VecDeque::from(answers);
        loop {
            let after = match self.decide() {
                Next::AskModel => {
                    let answer = answers.pop_front().expect("an answer for every request");
                    self.commit(RunAfter::Keep).await;
                    self.answer(answer);
                    continue;
                }
                Next::RunCalls(starts) => {
                    self.commit(RunAfter::Keep).await;
                    for start in starts {
                        let result = Payload::Inline(ToolResult::text("done"));
                        let settled = Settled::Completed { result };
                        let event = decide::finished(&self.session, start.call, settled, Utc::now());
                        self.happen(event);
                    }
                    self.run.steps += 1;
                    continue;
                }
                Next::Park(on) => panic!("nothing here is waited for: {on}"),
                Next::Stop(status) => RunAfter::End { status, detail: None },
            };
            if self.commit(after).await {
                assert!(answers.is_empty(), "answers are left over: {answers:?}");
                return;
            }
        }
    }

    /// Whose run it is.
    pub(crate) fn session(&self) -> SessionId {
        self.lease.session
    }

    /// Parks the run for `seconds`.
    pub(crate) async fn park(mut self, seconds: i64) {
        let until = Utc::now() + chrono::TimeDelta::seconds(seconds);
        let _ = self.decide();
        let parked = self.commit(RunAfter::Park { on: "timer".to_owned(), until: Some(until) }).await;
        assert!(parked, "mail came in between");
    }

    fn decide(&mut self) -> Next {
        let mut context = Context {
            agent: &self.agent,
            inbox: &self.inbox,
            run: self.run,
            now: Utc::now(),
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
            progress: &|_| Vec::new(),
        };
        let decision = decide::decide(&mut self.session, &mut context).expect("a legal decision");
        self.happened.extend(decision.events);
        self.blobs.extend(decision.blobs);
        decision.next
    }

    fn answer(&mut self, answer: ModelAnswer) {
        let mut context = Context {
            agent: &self.agent,
            inbox: &[],
            run: self.run,
            now: Utc::now(),
            fresh: &mut Uuid::now_v7,
            fresh_token: &mut Uuid::new_v4,
            progress: &|_| Vec::new(),
        };
        let event = decide::answered(&self.session, &mut context, answer);
        self.happen(event);
        self.run.steps += 1;
    }

    fn happen(&mut self, event: Event) {
        self.session.apply(&event).expect("a legal event");
        self.happened.push(event);
    }

    /// Stores what happened. Returns whether the run was given back.
    async fn commit(&mut self, run: RunAfter) -> bool {
        if self.happened.is_empty() && run == RunAfter::Keep {
            return false;
        }
        let work = Commit {
            id: Uuid::now_v7(),
            epoch: self.lease.epoch,
            agent: self.lease.agent.clone(),
            agent_revision: self.agent.revision.clone(),
            session: self.session.clone(),
            happened: std::mem::take(&mut self.happened),
            blobs: std::mem::take(&mut self.blobs),
            run,
            to_parent: None,
            spawns: Vec::new(),
            dismissed: Vec::new(),
            traceparent: None,
        };
        match commit::commit(&self.store, &work, Instant::now() + PATIENCE).await.expect("a commit") {
            Outcome::Stored { version, released, wake_seq, mode } => {
                self.session.forget_told();
                self.session.version = version;
                self.run.mode = mode;
                if !released && wake_seq > self.session.cursor {
                    let loaded = load::load(&self.store, self.session.id).await.expect("a session");
                    self.inbox = loaded.inbox;
                }
                released
            }
            Outcome::LeaseLost => panic!("the lease is lost"),
        }
    }
}
