//! What may happen in the mail's model, and what it changes.

use super::{
    Action, Lock, Mail, PRODUCERS, Phase, Producer, Row, RunAfter, State, Variant, View, WORKERS, Worker,
};

impl Mail {
    pub(super) fn possible(&self, state: &State) -> Vec<Action> {
        let mut may = Vec::new();
        for number in 0..PRODUCERS {
            self.possible_of_producer(state, number, &mut may);
        }
        for number in 0..WORKERS {
            possible_of_worker(state, number, &mut may);
        }
        may
    }

    fn numbers_ahead(&self) -> bool {
        self.mail_number_ahead()
            || matches!(self.0, Variant::EventNumberBeforeLock | Variant::EventNumberFromSequence)
    }

    fn mail_number_ahead(&self) -> bool {
        matches!(self.0, Variant::MailNumberBeforeLock | Variant::MailNumberFromSequence)
    }

    fn possible_of_producer(&self, state: &State, number: usize, may: &mut Vec<Action>) {
        let free = state.lock.is_none();
        match state.producers[number] {
            Producer::Wants | Producer::Doubts if self.numbers_ahead() => {
                may.push(Action::TakeNumber(number));
            }
            Producer::Wants | Producer::Doubts | Producer::Numbered(_) if free => {
                may.push(Action::LockForLetter(number));
            }
            Producer::Locked(_) => {
                may.push(Action::Accept(number));
                if state.faults > 0 {
                    may.extend([Action::AcceptUnheard(number), Action::RollBackLetter(number)]);
                }
            }
            _ => {}
        }
    }

    pub(super) fn happen(&self, state: &mut State, action: Action) {
        match action {
            Action::TakeNumber(number) => {
                let taken = match self.0 {
                    Variant::MailNumberBeforeLock => state.mail_seq + 1,
                    Variant::MailNumberFromSequence => {
                        state.mail_seq += 1;
                        state.mail_seq
                    }
                    Variant::EventNumberFromSequence => {
                        state.event_seq += 1;
                        state.event_seq
                    }
                    _ => state.event_seq + 1,
                };
                state.producers[number] = Producer::Numbered(taken);
            }
            Action::LockForLetter(number) => {
                state.lock = Some(Lock::Producer(number));
                let ahead = if let Producer::Numbered(taken) = state.producers[number] { taken } else { 0 };
                state.producers[number] = Producer::Locked(ahead);
            }
            Action::Accept(number) => {
                self.accept(state, number);
                state.producers[number] = Producer::Told;
            }
            Action::AcceptUnheard(number) => {
                state.faults -= 1;
                self.accept(state, number);
                state.producers[number] = Producer::Doubts;
            }
            Action::RollBackLetter(number) => {
                state.faults -= 1;
                state.lock = None;
                state.producers[number] = Producer::Doubts;
            }
            Action::Claim(number) => state.hold(number),
            Action::TakeOver(number) => {
                if state.workers.iter().any(|worker| worker.holds) {
                    state.faults -= 1;
                }
                state.hold(number);
            }
            Action::Load(number) | Action::Fetch(number) => self.read(state, number),
            Action::LockToKeep(number) => state.lock_for(number, RunAfter::Keep),
            Action::LockToEnd(number) => state.lock_for(number, RunAfter::End),
            Action::LockToPark(number) => state.lock_for(number, RunAfter::Park),
            Action::Commit(number) => self.commit(state, number),
            Action::MoveCursor(number) => self.move_cursor(state, number),
            Action::Die(number) => {
                state.faults -= 1;
                if state.lock == Some(Lock::Worker(number)) {
                    state.lock = None;
                }
                state.workers[number] = Worker { phase: Phase::Idle, holds: false };
            }
        }
    }

    /// One transaction: letter, event and wake, or nothing if the letter is known.
    fn accept(&self, state: &mut State, number: usize) {
        state.lock = None;
        let Producer::Locked(ahead) = state.producers[number] else { return };
        let letter = number as u8;
        if state.mailbox.contains(&Some(letter)) && self.0 != Variant::RepeatIsNew {
            return;
        }
        let seq = if self.mail_number_ahead() { ahead } else { state.mail_seq + 1 };
        if let Some(place) = state.mailbox.get_mut(usize::from(seq) - 1) {
            *place = Some(letter);
        }
        state.mail_seq = if self.0 == Variant::MailNumberFromSequence { state.mail_seq } else { seq };
        match self.0 {
            Variant::EventNumberBeforeLock | Variant::EventNumberFromSequence => state.write_event(ahead),
            _ => state.next_event(),
        }
        match (self.0, state.row) {
            (_, Row::None) => {
                state.row = Row::Queued;
                state.wake_seq = seq;
            }
            (Variant::WakeDoesNothing, _) => {}
            (variant, row) => {
                state.wake_seq = state.wake_seq.max(seq);
                if row == Row::Parked && variant != Variant::WakeLeavesParked {
                    state.row = Row::Queued;
                }
            }
        }
    }

