"""What a second of a pin costs: its full price only while a turn waits for memory.

Eq. 2 of Continuum (arXiv 2511.02230 §4) charges 1 s for each second that a pin lasts, as if a turn
always waited for its blocks. Here the charge depends on whether one does, and so the question is
asked again when a pin runs out and when a turn begins to wait, by what is known then: the gap is
longer than it already took. A program that waits to start needs memory as much as a refused turn does.
Admission is why this pays: it gives out no more than the memory there is, so what a pin holds was mostly
counted for its program anyhow.
"""

from __future__ import annotations

IDLE_PRICE = (
    0.1  # while no turn waits for memory: not 0, or a pin would never end; tuned (LOG.md, 2026-11-22)
)
CONTENDED_PRICE = 1.0  # the paper's


def pin_price(is_short: bool) -> float:
    """Seconds that a second of pin is charged with. `is_short`: a refused turn or a new program waits."""
    return CONTENDED_PRICE if is_short else IDLE_PRICE
