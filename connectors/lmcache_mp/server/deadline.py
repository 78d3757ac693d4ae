"""Until when an MP server may begin a requested load or store.

    worker    requests at t, with t + mq_timeout - COPY_S in the transfer's key
    server    later than that: refuses the transfer before it touches vLLM's blocks
    worker    at t + mq_timeout: the transfer has ended or never begins, so its blocks are free

Without this a server that stood still would later execute all requests, in blocks that belong to others by
then. Both sides must read one clock. Linux's monotonic clock is the machine's, and a server that reads and
writes GPUs itself is on the same machine. The worker checks the clock, and else sends no deadline.

Used members (LMCache 0.5.6): IPCCacheServerKey.request_configs, which is no part of a key's identity, and
MPCacheServerContext.resolve_obj_keys, which store and retrieve of LMCacheDrivenTransferModule call first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

UNTIL = "continuum.until_s"
COPY_S = 5.0  # for a transfer begun in time, and those before it


def with_deadline(configs: Mapping[str, Any] | None, end_s: float) -> dict[str, Any]:
    """A transfer's request configs with its deadline; from `end_s` on its blocks may belong to others."""
    return {**(configs or {}), UNTIL: end_s - COPY_S}


def is_late(configs: Mapping[str, Any] | None, now_s: float) -> bool:
    return configs is not None and UNTIL in configs and now_s > configs[UNTIL]


def refuse_late_transfers(context: Any) -> None:
    """In the server: raise TimeoutError for late transfers; the server logs it, and no one waits for it."""
    resolve = context.resolve_obj_keys

    def resolve_in_time(key: Any, *args: Any, **kwargs: Any) -> Any:
        if is_late(key.request_configs, time.monotonic()):
            raise TimeoutError(
                f"a load or store of request {key.request_id} came after its deadline and is not executed"
            )
        return resolve(key, *args, **kwargs)

    context.resolve_obj_keys = resolve_in_time
