"""The time of a step where two are in flight and the worker runs inside the engine, as on one GPU.

Virtual time; the profile is exact, so the learned pace should stay 1.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench import Bench, prompt

from continuum_lmcache.vllm_plugin.scheduler import ContinuumAsyncScheduler, ContinuumScheduler

FIXED_S, TOKEN_S, DECODE_S = 0.004, 1e-4, 0.012
RATE = {"bytes_per_s": 25e9, "fixed_s": 0.001, "samples": 9}
PROFILE = {
    "prefill": {"fixed_s": FIXED_S, "per_token_s": TOKEN_S, "per_pair_s": 0.0, "samples": 20},
    "dram": RATE,
    "ssd": RATE,
    "kv_bytes_per_token": 8,
    "chunk_tokens": 16,
}


class GpuBench(Bench):
    """Launches return at once."""

    def attach(self) -> None:
        self.gpu_free_s = 0.0
        self.step_seconds = lambda _: 0.0
        self.ends_s: dict[int, float] = {}
        rates = self.engine.learned.rates
        self.ratios: list[float] = []
        learn = rates.observe_prefill
        rates.observe_prefill = lambda took_s, predicted_s: (
            self.ratios.append(took_s / predicted_s),
            learn(took_s, predicted_s),
        )

    def scheduled(self, output: Any) -> None:
        counts = output.num_scheduled_tokens.values()
        new, began_s = sum(n for n in counts if n > 1), max(self.gpu_free_s, self.now_s)
        self.gpu_free_s = began_s + DECODE_S * (1 in counts) + (FIXED_S + TOKEN_S * new) * bool(new)
        self.ends_s[id(output)] = self.gpu_free_s

    def _deliver(self, output: Any, runner: Any) -> None:
        self.now_s = max(self.now_s, self.ends_s.pop(id(output))) + 1e-4
        super()._deliver(output, runner)


@pytest.fixture
def make(model: Path, settings: Any, tmp_path: Path) -> Any:
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(PROFILE))
    settings(policy="continuum", profile=tmp_path / "profile.yaml")

    def bench(cls: Any) -> GpuBench:
        made = GpuBench(cls, model, blocks=20_000, budget_tokens=2048)
        made.attach()
        return made

    return bench


@pytest.mark.parametrize("cls", [ContinuumScheduler, ContinuumAsyncScheduler])
def test_a_step_is_charged_with_its_own_seconds(cls: Any, make: Any) -> None:
    bench = make(cls)
    for number in range(12):
        bench.send(f"p{number}", prompt(3800, number), out=4)  # two chunks, then decodes
        for _ in range(9):
            bench.step()
    bench.run_until_idle()
    assert len(bench.ratios) >= 12
    assert min(bench.ratios) > 0.98 and max(bench.ratios) < 1.08
    assert math.exp(bench.engine.learned.rates.drifts["prefill"].log_slower) == pytest.approx(1.0, abs=0.03)
