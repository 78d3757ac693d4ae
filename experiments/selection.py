"""Which programs a replay sends, and when they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from continuum_lmcache.errors import TraceError
from experiments import workload
from experiments.sim import trace_programs
from experiments.sim.workloads import seeds_sweep
from experiments.table1 import GENERATORS, generate
from experiments.workload import Program

DEFAULT_PROGRAMS = 20
SWEEP = "seeds-sweep"  # a generator: a published sweep's jobs of eight turns
LONGEST = 1.5  # times the middle context, of fitted programs


@dataclass(frozen=True, slots=True)
class Selection:
    """A trace or a generator, and the changes to its programs."""

    seed: int
    trace: Path | None = None  # None: the generator
    generator: str = (
        "swe"  # of Table 1, which also has the times of tools that a trace does not say; SWEEP; or a
    )
    # trace of sim/trace_programs.py, as "NAME" (programs fitted to it) or "NAME:report"
    count: int | None = None  # None: all of the trace, DEFAULT_PROGRAMS of the generator
    jps: float | None = None  # Poisson arrivals, programs a second; None: the trace's own
    max_context_tokens: int | None = None  # shrink all programs until the longest fits
    time_scale: float = 1.0  # of a trace's own arrivals, as of its gaps
    most_turns: int | None = None  # of a program only the first so many

    @property
    def name(self) -> str:
        """The programs' description, for a table's caption."""
        drawn = f"agents-{self.generator}" if self.is_agents else f"table1-{self.generator}"
        found = drawn if self.trace is None else self.trace.name
        return found if self.most_turns is None else f"{found}, first {self.most_turns} turns"

    @property
    def is_agents(self) -> bool:
        """Whether programs are an agent's, fitted or of a trace. bfcl alone is Table 1's."""
        return self.generator not in GENERATORS

    def programs(self, say: Callable[[str], None] = print) -> tuple[Program, ...]:
        """The programs in the order of their arrival; `say` gets notes. Raises TraceError."""
        programs = tuple(first_turns(p, self.most_turns) for p in self._chosen())
        if unknown := workload.unknown_gaps(programs):
            tools = "swe" if self.is_agents else self.generator
            say(f"{unknown} tool gaps are not in the trace: drawn from Table 1's {tools} tool times")
            programs = workload.with_gaps(programs, GENERATORS[tools].tool_s.draw, self.seed)
        if self.max_context_tokens is not None:
            programs = workload.scaled(programs, self.max_context_tokens)
        return self._arriving(programs)

    def _chosen(self) -> tuple[Program, ...]:
        if self.trace is None and self.generator == SWEEP:
            return seeds_sweep(self.jps or 1.0, self.seed)[: self.count or DEFAULT_PROGRAMS]
        if self.trace is None and self.is_agents:
            return self._agents(self.count or DEFAULT_PROGRAMS)
        if self.trace is None:
            return generate(self.generator, self.count or DEFAULT_PROGRAMS, self.seed)
        programs = workload.load_trace(self.trace)
        return programs if self.count is None else workload.sampled(programs, self.count, self.seed)

    def _agents(self, count: int) -> tuple[Program, ...]:
        """Programs of agents, none much longer than the middle one: one factor shrinks all to a window, and
        the longest of many would leave little of the others. Raises TraceError for an unknown name."""
        name, _, part = self.generator.partition(":")
        pool = trace_programs.half(name, part or trace_programs.FITTED)
        longest = LONGEST * median(p.context_tokens for p in pool)
        return trace_programs.drawn([p for p in pool if p.context_tokens <= longest], count, self.seed)

    def _arriving(self, programs: tuple[Program, ...]) -> tuple[Program, ...]:
        if self.jps is not None:
            return workload.poisson_arrivals(programs, self.jps, self.seed)
        if len(programs) > 1 and not any(p.arrival_s for p in programs):
            raise TraceError("the programs have no arrival times of their own; give --jps")
        first_s = min(p.arrival_s for p in programs)
        moved = (replace(p, arrival_s=(p.arrival_s - first_s) * self.time_scale) for p in programs)
        return tuple(sorted(moved, key=lambda p: p.arrival_s))


def first_turns(program: Program, most: int | None) -> Program:
    """The program, ended after this many turns; None: unchanged."""
    if most is None or len(program.turns) <= most:
        return program
    *others, last = program.turns[:most]
    return replace(program, turns=(*others, replace(last, gap_s=None)))
