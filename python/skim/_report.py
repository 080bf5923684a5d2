"""Statistics of compression on one rank: bytes, times and captured fractions, per bucket and in total."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from skim import _core

# A rank is slow if the others wait for it for half of the time, and worth a warning after a minute of that.
SLOW_SHARE, LASTING_S = 0.5, 60.0


@dataclasses.dataclass
class BucketReport:
    """Statistics of one bucket since it was formed. Bytes and seconds are this rank's totals."""

    n: int = 0  # entries
    steps: int = 0
    reduced: int = 0  # entries, summed over the steps
    dense_bytes: float = 0.0  # of a ring all-reduce of float32 in each of these steps
    dense_steps: int = 0
    k: int = 0  # entries asked for in the last step
    sent_bytes: int = 0
    received_bytes: int = 0
    select_s: float = 0.0
    exchange_s: float = 0.0
    apply_s: float = 0.0
    capture: float = 0.0  # fraction of |residual + gradient|^2 that was sent, summed over the steps
    decision: str = ""

    def add(self, r: _core.StepReport, decision: str, ranks: int) -> None:
        """Adds a step of this bucket, among so many ranks. decision: Reducer.decision of its slot."""
        self.n = r.n
        self.steps += 1
        self.reduced += r.n
        self.dense_bytes += 2 * (ranks - 1) / ranks * 4 * r.n
        self.dense_steps += r.dense
        self.k = r.k
        self.sent_bytes += r.sent_bytes
        self.received_bytes += r.received_bytes
        self.select_s += r.select_ns * 1e-9
        self.exchange_s += r.exchange_ns * 1e-9
        self.apply_s += r.apply_ns * 1e-9
        self.capture += r.capture
        self.decision = decision

    def cells(self) -> tuple[str, ...]:
        """A row of the table: means per step."""
        each = max(1, self.steps)
        return (
            str(self.n),
            "dense" if self.dense_steps == self.steps else str(self.k),
            _bytes(self.sent_bytes / each),
            f"{1e3 * self.select_s / each:.2f}",
            f"{1e3 * self.exchange_s / each:.2f}",
            f"{1e3 * self.apply_s / each:.2f}",
            f"{self.capture / each:.3f}",
            self.decision.split(" ")[0],
        )

    def join(self, other: BucketReport) -> None:
        """Adds a bucket that went through the same steps, as if both were one bucket."""
        self.dense_steps = min(self.dense_steps, other.dense_steps) if self.n else other.dense_steps
        n = self.n + other.n
        if n > 0:
            self.capture = (self.capture * self.n + other.capture * other.n) / n
        self.n = n
        self.steps = max(self.steps, other.steps)
        self.k += other.k
        self._add_costs(other)

    def follow(self, later: BucketReport) -> None:
        """Adds later steps of the same entries."""
        self.n, self.k = later.n, later.k
        self.steps += later.steps
        self.dense_steps += later.dense_steps
        self.capture += later.capture
        self._add_costs(later)

    def _add_costs(self, other: BucketReport) -> None:
        self.reduced += other.reduced
        self.dense_bytes += other.dense_bytes
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.select_s += other.select_s
        self.exchange_s += other.exchange_s
        self.apply_s += other.apply_s


