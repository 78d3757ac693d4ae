"""A step that an exception ends has computed nothing that may be stored.

vLLM lets the connector store in a `finally`, and a worker's SIGTERM is an exception wherever it is: KV that
was never computed would be stored under a prompt's name, and every server with that store would load it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("lmcache")


def test_a_step_that_an_exception_ends_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from connectors.lmcache_mp.connector import ContinuumLMCacheMPConnector

    kind: Any = ContinuumLMCacheMPConnector
    stored: list[str] = []
    stock = next(base for base in kind.__mro__[1:] if "wait_for_save" in vars(base))
    monkeypatch.setattr(stock, "wait_for_save", lambda _: stored.append("step"))
    connector = object.__new__(kind)
    connector._worker = None

    @contextmanager
    def step() -> Iterator[None]:  # as vLLM's KVConnectorModelRunnerMixin has it
        try:
            yield
        finally:
            connector.wait_for_save()

    with step():
        pass
    assert stored == ["step"]
    with pytest.raises(SystemExit), step():
        raise SystemExit
    assert stored == ["step"]
