"""The engine without vLLM: what goes in, and the list that comes out. Times and tokens are invented."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.engine import REFRESH_S, Engine, NewTurn, Occupancy, ToolCall, TurnEnd
from continuum_lmcache.policy.continuum import SLICE_RELOADS, SLICE_TURNS
from continuum_lmcache.programs.end_claims import MAX_ENDED
from continuum_lmcache.programs.identity import ProgramFields
from continuum_lmcache.programs.program import Program, Stage
from continuum_lmcache.programs.turns import LATE_TURNS, Turn
from continuum_lmcache.reload.cost_model import UNMEASURED, PrefillCurve
from continuum_lmcache.reload.rate_calibration import CalibratedCosts
from continuum_lmcache.retention.learned import Learned
from continuum_lmcache.telemetry import events as event_types
from continuum_lmcache.tools.durations import ToolDurations
from continuum_lmcache.types import NO_CALL, Pin, ProgramId, Residency, Retention, Tier, TurnId

BLOCK = 16
MAX_WAIT_S = 60.0
MAX_TTL_S = 20.0
MOSTLY = st.sampled_from([True, True, True, False])


@dataclass
class Prompt:
    """Token ids. Prompts of one story are prefixes of each other."""

    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    mm_features: Sequence[Any] = ()

    @property
    def block_hashes(self) -> list[int]:
        return [hash((self.all_token_ids[0], end)) for end in range(len(self.all_token_ids) // BLOCK)]


def prompt(tokens: int, story: int = 0) -> Prompt:
    return Prompt([story] * tokens, tokens)


class Rig:
    """An engine whose decisions are carried out on counts of references."""

    def __init__(self, blocks: int = 100, **config: Any) -> None:
        learned = Learned(UNMEASURED, ToolDurations(), {})
        self.engine = Engine(ContinuumConfig(**config), learned, blocks, BLOCK, BLOCK)
        self.now_s = 100.0
        self.references: Counter[int] = Counter()  # of pins, by block
        self.started: list[ProgramId] = []
        self.prompts: dict[TurnId, Prompt] = {}
        self._count = 0

    def do(self, events: Iterable[Any]) -> list[Any]:
        """Carry out what was decided."""
        events = list(events)
        for event in events:
            match event:
                case event_types.PinTaken():
                    self.references.update(event.pin.block_ids)
                case event_types.PinReleased():
                    self.references.subtract(event.block_ids)
                case event_types.ProgramAdmitted():
                    self.started.append(event.program)
        return events

    def arrive(self, job: str | None, said: Prompt, **sent: Any) -> Turn:
        self._count += 1
        turn_id, priority = TurnId(f"t{self._count}"), sent.pop("priority", 0)
        fields = ProgramFields(job_id=job, **sent)
        new = NewTurn(turn_id, fields, fields.owner, priority, may_be_linked=True)
        self.do(self.engine.turn_arrived(self.now_s, new, said))
        self.prompts[turn_id] = said
        return self.engine.turns[turn_id]

    def run(self, turn: Turn, gpu_tokens: int = 0) -> list[Any]:
        said, pin = self.prompts[turn.id], self.engine.pins.pinned.get(turn.program.id)
        turn.gpu_tokens = min(gpu_tokens, said.num_prompt_tokens)
        served = Residency(turn.gpu_tokens, 0, 0, said.num_prompt_tokens)
        uses_pin = pin is not None and gpu_tokens > 0
        return self.do(self.engine.turn_ran(self.now_s, turn, said, served, uses_pin))

    def end(
        self, turn: Turn, is_end: bool = True, block_ids: Sequence[int] = (), dram_tokens: int = 0
    ) -> list[Any]:
        """The turn generated one token."""
        said = self.prompts.pop(turn.id)
        tokens = said.num_prompt_tokens + 1
        whole = Prompt([*said.all_token_ids, 7], said.num_prompt_tokens)
        call = ToolCall(
            [turn.fields.this_tool] if turn.fields.this_tool else [],
            Residency(0, dram_tokens, 0, tokens),
            block_ids,
            50,
        )
        self.engine.turns.drop(turn.id)
        in_call = self.engine.ends_in_call(turn, is_end)
        end = TurnEnd(is_end, tokens, 1, call if in_call else None)
        return self.do(self.engine.turn_ended(self.now_s, turn, whole, end))

    def tick(self, idle: bool = True) -> list[Any]:
        step = Occupancy(not idle, not idle, 1.0, lambda: 50)
        events = self.do(self.engine.tick(self.now_s, step))
        self.engine.check()
        return events

    def turn(self, job: str | None, tokens: int, block_ids: Sequence[int] = (), **sent: Any) -> list[Any]:
        """A turn from its arrival to its end."""
        turn = self.arrive(job, prompt(tokens), **sent)
        self.tick()
        self.run(turn)
        return self.end(turn, block_ids=block_ids)


def kinds(events: Iterable[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_turns_end_is_one_list_in_one_order() -> None:
    """The old pin goes before the new one comes, and blocks that a pin holds are not evicted first."""
    rig = Rig(policy="static-ttl", static_ttl_s=5)
    assert kinds(rig.turn("p", 64, range(4), this_tool=("bash",))) == ["TurnFinished", "PinTaken"]
    waiting = rig.arrive("p", prompt(80), this_tool=("bash",))
    waiting.has_all_input = True  # a streaming session that ends before it ran
    assert kinds(rig.end(waiting, block_ids=range(5))) == ["PinReleased", "TurnFinished", "PinTaken"]
    assert set(+rig.references) == set(range(5))
    assert kinds(Rig().turn("p", 96, is_last_step=True)) == ["TurnFinished", "ProgramEnded", "EvictFirst"]


def test_after_a_call_from_which_few_return_the_turns_own_blocks_go_first() -> None:
    rig = Rig()
    for _ in range(20):
        rig.engine.learned.gaps.add_lost(NO_CALL)
    events = rig.turn("p", 64, range(4), this_tool=NO_CALL)
    assert kinds(events) == ["TurnFinished", "EvictFirst"] and events[0].retention.ttl_s == 0.0


def test_who_waits_is_told_why_once_and_again_when_the_reason_changes() -> None:
    """The first in line waits for room, the others behind it. Then the next one is the first."""
    rig = Rig(policy="continuum", longest_wait_s=1e6)
    running = rig.arrive("a", prompt(1000))
    rig.tick()
    for name in "bcd":
        rig.arrive(name, prompt(1000, ord(name)))

    def reasons(idle: bool = False) -> list[tuple[str, str, str, str | None]]:
        found = [
            e for e in rig.tick(idle) if isinstance(e, event_types.ProgramHeld | event_types.ProgramAdmitted)
        ]
        return [(type(e).__name__, e.program, e.start.reason, getattr(e, "behind", None)) for e in found]

    held = [("ProgramHeld", "b", "no-room", None), *(("ProgramHeld", n, "behind", "b") for n in "cd")]
    assert reasons() == held and reasons() == [], "once"
    rig.run(running)
    rig.end(running)
    assert reasons(idle=True) == [
        ("ProgramAdmitted", "b", "idle", None),
        ("ProgramHeld", "c", "no-room", None),
    ]


def test_the_share_of_late_turns_is_that_of_the_latest_first_tokens() -> None:
    rig = Rig()
    turns = rig.engine.turns
    assert turns.late_share(30.0) == 0.0, "before the first"
    for n in range(LATE_TURNS + LATE_TURNS // 4):
        turn = rig.arrive(None, prompt(64, n))
        rig.run(turn)
        rig.now_s += 31.0 if n < LATE_TURNS // 2 else 30.0
        turns.on_output(rig.now_s, {turn.id: 0}, [[7]])
        rig.end(turn)
    assert turns.late_share(30.0) == 0.25
    assert turns.late_share(0.0) == 0.0, "no limit"


def test_a_step_starts_programs_before_it_looks_at_pins() -> None:
    rig = Rig()
    rig.engine.policy = replace(rig.engine.policy, retain=lambda *_: Retention(1.0, "test"))
    rig.turn("p", 64, range(4))
    rig.arrive("q", prompt(64, 1))
    rig.now_s += 5
    assert kinds(rig.tick()) == ["ProgramAdmitted", "PinReleased"] and not +rig.references


def test_who_leaves_the_line_before_a_step_is_not_remembered() -> None:
    rig = Rig()
    for number in range(3):
        rig.end(rig.arrive(f"p{number}", prompt(64, number)), is_end=False)
        rig.tick()
    assert not rig.engine.admission.came


def test_a_program_is_overdue_after_its_call_and_active_again_once_it_is_back() -> None:
    rig = Rig()
    rig.turn("p", 64, this_tool=("bash",))
    program = rig.engine.programs.records[ProgramId("p")]
    assert program.stage is Stage.AWAY
    rig.now_s += 1000
    rig.tick()
    assert program.stage is Stage.OVERDUE and program.counts_as_ended
    assert rig.engine.learned.gaps.longer_share(("bash",), math.inf) > 0.0
    rig.arrive("p", prompt(80))
    assert program.stage is Stage.IN_LINE
    rig.tick()
    assert program.stage is Stage.ACTIVE and not program.counts_as_ended
    assert rig.engine.learned.gaps.longer_share(("bash",), math.inf) == 0.0


def test_no_table_but_the_programs_own_holds_a_fact_of_a_program() -> None:
    """Pins are things of their own; an ended program's record is kept whole; heaps hold times and names."""
    rig = Rig(policy="static-ttl", static_ttl_s=5)
    rig.turn("p", 64, range(4))
    rig.turn("q", 64, is_last_step=True)
    rig.arrive("r", prompt(64))
    found = {
        f"{type(owner).__name__}.{name}"
        for owner in (rig.engine, *vars(rig.engine).values())
        for name, table in attributes(owner)
        if isinstance(table, dict) and {"p", "q", "r"} & set(table)
    }
    assert found == {"ProgramTable.records", "PinTable.programs", "PinTable.pinned"}
    assert rig.engine.pins.programs is rig.engine.programs.records
    assert all(isinstance(program, Program) for program in rig.engine.end_claims[""].ended.values())


