//! The hints that wait, and how they are packed into payloads.

use std::collections::{HashSet, VecDeque};

use super::NotifierStats;

/// Longest payload in bytes; Postgres takes less than 8,000.
pub const MAX_PAYLOAD: usize = 7_900;
/// How many items wait at most; the oldest give way.
pub const MAX_ITEMS: usize = 10_000;
/// How many bytes wait at most; the oldest give way.
pub const MAX_BYTES: usize = 8 * 1024 * 1024;
/// How many payloads one statement carries at most.
const MAX_BATCH: usize = 64;

/// What a hint is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// A run became due or was woken; items name its agent or session.
    Runs,
    /// A session has new events; items are session ids.
    Events,
    /// Pieces of text as a model writes them; items are JSON values and aren't stored anywhere.
    Deltas,
}

impl Channel {
    /// Every channel.
    pub const ALL: [Channel; 3] = [Channel::Runs, Channel::Events, Channel::Deltas];

    /// The channel's name on the server.
    pub fn name(self) -> &'static str {
        match self {
            Channel::Runs => "holdfast_runs",
            Channel::Events => "holdfast_events",
            Channel::Deltas => "holdfast_deltas",
        }
    }

    /// The channel of a name on the server.
    pub fn of_name(name: &str) -> Option<Channel> {
        Self::ALL.into_iter().find(|channel| channel.name() == name)
    }

    /// Bytes around the items of a payload.
    fn frame(self) -> usize {
        if self == Channel::Deltas { 2 } else { 0 }
    }

    fn accepts(self, item: &str) -> bool {
        let fits = !item.is_empty() && item.len() + self.frame() <= MAX_PAYLOAD;
        fits && (self == Channel::Deltas || !item.contains(','))
    }

    /// Takes a payload apart into its items; none if it isn't one of ours.
    pub(crate) fn items(self, payload: &str) -> Option<Vec<String>> {
        if self != Channel::Deltas {
            return Some(payload.split(',').filter(|item| !item.is_empty()).map(str::to_owned).collect());
        }
        let items: Vec<Box<serde_json::value::RawValue>> = serde_json::from_str(payload).ok()?;
        Some(items.iter().map(|item| item.get().to_owned()).collect())
    }
}

/// Items in order of arrival.
#[derive(Debug, Default)]
pub(super) struct Queue {
    items: VecDeque<(Channel, String)>,
    /// The waiting items of the channels whose items aren't repeated.
    known: HashSet<(Channel, String)>,
    bytes: usize,
    /// How many of the waiting items wake workers.
    runs: usize,
    /// Items taken out for sending, neither sent nor taken back yet.
    in_flight: usize,
    pub(super) stats: NotifierStats,
}

