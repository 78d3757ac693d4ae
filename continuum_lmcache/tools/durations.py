"""How long tools take: observations by key, and which key has enough of them.

A key's levels (types.ToolKey) are kept side by side: an observation of ("pytest", "bash") also counts for
("bash",) and for (), which is every tool together.

Each tenant's observations are kept apart as well, and decide for it as soon as another tenant has any (`of`).
Keys and tenants that come often keep their place, however many others come once (FrequentDict).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from continuum_lmcache.bounded_dict import FrequentDict
from continuum_lmcache.errors import DurationsError
from continuum_lmcache.tools.call_parser import likely_slowest
from continuum_lmcache.tools.distribution import DurationDistribution, equal_steps
from continuum_lmcache.types import MOST_TENANTS, ToolKey

COLD_SAMPLES = 100  # K of Continuum, arXiv 2511.02230 §4
PRIOR_SAMPLES = 4  # as many observations of its own weigh as much as the level above
WINDOW = 1024  # observations a key remembers, the latest
MAX_KEYS = 512  # about 50 MB when all are full
TENANT_KEYS = 32  # of each tenant
MAX_LEVELS = 4
SHORTEST_GAP_S = 1e-6  # counts as 0: a pin of 0 s would be no pin
MAX_GAP_S = 1e6  # eleven days: a wrong clock, not a slow tool
VERSION = 1
EXPECTED_GAPS = 4.0  # times its mean gap: after that a program is no longer expected back
LEAST_EXPECTED_S = 20.0  # at 10, the longest gap in the field's measure, programs lost their room
COLD_GAP_S = 1.0  # without a known gap: Exp(1)'s mean, as in the paper's cold start
SavedKey = tuple[ToolKey, list[float]]


@dataclass(slots=True)
class DurationWindow:
    """The latest observations of one key, in the order of time and in that of length.

    insort moves up to WINDOW pointers, a memmove of 8 kB at most (under a microsecond): at this
    size it is faster than every tree written in Python, and the search is O(log n).
    """

    recent: deque[float] = field(default_factory=deque)  # seconds; infinite: the program never returned
    ended_s: list[float] = field(default_factory=list)
    # until the next observation: a turn's end asks three times
    _distribution: DurationDistribution | None = None

    def add(self, gap_s: float) -> None:
        if len(self.recent) >= WINDOW and (oldest_s := self.recent.popleft()) < math.inf:
            del self.ended_s[bisect_left(self.ended_s, oldest_s)]
        self._distribution = None
        self.recent.append(gap_s)
        if gap_s < math.inf:
            insort(self.ended_s, gap_s)

    def withdraw_lost(self) -> None:
        """Remove a gap that never ended; nothing if the window has moved past it."""
        if math.inf in self.recent:
            self.recent.remove(math.inf)
            self._distribution = None

    def distribution(self, level: str) -> DurationDistribution:
        found = self._distribution
        if found is None or found.level != level:
            cdf, n = equal_steps(len(self.ended_s), len(self.recent)), len(self.recent)
            found = self._distribution = DurationDistribution(level, tuple(self.ended_s), cdf, n)
        return found


@dataclass(slots=True)
class ToolDurations:
    """Tool gaps in seconds, from the end of a turn to the program's next request."""

    everybody: ToolDurations | None = None  # of whom this is one tenant
    _windows: FrequentDict[ToolKey, DurationWindow] = field(init=False)
    _tenants: FrequentDict[str, ToolDurations] = field(init=False)

    def __post_init__(self) -> None:
        most = MAX_KEYS if self.everybody is None else TENANT_KEYS
        self._windows = FrequentDict(most, DurationWindow)
        self._tenants = FrequentDict(MOST_TENANTS, lambda: ToolDurations(self))

    def of(self, tenant: str) -> ToolDurations:
        """What decides for this tenant: its own observations, else one could have another's KV evicted by
        tools that never return. Before it has COLD_SAMPLES, everybody's tell how long a tool takes."""
        if self._tenants.keys() <= {tenant}:
            return self
        return self._tenants.get(tenant) or ToolDurations(self)

    def observe(self, tool: ToolKey, gap_s: float, tenant: str = "") -> None:
        """The program came back after `gap_s`. What is no possible gap does not count."""
        if 0.0 <= gap_s <= MAX_GAP_S:  # false for nan
            self._add(tool, max(gap_s, SHORTEST_GAP_S), tenant)

    def add_lost(self, tool: ToolKey, tenant: str = "") -> None:
        """The program is no longer expected back. Without this a tool that often hangs would look like its
        short calls that did return."""
        self._add(tool, math.inf, tenant)

    def withdraw_lost(self, tool: ToolKey, tenant: str = "") -> None:
        """An observation of `add_lost` was wrong: the program came back."""
        if tenant in self._tenants:
            self._tenants[tenant].withdraw_lost(tool)
        for key in suffixes(tool):
            if (window := self._windows.get(key)) is not None:
                window.withdraw_lost()

    def distribution(self, tool: ToolKey) -> DurationDistribution:
        """The distribution used for `tool`: its most specific level with more than K observations.

        The paper's cold start (§4, K = 100) with more than one level below "all": too few of every
        tool, "cold"; too few of this key's levels, "all". Abandoned calls count as observations,
        or a tool that never returns would get the others' distribution for ever.
        """
        for key in suffixes(tool):
            window = self._windows.get(key)
            if window is not None and len(window.recent) > COLD_SAMPLES:
                return window.distribution(f"tool:{len(key)}" if key else "all")
        if self.everybody is not None:
            return self.everybody.distribution(tool)
        return DurationDistribution("cold", (), (), self.exact(()).n)

    def longer_share(self, tool: ToolKey, gap_s: float) -> float:
        """The share of gaps of `tool` that last `gap_s` or longer, 0 to 1: if it is infinite, that never end.
        0 before the first observation.

        Each level's share counts as PRIOR_SAMPLES observations of the level below it: a few calls tell a
        tool that ends programs from one that does not, long before they tell how long it takes.
        """
        share = 0.0
        for key in reversed(suffixes(tool)):
            if (window := self._windows.get(key)) is not None:
                longer = len(window.recent) - bisect_left(window.ended_s, gap_s)
                share = (longer + PRIOR_SAMPLES * share) / (len(window.recent) + PRIOR_SAMPLES)
        return share

    def exact(self, tool: ToolKey) -> DurationDistribution:
        """The observations of exactly this key, however few; level "own"."""
        return self._windows.get(tool, DurationWindow()).distribution("own")

    def most_specific(self, tool: ToolKey) -> DurationDistribution:
        """The observations of the most specific level where any gap ended, however few; level "own"."""
        found = (self.exact(key) for key in suffixes(tool))
        return next((own for own in found if own.samples_s), self.exact(()))

    def expected_s(self, tool: ToolKey, lost_share: float) -> float:
        """For how long a program in a call of `tool` is expected back; LEAST_EXPECTED_S at least.

        Model: a gap is exponential or, in a share q of cases, never ends. After ln((1 - q) / q) mean gaps
        both are equally likely. Until then the program is expected back.
        """
        q = lost_share
        means = min(EXPECTED_GAPS, math.log((1.0 - q) / q)) if q > 0.0 else EXPECTED_GAPS
        return max(LEAST_EXPECTED_S, means * (self.distribution(tool).mean_s or COLD_GAP_S))

    def slowest(self, calls: Sequence[ToolKey]) -> ToolKey:
        """Of a turn's parallel calls the slowest by its mean gap, or by its name while none is known.

        A call counts with its most specific level that has observations: which call is slower is a weaker
        question than how long it takes. Gaps are long-tailed, so the largest mean is close to the mean of
        the largest.
        """
        if len(calls) < 2:
            return calls[0] if calls else ()
        slowest = max(calls, key=lambda call: self.most_specific(call).mean_s or 0.0)
        return slowest if self.exact(slowest).n else likely_slowest(calls)

    def dumps(self) -> str:
        """Everything learned, of tenants too, as versioned JSON; loads() reads it.

        Safe from another thread: each list is copied at once, and each key is written by itself, so that
        an observation meanwhile waits for one key at most.
        """
        tenants = [f"{json.dumps(name)}: {own._keys()}" for name, own in list(self._tenants.items())]
        return f'{{"version": {VERSION}, "keys": {self._keys()}, "tenants": {{{", ".join(tenants)}}}}}'

    def _keys(self) -> str:
        keys = []
        for key, window in list(self._windows.items()):
            recent = list(window.recent)
            found = {
                "levels": list(key),
                "gaps_s": [round(min(gap_s, MAX_GAP_S), 6) for gap_s in recent],
                "unended": [i for i, gap_s in enumerate(recent) if gap_s == math.inf],
            }
            keys.append(json.dumps(found))
        return f"[{', '.join(keys)}]"

    @classmethod
    def loads(cls, text: str) -> ToolDurations:
        """From dumps(). Raises DurationsError with the problem and its place."""
        try:
            saved = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DurationsError(f"saved tool durations are not JSON: {error}") from error
        if not isinstance(saved, dict) or saved.get("version") != VERSION:
            raise DurationsError(f"saved tool durations have no version {VERSION}")
        tenants = saved.get("tenants", {})
        if not isinstance(tenants, dict) or len(tenants) > MOST_TENANTS:
            most = f"an object of at most {MOST_TENANTS}"
            raise DurationsError(f"saved tool durations: 'tenants' must be {most}")
        gaps = cls()
        gaps._restore(parsed_keys("keys", saved.get("keys"), MAX_KEYS))
        for name, keys in tenants.items():
            own = parsed_keys(f"tenants[{name!r}]", keys, TENANT_KEYS)
            times = max((len(gaps_s) for _, gaps_s in own), default=0)
            gaps._tenants.count(name, times)._restore(own)
        return gaps

    def _restore(self, keys: list[SavedKey]) -> None:
        for key, gaps_s in keys:
            window = self._windows.count(key, len(gaps_s))
            for gap_s in gaps_s:
                window.add(gap_s)

    def _add(self, tool: ToolKey, gap_s: float, tenant: str = "") -> None:
        for key in reversed(suffixes(tool)):
            self._windows.count(key).add(gap_s)
        if self.everybody is None:
            self._tenants.count(tenant)._add(tool, gap_s)


