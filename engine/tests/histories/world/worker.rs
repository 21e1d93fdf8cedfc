//! The worker: it claims, decides, has the model answer and calls run, and dies.

use super::*;

impl World {
    /// One thing that a worker does.
    pub(crate) fn work(&mut self, seed: u64) {
        let Some(row) = &mut self.row else { return };
        if row.parked {
            let due = DateTime::UNIX_EPOCH + TimeDelta::seconds(self.clock);
            if row.due.is_none_or(|at| at > due) {
                return;
            }
            (row.parked, row.due) = (false, None);
        }
        let row = *row;
        let mut dice = Dice::new(seed);
        if self.held.is_none() {
            self.claim(&mut dice);
        }
        let held = self.held.as_ref().expect("claimed");
        // Mail may end what the worker waits for; else it is seen when that is over. So may the time.
        let news = held.session.cursor < row.wake_seq && dice.below(3) == 0;
        let time = !self.shape.is_plain() && dice.below(4) == 0;
        let running = held.running.clone();
        if held.looked.is_some() {
            return self.decide(&mut dice);
        }
        let asking = held.asking.is_some();
        if news || time {
            // Nothing has ended.
        } else if asking && (running.is_empty() || dice.below(2) == 0) {
            self.model_answers(&mut dice);
        } else if !running.is_empty() {
            let one = dice.below(running.len() as u64);
            self.ended_while_asking += u32::from(asking);
            self.call_ends(running[usize::try_from(one).expect("small")], &mut dice);
        }
        let held = self.held.as_mut().expect("still held");
        held.looked = Some((self.mailbox.len(), row.mode));
        if dice.below(3) > 0 {
            self.decide(&mut dice);
        }
    }

    fn claim(&mut self, dice: &mut Dice) {
        let mut session = match self.kept.take() {
            Some(session) if dice.below(2) == 0 => session,
            _ => self.stored_session(),
        };
        let now = self.tick();
        let events = decide::recover(&mut session, now).expect("recovery is legal");
        assert!(session.calls.iter().all(|call| call.state != CallState::Running));
        let (asking, running, looked) = (None, Vec::new(), None);
        self.held = Some(Held { session, steps: 0, asking, running, unstored: events, looked });
        self.commit();
    }

    fn model_answers(&mut self, dice: &mut Dice) {
        let count = if self.calm { 0 } else { [0, 0, 1, 1, 2, 3, 4, 5][usize::from(dice.byte() % 8)] };
        let ids: Vec<String> = (0..count)
            .map(|_| match dice.below(8) {
                0 => String::new(),
                1 => checks::REPEATED.to_owned(),
                _ => format!("call_{}", self.fresh().simple()),
            })
            .collect();
        let mut names: Vec<String> = self.calls.values().map(|call| call.provider_id.clone()).collect();
        names.drain(..names.len().saturating_sub(6));
        names.extend(ids.iter().cloned());
        let tools = self.shape.tools();
        let request = |provider_id: String| {
            let name = tools[usize::from(dice.byte()) % tools.len()].to_owned();
            let arguments = shape::arguments(&name, &names, dice);
            RequestedCall { provider_id, name, arguments }
        };
        let answer = ModelAnswer {
            text: Some("so be it".to_owned()),
            thinking: None,
            calls: ids.into_iter().map(request).collect(),
            usage: None,
            flavor: Flavor::OpenAI,
            raw: None,
            stop_reason: None,
        };
        let now = self.tick();
        let mut held = self.held.take().expect("the holder asked");
        let run = Run { mode: Mode::UntilBlocked, steps: held.steps, asking: false };
        let event =
            self.in_context(run, &[], now, |context| decide::answered(&held.session, context, answer));
        held.session.apply(&event).expect("an answer to the newest user turn is legal");
        held.asking = None;
        held.steps += 1;
        self.held = Some(held);
        self.happened(event, dice);
    }

    /// Something happened. That it is stored at once makes no difference.
    fn happened(&mut self, event: Event, dice: &mut Dice) {
        self.held.as_mut().expect("to the holder").unstored.push(event);
        if dice.below(2) == 0 {
            self.commit();
        }
    }

