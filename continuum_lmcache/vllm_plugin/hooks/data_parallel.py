"""Sends a program's turns to one rank of `--data-parallel-size N`.

vLLM's load balancer picks the least busy rank for each request. A turn's pin may then be on one rank while
the program's next turn runs on another. Here the first turn goes to vLLM's choice, and later
ones to the same rank. API servers share no tables: where there are several, which is vLLM's default for
N > 1, a program's rank is a keyed hash of its name. Requests without a program go to vLLM's choice, and
so do requests that name a rank.

Seam, checked on vLLM 0.30 to 0.33: DPLBAsyncMPClient.get_core_engine_for_request(request), .core_engines
(by rank), .client_count, .reqs_in_flight, .vllm_config; EngineCoreRequest.sampling_params, .cache_salt,
.session_id, .data_parallel_rank.
"""

from __future__ import annotations

from typing import Any

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.fleet.homes import digest, hashed_replica
from continuum_lmcache.programs.identity import program_id, tenant_of
from continuum_lmcache.types import MOST_PROGRAMS
from continuum_lmcache.vllm_plugin.hooks import api_keys, wrapping
from continuum_lmcache.vllm_plugin.requests import identity

TABLE = "_continuum_homes"  # our attribute of vLLM's client


def install(schedulers: str) -> None:
    """Wrap the load balancer of this process's API server, once. It acts for schedulers of this module."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    stock = DPLBAsyncMPClient.get_core_engine_for_request

    @wrapping.hook(DPLBAsyncMPClient)
    def get_core_engine_for_request(self: Any, request: Any) -> Any:
        if not str(self.vllm_config.scheduler_config.scheduler_cls).startswith(schedulers):
            return stock(self, request)
        fields, _ = identity(request)
        if fields.job_id is None or request.request_id in self.reqs_in_flight:
            return stock(self, request)
        program = program_id(fields.job_id, tenant_of(request.cache_salt, fields.owner))
        homes: BoundedDict[bytes, int] = vars(self).setdefault(TABLE, BoundedDict(MOST_PROGRAMS))
        name = digest(program, api_keys.secret())  # the table has no name that a client chose
        if request.data_parallel_rank is None:
            ranks, home = len(self.core_engines), homes.get(name)
            if self.client_count > 1:
                home = hashed_replica(program, range(ranks), api_keys.secret())
            if home is not None and home < ranks:  # else it is gone: vLLM can scale down
                request.data_parallel_rank = home
        engine = stock(self, request)
        if fields.is_last_step:
            homes.pop(name, None)
        else:
            homes[name] = self.core_engines.index(engine)
        return engine