def test_an_ended_programs_record_is_one_whoever_else_reports_ends() -> None:
    rig = Rig()
    rig.turn("p", 64, owner="mine", is_last_step=True)
    arrival_s = rig.now_s
    for number in range(2 * MAX_ENDED):
        rig.now_s += 0.1
        rig.turn(f"x{number}", 64, owner="another's", is_last_step=True)
    assert rig.arrive("p", prompt(80), owner="mine").program.arrival_s <= arrival_s


def attributes(thing: Any) -> list[tuple[str, Any]]:
    names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
    return [(name, getattr(thing, name)) for name in names if hasattr(thing, name)]


def test_a_slice_repays_computing_again_where_the_tier_cannot_hold_all_programs() -> None:
    """An LRU has nothing left of who waits in line while the others fill it."""
    rig = Rig()
    rig.engine.refresh(rig.now_s, 100 * BLOCK, {Tier.DRAM: 5000})
    costs = rig.engine.learned.rates.costs
    from_dram = Residency(0, 1600, 0, 1601)
    for others, expected_s in ((0, costs.reload_s(from_dram)), (3, costs.prefill_s(1601))):
        for n in range(others):
            rig.arrive(f"other{n}", prompt(1600, n + 1))
        turn = rig.arrive("agent", prompt(1600))
        rig.tick()
        rig.run(turn)
        rig.end(turn, dram_tokens=1600)
        assert rig.engine.programs.records[turn.program.id].reload_s == expected_s