    fn call_ends(&mut self, call: CallId, dice: &mut Dice) {
        let end = if dice.below(3) == 0 { End::Failed } else { End::Completed };
        let settled = self.settled(call, end);
        let now = self.tick();
        let held = self.held.as_mut().expect("the holder runs calls");
        let event = decide::finished(&held.session, call, settled, now);
        held.session.apply(&event).expect("a running call may end");
        held.running.retain(|running| *running != call);
        if !held.session.busy() {
            held.steps += 1;
        }
        self.happened(event, dice);
    }

    fn in_context<T>(
        &self,
        run: Run,
        inbox: &[Envelope],
        now: Time,
        then: impl FnOnce(&mut Context<'_>) -> T,
    ) -> T {
        let (mut fresh, mut fresh_token) = (|| self.fresh(), || self.fresh());
        then(&mut Context {
            agent: &self.agent,
            inbox,
            run,
            now,
            fresh: &mut fresh,
            fresh_token: &mut fresh_token,
            progress: &|_| Vec::new(),
        })
    }

    /// Decides, and checks that a worker that had loaded the session just now, if all of it is stored, would decide the
    /// same.
    fn decision(&mut self, held: &mut Held, run: Run, mail: usize, dice: &mut Dice) -> Decision {
        let session = &mut held.session;
        let there = self.mailbox.iter().take(mail);
        let mut inbox: Vec<Envelope> = there.filter(|letter| letter.seq > session.cursor).cloned().collect();
        if dice.below(4) == 0 {
            inbox.truncate(1 + usize::from(dice.byte() % 4));
        }
        let now = self.tick();
        let ids = self.ids.get();
        let mut loaded = self.stored_session();
        let decision = self.in_context(run, &inbox, now, |context| decide::decide(session, context));
        let decision = decision.expect("decisions are legal");
        if held.unstored.is_empty() {
            let after = self.ids.replace(ids);
            let twin = self.in_context(run, &inbox, now, |context| decide::decide(&mut loaded, context));
            self.ids.set(after);
            let twin = twin.expect("decisions are legal");
            // What may begin unstored has to be in memory.
            let plain = |decision: &Decision| {
                format!("{decision:?}").replace("only_reads: true", "only_reads: false")
            };
            assert_eq!(plain(&decision), plain(&twin), "memory makes no difference");
        }
        decision
    }

    fn decide(&mut self, dice: &mut Dice) {
        let mut held = self.held.take().expect("only the holder decides");
        let (mail, mode) = held.looked.take().expect("looked before it decides");
        let run = Run { mode, steps: held.steps, asking: held.asking.is_some() };
        let newest = held.session.turns.last().cloned();
        let decision = self.decision(&mut held, run, mail, dice);
        for Blob { digest, text } in &decision.blobs {
            self.blobs.insert(*digest, Arc::clone(text));
        }
        let session = &held.session;
        for event in &decision.events {
            if let Event::Sealed(turn) = event {
                self.sealed(session, turn, run, newest.as_deref());
            }
        }
        // As the worker does: an answer to what isn't the newest turn is no longer wanted.
        let wanted = session.owed() && session.stop != Some(Stop::Cancelled);
        held.asking = held.asking.filter(|length| *length == session.length() && wanted);
        held.running.retain(|call| session.call(*call).is_some_and(|call| call.state == CallState::Running));
        held.unstored.extend(decision.events.iter().cloned());
        let unstored = match &decision.next {
            Next::RunCalls(starts) if !starts.is_empty() && decision.spawns.is_empty() => {
                decide::may_begin_unstored(starts, &held.unstored) && dice.below(4) > 0
            }
            _ => false,
        };
        self.begun_unstored += u32::from(unstored);
        self.held = Some(held);
        if !unstored {
            self.commit();
        }
        self.take_children(&decision);
        self.waits_end();
        match decision.next {
            Next::AskModel => {
                checks::may_ask(self, self.session());
                let held = self.held.as_mut().expect("just put back");
                held.asking = Some(held.session.length());
            }
            Next::RunCalls(starts) => {
                for start in &starts {
                    let begun = self.begun.entry(start.call).or_default();
                    *(if unstored { &mut begun.unstored } else { &mut begun.stored }) += 1;
                    if unstored {
                        let call = self.session().call(start.call).expect("it runs");
                        assert_eq!(call.name, shape::LOOK, "only what reads begins before it is stored");
                    }
                }
                let most = self.agent.max_concurrency;
                let held = self.held.as_mut().expect("just put back");
                held.running.extend(starts.iter().map(|start| start.call));
                assert!((1..=most).contains(&held.running.len()), "between one and maxConcurrency calls run");
            }
            Next::Park(word) => self.park(run, word, decision.until),
            Next::Stop(status) => self.stop(run, status, decision.until),
        }
    }

    /// Checks a turn that the model is about to be shown: what it is told of open calls is so, and nothing that
    /// the conversation waits for was passed over without a reason.
    fn sealed(&mut self, session: &Session, turn: &Turn, run: Run, newest: Option<&Turn>) {
        let TurnBody::User(UserTurn { answers, mail, .. }) = &turn.body else {
            panic!("a user turn is sealed")
        };
        let high = |seq: i64| {
            self.mailbox.iter().any(|letter| letter.seq == seq && letter.priority == Priority::High)
        };
        let interrupted = mail.iter().any(|origin| high(origin.seq));
        let unanswered = newest.is_some_and(|newest| {
            turn.position == newest.position + 1 && matches!(newest.body, TurnBody::User(_))
        });
        if run.asking && unanswered && session.stop.is_none() {
            assert!(interrupted && self.agent.conduct.interrupt_completions, "a request was disturbed");
            self.interrupted_requests += 1;
        }
        for answer in answers {
            let Shown::Placeholder(text) = &answer.shown else { continue };
            let call = session.call(answer.call).expect("an open call is tracked");
            let shown: serde_json::Value = serde_json::from_str(text).expect("placeholders are JSON");
            let child = call.child();
            let (word, waited_for) = match call.state {
                CallState::Ready => ("pending", true),
                CallState::Running => ("running", true),
                CallState::Waiting if child.is_some() => ("running", true),
                CallState::Waiting => ("waiting", call.waits != Some(Waits::Timer)),
                CallState::Deferred => ("deferred", false),
                state => panic!("{state:?} is no open state"),
            };
            assert_eq!(shown["status"], word, "{text}");
            assert_eq!(shown["tool_call_id"], call.provider_id.as_str());
            let told_child = shown["child_session_id"].as_str().map(str::to_owned);
            assert_eq!(told_child, child.map(|child| child.to_string()));
            let may = !waited_for || interrupted || shape::may_detach(&self.agent, call, session, self.now());
            assert!(may, "{} was passed over: {text}", call.name);
        }
    }

    /// The child sessions that a decision starts and lets go. They are there with its commit.
    fn take_children(&mut self, decision: &Decision) {
        for spawn in &decision.spawns {
            let call = CallId(spawn.id.0);
            assert!(self.calls.contains_key(&call), "a session is started by a call");
            let Some(answers) = spawn.call else { continue };
            assert_eq!((answers, self.calls[&call].name.as_str()), (call, shape::HELPER));
            let child = Child { ended: false, dismissed: false };
            assert!(self.children.insert(call, child).is_none(), "a call has one child");
        }
        for dismissed in &decision.dismissed {
            let child = self.children.get_mut(&CallId(dismissed.0)).expect("a dismissed child was started");
            assert!(!child.dismissed, "a child is dismissed once");
            child.dismissed = true;
        }
    }

    /// What waits has something that will end it; a child that nobody waits for was let go.
    fn waits_end(&self) {
        let session = self.session();
        for call in session.waiting() {
            let timed = call.expires_at.is_some_and(|at| at > self.now());
            match call.waits.as_ref().expect("what waits says for what") {
                Waits::Child { .. } => {
                    assert!(timed || self.is_outstanding(call.id, session), "its child is gone: {call:?}");
                }
                _ => assert!(timed, "nothing ends it: {call:?}"),
            }
        }
        for (call, child) in &self.children {
            let waited = session.call(*call).is_some_and(|call| !call.state.is_final());
            assert!(waited != child.dismissed || child.ended, "a child lives on, or was let go: {call:?}");
            assert!(!(waited && child.dismissed), "a child that is waited for was let go");
        }
    }

    fn session(&self) -> &Session {
        &self.held.as_ref().expect("held").session
    }

    /// Deciding again without news, at the same time, changes nothing.
    fn is_fixed(&mut self, run: Run, next: &Next, until: Option<Time>) {
        let (mut again, ids) = (self.session().clone(), self.ids.get());
        let run = Run { asking: false, ..run };
        let now = self.now();
        let repeat = self.in_context(run, &[], now, |context| decide::decide(&mut again, context));
        let repeat = repeat.expect("decisions are legal");
        self.ids.set(ids);
        assert!(
            repeat.events.is_empty() && repeat.next == *next && repeat.until == until,
            "not a fixed point: {next:?}, {repeat:?}"
        );
    }

    fn park(&mut self, run: Run, word: &'static str, until: Option<Time>) {
        assert!(!self.shape.is_plain(), "nothing of this agent waits elsewhere");
        self.is_fixed(run, &Next::Park(word), until);
        let session = self.session();
        assert!(run.mode == Mode::UntilBlocked && session.hold == Hold::None && !session.busy());
        let outstanding = session.waiting().any(|call| self.is_outstanding(call.id, session));
        assert!(until.is_some() || outstanding, "nothing wakes it");
        if let Some(row) = self.row.filter(|row| row.wake_seq <= session.cursor) {
            self.row = Some(Row { parked: true, due: until, ..row });
            self.parks += 1;
            self.kept = self.held.take().map(|held| held.session);
        }
    }

    fn stop(&mut self, run: Run, status: Status, until: Option<Time>) {
        self.is_fixed(run, &Next::Stop(status), until);
        let session = self.session();
        assert_eq!(status, session.implied_status());
        if run.mode == Mode::UntilBlocked && session.hold == Hold::None {
            let left = session.busy() || session.waiting().next().is_some();
            assert!(!left, "a run doesn't leave calls behind that it may run");
        }
        assert!(self.held.as_ref().is_some_and(|held| held.running.is_empty()), "calls that run come home");
        if self.row.is_some_and(|row| row.wake_seq <= self.session().cursor) {
            if self.wanted {
                let blocked = matches!(status, Status::Idle | Status::WaitingExternal);
                assert!(
                    self.session().hold == Hold::None && blocked,
                    "a run that was asked for was swallowed: {status:?}"
                );
            }
            self.wanted = false;
            self.row = None;
            self.kept = self.held.take().map(|held| held.session);
        }
    }

    pub(crate) fn die(&mut self) {
        self.deaths += u32::from(self.held.is_some());
        let held = self.held.iter();
        let lost = held.flat_map(|held| &held.running).filter(|call| !self.calls.contains_key(call));
        self.died_unstored += u32::try_from(lost.count()).expect("few");
        (self.held, self.kept) = (None, None);
    }

    pub(crate) fn die_deciding(&mut self) {
        if let (Some(row), Some(mut held)) = (self.row, self.held.take()) {
            let run = Run { mode: row.mode, steps: held.steps, asking: held.asking.is_some() };
            self.decision(&mut held, run, self.mailbox.len(), &mut Dice::new(0));
            self.deaths += 1;
        }
        self.kept = None;
    }

    /// Lifts every hold, completes every deferred call and lets the model say only goodbye.
    pub(crate) fn bring_to_rest(&mut self) {
        self.calm = true;
        self.message(Mode::UntilBlocked);
        let mut dice = Dice::new(1);
        for _ in 0..4_000 {
            match self.row {
                Some(row) if !row.parked || row.due.is_some_and(|at| at <= self.now()) => {
                    self.work(dice.next());
                    continue;
                }
                // Nothing but the time is waited for any more.
                Some(row) if self.children.values().all(|child| child.ended || child.dismissed) => {
                    let due = row.due.expect("a parked run has something that wakes it");
                    self.clock += (due - self.now()).num_seconds();
                    continue;
                }
                _ => {}
            }
            let open = self.calls.values().filter(|call| call.state == CallState::Deferred);
            let open: Vec<CallId> = open.map(|call| call.id).collect();
            let children = self.children.iter().filter(|(_, child)| !child.ended && !child.dismissed);
            let children: Vec<CallId> = children.map(|(call, _)| *call).collect();
            if open.is_empty() && children.is_empty() {
                return;
            }
            for tool_call_id in open {
                let settled = self.settled(tool_call_id, End::Completed);
                self.accept(vec![MailBody::ContinuationResult { tool_call_id, settled }], None);
            }
            for call in children {
                self.end_child(call, End::Completed);
            }
        }
        panic!("the session doesn't come to rest");
    }
}
