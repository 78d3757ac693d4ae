"""A small server with in-process LMCache: the fixed sizes of `fidelity` and of the dashboard's picture.

The proportions are those of the paper's offload experiment (Continuum, arXiv 2511.02230, full version,
Fig. 9: SWE-Bench on one A100): GPU KV for about 7 mean final contexts, DRAM as large, disk twice that;
tool time about a third of the work, hence TIME_SCALE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments import tiny_model
from experiments.server import fast_dtype
from experiments.sweep.live import OURS

ROOT = Path(__file__).parents[1]
WINDOW_TOKENS = 4096
BLOCK_TOKENS = 128  # vLLM's default on a CPU
GPU_BLOCKS = 120
CHUNK_TOKENS = 128  # LMCache's; the default of 256 is coarse beside contexts of 2,000 tokens
DTYPE = fast_dtype()
PROFILE = tiny_model.profile_here()
KV_BYTES_PER_TOKEN = tiny_model.KV_BYTES_PER_TOKEN[DTYPE]
TIME_SCALE = 0.125  # 2 to 3 s of work a program where the paper's takes 22.7 s


def tiers(disk: Path) -> dict[str, Any]:
    """LMCache's settings, on top of lmcache.json."""
    gpu_gib = GPU_BLOCKS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN / 2**30
    return {
        "lmcache.chunk_size": CHUNK_TOKENS,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": gpu_gib,
        "lmcache.local_disk": f"file://{disk}/",
        "lmcache.max_local_disk_size": 2 * gpu_gib,
        "continuum.profile": str(ROOT / "profiles" / PROFILE),  # stock fcfs does not read it
    }


def connector(disk: Path, path: Path) -> Path:
    """The repository's lmcache.json with these tiers and our connector, for any policy, in `path`."""
    config = json.loads((ROOT / "lmcache.json").read_text()) | OURS
    config["kv_connector_extra_config"] = config.get("kv_connector_extra_config", {}) | tiers(disk)
    path.write_text(json.dumps(config, indent=1))
    return path