@dataclasses.dataclass
class Report:
    """Statistics of one rank. str() gives a table, reasons() why exchange="auto" chose as it did."""

    rank: int
    size: int
    steps: int = 0
    skipped: int = 0  # steps that were taken back
    # The first steps, in which every parameter was a bucket because DDP's buckets were not settled yet, and those before a
    # state with other buckets was loaded.
    forming: BucketReport = dataclasses.field(default_factory=BucketReport)
    moved_bytes: int = 0  # between device and host, if the residuals are on a device
    # Total time from the last gradient of a step to the end of its exchange. Of an Aggregator, all of reduce(). On a GPU it
    # also has what the device still had to do when the last gradient was queued there.
    exposed_s: float = 0.0
    buckets: dict[int, BucketReport] = dataclasses.field(default_factory=dict)
    # By rank: the seconds that the median of the others waited for it, at least, out of compared_s. Of DDP and
    # LocalSteps, up to the last comparison.
    waited_s: list[float] = dataclasses.field(default_factory=list)
    compared_s: float = 0.0
    # What exchange="auto" chose for every bucket since this process began, trials included: for json.dump, and for
    # skim.attach(replay=...). Equal on all ranks.
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    _slow: int = dataclasses.field(default=-1, repr=False)  # the rank that was slow in the last interval
    _slow_s: float = dataclasses.field(default=0.0, repr=False)  # for so long without a break

    def compare(self, exposed_s: list[float], seconds: float) -> str:
        """Adds an interval of several steps. Returns a warning, once for each time that a rank is slow; "": none.

        exposed_s: that of every rank in the interval. The ranks wait for the slowest one, which itself waits least.
        """
        self.waited_s = self.waited_s or [0.0] * self.size
        self.compared_s += seconds
        slowest = min(range(self.size), key=exposed_s.__getitem__)
        others = exposed_s[:slowest] + exposed_s[slowest + 1 :]
        waited = statistics.median(others) - exposed_s[slowest]
        self.waited_s[slowest] += waited
        if waited < SLOW_SHARE * seconds:
            self._slow = -1
            return ""
        before = self._slow_s if self._slow == slowest else 0.0
        self._slow, self._slow_s = slowest, before + seconds
        if before >= LASTING_S or self._slow_s < LASTING_S:
            return ""
        return (
            f"skim: rank {slowest} has been slow for {self._slow_s:.0f} s: the others waited for it "
            f"{100 * waited / seconds:.0f} % of the time"
        )

    def add(self, slot: int, r: _core.StepReport, decision: str) -> None:
        """Adds a step of one bucket. slot: the bucket's number. decision: Reducer.decision of its slot."""
        self.buckets.setdefault(slot, BucketReport()).add(r, decision, self.size)

    def buckets_stand(self) -> None:
        """Call it when the buckets are settled. The statistics so far then count as `forming`."""
        so_far = BucketReport()
        for b in self.buckets.values():
            so_far.join(b)
        if self.buckets:
            self.forming.follow(so_far)
        self.buckets.clear()

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far, those of the first steps included."""
        return sum(b.sent_bytes for b in self._parts())

    @property
    def dense_bytes(self) -> float:
        """The bytes that ring all-reduces of float32 would have sent in these steps."""
        return sum(b.dense_bytes for b in self._parts())

    def _parts(self) -> list[BucketReport]:
        return [self.forming, *self.buckets.values()]

    @property
    def compression(self) -> float:
        """dense_bytes / sent_bytes; 1 if nothing was sent."""
        return self.dense_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def scalars(self) -> dict[str, float]:
        """Tag and value of each statistic for a TensorBoard writer. Bytes are totals; times are means per step."""
        each = max(1, self.steps)
        parts = self._parts()
        weights = sum(b.reduced for b in parts) or 1
        return {
            "sent_bytes": float(self.sent_bytes),
            "moved_bytes": float(self.moved_bytes),
            "compression": self.compression,
            "exposed_ms": 1e3 * self.exposed_s / each,
            "select_ms": 1e3 * sum(b.select_s for b in parts) / each,
            "exchange_ms": 1e3 * sum(b.exchange_s for b in parts) / each,
            "captured": sum(b.capture * b.n for b in parts) / weights,
            "steps_taken_back": float(self.skipped),
        }

    def reasons(self) -> str:
        """Why exchange="auto" chose what it chose: for each bucket the exchanges with their times, the chosen one first.

        "(measured)" marks a prediction of the cost model that this run has corrected.
        """
        return "\n".join(f"bucket {slot}: {b.decision}" for slot, b in sorted(self.buckets.items()) if b.decision)

    def __str__(self) -> str:
        """At most 100 columns, unless numbers are very long."""
        if not self.steps:
            return f"skim: rank {self.rank} of {self.size}: no step yet"
        taken_back = f" ({self.skipped} taken back)" if self.skipped else ""
        head = [
            f"skim: rank {self.rank} of {self.size}, {self.steps} steps{taken_back}: sent {_bytes(self.sent_bytes)}, "
            f"{self.compression:.1f} times less than dense",
            f"{1e3 * self.exposed_s / self.steps:.2f} ms a step not hidden by backward",
        ]
        if self.moved_bytes:
            head[-1] += f"; {_bytes(self.moved_bytes / self.steps)} a step between device and host"
        waited = sum(self.waited_s)
        if waited > 0.05 * self.compared_s:
            of = ", ".join(f"rank {r} {s:.1f} s" for r, s in enumerate(self.waited_s) if s >= 0.1 * waited)
            head.append(f"the ranks waited for slower ones in {waited:.1f} of {self.compared_s:.1f} s: {of}")
        rows: list[tuple[str, ...]] = [
            ("bucket", "entries", "k", "sent", "select ms", "exchange ms", "apply ms", "captured", "exchange")
        ]
        if self.forming.steps:
            rows.append(("forming", *self.forming.cells()))
        rows += [(str(slot), *b.cells()) for slot, b in sorted(self.buckets.items())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        table = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths)), row[-1]]).rstrip() for row in rows]
        foot = ["k: entries to send, in the last step. sent, times, captured (fraction of |g + residual|^2): a step."]
        if self.forming.steps:
            foot.append("forming: the steps before DDP had these buckets.")
        return "\n".join([*head, *table, *foot])


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if float(f"{count:.3g}") < 1000 or unit == "TB":  # as it is shown
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
