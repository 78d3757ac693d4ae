"""Where KV lies, learned from a connector that does not say: the degraded mode.

All that any KV connector of vLLM tells is, at each return, how many tokens it can bring
(`get_num_new_matched_tokens`); and the clock tells how long bringing them took. From the first comes
the share of a context that lies below the GPU, in whatever tier; the second is a rate. Both are means
over all programs: no prefix is known by itself, so TTLs differ by context length and tool, no longer
by tier.
"""

from __future__ import annotations

from dataclasses import dataclass

from continuum_lmcache.tiers import Holding

LEAST_GAIN = 0.05  # a lasting change arrives within 2 % after 80 returns


@dataclass(slots=True)
class Hearsay:
    """Answers what a TierStore's `locate` answers, for the mean context."""

    share: float = 0.0  # of a context; 0 until something is known: a pin is worth most then
    returns: int = 0

    def returned(self, context_tokens: int, gpu_tokens: int, brought_tokens: int) -> None:
        """A program came back to a context of which the GPU had only the head left.

        What a connector holds is a head too, so it reaches to where it brought tokens from; one that
        brought none may hold less than the GPU did, and is taken to hold nothing.
        """
        held_tokens = gpu_tokens + brought_tokens if brought_tokens else 0
        self.returns += 1
        gain = max(LEAST_GAIN, 1.0 / self.returns)
        self.share += gain * (min(1.0, held_tokens / context_tokens) - self.share)

    def holding(self, tokens: int) -> Holding:
        """What a return would find of a context so long. One tier stands for all."""
        return Holding(int(self.share * tokens), 0)
