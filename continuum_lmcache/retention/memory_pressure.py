"""The price of a second of a pin: full only while a turn waits for memory.

Eq. 2 of Continuum (arXiv 2511.02230 §4) charges 1 s for each second that a pin lasts, as if a turn
always waited for its blocks. Here the price depends on whether one does. So the TTL is computed
again when a pin expires and when a turn begins to wait, with the gap known to be
longer than it already took. A program that waits to start needs memory as much as a refused turn does.
This pays because of admission: it admits no more than fits the memory, so what a pin holds was mostly
reserved for its program already.
"""

from __future__ import annotations

IDLE_PRICE = 0.1  # while no turn waits for it: not 0, or a pin would never end; tuned (LOG.md, 2026-11-22)
CONTENDED_PRICE = 1.0  # the paper's


def pin_price(is_short: bool) -> float:
    """The price of a second of pin, in seconds. `is_short`: a refused turn or a new program waits."""
    return CONTENDED_PRICE if is_short else IDLE_PRICE
