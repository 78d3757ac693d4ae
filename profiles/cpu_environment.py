"""Variables of vLLM on a CPU, for timings that compare: of servers, and of the engine that is measured."""

from __future__ import annotations

import os

CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # with a KV connector vLLM binds its threads differently: fix it, or servers do not compare
    "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0"),
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
