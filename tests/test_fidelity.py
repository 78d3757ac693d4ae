"""The comparison of simulator and real servers, without a server: its probes, and its tables."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import yaml
from openai_server import FakeServer

from continuum_lmcache.capacity.kv_budget import WorkerSpec
from experiments import small_tiers
from experiments.calibrated_simulator import (
    BATCH,
    LONG_TOKENS,
    SHORT_TOKENS,
    ProbeTimes,
    ServerOverhead,
    behind_a_hop,
    lmcache_tiers,
    overhead_of,
    predicted,
)
from experiments.fidelity import PROBES, figures, probed, selection
from experiments.fidelity_tables import comparison, order, ranking, write_csv
from experiments.sim.step_time import Machine

PROFILE = Path(__file__).resolve().parent.parent / "profiles" / small_tiers.PROFILE


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.from_profile(yaml.safe_load(PROFILE.read_text()), PROFILE.name, kv_tokens=119 * 128)


SERVER = ServerOverhead(slower=1.3, hop_s=0.02, hop_per_token_s=2e-5, step_s=0.004, per_sequence_s=0.001)


def probes_of(machine: Machine, server: ServerOverhead) -> ProbeTimes:
    """The probe times of a server like that."""

    def first_s(batch: tuple[int, int]) -> float:
        step_s = server.slower * machine.seconds([batch]) + server.step_s
        return server.hop_of(sum(batch)) + step_s

    def between_s(turns: int) -> float:
        step_s = server.slower * machine.seconds([(1, 16)] * turns) + server.step_s
        return step_s + server.per_sequence_s * (turns - 1)

    return ProbeTimes(first_s((16, 0)), first_s((1088, 0)), first_s((64, 1024)), between_s(1), between_s(6))


def test_a_servers_overhead_follows_from_five_probe_times(machine: Machine) -> None:
    for server in (
        SERVER,
        ServerOverhead(),
        ServerOverhead(slower=0.9),
        ServerOverhead(hop_s=0.1),
        ServerOverhead(per_sequence_s=0.01),
    ):
        assert astuple(overhead_of(probes_of(machine, server), machine)) == pytest.approx(
            astuple(server), abs=1e-9
        )


def test_a_probe_faster_than_the_profile_leaves_no_negative_time(machine: Machine) -> None:
    seen = replace(probes_of(machine, ServerOverhead()), alone_s=0.001, batch_s=0.001)
    assert min(astuple(overhead_of(seen, machine))) >= 0


def test_a_server_is_probed_with_prompts_that_no_cache_holds() -> None:
    server = FakeServer()

    async def probe() -> tuple[ProbeTimes, float]:
        loop = asyncio.get_running_loop()
        async with server.running() as url:
            start_s = loop.time()
            return await probed(url.removesuffix("/v1")), loop.time() - start_s

    seen, took_s = asyncio.run(probe())
    assert all(0 <= s < took_s for s in astuple(seen))
    prompts = Counter((tuple(body["prompt"]), body["max_tokens"]) for body in server.bodies)
    assert {len(prompt) for prompt, _ in prompts} == {SHORT_TOKENS, LONG_TOKENS}
    again = Counter(n for (prompt, _), n in prompts.items() if len(prompt) == LONG_TOKENS)
    assert again == {1: 1, 2: PROBES}, "each long prompt twice, but for the one that warms up"
    assert server.most_at_once == BATCH


def test_a_slower_machine_takes_every_step_longer(machine: Machine) -> None:
    for batch in ([(1, 500)], [(512, 128), (1, 2000)]):
        inside = ServerOverhead(slower=2.0, step_s=0.5, per_sequence_s=0.1).added_to(machine)
        assert inside.seconds(batch) == pytest.approx(2 * machine.seconds(batch) + 0.5 + 0.1 * len(batch))


def test_a_hop_lengthens_every_gap_and_no_program_ends_with_one() -> None:
    plain = selection(seed=1, programs=2).programs(lambda _: None)
    server = ServerOverhead(hop_s=0.5, hop_per_token_s=0.001)
    for before, after in zip(plain, behind_a_hop(plain, server), strict=True):
        grown = [b.gap_s - a.gap_s for a, b in zip(before.turns[:-1], after.turns[:-1], strict=True)]
        due = [0.5 + 0.001 * turn.context_tokens for turn in before.turns[1:]]
        assert grown == pytest.approx(due) and after.turns[-1].gap_s is None


def test_a_prediction_has_the_columns_of_a_measurement_and_follows_the_speed(machine: Machine) -> None:
    run = (selection(seed=1, programs=3), machine)
    plain = predicted(*run, ServerOverhead(), "continuum", True, 2048, 64)
    slow = predicted(*run, ServerOverhead(slower=2.0), "continuum", True, 2048, 64)
    assert slow["mean_s"] > 1.5 * plain["mean_s"]
    assert sum(plain[f"{name}_share"] for name in ("gpu", "offload", "computed")) == pytest.approx(1.0)
    summary = {
        "tokens_by_source": {"gpu": 60, "dram": 10, "ssd": 10, "computed": 20},
        "prompt_tokens": 100,
        "job_time_s": {"mean": 5.0, "p95": 9.0},
    }
    assert figures(summary).keys() - {"way"} == plain.keys()
    assert figures(summary)["offload_share"] == pytest.approx(0.2)


def test_the_simulated_lmcache_stores_what_our_connector_makes_it_store() -> None:
    pytest.importorskip("lmcache")
    from connectors.lmcache.known_issues import with_defaults

    extra, _ = with_defaults({}, {}, WorkerSpec(True, 128, 8192, "tiny"))
    twin = lmcache_tiers(1.0, 2.0, 128)
    assert twin["save_decode_cache"] is extra["lmcache.save_decode_cache"]


def test_the_comparison_takes_ratios_seed_by_seed_and_gives_the_ranking(tmp_path: Path) -> None:
    shares = {"gpu_share": 0.5, "offload_share": 0.0, "computed_share": 0.5}
    means_s = {"measured": {"a": (10, 20), "b": (20, 30)}, "predicted": {"a": (11, 33), "b": (20, 30)}}
    rows = [
        {"label": label, "seed": seed, "way": way, "mean_s": mean_s, "p95_s": mean_s, **shares}
        for way, labels in means_s.items()
        for label, pair in labels.items()
        for seed, mean_s in enumerate(pair, 1)
    ]
    line = next(line for line in comparison(rows) if line[:2] == ["a", "predicted"])
    assert line[3] == "1.38 (1.1..1.65)"
    assert order(rows, "predicted", 2) == ["b", "a"]
    assert ranking(rows).endswith("predicted: the measured order in 1 of 2 seeds")
    write_csv(rows, tmp_path / "rows.csv")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(rows)
