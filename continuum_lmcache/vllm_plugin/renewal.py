"""Pins are looked at again: when they run out, and when a turn begins to wait for memory."""

from __future__ import annotations

from dataclasses import dataclass

from continuum_lmcache.types import Pin
from continuum_lmcache.vllm_plugin.keeper import Keeper

EVERY_S = 1.0  # at most: a queue may be short of memory in one step and not in the next


@dataclass(slots=True)
class Renewal:
    """Gives pins another deadline, by what is known of their gaps and of the memory now."""

    keeper: Keeper
    was_short: bool = False
    at_s: float = 0.0

    def look(self, now_s: float) -> None:
        """Before pins expire: those that are due, and all of them if memory has become short."""
        if not self.keeper.appraiser.prices_pins:
            return
        all_of_them = now_s >= self.at_s and bool(self.keeper.appraiser.short) and not self.was_short
        if now_s >= self.at_s:
            self.was_short, self.at_s = bool(self.keeper.appraiser.short), now_s + EVERY_S
        due_s = self.keeper.ledger.next_deadline_s()
        if all_of_them or (due_s is not None and due_s <= now_s):
            for pin in list(self.keeper.ledger.pinned.values()):
                if all_of_them or pin.deadline_s <= now_s:
                    self._renew(now_s, pin)

    def _renew(self, now_s: float, pin: Pin) -> None:
        assert pin.turn is not None
        keeper = self.keeper
        if keeper.ledger.programs[pin.program].live:
            return
        left_s = keeper.config.max_ttl_s - (now_s - pin.taken_s)
        keep = keeper.appraiser.judged(now_s, pin.turn, keeper.load(now_s - pin.taken_s))
        keeper.ledger.renew(pin.program, now_s + max(0.0, min(keep.ttl_s, left_s)))
