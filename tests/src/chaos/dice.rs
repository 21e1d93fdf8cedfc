//! Chance that a seed repeats, on every machine and with every version of every library.

use std::time::Duration;

/// A source of chance: SplitMix64.
#[derive(Debug, Clone)]
pub(super) struct Dice(u64);

impl Dice {
    /// The source of a seed.
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A source of its own for part `number` of what a seed decides, so that parts don't depend on the
    /// order in which they draw.
    pub(super) fn part(seed: u64, number: u64) -> Self {
        let mut dice = Self(seed ^ number.wrapping_mul(0xd134_2543_de82_ef95));
        dice.next();
        dice
    }

    /// 64 random bits.
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 if that is 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit.max(1)).unwrap_or(1);
        usize::try_from(self.next() % limit).unwrap_or(0)
    }

    /// True in so many of a hundred cases.
    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// One of these, if there is any.
    pub(super) fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len()))
    }

    /// A time up to `most`, in milliseconds.
    pub(super) fn up_to(&mut self, most: Duration) -> Duration {
        let most = usize::try_from(most.as_millis()).unwrap_or(usize::MAX);
        Duration::from_millis(u64::try_from(self.below(most.saturating_add(1))).unwrap_or(0))
    }

    /// Brings a list into another order.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
