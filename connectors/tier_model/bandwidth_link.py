"""Transfer times of a link with one rate, first in, first out. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class BandwidthLink:
    """One direction between two places. `gbps` is 10^9 bytes a second; the default takes no time."""

    gbps: float = math.inf
    free_at_s: float = -math.inf

    def seconds(self, size_bytes: int) -> float:
        """How long `size_bytes` take without a wait for the link."""
        return size_bytes / (self.gbps * 1e9)

    def reserve(self, ready_s: float, size_bytes: int) -> float:
        """When bytes that are ready at `ready_s` have passed, after all earlier requests."""
        self.free_at_s = max(ready_s, self.free_at_s) + self.seconds(size_bytes)
        return self.free_at_s
