"""Pins are looked at again: when they run out, and when a turn begins to wait for memory."""

from __future__ import annotations

from dataclasses import dataclass

from continuum_lmcache.types import Pin
from continuum_lmcache.vllm_plugin.keeper import Keeper

EVERY_S = 1.0  # between two looks: a queue short of memory in every other step asks for all pins each time,
# and a pin worth a moment more would wake an idle engine again and again


@dataclass(slots=True)
class Renewal:
    """Gives pins another deadline, by what is known of their gaps and of the memory now."""

    keeper: Keeper
    was_short: bool = False
    at_s: float = 0.0

    def look(self, now_s: float) -> None:
        """Before pins expire: those that are due, and all of them if memory has become short."""
        all_of_them = now_s >= self.at_s and self._becomes_short(now_s)
        due_s = self.keeper.ledger.next_deadline_s()
        if all_of_them or (due_s is not None and due_s <= now_s):
            for pin in list(self.keeper.ledger.pinned.values()):
                if all_of_them or pin.deadline_s <= now_s:
                    self._renew(now_s, pin)

    def _becomes_short(self, now_s: float) -> bool:
        before, self.was_short = self.was_short, bool(self.keeper.appraiser.short)
        self.at_s = now_s + EVERY_S
        return self.was_short and not before

    def _renew(self, now_s: float, pin: Pin) -> None:
        """The pin's deadline as if it were taken now, by a program that has been away so long."""
        keeper, turn = self.keeper, pin.turn
        assert turn is not None
        is_priced = keeper.appraiser.prices(turn.context_tokens, pin.retention.reload_s)
        if not is_priced or keeper.ledger.programs[pin.program].live:
            return
        away_s = now_s - pin.taken_s
        keep = keeper.appraiser.judged(now_s, turn, keeper.load(away_s))
        ttl_s = max(keep.ttl_s, EVERY_S) if keep.ttl_s > 0 else 0.0
        left_s = max(0.0, min(ttl_s, keeper.config.max_ttl_s - away_s))
        keeper.ledger.renew(pin.program, now_s + left_s)
