"""Markdown tables of medians over the rounds."""

import os
import statistics

LABELS = {
    "holdfast": "**Holdfast**",
    "raw": "no engine: one fenced statement per step (32 clients, serial: 1)",
}

# What a workload is for a peer, where its name doesn't say it.
WAYS = {
    ("holdfast", "serial"): "queue",
    ("absurd", "serial"): "queue",
    ("restate", "serial"): "ingress",
    ("restate", "queue"): "ingress",
    ("dbos-rust", "resume"): "send → recv",
    ("dbos-python", "resume"): "send → recv",
    ("absurd", "resume"): "emit_event → await_event",
    ("langgraph", "resume"): "interrupt → Command(resume)",
    ("restate", "resume"): "awakeable",
    ("langgraph", "growth"): "list with a reducer",
    ("langgraph", "growth-delta"): "list in a DeltaChannel (beta)",
}
POLLED = [("dbos-rust", "queue"), ("dbos-python", "queue"), ("absurd", "queue"), ("absurd", "resume")]


class Row:
    """All rounds of one measurement."""

    def __init__(self, lines: list[dict]) -> None:
        self.first = lines[0]
        self.errors = [line["error"] for line in lines if "error" in line]
        self._lines = {line["round"]: line for line in lines if "error" not in line}

    def values(self, figure: str) -> dict[int, float]:
        """A figure by round."""
        return {turn: line[figure] for turn, line in self._lines.items() if line.get(figure) is not None}

    def median(self, figure: str, digits: int) -> str:
        """A figure's median, and how far the rounds spread."""
        values = self.values(figure).values()
        if not values:
            return "–"
        text = f"{statistics.median(values):,.{digits}f}"
        return text if len(values) == 1 else f"{text} ({min(values):,.{digits}f} – {max(values):,.{digits}f})"

    def plain(self, figure: str, digits: int = 0) -> str:
        """A figure's median alone."""
        values = self.values(figure).values()
        return f"{statistics.median(values):,.{digits}f}" if values else "–"

    def ratio(self, figure: str, reference: "Row | None") -> str:
        """The median of the rounds' ratios to the reference's value in the same round."""
        other = reference.values(figure) if reference else {}
        ratios = [value / other[turn] for turn, value in self.values(figure).items() if other.get(turn)]
        return f"{statistics.median(ratios):.2f}" if ratios else "–"


class Report:
    """The tables of one run."""

    def __init__(self, peers: dict, lines: list[dict]) -> None:
        self._peers = peers
        groups: dict[tuple, list[dict]] = {}
        for line in lines:
            key = tuple(line.get(name) for name in ("peer", "workload", "concurrency", "poll"))
            groups.setdefault(key, []).append(line)
        self._rows = [Row(group) for group in groups.values()]

    def _select(self, *workloads: str, concurrency: int = 1) -> list[Row]:
        rows = [row for row in self._rows if row.first["workload"] in workloads]
        rows = [row for row in rows if row.first["concurrency"] == concurrency]
        return sorted(rows, key=lambda row: ["raw", "holdfast", *self._peers].index(row.first["peer"]))

    def _label(self, peer: str) -> str:
        return LABELS.get(peer) or self._peers[peer].label

    def _way(self, row: Row) -> str:
        peer, workload, poll = (row.first.get(key) for key in ("peer", "workload", "poll"))
        if peer == "raw":
            return "raw"
        usual = {"serial": "direct", "growth": "steps of one workflow"}.get(workload, workload)
        way = WAYS.get((peer, workload), usual)
        if (peer, workload) in POLLED:
            way += ", default poll" if poll == "default" else f", poll {float(poll) * 1000:.0f} ms"
        return way

    def _table(self, title: str, rows: list[Row], figure: str, columns: dict, *workloads: str) -> str:
        """One table; the ratios are of `figure`, to Holdfast if it took part, else to the first peer."""
        if not rows:
            return ""
        order = sorted(rows, key=lambda row: row.first["peer"] != "holdfast")
        reference = next((row for row in order if row.first["peer"] != "raw" and row.values(figure)), None)
        peer = reference.first["peer"] if reference else "–"
        name = "Holdfast" if peer == "holdfast" else peer
        heads = ["system", "way", *columns, f"÷ {name}", "server µs/step", "client µs/step"]
        body = []
        for row in rows:
            head = [self._label(row.first["peer"]), self._way(row)]
            if row.values(figure):
                cells = [write(row) for write in columns.values()] + [row.ratio(figure, reference)]
                cells += [row.plain("server_us"), row.plain("client_us")]
                if row.errors:
                    head[1] += f" ({len(row.errors)} rounds failed: {clean(row.errors[0])})"
            else:
                cells = [f"failed: {clean(row.errors[0])}"] + [""] * (len(columns) + 2)
            body.append(head + cells)
        for system in self._peers.values():
            blank = [""] * (len(columns) + 2)
            for workload in workloads:
                if workload in system.no_way:
                    body.append([system.label, workload, f"no such way: {system.no_way[workload]}", *blank])
        lines = [heads, ["---"] * 2 + ["---:"] * (len(heads) - 2), *body]
        return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def text(self) -> str:
        """All tables."""
        ms = {"ms/step": lambda row: row.median("ms_per_step", 2)}
        tables = [self._table("One workflow of 200 steps", self._select("serial"), "ms_per_step", ms)]
        for concurrency in (16, 64):
            rows = self._select("direct", "queue", concurrency=concurrency)
            per_second = {"steps/s": lambda row: row.median("steps_per_s", 0)}
            title = f"Runs of ten steps, {concurrency} at once"
            tables.append(self._table(title, rows, "steps_per_s", per_second, "direct", "queue"))
        delays = {name: lambda row, key=f"{name}_ms": row.median(key, 1) for name in ("p50", "p99")}
        delays = {f"{name} ms": write for name, write in delays.items()}
        title = "From an external completion to the next step (µs are per completion)"
        tables.append(self._table(title, self._select("resume"), "p50_ms", delays))
        growth = {
            "ms at message 100": lambda row: row.plain("early_ms", 2),
            "ms at message 1,600": lambda row: row.plain("late_ms", 2),
            "late ÷ early": lambda row: row.median("growth", 2),
        }
        title = "A growing conversation of 1 KiB messages"
        tables.append(self._table(title, self._select("growth", "growth-delta"), "late_ms", growth))
        foreign = [value for row in self._rows for value in row.values("foreign").values()]
        if foreign:
            tables.append(
                f"Others on the machine used a median of {statistics.median(foreign):.2f} of its "
                f"{os.cpu_count()} cores while something was measured, {max(foreign):.2f} at most."
            )
        return "\n\n".join(table for table in tables if table)


def clean(text: str) -> str:
    """Text that a table's cell can hold."""
    return text.replace("|", "/").replace("\n", " ")[:160]
