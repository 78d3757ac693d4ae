"""The load generator's requests and records: prompts, arrivals and gaps, identity, failures."""

import asyncio
import json
from dataclasses import replace

import pytest
from openai_server import FakeServer
from virtual_loop import run_virtually
from waiting import PATIENCE_S

from experiments.client import Answer, Client, TurnFailed, request_body
from experiments.driver import Plan, next_prompt, run
from experiments.summary import over_the_run, summarise
from experiments.table1 import generate
from experiments.workload import Program, TurnSpec, scaled

pytestmark = pytest.mark.anyio
PLAN = Plan("fake", 1, range(300, 4000), shared_prefix_tokens=64)
HOW = {"label": "test", "seed": 1, "jps": 1.0, "time_scale": 1.0, "workload": "w", "programs": 1}
GROWS = Program("grows", 0.0, (TurnSpec(100, 100, 4, "bash", "ls -l", 0.0), TurnSpec(110, 6, 3)))


def small(count, window=400):
    return scaled(generate("swe", count, 2), window)


def at_once(programs):
    """The programs without tool time."""
    return [replace(p, turns=tuple(replace(t, gap_s=0.0) for t in p.turns)) for p in programs]


class Instant:
    """A server on the loop's own clock: a first token after 0.5 s, the last one 1 s later."""

    def __init__(self, fails_at=None):
        self.sent = []
        self.fails_at = fails_at

    async def complete(self, body):
        loop = asyncio.get_running_loop()
        self.sent.append((loop.time(), body))
        if len(self.sent) == self.fails_at:
            raise TurnFailed("broken")
        await asyncio.sleep(1.5)
        answer = tuple(range(5000, 5000 + body["max_tokens"]))
        return Answer(loop.time() - 1.0, loop.time(), answer, len(body["prompt"]), None)


def virtually(programs, plan=PLAN, fails_at=None):
    server, records = Instant(fails_at), []
    run_virtually(run(programs, plan, server.complete, records.append))
    return server.sent, records


def over_http(programs, server, plan=PLAN):
    """The programs replayed against a real socket; the server keeps the requests."""

    async def go():
        records = []
        async with server.running() as url, Client(url, timeout_s=PATIENCE_S) as client:
            await run(programs, plan, client.complete, records.append)
        return records

    return asyncio.run(go())


