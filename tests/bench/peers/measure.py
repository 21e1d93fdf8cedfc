"""Runs every peer × workload in alternating rounds and prints the medians; `run` starts it.

Each measurement is a fresh database and fresh processes. A program says `up` when its schema stands and
`ready` when its load runs; when all of a peer's processes are ready, all are told `go`, and CPU time is read
then and when the last has answered.
"""

import argparse
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

from report import Report

HERE = os.path.dirname(os.path.abspath(__file__))

# Seconds that a throughput is counted, and where a queue is polled each second, so that a poll more or less
# counts little; and that one measurement may take from start to end.
SECONDS = 3
SECONDS_SLOW_POLL = 8
LIMIT = 90

# A poll that costs an idle worker little and adds little to a delay.
POLL = "0.01"

TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cell:
    """One measurement of one peer."""

    workload: str
    concurrency: int = 1
    poll: str = POLL
    processes: int = 1


@dataclass
class Peer:
    """A system: what it is called, how its program is started, and what is measured."""

    label: str
    command: list[str]
    cells: list[Cell]
    # Why a workload is not measured.
    no_way: dict[str, str] = field(default_factory=dict)
    # Keeps its own log instead of Postgres.
    own_log: bool = False


def pinned(file: str, name: str) -> str:
    """The version that a manifest names."""
    with open(f"{HERE}/{file}") as text:
        return re.search(rf'^ *"?{re.escape(name)}"?(?:==| = "=|: ")([^"\s]+)', text.read(), re.MULTILINE)[1]


def peers(cache: str) -> dict[str, Peer]:
    """What can be measured. Programs in Python get two processes for their load, as one can use one core."""

    def load(workload: str, processes: int, *polls: str) -> list[Cell]:
        cells = [Cell(workload, concurrency, processes=processes) for concurrency in (16, 64)]
        return cells + [Cell(workload, 64, poll, processes) for poll in polls]

    def python(program: str) -> list[str]:
        return [f"{cache}/venv/bin/python", f"{HERE}/{program}"]

    dbos, absurd, langgraph, saver = (
        pinned("requirements.txt", name)
        for name in ("dbos", "absurd-sdk", "langgraph", "langgraph-checkpoint-postgres")
    )
    server, sdk = (pinned("package.json", f"@restatedev/restate-{part}") for part in ("server", "sdk"))
    single = [Cell("serial"), Cell("resume"), Cell("growth")]
    return {
        "dbos-rust": Peer(
            f"dbos {pinned('dbos-rust/Cargo.toml', 'dbos')} (Rust)",
            [f"{cache}/target/release/dbos-peer"],
            single + load("direct", 1) + load("queue", 1, "default"),
        ),
        "dbos-python": Peer(
            f"dbos {dbos} (Python)",
            python("dbos_peer.py"),
            single + load("direct", 2) + load("queue", 2, "default"),
        ),
        "absurd": Peer(
            f"absurd-sdk {absurd} (Python)",
            python("absurd_peer.py"),
            single + [Cell("resume", poll="default")] + load("queue", 2),
            {"direct": "a task runs only from its queue"},
        ),
        "langgraph": Peer(
            f"langgraph {langgraph}, checkpoint-postgres {saver} (Python)",
            python("langgraph_peer.py"),
            single + [Cell("growth-delta")] + load("direct", 2),
            {"queue": "the library runs a graph in the caller's process and has no queue"},
        ),
        "restate": Peer(
            f"restate-server {server}, sdk {sdk} (Node)",
            ["node", "restate.mjs"],
            single + load("queue", 1),
            {"direct": "every invocation goes through its log"},
            own_log=True,
        ),
    }


class Failed(Exception):
    """A measurement did not come about, and why."""


def cpu(root: int) -> float:
    """Seconds of CPU that a process, its descendants and the children it has waited for have used."""
    parents, ticks = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    # The name, in parentheses, may contain anything.
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue  # gone by now
            parents[int(name)], ticks[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))

    def belongs(pid: int) -> bool:
        while pid != root and pid in parents:
            pid = parents[pid]
        return pid == root

    return sum(used for pid, used in ticks.items() if belongs(pid)) / TICK


