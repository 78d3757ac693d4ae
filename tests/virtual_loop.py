"""An asyncio loop whose clock jumps to the next timer as soon as nothing else can run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps take no real time, and `loop.time()` starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
