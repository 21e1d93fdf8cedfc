//! What may happen in the lease's model, and what it changes.

use super::{
    Action, Beat, Call, Lease, Message, Phase, Row, SKEW, State, Step, TTL, Variant, WIRE, WORKERS, Worker,
};

/// What the database says of a commit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Stored,
    LeaseLost,
}

impl Worker {
    /// The lease ends for its task, and what runs under it is killed. A heartbeat stays on its way.
    fn drop_lease(&mut self) {
        *self = Self { phase: Phase::Idle, epoch: 0, left: 0, lost: false, beat: self.beat };
    }

    pub(super) fn holds(&self) -> bool {
        self.epoch != 0
    }

    fn stands(&self) -> bool {
        self.left > 0 && !self.lost
    }

    /// Whether a commit that ends the run is under way.
    fn releasing(&self) -> bool {
        use Phase::{Committing, Doubting};
        matches!(self.phase, Committing(_, step) | Doubting(_, step) if step != Step::Start)
    }
}

impl Lease {
    pub(super) fn possible(&self, state: &State) -> Vec<Action> {
        let mut may = vec![Action::Tick];
        for worker in 0..WORKERS {
            self.possible_of(state, worker, &mut may);
        }
        for (place, message) in state.wire.iter().enumerate() {
            let Message::Commit { worker, passed, .. } = *message else {
                may.push(Action::Deliver(place));
                continue;
            };
            if self.0 == Variant::FenceBeforeTransaction && !passed {
                may.push(Action::LookAtFence(place));
                continue;
            }
            may.push(Action::Deliver(place));
            if state.faults > 0 && state.waits_for(usize::from(worker), message) {
                may.extend([Action::LoseAnswer(place), Action::LoseCommit(place)]);
            }
        }
        may
    }

    fn possible_of(&self, state: &State, number: usize, may: &mut Vec<Action>) {
        let worker = &state.workers[number];
        let blind = self.0 == Variant::ClaimWithoutRecheck;
        let faulty = state.faults > 0;
        let room = state.wire.len() < WIRE;
        match worker.phase {
            Phase::Idle if self.due(state) => may.push(Action::AskForRun(number)),
            Phase::Asking(_) if self.due(state) || (blind && state.row != Row::Gone) => {
                may.push(Action::GrantRun(number));
            }
            Phase::Granted(..) => {
                may.push(Action::TakeLease(number));
                if faulty {
                    may.push(Action::LoseGrant(number));
                }
            }
            Phase::Loading if room => may.push(Action::Load(number)),
            Phase::Committing(..) if faulty => may.push(Action::TimeOut(number)),
            Phase::Doubting(..) if room => may.push(Action::Inquire(number)),
            Phase::Started(_) if worker.stands() || self.0 == Variant::NoDeadline => {
                may.push(Action::Begin(number));
            }
            Phase::Acting(_) if room => may.push(Action::End(number)),
            _ => {}
        }
        if worker.beat.is_some() {
            may.push(Action::Renew(number));
            if faulty {
                may.extend([Action::RenewUnheard(number), Action::LoseBeat(number)]);
            }
        } else if (worker.holds() && !worker.lost && worker.left < TTL)
            || self.0 == Variant::HeartbeatByWorker
        {
            may.push(Action::SendBeat(number));
        }
        if worker.holds() && !worker.stands() && self.0 != Variant::NoDeadline {
            may.push(Action::Drop(number));
        }
        let leaves = matches!(worker.phase, Phase::Loading | Phase::Started(_));
        if state.leave && room && leaves && worker.stands() {
            may.push(Action::Leave(number));
        }
        if faulty && worker.phase != Phase::Idle {
            may.push(Action::Die(number));
        }
    }

    /// Whether the run may be claimed.
    fn due(&self, state: &State) -> bool {
        match state.row {
            Row::Queued => true,
            Row::Claimed { left, .. } => left == 0 && self.0 != Variant::NoTakeover,
            Row::Gone => false,
        }
    }

