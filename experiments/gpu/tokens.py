"""Checks that every token is right: the small model with real weights, on this device.

Each run plays programs that hit the GPU's cache, DRAM and the disk, are preempted and loaded again, and
repeat a prompt that is cached whole. Plain PyTorch in float32 computes the log probabilities that each answer
should have (experiments/exactness.py). A turn's error is the mean of its tokens' errors.

    roomy     no connector, enough KV for all: the effect of rounding alone in this dtype
    pressed   LMCache's server with DRAM and a disk, too little of everything
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from experiments.exactness import (
    CHUNK,
    KINDS,
    OUTPUT_TOKENS,
    SETTINGS,
    WAYS,
    Conversation,
    engine,
    off_by,
    play,
    play_all_ways,
    reference,
    sources,
)
from experiments.mp_server import serve_mp
from experiments.tiny_model import KV_BYTES_PER_TOKEN

PROGRAMS = 8  # at once
MP_DRAM_CHUNKS = 32  # the server keeps a fifth of it free, and what it loads from disk must fit there
ROOMY_TOKENS = PROGRAMS * 2048
EVICTED_S = 1.1  # LMCache's server evicts once a second; on a GPU a program is over by then
EXACT = {"cpu": 1e-3, "cuda": 2e-2}  # in float32, how far a log probability may be off; GPUs round matmuls
ROUNDING = 2.0  # in bfloat16: times the roomy run's worst turn


def checked(device: str, dtype: str, folder: Path) -> dict[str, Any]:
    """One dtype. `failed` has the problems; "" if nothing is."""
    kind = KINDS[device]
    os.environ.update(SETTINGS | dict(kind.env))
    played: dict[str, list[Conversation]] = {}
    if dtype != "float32":
        llm = engine(None, kind, dtype, ROOMY_TOKENS)
        played["roomy"] = play(llm, PROGRAMS, seed=0)
        llm.llm_engine.engine_core.shutdown()
        del llm
    with ExitStack() as until:
        # An engine that is not shut down may still write there.
        folder_of_run = TemporaryDirectory(dir=folder, prefix="disk-", ignore_cleanup_errors=True)
        disk = Path(until.enter_context(folder_of_run)).resolve()
        llm = engine(over_server(until, disk, dtype, folder), kind, dtype)
        until.callback(llm.llm_engine.engine_core.shutdown)
        rest_s = EVICTED_S if device == "cuda" else 0.0
        played["pressed"] = play_all_ways(llm, PROGRAMS, WAYS, rest_s)
        found = sources(llm)
    model = reference(device)
    off = {
        name: turns_off(conversations, lambda conversation: off_by(conversation, model))
        for name, conversations in played.items()
    }
    figures = {name: figures_of(turns) for name, turns in off.items()}
    missing = [way for way in WAYS if not found[way]]
    failed = [f"no prompt came by way of: {', '.join(missing)}"] if missing else []
    failed += wrong(figures, EXACT[device] if dtype == "float32" else None)
    return {"dtype": dtype, "ways": dict(found), **figures, "failed": "; ".join(failed)}


def over_server(until: ExitStack, disk: Path, dtype: str, folder: Path) -> dict[str, Any]:
    """An LMCache server of the same sizes, and its connector."""
    gib = MP_DRAM_CHUNKS * CHUNK * KV_BYTES_PER_TOKEN[dtype] / 2**30
    mp = until.enter_context(serve_mp(gib, disk, folder / "lmcache-tokens.log"))
    ours = {
        "kv_connector": "ContinuumLMCacheMPConnector",
        "kv_connector_module_path": "connectors.lmcache_mp",
    }
    recorded = mp.transfer_config["kv_connector_extra_config"] | {"continuum.run_output_dir": f"{disk}/run"}
    return {**mp.transfer_config, **ours, "kv_connector_extra_config": recorded}


def turns_off(
    conversations: Sequence[Conversation], off: Callable[[Conversation], list[float]]
) -> list[list[float]]:
    """The error of each turn's tokens."""
    found = []
    for conversation in conversations:
        tokens = off(conversation)
        found += [tokens[at : at + OUTPUT_TOKENS] for at in range(0, len(tokens), OUTPUT_TOKENS)]
    return found


def figures_of(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    tokens = sorted(off for turn in turns for off in turn)
    return {
        "turns": len(turns),
        "tokens": len(tokens),
        "median": median(tokens),
        "worst_token": tokens[-1],
        "worst_turn": max(fmean(turn) for turn in turns),
    }


def wrong(figures: Mapping[str, Mapping[str, float]], exact: float | None) -> list[str]:
    """The problems found. `exact`: the bound of a token's error in float32; None: that of rounding."""
    pressed = figures["pressed"]
    if exact is not None:
        is_off = pressed["worst_token"] >= exact
        return [f"a token is off by {pressed['worst_token']:.2g}, {exact:g} is rounding"] if is_off else []
    bound = ROUNDING * figures["roomy"]["worst_turn"]
    if pressed["worst_turn"] <= bound:
        return []
    mean = f"{pressed['worst_turn']:.2g}"
    return [f"a turn's tokens are off by {mean} on average; twice what rounding does is {bound:.2g}"]
