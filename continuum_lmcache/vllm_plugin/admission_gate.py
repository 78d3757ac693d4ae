"""What programs do to each other: who waits at the door, in which order, and what dies with one.

From vLLM's requests to the core's Door and Endings.
"""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.v1.request import Request

from continuum_lmcache.admission.controller import AdmissionController, room_of
from continuum_lmcache.admission.shared_prefixes import SharedPrefixIndex
from continuum_lmcache.programs.end_claims import EndClaim, EndClaims
from continuum_lmcache.programs.table import Program
from continuum_lmcache.retention.advisor import RetentionAdvisor
from continuum_lmcache.types import ProgramId, ToolKey
from continuum_lmcache.vllm_plugin.memory.residency import ResidencyLookup
from continuum_lmcache.vllm_plugin.requests import TurnState

logger = init_logger("vllm.continuum_lmcache")


class AdmissionGate:
    """All programs of one engine, and the plain requests among them."""

    def __init__(
        self, advisor: RetentionAdvisor, gpu_tokens: int, hash_block_tokens: int, supply: ResidencyLookup
    ) -> None:
        self._advisor = advisor
        self.endings = EndClaims()
        self.gpu_tokens = gpu_tokens
        self._rooms = {False: room_of(gpu_tokens, {}), True: room_of(gpu_tokens, advisor.cheap_tiers())}
        self.stores = supply.stores()
        self._supply = supply
        self.storing = True
        order, commons = advisor.door_order, SharedPrefixIndex(hash_block_tokens)
        self.admission = AdmissionController(
            self._rooms[True], advisor.config.max_wait_s, order, commons=commons
        )

    def visits(self, now_s: float, request: Request) -> None:
        """A request without a program comes: it never waits at the door, and takes room."""
        sizes = (request.num_prompt_tokens, 0, 0, True)
        self.admission.arrives(now_s, alone(request), *sizes, hashes=request.block_hashes)

    def gone(self, now_s: float, request: Request) -> None:
        """Such a request has ended."""
        self.admission.leaves(now_s, alone(request))

    def arrives(self, turn: TurnState, request: Request, program: ProgramId, turns: int) -> bool:
        """A turn of a program that has finished `turns` comes. Whether it may queue."""
        how = (request.num_prompt_tokens, turn.priority, turns, not self._advisor.admits)
        return self.admission.arrives(turn.arrival_s, program, *how, hashes=request.block_hashes)

    def opens(self, now_s: float, idle: bool, prompt_share: float) -> list[ProgramId]:
        """Who may come in now."""
        return self.admission.opens(now_s, idle, prompt_share)

    def weighs_stores(self) -> None:
        """Say whether to go on storing. What is not stored has no room in the tiers."""
        before = self.storing
        if self._advisor.stops_stores:
            self.storing = self.stores.wanted(self._advisor.rates.costs)
        if self.storing != before:
            self.admission.room = self._rooms[self.storing]
            self._supply.store_from_now(self.storing)
            logger.info("storing is %s: see continuum.stop_stores", "on" if self.storing else "off")

    def totals(self) -> dict[str, dict[str, float]]:
        """For the metrics."""
        return {
            "outside": {"": len(self.admission.outside)},
            "headroom": {"": self.admission.headroom_tokens},
            "storing": {"": float(self.storing)},
            "working_set": {"": self.admission.context_tokens},
            "gpu_capacity": {"": self.gpu_tokens},
        }

    def finds(self, now_s: float, request: Request, program: ProgramId, tokens: int) -> None:
        """A program's first turn found so much of its prompt: somebody else's head."""
        self.admission.finds(now_s, program, request.block_hashes, tokens)

    def pauses(self, now_s: float, context_tokens: int, program: ProgramId, tool: ToolKey) -> None:
        """A turn ended in a call of `tool`; of its context so much may be asked for again."""
        self.admission.pauses(now_s, program, context_tokens, self._advisor.expected_s(tool))

    def ends(self, request: Request, entry: Program) -> int | None:
        """The program is said to be over. Behind which token nobody will ask for its context; None: who
        knows."""
        self.endings.over(entry.id, EndClaim(entry.arrival_s, entry.turns))
        if not (self._advisor.drops_dead and self.endings.believed):
            return None
        return self.admission.commons.head(request.block_hashes).tokens


def alone(request: Request) -> ProgramId:
    """A request without a program, as one that ends with it."""
    return ProgramId(f"~{request.request_id}")
