//! The worker: it claims, decides, has the model answer and calls run, and dies.

use super::*;

impl World {
    /// One thing that a worker does.
    pub(crate) fn work(&mut self, seed: u64) {
        let Some(row) = self.row else { return };
        let mut dice = Dice::new(seed);
        if self.held.is_none() {
            self.claim(&mut dice);
        }
        let held = self.held.as_ref().expect("claimed");
        // Mail may end what the worker waits for; else it is seen when that is over.
        let news = held.session.cursor < row.wake_seq && dice.below(3) == 0;
        let running = held.running.clone();
        if held.looked.is_some() {
            return self.decide(&mut dice);
        }
        if held.asking && !news {
            self.model_answers(&mut dice);
        } else if !running.is_empty() && !news {
            let one = dice.below(running.len() as u64);
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
        self.held = Some(Held { session, steps: 0, asking: false, running: Vec::new(), looked: None });
        self.commit(&events);
    }

    fn model_answers(&mut self, dice: &mut Dice) {
        let count = if self.calm { 0 } else { [0, 0, 1, 1, 2, 3, 4, 5][usize::from(dice.byte() % 8)] };
        let mut request = || RequestedCall {
            provider_id: match dice.below(8) {
                0 => String::new(),
                1 => checks::REPEATED.to_owned(),
                _ => format!("call_{}", self.fresh().simple()),
            },
            name: TOOLS[usize::from(dice.byte()) % TOOLS.len()].to_owned(),
            arguments: "{}".to_owned(),
        };
        let answer = ModelAnswer {
            text: Some("so be it".to_owned()),
            thinking: None,
            calls: (0..count).map(|_| request()).collect(),
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
        held.asking = false;
        held.steps += 1;
        self.held = Some(held);
        self.commit(&[event]);
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
        self.commit(&[event]);
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

    /// Decides, and checks that a worker that had loaded the session just now would decide the same.
    fn decision(&mut self, session: &mut Session, run: Run, mail: usize, dice: &mut Dice) -> Decision {
        let there = self.mailbox.iter().take(mail);
        let mut inbox: Vec<Envelope> = there.filter(|letter| letter.seq > session.cursor).cloned().collect();
        if dice.below(4) == 0 {
            inbox.truncate(1 + usize::from(dice.byte() % 4));
        }
        let now = self.tick();
        let ids = self.ids.get();
        let mut loaded = self.stored_session();
        let twin = self.in_context(run, &inbox, now, |context| decide::decide(&mut loaded, context));
        self.ids.set(ids);
        let decision = self.in_context(run, &inbox, now, |context| decide::decide(session, context));
        let (twin, decision) = (twin.expect("decisions are legal"), decision.expect("decisions are legal"));
        assert_eq!(format!("{decision:?}"), format!("{twin:?}"), "memory makes no difference");
        decision
    }

    fn decide(&mut self, dice: &mut Dice) {
        let mut held = self.held.take().expect("only the holder decides");
        let (mail, mode) = held.looked.take().expect("looked before it decides");
        let run = Run { mode, steps: held.steps, asking: false };
        let decision = self.decision(&mut held.session, run, mail, dice);
        for Blob { digest, text } in &decision.blobs {
            self.blobs.insert(*digest, Arc::from(text.as_str()));
        }
        held.asking = decision.next == Next::AskModel;
        held.running
            .retain(|call| held.session.call(*call).is_some_and(|call| call.state == CallState::Running));
        self.held = Some(held);
        self.commit(&decision.events);
        match decision.next {
            Next::AskModel => checks::may_ask(self.session()),
            Next::RunCalls(starts) => {
                for start in &starts {
                    *self.begun.entry(start.call).or_default() += 1;
                }
                let held = self.held.as_mut().expect("just put back");
                held.running.extend(starts.iter().map(|start| start.call));
                assert!((1..=2).contains(&held.running.len()), "between one and maxConcurrency calls run");
            }
            Next::Park(_) => panic!("nothing of this agent waits elsewhere"),
            Next::Stop(status) => self.stop(run, status),
        }
    }

    fn session(&self) -> &Session {
        &self.held.as_ref().expect("held").session
    }

    fn stop(&mut self, run: Run, status: Status) {
        let session = self.session();
        assert_eq!(status, session.implied_status());
        if run.mode == Mode::UntilBlocked && session.hold == Hold::None {
            assert!(!session.busy(), "a run doesn't leave calls behind that it may run");
        }
        let (mut again, now, ids) = (session.clone(), session.cursor, self.ids.get());
        let now = DateTime::UNIX_EPOCH + TimeDelta::seconds(now);
        let repeat = self.in_context(run, &[], now, |context| decide::decide(&mut again, context));
        let repeat = repeat.expect("decisions are legal");
        self.ids.set(ids);
        assert!(
            repeat.events.is_empty() && repeat.next == Next::Stop(status),
            "a stop is a fixed point: {repeat:?}"
        );
        if self.row.is_some_and(|row| row.wake_seq <= session.cursor) {
            if self.wanted {
                let blocked = matches!(status, Status::Idle | Status::WaitingExternal);
                assert!(
                    session.hold == Hold::None && blocked,
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
        (self.held, self.kept) = (None, None);
    }

    pub(crate) fn die_deciding(&mut self) {
        if let (Some(row), Some(mut held)) = (self.row, self.held.take()) {
            let run = Run { mode: row.mode, steps: held.steps, asking: false };
            self.decision(&mut held.session, run, self.mailbox.len(), &mut Dice::new(0));
            self.deaths += 1;
        }
        self.kept = None;
    }

    /// Lifts every hold, completes every deferred call and lets the model say only goodbye.
    pub(crate) fn bring_to_rest(&mut self) {
        self.calm = true;
        self.message(Mode::UntilBlocked);
        let mut dice = Dice::new(1);
        for _ in 0..2_000 {
            if self.row.is_some() {
                self.work(dice.next());
                continue;
            }
            let open = self.calls.values().filter(|call| call.state == CallState::Deferred);
            let open: Vec<CallId> = open.map(|call| call.id).collect();
            if open.is_empty() {
                return;
            }
            for tool_call_id in open {
                let settled = self.settled(tool_call_id, End::Completed);
                self.accept(vec![MailBody::ContinuationResult { tool_call_id, settled }], None);
            }
        }
        panic!("the session doesn't come to rest");
    }
}
