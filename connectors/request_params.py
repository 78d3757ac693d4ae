"""Drops what LMCache would fail on of a request's `kv_transfer_params`.

vLLM passes that field on from any client of its API, and LMCache 0.5.6 reads it unchecked in the scheduler:

    lmcache.max_offload_tokens   compared with numbers
    lmcache.*                    sent to the server, part of keys, and of the names of files

One wrong value would end the engine for everybody. Without it the request is served as any other.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request

logger = init_logger("vllm.continuum.lmcache")


def drop_invalid(request: Request) -> None:
    """Remove them from the request's own mapping, which is that of its sampling parameters too."""
    params = request.kv_transfer_params
    if not isinstance(params, dict):
        # vllm_xargs can make it 0, false or "", which LMCache reads as a mapping
        request.kv_transfer_params = None
        return
    for name in [name for name, value in params.items() if not _is_valid(name, value)]:
        del params[name]
        logger.warning_once(
            "a request's kv_transfer_params has a value of %s on which LMCache 0.5.6 would end the engine: "
            "such requests are served without it",
            name if name == "lmcache.max_offload_tokens" else "lmcache.*",
        )


def _is_valid(name: object, value: Any) -> bool:
    if name == "lmcache.max_offload_tokens":
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
    if isinstance(name, str) and name.startswith("lmcache."):
        text = name + value if isinstance(value, str) else name
        return text.isprintable() and (value is None or isinstance(value, str | int | float))
    return True
