"""Computes TTLs of pins again: when they expire, and when a turn begins to wait for memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from continuum_lmcache.retention.pin_table import PinTable
from continuum_lmcache.types import Pin, ProgramId, Retention

RetainAgain = Callable[[Pin, float], Retention]  # the policy, asked again about a pin so many seconds later
EVERY_S = 1.0  # between two looks at the memory, and between two decisions about a pin while it is not short
"""At most one decision a second and pin. Else memory that is short in every other step would decide about
every pin each time, and a pin worth a few more milliseconds would wake an idle engine for each of them. While
a turn waits for memory, a pin that pays for a moment gets no more than that."""
DECISIONS_A_STEP = 16  # each takes 0.15 ms where a tool's window is full: so no step waits for more than 3 ms


@dataclass(slots=True)
class PinRenewal:
    """Sets pins' deadlines again, by their programs' gaps so far and the memory now."""

    pins: PinTable
    was_short: bool = False
    next_check_s: float = 0.0  # of the memory
    to_renew: deque[ProgramId] = field(default_factory=deque)  # TTLs of a time when memory was not short

    def renew_due(self, now_s: float, is_memory_short: bool, retain: RetainAgain) -> list[Pin]:
        """Before pins expire: decide about due pins, and about all pins if memory has become short. Returns
        them with their new deadlines.

        A step makes at most DECISIONS_A_STEP decisions. Further due pins get EVERY_S more; the others wait.
        """
        pins = self.pins
        if now_s >= self.next_check_s:
            self.next_check_s = now_s + EVERY_S
            if is_memory_short and not self.was_short:
                self.to_renew = deque(pins.pinned)
            self.was_short = is_memory_short
        if not self.was_short:
            self.to_renew.clear()
        due_s, due = pins.next_deadline_s(), list[Pin]()
        if due_s is not None and due_s <= now_s:
            due = [p for p in pins.pinned.values() if p.deadline_s <= now_s and self._is_renewable(p)]
        decided = due[:DECISIONS_A_STEP]
        while self.to_renew and len(decided) < DECISIONS_A_STEP:
            pin = pins.pinned.get(self.to_renew.popleft())
            decided += [pin] if pin is not None and self._is_renewable(pin) else []
        deadlines = [(p.program, self._deadline_s(now_s, p, is_memory_short, retain)) for p in decided]
        deadlines += [(p.program, now_s + EVERY_S) for p in due[DECISIONS_A_STEP:]]
        return [pins.renew(program, deadline_s) for program, deadline_s in deadlines]

    def _is_renewable(self, pin: Pin) -> bool:
        """Whether the policy asked for it, and the program is away."""
        return pin.retention.asks_again and self.pins.programs[pin.program].turn is None

    def _deadline_s(self, now_s: float, pin: Pin, is_memory_short: bool, retain: RetainAgain) -> float:
        """As if the pin began now, for a program that has been away this long."""
        away_s = now_s - pin.taken_s
        ttl_s = retain(pin, away_s).ttl_s
        if ttl_s > 0 and not is_memory_short:
            ttl_s = max(ttl_s, EVERY_S)
        return now_s + max(0.0, min(ttl_s, self.pins.max_ttl_s - away_s))
