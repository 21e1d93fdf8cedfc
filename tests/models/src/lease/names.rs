//! Names that are as good as one another: without them taken for one there would be no end of states.

use super::{Beat, Message, Phase, Row, State, Worker};

/// Every lease that is gone.
const STALE: u8 = 1;
/// The first one that isn't.
const FIRST: u8 = 2;

impl State {
    /// One that nobody was ever given: above all that anybody remembers.
    pub(super) fn fresh_epoch(&mut self) -> u8 {
        let mut newest = STALE;
        self.each_epoch(|epoch| newest = newest.max(*epoch));
        newest + 1
    }

    /// Epochs are only ever compared with one another, so those that the row names or a worker holds may be
    /// counted anew, and all others are as good as one: nobody will hold them again. Without that there
    /// would be no end of states.
    pub(super) fn number_anew(&mut self) {
        let mut live: Vec<u8> = Vec::new();
        if let Row::Claimed { epoch, .. } = self.row {
            live.push(epoch);
        } else {
            self.history.unheard = None;
        }
        for worker in &self.workers {
            let granted = if let Phase::Granted(epoch, _) = worker.phase { epoch } else { worker.epoch };
            if granted != 0 && !live.contains(&granted) {
                live.push(granted);
            }
        }
        self.last_commit = self.last_commit.filter(|(epoch, _)| live.contains(epoch));
        self.each_epoch(|epoch| {
            let place = live.iter().position(|known| known == epoch);
            *epoch = place.map_or((*epoch).min(STALE), |place| place as u8 + FIRST);
        });
        for worker in &mut self.workers {
            if let Some(beat) = worker.beat.as_mut().filter(|beat| beat.epoch <= STALE) {
                beat.left = 0;
            }
        }
        self.wire.sort_unstable();
    }

    /// Gives the workers the numbers that they would have if they had come in order.
    pub(super) fn order_workers(&mut self) {
        // Epochs aren't compared by size anywhere, so they must not decide the order.
        let key = |worker: &Worker| {
            let mut key = *worker;
            key.epoch = u8::from(worker.holds());
            key.beat = worker.beat.map(|beat| Beat { epoch: u8::from(beat.epoch == worker.epoch), ..beat });
            if let Phase::Granted(epoch, _) = &mut key.phase {
                *epoch = 0;
            }
            key
        };
        if key(&self.workers[0]) <= key(&self.workers[1]) {
            return;
        }
        self.workers.reverse();
        if let Row::Claimed { worker, .. } = &mut self.row {
            *worker = 1 - *worker;
        }
        for message in &mut self.wire {
            if let Message::Commit { worker, .. } = message {
                *worker = 1 - *worker;
            }
        }
    }

    fn each_epoch(&mut self, mut visit: impl FnMut(&mut u8)) {
        if let Row::Claimed { epoch, .. } = &mut self.row {
            visit(epoch);
        }
        if let Some((epoch, _)) = &mut self.last_commit {
            visit(epoch);
        }
        for worker in &mut self.workers {
            visit(&mut worker.epoch);
            if let Phase::Granted(epoch, _) = &mut worker.phase {
                visit(epoch);
            }
            if let Some(beat) = &mut worker.beat {
                visit(&mut beat.epoch);
            }
        }
        for message in &mut self.wire {
            let (Message::Commit { epoch, .. } | Message::Release { epoch }) = message;
            visit(epoch);
        }
    }
}