/// What one statement carries.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) payloads: Vec<(Channel, String)>,
    items: Vec<(Channel, String)>,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether a worker waits for one of the items.
    pub(super) fn urgent(&self) -> bool {
        self.runs > 0
    }

    /// How many accepted items were sent or dropped.
    pub(super) fn settled(&self) -> u64 {
        self.stats.accepted - u64::try_from(self.items.len() + self.in_flight).unwrap_or(0)
    }

    pub(super) fn push(&mut self, channel: Channel, item: String) {
        if !channel.accepts(&item) {
            self.stats.dropped += 1;
            return;
        }
        if channel != Channel::Deltas && !self.known.insert((channel, item.clone())) {
            self.stats.deduplicated += 1;
            return;
        }
        self.stats.accepted += 1;
        self.bytes += item.len();
        self.runs += usize::from(channel == Channel::Runs);
        self.items.push_back((channel, item));
        self.make_room();
    }

    fn make_room(&mut self) {
        while self.items.len() > MAX_ITEMS || self.bytes > MAX_BYTES {
            if self.pop().is_none() {
                return;
            }
            self.stats.dropped += 1;
        }
    }

    fn pop(&mut self) -> Option<(Channel, String)> {
        let one = self.items.pop_front()?;
        self.known.remove(&one);
        self.bytes -= one.1.len();
        self.runs -= usize::from(one.0 == Channel::Runs);
        Some(one)
    }

    /// Takes what one statement can carry, or none if nothing waits. An item that arrives again from now
    /// on is queued again: what it tells of may be newer than what was taken.
    pub(super) fn take(&mut self) -> Option<Batch> {
        let mut batch = Batch { payloads: Vec::new(), items: Vec::new() };
        let mut open: [Option<String>; Channel::ALL.len()] = [const { None }; Channel::ALL.len()];
        while let Some((channel, item)) = self.items.front() {
            let channel = *channel;
            let slot = &mut open[channel as usize];
            let full =
                slot.as_ref().is_some_and(|text| text.len() + 1 + item.len() + channel.frame() > MAX_PAYLOAD);
            if full {
                batch.payloads.extend(slot.take().map(|text| (channel, framed(channel, &text))));
            }
            if batch.payloads.len() + Channel::ALL.len() > MAX_BATCH {
                break;
            }
            match slot {
                Some(text) => {
                    text.push(',');
                    text.push_str(item);
                }
                None => *slot = Some(item.clone()),
            }
            batch.items.extend(self.pop());
        }
        for channel in Channel::ALL {
            batch
                .payloads
                .extend(open[channel as usize].take().map(|text| (channel, framed(channel, &text))));
        }
        // What a model wrote comes before the news that it is done.
        batch.payloads.sort_by_key(|(channel, _)| *channel != Channel::Deltas);
        self.in_flight = batch.items.len();
        (!batch.items.is_empty()).then_some(batch)
    }

    pub(super) fn sent(&mut self, batch: &Batch) {
        self.in_flight = 0;
        self.stats.batches += 1;
        self.stats.sent += u64::try_from(batch.items.len()).unwrap_or(0);
        self.stats.payloads += u64::try_from(batch.payloads.len()).unwrap_or(0);
    }

    /// Puts the items of a batch that may not have arrived back to the front. Deltas are dropped: sent
    /// twice, they would repeat text.
    pub(super) fn take_back(&mut self, batch: Batch) {
        self.in_flight = 0;
        for (channel, item) in batch.items.into_iter().rev() {
            if channel == Channel::Deltas {
                self.stats.dropped += 1;
            } else if self.known.insert((channel, item.clone())) {
                self.bytes += item.len();
                self.runs += usize::from(channel == Channel::Runs);
                self.items.push_front((channel, item));
            } else {
                self.stats.deduplicated += 1;
            }
        }
        self.make_room();
    }

    pub(super) fn drop_deltas(&mut self) {
        let before = self.items.len();
        self.items.retain(|(channel, _)| *channel != Channel::Deltas);
        self.bytes = self.items.iter().map(|(_, item)| item.len()).sum();
        self.stats.dropped += u64::try_from(before - self.items.len()).unwrap_or(0);
    }
}

