"""Tells the scheduler of calls that load weights: vLLM's (reload_weights, update_weights), and those of
trainers' worker extensions. Sleep and pause reset the connector's cache themselves.

Seam, unchanged from vLLM 0.30 to 0.33: EngineCore.collective_rpc, which runs between two steps.
"""

from __future__ import annotations

import re
from typing import Any

from continuum_lmcache.vllm_plugin.hooks import wrapping

LOADS = re.compile(r"weight|param|load|apply_model", re.IGNORECASE)


def install() -> None:
    """Once a process, when our scheduler is built."""
    from vllm.v1.engine.core import EngineCore

    stock = EngineCore.collective_rpc

    @wrapping.hook(EngineCore)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        note = getattr(self.scheduler, "on_new_weights", None)
        if note is not None and (not isinstance(method, str) or LOADS.search(method)):  # a function: any
            note()
        return stock(self, method, *args, **kwargs)
