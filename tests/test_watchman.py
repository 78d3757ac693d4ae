"""What the engine's log says once a minute: a line where something is wrong, none where nothing is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from bench import BLOCK, Bench, prompt, settings  # noqa: F401

from continuum_lmcache.findings import error, note, warning
from continuum_lmcache.tiers import Transfer
from continuum_lmcache.types import Tier
from continuum_lmcache.vllm_plugin.scheduler import ContinuumScheduler
from continuum_lmcache.vllm_plugin.watchman import WINDOW_S, say

BLOCKS = 130
LOGGER = "vllm.continuum_lmcache"


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What this package logs as a warning or worse."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    level = logger.level
    logger.setLevel(logging.WARNING)  # another test may have silenced its parent
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def bench(model: Path, settings: Any, log: list[str]) -> Iterator[Bench]:  # noqa: F811
    settings(policy="program-fcfs")
    made = Bench(ContinuumScheduler, model, blocks=BLOCKS)
    log.clear()
    yield made
    made.run_until_idle()
    made.scheduler.shutdown()


def live(bench: Bench, seconds: float, act: Callable[[Bench], object] = Bench.step) -> None:
    """So many seconds pass, a step a second."""
    for _ in range(round(seconds)):
        act(bench)
        bench.now_s += 0.9


def test_a_server_on_which_nothing_is_wrong_logs_nothing(bench: Bench, log: list[str]) -> None:
    bench.send("p", prompt(32), out=100)
    live(bench, 3 * WINDOW_S)
    bench.send("p", prompt(40), out=10)
    live(bench, 2 * WINDOW_S)
    assert log == []


def test_an_idle_server_logs_nothing(bench: Bench, log: list[str]) -> None:
    live(bench, 3 * WINDOW_S)
    assert log == []


def test_turns_that_wait_while_one_fills_the_memory_are_told_once_a_minute(
    bench: Bench, log: list[str]
) -> None:
    """The first turn holds the whole cache for three minutes; the others wait for it."""
    bench.send("first", prompt(116 * BLOCK), out=180)
    for story in range(3):
        bench.send(f"late{story}", prompt(116 * BLOCK, story + 1), out=2)
    live(bench, 2 * WINDOW_S - 1)
    assert len(log) == 1
    live(bench, 55)
    assert [line.partition(":")[0] for line in log] == ["low-batch-memory-full"] * 2
    assert "1.0 turns run and 3.0 wait while 9" in log[1]
    live(bench, 2 * WINDOW_S)
    queue = [line for line in log if line.startswith("queue-over-target: turns waited 18")]
    assert queue and "To do: more comes in than this server can do" in queue[0]
    log.clear()
    live(bench, 2 * WINDOW_S)
    assert log == [], "it is over"


@pytest.mark.parametrize(
    ("name", "transfers"),
    [
        ("store-stalls", [Transfer(Tier.DRAM, "store", 100, 10**6, 1.0)] * 10),
        ("store-stalls", [Transfer(Tier.DRAM, "store", 100, 10**6, 1.0, in_step=False)] * 10),
    ],
)
def test_stores_that_hold_steps_up_are_told_and_those_beside_the_steps_are_not(
    bench: Bench, log: list[str], name: str, transfers: list[Transfer]
) -> None:
    live(bench, 2)
    bench.keeper.appraiser.moved(bench.now_s, transfers)
    live(bench, WINDOW_S)
    found = [line for line in log if line.startswith(name)]
    assert len(found) == int(transfers[0].in_step)
    live(bench, 2 * WINDOW_S)
    assert len(log) == len(found), "it is over, and no longer told"


def test_a_line_has_its_figure_and_what_to_do_and_notes_are_not_logged(log: list[str]) -> None:
    for kind in (error, warning, note):
        say(kind("name", "3 of 4", "do this"))
    assert log == ["name: 3 of 4. To do: do this"] * 2
