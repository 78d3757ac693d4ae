"""What a finished turn costs the scheduler: parse, solve, observe.    python -m experiments.policy_bench

Median microseconds on this machine, one core. Goals: parsing 512 tokens under 200 us, all three
under 1 ms at 400 samples a key. The second table shows how parsing grows with hostile text: time
per character should not.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python PATH` as well as -m

from continuum_lmcache.config import ContinuumConfig
from continuum_lmcache.costs import UNMEASURED
from continuum_lmcache.gaps import Gaps
from continuum_lmcache.policies import POLICIES
from continuum_lmcache.toolcalls import MAX_CHARS, tool_calls, tool_key
from continuum_lmcache.types import Load, ProgramId, Residency, ToolKey, Turn

TAIL_CHARS = 2048  # 512 tokens of English or code
THOUGHT = "I need to find out why the test fails, so I shall run it again with more output. "
COMMAND = "cd /repo && export A=1 && timeout 60 python -m pytest tests/unit/test_io.py -x -q 2>&1 | tail -40"
SCRIPT = "cat <<'EOF' > check.py\n" + "print('x', flush=True)\n" * 60 + "EOF\npython check.py"
PATTERNS = ("`", "[", "{", '{"a":', "[f(", "<tool_call>{", "[TOOL_CALLS]{", "<function=", "```bash\n", "$(")
KEY: ToolKey = ("pytest tests/unit", "pytest", "bash")


def texts() -> dict[str, str]:
    """Turns of TAIL_CHARS characters in the usual formats, and one that calls nothing."""
    arguments = json.dumps({"command": COMMAND})
    ends = {
        "bash block": f"```bash\n{COMMAND}\n```",
        "bash block, here-document": f"```bash\n{SCRIPT}\n```",
        "Hermes": f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>',
        "Qwen XML": f"<tool_call><function=bash><parameter=command>{COMMAND}</parameter></function>",
        "OpenAI": json.dumps({"tool_calls": [{"function": {"name": "bash", "arguments": arguments}}]}),
        "pythonic": f"[bash(command={json.dumps(COMMAND)})]",
        "no call": "So the answer is 42.",
    }
    return {name: (THOUGHT * 26)[: TAIL_CHARS - len(end) - 1] + "\n" + end for name, end in ends.items()}


def median_us(call: Callable[[], object], rounds: int) -> float:
    """Median duration of one call, in microseconds."""
    durations_ns = []
    for _ in range(rounds):
        start_ns = time.perf_counter_ns()
        call()
        durations_ns.append(time.perf_counter_ns() - start_ns)
    return median(durations_ns) / 1e3


def learned(samples: int, lost: int) -> Gaps:
    """Gaps with log-normal samples of one key, `lost` of them never ended."""
    draw, gaps = random.Random(1), Gaps()
    for i in range(samples):
        (gaps.censor if i < lost else gaps.observe)(KEY, draw.lognormvariate(0.0, 1.5))
    return gaps


def steps(samples: int) -> dict[str, Callable[[], object]]:
    """What may happen at the end of a turn, by name."""
    turn = Turn(ProgramId("p"), 3, KEY, 40_000, 2500, Residency(0, 30_000, 0, 40_000))
    load = Load(10_000, 2000, 1000, 5, queue_delay_s=3.0, queue_delay_samples=100)
    gaps, lossy, draw = learned(samples, 0), learned(samples, samples // 20), random.Random(2)

    def solving(name: str, seen: Gaps) -> Callable[[], object]:
        return partial(POLICIES[name].retain, turn, seen, UNMEASURED, load, ContinuumConfig(policy=name))

    return {
        **{f"parse: {name}": partial(tool_key, text) for name, text in texts().items()},
        **{f"solve: {name}": solving(name, gaps) for name in POLICIES},
        "solve: continuum, 5 % of the gaps censored": solving("continuum", lossy),
        "observe (three levels and all)": lambda: lossy.observe(KEY, draw.lognormvariate(0.0, 1.5)),
    }


def finished_turn(samples: int, rounds: int) -> Table:
    table = Table("per finished turn", "median us", title=f"{samples} samples a key, {TAIL_CHARS} characters")
    costs_us = {name: median_us(call, rounds) for name, call in steps(samples).items()}
    for name, cost_us in costs_us.items():
        table.add_row(name, f"{cost_us:.0f}")
    kinds = ("parse", "solve", "observe")
    total_us = sum(max(us for name, us in costs_us.items() if name.startswith(kind)) for kind in kinds)
    table.add_row("the dearest of each together", f"{total_us:.0f}")
    return table


def growth(rounds: int) -> Table:
    """How long hostile text takes to parse, by its size."""
    sizes = (MAX_CHARS // 4, MAX_CHARS // 2, MAX_CHARS, 2**20)
    columns = [f"{size:,}" for size in sizes]
    table = Table("pattern", *columns, "twice the text", title="us by characters of hostile text")
    for pattern in PATTERNS:
        made = [(pattern * (size // len(pattern) + 1))[:size] for size in sizes]
        costs_us = [median_us(partial(tool_calls, text), rounds) for text in made]
        table.add_row(repr(pattern), *(f"{c:.0f}" for c in costs_us), f"x {costs_us[2] / costs_us[1]:.1f}")
    return table


def main(
    samples: Annotated[int, typer.Option(help="observations behind the key")] = 400,
    rounds: Annotated[int, typer.Option(help="calls a median is taken over")] = 300,
) -> None:
    """Print both tables."""
    console = Console()
    console.print(finished_turn(samples, rounds))
    console.print(growth(max(rounds // 30, 3)))


if __name__ == "__main__":
    typer.run(main)
