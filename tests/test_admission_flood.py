"""A client that opens programs without end does not keep others from starting. Virtual time, core alone."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial

from admission_rig import AdmissionRig

from continuum_lmcache.admission.controller import KVCapacity
from continuum_lmcache.programs.context_growth import ContextGrowth
from continuum_lmcache.types import ProgramId

MAX_WAIT_S = 120.0
TURN_S = 0.3  # of a tiny program
FIRST_S, GAP_S, VICTIM_S = 1.0, 0.5, 6.0  # a victim's first turn, its first pause, all of its life
EXPECTED_S = 10.0  # for how long a program in a tool call is counted upon


def learned() -> ContextGrowth:
    """From thirty honest programs of six turns, 300 tokens to 660."""
    growth = ContextGrowth()
    for _ in range(30):
        growth.add_first_prompt(300)
        growth.add_turn(72)
        growth.program_ended(6)
    return growth


def victims_wait_s(
    says_the_truth: bool, prompt_share: float = 1.0, per_s: int = 60, lasts_s: int = 60
) -> float:
    """P95 of the wait of a victim (one every two seconds) beside this many programs of four tokens a second.

    Each of these ends after its one turn. The attacker does not report it. Prompts of four tokens take no
    time by themselves: `prompt_share` is that of others.
    """
    admission = AdmissionRig(KVCapacity(72 * 128), MAX_WAIT_S, learned())
    came: dict[ProgramId, float] = {}
    waits_s: list[float] = []
    later: list[tuple[float, int, Callable[[float], object]]] = []
    numbers = itertools.count()

    def do(at_s: float, *actions: Callable[[float], object]) -> None:
        for action in actions:
            heapq.heappush(later, (at_s, next(numbers), action))

    def start_program(now_s: float, program: ProgramId) -> None:
        if program in came:
            waits_s.append(now_s - came.pop(program))
            do(now_s + FIRST_S, partial(on_pause, program, 372))
            do(now_s + FIRST_S + GAP_S, lambda at_s: admission.on_arrival(at_s, program, 400))
            do(now_s + VICTIM_S, lambda _: admission.remove_program(program, 6))
        elif says_the_truth:
            do(now_s + TURN_S, lambda _: admission.remove_program(program, 1))
        else:
            do(now_s + TURN_S, partial(on_pause, program, 5))

    def on_pause(program: ProgramId, tokens: int, at_s: float) -> None:
        admission.on_pause(at_s, program, tokens, EXPECTED_S)

    for step in range(per_s * lasts_s):
        now_s = step / per_s
        admission.on_arrival(now_s, ProgramId(f"tiny-{step}"), 4)
        if step % (2 * per_s) == 0:
            came[victim := ProgramId(f"victim-{step}")] = now_s
            admission.on_arrival(now_s, victim, 300)
        while later and later[0][0] <= now_s:
            at_s, _, action = heapq.heappop(later)
            action(at_s)
        for program in admission.admit(now_s, idle=False, prompt_share=prompt_share):
            start_program(now_s, program)
        if step % per_s == 0:
            admission.programs.check()
    waits_s += [lasts_s - arrived_s for arrived_s in came.values()]
    return sorted(waits_s)[int(0.95 * len(waits_s))]


def test_tiny_programs_that_report_their_end_keep_nobody_waiting() -> None:
    assert victims_wait_s(says_the_truth=True) < 1.0


def test_tiny_programs_that_never_report_their_end_keep_nobody_waiting() -> None:
    assert victims_wait_s(says_the_truth=False, prompt_share=0.1) < 1.0
    assert victims_wait_s(says_the_truth=False) < 1.0, "an engine that others keep busy"
