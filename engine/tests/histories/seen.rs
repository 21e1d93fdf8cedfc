//! Which situations histories have reached.

use holdfast_engine::{
    session::CallState,
    turn::{Shown, TurnBody},
};

use crate::{checks::told, world::World};

#[derive(Debug, Default)]
pub(crate) struct Seen {
    placeholders: u32,
    late_results: u32,
    late_cancels: u32,
    beaten: u32,
    restarts: u32,
    orphans: u32,
    deaths: u32,
    full_rounds: u32,
    read_notices: u32,
    in_background: u32,
    children: u32,
    dismissed: u32,
    parks: u32,
    interrupted_requests: u32,
    ended_while_asking: u32,
    begun_unstored: u32,
    died_unstored: u32,
    woken_by_mail: u32,
    woken_by_call: u32,
    woken_by_time: u32,
}

impl Seen {
    pub(crate) fn add(&mut self, world: &World) {
        let session = world.stored_session();
        for (id, told) in told(&session) {
            let call = &world.calls[&id];
            self.placeholders += told.placeholder;
            self.late_results += told.late_results;
            self.late_cancels += told.late_cancels;
            self.read_notices += told.read_notices;
            self.beaten += u32::from(call.state == CallState::Cancelled && told.late_results > 0);
            self.restarts += u32::from(call.attempt > 1);
        }
        let count = |text: &str| {
            let times = world.stored.turns.iter().map(|turn| turn.4.matches(text).count());
            u32::try_from(times.sum::<usize>()).expect("few")
        };
        self.orphans += count("\"orphaned: ");
        self.woken_by_mail += count("woken_by\":\"mail");
        self.woken_by_call += count("woken_by\":\"call");
        self.woken_by_time += count("woken_by\":\"time");
        self.deaths += world.deaths;
        self.parks += world.parks;
        self.interrupted_requests += world.interrupted_requests;
        self.ended_while_asking += world.ended_while_asking;
        self.begun_unstored += world.begun_unstored;
        self.died_unstored += world.died_unstored;
        self.children += u32::try_from(world.children.len()).expect("few");
        let dismissed = world.children.values().filter(|child| child.dismissed);
        self.dismissed += u32::try_from(dismissed.count()).expect("few");
        for turn in &session.turns {
            match &turn.body {
                TurnBody::Llm(llm) => self.full_rounds += u32::from(llm.calls.len() == 5),
                TurnBody::User(user) => {
                    let runs = |shown: &Shown| matches!(shown, Shown::Placeholder(text) if text.contains("\"status\":\"running\""));
                    let running = user.answers.iter().filter(|answer| runs(&answer.shown));
                    self.in_background += u32::try_from(running.count()).expect("few");
                }
            }
        }
    }

    pub(crate) fn assert_all(&self) {
        let reached = [
            self.placeholders,
            self.late_results,
            self.late_cancels,
            self.beaten,
            self.restarts,
            self.orphans,
            self.deaths,
            self.full_rounds,
            self.read_notices,
            self.in_background,
            self.children,
            self.dismissed,
            self.parks,
            self.interrupted_requests,
            self.ended_while_asking,
            self.begun_unstored,
            self.died_unstored,
            self.woken_by_mail,
            self.woken_by_call,
            self.woken_by_time,
        ];
        assert!(reached.iter().all(|times| *times > 0), "the simulator is too tame: {self:?}");
    }
}
