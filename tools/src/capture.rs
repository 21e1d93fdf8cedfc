//! What is kept of a stream that may never end: its head, its tail and its length.

/// How many bytes of a stream's end are kept.
pub(crate) const TAIL: usize = 8 * 1024;

/// Bytes of a stream, bounded.
#[derive(Debug)]
pub(crate) struct Capture {
    limit: usize,
    head: Vec<u8>,
    tail: Vec<u8>,
    total: u64,
}

impl Capture {
    /// Keeps the first `limit` bytes and the last [`TAIL`].
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, head: Vec::new(), tail: Vec::new(), total: 0 }
    }

    /// Takes the next bytes of the stream.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = self.limit - self.head.len();
        self.head.extend_from_slice(&bytes[..bytes.len().min(room)]);
        let last = &bytes[bytes.len().saturating_sub(TAIL)..];
        // Trimmed at twice the size only, so that small writes don't shift the whole tail each time.
        if self.tail.len() + last.len() > 2 * TAIL {
            let keep = TAIL - last.len();
            self.tail.drain(..self.tail.len() - keep);
        }
        self.tail.extend_from_slice(last);
    }

    /// How long the stream was.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The head, whole characters only where the stream went on.
    pub(crate) fn head(&self) -> &[u8] {
        if self.total > self.head.len() as u64 { without_partial_end(&self.head) } else { &self.head }
    }

    /// How many bytes [`Self::head`] lacks.
    pub(crate) fn cut(&self) -> u64 {
        self.total - self.head().len() as u64
    }

    /// The last [`TAIL`] bytes, starting at a whole character, and how many came before them.
    pub(crate) fn tail(&self) -> (&[u8], u64) {
        let mut tail = &self.tail[self.tail.len().saturating_sub(TAIL)..];
        if self.total > tail.len() as u64 {
            let partial = tail.iter().take(3).take_while(|byte| is_continuation(**byte)).count();
            tail = &tail[partial..];
        }
        (tail, self.total - tail.len() as u64)
    }
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// Leaves out a UTF-8 sequence that the end cuts in two.
fn without_partial_end(bytes: &[u8]) -> &[u8] {
    let trailing = bytes.iter().rev().take(3).take_while(|byte| is_continuation(**byte)).count();
    let Some(lead) = bytes.len().checked_sub(trailing + 1) else { return bytes };
    let length = match bytes[lead] {
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => 1,
    };
    if length > trailing + 1 { &bytes[..lead] } else { bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_and_tail_are_bounded_and_end_at_characters() {
        let mut capture = Capture::new(4);
        for _ in 0..TAIL {
            capture.push("é€".as_bytes());
        }
        assert_eq!(capture.total(), 5 * TAIL as u64);
        assert_eq!(capture.head(), "é".as_bytes());
        assert_eq!(capture.cut(), 5 * TAIL as u64 - 2);
        let (tail, before) = capture.tail();
        assert!(std::str::from_utf8(tail).is_ok() && tail.len() > TAIL - 4 && tail.len() <= TAIL);
        assert_eq!(before + tail.len() as u64, capture.total());
        assert!(capture.tail.len() <= 2 * TAIL);
    }

    #[test]
    fn what_fits_is_whole_even_when_it_is_no_text() {
        let mut capture = Capture::new(4);
        capture.push(b"ab\xE2\x82");
        assert_eq!((capture.head(), capture.cut()), (b"ab\xE2\x82".as_slice(), 0));
        assert_eq!(capture.tail(), (b"ab\xE2\x82".as_slice(), 0));
        capture.push(b"\xAC");
        assert_eq!((capture.head(), capture.cut()), (b"ab".as_slice(), 3));
        let mut large = Capture::new(0);
        large.push(&vec![b'x'; 5 * TAIL]);
        assert_eq!(large.tail(), (vec![b'x'; TAIL].as_slice(), 4 * TAIL as u64));
    }
}