fn framed(channel: Channel, items: &str) -> String {
    if channel == Channel::Deltas { format!("[{items}]") } else { items.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(queue: &mut Queue) -> Vec<(Channel, String)> {
        let mut payloads = Vec::new();
        while let Some(batch) = queue.take() {
            queue.sent(&batch);
            assert!(batch.payloads.len() <= MAX_BATCH);
            payloads.extend(batch.payloads);
        }
        payloads
    }

    #[test]
    fn items_are_packed_up_to_the_bound_and_come_apart_again() {
        let mut queue = Queue::default();
        let keys: Vec<String> = (0..9_000).map(|n| format!("key-{n:0>70}")).collect();
        for key in &keys {
            queue.push(Channel::Runs, key.clone());
            queue.push(Channel::Runs, key.clone());
        }
        assert_eq!(queue.stats.deduplicated, 9_000);
        let payloads = drain(&mut queue);
        assert!(payloads.len() > 70 && payloads.iter().all(|(_, payload)| payload.len() <= MAX_PAYLOAD));
        let back: Vec<String> =
            payloads.iter().flat_map(|(channel, payload)| channel.items(payload).expect("ours")).collect();
        assert_eq!(back, keys);
        assert_eq!((queue.settled(), queue.stats.sent), (9_000, 9_000));
        assert!(queue.stats.batches > 1);
    }

    #[test]
    fn deltas_keep_commas_repeats_and_order() {
        let mut queue = Queue::default();
        let deltas = [r#"{"text":"a, b"}"#, r#"[1,2]"#, r#"[1,2]"#];
        for delta in deltas {
            queue.push(Channel::Deltas, delta.to_owned());
        }
        let payloads = drain(&mut queue);
        assert_eq!(payloads, [(Channel::Deltas, r#"[{"text":"a, b"},[1,2],[1,2]]"#.to_owned())]);
        assert_eq!(Channel::Deltas.items(&payloads[0].1).expect("ours"), deltas);
        assert_eq!(Channel::Deltas.items("no JSON"), None);
    }

    #[test]
    fn deltas_go_before_the_news_of_a_batch() {
        let mut queue = Queue::default();
        for n in 0..200 {
            queue.push(Channel::Events, format!("{n:0>100}"));
            queue.push(Channel::Deltas, format!("\"{n:0>100}\""));
        }
        let batch = queue.take().expect("a batch");
        let channels: Vec<Channel> = batch.payloads.iter().map(|(channel, _)| *channel).collect();
        assert!(channels.len() > 4);
        assert!(channels.is_sorted_by_key(|channel| *channel != Channel::Deltas), "{channels:?}");
        let texts: Vec<String> = batch
            .payloads
            .iter()
            .filter(|(channel, _)| *channel == Channel::Deltas)
            .flat_map(|(channel, payload)| channel.items(payload).expect("ours"))
            .collect();
        assert!(texts.is_sorted() && texts.len() == 200);
    }

    #[test]
    fn what_no_payload_can_carry_is_dropped() {
        let mut queue = Queue::default();
        queue.push(Channel::Events, "x".repeat(MAX_PAYLOAD));
        queue.push(Channel::Events, "x".repeat(MAX_PAYLOAD + 1));
        queue.push(Channel::Deltas, "1".repeat(MAX_PAYLOAD - 1));
        queue.push(Channel::Events, "a,b".to_owned());
        queue.push(Channel::Events, String::new());
        assert_eq!((queue.stats.accepted, queue.stats.dropped), (1, 4));
        assert_eq!(drain(&mut queue)[0].1.len(), MAX_PAYLOAD);
    }

    #[test]
    fn a_full_queue_drops_its_oldest() {
        let mut queue = Queue::default();
        for n in 0..MAX_ITEMS + 5 {
            queue.push(Channel::Runs, n.to_string());
        }
        assert_eq!((queue.len(), queue.stats.dropped, queue.settled()), (MAX_ITEMS, 5, 5));
        queue.push(Channel::Runs, "0".to_owned());
        assert_eq!(queue.stats.deduplicated, 0, "a dropped item isn't known any more");

        let mut queue = Queue::default();
        for _ in 0..2_000 {
            queue.push(Channel::Deltas, "7".repeat(7_000));
        }
        assert!(queue.bytes <= MAX_BYTES && queue.stats.dropped > 0);
    }

    #[test]
    fn a_failed_batch_comes_back_without_its_deltas_and_in_order() {
        let mut queue = Queue::default();
        for item in ["a", "b"] {
            queue.push(Channel::Events, item.to_owned());
            queue.push(Channel::Deltas, "1".to_owned());
        }
        let batch = queue.take().expect("a batch");
        assert_eq!(queue.settled(), 0);
        queue.push(Channel::Events, "b".to_owned());
        queue.push(Channel::Events, "c".to_owned());
        queue.take_back(batch);
        assert_eq!((queue.stats.dropped, queue.stats.deduplicated), (2, 1));
        assert_eq!(drain(&mut queue), [(Channel::Events, "a,b,c".to_owned())]);
        assert_eq!(queue.settled(), queue.stats.accepted);
    }

    #[test]
    fn an_outage_drops_the_deltas_that_wait() {
        let mut queue = Queue::default();
        queue.push(Channel::Deltas, "1".to_owned());
        queue.push(Channel::Runs, "a".to_owned());
        queue.drop_deltas();
        assert_eq!(drain(&mut queue), [(Channel::Runs, "a".to_owned())]);
        assert_eq!(queue.bytes, 0);
    }
}
