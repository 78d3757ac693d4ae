"""The bench with tiers, whose loads take steps and may fail; and the checks after every step."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from bench import BLOCK, Bench, fake_tiers
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.outputs import KVConnectorOutput

from connectors.fake.scheduler_side import LoadJob
from continuum_lmcache.types import TurnId

BYTES_PER_TOKEN = 8  # of the bench's one layer
PATIENCE_STEPS = 200  # an engine with work and memory schedules something well before


class TierBench(Bench):
    """Loads end `load_steps` outputs after they began; the next `failing` of them load nothing.

    Several `groups` of layers have no tiers: the fake connector moves one.
    """

    def __init__(
        self, scheduler_cls: Any, model: Path, blocks: int, tier_blocks: int, groups: Any = None
    ) -> None:
        tiers = fake_tiers(tier_blocks * BLOCK * BYTES_PER_TOKEN / 2**30, kv_load_failure_policy="recompute")
        self.loading: dict[str, tuple[int, LoadJob]] = {}  # steps to go
        self.load_steps = 2
        self.failing = 0
        self.failed = 0
        self.idle_steps = 0  # with unfinished requests and nothing scheduled
        kept = {"spec": groups} if groups else {"transfer": tiers}
        super().__init__(scheduler_cls, model, blocks, budget_tokens=64, **kept)
        if not groups:
            self.scheduler.connector.scheduler_side.clock = lambda: self.now_s
        self.queues = [q for q in vars(self.scheduler).values() if isinstance(q, RequestQueue)]

    def scheduled(self, output: Any) -> None:
        if self.engine is not None:
            check_books(self)
            check_pins(self)
        can_run = self.scheduler.get_num_unfinished_requests() and not self.loading
        self.idle_steps = 0 if output.total_num_scheduled_tokens or not can_run else self.idle_steps + 1
        assert self.idle_steps < PATIENCE_STEPS, self.state()

    def state(self) -> str:
        """For the message of a check that fails."""
        states = [
            f"{i} {r.status.name} {r.num_computed_tokens}/{r.num_tokens}"
            for i, r in self.scheduler.requests.items()
        ]
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        pinned = self.engine.pins.pinned if self.engine is not None else {}
        pins = {program: pin.blocks for program, pin in pinned.items()}
        return f"the engine has work and does none: {states}, {free} blocks free, pins {pins}"

    def moved(self, output: Any) -> KVConnectorOutput | None:
        """Start this step's loads, and end those whose time has come."""
        if output.kv_connector_metadata is None:
            return None
        begun = {job.request_id: (self.load_steps, job) for job in output.kv_connector_metadata.loads}
        ended = [job for steps, job in self.loading.values() if steps <= 1]
        self.loading = {i: (steps - 1, job) for i, (steps, job) in self.loading.items() if steps > 1} | begun
        if not ended:
            return None
        invalid = self._invalid_blocks(ended)
        return KVConnectorOutput(finished_recving={j.request_id for j in ended}, invalid_block_ids=invalid)

    def _invalid_blocks(self, jobs: list[LoadJob]) -> set[int]:
        """Blocks that a failed load left without their bytes: all, or all but its first one, in turns."""
        found: set[int] = set()
        for job in jobs:
            if self.failing:
                self.failing, self.failed = self.failing - 1, self.failed + 1
                blocks = [block for copy in job.copies for block in copy.block_ids]
                found |= set(blocks[1:] if self.failed % 2 == 0 else blocks)
        return found


def check_books(bench: Bench) -> None:
    """Every reference on every block belongs to a request, a pin or a deferred free; none is lost."""
    scheduler, engine = bench.scheduler, bench.engine
    pool = scheduler.kv_cache_manager.block_pool
    expected: Counter[int] = Counter()
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for blocks in manager.req_to_blocks.values():
            expected.update(b.block_id for b in blocks if not b.is_null)
    for pin in engine.pins.pinned.values():
        expected.update(pin.block_ids)
    for _, blocks in getattr(scheduler, "deferred_frees", ()):
        expected.update(b.block_id for b in blocks if not b.is_null)
    for block in pool.blocks:
        if not block.is_null:
            held, known = block.ref_cnt, expected[block.block_id]
            assert held == known, f"block {block.block_id}: ref_cnt {held} != {known} known holders"
    free = sum(not b.is_null and b.ref_cnt == 0 for b in pool.blocks)
    assert pool.get_num_free_blocks() == free, f"free list {pool.get_num_free_blocks()} != {free} unheld"


def check_pins(bench: TierBench) -> None:
    """Right after schedule(): budgets, deadlines and the engine's tables."""
    engine, pins = bench.engine, bench.engine.pins
    engine.check()
    by_tenant: defaultdict[str, set[int]] = defaultdict(set)  # a block that several pins hold counts once
    for program, pin in pins.pinned.items():
        record = engine.programs.records[program]
        by_tenant[record.tenant].update(pin.block_ids)
        assert record.turn or pin.deadline_s > bench.now_s, f"{program!r} is overdue and nobody waits for it"
    assert all(len(blocks) <= pins.max_tenant_blocks for blocks in by_tenant.values()), by_tenant
    check_turns(bench)


def check_turns(bench: TierBench) -> None:
    """The engine knows the live requests: each is its program's turn, and is at the place of its key if it
    waits."""
    scheduler, engine = bench.scheduler, bench.engine
    live = {i: r for i, r in scheduler.requests.items() if not r.is_finished()}
    assert set(engine.turns) == set(live)
    assert {t.program.turn for t in engine.turns.values()} == set(live)
    running = {r.request_id for r in scheduler.running}
    assert engine.turns.preempted <= set(live) - running, "a turn that runs counts as preempted"
    waiting = Counter(request.request_id for queue in bench.queues for request in queue)
    assert set(waiting.values()) <= {1}, "a request stands in two queues"
    served_least = engine.config.policy.endswith("plas")  # a snapshot: its program may be served meanwhile
    for queue in bench.queues if not served_least else ():
        for key, number, request_id in queue._heap:
            newest = queue._live.get(request_id)
            if newest is not None and newest[0] == number and TurnId(request_id) not in engine.turns.to_rekey:
                now = scheduler._events.queue_key(newest[1])
                assert key == now, f"{request_id} waits with {key}, not {now}; {newest[1].status}"
    assert running.isdisjoint(waiting) and running | set(waiting) == set(live), "a request is lost"