    /// Reads the session and the mail above its cursor, before a step or after a commit that mail went
    /// beside.
    fn read(&self, state: &mut State, number: usize) {
        let looks = matches!(self.0, Variant::EndLooksBeforeLock | Variant::ParkLooksBeforeLock);
        let (version, cursor) = match state.workers[number].phase {
            // What only the holder changes it doesn't read again.
            Phase::Fetching(view) => (view.version, view.cursor),
            _ => (state.version, state.cursor),
        };
        let woken = if looks { state.wake_seq } else { 0 };
        let view = View { version, cursor, newest: state.mail_seq, woken };
        let first = self.0 == Variant::CursorBeforeFold && view.newest > view.cursor;
        state.workers[number].phase = if first { Phase::MovingFirst(view) } else { Phase::Ready(view) };
    }

    fn move_cursor(&self, state: &mut State, number: usize) {
        match state.workers[number].phase {
            Phase::MovingFirst(view) => {
                state.cursor = view.newest;
                state.workers[number].phase = Phase::Ready(view);
            }
            Phase::MovingLast(view, after) => {
                state.cursor = view.newest;
                self.run_after(state, number, view, after);
            }
            _ => {}
        }
    }

    /// One transaction, whose lock is held: the fence, the fold with its cursor, the event, and what becomes
    /// of the run by the row as it is now.
    fn commit(&self, state: &mut State, number: usize) {
        let Phase::Locked(view, after) = state.workers[number].phase else { return };
        state.lock = None;
        let held = state.workers[number].holds && state.version == view.version;
        if !held && self.0 != Variant::NoFence {
            state.workers[number] = Worker { phase: Phase::Idle, holds: false };
            return;
        }
        for place in view.cursor..view.newest {
            if let Some(letter) = state.mailbox[usize::from(place)] {
                let folded = &mut state.folded[usize::from(letter)];
                *folded = (*folded + 1).min(2);
            }
        }
        state.version += 1;
        state.next_event();
        match self.0 {
            Variant::CursorAfterFold if view.newest > view.cursor => {
                state.workers[number].phase = Phase::MovingLast(view, after);
                return;
            }
            Variant::CursorFromCounter => state.cursor = state.mail_seq,
            _ => state.cursor = view.newest,
        }
        self.run_after(state, number, view, after);
    }

    fn run_after(&self, state: &mut State, number: usize, view: View, after: RunAfter) {
        let by_row = state.wake_seq <= state.cursor;
        let by_look = view.woken <= view.newest;
        let released = match (self.0, after) {
            (_, RunAfter::Keep) => false,
            (Variant::EndLooksBeforeLock, RunAfter::End) => by_look,
            (Variant::ParkLooksBeforeLock, RunAfter::Park) => by_look,
            _ => by_row,
        };
        if released {
            state.row = if after == RunAfter::Park { Row::Parked } else { Row::None };
            if state.row == Row::None {
                state.wake_seq = 0;
            }
            state.workers[number] = Worker { phase: Phase::Idle, holds: false };
            return;
        }
        let view = View { version: state.version, cursor: state.cursor, newest: state.cursor, woken: 0 };
        let phase = if by_row { Phase::Ready(view) } else { Phase::Fetching(view) };
        state.workers[number].phase = phase;
    }
}

fn possible_of_worker(state: &State, number: usize, may: &mut Vec<Action>) {
    let free = state.lock.is_none();
    let worker = &state.workers[number];
    match worker.phase {
        // A claim passes rows over that somebody has locked.
        Phase::Idle if free && state.row == Row::Queued => may.push(Action::Claim(number)),
        Phase::Idle if free && state.row == Row::Claimed => {
            let dead = state.workers.iter().all(|worker| !worker.holds);
            if dead || state.faults > 0 {
                may.push(Action::TakeOver(number));
            }
        }
        Phase::Loading => may.push(Action::Load(number)),
        Phase::MovingFirst(_) | Phase::MovingLast(..) if free => may.push(Action::MoveCursor(number)),
        Phase::Ready(view) if free => {
            if view.newest > view.cursor {
                may.push(Action::LockToKeep(number));
            }
            may.extend([Action::LockToEnd(number), Action::LockToPark(number)]);
        }
        Phase::Locked(..) => may.push(Action::Commit(number)),
        Phase::Fetching(_) => may.push(Action::Fetch(number)),
        _ => {}
    }
    if state.faults > 0 && worker.phase != Phase::Idle {
        may.push(Action::Die(number));
    }
}

impl State {
    /// The row names a fresh lease from now on: whoever had one has it no more.
    fn hold(&mut self, number: usize) {
        self.row = Row::Claimed;
        for worker in &mut self.workers {
            worker.holds = false;
        }
        self.workers[number] = Worker { phase: Phase::Loading, holds: true };
    }

    fn lock_for(&mut self, number: usize, after: RunAfter) {
        if let Phase::Ready(view) = self.workers[number].phase {
            self.lock = Some(Lock::Worker(number));
            self.workers[number].phase = Phase::Locked(view, after);
        }
    }

    /// Appends an event, whose number is taken under the session's lock.
    fn next_event(&mut self) {
        self.event_seq += 1;
        self.write_event(self.event_seq);
    }

    fn write_event(&mut self, number: u8) {
        let bit = 1 << (number - 1);
        self.event_twice |= self.events & bit != 0;
        self.events |= bit;
        self.event_seq = self.event_seq.max(number);
    }
}