class Machine(RuleBasedStateMachine):
    """Turns of named and unnamed programs in any order; pins of any length; an engine that is idle or not."""

    def __init__(self) -> None:
        super().__init__()
        limits = {"max_pinned_share": 0.2, "max_tenant_share": 0.6, "max_ttl_s": MAX_TTL_S}
        self.rig = Rig(100, program_idle_s=100, longest_wait_s=MAX_WAIT_S, **limits)
        self.rig.engine.programs.max_programs = 6
        engine = self.rig.engine
        engine.policy = replace(engine.policy, retain=lambda *_: self.retention)
        self.retention = Retention(0.0, "test")
        self.live: dict[TurnId, Turn] = {}
        self.next_block = 1000

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.rig.now_s += seconds

    @rule(
        job=st.sampled_from(["a", "b", "c", "d", "e", "f", None]),
        tokens=st.integers(1, 2500),
        story=st.integers(0, 2),
        priority=st.integers(-1, 1),
        last=st.integers(0, 7),
        turns=st.sampled_from([0, 0, 0, 4]),
        a_step_follows=MOSTLY,
    )
    def a_turn_arrives(
        self, job: Any, tokens: int, story: int, priority: int, last: int, turns: int, a_step_follows: bool
    ) -> None:
        sent = {"priority": priority, "is_last_step": last == 7, "turns": turns}
        turn = self.rig.arrive(
            job, prompt(tokens, story), owner="even" if job in ("a", "c", "e") else "odd", **sent
        )
        self.live[turn.id] = turn
        if a_step_follows:
            self.a_step_passes(idle=True)

    @precondition(lambda self: any(t.started_s is None and not t.in_line for t in self.live.values()))
    @rule(data=st.data(), found_tokens=st.integers(0, 800))
    def a_turn_runs(self, data: st.DataObject, found_tokens: int) -> None:
        ready = sorted(t.id for t in self.live.values() if t.started_s is None and not t.in_line)
        self.rig.run(self.live[data.draw(st.sampled_from(ready))], found_tokens)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        ttl_s=st.sampled_from([0.0, 0.5, 3.0, 50.0]),
        blocks=st.integers(0, 9),
        shared=st.integers(0, 5),
        is_end=MOSTLY,
        has_run=MOSTLY,
    )
    def a_turn_ends(
        self, data: st.DataObject, ttl_s: float, blocks: int, shared: int, is_end: bool, has_run: bool
    ) -> None:
        turn = self.live.pop(TurnId(data.draw(st.sampled_from(sorted(self.live)))))
        if has_run and turn.started_s is None and not turn.in_line:
            self.rig.run(turn)
        self.retention = Retention(ttl_s, "test", asks_again=True)
        costs = replace(UNMEASURED, prefill=PrefillCurve(10 * ttl_s, 0.0, 0.0, 9))
        self.rig.engine.learned.rates = CalibratedCosts(costs)
        own = range(self.next_block, self.next_block + max(0, blocks - shared))
        self.next_block = own.stop
        self.rig.end(
            turn, is_end and turn.started_s is not None, block_ids=[*range(min(shared, blocks)), *own]
        )
        engine, program, now_s = self.rig.engine, turn.program, self.rig.now_s
        oldest_s = min((t.arrival_s for t in engine.turns.values() if t.started_s is None), default=now_s)
        longest_s = SLICE_RELOADS * program.reload_s * engine.programs.started
        had_turns = program.turns - program.turns_before_place >= SLICE_TURNS
        is_over = had_turns and now_s - program.placed_s >= longest_s
        is_late = now_s - oldest_s >= MAX_WAIT_S
        assert not (program.stage is Stage.AWAY and is_over and is_late), "it kept its place"

    @rule(idle=st.booleans())
    def a_step_passes(self, idle: bool) -> None:
        engine = self.rig.engine
        waited = engine.admission.is_waited_for
        started = [event for event in self.rig.tick(idle) if isinstance(event, event_types.ProgramAdmitted)]
        assert started or not (idle and waited), "an idle GPU always gets somebody who waits"
        assert all(self.ends_s(p) > self.rig.now_s for p in engine.pins.pinned.values()), (
            "a due pin was missed"
        )

    @rule(kv_blocks=st.sampled_from([100, 100, 60]))
    def the_tables_are_refreshed(self, kv_blocks: int) -> None:
        if self.rig.engine.is_refresh_due(self.rig.now_s):
            self.rig.do(self.rig.engine.refresh(self.rig.now_s, kv_blocks * BLOCK, {}))
            assert not self.rig.engine.is_refresh_due(self.rig.now_s + REFRESH_S / 2)

    def ends_s(self, pin: Pin) -> float:
        """When a pin ends, if there is no further event."""
        last_s = pin.taken_s + MAX_TTL_S
        waits = self.rig.engine.programs.records[pin.program].is_waiting
        return last_s if waits else min(pin.deadline_s, last_s)

    @invariant()
    def the_books_balance(self) -> None:
        engine = self.rig.engine
        engine.check()
        assert engine.turns.keys() == self.live.keys()
        assert {p.turn for p in engine.programs.records.values()} - {None} == self.live.keys()
        assert sum(n > 0 for n in self.rig.references.values()) == engine.pins.pinned_blocks
        assert min(self.rig.references.values(), default=0) >= 0
        deadlines = [self.ends_s(pin) for pin in engine.pins.pinned.values()]
        assert engine.pins.next_deadline_s() == min(deadlines, default=None)


Machine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=50, deadline=None
)
TestMachine = Machine.TestCase
