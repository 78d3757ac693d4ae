"""Computes TTLs of pins again: when they expire, and when a turn begins to wait for memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from continuum_lmcache.programs.table import ProgramTable
from continuum_lmcache.retention.advisor import RetentionAdvisor
from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.types import EngineLoad, Pin, ProgramId

EVERY_S = 1.0  # between two looks at the memory, and between two decisions about a pin while it is not short
"""Without it, memory that is short in every other step would cause a decision about each pin each time, and a
pin that pays for a moment more would wake an idle engine again and again. While a turn waits for memory, a
pin that pays for a moment gets no more than that."""
DECISIONS_A_STEP = 16  # each takes 0.15 ms where a tool's window is full: so no step waits for more than 3 ms


@dataclass(slots=True)
class PinRenewal:
    """Sets pins' deadlines again, by their programs' gaps so far and the memory now.

    `load`: how busy the engine is, for a program that has been away for so many seconds.
    """

    programs: ProgramTable
    pins: PinTable[KVCacheBlock]
    advisor: RetentionAdvisor
    load: Callable[[float], EngineLoad]
    was_short: bool = False
    next_check_s: float = 0.0  # of the memory
    to_renew: deque[ProgramId] = field(default_factory=deque)  # TTLs of a time when memory was not short

    def renew_due(self, now_s: float) -> None:
        """Before pins expire: decide about due pins, and about all pins if memory has become short.

        A step makes at most DECISIONS_A_STEP decisions. Further due pins get EVERY_S more; the others wait.
        """
        pins, decisions_left = self.pins, DECISIONS_A_STEP
        if now_s >= self.next_check_s and self._became_short(now_s):
            self.to_renew = deque(pins.pinned)
        elif not self.was_short:
            self.to_renew.clear()
        due_s = pins.next_deadline_s()
        if due_s is not None and due_s <= now_s:
            for pin in [pin for pin in pins.pinned.values() if pin.deadline_s <= now_s]:
                if self._is_renewable(pin):
                    decisions_left -= 1
                    if decisions_left >= 0:
                        self._renew(now_s, pin)
                    else:
                        pins.renew(now_s, pin.program, now_s + EVERY_S)
        while self.to_renew and decisions_left > 0:
            found = pins.pinned.get(self.to_renew.popleft())
            if found is not None and self._is_renewable(found):
                decisions_left -= 1
                self._renew(now_s, found)

    def _became_short(self, now_s: float) -> bool:
        before, self.was_short = self.was_short, self.load(0.0).is_memory_short
        self.next_check_s = now_s + EVERY_S
        return self.was_short and not before

    def _is_renewable(self, pin: Pin) -> bool:
        """Whether the pin's worth depends on the memory now, and its program is away."""
        is_priced = self.advisor.is_priced(pin.turn.context_tokens, pin.retention.reload_s)
        return is_priced and not self.programs.records[pin.program].live

    def _renew(self, now_s: float, pin: Pin) -> None:
        """Set the deadline as if the pin began now, for a program that has been away this long."""
        away_s = now_s - pin.taken_s
        load = self.load(away_s)
        ttl_s = self.advisor.retain(pin.turn, load).ttl_s
        if ttl_s > 0 and not load.is_memory_short:
            ttl_s = max(ttl_s, EVERY_S)
        left_s = max(0.0, min(ttl_s, self.pins.max_ttl_s - away_s))
        self.pins.renew(now_s, pin.program, now_s + left_s)
