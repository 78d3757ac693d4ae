"""Waits for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 120.0  # for what takes milliseconds if the machine does nothing else; guards against a hang


def wait_for(done: Callable[[], Any], what: str = "it came to be so", every_s: float = 0.001) -> None:
    """Poll until the condition holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end_s, f"never within {PATIENCE_S:.0f} s: {what}"
        time.sleep(every_s)


def until_stored(llm: Any) -> None:
    """Step an engine in this process until LMCache has stored what ended: its blocks are held until then."""
    core = llm.llm_engine.engine_core.engine_core

    def is_stored() -> bool:
        core.step_fn()
        return not core.scheduler.requests

    wait_for(is_stored, "stores have ended", every_s=0.01)
