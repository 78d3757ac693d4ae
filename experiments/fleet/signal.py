"""The signal to scale against live sessions.    python -m experiments.fleet.signal --sessions 34

Sessions as in `offload_sweep sessions`: the same trace, which is not part of the project, machine and rules.
The share of the limit is the mean of live programs over programs served in time, asked each EVERY_S.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Annotated

import typer

from experiments.fleet.rising import EVERY_S
from experiments.sessions import WARM_UP_TURNS, figures
from experiments.sim import sessions as closed_loop
from experiments.sim.trace_programs import sessions_of
from experiments.sweep.cases import Point, SessionPoint
from experiments.sweep.closed_loop import TRACE, WINDOW_TOKENS
from experiments.sweep.simulated import setup_of
from experiments.tables import markdown


class Asked(closed_loop.ClosedLoop):
    """Sessions whose engine is asked for its signal."""

    found: list[tuple[float, float]] = []  # noqa: RUF012 - of the one run of a process

    def run_for(self, counted_s: float) -> None:
        self.timetable.at(EVERY_S, self._ask)
        super().run_for(counted_s)

    def _ask(self) -> None:
        engine = self.engines[0].scheduler._engine
        in_time = engine.admission.programs_in_time
        if self.agents.counts_from_s is not None and in_time is not None:
            self.found.append((engine.programs.live, in_time))
        if not self.agents.are_gone:
            self.timetable.at(self.clock.now_s + EVERY_S, self._ask)


def main(
    sessions: int = 34,
    dram_kv: Annotated[float, typer.Option(help="DRAM in sizes of the KV cache")] = 0.0,
    seed: int = 3,
    counted_s: float = 1200.0,
    trace: str = "claude-code:report",
) -> None:
    """Play, and print a row in Markdown. One cell takes minutes."""
    name, _, part = trace.partition(":")
    programs, point = sessions_of(name, part, WINDOW_TOKENS), SessionPoint("continuum", sessions, seed)
    engine = Point(
        *("continuum", 1, 0.0, seed, TRACE + trace, point.machine),
        dram_kv=dram_kv,
        untold_ends=True,
        step_tokens=point.step_tokens,
        merge_steps=point.merge_steps,
    )
    setup = replace(setup_of(engine, programs), block_tokens=point.block_tokens)
    closed_loop.ClosedLoop = Asked  # type: ignore[misc]
    played = closed_loop.play(programs, setup, sessions, seed, counted_s, WARM_UP_TURNS)
    seen = figures(played.turns, sessions, played.start_s, played.end_s)
    live, in_time = (mean(each) for each in zip(*Asked.found, strict=True))
    share = mean(n / most for n, most in Asked.found)
    head = ["sessions", "tier", "live", "in time", "share of the limit", "sessions at the limit"]
    cells = [f"{sessions}", f"{dram_kv:g} x KV", f"{live:.1f}", f"{in_time:.1f}", f"{share:.2f}"]
    cells += [f"{sessions / share:.0f}", f"{seen['ttft_p90_s']:.0f}", f"{seen['in_time_share']:.2f}"]
    print(markdown([[*head, "P90, s", "turns in 30 s"], cells]))


if __name__ == "__main__":
    typer.run(main)
