"""`--data-parallel-size N`: turns of one program go to one rank of vLLM's own load balancer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from continuum_lmcache.vllm_plugin.hooks import api_keys, data_parallel
from continuum_lmcache.vllm_plugin.hooks.engine_args import SCHEDULERS

RANKS = [b"rank-0", b"rank-1", b"rank-2"]


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(api_keys.SECRET, "0" * 64)
    stock = DPLBAsyncMPClient.get_core_engine_for_request
    data_parallel.install(SCHEDULERS)
    yield
    DPLBAsyncMPClient.get_core_engine_for_request = stock


def balancer(scheduler: str = SCHEDULERS + "ContinuumScheduler", api_servers: int = 1) -> Any:
    """vLLM's own client with its load balancing, and without processes behind it."""
    client: Any = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)
    client.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler))
    client.core_engines, client.lb_engines = RANKS, [[0, 0, 0.0] for _ in RANKS]
    client.reqs_in_flight, client.engine_inflight = {}, Counter()
    client.streaming_reqs = set()  # from vLLM 0.33 on
    client.client_count, client.eng_start_index = api_servers, 0
    return client


def turn(
    number: int,
    job_id: str | None,
    *,
    salt: str | None = None,
    rank: int | None = None,
    prompt: Sequence[int] = (1, 2, 3),
    **says: Any,
) -> Any:
    fields = {**({"job_id": job_id} if job_id else {}), **says}
    return EngineCoreRequest(
        request_id=f"r{number}",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(extra_args=fields or None),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=rank,
    )


def sent(client: Any, *requests: Any, ends: bool = True) -> list[int]:
    """The ranks. Each request ends before the next one comes, or all stay unfinished."""
    ranks = []
    for request in requests:
        ranks.append(RANKS.index(client.get_core_engine_for_request(request)))
        if ends:
            client.reqs_in_flight.pop(request.request_id)
    return ranks


def test_later_turns_go_where_the_first_one_went() -> None:
    client = balancer()
    turns = [turn(i, f"p{i % 3}") for i in range(12)]
    found = sent(client, *turns)
    assert sorted(found[:3]) == [0, 1, 2], "first turns are spread as vLLM spreads them"
    assert found == found[:3] * 4


def test_a_name_that_conversations_share_spreads_them_as_vllm_does() -> None:
    """A gateway's constant header, or rollouts of a group under one id."""
    spread = Counter(sent(balancer(), *(turn(i, "shared") for i in range(60)), ends=False))
    assert spread == {0: 20, 1: 20, 2: 20}


def test_conversations_of_one_name_go_each_to_its_own_rank() -> None:
    client = balancer()
    stories = {n: list(range(n, n + 100)) for n in range(6)}
    first = [sent(client, turn(n, "shared", prompt=story), ends=False)[0] for n, story in stories.items()]
    assert set(first) == {0, 1, 2}
    client.reqs_in_flight.clear()
    later = [turn(10 + n, "shared", prompt=[*story, 7, 7]) for n, story in stories.items()]
    assert sent(client, *later, ends=False) == first


def test_two_api_servers_spread_a_name_that_conversations_share() -> None:
    client = balancer(api_servers=2)
    assert len(Counter(sent(client, *(turn(i, "shared") for i in range(60)), ends=False))) == 3


def test_stock_vllm_would_have_dealt_them_out() -> None:
    """The control: without our policy one program's turns meet all ranks."""
    client = balancer(scheduler="vllm.v1.core.sched.scheduler.Scheduler")
    assert set(sent(client, *(turn(i, "p") for i in range(6)))) == {0, 1, 2}


def test_what_names_no_program_goes_where_vllm_says() -> None:
    assert sorted(sent(balancer(), *(turn(i, None) for i in range(3)))) == [0, 1, 2]


def test_programs_of_two_tenants_with_one_name_are_two() -> None:
    client = balancer()
    first = sent(client, turn(0, "p", salt="ann"), turn(1, "p", salt="bob"))
    assert first[0] != first[1]
    assert sent(client, turn(2, "p", salt="bob"), turn(3, "p", salt="ann")) == first[::-1]


def test_a_rank_that_the_client_names_becomes_the_programs_home() -> None:
    client = balancer()
    turns = turn(0, "p", rank=2), turn(1, "p"), turn(2, "p", rank=1), turn(3, "p")
    assert sent(client, *turns) == [2, 2, 1, 1]


def test_a_program_that_is_over_may_start_anywhere_again() -> None:
    client = balancer()
    sent(client, turn(0, "p"), turn(1, "p", is_last_step=True))
    assert len(getattr(client, data_parallel.TABLE)) == 0


def test_two_api_servers_agree_without_a_word() -> None:
    pair = [balancer(api_servers=2), balancer(api_servers=2)]
    pair[1].lb_engines = [[9, 9, 0.9], [0, 0, 0.0], [5, 5, 0.5]]
    found = [sent(client, *(turn(i, f"p{i}") for i in range(30))) for client in pair]
    assert found[0] == found[1] and set(found[0]) == {0, 1, 2}


def test_a_home_that_was_scaled_away_is_left() -> None:
    client = balancer()
    sent(client, turn(0, "p", rank=2))
    client.core_engines, client.lb_engines = RANKS[:2], [[0, 0, 0.0]] * 2
    assert sent(client, turn(1, "p"))[0] < 2


def test_an_aborts_way_is_known_for_every_turn() -> None:
    client = balancer()
    sent(client, turn(0, "p"), turn(1, "p"), ends=False)
    assert set(client.reqs_in_flight) == {"r0", "r1"}
    assert [client.engine_inflight[client.reqs_in_flight[r]] for r in ("r0", "r1")] == [1, 1]


def test_a_name_that_cannot_be_used_does_not_stop_a_request() -> None:
    assert sent(balancer(), turn(0, "x" * 1000))[0] in (0, 1, 2)