def busy() -> float:
    """Seconds of CPU that the machine has used."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4] - fields[7]) / TICK


class Program:
    """One process of a peer, and what it says."""

    def __init__(self, command: list[str], cwd: str) -> None:
        self._errors = tempfile.TemporaryFile()
        environment = dict(os.environ, LANGSMITH_TRACING="false", NODE_NO_WARNINGS="1")
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A group of its own, so that its children end with it.
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            # Some libraries greet on standard output.
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)

    def hear(self, key: str, deadline: float) -> dict:
        """The next line, which must have this key."""
        try:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise Failed(f"no answer within {LIMIT} s (waited for `{key}`)") from None
        if line is None:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            raise Failed(said[-1] if said else "ended without a word")
        said = json.loads(line)
        if key not in said:
            raise Failed(f"said {line.strip()} instead of `{key}`")
        return said

    def go(self) -> None:
        """Starts the count."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Ends it and its children."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._errors.close()


class Bench:
    """Where things are, and what has been measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.raw = open(options.raw, "w")

    def sql(self, statement: str) -> None:
        """One statement on the throwaway server."""
        where = ["-h127.0.0.1", f"-p{self.options.port}", "-Upostgres"]
        command = [self.options.psql, "-XqAt", *where, "-c", statement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(done.stderr.strip())

    def record(self, **line) -> dict:
        """Writes a raw line."""
        self.raw.write(json.dumps(line) + "\n")
        self.raw.flush()
        return line

    def measure(self, peer: Peer, cell: Cell) -> dict:
        """One measurement in fresh processes on a fresh database."""
        if peer.own_log:
            folder = tempfile.mkdtemp(dir=self.options.scratch)
            try:
                return self._measure(peer, cell, folder, f"{self.options.cache}/node")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        self.sql("CREATE DATABASE peer")
        try:
            self.sql("CHECKPOINT")
            url = f"postgresql://postgres@127.0.0.1:{self.options.port}/peer"
            return self._measure(peer, cell, url, self.options.scratch)
        finally:
            self.sql("DROP DATABASE peer WITH (FORCE)")

    def _measure(self, peer: Peer, cell: Cell, where: str, cwd: str) -> dict:
        concurrency, deadline = cell.concurrency // cell.processes, time.monotonic() + LIMIT
        seconds = SECONDS if cell.poll == POLL else SECONDS_SLOW_POLL
        arguments = [where, cell.workload, str(concurrency), str(seconds), cell.poll]
        programs: list[Program] = []
        try:
            server = self.options.postgres
            for _ in range(cell.processes):
                programs.append(Program(peer.command + arguments, cwd))
                server = programs[-1].hear("up", deadline).get("server", server)
            for program in programs:
                program.hear("ready", deadline)

            def used() -> tuple[float, float, float]:
                of_server, of_all = cpu(server), sum(cpu(program.pid) for program in programs)
                return of_server, of_all - (of_server if peer.own_log else 0), busy()

            before, began = used(), time.monotonic()
            for program in programs:
                program.go()
            counts = [program.hear("steps", deadline) for program in programs]
            after, took = used(), time.monotonic() - began
        finally:
            for program in programs:
                program.end()
        of_server, of_client, of_all = (later - earlier for earlier, later in zip(before, after, strict=True))
        steps = sum(count["steps"] for count in counts)
        if steps == 0:
            raise Failed("no step ran")
        return summary(counts) | {
            "steps": steps,
            "server_us": of_server / steps * 1e6,
            "client_us": of_client / steps * 1e6,
            # CPU that others used meanwhile, in cores.
            "foreign": max(of_all - of_server - of_client, 0) / took,
        }

    def engine(self) -> list[dict]:
        """What Holdfast's own benchmark prints, as measurements."""
        # One program of `bench`, or a program of its own.
        program = ["engine"] if os.path.basename(self.options.engine) == "bench" else []
        command = [self.options.engine, *program, "1000"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, errors = process.communicate(timeout=3 * LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"the engine took more than {3 * LIMIT} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        if process.returncode != 0:
            raise Failed((errors.strip() or out.strip() or "the engine failed").splitlines()[-1])
        return list(engine_lines(out))


def summary(counts: list[dict]) -> dict:
    """The figures of a measurement, over its processes."""
    per_second = sum(count["steps"] / count["seconds"] for count in counts)
    figures = {"steps_per_s": per_second, "ms_per_step": 1000 / per_second if per_second else None}
    for count in counts:
        if "delays_ms" in count:
            delays = sorted(count["delays_ms"])
            figures |= {
                "p50_ms": quantile(delays, 0.5),
                "p99_ms": quantile(delays, 0.99),
                "delays_ms": delays,
            }
        if "early_ms" in count:
            figures |= {key: count[key] for key in ("early_ms", "late_ms")}
            figures["growth"] = count["late_ms"] / count["early_ms"]
    return figures


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    return ordered[math.ceil(len(ordered) * share) - 1]


def engine_lines(out: str):
    """Measurements from the lines of `bench engine`."""
    single = re.search(r"raw, one client, a statement a step +(\d+) steps/s +([\d.]+) ms/step", out)
    if single:
        yield {"peer": "raw", "workload": "serial", "concurrency": 1, "ms_per_step": float(single[2])}
    fenced = re.search(r"raw, one fenced statement a step +(\d+) steps/s", out)
    pattern = (
        r"concurrency +(\d+): +(\d+) steps/s .*? ([\d.]+) ms/step/run.*\n"
        r" +CPU/step: server (\d+) µs, workers (\d+) µs, clients (\d+) µs"
    )
    for found in re.finditer(pattern, out):
        concurrency, per_second, ms, server, workers, clients = (float(group) for group in found.groups())
        if concurrency not in (1, 16, 64):
            continue
        yield {
            "peer": "holdfast",
            "workload": "queue" if concurrency > 1 else "serial",
            "concurrency": int(concurrency),
            "steps_per_s": per_second,
            "ms_per_step": ms,
            "server_us": server,
            "client_us": workers + clients,
        }
        if fenced and concurrency > 1:
            yield {
                "peer": "raw",
                "workload": "queue",
                "concurrency": int(concurrency),
                "steps_per_s": float(fenced[1]),
            }


def main() -> None:
    """Measures in rounds, then prints."""
    options = arguments()
    # Ends through the `finally`s, which end what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bench, began = Bench(options), time.monotonic()
    chosen = {name: peer for name, peer in peers(options.cache).items() if name in options.only.split(",")}
    missing = dict(text.split("=", 1) for text in options.missing)
    lines: list[dict] = []
    for turn in range(1, options.rounds + 1):
        for name, peer in chosen.items():
            for cell in peer.cells:
                if cell.workload.removesuffix("-delta") not in options.workloads.split(","):
                    continue
                key = {"round": turn, "peer": name, **vars(cell)}
                try:
                    if name in missing:
                        raise Failed(missing[name])
                    lines.append(bench.record(**key, **bench.measure(peer, cell)))
                except (Failed, OSError) as error:
                    lines.append(bench.record(**key, error=str(error)))
                progress(began, key)
        if options.engine:
            try:
                lines += [bench.record(round=turn, **line) for line in bench.engine()]
            except (Failed, OSError) as error:
                key = {"round": turn, "peer": "holdfast", "workload": "queue", "concurrency": 64}
                lines.append(bench.record(**key, error=str(error)))
    print(Report(chosen, lines).text())
    print(f"raw lines: {options.raw}", file=sys.stderr)


def progress(began: float, key: dict) -> None:
    """Says on standard error what has just been measured."""
    what = f"{key['peer']} {key['workload']} {key['concurrency']} poll {key['poll']}"
    print(f"{time.monotonic() - began:6.0f} s  round {key['round']}  {what}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """What `run` passes."""
    parser = argparse.ArgumentParser()
    for name in ("only", "workloads", "raw", "cache", "scratch", "psql", "engine"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rounds", "postgres", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--missing", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
