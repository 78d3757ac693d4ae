"""Until when an MP server may begin a load or a store that it was asked for.

    worker    asks at t: until t + mq_timeout - COPY_S, which goes along with the move's key
    server    gets to it later: refuses it before it touches vLLM's blocks
    worker    at t + mq_timeout: whatever became of it, its blocks are touched no more

A server that stood still would otherwise go on with all that it was asked for, in blocks that others have by
then. Both sides must read one clock: Linux's monotonic clock is the machine's, and a server that reads and
writes GPUs itself is on the same one. The worker makes sure, and sends no time where it is not so.

Seams, read in LMCache 0.5.6: IPCCacheServerKey.request_configs, which is no part of a key's identity, and
MPCacheServerContext.resolve_obj_keys, which store and retrieve of LMCacheDrivenTransferModule call first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

UNTIL = "continuum.until_s"
COPY_S = 5.0  # for what was begun in time, and what stands before it


def with_deadline(configs: Mapping[str, Any] | None, end_s: float) -> dict[str, Any]:
    """A move's request configs, where its blocks are somebody else's from `end_s` on."""
    return {**(configs or {}), UNTIL: end_s - COPY_S}


def is_late(configs: Mapping[str, Any] | None, now_s: float) -> bool:
    """Whether a move may not be begun any more."""
    return configs is not None and UNTIL in configs and now_s > configs[UNTIL]


def refuse_late_moves(context: Any, clock: Callable[[], float] = time.monotonic) -> None:
    """In the server: raise TimeoutError for them, which it logs. Nobody waits for the answer."""
    resolve = context.resolve_obj_keys

    def resolve_in_time(key: Any, *args: Any, **kwargs: Any) -> Any:
        if is_late(key.request_configs, clock()):
            raise TimeoutError(f"a load or store of request {key.request_id} comes too late, and is left out")
        return resolve(key, *args, **kwargs)

    context.resolve_obj_keys = resolve_in_time
