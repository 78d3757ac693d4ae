"""A server's prefill speed as a profile: what a lost prefix costs on this very machine.

Times the first token of prompts that no cache holds, through the server, and fits the curve that
`Costs` has. There is no second tier here: DRAM and disk keep the guesses, marked by 0 samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from continuum_lmcache.costs import UNMEASURED
from experiments.client import Client, request_body

LENGTHS_TOKENS = (256, 512, 1024, 2048, 4096)
REPEATS = 5
KV_BYTES_PER_TOKEN = 8192  # of the small model in bfloat16


async def timed(url: str, model: str) -> list[tuple[int, float]]:
    """(prompt tokens, seconds to the first token) of prompts that have nothing in common.

    Medians, after one round that does not count: a shared machine has slow moments.
    """
    draw = np.random.default_rng(0)
    rounds: list[list[float]] = []
    loop = asyncio.get_running_loop()
    async with Client(f"{url}/v1", timeout_s=120) as client:
        for _ in range(REPEATS + 1):
            rounds.append([])
            for tokens in LENGTHS_TOKENS:
                body = request_body(model, draw.integers(300, 4000, tokens).tolist(), 1)
                sent_s = loop.time()
                answer = await client.complete(body)
                rounds[-1].append(answer.first_s - sent_s)
    return [(n, median(took_s)) for n, *took_s in zip(LENGTHS_TOKENS, *rounds[1:], strict=True)]


def fitted(seen: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The fields of PrefillCurve: least squares on relative errors, no term below 0.

    seconds = fixed_s + per_token_s * n + per_pair_s * n^2 / 2, for n tokens without context.
    """
    tokens, took_s = np.array(seen).T
    terms = np.stack([np.ones_like(tokens), tokens, tokens**2 / 2], axis=1)
    scale = np.abs(terms).max(axis=0)  # nnls compares the columns' sizes
    found, _ = nnls(terms / scale / took_s[:, None], np.ones_like(took_s))
    names = ("fixed_s", "per_token_s", "per_pair_s")
    return dict(zip(names, (found / scale).tolist(), strict=True))


def profile(seen: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """In the format of `Costs.from_mapping`."""
    return {
        "prefill": fitted(seen) | {"samples": len(seen) * REPEATS},
        "dram": asdict(UNMEASURED.dram),
        "ssd": asdict(UNMEASURED.ssd),
        "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
        "chunk_tokens": UNMEASURED.chunk_tokens,
        "provenance": {"time_to_first_token_s": {int(n): round(took_s, 4) for n, took_s in seen}},
    }
