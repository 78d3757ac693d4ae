"""Sends a program's turns to one rank of `--data-parallel-size N`.

vLLM's load balancer picks the least busy rank for each request. A turn's pin may then be on one rank while
the program's next turn runs on another. Here the first turn goes to vLLM's choice, and later
ones to the same rank. API servers share no tables: where there are several, which is vLLM's default for
N > 1, a name's first program goes to the rank of a keyed hash. Requests without a program go to vLLM's
choice, and so do requests that name a rank.

A name alone chooses no rank, since conversations may share it: while its turn is in flight, further requests
go to vLLM's choice, and so does a prompt that does not repeat the end of the program's first one.

Seam, checked on vLLM 0.30 to 0.33: DPLBAsyncMPClient.get_core_engine_for_request(request), .core_engines
(by rank), .client_count, .reqs_in_flight, .vllm_config; EngineCoreRequest.sampling_params, .cache_salt,
.prompt_token_ids, .session_id, .data_parallel_rank.
"""

from dataclasses import dataclass
from typing import Any, Self

from continuum_lmcache.bounded_dict import BoundedDict
from continuum_lmcache.programs.identity import hidden, namespace_of, program_id
from continuum_lmcache.types import MOST_PROGRAMS, ProgramId
from continuum_lmcache.vllm_plugin.hooks import api_keys, wrapping
from continuum_lmcache.vllm_plugin.requests import identity

TABLE = "_continuum_homes"  # our attribute of vLLM's client
MOST_HOMES = 16  # of one name
REPEATED = 64, 32  # tokens before a first prompt's end: behind what programs share, before the opening


@dataclass(slots=True)
class Home:
    repeated: slice  # the place of tokens that all of its prompts have
    tokens: int  # their hash
    rank: int = 0
    request_id: str = ""  # the latest turn's

    @classmethod
    def of(cls, request: Any) -> Self:
        prompt_tokens = len(request.prompt_token_ids or ())
        repeated = slice(*(max(0, prompt_tokens - before) for before in REPEATED))
        return cls(repeated, tokens_at(request, repeated))


def tokens_at(request: Any, place: slice) -> int:
    return hash(tuple((request.prompt_token_ids or ())[place]))


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
        program = program_id(fields.job_id, namespace_of(request.cache_salt, fields.owner))
        table: BoundedDict[ProgramId, list[Home]] = vars(self).setdefault(TABLE, BoundedDict(MOST_PROGRAMS))
        name = hidden(program, api_keys.secret())  # the table has no name that a client chose
        homes, ranks = table.pop(name, []), len(self.core_engines)
        live = [home for home in homes if home.request_id in self.reqs_in_flight]
        idle = (home for home in homes if home not in live)
        home = next((home for home in idle if tokens_at(request, home.repeated) == home.tokens), None)
        rank = home.rank if home is not None else None
        if not homes and self.client_count > 1:
            rank = int(name, 16) % ranks
        if request.data_parallel_rank is None and rank is not None and rank < ranks:
            request.data_parallel_rank = rank  # else it is gone: vLLM can scale down
        engine = stock(self, request)
        if home is None:
            homes.append(home := Home.of(request))
        home.rank, home.request_id = self.core_engines.index(engine), request.request_id
        if fields.is_last_step:
            homes.remove(home)
        if homes:
            table[name] = homes[-MOST_HOMES:]
        return engine