    pub(super) fn happen(&self, state: &mut State, action: Action) {
        match action {
            Action::Tick => state.tick(),
            Action::AskForRun(number) => state.workers[number].phase = Phase::Asking(TTL),
            Action::GrantRun(number) => self.grant(state, number),
            Action::LoseGrant(number) => {
                state.faults -= 1;
                state.forget_grant(number);
                state.workers[number].phase = Phase::Idle;
            }
            Action::TakeLease(number) => {
                let worker = &mut state.workers[number];
                if let Phase::Granted(epoch, left) = worker.phase {
                    let left = if self.0 == Variant::DeadlineFromAnswer { TTL } else { left };
                    *worker = Worker { phase: Phase::Loading, epoch, left, lost: false, beat: worker.beat };
                }
            }
            Action::Load(number) => self.load(state, number),
            Action::Deliver(place) => self.deliver(state, place, true),
            Action::LoseAnswer(place) => {
                state.faults -= 1;
                self.deliver(state, place, false);
            }
            Action::LoseCommit(place) => {
                state.faults -= 1;
                if let Message::Commit { worker, .. } = state.wire.remove(place) {
                    state.workers[usize::from(worker)].doubt();
                }
            }
            Action::TimeOut(number) => {
                state.faults -= 1;
                state.workers[number].doubt();
            }
            Action::Inquire(number) => self.inquire(state, number),
            Action::Begin(number) => self.begin(state, number),
            Action::End(number) => {
                if let Phase::Acting(version) = state.workers[number].phase {
                    state.send(number, version, Step::Finish);
                }
            }
            Action::SendBeat(number) => {
                let worker = &mut state.workers[number];
                worker.beat = Some(Beat { epoch: worker.epoch, left: TTL });
            }
            Action::Renew(number) => self.renew(state, number, true),
            Action::RenewUnheard(number) => {
                state.faults -= 1;
                self.renew(state, number, false);
            }
            Action::LoseBeat(number) => {
                state.faults -= 1;
                state.workers[number].beat = None;
            }
            Action::Drop(number) => state.workers[number].drop_lease(),
            Action::Leave(number) => {
                state.leave = false;
                state.wire.push(Message::Release { epoch: state.workers[number].epoch });
                state.workers[number].drop_lease();
            }
            Action::Die(number) => {
                state.faults -= 1;
                state.forget_grant(number);
                state.workers[number].drop_lease();
            }
            Action::LookAtFence(place) => self.look_at_fence(state, place),
        }
        state.wire.sort_unstable();
    }

    fn grant(&self, state: &mut State, number: usize) {
        let Phase::Asking(left) = state.workers[number].phase else { return };
        let epoch = state.fresh_epoch();
        state.row = Row::Claimed { epoch, worker: number as u8, left: TTL };
        state.history.unheard = None;
        // The deadline counts from when the claim was sent: the database's, which counts from now, is later.
        let left = if self.0 == Variant::DeadlineByWallClock { TTL + SKEW } else { left };
        state.workers[number].phase = Phase::Granted(epoch, left);
    }

    fn load(&self, state: &mut State, number: usize) {
        let version = state.version;
        let step = match state.call {
            Call::Ready => Step::Start,
            Call::Running => Step::Orphan,
            Call::Completed | Call::Orphaned => Step::Finish,
        };
        match (self.0, step) {
            (Variant::EffectBeforeCommit, Step::Start) | (Variant::RunningCallBeginsAgain, Step::Orphan) => {
                state.workers[number].phase = Phase::Started(version);
            }
            _ => state.send(number, version, step),
        }
    }

    /// Whether a commit's fence holds, by the rows as they are.
    fn fence(&self, state: &State, epoch: u8, version: u8) -> bool {
        let held = match state.row {
            Row::Claimed { epoch: current, .. } => current == epoch || self.0 == Variant::NoEpochInCommit,
            Row::Queued | Row::Gone => false,
        };
        held && state.version == version
    }

    fn look_at_fence(&self, state: &mut State, place: usize) {
        let Message::Commit { worker, epoch, version, step, .. } = state.wire[place] else { return };
        if self.fence(state, epoch, version) {
            state.wire[place] = Message::Commit { worker, epoch, version, step, passed: true };
        } else {
            let message = state.wire.remove(place);
            if state.waits_for(usize::from(worker), &message) {
                state.workers[usize::from(worker)].drop_lease();
            }
        }
    }

    /// The transaction of a commit, or the statement of a release.
    fn deliver(&self, state: &mut State, place: usize, heard: bool) {
        let message = state.wire.remove(place);
        let Message::Commit { worker, epoch, version, step, passed } = message else {
            if let (Message::Release { epoch }, Row::Claimed { epoch: current, .. }) = (message, state.row)
                && (epoch == current || self.0 == Variant::ReleaseWithoutEpoch)
            {
                state.row = Row::Queued;
            }
            return;
        };
        let waits = state.waits_for(usize::from(worker), &message);
        let outcome = if state.last_commit == Some((epoch, version)) {
            // It took place, although its first answer was lost.
            Outcome::Stored
        } else if passed || self.fence(state, epoch, version) {
            state.store(worker, epoch, version, step);
            Outcome::Stored
        } else {
            Outcome::LeaseLost
        };
        if !waits {
            return;
        }
        if heard {
            self.learn(state, usize::from(worker), version, step, outcome);
        } else {
            state.workers[usize::from(worker)].doubt();
        }
    }

    /// A worker learns what became of its commit.
    fn learn(&self, state: &mut State, number: usize, version: u8, step: Step, outcome: Outcome) {
        let newest = state.version;
        match (outcome, step) {
            (Outcome::Stored, Step::Start) => {
                state.workers[number].phase = Phase::Started(version + 1);
            }
            (Outcome::LeaseLost, _) if self.0 == Variant::LostLeaseTriedAnew => {
                if let Row::Claimed { epoch, .. } = state.row {
                    state.workers[number].epoch = epoch;
                    state.send(number, newest, step);
                } else {
                    state.workers[number].drop_lease();
                }
            }
            // The run is over here, or somebody else's: there is nothing to give back.
            _ => state.workers[number].drop_lease(),
        }
    }

