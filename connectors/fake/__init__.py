"""A connector without LMCache, for tests and the simulator."""

from connectors.fake.connector import FakeConnector as FakeConnector