def suffixes(tool: ToolKey) -> list[ToolKey]:
    """A key's levels, most specific first, down to () for every tool."""
    return [tool[at:] for at in range(max(len(tool) - MAX_LEVELS, 0), len(tool) + 1)]


def parsed_keys(name: str, keys: Any, most: int) -> list[SavedKey]:
    where = f"saved tool durations: {name}"
    if not isinstance(keys, list) or len(keys) > most:
        raise DurationsError(f"{where} must be a list of at most {most}")
    return [parsed_key(f"{where}[{at}]", entry) for at, entry in enumerate(keys)]


def parsed_key(where: str, entry: Any) -> SavedKey:
    if not isinstance(entry, dict):
        raise DurationsError(f"{where} must be an object, not {type(entry).__name__}")
    key, gaps_s, unended = entry.get("levels"), entry.get("gaps_s"), entry.get("unended")
    if not isinstance(key, list) or len(key) > MAX_LEVELS or not all(isinstance(name, str) for name in key):
        raise DurationsError(f"{where}.levels must be at most {MAX_LEVELS} names")
    if not isinstance(gaps_s, list) or len(gaps_s) > WINDOW or not all(map(plausible, gaps_s)):
        bounds = f"{SHORTEST_GAP_S:g} to {MAX_GAP_S:g}"
        raise DurationsError(f"{where}.gaps_s must be at most {WINDOW} numbers of seconds, {bounds}")
    if not isinstance(unended, list) or not all(isinstance(i, int) for i in unended):
        raise DurationsError(f"{where}.unended must be a list of positions in gaps_s")
    lost = set(unended)
    return tuple(key), [math.inf if i in lost else float(gap_s) for i, gap_s in enumerate(gaps_s)]


def plausible(gap_s: Any) -> bool:
    return type(gap_s) in (int, float) and SHORTEST_GAP_S <= gap_s <= MAX_GAP_S
