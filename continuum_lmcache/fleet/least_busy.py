"""The replicas of a fleet by how busy they are: the least busy one, and what each report says.

The order is a heap with one valid entry a replica at most, which is never above the replica's load. What is
sent to a replica raises its load and touches no heap: the entry is put right when it comes to the top. A
report that lowers the load pushes another entry, and the older one is dropped when it comes to the top.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NewType

from continuum_lmcache.errors import InvariantError

ReplicaId = NewType("ReplicaId", str)
REPORT_AGE_S = 3.0  # no new program, and no move, where the latest report is older
GONE_S = 60.0  # a replica without a report for so long is dropped; with its next report it is back
Load = tuple[int, int, ReplicaId]  # requests, programs at home


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at one moment."""

    replica: ReplicaId
    requests: int = 0  # waiting and running ones
    wait_s: float | None = None  # before a later turn's prompt is computed; None: the engine admits programs
    about: Mapping[str, int] = field(default_factory=dict)  # its rank and process, for the user


@dataclass(slots=True)
class ReplicaState:
    """One replica: its latest report, and what was sent there since."""

    report: ReplicaReport
    heard_s: float  # when the report came
    sent: int = 0  # turns
    sent_s: float = 0.0  # seconds to compute the contexts that moved there
    queued: Load | None = None  # its entry in the heap; None: its report was old

    @property
    def requests(self) -> int:
        return self.report.requests + self.sent

    @property
    def wait_s(self) -> float | None:
        """Before a later turn's prompt would be computed there."""
        return None if self.report.wait_s is None else self.report.wait_s + self.sent_s

    def is_fresh(self, now_s: float) -> bool:
        """Whether the report is new enough for new programs and moves."""
        return now_s - self.heard_s <= REPORT_AGE_S


class LeastBusy(OrderedDict[ReplicaId, ReplicaState]):
    """The replicas; those without a report for longest come first."""

    def __init__(self) -> None:
        super().__init__()
        self.homes: Counter[ReplicaId] = Counter()  # programs by home, which may be gone
        self._heap: list[Load] = []

    def on_report(self, now_s: float, report: ReplicaReport) -> None:
        """The first report adds a replica; those without one for GONE_S are dropped."""
        latest = self.get(report.replica)
        queued = latest.queued if latest is not None else None
        self[report.replica] = ReplicaState(report, now_s, queued=queued)
        self.move_to_end(report.replica)
        self._queue(report.replica)
        while now_s - (oldest := next(iter(self.values()))).heard_s > GONE_S:
            del self[oldest.report.replica]

    def count(self, replica: ReplicaId, programs: int) -> None:
        """So many programs more have their home there."""
        self.homes[replica] += programs
        if not self.homes[replica]:
            del self.homes[replica]
        if programs < 0 and replica in self and self[replica].queued is not None:
            self._queue(replica)

    def least(self, now_s: float, gone: Collection[str] = ()) -> ReplicaId | None:
        """The replica with the fewest requests, of equals with the fewest programs, of those with a fresh
        report; of all if none is fresh; None: there is none. None of `gone`."""
        heap, passed = self._heap, []
        found = None
        while heap and found is None:
            entry, state = heap[0], self.get(heap[0][-1])
            if state is None or state.queued != entry:
                heappop(heap)
            elif not state.is_fresh(now_s):
                heappop(heap)
                state.queued = None  # until its next report
            elif entry != (load := self._load(entry[-1])):
                state.queued = load
                heapreplace(heap, load)
            elif entry[-1] in gone:
                passed.append(heappop(heap))
            else:
                found = entry[-1]
        for entry in passed:
            heappush(heap, entry)
        return found or min((name for name in self if name not in gone), key=self._load, default=None)

    def check(self) -> None:
        """Raise InvariantError unless each replica with a fresh report can be found."""
        entries = Counter(self._heap)
        for name, state in self.items():
            if state.queued is not None and (not entries[state.queued] or state.queued > self._load(name)):
                raise InvariantError(f"entry({state.queued}) of load({self._load(name)}) is not in the heap")
        if len(self._heap) > 2 * len(self) + 64:
            raise InvariantError(f"heap({len(self._heap)}) has more than two entries a replica({len(self)})")

    def _load(self, name: ReplicaId) -> Load:
        return self[name].requests, self.homes[name], name

    def _queue(self, name: ReplicaId) -> None:
        """After the load may have fallen."""
        load, state = self._load(name), self[name]
        if state.queued is None or load < state.queued:
            state.queued = load
            heappush(self._heap, load)
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [state.queued for state in self.values() if state.queued is not None]
            heapify(self._heap)
