"""Turns storing off while it holds steps up and nothing repays it (`continuum.stop_stores`), and on again."""

from __future__ import annotations

from vllm.logger import init_logger

from continuum_lmcache.admission.controller import AdmissionController, room_of
from continuum_lmcache.retention.advisor import RetentionAdvisor
from continuum_lmcache.types import Residency
from continuum_lmcache.vllm_plugin.memory.residency import ResidencyLookup

logger = init_logger("vllm.continuum_lmcache")


class StoreControl:
    """Asks the gate in each step, and tells the connector and admission what has changed."""

    def __init__(
        self,
        residency: ResidencyLookup,
        admission: AdmissionController,
        kv_tokens: int,
        advisor: RetentionAdvisor,
    ) -> None:
        self._gate, self._is_wanted = residency.store_gate(), advisor.config.stop_stores
        self.storing = True
        self._residency, self._admission, self._advisor = residency, admission, advisor
        self._rooms = {False: room_of(kv_tokens, {}), True: admission.room}

    def count(self, now_s: float, served: Residency, lost_tokens: int) -> None:
        """A turn starts with what `served` says; of its context the GPU had lost so much."""
        self._gate.turn(now_s, served.recompute_tokens, lost_tokens)

    def update(self) -> None:
        """Say whether to go on storing. What is not stored has no room in the tiers."""
        if not self._is_wanted:
            return
        before, self.storing = self.storing, self._gate.wanted(self._advisor.costs)
        if self.storing != before:
            self._admission.room = self._rooms[self.storing]
            self._residency.set_store_enabled(self.storing)
            logger.info("storing is %s: see continuum.stop_stores", "on" if self.storing else "off")
