"""What the Python programs share: the conversation with measure.py, the payload, and the clock's arithmetic.

A program is started as `PROGRAM URL WORKLOAD CONCURRENCY SECONDS POLL` and answers with lines of JSON:
`up` when its schema stands, `ready` when its load runs, and after the line `go` on its standard input one
last line with what it counted. Then it stays, so that its CPU time can be read, until it is ended or its
standard input ends.
"""

import json
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise

# Text that compresses no better than text does; every step stores it.
PAYLOAD = random.Random(1).randbytes(512).hex()

# Steps of a run, of the serial workflow, and messages of the growing conversation.
RUN_STEPS = 10
SERIAL_STEPS = 200
SERIAL_RUNS = 3
MESSAGES = 1600

# Workflows parked before the first completion, and how long completions are sent.
PARKED = 100
PARK_SECONDS = 1.5
RESUME_SECONDS = 6

# Load that runs before the count begins: connections, caches, and the first poll of a queue.
WARM_SECONDS = 1.5

# Clients that enqueue, in one process.
CREATORS = 4


@dataclass
class Cell:
    """One measurement: a workload at a concurrency."""

    url: str
    workload: str
    concurrency: int
    seconds: float
    poll: float | None


def cell() -> Cell:
    """The measurement that the arguments ask for. A poll of `default` is the peer's own."""
    url, workload, concurrency, seconds, poll = sys.argv[1:6]
    return Cell(url, workload, int(concurrency), float(seconds), None if poll == "default" else float(poll))


_go = threading.Event()


def _listen() -> None:
    for line in sys.stdin:
        if line.strip() == "go":
            _go.set()
    os._exit(1)


def say(**what) -> None:
    """One line to measure.py."""
    print(json.dumps(what), flush=True)


def up() -> None:
    """The schema stands; other processes of this peer may start."""
    threading.Thread(target=_listen, daemon=True).start()
    say(up=True)


def until_go() -> None:
    """Says that the load runs and waits for the start of the count."""
    say(ready=True)
    _go.wait()


def finish(**counted) -> None:
    """Says what was counted and stays."""
    say(**counted)
    threading.Event().wait()


class Steps:
    """How many steps have run, in all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def measure(self, seconds: float) -> None:
        """Counts for so long, and reports."""
        time.sleep(WARM_SECONDS)
        until_go()
        before, began = self._count, time.perf_counter()
        time.sleep(seconds)
        finish(steps=self._count - before, seconds=time.perf_counter() - began)


def finish_serial(seconds: list[float]) -> None:
    """Reports the times of serial workflows."""
    finish(steps=SERIAL_STEPS * len(seconds), seconds=sum(seconds))


def pause(cell: Cell, completion: int) -> float:
    """Seconds to wait after a completion: from 10 ms on, spread evenly over what a poll may be."""
    return 0.010 + completion * 7 % 20 * (0.0125 if cell.poll is None else 0.001)


def finish_resume(delays: list[float], seconds: float) -> None:
    """Reports the delays, in seconds, between completions and next steps."""
    finish(steps=len(delays), seconds=seconds, delays_ms=[round(delay * 1000, 3) for delay in delays])


def finish_growth(began: list[float]) -> None:
    """Reports time per step at messages 100 and 1,600 from when each message's step began."""

    def at(message: int) -> float:
        window = began[message - 41 : message]
        took = sorted(later - earlier for earlier, later in pairwise(window))
        # Others share the cores: the lower quartile is what the work itself takes.
        return took[len(took) // 4] * 1000

    finish(steps=len(began), seconds=began[-1] - began[0], early_ms=at(100), late_ms=at(len(began)))
