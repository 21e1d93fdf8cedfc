//! Whole histories of sessions: a small mailbox, store and worker play random lives, worker deaths
//! included, and what must hold is checked after every event.

mod checks;
mod dice;
mod seen;
mod world;

use holdfast_engine::{decide::Mode, session::Status};
use proptest::{collection::vec, prelude::*};

use world::{End, World, shape::SHAPES};

/// What may happen next in a session's life. Numbers choose among what is there at that moment.
#[derive(Debug, Clone)]
enum Op {
    /// The worker does one thing: claims, decides, gets the model's answer or a call's result.
    Work(u64),
    /// The worker dies, and what it hadn't stored is gone.
    Die,
    /// The worker decides and dies before it has stored anything.
    DieDeciding,
    /// A person writes.
    Message(Mode),
    /// A person says something that doesn't wait.
    Interrupt,
    /// A child session ends.
    ChildEnds { child: u8, end: End },
    /// Time goes by.
    Pass(u8),
    /// Another session writes.
    AgentMessage,
    /// Some call's token is settled: in time, too late, or not for the first time.
    Result { call: u8, end: End },
    /// A result comes for a call that nobody asked for.
    Stray,
    /// A person cancels the run, and its open deferred calls too if wanted.
    Cancel { deferred: bool },
    /// A letter cancels two calls, whatever their states.
    CancelCalls(u8, u8),
    /// A person cancels what the run waits for.
    CancelAttached,
    /// A person pauses the session.
    Pause,
    /// A person resumes it.
    Resume(Mode),
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![4 => Just(End::Completed), 1 => Just(End::Failed), 1 => Just(End::Cancelled)]
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![5 => Just(Mode::UntilBlocked), 2 => Just(Mode::Step), 1 => Just(Mode::None)]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        24 => any::<u64>().prop_map(Op::Work),
        1 => Just(Op::Die),
        1 => Just(Op::DieDeciding),
        4 => mode().prop_map(Op::Message),
        2 => Just(Op::Interrupt),
        2 => (any::<u8>(), end()).prop_map(|(child, end)| Op::ChildEnds { child, end }),
        2 => (1..12u8).prop_map(Op::Pass),
        1 => Just(Op::AgentMessage),
        5 => (any::<u8>(), end()).prop_map(|(call, end)| Op::Result { call, end }),
        1 => Just(Op::Stray),
        1 => any::<bool>().prop_map(|deferred| Op::Cancel { deferred }),
        1 => (any::<u8>(), any::<u8>()).prop_map(|(a, b)| Op::CancelCalls(a, b)),
        1 => Just(Op::CancelAttached),
        1 => Just(Op::Pause),
        2 => mode().prop_map(Op::Resume),
    ]
}

/// 96 histories, or as many as `PROPTEST_CASES` says.
fn config() -> ProptestConfig {
    // A failure prints its smallest history; test runs write nothing into the tree.
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 96;
    }
    config
}

fn play(world: &mut World, op: &Op) {
    match *op {
        Op::Work(seed) => world.work(seed),
        Op::Die => world.die(),
        Op::DieDeciding => world.die_deciding(),
        Op::Message(mode) => world.message(mode),
        Op::Interrupt => world.interrupt(),
        Op::ChildEnds { child, end } => world.child_ends(child, end),
        Op::Pass(seconds) => world.pass(seconds),
        Op::AgentMessage => world.agent_message(),
        Op::Result { call, end } => world.result(call, end),
        Op::Stray => world.stray_result(),
        Op::Cancel { deferred } => world.cancel(deferred),
        Op::CancelCalls(a, b) => world.cancel_calls(a, b),
        Op::CancelAttached => world.cancel_attached(),
        Op::Pause => world.pause(),
        Op::Resume(mode) => world.resume(mode),
    }
}

proptest! {
    #![proptest_config(config())]

    /// Every check of [`checks`] and [`world`] runs after every event; here a history is only
    /// played, brought to rest, and looked at as a whole.
    #[test]
    fn every_history_keeps_the_promises(shape in 0..SHAPES, ops in vec(op(), 1..120)) {
        let mut world = World::new(shape);
        world.message(Mode::UntilBlocked);
        for op in &ops {
            play(&mut world, op);
        }
        world.bring_to_rest();
        let session = world.stored_session();
        prop_assert_eq!(session.implied_status(), Status::Idle);
        checks::all_is_told(&world, &session);
    }
}

/// The simulator has to reach what the property is about; a history of nothing proves nothing.
#[test]
fn histories_reach_what_they_are_about() {
    let mut dice = dice::Dice::new(8);
    let mut seen = seen::Seen::default();
    for shape in 0..144 {
        let mut world = World::new(shape);
        world.message(Mode::UntilBlocked);
        for _ in 0..120 {
            let op = match dice.below(36) {
                0 => Op::Die,
                1 => Op::DieDeciding,
                2..=5 => Op::Message(Mode::UntilBlocked),
                6..=10 => Op::Result { call: dice.byte(), end: End::Completed },
                11 => Op::Cancel { deferred: dice.below(2) == 0 },
                12 => Op::CancelCalls(dice.byte(), dice.byte()),
                13 => Op::Pause,
                14 => Op::Resume(Mode::UntilBlocked),
                15 => Op::Resume(Mode::Step),
                16 => Op::Interrupt,
                17 | 18 => Op::ChildEnds { child: dice.byte(), end: End::Completed },
                19 | 20 => Op::Pass(1 + dice.byte() % 12),
                _ => Op::Work(dice.next()),
            };
            play(&mut world, &op);
        }
        world.bring_to_rest();
        seen.add(&world);
    }
    seen.assert_all();
}
