"""The peers in the simulator: agentinfer's scheduler class, and the rules of peers that need real time.

agentinfer is the package itself, over vLLM's scheduler, with the simulator's clock. vllm-router is a program
in Rust: its rules here are those of its documentation (docs/program_scheduling.md of vllm-project/router), as
differences from agentinfer's, which has the same design. Left out: the rule that a program yields once
after 14 rounds, and the time that the additional process adds to each request.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from experiments.peers import settings
from experiments.peers.install import ENGINE, missing
from experiments.sweep.cases import PEERS, ROUTER_WARM, ROUTERS, SweepError

if TYPE_CHECKING:
    from experiments.sim.step_time import Machine

TIMED = (
    "agentinfer.scheduling.runtime",
    "agentinfer.scheduling.program_registry",
    "agentinfer.agentcache.core.scheduler",
)
"""Its modules that say `time.something()`."""
SOON_S = 1e-3  # vLLM's engine looks again at once while a request is held
POLL_S = 1.0  # the router's metrics_interval_seconds
ROUTER_MAX_TTL_S, WAITING_ALLOWED, MAX_PROGRAMS = 10.0, 0, 64  # the router's defaults


def timed_modules(policy: str) -> list[ModuleType]:
    """Modules that need the simulator's clock for that contender. Raises SweepError if it is missing."""
    if policy not in PEERS:
        return []
    if reason := missing(policy, simulated=True):
        raise SweepError(f"{policy} is not here: {reason}")
    if str(ENGINE) not in sys.path:
        sys.path.append(str(ENGINE))  # behind the simulator's own packages
    return [importlib.import_module(name) for name in TIMED]


def engine_config(policy: str, machine: Machine) -> dict[str, Any]:
    """`additional_config` of vLLM for that contender."""
    config = settings.agentinfer(machine)
    if policy in ROUTERS:
        config["progress_ttl"] |= {
            "ttl_max_seconds": ROUTER_MAX_TTL_S,
            "resume_reclaim_acting_programs": False,
        }
    return {"agentcache": config}


def scheduler_class(policy: str) -> type[Scheduler]:
    """The contender's scheduler, after `timed_modules`."""
    from agentinfer.agentcache.core.scheduler import AgentCacheSyncSchedulerBridge as Bridge

    class Embedded(Bridge):  # type: ignore[misc]
        """agentinfer in the engine."""

        looked_s = -math.inf  # when it last had its turn

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            self.looked_s = self.clock()
            return super().schedule(*args, **kwargs)

        def finish_requests(self, *args: Any) -> Any:
            """agentinfer expects ids and clients, as older vLLM returns them; later ones return requests."""

            def native(*args: Any) -> list[Any]:
                found = Scheduler.finish_requests(self, *args)
                return [(r.request_id, r.client_index) if isinstance(r, Request) else r for r in found]

            return self._agentcache.finish_requests(self, *args, native)

        def next_due_s(self) -> float | None:
            """Its next deadline; None: it waits for an event."""
            controller = self._agentcache.controller
            due_s = [controller._next_check_at_monotonic_s, controller._next_lightweight_check_at_monotonic_s]
            if controller.retained_request_count:
                due_s.append(controller._next_periodic_check_at_monotonic_s)
            known = [at_s for at_s in due_s if at_s is not None]
            return max(min(known), self.looked_s + SOON_S) if known else None

    return _routed(Embedded, policy) if policy in ROUTERS else Embedded


def _routed(base: type[Any], policy: str) -> type[Any]:
    """The same runtime as a router in front of the engine has it."""
    from agentinfer.scheduling.progress_ttl.strategy import ProgressTTLStrategy

    class Rules(ProgressTTLStrategy):  # type: ignore[misc]
        """Progress-TTL as the router documents it."""

        gated = False
        seen_waiting = 0  # in the engine, at the last poll

        def _privilege_enabled(self) -> bool:
            return False

        def _can_promote(self, *_: Any) -> bool:
            return False

        def _ttl_estimate(self, state: Any, *args: Any) -> Any:
            estimate = super()._ttl_estimate(state, *args)
            if state.global_factors.continuity_window_complete:
                return estimate
            return replace(estimate, ttl_seconds=0.0)

        def _capacity_growth_per_round(self, state: Any) -> float:
            full = state.global_factors.request_window_complete
            return float(super()._capacity_growth_per_round(state)) if full else 0.0

        def _remaining_tokens(self, snapshot: Any, capacity_ratio: float) -> int | None:
            left: int | None = super()._remaining_tokens(snapshot, capacity_ratio)
            full = len(self._active_programs(snapshot)) >= MAX_PROGRAMS or self.seen_waiting > WAITING_ALLOWED
            return 0 if self.gated and full else left

        def handle_admission(self, *args: Any) -> Any:
            with self._at_the_gate():
                return super().handle_admission(*args)

        def schedule_resume(self, *args: Any) -> None:
            with self._at_the_gate():
                super().schedule_resume(*args)

        @contextmanager
        def _at_the_gate(self) -> Iterator[None]:
            """Repair of capacity does not ask for the waiting requests; admission does."""
            self.gated = True
            try:
                yield
            finally:
                self.gated = False

    class Routed(base):  # type: ignore[misc]
        """Knows the requests' fields, and polls once a second how many wait; it does not know KV blocks."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            hooks = self._agentcache
            hooks._native_used_kv_tokens = lambda _: None
            hooks._native_waiting_kv_tokens = lambda _: None
            hooks._observe_retained_prefix_cache = lambda _: None
            rules = Rules(hooks.controller.strategy.config)
            hooks.controller.strategy = rules
            if policy == ROUTER_WARM:
                hooks.controller.strategy_factors.global_factors.request_window_size = settings.WARM_WINDOW
            self._polled_s = -math.inf

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self.clock() >= self._polled_s + POLL_S:
                self._polled_s = self.clock()
                self._agentcache.controller.strategy.seen_waiting = len(self.waiting)
            return super().schedule(*args, **kwargs)

    return Routed