def test_every_prompt_has_exactly_the_length_that_the_program_says():
    programs, server = at_once(small(5)), FakeServer()
    records = over_http(programs, server)
    wanted = sorted(t.input_tokens for p in programs for t in p.turns)
    assert sorted(len(body["prompt"]) for body in server.bodies) == wanted
    assert sorted(r.prompt_tokens for r in records) == wanted
    outputs = sorted(t.output_tokens for p in programs for t in p.turns)
    assert sorted(r.output_tokens for r in records) == outputs
    assert {r.cached_tokens == r.prompt_tokens // 2 for r in records} == {True}


def test_every_prompt_extends_the_tokens_that_the_server_really_answered():
    server = FakeServer()
    over_http([GROWS], server)
    first, second = server.bodies
    assert second["prompt"][:104] == first["prompt"] + server.answers[0]
    assert len(second["prompt"]) == 110


def test_a_stripped_history_is_cut_where_the_trace_says():
    cut = Program("cut", 0.0, (TurnSpec(100, 100, 50), TurnSpec(120, 20, 1)))
    prompt = next_prompt(range(1000, 1150), cut, 2, PLAN)
    assert prompt[:100] == tuple(range(1000, 1100)) and len(prompt) == 120
    assert all(300 <= token < 4000 for token in prompt[100:])


def test_programs_share_the_system_prefix_and_nothing_else():
    one, two = (next_prompt((), p, 1, PLAN) for p in generate("swe", 2, 1))
    assert one[:64] == two[:64]
    assert sum(a == b for a, b in zip(one[64:], two[64:], strict=False)) < 0.01 * min(len(one), len(two))


def test_turns_arrive_when_the_program_and_its_tools_say():
    program = Program("p", 3.0, (TurnSpec(10, 10, 2, gap_s=4.0), TurnSpec(14, 2, 1)))
    sent, records = virtually([program], Plan("fake", 1, PLAN.vocabulary, time_scale=0.5))
    assert [at_s for at_s, _ in sent] == pytest.approx([3.0, 3.0 + 1.5 + 2.0])
    assert [(r.t_arrive, r.t_first, r.t_done, r.gap_s) for r in records] == [
        pytest.approx((3.0, 3.5, 4.5, 2.0)),
        pytest.approx((6.5, 7.0, 8.0, 0.0)),
    ]


def test_only_the_last_turn_says_that_it_is_the_last():
    programs = small(6)
    sent, _ = virtually(programs)
    last = {p.program_id: len(p.turns) for p in programs}
    seen = dict.fromkeys(last, 0)
    for _, body in sent:
        seen[body["job_id"]] += 1
        assert body["is_last_step"] is (seen[body["job_id"]] == last[body["job_id"]])


def test_a_turn_names_its_tool_and_what_a_shell_runs():
    turns = (
        TurnSpec(9, 9, 1, "Bash", "cd /testbed && pytest -x", 0.0),
        TurnSpec(12, 2, 1, "Read", "a.py", 0.0),
        TurnSpec(14, 1, 1),
    )
    sent, _ = virtually([Program("p", 0.0, turns)])
    assert [body.get("this_func_call") for _, body in sent] == ["Bash pytest", "Read", None]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("http", "HTTP 503: "),
        ("error event", "engine died"),
        ("cut", "the stream ended before [DONE]"),
        ("no ids", "return_token_ids"),
    ],
)
def test_a_failing_turn_is_recorded_never_retried_and_ends_its_program_alone(how, said):
    server = FakeServer(fails_at=1, how=how)
    late = Program("late", 0.3, GROWS.turns)
    records = over_http([GROWS, late], server)
    (failed,) = [r for r in records if r.error]
    assert len(server.bodies) == 3 and failed.turn == 1
    assert said in failed.error and failed.t_done is None
    assert [r.turn for r in records if r.program != failed.program] == [1, 2]


async def test_a_stream_is_read_to_its_end_though_the_answer_was_done_before():
    """A proxy in between counts a client that leaves at [DONE] as aborted."""
    server = FakeServer(lingers_s=0.3)
    async with server.running() as url, Client(url, timeout_s=PATIENCE_S) as client:
        answer = await client.complete(request_body("fake", [1], 2))
    assert answer.done_s < server.read_to_end_s


async def test_a_server_that_falls_silent_is_given_up_after_the_timeout():
    async def silent(reader, _writer):
        await reader.read()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}/v1", timeout_s=0.2) as client:
        with pytest.raises(TurnFailed, match="imeout"):
            await client.complete(request_body("m", [1], 1))


def test_a_summary_counts_what_finished_and_what_failed():
    turns = (TurnSpec(10, 10, 2, gap_s=1.0), TurnSpec(14, 2, 1))
    programs = [Program(f"p{i}", float(i), turns) for i in range(3)]
    _, records = virtually(programs, fails_at=2)
    summary = summarise(records, {}, HOW)
    assert (summary["finished"], summary["errors"], summary["turns"]) == (2, 1, 4)
    same = dict.fromkeys(("mean", "p50", "p95", "p99", "max"), 4)
    assert summary["job_time_s"] == pytest.approx({"n": 2, **same})
    assert summary["ttft_s"]["max"] == pytest.approx(0.5)
    assert summary["turn_s"]["mean"] == pytest.approx(1.5)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (48, 6)
    assert summary["jobs_per_s"] == pytest.approx(2 / 6)
    assert json.loads(json.dumps(summary)) == summary


def test_counters_are_differences_and_gauges_are_as_found():
    page = (
        '# TYPE continuum_pins_total counter\ncontinuum_pins_total{{outcome="taken"}} {}\n'
        "# TYPE continuum_pinned_blocks gauge\ncontinuum_pinned_blocks {}\n"
    )
    found = over_the_run(page.format(5, 9), page.format(8, 2))
    assert found == {'continuum_pins_total{outcome="taken"}': 3, "continuum_pinned_blocks": 2}
