"""A connector without LMCache, for tests and the simulator."""

from __future__ import annotations

from connectors.fake.connector import FakeConnector

__all__ = ["FakeConnector"]
