"""The simulator: the clock in vLLM's modules, the step-time model, token streams, and the sweep's jobs."""

from __future__ import annotations

import ast
import importlib.util
import time
from pathlib import Path

import pytest
import yaml

from connectors.tier_model import chunk_names
from continuum_lmcache.errors import ProfileError
from continuum_lmcache.reload.cost_model import CostModel
from experiments.sim.clock import TIMED_MODULES, Timetable, VirtualClock, virtual_time
from experiments.sim.step_time import MACHINES, Machine
from experiments.sim.streams import SYSTEM, History, new_streams, stream_names
from experiments.workload import TurnSpec

A100 = MACHINES["a100"]
PROFILES = Path(__file__).resolve().parent.parent / "profiles"


def test_the_real_time_is_back_after_a_run_that_failed() -> None:
    from vllm.v1.core.sched import scheduler

    with pytest.raises(KeyError), virtual_time(VirtualClock(7.0)):
        assert scheduler.time.monotonic() == 7.0
        raise KeyError
    assert scheduler.time is time


def test_what_is_due_at_the_same_time_happens_in_the_order_entered() -> None:
    table, done = Timetable(), []
    for name, at_s in (("b", 1.0), ("a", 0.5), ("c", 1.0), ("d", 2.0)):
        table.at(at_s, lambda name=name: done.append(name))  # type: ignore[misc]
    table.run_due(1.0)
    assert done == ["a", "b", "c"] and table.next_s == 2.0


def modules_that_read_the_time(package: str) -> set[str]:
    """Modules of an installed package that use the module `time`, without importing them."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return {package} if reads_time(origin) else set()
    files = [p for place in spec.submodule_search_locations for p in Path(place).rglob("*.py")]
    folder = Path(next(iter(spec.submodule_search_locations)))
    named = {p: ".".join((package, *p.relative_to(folder).with_suffix("").parts)) for p in files}
    return {name.removesuffix(".__init__") for p, name in named.items() if reads_time(p)}


def reads_time(path: Path) -> bool:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert not any(isinstance(n, ast.ImportFrom) and n.module == "time" for n in nodes), path
    return any(
        isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "time" for n in nodes
    )


def test_no_module_of_vllm_on_the_simulated_path_reads_the_time_behind_the_clock() -> None:
    """vllm.v1.core, a request, and what an engine core says; all else of vLLM is not run here."""
    found = modules_that_read_the_time("vllm.v1.core") | modules_that_read_the_time("vllm.v1.request")
    assert found <= set(TIMED_MODULES)


# the step-time model


def test_a_step_takes_what_was_reported_of_an_a100() -> None:
    """0.20, 0.43 and 0.74 s for 2,048 tokens after 0, 30,000 and 70,000."""
    took_s = [A100.seconds([(2048, context)]) for context in (0, 30_000, 70_000)]
    assert took_s == pytest.approx([0.20, 0.43, 0.74], abs=0.01)
    chunks = [(min(2048, 70_000 - start), start) for start in range(0, 70_000, 2048)]
    assert sum(A100.seconds([chunk]) for chunk in chunks) == pytest.approx(15.8, rel=0.01)


def test_a_policy_gets_the_same_costs_as_the_machine_has() -> None:
    costs = CostModel.from_mapping(A100.policy_profile(chunk_tokens=128, ssd_gbps=2.0))
    assert costs.chunk_tokens == 128 and costs.ssd.bytes_per_s == 2e9 and costs.dram == A100.costs.dram
    chunks = [(2048, start) for start in range(0, 65_536, 2048)]
    assert costs.prefill_s(65_536) == pytest.approx(sum(A100.seconds([c]) for c in chunks), rel=0.01)
    assert not costs.measured and not any(machine.measured for machine in MACHINES.values())


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_here_is_a_machine_for_the_simulator_and_costs_for_a_server(path: Path) -> None:
    """A prefill takes in the simulator, step by step, about what the policy's profile says: one machine."""
    machine = Machine.from_profile(yaml.safe_load(path.read_text()), path.name)
    for tokens, context in ((512, 0), (2048, 0), (2048, 4096)):
        told_s = machine.costs.prefill_s(tokens, context)
        assert machine.seconds([(tokens, context)]) == pytest.approx(told_s, rel=0.1)


def test_a_profile_that_does_not_know_steps_is_refused_with_what_to_do() -> None:
    given = {key: value for key, value in A100.profile.items() if key != "step"}
    with pytest.raises(ProfileError, match="old.yaml has no section 'step'.*continuum-lmcache measure"):
        Machine.from_profile(given, "old.yaml")
    with pytest.raises(ProfileError, match="old.yaml: kv_tokens is None"):
        Machine.from_profile({k: v for k, v in A100.profile.items() if k != "kv_tokens"}, "old.yaml")
    stranger = {**A100.profile, "step": {**A100.profile["step"], "per_tokens_s": 1.0}}
    with pytest.raises(ProfileError, match="old.yaml, step: unknown key 'per_tokens_s'"):
        Machine.from_profile(stranger, "old.yaml")


# streams


def test_stream_names_agree_exactly_where_a_hash_over_the_prefix_does() -> None:
    streams = new_streams()
    turns = [TurnSpec(50, 50, 10), TurnSpec(80, 20, 10), TurnSpec(75, 40, 10), TurnSpec(99, 14, 1)]
    prompts = []
    for _ in range(3):
        history = History(streams, shared_tokens=30)
        for turn in turns:
            prompts.append(history.prompt(turn))
            assert len(prompts[-1]) == turn.input_tokens
            history.said(turn.output_tokens)
    for one in prompts:
        for other in prompts:
            by_stream = [a == b for a, b in zip(stream_names(one, 8), stream_names(other, 8), strict=False)]
            by_hash = [a == b for a, b in zip(chunk_names(one, 8), chunk_names(other, 8), strict=False)]
            assert by_stream == by_hash
    assert prompts[0][:30] == [SYSTEM] * 30