    /// What became of a commit in doubt: it took place, it may still be sent again, or it never can.
    fn inquire(&self, state: &mut State, number: usize) {
        let Phase::Doubting(version, step) = state.workers[number].phase else { return };
        let epoch = state.workers[number].epoch;
        if self.0 == Variant::DoubtTakenForSuccess {
            self.learn(state, number, version, step, Outcome::Stored);
        } else if self.0 == Variant::ResentUnderNewId {
            let newest = state.version;
            state.send(number, newest, step);
        } else if state.last_commit == Some((epoch, version)) {
            self.learn(state, number, version, step, Outcome::Stored);
        } else if self.fence(state, epoch, version) {
            state.send(number, version, step);
        } else {
            self.learn(state, number, version, step, Outcome::LeaseLost);
        }
    }

    fn begin(&self, state: &mut State, number: usize) {
        let worker = &mut state.workers[number];
        let Phase::Started(version) = worker.phase else { return };
        worker.phase = Phase::Acting(version);
        let mine = matches!(state.row, Row::Claimed { epoch, .. } if epoch == worker.epoch);
        let history = &mut state.history;
        history.begun += 1;
        history.begun_without_lease |= !mine;
        history.begun_unrecorded |= state.call != Call::Running;
    }

    fn renew(&self, state: &mut State, number: usize, heard: bool) {
        let Some(Beat { epoch, left }) = state.workers[number].beat.take() else { return };
        let by_worker = self.0 == Variant::HeartbeatByWorker;
        let stands = match &mut state.row {
            Row::Claimed { epoch: current, worker, left }
                if *current == epoch || (by_worker && usize::from(*worker) == number) =>
            {
                *left = TTL;
                true
            }
            _ => false,
        };
        let worker = &mut state.workers[number];
        if !heard || !worker.holds() || worker.epoch != epoch {
            return;
        }
        if stands {
            worker.left = match self.0 {
                Variant::DeadlineFromAnswer => TTL,
                Variant::DeadlineByWallClock => TTL + SKEW,
                _ => left,
            };
        } else if !worker.releasing() {
            worker.lost = true;
        }
    }
}

impl Worker {
    fn doubt(&mut self) {
        if let Phase::Committing(version, step) = self.phase {
            self.phase = Phase::Doubting(version, step);
        }
    }
}

impl State {
    /// Whether the worker that sent a commit still waits for its answer.
    fn waits_for(&self, number: usize, message: &Message) -> bool {
        let Message::Commit { epoch, version, step, .. } = *message else { return false };
        let worker = &self.workers[number];
        worker.epoch == epoch && worker.phase == Phase::Committing(version, step)
    }

    fn send(&mut self, number: usize, version: u8, step: Step) {
        let epoch = self.workers[number].epoch;
        self.wire.push(Message::Commit { worker: number as u8, epoch, version, step, passed: false });
        self.workers[number].phase = Phase::Committing(version, step);
    }

    fn store(&mut self, worker: u8, epoch: u8, version: u8, step: Step) {
        let mine = matches!(self.row, Row::Claimed { epoch: current, worker: holder, .. }
            if current == epoch && holder == worker);
        self.history.stored_without_lease |= !mine;
        self.history.version_written_twice |= version < self.version;
        self.version = version + 1;
        self.last_commit = Some((epoch, version));
        self.call = match step {
            Step::Start => Call::Running,
            Step::Finish => Call::Completed,
            Step::Orphan => Call::Orphaned,
        };
        if step == Step::Start {
            self.history.starts += 1;
        } else {
            self.row = Row::Gone;
        }
    }

    /// Nobody will ever hear of a claim that was granted to this worker.
    fn forget_grant(&mut self, number: usize) {
        let Phase::Granted(epoch, _) = self.workers[number].phase else { return };
        if let Row::Claimed { epoch: current, left, .. } = self.row
            && current == epoch
        {
            self.history.unheard = Some(TTL - left);
        }
    }

    fn tick(&mut self) {
        let pass = |left: &mut u8| *left = left.saturating_sub(1);
        if let Row::Claimed { left, .. } = &mut self.row {
            pass(left);
        }
        if let Some(ticks) = &mut self.history.unheard {
            *ticks = (*ticks + 1).min(TTL + 1);
        }
        for worker in &mut self.workers {
            pass(&mut worker.left);
            if let Phase::Asking(left) | Phase::Granted(_, left) = &mut worker.phase {
                pass(left);
            }
            if let Some(beat) = &mut worker.beat {
                pass(&mut beat.left);
            }
        }
    }
}
